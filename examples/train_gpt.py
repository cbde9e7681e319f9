"""Trains a small GPT on Python's own standard library, with Muon and with MuonClip.

    python examples/train_gpt.py            # checkpoints and picture in runs/demo/
    python examples/train_gpt.py --steps 300 --lr 0.1 --out runs/longer

The same as `keel demo train`; `--help` lists the options. What a step does is in
src/keel/training/run.py: packed documents, context parallelism, one all-reduce, the optimizer.
"""

import typer

from keel.cli_demo import train

if __name__ == "__main__":  # ranks are processes that import this file again
    typer.run(train)
