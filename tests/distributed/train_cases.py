"""A short training run as a program of its own, so that it can be killed.

python train_cases.py FOLDER    prints each step that is done, then "finished"
"""

from __future__ import annotations

import sys
from pathlib import Path

from keel.training import Progress, TrainConfig, train

CONFIG = TrainConfig(
    steps=6, tokens=96, num_layers=2, hidden_size=32, num_heads=2, tau=2.0, warmup=1, cooldown=2
)


def main(folder: Path) -> None:
    def say(progress: Progress) -> None:
        print(progress.run, progress.step, flush=True)

    train(CONFIG, folder, say, save_every=2)
    print("finished", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
