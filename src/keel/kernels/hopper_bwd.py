"""Hopper backward: dq, dk and dv in one pass, by specialised warps (Gluon, sm_90).

A block of threads keeps a tile of 128 keys and values. One warp, the producer
(`hopper_bwd_producer`), brings blocks of queries and of dout, for each query head that shares the
keys. Two warpgroups of consumers own 64 keys each. Scores are transposed, (keys, rows), so that
probabilities and their gradients are operands in registers of

    dv += pᵀ dout        dk += dsᵀ q

and only ds goes through shared memory, where both consumers find all of it for dq = ds k. Each of
them makes half of dq and has TMA add it up in fp32; dk and dv are written once. dq may also be left
to `hopper_bwd_dq`: the order in which TMA adds differs from run to run. Heads of more than 128
columns are `hopper_bwd_wide`'s.

A mask is the rows [lo, hi) that see a key, two numbers for each of the two keys of a thread. Blocks
of rows that hang over the end are masked, as are keys that a short tile does not have. Keys that
nobody sees get zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from keel._versions import tma_add, tma_store
from keel.kernels.early_launches import let_next_launch_begin, wait_for_launch_before
from keel.kernels.flash_common import LOG2E
from keel.kernels.hopper_bwd_producer import (
    ARRIVALS,
    DO_FREE,
    KV_FREE,
    NUMBERS,
    Q_FREE,
    SET_UP,
    Inputs,
    Numbers,
    end_of_turn,
    my_tile,
    producer,
    round_of,
    way_through,
    work_behind,
)
from keel.kernels.hopper_common import PART as HALF
from keel.kernels.hopper_common import (
    anew,
    as_offset,
    block_anew,
    capped_with_slope,
    hidden_zero,
    mark,
    phase_of,
    stage_of,
    touch,
    unknown_zero,
    wait_for,
)
from keel.kernels.hopper_staging import store_turned
from keel.kernels.hopper_terms import (
    Terms,
    bias_by_keys,
    key_of_run,
    origin_of,
    slope_of,
    with_alibi_by_keys,
    with_bias,
)

# fmt: off


class Ring(NamedTuple):
    """Shared memory and its barriers: `full` says that data came."""

    q: Any
    do: Any
    k: Any
    v: Any
    ds: Any
    dq: Any
    lse2: Any
    delta: Any
    offset: Any
    q_full: Any
    do_full: Any
    k_full: Any
    v_full: Any


@gluon.jit
def meet():
    """Both consumers have come this far."""
    gl.inline_asm_elementwise("bar.sync 13, 256; mov.u32 $0, 0;", "=r,~{memory}", [],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bounds(inputs, form: gl.constexpr, run, mine):
    """Rows [lo, hi) that the keys of a run see."""
    keys = gl.load(inputs.RUNS + run * 4 + 2) * (form.PARTS * HALF) + mine
    return gl.load(inputs.KEY_LO + keys), gl.load(inputs.KEY_HI + keys)


@gluon.jit
def touch_bounds(inputs, form: gl.constexpr, run, mine):
    """Brings them near, into no register."""
    keys = gl.load(inputs.RUNS + run * 4 + 2) * (form.PARTS * HALF) + mine
    touch(inputs.KEY_LO + keys)
    touch(inputs.KEY_HI + keys)


@gluon.jit
def seen(s, row, lo, hi):
    """`hide`, for keys that see rows [lo, hi), in three instructions where LLVM takes four."""
    ROWS: gl.constexpr = s.shape[1]
    t = s.reshape([HALF, ROWS // 8, 8])
    L: gl.constexpr = t.type.layout
    octet = 8 * gl.arange(0, ROWS // 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    inner = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :]
    key_l: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, L))
    low = (gl.convert_layout(lo, key_l) - row)[:, None] - inner
    high = (gl.convert_layout(hi, key_l) - row)[:, None] - inner
    t = gl.inline_asm_elementwise(
        """{
        .reg .pred inside;
        setp.ge.s32 inside, $2, $3;
        setp.lt.and.s32 inside, $2, $4, inside;
        selp.f32 $0, $1, 0fFF800000, inside;
        }""", "=f,f,r,r,r", [t, octet, low[:, None, :], high[:, None, :]],
        dtype=gl.float32, is_pure=True, pack=1)
    return gl.convert_layout(t.reshape([HALF, ROWS]), s.type.layout)


@gluon.jit
def of_half(x, half: gl.constexpr, layout: gl.constexpr):
    """64 columns of 64 or 128: no number moves."""
    if x.shape[1] == HALF:
        return x
    else:
        pair = gl.split(x.reshape([HALF, 2, HALF]).permute((0, 2, 1)))
        return gl.convert_layout(pair[half], layout)


@gluon.jit
def of_rows(numbers, stage, half: gl.constexpr, s_l: gl.constexpr):
    """Row vectors, which lie along columns here: asked for while products are made, since shared
    memory has much to do and answers late."""
    return numbers.index(stage).slice(half * HALF, HALF).load(gl.SliceLayout(0, s_l))


@gluon.jit
def probability(s, lse2, numbers, ring, form: gl.constexpr, stage, half: gl.constexpr, row, lo, hi,
                key, alibi, MASKED: gl.constexpr):
    """(p, what dp - delta is multiplied by: p times the slope of capped scores).

    Scores with a bias are scaled already.
    """
    if form.HAS_ALIBI:
        s = with_alibi_by_keys(s, numbers.scale, ring, form, stage, half, row, key, alibi)
    if form.HAS_TERMS:
        if form.HAS_SOFTCAP:
            s, slope = capped_with_slope(s, 1.0, anew(numbers.softcap))
        scale2 = LOG2E
    elif form.HAS_SOFTCAP:
        s, slope = capped_with_slope(s, numbers.scale, numbers.softcap)
        scale2 = LOG2E
    else:
        scale2 = numbers.scale * LOG2E
    if MASKED:
        s = seen(s, row + half * HALF, lo, hi)
    if lse2 is None:
        s_l: gl.constexpr = s.type.layout
        lse2 = of_rows(ring.lse2, stage, half, s_l)
    p = gl.exp2(s * scale2 - lse2[None, :])
    if form.HAS_SOFTCAP:
        return p, p * slope
    else:
        return p, p


@gluon.jit
def step(cid: gl.constexpr, inputs, numbers, ring, form: gl.constexpr, dk, dv, count, row, head,
         lo, hi, key, alibi, MASKED: gl.constexpr, s_l: gl.constexpr, a_l: gl.constexpr):
    """What a block of rows adds to dk, dv and dq."""
    BM: gl.constexpr = form.BM
    D: gl.constexpr = form.D
    dq_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    # where there are registers for it
    FEW: gl.constexpr = MASKED or not form.TOGETHER if BM > HALF else MASKED and form.TOGETHER
    AHEAD: gl.constexpr = not (form.HAS_SOFTCAP or form.PERSISTENT or FEW)
    if form.PLAIN or form.ASKS_ANEW or (form.HAS_BIAS and BM > HALF):
        # with the other one, plain loops read the number of their thread again and again, and those
        # of a bias and a softcap spill
        stage = count % form.STAGES
        phase = (count // form.STAGES) & 1
    else:
        stage = stage_of(count, form)
        phase = phase_of(count, form)
    first = hidden_zero()
    zero = gl.zeros([HALF, BM], gl.float32, s_l)
    q = ring.q.index(stage).reshape([BM, D])
    do = ring.do.index(stage).reshape([BM, D])
    k_mine = ring.k.index(first + cid).reshape([HALF, D])
    v_mine = ring.v.index(first + cid).reshape([HALF, D])
    # ds has two buffers: when consumers meet again, nobody reads the one before any more
    buffer = 2 * (count & 1)
    mbarrier.wait(ring.q_full.index(stage), phase)
    s = warpgroup_mma(k_mine, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse2 = None
    if AHEAD:
        lse2 = of_rows(ring.lse2, stage, 0, dq_l)
    if form.HAS_BIAS:  # before dp: there are no registers for both
        bias = bias_by_keys(inputs.terms, form, numbers.tq, head, key, row, MASKED, s_l)
        s = warpgroup_mma_wait(0, [s])
        s = with_bias(s, numbers.scale, bias)
    mbarrier.wait(ring.do_full.index(stage), phase)
    dp = warpgroup_mma(v_mine, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not form.HAS_BIAS:
        s = warpgroup_mma_wait(1, [s])
    for half in gl.static_range(BM // HALF):
        rows = of_half(s, half, dq_l)
        p, weight = probability(rows, lse2, numbers, ring, form, stage, half, row, lo, hi, key,
                                alibi, MASKED)
        lse2 = None
        if AHEAD:
            delta = of_rows(ring.delta, stage, half, dq_l)
        # before dp is waited for: else ptxas has the exponentials done when it is there
        dv = warpgroup_mma(gl.convert_layout(p.to(ring.k.dtype), a_l), do.slice(half * HALF, HALF),
                           dv, is_async=True)
        if half == 0:
            dp = warpgroup_mma_wait(1, [dp])
        if not AHEAD:
            delta = of_rows(ring.delta, stage, half, dq_l)
        ds = (weight * (of_half(dp, half, dq_l) - delta[None, :])).to(ring.k.dtype)
        if form.WITH_DQ:
            ring.ds.index(buffer + cid).slice(half * HALF, HALF, dim=1).store(ds)
        if (half + 1) * HALF < BM:
            dk = warpgroup_mma(gl.convert_layout(ds, a_l), q.slice(half * HALF, HALF), dk,
                               is_async=True)
    if not form.WITH_DQ:
        dk = warpgroup_mma(gl.convert_layout(ds, a_l), q.slice(BM - HALF, HALF), dk, is_async=True)
        dv = warpgroup_mma_wait(1, [dv])
        mark(DO_FREE + stage)
        dk = warpgroup_mma_wait(0, [dk])
        mark(Q_FREE + stage)
    else:
        fence_async_shared()
        meet()
        dq = gl.zeros([HALF, HALF], gl.float32, dq_l)
        for half in gl.static_range(2):
            k = ring.k.index(first + half).reshape([HALF, D])
            ds_half = ring.ds.index(buffer + half)
            if BM == HALF:  # 64 columns of dq, those of this consumer
                k = k.slice(cid * HALF, HALF, dim=1)
            else:  # 64 rows
                ds_half = ds_half.slice(cid * HALF, HALF, dim=1)
            dq = warpgroup_mma(ds_half.permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, a_l), q.slice(BM - HALF, HALF), dk, is_async=True)
        dv = warpgroup_mma_wait(3, [dv])
        mark(DO_FREE + stage)
        dq = warpgroup_mma_wait(1, [dq])
        tma.store_wait(0)  # the dq before this one has left shared memory
        staged = ring.dq.index(cid)
        if form.HAS_SOFTCAP:  # selects would make the loop spill
            staged.reshape([HALF, HALF]).store(dq)
        else:
            store_turned(staged, dq)
        fence_async_shared()
        if BM == HALF:
            tma_add(inputs.dq, [row, head, cid * HALF], staged)
        elif row + cid * HALF < numbers.tq:  # nothing is sent that lies outside altogether
            tma_add(inputs.dq, [row + cid * HALF, head, 0], staged)
        dk = warpgroup_mma_wait(0, [dk])
        mark(Q_FREE + stage)
    return dk, dv


@gluon.jit
def write_rows(POINTER, x, first, end, lane, num_lanes, COLUMNS: gl.constexpr,
               BEGIN: gl.constexpr = 0):
    """x from column BEGIN on, into rows of COLUMNS."""
    layout: gl.constexpr = x.type.layout
    rows = first + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    zero = unknown_zero(first)
    dim = BEGIN + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    dim += zero * HALF  # a multiple of 16, so that pairs are stored together
    line = rows.to(gl.int64) * as_offset(num_lanes + zero) + lane
    place = POINTER + (line * COLUMNS)[:, None] + dim[None, :]
    inside = (rows < end)[:, None] & (dim < COLUMNS)[None, :]
    gl.store(place, x.to(POINTER.dtype.element_ty), mask=inside)


@gluon.jit
def write_directly(cid: gl.constexpr, inputs, numbers, form: gl.constexpr, tile, dk, dv):
    first = tile.key0 + cid * HALF
    lanes = numbers.num_lanes
    write_rows(inputs.DV, dv, first, tile.key_end, tile.lane, lanes, form.DV_COLUMNS)
    write_rows(inputs.DK, dk, first, tile.key_end, tile.lane, lanes, form.DK_COLUMNS)


@gluon.jit
def put_away(cid: gl.constexpr, inputs, numbers, ring, form: gl.constexpr, work, dk, dv):
    tile = my_tile(inputs, numbers, form, work)  # again: registers are scarce in the loops
    dk = dk * numbers.scale
    if form.STAGED:
        if tile.whole != 0:  # TMA clips at the end of a tensor, not at that of a short tile
            first = tile.key0 + cid * HALF
            zero = unknown_zero(tile.key0)
            mine = cid + zero
            # values are read by their own consumer alone; keys by both, for dq
            ring.v.index(mine).reshape([HALF, form.D]).store(dv.to(ring.v.dtype))
            if form.WITH_DQ:
                meet()
            ring.k.index(mine).reshape([HALF, form.D]).store(dk.to(ring.k.dtype))
            fence_async_shared()
            tma_store(inputs.dv, [first, tile.lane, 0], ring.v.index(mine))
            # with the same coordinates, ptxas would change one operand for this store, and keep
            # what was there before on the stack
            tma_store(inputs.dk, [first, tile.lane, zero], ring.k.index(mine))
        else:
            write_directly(cid, inputs, numbers, form, tile, dk, dv)
    else:
        write_directly(cid, inputs, numbers, form, tile, dk, dv)


@gluon.jit
def go_by_heads(cid: gl.constexpr, inputs, numbers, ring, form: gl.constexpr, tile, dk, dv, count,
                mine, s_l: gl.constexpr, a_l: gl.constexpr):
    """All rows of a tile, for one head after the other."""
    origin = origin_of(inputs.terms, numbers.tq, form, tile.key0 + cid * HALF)
    end_head = (tile.lane + 1) * numbers.heads_each
    left = numbers.heads_each  # not the number of a head, which not all forms need
    if not form.READS_AHEAD:
        touch_bounds(inputs, form, tile.split, mine)
    while left > 0:
        if form.ASKS_ANEW:
            head = (tile.lane + 1 + hidden_zero()) * numbers.heads_each - left
        else:
            head = end_head - left
        run = tile.first
        alibi = slope_of(inputs.terms, form, head)
        if form.READS_AHEAD:
            row = gl.load(inputs.RUNS + run * 4)
            end = gl.load(inputs.RUNS + run * 4 + 1)
        while run < tile.last:  # not a loop for each kind of run: see the forward
            if form.READS_AHEAD:
                next_row = gl.load(inputs.RUNS + run * 4 + 4)  # behind the last run is one more
                next_end = gl.load(inputs.RUNS + run * 4 + 5)
            else:
                row = gl.load(inputs.RUNS + run * 4)
                end = gl.load(inputs.RUNS + run * 4 + 1)
            key = key_of_run(origin, form)
            if run < tile.split:
                while row < end:
                    dk, dv = step(cid, inputs, numbers, ring, form, dk, dv, count, row, head, None,
                                  None, key, alibi, False, s_l, a_l)
                    row += form.BM
                    count += 1
            else:
                lo, hi = bounds(inputs, form, run, mine)
                touch_bounds(inputs, form, run + 1, mine)
                while row < end:
                    dk, dv = step(cid, inputs, numbers, ring, form, dk, dv, count, row, head, lo,
                                  hi, key, alibi, True, s_l, a_l)
                    row += form.BM
                    count += 1
            if form.READS_AHEAD:
                row = next_row
                end = next_end
            run += 1
        left -= 1
    return dk, dv, count


@gluon.jit
def go_together(cid: gl.constexpr, inputs, numbers, ring, form: gl.constexpr, work, tile, dk, dv,
                count, mine, s_l: gl.constexpr, a_l: gl.constexpr):
    """All rows of a tile, heads in turns (`key_order`). Nothing is read ahead of a run: where heads
    take turns there are few, and there are no registers for it."""
    first_head = tile.lane * numbers.heads_each
    end_head = first_head + numbers.heads_each
    run = tile.first
    while run < tile.last:
        row, end, stride = way_through(inputs, work, run)
        if run < tile.split:
            while row != end:
                stop = end_of_turn(numbers, row, end, stride)
                for head in range(first_head, end_head):
                    at = row
                    while at != stop:
                        dk, dv = step(cid, inputs, numbers, ring, form, dk, dv, count, at, head,
                                      None, None, None, None, False, s_l, a_l)
                        at += stride
                        count += 1
                row = stop
        else:
            lo, hi = bounds(inputs, form, run, mine)
            while row != end:
                stop = end_of_turn(numbers, row, end, stride)
                for head in range(first_head, end_head):
                    at = row
                    while at != stop:
                        here = at
                        if form.BM == HALF:  # else ptxas counts on, in registers that it lacks
                            here += unknown_zero(at)
                        dk, dv = step(cid, inputs, numbers, ring, form, dk, dv, count, here, head,
                                      lo, hi, None, None, True, s_l, a_l)
                        at += stride
                        count += 1
                row = stop
        run += 1
    return dk, dv, count


@gluon.jit
def work_on(cid: gl.constexpr, inputs, numbers, ring, form: gl.constexpr, work, count):
    """One tile; returns the number of blocks used so far."""
    BM: gl.constexpr = form.BM
    D: gl.constexpr = form.D
    s_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    kv_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=kv_l, k_width=2)
    tile = my_tile(inputs, numbers, form, work)
    mine = cid * HALF + gl.arange(0, HALF, gl.SliceLayout(1, s_l))
    dk = gl.zeros([HALF, D], gl.float32, kv_l)
    dv = gl.zeros([HALF, D], gl.float32, kv_l)
    mbarrier.wait(ring.k_full, round_of(form, work) & 1)
    mbarrier.wait(ring.v_full, round_of(form, work) & 1)
    if form.TOGETHER:
        dk, dv, count = go_together(cid, inputs, numbers, ring, form, work, tile, dk, dv, count,
                                    mine, s_l, a_l)
    else:
        dk, dv, count = go_by_heads(cid, inputs, numbers, ring, form, tile, dk, dv, count, mine,
                                    s_l, a_l)
    put_away(cid, inputs, numbers, ring, form, work, dk, dv)
    tma.store_wait(0)
    return count


@gluon.jit
def consumer(cid: gl.constexpr, inputs, numbers, ring, form: gl.constexpr):
    count = 0
    if form.PERSISTENT:
        work = block_anew()
        while work >= 0:
            count = work_on(cid, inputs, numbers, ring, form, work, count)
            mark(KV_FREE)
            work = work_behind(inputs, numbers, form, work)
    else:
        if form.PRODUCER_BEGINS:
            wait_for(SET_UP)
        work_on(cid, inputs, numbers, ring, form, gl.program_id(0), count)


@gluon.jit
def first_consumer(inputs, numbers, ring, form: gl.constexpr):
    consumer(0, inputs, numbers, ring, form)


@gluon.jit
def second_consumer(inputs, numbers, ring, form: gl.constexpr):
    consumer(1, inputs, numbers, ring, form)


@gluon.jit(do_not_specialize=[*NUMBERS, "turn"])
def hopper_bwd_kernel(
    Q, K, V, DO, DQ32, DK, DV, LSE2, DELTA, DK_OUT, DV_OUT, TILES, RUNS, KEY_LO, KEY_HI,
    BIAS, SLOPES, OFFSET,
    scale, tq, splits, heads_each, num_tiles, section, num_lanes, turn, softcap,
    tk, stride_bh, stride_bi,
    FORM: gl.constexpr,
):
    D: gl.constexpr = FORM.D
    BM: gl.constexpr = FORM.BM
    STAGES: gl.constexpr = FORM.STAGES
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ds_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BM], K.dtype)
    rows_l: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ds = None
    dq = None
    offset = None
    if FORM.HAS_OFFSET:
        offset = gl.allocate_shared_memory(gl.int32, [STAGES, BM], rows_l)
    if FORM.WITH_DQ:
        ds = gl.allocate_shared_memory(K.dtype, [4, HALF, BM], ds_l)
        dq = gl.allocate_shared_memory(gl.float32, [2, HALF, 1, HALF], DQ32.layout)
    ring = Ring(
        q=gl.allocate_shared_memory(Q.dtype, [STAGES, BM, 1, D], Q.layout),
        do=gl.allocate_shared_memory(DO.dtype, [STAGES, BM, 1, D], DO.layout),
        k=gl.allocate_shared_memory(K.dtype, [2, HALF, 1, D], K.layout),
        v=gl.allocate_shared_memory(V.dtype, [2, HALF, 1, D], V.layout),
        ds=ds,
        dq=dq,
        lse2=gl.allocate_shared_memory(gl.float32, [STAGES, BM], rows_l),
        delta=gl.allocate_shared_memory(gl.float32, [STAGES, BM], rows_l),
        offset=offset,
        q_full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        do_full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        k_full=gl.allocate_shared_memory(gl.int64, [1], barrier),
        v_full=gl.allocate_shared_memory(gl.int64, [1], barrier),
    )
    if not FORM.PRODUCER_BEGINS:
        # not by `set_up_barriers`: some forms are compiled a little differently then, for nothing
        mbarrier.init(ring.k_full, 1)
        mbarrier.init(ring.v_full, 1)
        for i in gl.static_range(STAGES):
            mbarrier.init(ring.q_full.index(i), ARRIVALS)
            mbarrier.init(ring.do_full.index(i), ARRIVALS)
        fence_async_shared()
    if not FORM.PERSISTENT:
        wait_for_launch_before()
        let_next_launch_begin()
    terms = Terms(BIAS, SLOPES, OFFSET, tk, stride_bh, stride_bi)
    inputs = Inputs(Q, K, V, DO, DQ32, DK, DV, LSE2, DELTA, DK_OUT, DV_OUT, TILES, RUNS,
                    KEY_LO, KEY_HI, terms)
    numbers = Numbers(scale, softcap, tq, splits, heads_each, num_tiles, section, num_lanes, turn)
    gl.warp_specialize([
        (first_consumer, (inputs, numbers, ring, FORM)),
        (second_consumer, (inputs, numbers, ring, FORM)),
        (producer, (inputs, numbers, ring, FORM)),
    ], [4, 1], [FORM.SECOND_REGISTERS, FORM.PRODUCER_REGISTERS])


# fmt: on
