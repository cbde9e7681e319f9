"""Fused scale + softcap + mask + softmax, forward.

Rows of usual length stay in registers between reading and writing, so memory is touched once; long
ones are read twice, the second time in part from the L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from keel.kernels.flash_common import LN2, LOG2E, num_sms, raise_max, shared_memory, tanh
from keel.kernels.launch import Prepared, Tensors, launch
from keel.kernels.softmax_common import (
    UNIT,
    VECTOR,
    RowConfig,
    again,
    clamped,
    class_parts,
    class_span,
    class_width,
    edge_cols,
    edges,
    fill,
    fill_around,
    in_blocks,
    in_step,
    is_banded,
    max_of_parts,
    reach,
    row_strides,
    rows_of_program,
    shape_constants,
    span,
    store_row,
    sum_of_parts,
    unit_of,
    whole,
    width_for,
    within,
    written,
)

INTEGERS = [
    *("programs", "heads", "sq", "sk", "lo", "hi", "stride_mj"),
    *(f"stride_{name}{dim}" for name in "xm" for dim in "bhi"),
]

# fmt: off


@triton.jit
def _exp(difference, FP32: tl.constexpr):
    """exp of a difference of logits.

    Logits of 16-bit scores are kept in units of log2, which saves a product per exponential; those
    of fp32 scores are not, since they would lose their last bits where logits are large.
    """
    return tl.exp2(difference * LOG2E if FP32 else difference)


@triton.jit
def _load_mask(
    MASK, start, cols, inside, skew, sk, stride_mj,
    KIND: tl.constexpr, DENSE: tl.constexpr, FP32: tl.constexpr, SKEWED: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """The mask at places cols (WIDTH,) of rows that begin at start (ROWS,)."""
    if DENSE and SKEWED and KIND == 1:
        return _load_mask_words(MASK, start - skew, start, cols, sk, inside, EVICTION)
    if DENSE and not SKEWED:
        # In vectors of as many columns as scores are: left alone, the compiler reads bytes in
        # longer ones, and then has to move them between threads through shared memory.
        pointers = tl.max_contiguous(MASK + start[:, None] + cols[None, :], (1, 4 if FP32 else 8))
        return tl.load(
            pointers, mask=inside, other=1 if KIND == 1 else 0.0, eviction_policy=EVICTION)
    places = (cols[None, :] - skew[:, None])
    if SKEWED:
        inside = inside & (places >= 0) & (places < sk)
    return tl.load(MASK + start[:, None] + places * stride_mj, mask=inside,
                   other=1 if KIND == 1 else 0.0, eviction_policy=EVICTION)


@triton.jit
def _load_mask_words(MASK, frame, start, cols, sk, inside, EVICTION: tl.constexpr):
    """Bytes of rows that do not begin where vectors do, by eights.

    Eight bytes that belong to eight scores lie in two neighbouring words. Words that hold nothing
    of the row are not read.
    """
    ROWS: tl.constexpr = inside.shape[0]
    WORDS: tl.constexpr = inside.shape[1] // 8
    words = MASK.to(tl.pointer_type(tl.int64), bitcast=True)
    group = tl.min(cols, 0) // 8 + tl.arange(0, WORDS)
    index = (frame >> 3)[:, None] + group[None, :]
    cut = ((frame & 7) * 8)[:, None]
    first, last = (start // 8)[:, None], ((start + sk - 1) // 8)[:, None]
    here = tl.load(words + index, mask=(index >= first) & (index <= last), other=0,
                   eviction_policy=EVICTION)
    following = tl.load(words + index + 1, mask=(index + 1 >= first) & (index < last) & (cut > 0),
                        other=0, eviction_policy=EVICTION)
    joined = (here.to(tl.uint64) >> cut.to(tl.uint64)) | tl.where(
        cut > 0, following.to(tl.uint64) << (64 - cut).to(tl.uint64), 0)
    each = joined[:, :, None] >> (tl.arange(0, 8) * 8).to(tl.uint64)[None, None, :]
    return tl.reshape(each.to(tl.uint8), [ROWS, WORDS * 8])


@triton.jit
def _logits(
    x, mask, cols, low, high, inside, scale, softcap,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, MASK_KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, FP32: tl.constexpr, SKEWED: tl.constexpr,
):
    """(logits, logits before the softcap) in the units of `_exp`; -inf where a row does not see.

    cols: broadcastable to x; a row sees none before low (ROWS,) and none behind high.
    """
    unit = 1.0 if FP32 else LOG2E
    s = x.to(tl.float32) * (scale * unit)
    raw = s
    if HAS_SOFTCAP:
        s = softcap * unit * tanh(s / (softcap * unit))
    keep = inside
    if HAS_HI or SKEWED:
        keep = cols <= high[:, None]
    if HAS_LO or SKEWED:
        keep = keep & (cols >= low[:, None])
    if MASK_KIND == 1:
        shown = mask == 0
        # what was not read is hidden
        keep = keep & shown if HAS_LO or HAS_HI or SKEWED else shown
    if MASK_KIND == 2:
        added = mask.to(tl.float32) * unit
        s += added
        raw += added
    return tl.where(keep, s, float("-inf")), tl.where(keep, raw, float("-inf"))


@triton.jit
def _write_edges(
    X, Y, MASK, mask_start, there, low, high, skew, sk, stride_mj, scale, softcap, shift, factor,
    nothing,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, MASK_KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, FP32: tl.constexpr,
):
    """Probabilities in vectors that rows share with their neighbours."""
    cols = edge_cols(skew, sk)
    own = edges(there, cols, skew, sk)
    x = tl.load(X + cols, mask=own, other=0.0)
    mask = x
    if MASK_KIND != 0:
        mask = tl.load(MASK + mask_start[:, None] + (cols - skew[:, None]) * stride_mj, mask=own,
                       other=1 if MASK_KIND == 1 else 0.0)
    s, _raw = _logits(x, mask, cols, low, high, own, scale, softcap, HAS_LO, HAS_HI, MASK_KIND,
                      HAS_SOFTCAP, FP32, True)
    p = _exp(s - shift[:, None], FP32) * factor[:, None] + nothing[:, None]
    tl.store(Y + cols, p.to(Y.dtype.element_ty), mask=own)


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
    X, Y, MASK, mask_start, there, low, high, skew, begin, ends, sk, stride_mj, scale, softcap,
    sink,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr, HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr, MASK_KIND: tl.constexpr, DENSE_MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINK: tl.constexpr, UNIFORM: tl.constexpr,
    EXACT: tl.constexpr, FP32: tl.constexpr, SKEWED: tl.constexpr, PTX: tl.constexpr,
):
    """Rows whose span fits PARTS blocks of WIDTH columns.

    (maximum before the softcap in _exp's units, lse)
    """
    first_cols = begin + tl.arange(0, WIDTH)
    xs, masks = (), ()
    for part in tl.static_range(PARTS):
        cols = first_cols + part * WIDTH
        inside = within(there, cols, ends, EXACT)
        x = tl.load(X + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        mask = x
        if MASK_KIND != 0:  # other heads may want it, too
            mask = _load_mask(MASK, mask_start, cols, inside, skew, sk, stride_mj, MASK_KIND,
                              DENSE_MASK, FP32, SKEWED, "evict_last")
        xs, masks = xs + (x,), masks + (mask,)
    FILL_FIRST: tl.constexpr = (HAS_LO or HAS_HI) and not UNIFORM and WIDTH * PARTS <= 1024
    if FILL_FIRST:  # zeros go out while x comes in
        zero = tl.zeros_like(low).to(tl.float32)
        fill_around(Y, zero, begin, begin + WIDTH * PARTS, there, skew, sk, SKEWED)
    logits, raws = (), ()
    for part in tl.static_range(PARTS):
        cols = first_cols + part * WIDTH
        s, raw = _logits(
            xs[part], masks[part], cols[None, :], low, high, within(there, cols, ends, EXACT),
            scale, softcap, HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, FP32, SKEWED)
        logits, raws = logits + (s,), raws + (raw,)
    top = max_of_parts(logits, PARTS)
    raw_top = top
    if HAS_SOFTCAP:
        raw_top = max_of_parts(raws, PARTS)
    own_shift = tl.where(top == float("-inf"), 0.0, top)
    weights = ()
    for part in tl.static_range(PARTS):
        cols = first_cols + part * WIDTH
        s = logits[part]
        if PACKED:
            s, raw = _logits(
                again(xs[part], PTX), masks[part], cols[None, :], low, high,
                within(there, cols, ends, EXACT), scale, softcap, HAS_LO, HAS_HI, MASK_KIND,
                HAS_SOFTCAP, FP32, SKEWED)
        weights = weights + (_exp(s - own_shift[:, None], FP32),)
    total = sum_of_parts(weights, PARTS)
    raw_top = tl.where(total == total, raw_top, float("nan"))  # maxima drop NaNs, sums keep them
    _shift, factor, decay, nothing, lse = _close(top, total, sink, sk, HAS_SINK, UNIFORM, FP32)
    for part in tl.static_range(PARTS):
        cols = first_cols + part * WIDTH
        p = weights[part]
        if PACKED:
            s, raw = _logits(
                again(xs[part], PTX), masks[part], cols[None, :], low, high,
                within(there, cols, ends, EXACT), scale, softcap, HAS_LO, HAS_HI, MASK_KIND,
                HAS_SOFTCAP, FP32, SKEWED)
            p = _exp(s - own_shift[:, None], FP32)
        p = p * (factor * decay)[:, None]
        if UNIFORM and not HAS_SINK:
            p += nothing[:, None]
        store_row(Y, p, cols, there, skew, sk, part, PARTS, HAS_LO, EXACT, SKEWED)
    if (HAS_LO or HAS_HI) and not FILL_FIRST:
        fill_around(Y, nothing, begin, begin + WIDTH * PARTS, there, skew, sk, SKEWED)
    return raw_top, lse


@triton.jit
def _forward_twice(
    X, Y, MASK, mask_start, there, low, high, skew, begin, end, sk, stride_mj, scale, softcap,
    sink,
    WIDTH: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, MASK_KIND: tl.constexpr,
    DENSE_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINK: tl.constexpr,
    UNIFORM: tl.constexpr, EXACT: tl.constexpr, FP32: tl.constexpr, SKEWED: tl.constexpr,
):
    """The same for rows of any length: one pass for maximum and sum, one to write.

    The second pass goes backwards, through what the L2 has seen last.
    """
    ROWS: tl.constexpr = low.shape[0]
    top = tl.full([ROWS, WIDTH], float("-inf"), tl.float32)
    raw_top = tl.full([ROWS, WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    ends = tl.zeros_like(low) + end
    if SKEWED:  # of each row, no vector that holds nothing of it
        ends = tl.minimum(ends, (skew + sk + VECTOR - 1) // VECTOR * VECTOR)
    steps = (end - begin + WIDTH - 1) // WIDTH
    for step in range(steps):
        cols = begin + step * WIDTH + tl.arange(0, WIDTH)
        inside = within(there, cols, ends, EXACT)
        x = tl.load(X + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_last")
        mask = x
        if MASK_KIND != 0:
            mask = _load_mask(MASK, mask_start, cols, inside, skew, sk, stride_mj, MASK_KIND,
                              DENSE_MASK, FP32, SKEWED, "")
        s, raw = _logits(x, mask, cols[None, :], low, high, inside, scale, softcap,
                         HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, FP32, SKEWED)
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
        inside = within(there, cols, ends, EXACT)
        x = tl.load(X + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        mask = x
        if MASK_KIND != 0:
            mask = _load_mask(MASK, mask_start, cols, inside, skew, sk, stride_mj, MASK_KIND,
                              DENSE_MASK, FP32, SKEWED, "")
        s, _raw = _logits(x, mask, cols[None, :], low, high, inside, scale, softcap,
                          HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, FP32, SKEWED)
        p = _exp(s - shift[:, None], FP32) * factor[:, None]
        if UNIFORM and not HAS_SINK:
            p += nothing[:, None]
        if SKEWED:
            inside = inside & written(there, cols, skew, sk, EXACT, SKEWED)
        tl.store(Y + cols[None, :], p.to(Y.dtype.element_ty), mask=inside, cache_modifier=".cs")
    if SKEWED:
        _write_edges(
            X, Y, MASK, mask_start, there, low, high, skew, sk, stride_mj, scale, softcap, shift,
            factor, nothing, HAS_LO, HAS_HI, MASK_KIND, HAS_SOFTCAP, FP32)
    if HAS_LO or HAS_HI:
        fill(Y, nothing, 0, begin, there, skew, sk, SKEWED)
        fill(Y, nothing, end, reach(sk, SKEWED), there, skew, sk, SKEWED)
    return row_raw_top, lse


@triton.jit
def _forward_tile(
    program, X, Y, MASK, SINK, LSE, MAX_LOGITS, heads, sq, sk, lo, hi, scale, softcap,
    stride_xb, stride_xh, stride_xi, stride_mb, stride_mh, stride_mi, stride_mj,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, CLASSES: tl.constexpr,
    ONE_PASS: tl.constexpr, PACKED: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    MASK_KIND: tl.constexpr, DENSE_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINK: tl.constexpr, WANT_LSE: tl.constexpr, WANT_MAX: tl.constexpr,
    UNIFORM: tl.constexpr, TURN: tl.constexpr, ENDS_MEET: tl.constexpr, EXACT: tl.constexpr,
    STEP: tl.constexpr, SKEWED: tl.constexpr, PTX: tl.constexpr,
):
    FP32: tl.constexpr = X.dtype.element_ty == tl.float32
    batch, head, first, i, there = rows_of_program(program, heads, sq, ROWS, TURN, ENDS_MEET)
    sk *= STEP
    row = i.to(tl.int64)
    batch, head64 = batch.to(tl.int64), head.to(tl.int64)
    matrix = batch * heads + head
    start, skew = whole((matrix * sq + row) * sk, SKEWED)
    Y += start[:, None]
    x_start = (batch * stride_xb + head64 * stride_xh + row * stride_xi) * STEP
    if SKEWED:  # rows of x begin where those of y do, seen from a vector
        x_start = x_start // VECTOR * VECTOR
    X += x_start[:, None]
    mask_start = row
    if MASK_KIND != 0:
        mask_start = (batch * stride_mb + head64 * stride_mh + row * stride_mi) * STEP
    begin, end, ends = span(first, i, skew, sq, sk, lo, hi, ROWS, HAS_LO, HAS_HI, STEP, SKEWED)
    low = tl.maximum(i + lo, 0) + skew if HAS_LO else skew
    high = tl.minimum(i + hi, sk - 1) + skew if HAS_HI else skew + sk - 1
    sink = 0.0
    if HAS_SINK:
        sink = tl.load(SINK + head).to(tl.float32) * (1.0 if FP32 else LOG2E)
    if WANT_MAX:
        seen_top = tl.load(MAX_LOGITS + head)
    if ONE_PASS:
        # Narrow spans take narrow code: lanes beyond the span would only idle.
        need = end - begin
        top = tl.zeros([ROWS], tl.float32)
        lse = tl.zeros([ROWS], tl.float32)
        for c in tl.static_range(CLASSES):
            fits = need > class_span(WIDTH, PARTS, CLASSES, c + 1)
            if c > 0:
                fits = fits & (need <= class_span(WIDTH, PARTS, CLASSES, c))
            if CLASSES == 1 or fits:
                top, lse = _forward_in_registers(
                    X, Y, MASK, mask_start, there, low, high, skew, begin, ends, sk, stride_mj,
                    scale, softcap, sink, class_width(WIDTH, PARTS, c),
                    class_parts(PARTS, CLASSES, c), PACKED, HAS_LO, HAS_HI, MASK_KIND,
                    DENSE_MASK, HAS_SOFTCAP, HAS_SINK, UNIFORM, EXACT, FP32, SKEWED, PTX)
    else:
        top, lse = _forward_twice(
            X, Y, MASK, mask_start, there, low, high, skew, begin, end, sk, stride_mj, scale,
            softcap, sink, WIDTH, HAS_LO, HAS_HI, MASK_KIND, DENSE_MASK, HAS_SOFTCAP, HAS_SINK,
            UNIFORM, EXACT, FP32, SKEWED)
    if WANT_LSE:
        tl.store(LSE + matrix * sq + i, lse, mask=there)
    if WANT_MAX:
        top = tl.where(there, top if FP32 else top * LN2, float("-inf"))
        raise_max(MAX_LOGITS + head, seen_top, top, PTX)


@triton.jit(do_not_specialize=INTEGERS)
def softmax_fwd_kernel(
    X, Y, MASK, SINK, LSE, MAX_LOGITS,
    programs, heads, sq, sk, lo, hi, scale, softcap,
    stride_xb, stride_xh, stride_xi,
    stride_mb, stride_mh, stride_mi, stride_mj,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, CLASSES: tl.constexpr,
    ONE_PASS: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr, HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr, MASK_KIND: tl.constexpr, DENSE_MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINK: tl.constexpr, WANT_LSE: tl.constexpr,
    WANT_MAX: tl.constexpr, UNIFORM: tl.constexpr, TURN: tl.constexpr, ENDS_MEET: tl.constexpr,
    EXACT: tl.constexpr, STEP: tl.constexpr, SKEWED: tl.constexpr, PTX: tl.constexpr,
):
    if STAGES > 0:  # later rows come in through shared memory while this one is worked on
        for program in tl.range(tl.program_id(0), programs, tl.num_programs(0), num_stages=STAGES):
            _forward_tile(
                program, X, Y, MASK, SINK, LSE, MAX_LOGITS, heads, sq, sk, lo, hi, scale, softcap,
                stride_xb, stride_xh, stride_xi, stride_mb, stride_mh, stride_mi,
                stride_mj, ROWS, WIDTH, PARTS, CLASSES, ONE_PASS, PACKED, HAS_LO, HAS_HI, MASK_KIND,
                DENSE_MASK, HAS_SOFTCAP, HAS_SINK, WANT_LSE, WANT_MAX, UNIFORM, TURN, ENDS_MEET,
                EXACT, STEP, SKEWED, PTX)
    else:
        _forward_tile(
            tl.program_id(0), X, Y, MASK, SINK, LSE, MAX_LOGITS, heads, sq, sk, lo, hi, scale,
            softcap, stride_xb, stride_xh, stride_xi, stride_mb, stride_mh, stride_mi,
            stride_mj, ROWS, WIDTH, PARTS, CLASSES, ONE_PASS, PACKED, HAS_LO, HAS_HI, MASK_KIND,
            DENSE_MASK, HAS_SOFTCAP, HAS_SINK, WANT_LSE, WANT_MAX, UNIFORM, TURN, ENDS_MEET,
            EXACT, STEP, SKEWED, PTX)


# fmt: on


def choose_config(
    sk: int, banded: bool, mask_bytes: int, itemsize: int, unit: int, shared: int
) -> RowConfig:
    """The fastest measured on sm_90 with 16-bit scores; see benchmarks/LOG.md.

    mask_bytes: of one element of the mask, 0 without one. shared: bytes that a program may have.
    """
    width = width_for(sk)
    if 128 < sk < width and unit > 1:
        if banded and 7168 < sk <= 7680:  # four of 2048 leave more of the last one unused
            return RowConfig(1, 1024, 4, True, parts=8)
        if sk <= (12_288 if banded else 16_384):
            return in_blocks(sk)
        if sk <= 24_576 and not banded:
            return in_blocks(sk, max_registers=64)
        many = 28_672 if mask_bytes else 32_768
        if sk <= many and not banded and _fits(2 * sk, itemsize, mask_bytes, shared):
            return in_blocks(sk, packed=True, stages=3)
    if width <= 8192:
        if width <= 1024:
            warps = 2 if banded and width <= 128 else 1
        elif width == 2048:
            warps = 2
        elif width == 4096:
            warps = 4 if banded or mask_bytes or unit == 1 else 2
        else:
            warps = 4 if banded else 8
        rows = max(1, 1024 * warps // width)
        if unit == 1 and mask_bytes:  # too many narrow loads in a thread are not in flight together
            warps = max(warps, min(32, rows * width // 256))
        return RowConfig(rows, width, warps, True)
    if width > 32768:
        if banded:
            return RowConfig(1, 4096, 16, False, max_registers=32)
        return RowConfig(1, 8192, 16, False, max_registers=64)
    if banded and width == 16384:
        return RowConfig(1, 2048, 4, False, max_registers=56)
    if sk == width and unit > 1 and not banded and itemsize == 2 and mask_bytes <= 1:
        if width == 16384:
            if mask_bytes:
                return RowConfig(1, width, 8, True)
            return RowConfig(1, 2048, 8, True, parts=8, packed=True)
        if _fits(2 * sk, itemsize, mask_bytes, shared):
            return RowConfig(1, width, 32, True, stages=3)
    return RowConfig(1, 2048, 8, False, max_registers=32)


def choose_skewed(sk: int, banded: bool, mask_bytes: int) -> RowConfig:
    """The same for rows that do not all begin with a vector."""
    widest = sk + UNIT - 1
    if widest <= (8192 if banded else 16_384):
        return in_blocks(widest, 64 if sk <= 512 else 256)
    return RowConfig(1, 2048, 4 if banded or mask_bytes else 8, False)


def _fits(columns: int, itemsize: int, mask_bytes: int, shared: int) -> bool:
    return columns * (itemsize + mask_bytes) + 20_480 <= shared


def rows_of_a_turn(mask: torch.Tensor | None) -> int:
    """Rows after which another head goes on, so that a mask (b, h, sq, sk) for all heads is still
    in the L2; 0: heads go one after the other.

    Long turns keep memory accesses together, short ones what the L2 must hold. They are powers of
    two, since each length of a turn is a variant to compile.
    """
    if mask is None or mask.stride(1) != 0 or mask.stride(2) == 0 or mask.shape[1] == 1:
        return 0
    sq, sk = mask.shape[2:]
    longest = (1 << 23) // (sk * mask.element_size()) if sk <= 8192 else 16
    turn = 1 << (longest.bit_length() - 1)
    return turn if turn < sq else 0


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
        inner = clamped(band, sq, sk)
        mask_bytes = 0 if mask is None else mask.element_size()
        unit = unit_of(sk, x, mask)
        skewed = unit == 1 and in_step(x, y) and (mask is None or mask.data_ptr() % UNIT == 0)
        banded = is_banded(inner, sq, sk)
        if config is not None:
            chosen = config
        elif skewed:
            chosen = choose_skewed(sk, banded, mask_bytes)
        else:
            chosen = choose_config(
                sk, banded, mask_bytes, x.element_size(), unit, shared_memory(x.device)
            )
        tiles = -(-sq // chosen.rows)
        turn = -(-rows_of_a_turn(mask) // chosen.rows)
        turns = -(-tiles // turn) if turn else 1
        programs = b * h * (turns * turn or tiles)
        exact = sk % (chosen.width * chosen.parts) == 0 and sq % (chosen.rows * (turn or 1)) == 0
        return Prepared(
            (min(programs, num_sms(x.device)) if chosen.stages else programs,),
            {
                **{"programs": programs, "heads": h, "sq": sq, "sk": sk // unit},
                **{"lo": inner[0], "hi": inner[1], "scale": scale, "softcap": softcap},
                **row_strides("x", x, unit),
                **({} if mask is None else row_strides("m", mask, unit)),
                **({} if mask is None else {"stride_mj": mask.stride(3)}),
                **shape_constants(chosen, inner, sq, sk, unit),
                **{"EXACT": exact and not banded and not skewed, "SKEWED": skewed},
                **{"STAGES": chosen.stages, "TURN": turn, "HAS_SOFTCAP": softcap > 0},
                "MASK_KIND": 0 if mask is None else 2 if mask.is_floating_point() else 1,
                "DENSE_MASK": mask is not None and mask.stride(3) == 1,
                **{"HAS_SINK": sink is not None, "UNIFORM": uniform},
                **{"WANT_LSE": lse is not None, "WANT_MAX": max_logits is not None},
            },
            num_warps=chosen.num_warps,
            max_registers=chosen.max_registers,
        )

    tensors: Tensors = {
        **{"X": x, "Y": y, "MASK": mask, "SINK": sink, "LSE": lse, "MAX_LOGITS": max_logits}
    }
    launch(softmax_fwd_kernel, (scale, softcap, band, uniform, config), tensors, prepare)
