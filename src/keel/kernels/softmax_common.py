"""What the softmax kernels share: which rows a program owns, which columns those see, fills.

Scores are (b, h, sq, sk) with contiguous columns. A row sees the columns of a band
``lo <= j - i <= hi`` (causal and sliding windows), less what a mask tensor takes away. Programs own
whole rows. Outside the band nothing is read or computed; results there are zeros, written with
streaming stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from keel.kernels.flash_common import HAS_PTX

ALIGN = tl.constexpr(16)
"""Reads start and end at multiples of this many columns where rows allow it: whole sectors."""

UNIT = 8
"""Columns of a vector: 16 bytes of 16-bit scores. Where all rows start at multiples of it, sizes
are passed in units of it, so that the compiler knows. Other rows are *skewed*: they are read from
the start of the vector in which they begin, and column c stands at c + skew."""

VECTOR = tl.constexpr(UNIT)

# fmt: off


@triton.jit
def rows_of_program(
    program, heads, sq, ROWS: tl.constexpr, TURN: tl.constexpr, ENDS_MEET: tl.constexpr,
):
    """(batch, head, first row, row numbers, which of them exist).

    TURN: heads take turns of so many tiles, so that a mask which they share is read from memory
    once; 0: one head after the other.
    ENDS_MEET: rows from the top and from the bottom alternate, so that under a causal band reads
    and writes keep the same proportion all the time.
    """
    tiles = (sq + ROWS - 1) // ROWS
    if TURN > 0:
        turns = (tiles + TURN - 1) // TURN
        turn = program // TURN // heads
        batch, head = turn // turns, program // TURN % heads
        tile = turn % turns * TURN + program % TURN
    else:
        batch, head, tile = program // tiles // heads, program // tiles % heads, program % tiles
    if ENDS_MEET:
        tile = tl.where(tile % 2 == 0, tile // 2, tiles - 1 - tile // 2)
    i = tile * ROWS + tl.arange(0, ROWS)
    return batch, head, tile * ROWS, i, (i >= 0) & (i < sq)


@triton.jit
def whole(offset, SKEWED: tl.constexpr):
    """Where a row starts, as (start of that vector, columns between the two)."""
    skew = offset % VECTOR if SKEWED else offset * 0
    return offset // VECTOR * VECTOR if SKEWED else offset, skew.to(tl.int32)


@triton.jit
def reach(sk, SKEWED: tl.constexpr):
    """The place behind the last vector of sk columns, however skewed."""
    return (sk + 2 * VECTOR - 2) // VECTOR * VECTOR if SKEWED else sk


@triton.jit
def span(
    first, i, skew, sq, sk, lo, hi,
    ROWS: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, STEP: tl.constexpr,
    SKEWED: tl.constexpr,
):
    """(begin, end, ends): places [begin, end) hold all that these rows see, [begin, ends) what
    each of them does; begin is a multiple of ALIGN.
    """
    begin = 0
    end = sk
    ends = tl.zeros_like(i) + sk
    if HAS_LO:
        begin = tl.minimum(tl.maximum(first + lo, 0), sk) // ALIGN * ALIGN
    if HAS_HI:
        last = tl.minimum(first + ROWS, sq) - 1
        end = tl.minimum(tl.maximum(last + hi + 1, begin), sk)
        ends = tl.minimum(tl.maximum(i + hi + 1, begin), sk)
        if STEP > 1:
            end = tl.minimum((end + ALIGN - 1) // ALIGN * ALIGN, sk)
            ends = tl.minimum((ends + ALIGN - 1) // ALIGN * ALIGN, sk)
    if SKEWED:  # whole vectors, also where the last one holds columns of the next row
        end = reach(end, SKEWED)
        ends = (ends + skew + VECTOR - 1) // VECTOR * VECTOR
    return begin, end, ends


@triton.jit
def written(there, cols, skew, sk, EXACT: tl.constexpr, SKEWED: tl.constexpr):
    """(ROWS, WIDTH): the places to write, in whole vectors; `edges` has what remains."""
    if SKEWED:
        head = (skew + VECTOR - 1) // VECTOR * VECTOR
        tail = (skew + sk) // VECTOR * VECTOR
        return (there[:, None] & (cols[None, :] >= head[:, None])
                & (cols[None, :] < tail[:, None]))
    return within(there, cols, skew + sk, EXACT)


@triton.jit
def edges(there, cols, skew, sk):
    """(ROWS, WIDTH): places of a row in vectors that it shares with its neighbours."""
    head = (skew + VECTOR - 1) // VECTOR * VECTOR
    tail = (skew + sk) // VECTOR * VECTOR
    own = (cols >= skew[:, None]) & (cols < (skew + sk)[:, None])
    return there[:, None] & own & ((cols < head[:, None]) | (cols >= tail[:, None]))


@triton.jit
def edge_cols(skew, sk):
    """(ROWS, 2 * VECTOR): the places of both of these vectors."""
    lane = tl.arange(0, 2 * VECTOR)[None, :]
    tail = (skew + sk) // VECTOR * VECTOR
    return tl.where(lane < VECTOR, lane, tail[:, None] + lane - VECTOR)


@triton.jit
def fill_around(Y, value, begin, end, there, skew, sk, SKEWED: tl.constexpr):
    """Writes value (ROWS,) to all columns of rows but places [begin, end), multiples of VECTOR."""
    fill(Y, value, 0, begin, there, skew, sk, SKEWED)
    fill(Y, value, end, reach(sk, SKEWED), there, skew, sk, SKEWED)
    if SKEWED:
        cols = edge_cols(skew, sk)
        block = tl.zeros(cols.shape, tl.float32) + value[:, None]
        tl.store(Y + cols, block.to(Y.dtype.element_ty),
                 mask=edges(there, cols, skew, sk) & ((cols < begin) | (cols >= end)))


@triton.jit
def store_row(
    Y, value, cols, there, skew, sk,
    part: tl.constexpr, PARTS: tl.constexpr, HAS_LO: tl.constexpr, EXACT: tl.constexpr,
    SKEWED: tl.constexpr,
):
    """Writes value (ROWS, WIDTH) to places cols (WIDTH,), block number `part` of a row's."""
    value = value.to(Y.dtype.element_ty)
    tl.store(Y + cols[None, :], value, cache_modifier=".cs",
             mask=written(there, cols, skew, sk, EXACT, SKEWED))
    # Rows begin in the first block and end in one of the last two, unless blocks begin anywhere.
    if SKEWED and (part == 0 or part >= PARTS - 2 or HAS_LO):
        tl.store(Y + cols[None, :], value, mask=edges(there, cols[None, :], skew, sk))


@triton.jit
def within(there, cols, ends, EXACT: tl.constexpr):
    """(ROWS, WIDTH): the columns that rows read, all of them where that is known beforehand."""
    if EXACT:
        return tl.full([there.shape[0], cols.shape[0]], 1, tl.int1)
    return there[:, None] & (cols[None, :] < ends[:, None])


@triton.constexpr_function
def class_width(WIDTH, PARTS, c):
    """Columns of a block in the code for class c of spans: narrower if a row is one block."""
    return WIDTH >> c if PARTS == 1 else WIDTH


@triton.constexpr_function
def class_parts(PARTS, CLASSES, c):
    """Blocks there: all of them for class 0, one for the last."""
    return PARTS - c * (PARTS - 1) // max(1, CLASSES - 1)


@triton.constexpr_function
def class_span(WIDTH, PARTS, CLASSES, c):
    """Columns that class c can take; beyond the last, less than nothing."""
    if c >= CLASSES:
        return -1
    return class_width(WIDTH, PARTS, c) * class_parts(PARTS, CLASSES, c)


@triton.jit
def max_of_parts(parts, PARTS: tl.constexpr):
    """(ROWS,) of blocks (ROWS, WIDTH): lanes of one thread first, then once over all lanes."""
    top = parts[0]
    for part in tl.static_range(1, PARTS):
        top = tl.maximum(top, parts[part])
    return tl.max(top, 1)


@triton.jit
def sum_of_parts(parts, PARTS: tl.constexpr):
    total = parts[0]
    for part in tl.static_range(1, PARTS):
        total += parts[part]
    return tl.sum(total, 1)


@triton.jit
def again(x, PTX: tl.constexpr):
    """x, but the compiler may not remember what it made of x before.

    Sixteen-bit values take half the registers of the fp32 numbers made from them; converting twice
    is cheaper than keeping those.
    """
    if PTX and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def fill(Y, value, begin, end, there, skew, sk, SKEWED: tl.constexpr):
    """Writes value (ROWS,) to places [begin, end) of rows; begin is a multiple of VECTOR."""
    FILL: tl.constexpr = 1024 if value.shape[0] < 4 else 2048 // value.shape[0]
    for start in range(begin, end, FILL):
        cols = start + tl.arange(0, FILL)
        block = tl.zeros([1, FILL], tl.float32) + value[:, None]
        inside = there[:, None] & (cols < end)[None, :]
        if SKEWED:
            inside = inside & written(there, cols, skew, sk, False, True)
        tl.store(Y + cols[None, :], block.to(Y.dtype.element_ty), mask=inside,
                 cache_modifier=".cs")


# fmt: on


@dataclass(frozen=True, slots=True)
class RowConfig:
    """Rows per program, columns at a time, warps; and whether a row stays in registers."""

    rows: int
    width: int
    num_warps: int
    one_pass: bool
    parts: int = 1
    """Blocks of `width` columns that make a row which stays in registers."""
    packed: bool = False
    """Keep 16-bit values between the steps of a pass, not the fp32 numbers made from them."""
    stages: int = 0
    """Programs stay, one for each SM, and read this many rows ahead (less one)."""
    max_registers: int | None = None
    """Per thread. Two passes want just as many programs side by side as the L2 can serve."""


def width_for(sk: int) -> int:
    """The power of two that holds a row."""
    return max(16, triton.next_power_of_2(sk))


def in_blocks(sk: int, least: int = 64, **options: Any) -> RowConfig:
    """A row as blocks of one vector per thread: five to seven of them between powers of two.

    Eight would be too much for the registers: from there on, four of twice the width.
    """
    columns = max(least, width_for(sk) // 8)
    if sk > 7 * columns and "stages" not in options:
        columns *= 2
    rows, warps = max(1, 256 // columns), max(1, columns // 256)
    return RowConfig(rows, columns, warps, True, parts=-(-sk // columns), **options)


def clamped(band: tuple[int, int], sq: int, sk: int) -> tuple[int, int]:
    return max(-sq, min(band[0], sk)), max(-sq, min(band[1], sk))


def is_banded(band: tuple[int, int], sq: int, sk: int) -> bool:
    """Whether a clamped band hides anything."""
    return band[0] > 1 - sq or band[1] < sk - 1


def unit_of(sk: int, *tensors: torch.Tensor | None) -> int:
    """UNIT if every row of the tensors (b, h, sq, sk) starts at a multiple of it, else 1."""
    steps = [n for x in tensors if x is not None for n in x.stride()[:3]]
    return UNIT if all(n % UNIT == 0 for n in (sk, *steps)) else 1


def in_step(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether every row of x starts at the same place of a vector as that of y, which is dense."""
    steps = zip(x.shape[:3], x.stride()[:3], y.stride()[:3], strict=True)
    same = all((a - b) % UNIT == 0 for n, a, b in steps if n > 1)
    return same and x.data_ptr() % 16 == y.data_ptr() % 16 == 0


def row_strides(name: str, x: torch.Tensor, unit: int) -> dict[str, int]:
    return {f"stride_{name}{dim}": n // unit for dim, n in zip("bhi", x.stride(), strict=False)}


def shape_constants(
    config: RowConfig, band: tuple[int, int], sq: int, sk: int, unit: int
) -> dict[str, int | bool]:
    if config.one_pass:  # `store_row` looks for the row's end in the last two blocks
        assert (config.parts - 1) * config.width < sk + UNIT, f"{config} has blocks beyond {sk}"
    # A side of the band that hides nothing costs nothing.
    has_lo, has_hi = band[0] > 1 - sq, band[1] < sk - 1
    # A class must leave each thread something to do.
    smallest = config.num_warps * 32 * 2 // config.rows
    classes = 1
    if (has_lo or has_hi) and config.parts > 1:
        classes = min(config.parts, 4)
    while (has_lo or has_hi) and config.parts == 1 and classes < 4:
        if config.width >> classes < max(smallest, 64):
            break
        classes += 1
    return {
        **{"ROWS": config.rows, "WIDTH": config.width, "PARTS": config.parts},
        **{
            "ONE_PASS": config.one_pass,
            "PACKED": config.packed,
            "CLASSES": classes,
            "STEP": unit,
            "PTX": HAS_PTX,
        },
        # Two passes live on the L2; rows of one kind of length at a time suit it badly.
        **{"HAS_LO": has_lo, "HAS_HI": has_hi, "ENDS_MEET": has_hi and not config.one_pass},
    }
