"""How gradients that were summed in fp32 leave: scaled, parts added up, rounded; in one launch.

dq = scale · dq32, and where query heads were cut into parts, dk and dv are the sums of theirs, in
the order of the parts. Shapes: dq (tq, hq, d), dk (tk, hk, d), their parts (tk, hk · splits, d).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from keel.kernels.flash_common import HAS_PTX
from keel.kernels.launch import Prepared, Recipe, launch

BLOCK = 4096
EIGHT = tl.constexpr(8)
"""Sizes come in eighths: a mask that could end anywhere takes loads apart, and twice the time."""

# fmt: off


@triton.jit
def _add_up(
    PARTS, SUM, scale, block, eighths, splits, DIM: tl.constexpr, BLOCK: tl.constexpr,
):
    """SUM = scale · (sum of parts), for parts (rows, splits, DIM)."""
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < eighths.to(tl.int64) * EIGHT
    first = PARTS + at + (at // DIM) * (DIM * (splits - 1))
    total = tl.load(first, mask=inside)
    for part in range(1, splits):  # not unrolled: masks differ in it, and would wait for compilers
        total += tl.load(first + part * DIM, mask=inside)
    tl.store(SUM + at, (total * scale).to(SUM.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["dq_eighths", "dk_eighths", "dv_eighths", "splits"])
def gradient_sums_kernel(
    DQ32, DQ, DK_OUT, DK, DV_OUT, DV, scale, dq_eighths, dk_eighths, dv_eighths, splits,
    HAS_PARTS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Blocks of dq come last; dk and dv are ready where there are no parts, dq without DQ32."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    if not HAS_PARTS:
        _add_up(DQ32, DQ, scale, block, dq_eighths, 1, DIM_K, BLOCK)
    else:
        dk_blocks = tl.cdiv(dk_eighths, BLOCK // EIGHT)
        dv_blocks = tl.cdiv(dv_eighths, BLOCK // EIGHT)
        if block < dk_blocks:
            _add_up(DK_OUT, DK, 1.0, block, dk_eighths, splits, DIM_K, BLOCK)
        elif block < dk_blocks + dv_blocks:
            _add_up(DV_OUT, DV, 1.0, block - dk_blocks, dv_eighths, splits, DIM_V, BLOCK)
        elif DQ32 is not None:
            _add_up(DQ32, DQ, scale, block - dk_blocks - dv_blocks, dq_eighths, 1, DIM_K, BLOCK)


# fmt: on


def gradient_sums(
    dq32: torch.Tensor | None,
    dq: torch.Tensor,
    dk_out: torch.Tensor,
    dk: torch.Tensor,
    dv_out: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    splits: int,
    *,
    early: bool = False,
) -> Recipe:
    """Fills dq if there is dq32, and dk and dv if there are parts.

    All are contiguous, with head dims that are multiples of 8.

    dk_out and dv_out: the parts; with one, dk and dv themselves. early: see `early_launches`.
    """
    tensors = {"DQ": dq, "DK_OUT": dk_out, "DK": dk, "DV_OUT": dv_out, "DV": dv}
    assert all(x.is_contiguous() and x.shape[2] % 8 == 0 for x in tensors.values())
    assert splits > 1 or dq32 is not None, "there is nothing to do"

    def prepare() -> Prepared:
        summed = ([] if dq32 is None else [dq]) + ([dk, dv] if splits > 1 else [])
        eighths = {f"{n}_eighths": tensors[n.upper()].numel() // 8 for n in ("dq", "dk", "dv")}
        return Prepared(
            (sum(triton.cdiv(x.numel(), BLOCK) for x in summed),),
            {
                **{"scale": scale, **eighths, "splits": splits},
                **{"DIM_K": dk.shape[2], "DIM_V": dv.shape[2], "BLOCK": BLOCK},
                **{"HAS_PARTS": splits > 1, "EARLY": early and HAS_PTX},
            },
            num_warps=8,
            early=early,
            left_out=(
                *(() if splits > 1 else ("DK_OUT", "DK", "DV_OUT", "DV")),
                *(() if dq32 is not None else ("DQ32", "DQ")),
            ),
        )

    return launch(gradient_sums_kernel, (scale, splits, early), {**tensors, "DQ32": dq32}, prepare)
