"""What every test needs to know: where `tests` is found, and whether there is a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# importlib mode leaves sys.path alone; tests share strategies as `tests.strategies`.
ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


def pytest_configure(config: pytest.Config) -> None:
    # CPUs without bf16 instructions say at length that a slower product is used.
    config.addinivalue_line("filterwarnings", "ignore:mkldnn_matmul failed:UserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    without_gpu = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(without_gpu)
