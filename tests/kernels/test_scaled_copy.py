"""Sums in fp32 that leave scaled, in another dtype."""

from __future__ import annotations

import os

import pytest
import torch
import triton

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from keel.kernels.scaled_copy import scaled_copy, scaled_copy_kernel


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 63, 64, 200, 256])
def test_kernel(size, dtype):
    src = torch.randn(size)
    dst = torch.full((size + 5,), torch.nan, dtype=dtype)
    grid = (triton.cdiv(size, 64),)
    scaled_copy_kernel[grid](src, dst, 0.3, size, BLOCK=64, EVEN=size % 64 == 0)
    torch.testing.assert_close(dst[:size], (src * 0.3).to(dtype))
    assert dst[size:].isnan().all()


def test_what_the_kernel_does_not_take():
    src, dst = torch.randn(6, 4), torch.empty(4, 6).T
    scaled_copy(src, dst, 2.0)
    assert torch.equal(dst, src * 2)
    scaled_copy(torch.empty(0), torch.empty(0), 2.0)
