"""Results of the Hopper forward's tiles: sink, out, lse and maxima of rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from keel._versions import tma_store
from keel.kernels.flash_common import LN2, LOG2E
from keel.kernels.hopper_common import (
    HALF,
    as_logits,
    as_offset,
    raise_max,
    reciprocal,
    unknown_zero,
)
from keel.kernels.hopper_meeting import meet
from keel.kernels.hopper_places import Q_EMPTY, arrive_at, leave_tops
from keel.kernels.hopper_rows import head_of, token_of
from keel.kernels.hopper_sending import send_rows, send_spooled, spool_rows, stage_rows, unsent

# fmt: off


@gluon.jit
def quick_log2(x, form: gl.constexpr):
    """To 22 bits, in one instruction for some twenty: what a tile does once is fetched anew for
    each, and takes long. With three consumers the loops of Triton 3.9 spill for it."""
    if form.CONSUMERS == 3:
        return gl.log2(x)
    else:
        return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x],
                                         dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def put_away(code: gl.constexpr, inputs, numbers, ring, form: gl.constexpr, LAST: gl.constexpr,
             row0, row_end, head, share, buffer, acc, total, top2, raw_top, mine,
             o_l: gl.constexpr):
    """Max logits, sink, lse and out of a finished tile; of a part of one, max logits alone, unless
    it is the last of them to finish.

    LAST: no tile follows, so the producer is told of the maxima at once and raises max logits
    while results are written.
    """
    there = row0 + token_of(mine, form) < row_end
    if form.WANT_MAX:
        row_top = top2  # times log2(e), for the producer to take out again
        if form.HAS_SOFTCAP:
            row_top = raw_top * numbers.scale
        elif form.LAZY:
            row_top = raw_top
        row_top = row_top + total * 0.0  # maxima drop NaNs, sums keep them
        row_top = gl.where(there, row_top, float("-inf"))
    if form.WANT_MAX and not form.TOPS and form.UNHURRIED:
        raise_max(inputs.MAX_LOGITS + head, as_logits(row_top, form))
    if form.TOPS:
        leave_tops(ring, buffer, mine, row_top, form)
        if LAST:
            arrive_at(ring, Q_EMPTY, buffer, form)
    if form.CUTS:
        complete = share < 0
        if share >= 0:
            acc, total, top2, complete = meet(
                code, inputs, numbers, form, share, head, row0, row_end, acc, total, top2, o_l)
        if complete:
            write_out(code, inputs, numbers, ring, form, row0, row_end, head, buffer, acc, total,
                      top2, mine, o_l)
    else:
        write_out(code, inputs, numbers, ring, form, row0, row_end, head, buffer, acc, total, top2,
                  mine, o_l)
    if form.WANT_MAX and not form.TOPS and not form.UNHURRIED:
        raise_max(inputs.MAX_LOGITS + head, as_logits(row_top, form))


@gluon.jit
def write_out(code: gl.constexpr, inputs, numbers, ring, form: gl.constexpr, row0, row_end, head,
              buffer, acc, total, top2, mine, o_l: gl.constexpr):
    """Sink, lse and out of a tile."""
    row_l: gl.constexpr = gl.SliceLayout(1, o_l)
    rows = row0 + token_of(mine, form)
    there = rows < row_end
    if form.HAS_SINK:
        if form.CAPS_TOP:  # of rows without a key, beside which a sink may be small
            top2 = gl.where(total == 0.0, float("-inf"), top2)
        sink2 = gl.load(inputs.SINK + head_of(mine, head, form)).to(gl.float32) * LOG2E
        new_top2 = gl.maximum(top2, sink2)
        shift = gl.where(new_top2 == float("-inf"), 0.0, new_top2)
        decay = gl.exp2(top2 - shift)
        total = total * decay + gl.exp2(sink2 - shift)
        if form.AT_ONCE:
            acc = acc * gl.convert_layout(decay, row_l)[:, None]
        top2 = new_top2
    empty = total == 0.0
    denominator = gl.where(empty, 1.0, total)
    lse = gl.where(empty, float("-inf"), (top2 + quick_log2(denominator, form)) * LN2)
    weight = reciprocal(denominator)
    row_heads = numbers.num_heads
    if form.PACK > 1:
        row_heads = (row_heads + unknown_zero(head)) * form.PACK  # else it is kept, on the stack
    lse_place = inputs.LSE + as_offset(rows) * as_offset(row_heads)
    lse_place += head_of(mine, head, form)
    if form.AT_ONCE:
        # here, not in a function of its own: else 320 bytes of it lie on the stack
        out = acc * gl.convert_layout(weight, row_l)[:, None]
        dim = gl.arange(0, form.DV, gl.SliceLayout(0, o_l))
        if form.PACK == 1:  # added up so that ptxas orders loops well where heads are wide
            out_rows = row0 + code * form.OWN_ROWS + gl.arange(0, form.OWN_ROWS, row_l)
            place = inputs.OUT + (out_rows.to(gl.int64) * as_offset(numbers.stride_ot))[:, None]
            place += head.to(gl.int64) * as_offset(numbers.stride_oh) + dim[None, :]
        else:
            row = code * form.OWN_ROWS + gl.arange(0, form.OWN_ROWS, row_l)
            out_rows = row0 + token_of(row, form)
            place = inputs.OUT + line_of(row, out_rows, numbers, form, head)[:, None] + dim[None, :]
        inside = (out_rows < row_end)[:, None]
        if form.COLUMNS > 0:
            inside = inside & (dim < form.COLUMNS)[None, :]
        gl.store(lse_place, lse, mask=there)
        out = out.to(inputs.OUT.dtype.element_ty)
        if not form.STAGED:
            gl.store(place, out, mask=inside)
        elif form.ONE_CODE:
            for chunk in gl.static_range(form.DV // HALF):
                stage_rows(ring, columns_from(out, HALF * chunk), buffer, form, chunk)
            send_rows(ring, row0, row_end, head, buffer, form)
            if row_end - row0 < form.ROWS:
                left = unsent(out_rows, row0, row_end)[:, None]
                gl.store(place, out, mask=inside & left)
        else:  # by TMA, by way of where queries were that are needed no more
            TOKENS: gl.constexpr = form.OWN_ROWS // form.PACK
            if row_end - row0 >= (code + 1) * TOKENS:
                staged = ring.q.index(form.CODES * buffer + code)
                staged.reshape([form.OWN_ROWS, form.D]).store(out)
                fence_async_shared()
                tma_store(inputs.o, [row0 + code * TOKENS, head * form.PACK, 0], staged)
            else:  # rows of a tile that has not all of them, each by itself
                gl.store(place, out, mask=inside)
    else:
        if form.HAS_SINK:
            weight = weight * decay
        old_weight = weight
        if form.ACCUMULATE:
            old_lse = gl.load(lse_place, mask=there, other=float("-inf"))
            high = gl.maximum(lse, old_lse)
            high = gl.where(high == float("-inf"), 0.0, high)
            new_part = gl.exp2((lse - high) * LOG2E)
            old_part = gl.exp2((old_lse - high) * LOG2E)
            both = new_part + old_part
            nothing = both == 0.0
            both = gl.where(nothing, 1.0, both)
            lse = gl.where(nothing, float("-inf"), high + gl.log2(both) * LN2)
            weight = weight * (new_part / both)
            old_weight = old_part / both
        gl.store(lse_place, lse, mask=there)
        write_columns(code, inputs, numbers, ring, form, row0, row_end, head, acc, weight,
                      old_weight)


@gluon.jit
def write_columns(code: gl.constexpr, inputs, numbers, ring, form: gl.constexpr, row0, row_end,
                  head, acc, weight, old_weight):
    """out = acc · weight (+ out · old_weight), 64 columns at a time, which registers hold."""
    o_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[form.WARPS, 1], instr_shape=[16, HALF, 16])
    row_l: gl.constexpr = gl.SliceLayout(1, o_l)
    COLUMNS: gl.constexpr = form.COLUMNS if form.COLUMNS > 0 else form.DV
    weight = gl.convert_layout(weight, row_l)[:, None]
    old_weight = gl.convert_layout(old_weight, row_l)[:, None]
    row = code * form.OWN_ROWS + gl.arange(0, form.OWN_ROWS, row_l)
    rows = row0 + token_of(row, form)
    line = line_of(row, rows, numbers, form, head)
    dim = gl.arange(0, HALF, gl.SliceLayout(0, o_l))
    for first in gl.static_range(0, COLUMNS, HALF):
        out = gl.convert_layout(columns_from(acc, first), o_l) * weight
        place = inputs.OUT + line[:, None] + (first + dim)[None, :]
        inside = (rows < row_end)[:, None]
        if COLUMNS < first + HALF:
            inside = inside & (first + dim < COLUMNS)[None, :]
        if form.ACCUMULATE:
            out += gl.load(place, mask=inside, other=0.0) * old_weight
        out = out.to(inputs.OUT.dtype.element_ty)
        if form.SPOOLS:
            spool_rows(ring, out, form, code, first)
            send_spooled(ring, row0, row_end, head, form, code, first)
            if row_end - row0 < form.ROWS:
                gl.store(place, out, mask=inside & unsent(rows, row0, row_end)[:, None])
        else:
            gl.store(place, out, mask=inside)


@gluon.jit
def line_of(row, token, numbers, form: gl.constexpr, head):
    """Where rows of out begin."""
    line = token.to(gl.int64) * as_offset(numbers.stride_ot)
    return line + head_of(row, head, form).to(gl.int64) * as_offset(numbers.stride_oh)


@gluon.jit
def columns_from(x, first: gl.constexpr):
    """64 columns of 64, 128 or 256: no number moves."""
    if x.shape[1] == 4 * HALF:
        pair = gl.split(x.reshape([x.shape[0], 2, 2 * HALF]).permute((0, 2, 1)))
        x = pair[first // (2 * HALF)]
    if x.shape[1] == 2 * HALF:
        pair = gl.split(x.reshape([x.shape[0], 2, HALF]).permute((0, 2, 1)))
        x = pair[first // HALF % 2]
    return x


# fmt: on
