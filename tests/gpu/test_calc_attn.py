"""Context parallelism on one GPU: processes share it and talk through gloo and host memory."""

from __future__ import annotations

import pytest
import torch
from tests.distributed import cases

from keel.testing import run_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("turn", [0, 1])
def test_two_processes_on_one_gpu(dtype, turn):
    """Every mask, degree and balance, by the schedule; rows go through pinned memory."""
    arguments = (dtype, turn, "cuda", "triton")
    for broken in run_ranks(cases.check_by_the_rule, 2, *arguments, timeout=400):
        assert not broken
