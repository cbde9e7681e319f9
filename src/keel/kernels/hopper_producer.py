"""The producer of the Hopper forward: draws work, tells of it, brings queries, keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from keel._versions import tma_load
from keel.kernels import hopper_forms
from keel.kernels.hopper_common import (
    FIELDS,
    as_logits,
    draw,
    place_of,
    publish,
    raise_max,
    stage_of,
    told,
    touch,
    wait_for,
)
from keel.kernels.hopper_pairs import (
    meet_peer,
    rank_in_pair,
    share_keys,
    share_values,
    tell_peer,
)
from keel.kernels.hopper_places import (
    FIELDS_EMPTY,
    FIELDS_FULL,
    K_FULL,
    Q_EMPTY,
    Q_FULL,
    V_FREE,
    V_FULL,
    left_tops,
    one_of,
)
from keel.kernels.hopper_rows import raise_group

# fmt: off

PANEL = gl.constexpr(hopper_forms.PANEL)
LATE = gl.constexpr(2)
"""Blocks of threads that others do not wait for before a tile."""


@gluon.jit
def producer(inputs, numbers, ring, form: gl.constexpr):
    count = 0
    turn = 0
    old_head = 0
    older_head = -1
    grid = gl.num_programs(0)
    work = gl.program_id(0)
    if form.PAIRED:
        meet_peer()
        rank = rank_in_pair()
        grid //= 2
        work //= 2
    left = 1  # each block of threads has work, and a loop that is known to begin takes less
    while left > 0:
        if form.PAIRED:
            drawn = 0
            if rank == 0:
                drawn = draw(inputs.COUNTER)
        else:
            drawn = draw(inputs.COUNTER)
        if form.BY_FACTORS:
            place, head = tile_and_head(work, numbers)
        else:
            # the loops of wide heads are 2 % slower without: ptxas orders them in another way
            KEEPS: gl.constexpr = form.CARRIES and form.Q_BUFFERS == 1
            place, head = place_of(work, numbers.num_tiles, numbers.section, KEEPS)
        if form.PAIRED:
            head = 2 * head + rank
        record = inputs.TILES + place * FIELDS
        row0 = gl.load(record)
        row_end = gl.load(record + 1)
        first = gl.load(record + 2)
        split = gl.load(record + 3)
        last = gl.load(record + 4)
        row_set = gl.load(record + 5)
        key = gl.load(record + 6)
        end = gl.load(record + 7)
        slot = turn & 1
        mbarrier.wait(one_of(ring, FIELDS_EMPTY, slot), ((turn >> 1) & 1) ^ 1)
        publish(ring, slot, 0, row0)
        publish(ring, slot, 1, row_end)
        publish(ring, slot, 2, head)
        publish(ring, slot, 3, first)
        publish(ring, slot, 4, split)
        publish(ring, slot, 5, last)
        publish(ring, slot, 6, row_set)
        publish(ring, slot, 7, key)
        if form.CUTS:
            alone: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
            share = gl.full([1], gl.load(inputs.SHARES + place), gl.int32, alone)
            ring.shares.index(slot).store(share)
        mbarrier.arrive(one_of(ring, FIELDS_FULL, slot), count=1)
        buffer = turn % form.Q_BUFFERS
        mbarrier.wait(one_of(ring, Q_EMPTY, buffer),
                      ((turn // form.Q_BUFFERS) & 1) ^ 1)
        queries_came = one_of(ring, Q_FULL, buffer)
        mbarrier.expect(queries_came, form.ROWS * form.D * 2)
        for part in gl.static_range(form.CODES):
            row = row0 + part * (form.OWN_ROWS // form.PACK)
            bring(inputs.q, row, head * form.PACK, queries_came, ring.q,
                  form.CODES * buffer + part, form)
        if form.BY_FACTORS:
            touch_next(inputs, numbers, work + grid)
        if form.TOPS:  # of the tile that had this buffer; now there is time, keys have to wait
            if turn > 1:
                raise_tops(inputs, ring, form, turn - 2, older_head)
            older_head = old_head
            old_head = head
        if form.PACED:
            if (turn + 1) * grid <= numbers.num_work:
                pace(inputs.COUNTER, (turn + 1) * grid - LATE)
        if form.BY_FACTORS:
            kv_head = quotient(head, numbers.group_factor, numbers.group_shift)
        else:
            kv_head = head // numbers.group
        if form.TRAILS:
            has_keys = False
            old_key = 0
        for run in range(first, last):
            next_key = gl.load(inputs.RUNS + run * 4 + 4)  # behind the last run is one more
            next_end = gl.load(inputs.RUNS + run * 4 + 5)
            while key < end:
                if form.TRAILS:
                    share_keys(ring, key, kv_head, count, rank, form)
                    if has_keys:
                        share_values(ring, old_key, kv_head, count - 1, rank, form)
                    has_keys = True
                    old_key = key
                elif form.PAIRED:
                    share_keys(ring, key, kv_head, count, rank, form)
                    share_values(ring, key, kv_head, count, rank, form)
                else:
                    stage = stage_of(count, form)
                    if count >= form.STAGES:
                        wait_for(form.KEYS_FREE + stage, form.CONSUMERS)
                    keys_came = one_of(ring, K_FULL, stage)
                    mbarrier.expect(keys_came, form.BN * form.D * 2)
                    bring(inputs.k, key, kv_head, keys_came, ring.k, stage, form)
                    if count >= form.STAGES:
                        wait_for(V_FREE + stage, form.CONSUMERS)
                    values_came = one_of(ring, V_FULL, stage)
                    mbarrier.expect(values_came, form.BN * form.DV * 2)
                    tma_load(inputs.v, [key, kv_head, 0], values_came, ring.v.index(stage))
                key += form.BN
                count += 1
            key = next_key
            end = next_end
        if form.TRAILS:
            share_values(ring, old_key, kv_head, count - 1, rank, form)
        drawn = told(drawn)
        if form.PAIRED:
            drawn = tell_peer(ring, turn, drawn, rank, form)
            is_last = (drawn == numbers.num_work - 1) & (rank == 0)
        else:
            is_last = drawn == numbers.num_work - 1
        if is_last:  # the last draw of all: ready for the next launch
            gl.store(inputs.COUNTER, 0)
        work = drawn + grid
        left = numbers.num_work - work
        turn += 1
    slot = turn & 1
    mbarrier.wait(one_of(ring, FIELDS_EMPTY, slot), ((turn >> 1) & 1) ^ 1)
    publish(ring, slot, 0, -1)
    mbarrier.arrive(one_of(ring, FIELDS_FULL, slot), count=1)
    for block in range(gl.maximum(count - form.STAGES, 0), count):  # marks nobody waited for
        wait_for(form.KEYS_FREE + block % form.STAGES, form.CONSUMERS)
        wait_for(V_FREE + block % form.STAGES, form.CONSUMERS)
    if form.TOPS:
        if turn > 1:
            wait_until_put_away(ring, turn - 2, form)
            raise_tops(inputs, ring, form, turn - 2, older_head)
        wait_until_put_away(ring, turn - 1, form)
        raise_tops(inputs, ring, form, turn - 1, old_head)


@gluon.jit
def touch_next(inputs, numbers, work):
    """The record of what is drawn next, if all blocks of threads draw in turns; many heads have the
    same one, so that it mostly is the right one even if they do not."""
    if work < numbers.num_work:
        place, _ = tile_and_head(work, numbers)
        touch(inputs.TILES + place * FIELDS)


@gluon.jit
def tile_and_head(work, numbers):
    """As `hopper_common.place_of`, in a fifth of the instructions: each tile begins with them."""
    sections = quotient(work, numbers.all_factor, numbers.all_shift)
    in_section = work - sections * (numbers.num_tiles * numbers.section)
    place = quotient(in_section, numbers.section_factor, numbers.section_shift)
    return place, in_section + (sections - place) * numbers.section


@gluon.jit
def quotient(number, factor, shift):
    """Of a number that is not negative, by one that `hopper_launch.as_factor` made these of."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b64 product;
        mul.wide.u32 product, $1, $2;
        shr.u64 product, product, $3;
        cvt.u32.u64 $0, product;
        }""", "=r,r,r,r", [number, factor, shift], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def pace(COUNTER, begun):
    """Waits, not for long, until so many tiles have begun: each draws a number when it does.

    Blocks of threads of one head read the same keys. It is faster; the reason is thought to be that
    while they are about as far as each other, each key comes from memory once, and is in the L2
    for the rest. Drifted apart, they would need all keys at once: more than the L2 holds.

    Nothing depends on it. If some of them do not run, as beside other kernels, the rest go on
    after 64 looks, by reckoning some 50 us, where a tile takes more than 1 ms.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred more;
        .reg .b32 seen, looks;
        mov.u32 looks, 0;
        again:
        ld.relaxed.gpu.global.s32 seen, [$1];
        add.u32 looks, looks, 1;
        setp.lt.s32 more, seen, $2;
        setp.lt.and.u32 more, looks, 64, more;
        @!more bra done;
        nanosleep.u32 200;
        bra again;
        done:
        mov.u32 $0, 0;
        }""", "=r,l,r,~{memory}", [COUNTER.to(gl.int64, bitcast=True), begun],
        dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bring(described, row, head, came, memory, number, form: gl.constexpr):
    """Queries or keys to place `number` of them; what they are made of is in `panels_of`."""
    for panel in gl.static_range(form.PANELS):
        tma_load(described, [row, head, panel * PANEL], came,
                 memory.index(number * form.PANELS + panel))


@gluon.jit
def wait_until_put_away(ring, turn, form: gl.constexpr):
    """The tile of a turn, where there are two buffers."""
    mbarrier.wait(one_of(ring, Q_EMPTY, turn % 2), (turn // 2) & 1)


@gluon.jit
def raise_tops(inputs, ring, form: gl.constexpr, turn, head):
    """Max logits, by what consumers left of the tile of a turn when they put it away.

    The producer has time for it, and they have not.
    """
    buffer = turn % 2
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    tops = left_tops(ring, buffer, 0, layout, form)
    for part in gl.static_range(1, form.CONSUMERS):
        more = left_tops(ring, buffer, part, layout, form)
        # `gl.maximum` would drop NaNs
        tops = gl.inline_asm_elementwise("max.NaN.f32 $0, $1, $2;", "=f,f,f", [tops, more],
                                         dtype=gl.float32, is_pure=True, pack=1)
    tops = as_logits(tops, form)
    if form.PACK == 1:
        raise_max(inputs.MAX_LOGITS + head, tops)
    else:
        raise_group(inputs.MAX_LOGITS + head * form.PACK, tops, form)


# fmt: on
