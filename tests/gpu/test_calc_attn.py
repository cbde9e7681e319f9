"""Context parallelism on one GPU: processes share it and talk through gloo and host memory."""

from __future__ import annotations

import pytest
import torch
from tests.distributed import cases

from keel.testing import run_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("degree", [0, 2])
def test_two_processes_on_one_gpu(dtype, degree):
    options = {"degree": degree, "balance": "solver"}
    arguments = (dtype, options, "cuda", "triton")
    for broken in run_ranks(cases.check_by_the_rule, 2, *arguments, timeout=400):
        assert not broken
