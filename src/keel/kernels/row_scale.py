"""Rows of many tensors scaled in one launch, and rows whose factor is 1 left alone.

A *run* is a stretch of memory that has one factor: the rows of one head in one parameter. Which
runs have work is known on the device only, so programs of the others look at their factor and end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from keel.kernels.launch import Prepared, launch

BLOCK = 2048
"""Elements that a program takes at a time."""
SPLITS = 6
"""Programs for each run: more of them finish a clipped head sooner, fewer an idle step."""

# fmt: off


@triton.jit
def row_scale_kernel(
    FACTOR, ENTRY, TARGET, SOURCE, COUNT, TARGET_LIKE, SOURCE_LIKE,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, ALIGNED: tl.constexpr, COPY: tl.constexpr,
):
    """Run by run, target = source * factor; with COPY target = source where the factor is not 1.

    TARGET and SOURCE hold addresses of elements of the dtypes of TARGET_LIKE and SOURCE_LIKE.
    """
    run = tl.program_id(0)
    factor = tl.load(FACTOR + tl.load(ENTRY + run))
    if factor != 1.0:
        count = tl.load(COUNT + run)
        source, target = tl.load(SOURCE + run), tl.load(TARGET + run)
        source = source.to(tl.pointer_type(SOURCE_LIKE.dtype.element_ty))
        target = target.to(tl.pointer_type(TARGET_LIKE.dtype.element_ty))
        if ALIGNED:  # said of addresses and of what the mask compares with, or loads are narrow
            source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
            count = tl.multiple_of(count, 16)
        for first in range(tl.program_id(1) * BLOCK, count, SPLITS * BLOCK):
            i = first + tl.arange(0, BLOCK)
            x = tl.load(source + i, mask=i < count)
            if not COPY:
                x = x.to(factor.dtype) * factor
            tl.store(target + i, x.to(TARGET_LIKE.dtype.element_ty), mask=i < count)


# fmt: on


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of tensors of one dtype, on their device."""

    entries: torch.Tensor
    """(runs,) int32: which factor is whose."""
    targets: torch.Tensor
    """(runs,) int64 addresses."""
    sources: torch.Tensor
    """(runs,) int64 addresses; the targets themselves, or what is copied to them."""
    counts: torch.Tensor
    """(runs,) int32 elements."""
    target_like: torch.Tensor
    """Any tensor of the targets' dtype."""
    source_like: torch.Tensor
    aligned: bool
    """All addresses and counts are multiples of 16."""


def scale_runs(factor: torch.Tensor, runs: Runs, *, copy: bool = False) -> None:
    """target = source * factor[entry]; with `copy`, target = source where that is not 1.

    factor (entries,) must be at least as wide as the targets' dtype.
    """
    launch(
        row_scale_kernel,
        (runs.aligned, copy),
        {
            **{"FACTOR": factor, "ENTRY": runs.entries, "COUNT": runs.counts},
            **{"TARGET": runs.targets, "SOURCE": runs.sources},
            **{"TARGET_LIKE": runs.target_like, "SOURCE_LIKE": runs.source_like},
        },
        lambda: Prepared(
            (len(runs.entries), SPLITS),
            {"BLOCK": BLOCK, "SPLITS": SPLITS, "ALIGNED": runs.aligned, "COPY": copy},
            num_warps=4,
        ),
    )
