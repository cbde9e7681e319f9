"""A training run that can be killed: what `keel demo` and examples/train_gpt.py run."""

from keel.training.comparison import Check, Comparison, compare_runs
from keel.training.config import RUNS, TrainConfig
from keel.training.launch import Progress, RunFailed, train

__all__ = [
    "RUNS",
    "Check",
    "Comparison",
    "Progress",
    "RunFailed",
    "TrainConfig",
    "compare_runs",
    "train",
]
