"""What the Hopper backward by tiles of keys is brought, and by whom (Gluon, sm_90).

One warp brings keys and values of a tile, then blocks of queries and of dout by TMA, for each query
head that shares the keys; and their row vectors by copies of 4 bytes, since blocks begin at any
row, but TMA at multiples of 16 bytes. `hopper_bwd` and `hopper_bwd_wide` have the same one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from keel import key_order
from keel._versions import copy_async, tma_load
from keel.kernels.hopper_common import (
    FIELDS,
    block_anew,
    hidden_zero,
    place_of,
    wait_for,
    work_of,
)
from keel.kernels.hopper_common import PART as HALF
from keel.kernels.hopper_terms import TERM_NUMBERS

# fmt: off

Q_FREE = gl.constexpr(9)
DO_FREE = gl.constexpr(11)
"""First named barriers of the stages of queries and of dout."""
KV_FREE = gl.constexpr(14)
"""Keys and values, where a block of threads stays for more."""
SET_UP = gl.constexpr(14)
"""That barriers are set up, where it does not stay."""
ARRIVALS = gl.constexpr(1 + 32)
"""At a barrier of a stage: one for the bytes that TMA brings, and each thread's small copies."""
LANE = gl.constexpr(key_order.LANE)
STRIDE = gl.constexpr(key_order.STRIDE)


class Inputs(NamedTuple):
    """Descriptors (tokens, heads, dim), and pointers."""

    q: Any
    k: Any
    v: Any
    do: Any
    dq: Any
    dk: Any
    dv: Any
    LSE2: Any
    DELTA: Any
    DK: Any
    DV: Any
    TILES: Any
    RUNS: Any
    KEY_LO: Any
    KEY_HI: Any
    terms: Any


class Numbers(NamedTuple):
    scale: Any
    softcap: Any
    tq: Any
    splits: Any
    heads_each: Any
    num_tiles: Any
    section: Any
    num_lanes: Any
    turn: Any
    """Blocks of rows of a head before it is the next one's turn, where they take turns."""


NUMBERS = ["tq", "splits", "heads_each", "num_tiles", "section", "num_lanes", *TERM_NUMBERS]
"""Of a launch: they differ between masks, which must not wait for compilers."""


class Tile(NamedTuple):
    key0: Any
    key_end: Any
    lane: Any
    first: Any
    split: Any
    last: Any
    whole: Any


@gluon.jit
def my_tile(inputs, numbers, form: gl.constexpr, work):
    """A lane is a key head, or a part of the query heads that share one.

    The grid is (lanes of a section, tiles, sections), and starts in this order: the longest tiles
    of the first section first. Blocks of threads that stay count work in the same order. Those
    that go through rows together have a record for each tile and lane.
    """
    if form.TOGETHER:
        place = work
        lane = gl.load(inputs.TILES + place * FIELDS + LANE)
    elif form.PERSISTENT:
        place, lane = place_of(work, numbers.num_tiles, numbers.section)
    else:
        lane = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
        place = gl.program_id(1)
    record = inputs.TILES + place * FIELDS
    return Tile(gl.load(record), gl.load(record + 1), lane, gl.load(record + 2),
                gl.load(record + 3), gl.load(record + 4), gl.load(record + 5))


@gluon.jit
def round_of(form: gl.constexpr, work):
    """How many tiles this block of threads had before."""
    return work // gl.num_programs(0) if form.PERSISTENT else 0


@gluon.jit
def work_behind(inputs, numbers, form: gl.constexpr, work):
    """What a block of threads that stays does next; -1: it is done."""
    if form.TOGETHER:  # dealt by the host, with zeros behind the last of each
        work += gl.num_programs(0)
        done = gl.load(inputs.TILES + work * FIELDS + 1) == 0
    else:
        work = work_of(round_of(form, work) + 1)
        done = work >= (numbers.num_tiles + hidden_zero()) * numbers.num_lanes
    return gl.where(done, -1, work)


@gluon.jit
def way_through(inputs, work, run):
    """(row of the first block, where to stop, from a block to the next) of a run, upwards or
    downwards as the record of this tile says."""
    row = gl.load(inputs.RUNS + run * 4)
    end = gl.load(inputs.RUNS + run * 4 + 1)
    stride = gl.load(inputs.TILES + work * FIELDS + STRIDE)
    if stride < 0:
        row, end = end + stride, row + stride
    return row, end, stride


@gluon.jit
def end_of_turn(numbers, row, end, stride):
    """Where a head's turn ends that begins at row."""
    far = row + stride * numbers.turn
    return gl.where(stride < 0, gl.maximum(far, end), gl.minimum(far, end))


@gluon.jit
def bring_numbers(POINTER, place, there, stage, full):
    """Row vectors of a block, zeros where there are no rows."""
    copy_async(stage, POINTER + place, mask=there)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def bring_q(inputs, ring, form: gl.constexpr, stage, row, head, place, there):
    full = ring.q_full.index(stage)
    if form.HAS_OFFSET:  # the arrival of the other numbers tells of these as well
        rows = row + gl.arange(0, form.BM, gl.BlockedLayout([1], [32], [1], [0]))
        copy_async(
            ring.offset.index(stage), inputs.terms.OFFSET + rows, mask=there)
    mbarrier.expect(full, form.BM * form.D * 2)
    tma_load(inputs.q, [row, head, 0], full, ring.q.index(stage))
    bring_numbers(inputs.LSE2, place, there, ring.lse2.index(stage), full)


@gluon.jit
def bring_do(inputs, ring, form: gl.constexpr, stage, row, head, place, there):
    full = ring.do_full.index(stage)
    mbarrier.expect(full, form.BM * form.DV * 2)
    tma_load(inputs.do, [row, head, 0], full, ring.do.index(stage))
    bring_numbers(inputs.DELTA, place, there, ring.delta.index(stage), full)


@gluon.jit
def bring(inputs, numbers, ring, form: gl.constexpr, count, row, head):
    """A block of rows into its stage, when the block before it there has been read.

    Queries are wanted first, but dout of the block before is done with first: behind the queries
    it would also wait for TMA to have added up dq.
    """
    stage = count % form.STAGES
    rows = row + gl.arange(0, form.BM, gl.BlockedLayout([1], [32], [1], [0]))
    there = rows < numbers.tq
    place = head.to(gl.int64) * numbers.tq + rows
    if count < form.STAGES:
        bring_q(inputs, ring, form, stage, row, head, place, there)
    else:
        wait_for(DO_FREE + stage)
    bring_do(inputs, ring, form, stage, row, head, place, there)
    if count >= form.STAGES:
        wait_for(Q_FREE + stage)
        bring_q(inputs, ring, form, stage, row, head, place, there)


@gluon.jit
def bring_together(inputs, numbers, ring, form: gl.constexpr, work, tile, count):
    """Blocks of rows, heads in turns (`key_order`); returns the number of blocks so far."""
    first_head = tile.lane * numbers.heads_each
    end_head = first_head + numbers.heads_each
    run = tile.first
    while run < tile.last:
        row, end, stride = way_through(inputs, work, run)
        while row != end:
            stop = end_of_turn(numbers, row, end, stride)
            for head in range(first_head, end_head):
                at = row
                while at != stop:
                    bring(inputs, numbers, ring, form, count, at, head)
                    at += stride
                    count += 1
            row = stop
        run += 1
    return count


@gluon.jit
def bring_tile(inputs, numbers, ring, form: gl.constexpr, work, count):
    """Returns the number of blocks brought so far."""
    tile = my_tile(inputs, numbers, form, work)
    kv_head = tile.lane // numbers.splits
    if form.PERSISTENT:
        if round_of(form, work) > 0:
            wait_for(KV_FREE)
    mbarrier.expect(ring.k_full, form.PARTS * HALF * form.D * 2)
    for half in gl.static_range(form.PARTS):
        tma_load(inputs.k, [tile.key0 + half * HALF, kv_head, 0], ring.k_full, ring.k.index(half))
    mbarrier.expect(ring.v_full, form.PARTS * HALF * form.DV * 2)
    for half in gl.static_range(form.PARTS):
        tma_load(inputs.v, [tile.key0 + half * HALF, kv_head, 0], ring.v_full, ring.v.index(half))
    if form.TOGETHER:
        return bring_together(inputs, numbers, ring, form, work, tile, count)
    head = tile.lane * numbers.heads_each
    end_head = head + numbers.heads_each
    while head < end_head:
        if form.READS_AHEAD:
            run = tile.first
            row = gl.load(inputs.RUNS + run * 4)
            end = gl.load(inputs.RUNS + run * 4 + 1)
        else:
            run = tile.first + hidden_zero()  # else its address is kept, on the stack
        while run < tile.last:
            if form.READS_AHEAD:
                next_row = gl.load(inputs.RUNS + run * 4 + 4)  # behind the last run is one more
                next_end = gl.load(inputs.RUNS + run * 4 + 5)
            else:
                row = gl.load(inputs.RUNS + run * 4)
                end = gl.load(inputs.RUNS + run * 4 + 1)
            while row < end:
                bring(inputs, numbers, ring, form, count, row, head)
                row += form.BM
                count += 1
            if form.READS_AHEAD:
                row = next_row
                end = next_end
            run += 1
        head += 1
    return count


@gluon.jit
def set_up_barriers(ring, form: gl.constexpr):
    mbarrier.init(ring.k_full, 1)
    mbarrier.init(ring.v_full, 1)
    for i in gl.static_range(form.STAGES):
        mbarrier.init(ring.q_full.index(i), ARRIVALS)
        mbarrier.init(ring.do_full.index(i), ARRIVALS)
    fence_async_shared()


@gluon.jit
def producer(inputs, numbers, ring, form: gl.constexpr):
    count = 0
    if form.PRODUCER_BEGINS:
        set_up_barriers(ring, form)
        wait_for(SET_UP)
    if form.PERSISTENT:
        work = block_anew()
        while work >= 0:
            count = bring_tile(inputs, numbers, ring, form, work, count)
            work = work_behind(inputs, numbers, form, work)
        wait_for(KV_FREE)
    else:
        count = bring_tile(inputs, numbers, ring, form, gl.program_id(0), count)
    for block in range(gl.maximum(count - form.STAGES, 0), count):  # marks nobody waited for
        wait_for(Q_FREE + block % form.STAGES)
        wait_for(DO_FREE + block % form.STAGES)


# fmt: on
