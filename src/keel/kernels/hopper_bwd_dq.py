"""Hopper backward, dq in a fixed order: by tiles of queries, with sums in registers (Gluon, sm_90).

`hopper_bwd` has TMA add up what each tile of keys gives to dq, in an order that differs from run to
run. Here a block of threads keeps 128 queries and their dout, and keys and values pass by, over the
tiles of the forward. That costs scores and dp once more: seven products where one pass takes five.

Values are done with before keys, so that they need fewer stages where memory is short: one with
head dims of 256, of which the next block comes while ds and dq of this one are made.

One warp, the producer, brings everything by TMA. Two warpgroups of consumers own 64 rows each and
share nothing but keys and values. Scores are (rows, keys), so that ds is an operand in registers of
dq += ds k.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from keel._versions import tma_load, tma_store
from keel.kernels.early_launches import wait_for_launch_before
from keel.kernels.flash_common import LOG2E
from keel.kernels.hopper_common import (
    FIELDS,
    add_product,
    block_anew,
    blocks_anew,
    capped_with_slope,
    hidden_zero,
    hide,
    mark,
    no_sums,
    place_of,
    scores,
    touch,
    wait_for,
    work_of,
)
from keel.kernels.hopper_common import PART as HALF
from keel.kernels.hopper_terms import (
    TERM_NUMBERS,
    Terms,
    add_to_dbias,
    bias_by_rows,
    spot_of,
    with_alibi_by_rows,
    with_bias,
)

# fmt: off

K_FREE = gl.constexpr(9)
V_FREE = gl.constexpr(12)
"""First named barriers of the stages of keys and of values, and"""
Q_FREE = gl.constexpr(15)
"""that of queries and dout, where a block of threads stays for more."""


class Inputs(NamedTuple):
    """Descriptors (tokens, heads, dim), and pointers."""

    q: Any
    k: Any
    v: Any
    do: Any
    dq: Any
    LSE2: Any
    DELTA: Any
    DQ: Any
    TILES: Any
    RUNS: Any
    ROW_LO: Any
    ROW_HI: Any
    DBIAS: Any
    terms: Any


class Numbers(NamedTuple):
    scale: Any
    softcap: Any
    tq: Any
    num_tiles: Any
    section: Any
    num_heads: Any
    group: Any
    stride_dbh: Any
    stride_dbi: Any


class Ring(NamedTuple):
    """Shared memory and its barriers: `full` says that data came."""

    q: Any
    do: Any
    k: Any
    v: Any
    q_full: Any
    do_full: Any
    k_full: Any
    v_full: Any


class Tile(NamedTuple):
    row0: Any
    row_end: Any
    head: Any
    first: Any
    split: Any
    last: Any
    key: Any
    """First key and end of the first run."""
    end: Any


@gluon.jit
def my_tile(inputs, numbers, form: gl.constexpr, work):
    """As in `hopper_bwd`: lanes are query heads here."""
    if form.PERSISTENT:
        place, head = place_of(work, numbers.num_tiles, numbers.section)
    else:
        number = gl.program_id(2)
        section = blocks_anew() if form.ASKS_ANEW else gl.num_programs(0)
        head = number * section + gl.program_id(0)
        place = gl.program_id(1)
    record = inputs.TILES + place * FIELDS
    return Tile(gl.load(record), gl.load(record + 1), head, gl.load(record + 2),
                gl.load(record + 3), gl.load(record + 4), gl.load(record + 6),
                gl.load(record + 7))


@gluon.jit
def bring_tile(inputs, numbers, ring, form: gl.constexpr, work, turn, count):
    """Returns the number of blocks brought so far."""
    tile = my_tile(inputs, numbers, form, work)
    kv_head = tile.head // numbers.group
    if form.PERSISTENT:
        if turn > 0:
            wait_for(Q_FREE)
    mbarrier.expect(ring.q_full, 2 * HALF * form.D * 2)
    for half in gl.static_range(2):
        tma_load(inputs.q, [tile.row0 + half * HALF, tile.head, 0], ring.q_full, ring.q.index(half))
    mbarrier.expect(ring.do_full, 2 * HALF * form.DV * 2)
    for half in gl.static_range(2):
        tma_load(inputs.do, [tile.row0 + half * HALF, tile.head, 0], ring.do_full,
                 ring.do.index(half))
    key = tile.key
    end = tile.end
    for run in range(tile.first, tile.last):
        next_key = gl.load(inputs.RUNS + run * 4 + 4)  # behind the last run is one more
        next_end = gl.load(inputs.RUNS + run * 4 + 5)
        while key < end:
            stage = count % form.STAGES
            if count >= form.STAGES:
                wait_for(K_FREE + stage)
            mbarrier.expect(ring.k_full.index(stage), form.BN * form.D * 2)
            tma_load(inputs.k, [key, kv_head, 0], ring.k_full.index(stage), ring.k.index(stage))
            v_stage = count % form.V_STAGES
            if count >= form.V_STAGES:
                wait_for(V_FREE + v_stage)
            mbarrier.expect(ring.v_full.index(v_stage), form.BN * form.DV * 2)
            tma_load(inputs.v, [key, kv_head, 0], ring.v_full.index(v_stage), ring.v.index(v_stage))
            key += form.BN
            count += 1
        key = next_key
        end = next_end
    return count


@gluon.jit
def producer(inputs, numbers, ring, form: gl.constexpr):
    count = 0
    if form.PERSISTENT:
        num_work = (numbers.num_tiles + hidden_zero()) * numbers.num_heads
        turn = 0
        work = block_anew()
        while work < num_work:
            count = bring_tile(inputs, numbers, ring, form, work, turn, count)
            turn += 1
            work = work_of(turn)
        wait_for(Q_FREE)
    else:
        count = bring_tile(inputs, numbers, ring, form, 0, 0, count)
    for block in range(gl.maximum(count - form.STAGES, 0), count):  # marks nobody waited for
        wait_for(K_FREE + block % form.STAGES)
        if form.V_STAGES == form.STAGES:
            wait_for(V_FREE + block % form.V_STAGES)
    if form.V_STAGES < form.STAGES:
        for block in range(gl.maximum(count - form.V_STAGES, 0), count):
            wait_for(V_FREE + block % form.V_STAGES)
    if not form.PERSISTENT:
        # for dk and dv: who waits for dq has waited for these, too (`early_launches`)
        wait_for_launch_before()


@gluon.jit
def place_and_phase(count, STAGES: gl.constexpr, form: gl.constexpr):
    """Where block number `count` lies, and the phase of its barrier.

    Two ways to say the same: with a softcap, something is kept on the stack by the second; with a
    bias, loops of Triton 3.9 spill by the first.
    """
    if STAGES == 2 and form.HAS_SOFTCAP and not form.HAS_TERMS:
        return count & 1, (count >> 1) & 1
    else:
        return count % STAGES, (count // STAGES) & 1


@gluon.jit
def rows_of_set(inputs, run, mine):
    return gl.load(inputs.RUNS + run * 4 + 2) * (2 * HALF) + mine


@gluon.jit
def touch_bounds(inputs, run, mine):
    rows = rows_of_set(inputs, run, mine)
    touch(inputs.ROW_LO + rows)
    touch(inputs.ROW_HI + rows)


@gluon.jit
def bounds(inputs, run, mine):
    rows = rows_of_set(inputs, run, mine)
    return gl.load(inputs.ROW_LO + rows), gl.load(inputs.ROW_HI + rows)


@gluon.jit
def step(cid: gl.constexpr, inputs, numbers, ring, form: gl.constexpr, dq, count, key, lo, hi, lse2,
         delta, scale2, spot, MASKED: gl.constexpr, s_l: gl.constexpr):
    """What a block of keys adds to dq."""
    BN: gl.constexpr = form.BN
    D: gl.constexpr = form.D
    stage, phase = place_and_phase(count, form.STAGES, form)
    v_stage, v_phase = place_and_phase(count, form.V_STAGES, form)
    if form.V_STAGES == 1:  # nor should these addresses be known before the loops
        v_stage = hidden_zero()
    zero = gl.zeros([HALF, BN], gl.float32, s_l)
    k = ring.k.index(stage).reshape([BN, D])
    v = ring.v.index(v_stage).reshape([BN, form.DV])
    # addresses of wide blocks would take too many registers, if they were kept
    mine = cid + hidden_zero() if form.D + form.DV > 256 else cid
    q = ring.q.index(mine).reshape([HALF, D])
    do = ring.do.index(mine).reshape([HALF, form.DV])
    mbarrier.wait(ring.k_full.index(stage), phase)
    s = scores(q, k, zero, form.SHORT)
    if form.HAS_BIAS:  # before dp: there are no registers for both
        bias = bias_by_rows(inputs.terms, numbers.tq, form, spot, key, MASKED, s_l)
        s = warpgroup_mma_wait(0, [s])
        s = with_bias(s, numbers.scale, bias)
    mbarrier.wait(ring.v_full.index(v_stage), v_phase)
    dp = scores(do, v, zero, False)
    if not form.HAS_BIAS:
        s = warpgroup_mma_wait(1, [s])
        if form.HAS_ALIBI:
            s = with_alibi_by_rows(s, numbers.scale, spot, key)
    cap_scale = numbers.scale
    if form.HAS_TERMS:  # these are scaled
        cap_scale = 1.0
        scale2 = LOG2E
    if form.HAS_SOFTCAP:
        s, slope = capped_with_slope(s, cap_scale, numbers.softcap)
        p = gl.exp2(s * LOG2E - lse2[:, None]) * slope
        if MASKED:  # last: until then slopes take as many registers as scores
            p = hide(p, key, lo, hi, not form.HAS_BIAS, 0.0)
    else:
        if MASKED:
            s = hide(s, key, lo, hi, not form.HAS_BIAS)
        p = gl.exp2(s * scale2 - lse2[:, None])
    dp = warpgroup_mma_wait(0, [dp])
    mark(V_FREE + v_stage)
    ds = p * (dp - delta[:, None])
    if form.WANT_DBIAS:
        add_to_dbias(inputs, numbers, form, ds, spot, key, lo, hi, MASKED)
    dq = add_product(ds.to(ring.k.dtype), k, dq, form.SHORT)
    mark(K_FREE + stage)
    return dq


@gluon.jit
def write_directly(cid: gl.constexpr, inputs, numbers, form: gl.constexpr, tile, dq,
                   BEGIN: gl.constexpr):
    """From column BEGIN on."""
    layout: gl.constexpr = dq.type.layout
    rows = tile.row0 + cid * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    dim = BEGIN + gl.arange(0, dq.shape[1], gl.SliceLayout(0, layout))
    heads = numbers.num_heads + hidden_zero()  # as 64 bits it would be kept, on the stack
    place = (rows.to(gl.int64) * heads + (tile.head + hidden_zero())) * form.COLUMNS
    inside = (rows < tile.row_end)[:, None] & (dim < form.COLUMNS)[None, :]
    gl.store(inputs.DQ + place[:, None] + dim[None, :], dq.to(inputs.DQ.dtype.element_ty),
             mask=inside)


@gluon.jit
def write_all(cid: gl.constexpr, inputs, numbers, form: gl.constexpr, tile, dq):
    write_directly(cid, inputs, numbers, form, tile, dq[0], 0)
    if form.SHORT:
        write_directly(cid, inputs, numbers, form, tile, dq[1], 128)


@gluon.jit
def put_away(cid: gl.constexpr, inputs, numbers, ring, form: gl.constexpr, work, dq):
    tile = my_tile(inputs, numbers, form, work)  # again: registers are scarce in the loops
    if form.SHORT:
        dq = (dq[0] * numbers.scale, dq[1] * numbers.scale)
    else:
        dq = (dq[0] * numbers.scale,)
    if form.STAGED:
        if tile.row_end - tile.row0 == 2 * HALF:
            staged = ring.q.index(cid)  # read by this consumer alone, and not any more
            place = staged.reshape([HALF, form.D])
            if form.SHORT:  # columns behind these are outside of the tensor
                place.slice(0, 128, dim=1).store(dq[0].to(ring.q.dtype))
                place.slice(128, 64, dim=1).store(dq[1].to(ring.q.dtype))
            else:
                place.store(dq[0].to(ring.q.dtype))
            fence_async_shared()
            tma_store(inputs.dq, [tile.row0 + cid * HALF, tile.head, 0], staged)
        else:
            write_all(cid, inputs, numbers, form, tile, dq)
    else:
        write_all(cid, inputs, numbers, form, tile, dq)


@gluon.jit
def work_on(cid: gl.constexpr, inputs, numbers, ring, form: gl.constexpr, work, turn, count):
    """One tile; returns the number of blocks used so far."""
    BN: gl.constexpr = form.BN
    s_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    tile = my_tile(inputs, numbers, form, work)
    scale2 = numbers.scale * LOG2E
    mine = cid * HALF + gl.arange(0, HALF, gl.SliceLayout(1, s_l))
    rows = tile.row0 + mine
    there = rows < numbers.tq
    place = tile.head.to(gl.int64) * (numbers.tq + hidden_zero()) + rows
    # from the L2, where they are; an L1 cache need not know of it in an early launch
    lse2 = gl.load(inputs.LSE2 + place, mask=there, other=float("inf"), cache_modifier=".cg")
    delta = gl.load(inputs.DELTA + place, mask=there, other=0.0, cache_modifier=".cg")
    spot = spot_of(inputs.terms, numbers.tq, form, tile.head, rows, tile.row_end)
    dq = no_sums(form.D, form.SHORT)
    touch_bounds(inputs, tile.split, mine)
    run = tile.first
    mbarrier.wait(ring.q_full, turn & 1)
    mbarrier.wait(ring.do_full, turn & 1)
    while run < tile.last:  # not a loop for each kind of run: see the forward
        key = gl.load(inputs.RUNS + run * 4)
        end = gl.load(inputs.RUNS + run * 4 + 1)
        if run < tile.split:
            while key < end:
                dq = step(cid, inputs, numbers, ring, form, dq, count, key, None, None, lse2, delta,
                          scale2, spot, False, s_l)
                key += BN
                count += 1
        else:
            lo, hi = bounds(inputs, run, mine)
            touch_bounds(inputs, run + 1, mine)  # behind the last run is one more
            while key < end:
                dq = step(cid, inputs, numbers, ring, form, dq, count, key, lo, hi, lse2, delta,
                          scale2, spot, True, s_l)
                key += BN
                count += 1
        run += 1
    put_away(cid, inputs, numbers, ring, form, work, dq)
    tma.store_wait(0)
    return count


@gluon.jit
def consumer(cid: gl.constexpr, inputs, numbers, ring, form: gl.constexpr):
    count = 0
    if form.PERSISTENT:
        num_work = (numbers.num_tiles + hidden_zero()) * numbers.num_heads
        turn = 0
        work = block_anew()
        while work < num_work:
            count = work_on(cid, inputs, numbers, ring, form, work, turn, count)
            mark(Q_FREE)
            turn += 1
            work = work_of(turn)
    else:
        work_on(cid, inputs, numbers, ring, form, 0, 0, count)


@gluon.jit
def first_consumer(inputs, numbers, ring, form: gl.constexpr):
    consumer(0, inputs, numbers, ring, form)


@gluon.jit
def second_consumer(inputs, numbers, ring, form: gl.constexpr):
    consumer(1, inputs, numbers, ring, form)


NUMBERS = ["tq", "num_tiles", "section", "num_heads", "group", *TERM_NUMBERS]
NUMBERS += ["stride_dbh", "stride_dbi"]


@gluon.jit(do_not_specialize=NUMBERS)
def hopper_bwd_dq_kernel(
    Q, K, V, DO, DQ, LSE2, DELTA, DQ_OUT, TILES, RUNS, ROW_LO, ROW_HI,
    BIAS, SLOPES, OFFSET, DBIAS,
    scale, tq, num_tiles, section, num_heads, group, softcap,
    tk, stride_bh, stride_bi, stride_dbh, stride_dbi,
    FORM: gl.constexpr,
):
    D: gl.constexpr = FORM.D
    BN: gl.constexpr = FORM.BN
    STAGES: gl.constexpr = FORM.STAGES
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ring = Ring(
        q=gl.allocate_shared_memory(Q.dtype, [2, HALF, 1, D], Q.layout),
        do=gl.allocate_shared_memory(DO.dtype, [2, HALF, 1, FORM.DV], DO.layout),
        k=gl.allocate_shared_memory(K.dtype, [STAGES, BN, 1, D], K.layout),
        v=gl.allocate_shared_memory(V.dtype, [FORM.V_STAGES, BN, 1, FORM.DV], V.layout),
        q_full=gl.allocate_shared_memory(gl.int64, [1], barrier),
        do_full=gl.allocate_shared_memory(gl.int64, [1], barrier),
        k_full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        v_full=gl.allocate_shared_memory(gl.int64, [FORM.V_STAGES, 1], barrier),
    )
    mbarrier.init(ring.q_full, 1)
    mbarrier.init(ring.do_full, 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.k_full.index(i), 1)
        if i < FORM.V_STAGES:
            mbarrier.init(ring.v_full.index(i), 1)
    fence_async_shared()
    terms = Terms(BIAS, SLOPES, OFFSET, tk, stride_bh, stride_bi)
    inputs = Inputs(Q, K, V, DO, DQ, LSE2, DELTA, DQ_OUT, TILES, RUNS, ROW_LO, ROW_HI, DBIAS, terms)
    numbers = Numbers(scale, softcap, tq, num_tiles, section, num_heads, group, stride_dbh,
                      stride_dbi)
    gl.warp_specialize([
        (first_consumer, (inputs, numbers, ring, FORM)),
        (second_consumer, (inputs, numbers, ring, FORM)),
        (producer, (inputs, numbers, ring, FORM)),
    ], [4, 1], [240, 24])


# fmt: on
