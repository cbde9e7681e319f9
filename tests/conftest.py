"""What every test needs to know: where `tests` is found, and whether there is a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# importlib mode leaves sys.path alone; tests share strategies as `tests.strategies`.
ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


# Busy machines stall; where time matters a test measures it. CI draws the same examples each time,
# so that it judges the change and not the dice; other runs go on looking for new ones.
settings.register_profile("keel", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("keel")


def pytest_runtest_setup() -> None:
    if "CI" in os.environ:
        torch.manual_seed(0)


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
