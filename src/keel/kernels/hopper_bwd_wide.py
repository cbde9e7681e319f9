"""Hopper backward for wide heads: dk and dv, one of them to each consumer (Gluon, sm_90).

Columns of 256 fill a warpgroup's registers with one sum of 64 keys, so here a block of threads
keeps 64 keys and values. The first consumer makes scores, probabilities and dv, the second dp and
dk, with the same number of products each:

    first     s = k qᵀ         p = exp(s)             dv += pᵀ dout
    second    dp = v doutᵀ     ds = w (dp - delta)    dk += dsᵀ q

All that goes between them is w, which is p, times the slope of a softcap: 64 x 64 in fp32 through
shared memory, one way. dq is `hopper_bwd_dq`'s. The producer is that of `hopper_bwd`. Where the
last quarter of 256 columns of queries and keys is zeros, it is left out of products (SHORT).

Who may write where, for block n in stage n % STAGES:

- The first consumer writes w when q of block n has come. TMA brought that after both consumers
  were done with block n - STAGES, of which the second had then read its w.
- The second reads w behind a named barrier at which the first only arrives. The first comes there
  again for block n + STAGES, so after q of that has come, so after the second was there.
- Nobody waits for the second consumer but the producer, so all waits end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from keel.kernels.early_launches import let_next_launch_begin, wait_for_launch_before
from keel.kernels.hopper_bwd import bounds, of_rows, probability, touch_bounds, write_rows
from keel.kernels.hopper_bwd_producer import (
    ARRIVALS,
    DO_FREE,
    KV_FREE,
    NUMBERS,
    Q_FREE,
    Inputs,
    Numbers,
    my_tile,
    producer,
    round_of,
    work_behind,
)
from keel.kernels.hopper_common import PART as HALF
from keel.kernels.hopper_common import (
    add_product,
    block_anew,
    hidden_zero,
    mark,
    no_sums,
    phase_of,
    scores,
    stage_of,
)
from keel.kernels.hopper_terms import (
    Terms,
    bias_by_keys,
    key_of_run,
    origin_of,
    slope_of,
    with_bias,
)

# fmt: off

WEIGHTS_READY = gl.constexpr(13)
"""Named barriers 13 and 15 of two stages: 14 is KV_FREE."""


class Ring(NamedTuple):
    """Shared memory and its barriers: `full` says that data came."""

    q: Any
    do: Any
    k: Any
    v: Any
    weights: Any
    lse2: Any
    delta: Any
    offset: Any
    q_full: Any
    do_full: Any
    k_full: Any
    v_full: Any


@gluon.jit
def hand_over(stage):
    """Weights are there: the first consumer goes on, the second waits for it."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r,~{memory}", [WEIGHTS_READY + 2 * stage],
        dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_over(stage):
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, 0;", "=r,r,~{memory}", [WEIGHTS_READY + 2 * stage],
        dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def add_to_dv(inputs, numbers, ring, form: gl.constexpr, dv, count, row, head, lo, hi, key, alibi,
              MASKED: gl.constexpr, s_l: gl.constexpr):
    """What a block of rows adds to dv; its weights for the other consumer."""
    stage = stage_of(count, form)
    phase = phase_of(count, form)
    zero = gl.zeros([HALF, HALF], gl.float32, s_l)
    q = ring.q.index(stage).reshape([HALF, form.D])
    do = ring.do.index(stage).reshape([HALF, form.DV])
    k = ring.k.index(hidden_zero()).reshape([HALF, form.D])
    mbarrier.wait(ring.q_full.index(stage), phase)
    s = scores(k, q, zero, form.SHORT)
    lse2 = of_rows(ring.lse2, stage, 0, s_l)
    if form.HAS_BIAS:
        bias = bias_by_keys(inputs.terms, form, numbers.tq, head, key, row, MASKED, s_l)
    s = warpgroup_mma_wait(0, [s])
    if form.HAS_BIAS:
        s = with_bias(s, numbers.scale, bias)
    p, weight = probability(s, lse2, numbers, ring, form, stage, 0, row, lo, hi, key, alibi, MASKED)
    ring.weights.index(stage).store(weight)
    hand_over(stage)
    mark(Q_FREE + stage)  # lse2 came with q, and has been read as well
    mbarrier.wait(ring.do_full.index(stage), phase)
    dv = add_product(p.to(ring.k.dtype), do, dv, False)
    mark(DO_FREE + stage)
    return dv


@gluon.jit
def add_to_dk(ring, form: gl.constexpr, dk, count, s_l: gl.constexpr):
    """What a block of rows adds to dk: masks are in the weights."""
    stage = stage_of(count, form)
    phase = phase_of(count, form)
    zero = gl.zeros([HALF, HALF], gl.float32, s_l)
    q = ring.q.index(stage).reshape([HALF, form.D])
    do = ring.do.index(stage).reshape([HALF, form.DV])
    v = ring.v.index(hidden_zero()).reshape([HALF, form.DV])
    mbarrier.wait(ring.do_full.index(stage), phase)
    dp = scores(v, do, zero, False)
    take_over(stage)
    weight = ring.weights.index(stage).load(s_l)
    delta = of_rows(ring.delta, stage, 0, s_l)
    dp = warpgroup_mma_wait(0, [dp])
    ds = (weight * (dp - delta[None, :])).to(ring.k.dtype)
    mark(DO_FREE + stage)  # delta came with dout
    mbarrier.wait(ring.q_full.index(stage), phase)
    dk = add_product(ds, q, dk, form.SHORT)
    mark(Q_FREE + stage)
    return dk


@gluon.jit
def values(inputs, numbers, ring, form: gl.constexpr, work, count):
    """dv of one tile; returns the number of blocks used so far."""
    s_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    tile = my_tile(inputs, numbers, form, work)
    mine = gl.arange(0, HALF, gl.SliceLayout(1, s_l))
    origin = origin_of(inputs.terms, numbers.tq, form, tile.key0)
    dv = no_sums(form.DV, False)
    end_head = (tile.lane + 1) * numbers.heads_each
    left = numbers.heads_each  # not the number of a head, which not all forms need
    mbarrier.wait(ring.k_full, round_of(form, work) & 1)
    touch_bounds(inputs, form, tile.split, mine)
    while left > 0:
        head = end_head - left
        run = tile.first
        alibi = slope_of(inputs.terms, form, head)
        while run < tile.last:  # not a loop for each kind of run: see the forward
            row = gl.load(inputs.RUNS + run * 4)
            end = gl.load(inputs.RUNS + run * 4 + 1)
            key = key_of_run(origin, form)
            if run < tile.split:
                while row < end:
                    dv = add_to_dv(inputs, numbers, ring, form, dv, count, row, head, None, None,
                                   key, alibi, False, s_l)
                    row += HALF
                    count += 1
            else:
                lo, hi = bounds(inputs, form, run, mine)
                touch_bounds(inputs, form, run + 1, mine)  # behind the last run is one more
                while row < end:
                    dv = add_to_dv(inputs, numbers, ring, form, dv, count, row, head, lo, hi,
                                   key, alibi, True, s_l)
                    row += HALF
                    count += 1
            run += 1
        left -= 1
    tile = my_tile(inputs, numbers, form, work)  # again: registers are scarce in the loops
    write_rows(inputs.DV, dv[0], tile.key0, tile.key_end, tile.lane, numbers.num_lanes,
               form.DV_COLUMNS)
    return count


@gluon.jit
def keys(inputs, numbers, ring, form: gl.constexpr, work, count):
    """dk of one tile; returns the number of blocks used so far."""
    s_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    tile = my_tile(inputs, numbers, form, work)
    dk = no_sums(form.D, form.SHORT)
    left = numbers.heads_each
    mbarrier.wait(ring.v_full, round_of(form, work) & 1)
    while left > 0:
        run = tile.first
        while run < tile.last:
            row = gl.load(inputs.RUNS + run * 4)
            end = gl.load(inputs.RUNS + run * 4 + 1)
            while row < end:
                dk = add_to_dk(ring, form, dk, count, s_l)
                row += HALF
                count += 1
            run += 1
        left -= 1
    tile = my_tile(inputs, numbers, form, work)
    write_rows(inputs.DK, dk[0] * numbers.scale, tile.key0, tile.key_end, tile.lane,
               numbers.num_lanes, form.DK_COLUMNS)
    if form.SHORT:
        write_rows(inputs.DK, dk[1] * numbers.scale, tile.key0, tile.key_end, tile.lane,
                   numbers.num_lanes, form.DK_COLUMNS, 128)
    return count


@gluon.jit
def consumer(cid: gl.constexpr, inputs, numbers, ring, form: gl.constexpr):
    gradient: gl.constexpr = values if cid == 0 else keys
    count = 0
    if form.PERSISTENT:
        work = block_anew()
        while work >= 0:
            count = gradient(inputs, numbers, ring, form, work, count)
            mark(KV_FREE)
            work = work_behind(inputs, numbers, form, work)
    else:
        gradient(inputs, numbers, ring, form, gl.program_id(0), count)


@gluon.jit
def first_consumer(inputs, numbers, ring, form: gl.constexpr):
    consumer(0, inputs, numbers, ring, form)


@gluon.jit
def second_consumer(inputs, numbers, ring, form: gl.constexpr):
    consumer(1, inputs, numbers, ring, form)


@gluon.jit(do_not_specialize=NUMBERS)
def hopper_bwd_wide_kernel(
    Q, K, V, DO, LSE2, DELTA, DK_OUT, DV_OUT, TILES, RUNS, KEY_LO, KEY_HI,
    BIAS, SLOPES, OFFSET,
    scale, tq, splits, heads_each, num_tiles, section, num_lanes, softcap,
    tk, stride_bh, stride_bi,
    FORM: gl.constexpr,
):
    D: gl.constexpr = FORM.D
    STAGES: gl.constexpr = FORM.STAGES
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    rows_l: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # a warp writes 32 bytes in each of eight rows: these must not lie in the same banks
    weights_l: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    offset = None
    if FORM.HAS_OFFSET:
        offset = gl.allocate_shared_memory(gl.int32, [STAGES, HALF], rows_l)
    ring = Ring(
        q=gl.allocate_shared_memory(Q.dtype, [STAGES, HALF, 1, D], Q.layout),
        do=gl.allocate_shared_memory(DO.dtype, [STAGES, HALF, 1, FORM.DV], DO.layout),
        k=gl.allocate_shared_memory(K.dtype, [1, HALF, 1, D], K.layout),
        v=gl.allocate_shared_memory(V.dtype, [1, HALF, 1, FORM.DV], V.layout),
        weights=gl.allocate_shared_memory(gl.float32, [STAGES, HALF, HALF], weights_l),
        lse2=gl.allocate_shared_memory(gl.float32, [STAGES, HALF], rows_l),
        delta=gl.allocate_shared_memory(gl.float32, [STAGES, HALF], rows_l),
        offset=offset,
        q_full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        do_full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        k_full=gl.allocate_shared_memory(gl.int64, [1], barrier),
        v_full=gl.allocate_shared_memory(gl.int64, [1], barrier),
    )
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
    inputs = Inputs(Q, K, V, DO, None, None, None, LSE2, DELTA, DK_OUT, DV_OUT, TILES, RUNS,
                    KEY_LO, KEY_HI, terms)
    numbers = Numbers(scale, softcap, tq, splits, heads_each, num_tiles, section, num_lanes, 0)
    gl.warp_specialize([
        (first_consumer, (inputs, numbers, ring, FORM)),
        (second_consumer, (inputs, numbers, ring, FORM)),
        (producer, (inputs, numbers, ring, FORM)),
    ], [4, 1], [240, 24])


# fmt: on
