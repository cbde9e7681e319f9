"""dst = scale · src, rounded to the dtype of dst: how sums in fp32 leave."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from keel.kernels.launch import Prepared, launch

BLOCK = 4096


@triton.jit(do_not_specialize=["size"])
def scaled_copy_kernel(SRC, DST, scale, size, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:  # a mask that may end anywhere takes loads apart, and twice the time
        x = tl.load(SRC + at)
        tl.store(DST + at, (x * scale).to(DST.dtype.element_ty))
    else:
        x = tl.load(SRC + at, mask=at < size)
        tl.store(DST + at, (x * scale).to(DST.dtype.element_ty), mask=at < size)


def scaled_copy(src: torch.Tensor, dst: torch.Tensor, scale: float) -> None:
    """src is contiguous and on a GPU, and as long as dst."""
    size = src.numel()
    if size == 0 or not dst.is_contiguous() or not src.is_cuda:
        torch.mul(src, scale, out=dst)
        return
    launch(
        scaled_copy_kernel,
        scale,
        {"SRC": src, "DST": dst},
        lambda: Prepared(
            (triton.cdiv(size, BLOCK),),
            {"scale": scale, "size": size, "BLOCK": BLOCK, "EVEN": size % BLOCK == 0},
            num_warps=8,
        ),
    )
