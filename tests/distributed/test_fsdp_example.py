"""The example of FSDP2 and context parallelism learns, clips, and resumes to the same numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*args: str) -> tuple[int, dict[int, float], str]:
    """(first step, losses by step, last line) of two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "fsdp_cp.py"), *args],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.strip().splitlines()
    start = re.search(r"begins at step (\d+)", lines[0])
    found = (re.match(r"step (\d+) loss ([\d.]+)", line) for line in lines[1:-1])
    losses = {int(x[1]): float(x[2]) for x in found if x}
    assert start is not None
    return int(start[1]), losses, lines[-1]


def test_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    args = "--steps", "12", "--save-every", "6", "--out", str(tmp_path)
    start, losses, last = run(*args)
    assert start == 0 and list(losses) == list(range(1, 13))
    assert losses[12] < 0.75 * losses[1]
    clips = re.fullmatch(r"weights [\d.]+, heads clipped (\d+) times", last)
    assert clips is not None and int(clips[1]) > 0
    # As if it had been killed while it wrote the last one; computing again changes no bit.
    (tmp_path / "step-000012" / ".metadata").unlink()
    again, resumed, end = run(*args, "--recompute")
    assert again == 6 and resumed == {n: x for n, x in losses.items() if n > 6} and end == last
