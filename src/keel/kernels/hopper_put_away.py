"""Results of the Hopper forward's tiles: parts that meet, sink, out, lse and maxima of rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from keel._versions import thread_barrier, tma_store
from keel.kernels.flash_common import LN2, LOG2E
from keel.kernels.hopper_common import (
    PART,
    SHARE_BITS,
    as_logits,
    as_offset,
    raise_max,
    reciprocal,
)
from keel.kernels.hopper_rows import head_of, token_of

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
def put_away(cid: gl.constexpr, inputs, numbers, ring, form: gl.constexpr, LAST: gl.constexpr,
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
            row_top = raw_top
        row_top = row_top + total * 0.0  # maxima drop NaNs, sums keep them
        row_top = gl.where(there, row_top, float("-inf"))
    if form.TOPS:
        ring.tops.index(form.CONSUMERS * buffer + cid).store(row_top)
        if LAST:
            mbarrier.arrive(ring.q_empty.index(buffer), count=1)
    if form.CUTS:
        complete = share < 0
        if share >= 0:
            acc, total, top2, complete = meet(
                cid, inputs, numbers, form, share, head, there, acc, total, top2, o_l)
        if complete:
            write_out(cid, inputs, numbers, ring, form, row0, row_end, head, buffer, acc, total,
                      top2, mine, o_l)
    else:
        write_out(cid, inputs, numbers, ring, form, row0, row_end, head, buffer, acc, total, top2,
                  mine, o_l)
    if form.WANT_MAX and not form.TOPS:
        raise_max(inputs.MAX_LOGITS + head, as_logits(row_top, form))


@gluon.jit
def meet(cid: gl.constexpr, inputs, numbers, form: gl.constexpr, share, head, there, acc, total,
         top2, o_l: gl.constexpr):
    """Leaves what a part of a tile has summed up; the last part to come adds up all of them.

    there: rows that the tile has; of others nothing is left.

    Consumers of the same rows meet, each by itself, and none ever waits for another one: a part
    that is not the last leaves. All parts are read back, the last one's own as well, in the order
    of their keys: who comes last changes no bit.

    Why what is read is what was written: each thread's stores come before the barrier of its
    warpgroup, and that before the atomic of one of its threads, which releases them to the whole
    GPU (a release covers what the releasing thread has seen by way of a barrier). The last one's
    atomic reads a number that all others have added to, in one chain of atomics, and acquires
    their stores; its warpgroup learns of the number behind another barrier. Loads pass by the L1.
    """
    row_l: gl.constexpr = gl.SliceLayout(1, o_l)
    srow_l: gl.constexpr = top2.type.layout
    SIZE: gl.constexpr = PART * (form.DV + 2)
    parts = (share >> SHARE_BITS) & ((1 << SHARE_BITS) - 1)
    meeting = (share >> (2 * SHARE_BITS)) * numbers.num_heads + head
    first = inputs.PARTS + (
        (meeting.to(gl.int64) * numbers.most_parts) * form.CONSUMERS + cid) * SIZE
    rows = gl.arange(0, PART, srow_l)
    cells = gl.arange(0, PART, row_l)[:, None] * form.DV
    cells = cells + gl.arange(0, form.DV, gl.SliceLayout(0, o_l))[None, :]
    inside = gl.convert_layout(there, row_l)[:, None]
    own = first + (share & ((1 << SHARE_BITS) - 1)) * (form.CONSUMERS * SIZE)
    gl.store(own + cells, acc, mask=inside)
    gl.store(own + PART * form.DV + rows, top2, mask=there)
    gl.store(own + PART * (form.DV + 1) + rows, total, mask=there)
    thread_barrier()
    counter = inputs.MEETINGS + meeting * form.CONSUMERS + cid
    came = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    complete = came == parts - 1
    if complete:
        gl.store(counter, 0)  # nobody else comes; ready for the next launch
        tops = first + PART * form.DV + rows
        top2 = gl.full([PART], float("-inf"), gl.float32, srow_l)
        for part in range(0, parts, 2):
            for n in gl.static_range(2):  # under way together
                its_top2 = gl.load(tops + (part + n) * (form.CONSUMERS * SIZE),
                                   mask=there & (part + n < parts), other=float("-inf"),
                                   cache_modifier=".cg")
                top2 = gl.maximum(top2, its_top2)
        shift = gl.where(top2 == float("-inf"), 0.0, top2)
        total = gl.zeros([PART], gl.float32, srow_l)
        acc = gl.zeros([PART, form.DV], gl.float32, o_l)
        for part in range(parts):
            base = first + part * (form.CONSUMERS * SIZE)
            its_top2 = gl.load(base + PART * form.DV + rows, mask=there, other=float("-inf"),
                               cache_modifier=".cg")
            its_total = gl.load(base + PART * (form.DV + 1) + rows, mask=there, other=0.0,
                                cache_modifier=".cg")
            its_acc = gl.load(base + cells, mask=inside, other=0.0, cache_modifier=".cg")
            weight = gl.exp2(its_top2 - shift)
            total += its_total * weight
            acc += its_acc * gl.convert_layout(weight, row_l)[:, None]
    return acc, total, top2, complete


@gluon.jit
def write_out(cid: gl.constexpr, inputs, numbers, ring, form: gl.constexpr, row0, row_end, head,
              buffer, acc, total, top2, mine, o_l: gl.constexpr):
    """Sink, lse and out of a tile."""
    row_l: gl.constexpr = gl.SliceLayout(1, o_l)
    rows = row0 + token_of(mine, form)
    there = rows < row_end
    if form.HAS_SINK:
        sink2 = gl.load(inputs.SINK + head_of(mine, head, form)).to(gl.float32) * LOG2E
        new_top2 = gl.maximum(top2, sink2)
        shift = gl.where(new_top2 == float("-inf"), 0.0, new_top2)
        decay = gl.exp2(top2 - shift)
        total = total * decay + gl.exp2(sink2 - shift)
        acc = acc * gl.convert_layout(decay, row_l)[:, None]
        top2 = new_top2
    empty = total == 0.0
    denominator = gl.where(empty, 1.0, total)
    lse = gl.where(empty, float("-inf"), (top2 + quick_log2(denominator, form)) * LN2)
    out = acc * gl.convert_layout(reciprocal(denominator), row_l)[:, None]
    lse_place = inputs.LSE + as_offset(rows) * as_offset(numbers.num_heads * form.PACK)
    lse_place += head_of(mine, head, form)
    dim = gl.arange(0, form.DV, gl.SliceLayout(0, o_l))
    if form.PACK == 1:
        out_rows = row0 + cid * PART + gl.arange(0, PART, row_l)
        place = inputs.OUT + (out_rows.to(gl.int64) * as_offset(numbers.stride_ot))[:, None]
        place += head.to(gl.int64) * as_offset(numbers.stride_oh) + dim[None, :]
    else:
        row = cid * PART + gl.arange(0, PART, row_l)
        out_rows = row0 + token_of(row, form)
        line = out_rows.to(gl.int64) * as_offset(numbers.stride_ot)
        line += head_of(row, head, form).to(gl.int64) * as_offset(numbers.stride_oh)
        place = inputs.OUT + line[:, None] + dim[None, :]
    inside = (out_rows < row_end)[:, None]
    if form.COLUMNS > 0:
        inside = inside & (dim < form.COLUMNS)[None, :]
    if form.ACCUMULATE:
        old_lse = gl.load(lse_place, mask=there, other=float("-inf"))
        high = gl.maximum(lse, old_lse)
        high = gl.where(high == float("-inf"), 0.0, high)
        new_part = gl.exp2((lse - high) * LOG2E)
        old_part = gl.exp2((old_lse - high) * LOG2E)
        both = new_part + old_part
        nothing = both == 0.0
        both = gl.where(nothing, 1.0, both)
        old = gl.load(place, mask=inside, other=0.0)
        out = out * gl.convert_layout(new_part / both, row_l)[:, None]
        out += old * gl.convert_layout(old_part / both, row_l)[:, None]
        lse = gl.where(nothing, float("-inf"), high + gl.log2(both) * LN2)
    gl.store(lse_place, lse, mask=there)
    out = out.to(inputs.OUT.dtype.element_ty)
    if not form.STAGED:
        gl.store(place, out, mask=inside)
    else:
        TOKENS: gl.constexpr = PART // form.PACK
        if row_end - row0 >= (cid + 1) * TOKENS:  # all its rows; their queries are needed no more
            staged = ring.q.index(form.CONSUMERS * buffer + cid)
            staged.reshape([PART, form.D]).store(out)
            fence_async_shared()
            tma_store(inputs.o, [row0 + cid * TOKENS, head * form.PACK, 0], staged)
        else:
            gl.store(place, out, mask=inside)


# fmt: on
