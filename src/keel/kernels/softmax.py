"""Fused scale + softcap + mask + softmax, forward and backward, in Triton.

Scores are (b, h, sq, sk) with contiguous columns. A row sees the columns of a band
``lo <= j - i <= hi`` (causal and sliding windows), less what a mask tensor takes away. Programs own
whole rows. Rows of usual length stay in registers between reading and writing, so memory is touched
once; long ones are read twice, the second time in part from the L2. Outside the band nothing is
read or computed; results there are zeros, written with streaming stores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from keel.kernels.flash_common import HAS_PTX, LN2, LOG2E, raise_max, tanh
from keel.kernels.launch import Prepared, Tensors, launch

ALIGN = tl.constexpr(16)
"""Reads start and end at multiples of this many columns, so that they are wide."""

SIZES = ["heads", "sq", "lo", "hi"]

# fmt: off


@triton.jit
def _rows_of_program(heads, sq, ROWS: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """(batch, head, first row, row numbers, which of them exist).

    HEADS_FIRST: the same rows of all heads run side by side, for a mask that they share.
    """
    tiles = (sq + ROWS - 1) // ROWS
    program = tl.program_id(0)
    if HEADS_FIRST:
        batch, head, tile = program // heads // tiles, program % heads, program // heads % tiles
    else:
        batch, head, tile = program // tiles // heads, program // tiles % heads, program % tiles
    i = tile * ROWS + tl.arange(0, ROWS)
    return batch, head, tile * ROWS, i, i < sq


@triton.jit
def _span(first, sq, sk, lo, hi, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """Columns [begin, end) that hold all that these rows may see; begin is a multiple of ALIGN."""
    last = tl.minimum(first + ROWS, sq) - 1
    begin = tl.minimum(tl.maximum(first + lo, 0), sk) // ALIGN * ALIGN
    end = tl.minimum(tl.maximum(last + hi + 1, 0), sk)
    if ALIGNED:  # then sk is a multiple, too
        end = (end + ALIGN - 1) // ALIGN * ALIGN
    return begin, tl.maximum(begin, end)


@triton.jit
def _exp(difference, FP32: tl.constexpr):
    """exp of a difference of logits.

    Logits of 16-bit scores are kept in units of log2, which saves a product per exponential; those
    of fp32 scores are not, since they would lose their last bits where logits are large.
    """
    return tl.exp2(difference * LOG2E if FP32 else difference)


@triton.jit
def _again(x, PTX: tl.constexpr):
    """x, but the compiler may not remember what it made of x before.

    Sixteen-bit values take half the registers of the fp32 numbers made from them; converting twice
    is cheaper than keeping those.
    """
    if PTX and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _logits(
    x, MASK, cols, i, inside, sk, lo, hi, stride_mj, scale, softcap,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, MASK_KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, FP32: tl.constexpr,
):
    """(logits, logits before the softcap) in the units of `_exp`; -inf where a row does not see.

    MASK points at the start of each row, (ROWS, 1).
    """
    unit = 1.0 if FP32 else LOG2E
    s = x.to(tl.float32) * (scale * unit)
    raw = s
    if HAS_SOFTCAP:
        s = softcap * unit * tanh(s / (softcap * unit))
    keep = inside
    if HAS_HI:
        keep = cols[None, :] <= tl.minimum(i + hi, sk - 1)[:, None]
    if HAS_LO:
        keep = keep & (cols[None, :] >= (i + lo)[:, None])
    if MASK_KIND == 1:
        hidden = tl.load(MASK + cols[None, :] * stride_mj, mask=inside, other=1)
        keep = keep & (hidden == 0)
    if MASK_KIND == 2:
        added = tl.load(MASK + cols[None, :] * stride_mj, mask=inside, other=0.0)
        added = added.to(tl.float32) * unit
        s += added
        raw += added
    return tl.where(keep, s, float("-inf")), tl.where(keep, raw, float("-inf"))


@triton.jit
def _fill(Y, value, begin, end, there):
    """Writes value (ROWS,) to columns [begin, end) of rows; begin is a multiple of ALIGN."""
    FILL: tl.constexpr = 1024 if value.shape[0] < 4 else 2048 // value.shape[0]
    for start in range(begin, end, FILL):
        cols = start + tl.arange(0, FILL)
        block = tl.zeros([1, FILL], tl.float32) + value[:, None]
        tl.store(Y + cols[None, :], block.to(Y.dtype.element_ty),
                 mask=there[:, None] & (cols < end)[None, :], cache_modifier=".cs")


@triton.jit
def _close(
    top, total, sink, sk, HAS_SINK: tl.constexpr, UNIFORM: tl.constexpr, FP32: tl.constexpr,
):
    """What turns a row's maximum and sum of exponentials into probabilities, the sink included.

    (shift, 1 / total, shift's change as a factor, probability in rows that see nothing, lse)
    """
    shift = tl.where(top == float("-inf"), 0.0, top)
    decay = tl.full(total.shape, 1.0, tl.float32)
    if HAS_SINK:
        new_top = tl.maximum(top, sink)
        new_shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.where(top == float("-inf"), 1.0, _exp(shift - new_shift, FP32))
        total = total * decay + _exp(sink - new_shift, FP32)
        shift = new_shift
    empty = total == 0.0
    factor = tl.where(empty, 0.0, 1.0 / total)
    nothing = tl.zeros_like(total)
    if UNIFORM and not HAS_SINK:
        nothing = tl.where(empty, 1.0 / sk, 0.0)
    shift_ln = shift if FP32 else shift * LN2
    lse = tl.where(empty, float("-inf"), shift_ln + tl.log2(total) * LN2)
    return shift, factor, decay, nothing, lse


@triton.jit
def _forward_in_registers(
    X, Y, MASK, i, there, begin, end, sk, lo, hi, stride_mj, scale, softcap, sink,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    MASK_KIND: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINK: tl.constexpr,
    UNIFORM: tl.constexpr, FP32: tl.constexpr, PTX: tl.constexpr,
):
    """Rows whose span fits WIDTH columns: (maximum before the softcap in _exp's units, lse)."""
    cols = begin + tl.arange(0, WIDTH)
    inside = there[:, None] & (cols < end)[None, :]
    x = tl.load(X + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
    FILL_FIRST: tl.constexpr = (HAS_LO or HAS_HI) and not UNIFORM and WIDTH <= 1024
    if FILL_FIRST:  # zeros go out while x comes in
        zero = tl.zeros_like(i).to(tl.float32)
        _fill(Y, zero, 0, begin, there)
        _fill(Y, zero, begin + WIDTH, sk, there)
    s, raw = _logits(x, MASK, cols, i, inside, sk, lo, hi, stride_mj, scale, softcap,
                     HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, FP32)
    top = tl.max(s, 1)
    raw_top = top
    if HAS_SOFTCAP:
        raw_top = tl.max(raw, 1)
    own_shift = tl.where(top == float("-inf"), 0.0, top)
    if PACKED:
        s, raw = _logits(_again(x, PTX), MASK, cols, i, inside, sk, lo, hi, stride_mj, scale,
                         softcap, HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, FP32)
    p = _exp(s - own_shift[:, None], FP32)
    total = tl.sum(p, 1)
    raw_top = tl.where(total == total, raw_top, float("nan"))  # maxima drop NaNs, sums keep them
    _shift, factor, decay, nothing, lse = _close(top, total, sink, sk, HAS_SINK, UNIFORM, FP32)
    if PACKED:
        s, raw = _logits(_again(x, PTX), MASK, cols, i, inside, sk, lo, hi, stride_mj, scale,
                         softcap, HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, FP32)
        p = _exp(s - own_shift[:, None], FP32)
    p = p * (factor * decay)[:, None]
    if UNIFORM and not HAS_SINK:
        p += nothing[:, None]
    tl.store(Y + cols[None, :], p.to(Y.dtype.element_ty),
             mask=there[:, None] & (cols < sk)[None, :], cache_modifier=".cs")
    if (HAS_LO or HAS_HI) and not FILL_FIRST:
        _fill(Y, nothing, 0, begin, there)
        _fill(Y, nothing, begin + WIDTH, sk, there)
    return raw_top, lse


@triton.jit
def _forward_twice(
    X, Y, MASK, i, there, begin, end, sk, lo, hi, stride_mj, scale, softcap, sink,
    WIDTH: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, MASK_KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINK: tl.constexpr, UNIFORM: tl.constexpr,
    FP32: tl.constexpr,
):
    """The same for rows of any length: one pass for maximum and sum, one to write.

    The second pass goes backwards, through what the L2 has seen last.
    """
    ROWS: tl.constexpr = i.shape[0]
    top = tl.full([ROWS, WIDTH], float("-inf"), tl.float32)
    raw_top = tl.full([ROWS, WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    steps = (end - begin + WIDTH - 1) // WIDTH
    for step in range(steps):
        cols = begin + step * WIDTH + tl.arange(0, WIDTH)
        inside = there[:, None] & (cols < end)[None, :]
        x = tl.load(X + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_last")
        s, raw = _logits(x, MASK, cols, i, inside, sk, lo, hi, stride_mj, scale, softcap,
                         HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, FP32)
        # Every lane keeps its own maximum and sum: lanes meet once, behind the loop.
        new_top = tl.maximum(top, s)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * _exp(top - shift, FP32) + _exp(s - shift, FP32)
        top = new_top
        if HAS_SOFTCAP:
            raw_top = tl.maximum(raw_top, raw)
    row_top = tl.max(top, 1)
    own_shift = tl.where(row_top == float("-inf"), 0.0, row_top)
    row_total = tl.sum(total * _exp(top - own_shift[:, None], FP32), 1)
    row_raw_top = row_top
    if HAS_SOFTCAP:
        row_raw_top = tl.max(raw_top, 1)
    row_raw_top = tl.where(row_total == row_total, row_raw_top, float("nan"))
    shift, factor, _decay, nothing, lse = _close(
        row_top, row_total, sink, sk, HAS_SINK, UNIFORM, FP32)
    for step in range(steps):
        cols = begin + (steps - 1 - step) * WIDTH + tl.arange(0, WIDTH)
        inside = there[:, None] & (cols < end)[None, :]
        x = tl.load(X + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        s, _raw = _logits(x, MASK, cols, i, inside, sk, lo, hi, stride_mj, scale, softcap,
                          HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, FP32)
        p = _exp(s - shift[:, None], FP32) * factor[:, None]
        if UNIFORM and not HAS_SINK:
            p += nothing[:, None]
        tl.store(Y + cols[None, :], p.to(Y.dtype.element_ty),
                 mask=there[:, None] & (cols < end)[None, :], cache_modifier=".cs")
    if HAS_LO or HAS_HI:
        _fill(Y, nothing, 0, begin, there)
        _fill(Y, nothing, end, sk, there)
    return row_raw_top, lse


@triton.jit(do_not_specialize=SIZES)
def softmax_fwd_kernel(
    X, Y, MASK, SINK, LSE, MAX_LOGITS,
    heads, sq, sk, lo, hi, scale, softcap,
    stride_xb, stride_xh, stride_xi, stride_yi,
    stride_mb, stride_mh, stride_mi, stride_mj,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, CLASSES: tl.constexpr, ONE_PASS: tl.constexpr,
    PACKED: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    MASK_KIND: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINK: tl.constexpr, WANT_LSE: tl.constexpr, WANT_MAX: tl.constexpr,
    UNIFORM: tl.constexpr, HEADS_FIRST: tl.constexpr, ALIGNED: tl.constexpr, PTX: tl.constexpr,
):
    FP32: tl.constexpr = X.dtype.element_ty == tl.float32
    batch, head, first, i, there = _rows_of_program(heads, sq, ROWS, HEADS_FIRST)
    begin, end = _span(first, sq, sk, lo, hi, ROWS, ALIGNED)
    row = i.to(tl.int64)[:, None]
    X += batch.to(tl.int64) * stride_xb + head.to(tl.int64) * stride_xh + row * stride_xi
    matrix = (batch * heads + head).to(tl.int64)
    Y += (matrix * sq + row) * stride_yi
    if MASK_KIND != 0:
        MASK += batch.to(tl.int64) * stride_mb + head.to(tl.int64) * stride_mh + row * stride_mi
    sink = 0.0
    if HAS_SINK:
        sink = tl.load(SINK + head).to(tl.float32) * (1.0 if FP32 else LOG2E)
    if WANT_MAX:
        seen_top = tl.load(MAX_LOGITS + head)
    if ONE_PASS:
        # Narrow spans take narrow code: lanes beyond the span would only idle.
        need = end - begin
        if CLASSES >= 4 and need <= WIDTH // 8:
            top, lse = _forward_in_registers(
                X, Y, MASK, i, there, begin, end, sk, lo, hi, stride_mj, scale, softcap, sink,
                WIDTH // 8, PACKED, HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, HAS_SINK, UNIFORM, FP32,
                PTX)
        elif CLASSES >= 3 and need <= WIDTH // 4:
            top, lse = _forward_in_registers(
                X, Y, MASK, i, there, begin, end, sk, lo, hi, stride_mj, scale, softcap, sink,
                WIDTH // 4, PACKED, HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, HAS_SINK, UNIFORM, FP32,
                PTX)
        elif CLASSES >= 2 and need <= WIDTH // 2:
            top, lse = _forward_in_registers(
                X, Y, MASK, i, there, begin, end, sk, lo, hi, stride_mj, scale, softcap, sink,
                WIDTH // 2, PACKED, HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, HAS_SINK, UNIFORM, FP32,
                PTX)
        else:
            top, lse = _forward_in_registers(
                X, Y, MASK, i, there, begin, end, sk, lo, hi, stride_mj, scale, softcap, sink,
                WIDTH, PACKED, HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, HAS_SINK, UNIFORM, FP32,
                PTX)
    else:
        top, lse = _forward_twice(
            X, Y, MASK, i, there, begin, end, sk, lo, hi, stride_mj, scale, softcap, sink,
            WIDTH, HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, HAS_SINK, UNIFORM, FP32)
    if WANT_LSE:
        tl.store(LSE + matrix * sq + i, lse, mask=there)
    if WANT_MAX:
        top = tl.where(there, top if FP32 else top * LN2, float("-inf"))
        raise_max(MAX_LOGITS + head, seen_top, top, PTX)


@triton.jit
def _input_gradient(
    X, DX, dy, y, dot, cols, there, end, limit, scale, softcap, HAS_SOFTCAP: tl.constexpr,
):
    """Writes scale * y * (dy - dot), bent by the softcap, up to column `limit`."""
    dy, y = dy.to(tl.float32), y.to(tl.float32)
    dx = y * (dy - dot[:, None]) * scale
    if HAS_SOFTCAP:
        inside = there[:, None] & (cols < end)[None, :]
        x = tl.load(X + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        bent = tanh(x.to(tl.float32) * (scale / softcap))
        dx = dx * (1.0 - bent * bent)
    dx = tl.where(y == 0.0, 0.0, dx)  # where y is 0, dy may be anything, infinite too
    tl.store(DX + cols[None, :], dx.to(DX.dtype.element_ty),
             mask=there[:, None] & (cols < limit)[None, :], cache_modifier=".cs")


@triton.jit
def _product(dy, y):
    dy, y = dy.to(tl.float32), y.to(tl.float32)
    return tl.where(y == 0.0, 0.0, dy * y)


@triton.jit
def _backward_in_registers(
    X, DY, Y, DX, there, alive, begin, end, sk, scale, softcap, zero,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, BANDED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    PTX: tl.constexpr,
):
    cols = begin + tl.arange(0, WIDTH)
    inside = alive[:, None] & (cols < end)[None, :]
    y = tl.load(Y + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
    dy = tl.load(DY + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
    if BANDED:  # zeros go out while y and dy come in
        _fill(DX, zero, 0, begin, there)
        _fill(DX, zero, begin + WIDTH, sk, there)
    dot = tl.sum(_product(dy, y), 1)
    if PACKED:
        y, dy = _again(y, PTX), _again(dy, PTX)
    _input_gradient(X, DX, dy, y, dot, cols, there, end, sk, scale, softcap, HAS_SOFTCAP)
    return dot


@triton.jit
def _backward_twice(
    X, DY, Y, DX, there, alive, begin, end, sk, scale, softcap, zero,
    WIDTH: tl.constexpr, BANDED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):
    ROWS: tl.constexpr = there.shape[0]
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    steps = (end - begin + WIDTH - 1) // WIDTH
    for step in range(steps):
        cols = begin + step * WIDTH + tl.arange(0, WIDTH)
        inside = alive[:, None] & (cols < end)[None, :]
        y = tl.load(Y + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_last")
        dy = tl.load(DY + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_last")
        sums += _product(dy, y)
    dot = tl.sum(sums, 1)
    for step in range(steps):  # backwards, as in the forward
        cols = begin + (steps - 1 - step) * WIDTH + tl.arange(0, WIDTH)
        inside = alive[:, None] & (cols < end)[None, :]
        y = tl.load(Y + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        dy = tl.load(DY + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        _input_gradient(X, DX, dy, y, dot, cols, there, end, end, scale, softcap, HAS_SOFTCAP)
    if BANDED:
        _fill(DX, zero, 0, begin, there)
        _fill(DX, zero, end, sk, there)
    return dot


@triton.jit(do_not_specialize=SIZES)
def softmax_bwd_kernel(
    X, DY, Y, DX, LSE, DOT,
    heads, sq, sk, lo, hi, scale, softcap,
    stride_xb, stride_xh, stride_xi, stride_db, stride_dh, stride_di, stride_yi,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, CLASSES: tl.constexpr, ONE_PASS: tl.constexpr,
    PACKED: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr, WANT_DOT: tl.constexpr, ALIGNED: tl.constexpr, PTX: tl.constexpr,
):
    batch, head, first, i, there = _rows_of_program(heads, sq, ROWS, False)
    begin, end = _span(first, sq, sk, lo, hi, ROWS, ALIGNED)
    matrix = (batch * heads + head).to(tl.int64)
    alive = there
    if HAS_LSE:  # rows that saw nothing: whatever their output, no input made it
        alive = there & (tl.load(LSE + matrix * sq + i, mask=there, other=0.0) != float("-inf"))
    row = i.to(tl.int64)[:, None]
    if HAS_SOFTCAP:
        X += batch.to(tl.int64) * stride_xb + head.to(tl.int64) * stride_xh + row * stride_xi
    DY += batch.to(tl.int64) * stride_db + head.to(tl.int64) * stride_dh + row * stride_di
    Y += (matrix * sq + row) * stride_yi
    DX += (matrix * sq + row) * stride_yi
    zero = tl.zeros([ROWS], tl.float32)
    if ONE_PASS:
        need = end - begin
        if CLASSES >= 4 and need <= WIDTH // 8:
            dot = _backward_in_registers(
                X, DY, Y, DX, there, alive, begin, end, sk, scale, softcap, zero,
                WIDTH // 8, PACKED, HAS_LO or HAS_HI, HAS_SOFTCAP, PTX)
        elif CLASSES >= 3 and need <= WIDTH // 4:
            dot = _backward_in_registers(
                X, DY, Y, DX, there, alive, begin, end, sk, scale, softcap, zero,
                WIDTH // 4, PACKED, HAS_LO or HAS_HI, HAS_SOFTCAP, PTX)
        elif CLASSES >= 2 and need <= WIDTH // 2:
            dot = _backward_in_registers(
                X, DY, Y, DX, there, alive, begin, end, sk, scale, softcap, zero,
                WIDTH // 2, PACKED, HAS_LO or HAS_HI, HAS_SOFTCAP, PTX)
        else:
            dot = _backward_in_registers(
                X, DY, Y, DX, there, alive, begin, end, sk, scale, softcap, zero,
                WIDTH, PACKED, HAS_LO or HAS_HI, HAS_SOFTCAP, PTX)
    else:
        dot = _backward_twice(X, DY, Y, DX, there, alive, begin, end, sk, scale, softcap, zero,
                              WIDTH, HAS_LO or HAS_HI, HAS_SOFTCAP)
    if WANT_DOT:
        tl.store(DOT + matrix * sq + i, dot, mask=there)


# fmt: on


@dataclass(frozen=True, slots=True)
class RowConfig:
    """Rows per program, columns at a time, warps; and whether a row stays in registers."""

    rows: int
    width: int
    num_warps: int
    one_pass: bool
    packed: bool = False
    """Keep 16-bit values between the steps of a pass, not the fp32 numbers made from them."""


def choose_config(sk: int, direction: str, banded: bool, masked: bool) -> RowConfig:
    """Measured on sm_90 with 16-bit scores; see benchmarks/LOG.md."""
    width = max(16, triton.next_power_of_2(sk))
    if direction == "forward":
        if width > 65536 and banded and not masked:
            return RowConfig(1, 8192, 32, False)
        if width > 32768:
            return RowConfig(1, 4096, 16, False)
        if width > 16384:
            if masked:
                return RowConfig(1, 4096, 16, False)
            return RowConfig(1, 2048 if banded else 4096, 8, False)
        if width > 8192:
            return RowConfig(1, width, 16, True) if masked else RowConfig(1, 2048, 8, False)
        if width > 1024:
            wide_warps = 4 if masked else 8
            warps = {2048: 2, 4096: 4 if banded else 2, 8192: wide_warps}[width]
            return RowConfig(1, width, warps, True)
        warps = 2 if banded and width <= 256 else 1
        return RowConfig(1024 * warps // width, width, warps, True)
    if width > 32768 or (width > 16384 and not banded):
        return RowConfig(1, 8192, 32, False)
    if width > 8192:
        return RowConfig(1, 4096, 16, False)
    if width > 1024:
        warps = {2048: 2, 4096: 4, 8192: 4 if banded else 8}[width]
        return RowConfig(1, width, warps, True, packed=banded or width == 4096)
    if banded:
        rows = 2048 // width if width in (128, 1024) else 1024 // width
        return RowConfig(rows, width, 1, True)
    return RowConfig(max(1, 512 // width), width, 1, True)


def forward(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    *,
    scale: float,
    softcap: float,
    band: tuple[int, int],
    uniform: bool,
    y: torch.Tensor,
    lse: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    config: RowConfig | None = None,
) -> None:
    """Fills y (b, h, sq, sk) and lse (b, h, sq) fp32, raises max_logits (h,) fp32.

    mask: bool or uint8, nonzero hides; or floating point, added; broadcast by strides of 0.
    """

    def prepare() -> Prepared | None:
        b, h, sq, sk = x.shape
        if x.numel() == 0:
            return None
        lo, hi = max(-sq, min(band[0], sk)), max(-sq, min(band[1], sk))
        banded = lo > 1 - sq or hi < sk - 1
        chosen = config or choose_config(sk, "forward", banded, mask is not None)
        tiles = -(-sq // chosen.rows)
        mask_strides = (0, 0, 0, 0) if mask is None else mask.stride()
        kind = 0 if mask is None else 2 if mask.is_floating_point() else 1
        return Prepared(
            (b * h * tiles,),
            {
                **{"heads": h, "sq": sq, "sk": sk, "lo": lo, "hi": hi},
                **{"scale": scale, "softcap": softcap},
                **_row_strides("x", x),
                "stride_yi": sk,
                **{f"stride_m{dim}": n for dim, n in zip("bhij", mask_strides, strict=True)},
                **_shape_constants(chosen, lo, hi, sq, sk, softcap),
                **{"MASK_KIND": kind, "HAS_SINK": sink is not None, "UNIFORM": uniform},
                "HEADS_FIRST": mask is not None and mask.stride(1) == 0,
                **{"WANT_LSE": lse is not None, "WANT_MAX": max_logits is not None},
            },
            num_warps=chosen.num_warps,
        )

    tensors: Tensors = {
        **{"X": x, "Y": y, "MASK": mask, "SINK": sink, "LSE": lse, "MAX_LOGITS": max_logits}
    }
    launch(softmax_fwd_kernel, (scale, softcap, band, uniform, config), tensors, prepare)


def backward(
    dy: torch.Tensor,
    y: torch.Tensor,
    x: torch.Tensor | None,
    *,
    scale: float,
    softcap: float,
    band: tuple[int, int],
    dx: torch.Tensor,
    lse: torch.Tensor | None = None,
    dot: torch.Tensor | None = None,
    config: RowConfig | None = None,
) -> None:
    """Fills dx (b, h, sq, sk), and dot (b, h, sq) fp32 = rowsum(dy * y).

    x is needed with a softcap, lse (b, h, sq) where rows that saw nothing may not be zeros.
    """

    def prepare() -> Prepared | None:
        b, h, sq, sk = y.shape
        if y.numel() == 0:
            return None
        lo, hi = max(-sq, min(band[0], sk)), max(-sq, min(band[1], sk))
        banded = lo > 1 - sq or hi < sk - 1
        chosen = config or choose_config(sk, "backward", banded, False)
        tiles = -(-sq // chosen.rows)
        return Prepared(
            (b * h * tiles,),
            {
                **{"heads": h, "sq": sq, "sk": sk, "lo": lo, "hi": hi},
                **{"scale": scale, "softcap": softcap},
                **_row_strides("x", y if x is None else x),
                **_row_strides("d", dy),
                "stride_yi": sk,
                **_shape_constants(chosen, lo, hi, sq, sk, softcap),
                **{"HAS_LSE": lse is not None, "WANT_DOT": dot is not None},
            },
            num_warps=chosen.num_warps,
        )

    tensors: Tensors = {"X": x, "DY": dy, "Y": y, "DX": dx, "LSE": lse, "DOT": dot}
    launch(softmax_bwd_kernel, (scale, softcap, band, config), tensors, prepare)


def _row_strides(name: str, x: torch.Tensor) -> dict[str, int]:
    return {f"stride_{name}{dim}": n for dim, n in zip("bhi", x.stride(), strict=False)}


def _shape_constants(
    config: RowConfig, lo: int, hi: int, sq: int, sk: int, softcap: float
) -> dict[str, int | bool]:
    # A side of the band that hides nothing costs nothing.
    has_lo, has_hi = lo > 1 - sq, hi < sk - 1
    # A class must leave each thread something to do.
    smallest = config.num_warps * 32 * 2 // config.rows
    classes = 1
    while (has_lo or has_hi) and classes < 4 and config.width >> classes >= max(smallest, 64):
        classes += 1
    return {
        **{"ROWS": config.rows, "WIDTH": config.width, "ONE_PASS": config.one_pass},
        **{"PACKED": config.packed, "CLASSES": classes, "HAS_SOFTCAP": softcap > 0},
        **{"HAS_LO": has_lo, "HAS_HI": has_hi, "ALIGNED": sk % 16 == 0, "PTX": HAS_PTX},
    }
