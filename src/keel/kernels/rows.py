"""Rows of two tensors at once, for exchanges between ranks: gathered, and added back in order.

Keys and values travel as one buffer. Packing picks rows out of both and writes them side by side;
unpacking puts received rows into order, into both; one kernel each. Adding sums, for each row of
the owner, all copies that came back, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from keel.kernels.launch import Prepared, Tensors, launch

BLOCK = 1024
SIZES = ["first_width", "second_width", "first_from", "second_from", "first_to", "second_to"]

# fmt: off


@triton.jit
def _side(FIRST, SECOND, block, first_width, second_width, stride_first, stride_second,
          BLOCK: tl.constexpr):
    """(pointer, columns, width, row stride) of a block of columns: those of FIRST come first."""
    blocks = (first_width + BLOCK - 1) // BLOCK
    second = block >= blocks
    start = tl.where(second, block - blocks, block) * BLOCK
    cols = start + tl.arange(0, BLOCK)
    width = tl.where(second, second_width, first_width)
    stride = tl.where(second, stride_second, stride_first).to(tl.int64)
    return tl.where(second, SECOND, FIRST), cols, width, stride


@triton.jit
def copy_rows_kernel(
    FIRST, SECOND, FIRST_OUT, SECOND_OUT, INDEX,
    first_width, second_width, first_from, second_from, first_to, second_to,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1)
    source = tl.load(INDEX + row)
    X, cols, width, stride = _side(
        FIRST, SECOND, block, first_width, second_width, first_from, second_from, BLOCK)
    x = tl.load(X + source * stride + cols, mask=cols < width)
    Y, cols, width, stride = _side(
        FIRST_OUT, SECOND_OUT, block, first_width, second_width, first_to, second_to, BLOCK)
    tl.store(Y + row.to(tl.int64) * stride + cols, x, mask=cols < width)


@triton.jit
def add_rows_kernel(
    FIRST, SECOND, FIRST_OUT, SECOND_OUT, ROWS, BOUNDS, PLACES,
    first_width, second_width, first_from, second_from, first_to, second_to,
    BLOCK: tl.constexpr,
):
    number, block = tl.program_id(0), tl.program_id(1)
    row = tl.load(ROWS + number)
    begin, end = tl.load(BOUNDS + number), tl.load(BOUNDS + number + 1)
    Y, cols, width, stride_to = _side(
        FIRST_OUT, SECOND_OUT, block, first_width, second_width, first_to, second_to, BLOCK)
    X, cols, width, stride = _side(
        FIRST, SECOND, block, first_width, second_width, first_from, second_from, BLOCK)
    total = tl.load(Y + row * stride_to + cols, mask=cols < width, other=0.0)
    for n in range(begin, end):  # the order of the ranks
        place = tl.load(PLACES + n)
        total += tl.load(X + place * stride + cols, mask=cols < width, other=0.0).to(total.dtype)
    tl.store(Y + row * stride_to + cols, total, mask=cols < width)


# fmt: on


def copy_rows(
    sources: tuple[torch.Tensor, torch.Tensor],
    targets: tuple[torch.Tensor, torch.Tensor],
    index: torch.Tensor,
) -> None:
    """targets[t][i] = sources[t][index[i]]; all (rows, columns) with contiguous columns."""
    tensors = _named(sources, targets) | {"INDEX": index}
    launch(copy_rows_kernel, "copy", tensors, lambda: _prepared(sources, targets, len(index)))


def add_rows(
    sources: tuple[torch.Tensor, torch.Tensor],
    targets: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    bounds: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """targets[t][rows[n]] += the sum of sources[t][p] for p in places[bounds[n]:bounds[n + 1]]."""
    tensors = _named(sources, targets) | {"ROWS": rows, "BOUNDS": bounds, "PLACES": places}
    launch(add_rows_kernel, "add", tensors, lambda: _prepared(sources, targets, len(rows)))


def _named(
    sources: tuple[torch.Tensor, torch.Tensor], targets: tuple[torch.Tensor, torch.Tensor]
) -> Tensors:
    names = ("FIRST", "SECOND", "FIRST_OUT", "SECOND_OUT")
    return dict(zip(names, (*sources, *targets), strict=True))


def _prepared(
    sources: tuple[torch.Tensor, torch.Tensor],
    targets: tuple[torch.Tensor, torch.Tensor],
    num_rows: int,
) -> Prepared | None:
    widths = [x.shape[1] for x in sources]
    blocks = sum(-(-width // BLOCK) for width in widths)
    if num_rows == 0 or blocks == 0:
        return None
    sizes = (*widths, *(x.stride(0) for x in (*sources, *targets)))
    return Prepared((num_rows, blocks), {**dict(zip(SIZES, sizes, strict=True)), "BLOCK": BLOCK})
