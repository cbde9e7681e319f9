"""Hopper forward: out, lse and max logits by specialised warps (Gluon, sm_90).

A block of threads stays on its SM. One warp, the producer, draws work (a q tile of one head), and
brings queries, keys and values into shared memory by TMA. Two or three warpgroups of consumers own
64 rows each. They compute scores of a block of keys while the values of the block before are added
up, with probabilities in registers all the time, and, where queries have two buffers, the first
scores of the next tile while they put the last one away.

Keys and values are handed back by named barriers, on which consumers only mark that they are done
(`bar.arrive`); Triton's arrival on an mbarrier would bring the warpgroup to a stop each time.
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

from keel.kernels.flash_common import LOG2E
from keel.kernels.hopper_common import (
    FIELDS,
    HALF,
    field,
    lane_sums,
    mark,
    pass_turn,
    phase_of,
    stage_of,
    take_turn,
    touch,
)
from keel.kernels.hopper_fwd_steps import (
    add_values,
    as_operands,
    panels_of,
    partial_step,
    products,
    scores,
    scores_layout,
    step,
    tops_of,
)
from keel.kernels.hopper_pairs import idle, meet_peer
from keel.kernels.hopper_places import (
    FIELDS_EMPTY,
    FIELDS_FULL,
    K_FULL,
    Q_EMPTY,
    Q_FULL,
    V_FREE,
    V_FULL,
    arrive_at,
    set_up,
    shared_place,
    wait_at,
    warpgroup,
)
from keel.kernels.hopper_producer import producer
from keel.kernels.hopper_put_away import put_away
from keel.kernels.hopper_rows import bounds, token_of
from keel.kernels.hopper_sending import wait_until_sent

# fmt: off



class Inputs(NamedTuple):
    """Descriptors (tokens, heads, dim) and pointers."""

    q: Any
    k: Any
    v: Any
    o: Any
    OUT: Any
    LSE: Any
    MAX_LOGITS: Any
    SINK: Any
    PARTS: Any
    """Sums of parts of tiles, until the last part to finish adds them up; see `meet`."""
    MEETINGS: Any
    """Parts that have come, for each cut tile, head and consumer; zero between launches."""
    SHARES: Any
    TILES: Any
    RUNS: Any
    ROW_LO: Any
    ROW_HI: Any
    COUNTER: Any
    """Drawn work; zero between launches."""


class Numbers(NamedTuple):
    scale: Any
    softcap: Any
    num_tiles: Any
    section: Any
    num_heads: Any
    """Of queries, or of keys where query heads are packed; `group` is then 1."""
    group: Any
    num_work: Any
    stride_ot: Any
    stride_oh: Any
    most_parts: Any
    """Of one tile."""
    all_factor: Any
    """Of all work of a section, of `section` and of `group`: see `quotient`."""
    all_shift: Any
    section_factor: Any
    section_shift: Any
    group_factor: Any
    group_shift: Any


class Ring(NamedTuple):
    """Shared memory and its barriers: `full` says that data came, `empty` that it was read."""

    q: Any
    k: Any
    v: Any
    fields: Any
    shares: Any
    """One more of the fields, where tiles are cut."""
    places: Any
    """Barriers, and what consumers leave for the producer: see `hopper_places`."""
    at: Any
    """Address of all of it."""


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
    needs: Any
    """Halves of blocks that consumers need of the first partial run: see `TileRecords.runs`."""
    share: Any
    """Which part of which cut tile this is: see `tile_parts.CutTiles`."""


@gluon.jit
def begin_tile(inputs, ring, turn, mine, form: gl.constexpr):
    """First row of the tile that the producer tells of, or -1; touches what `next_tile` reads."""
    slot = turn & 1
    wait_at(ring, FIELDS_FULL, slot, (turn >> 1) & 1, form)
    row0 = field(ring, slot, 0, form.WARPS)
    if row0 >= 0:
        first = field(ring, slot, 3, form.WARPS)
        split = field(ring, slot, 4, form.WARPS)
        last = field(ring, slot, 5, form.WARPS)
        touch(inputs.RUNS + first * 4 + 1)
        touch(inputs.RUNS + gl.minimum(split, last - 1) * 4 + 3)
        rows = field(ring, slot, 6, form.WARPS) * form.TOKENS + token_of(mine, form)
        touch(inputs.ROW_LO + rows)
        touch(inputs.ROW_HI + rows)
    return row0


@gluon.jit
def share_of(ring, slot, form: gl.constexpr):
    if form.CUTS:
        alone: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        return gl.max(ring.shares.index(slot).load(alone), 0)
    else:
        return slot


@gluon.jit
def next_tile(inputs, ring, turn, mine, form: gl.constexpr):
    """The tile that the producer tells of, and the bounds of its first partial run."""
    slot = turn & 1
    if form.CARRIES:
        wait_at(ring, FIELDS_FULL, slot, (turn >> 1) & 1, form)
    row0 = field(ring, slot, 0, form.WARPS)
    row_end = field(ring, slot, 1, form.WARPS)
    head = field(ring, slot, 2, form.WARPS)
    first = field(ring, slot, 3, form.WARPS)
    split = field(ring, slot, 4, form.WARPS)
    last = field(ring, slot, 5, form.WARPS)
    row_set = field(ring, slot, 6, form.WARPS)
    key = field(ring, slot, 7, form.WARPS)
    share = share_of(ring, slot, form)
    if form.CARRIES:
        arrive_at(ring, FIELDS_EMPTY, slot, form)
        if row0 < 0:  # what follows is left over from an earlier tile, or from nowhere
            row_set = 0
            first = 0
            split = 0
            last = 1
    end = gl.load(inputs.RUNS + first * 4 + 1)
    lo, hi = bounds(inputs, row_set, mine, form)
    needs = gl.load(inputs.RUNS + gl.minimum(split, last - 1) * 4 + 3)
    return Tile(row0, row_end, head, first, split, last, key, end, needs, share), lo, hi


@gluon.jit
def consumer(code: gl.constexpr, cid, inputs, numbers, ring, form: gl.constexpr):
    """Code number `code`, run by consumer `cid`: the same number, unless all run one code."""
    BN: gl.constexpr = form.BN
    DV: gl.constexpr = form.DV
    ROWS: gl.constexpr = form.OWN_ROWS
    s_l: gl.constexpr = scores_layout(BN, form)
    o_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[form.WARPS, 1], instr_shape=[16, DV, 16])
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_l, k_width=2)
    row_l: gl.constexpr = gl.SliceLayout(1, o_l)
    srow_l: gl.constexpr = gl.SliceLayout(1, s_l)
    scale2 = numbers.scale * LOG2E
    if form.HAS_SOFTCAP:
        scale2 = gl.to_tensor(LOG2E) if form.CAPS_ANEW else numbers.scale * 0.0 + LOG2E
    mine = code * ROWS + gl.arange(0, ROWS, srow_l)
    acc = gl.zeros([ROWS, form.DV], gl.float32, o_l)
    total = gl.zeros([ROWS], gl.float32, srow_l)
    top2 = gl.full([ROWS], float("-inf"), gl.float32, srow_l)
    raw_top = top2
    count = 0
    turn = 0
    if cid == form.CONSUMERS - 1:
        pass_turn(cid, form)
    if form.CARRIES:
        tile, lo, hi = next_tile(inputs, ring, turn, mine, form)
        row0 = tile.row0
    else:
        row0 = begin_tile(inputs, ring, turn, mine, form)
    # not those of `tile`: a loop carries a name on only if its first value is another one
    old_row0 = 0
    old_end = 0
    old_head = 0
    old_share = 0
    while row0 >= 0:
        buffer = turn & (form.Q_BUFFERS - 1)
        if not form.CARRIES:
            tile, lo, hi = next_tile(inputs, ring, turn, mine, form)
        elif form.Q_BUFFERS == 1:
            if turn > 0:
                put_away(code, inputs, numbers, ring, form, False, old_row0, old_end, old_head,
                         old_share, 0, acc, total, top2, raw_top, mine, o_l)
        wait_at(ring, Q_FULL, buffer, (turn >> (form.Q_BUFFERS - 1)) & 1, form)
        stage = stage_of(count, form)
        wait_at(ring, K_FULL, stage, phase_of(count, form), form)
        q = panels_of(ring.q, form.CODES * buffer + code, ROWS, form)
        s = products(q, panels_of(ring.k, stage, BN, form), 2, form)
        if form.Q_BUFFERS == 2:
            if turn > 0:
                put_away(code, inputs, numbers, ring, form, False, old_row0, old_end, old_head,
                         old_share, buffer ^ 1, acc, total, top2, raw_top, mine, o_l)
        s = warpgroup_mma_wait(0, [s])
        mark(form.KEYS_FREE + stage, form.CONSUMERS)
        key = tile.key
        raw_top = gl.full([ROWS], float("-inf"), gl.float32, srow_l)
        if tile.first < tile.split:
            s, raw_top = scores(s, key, lo, hi, raw_top, numbers, form, False)
        else:
            s, raw_top = scores(s, key, lo, hi, raw_top, numbers, form, True)
        top2 = tops_of(s, raw_top, scale2, numbers, form)
        if form.LAZY and form.WANT_MAX:
            raw_top = top2
        shift = gl.where(top2 == float("-inf"), 0.0, top2)
        p = gl.exp2(s * scale2 - shift[:, None])
        sums = lane_sums(p)
        probs = as_operands(p, ring, form, 2, p_l)
        acc = gl.zeros([ROWS, form.DV], gl.float32, o_l)
        if form.Q_BUFFERS == 2:
            if turn > 0:  # what was put away has left shared memory by now
                wait_until_sent(form)
                arrive_at(ring, Q_EMPTY, buffer ^ 1, form)
        key += BN
        end = tile.end
        needs = tile.needs
        # One loop: of two, ptxas 12.8 gave the second the descriptors of q that the first had
        # computed, even where the first had nothing to do.
        for run in range(tile.first, tile.last):
            if not form.LATE:
                next_key = gl.load(inputs.RUNS + run * 4 + 4)  # behind the last run is one more
                next_end = gl.load(inputs.RUNS + run * 4 + 5)
            if run < tile.split:
                while key < end:
                    acc, sums, top2, raw_top, probs = step(
                        cid, q, ring, acc, sums, top2, raw_top, probs, count, key, lo, hi,
                        scale2, numbers, form, False, 2, p_l, row_l)
                    key += BN
                    count += 1
            else:
                if form.REREADS:  # of the first such run they are in the L1
                    lo, hi = bounds(inputs, gl.load(inputs.RUNS + run * 4 + 2), mine, form)
                    next_lo, next_hi, next_needs = lo, hi, needs
                else:
                    following = gl.minimum(run + 1, tile.last - 1)
                    next_set = gl.load(inputs.RUNS + following * 4 + 2)
                    next_needs = gl.load(inputs.RUNS + following * 4 + 3)
                    next_lo, next_hi = bounds(inputs, next_set, mine, form)
                half = gl.where(run == tile.first, BN // HALF, 0)  # the first block is behind
                while key < end:
                    acc, sums, top2, raw_top, probs = partial_step(
                        cid, q, ring, acc, sums, top2, raw_top, probs, count, key, lo, hi,
                        scale2, numbers, needs, half, form, p_l, row_l)
                    key += BN
                    half += BN // HALF
                    count += 1
                lo = next_lo
                hi = next_hi
                needs = next_needs
            if form.LATE:
                next_key = gl.load(inputs.RUNS + run * 4 + 4)
                next_end = gl.load(inputs.RUNS + run * 4 + 5)
            key = next_key
            end = next_end
        if form.Q_BUFFERS == 1:
            arrive_at(ring, Q_EMPTY, 0, form)
        stage = stage_of(count, form)
        wait_at(ring, V_FULL, stage, phase_of(count, form), form)
        acc = add_values(ring, acc, probs, stage, form)
        turn += 1
        if form.CARRIES:
            old_row0 = tile.row0
            old_end = tile.row_end
            old_head = tile.head
            old_share = tile.share
            tile, lo, hi = next_tile(inputs, ring, turn, mine, form)
            row0 = tile.row0
        elif not form.UNHURRIED:
            row0 = begin_tile(inputs, ring, turn, mine, form)
        total = gl.convert_layout(gl.sum(sums, 1), srow_l)
        acc = warpgroup_mma_wait(0, [acc])
        mark(V_FREE + stage, form.CONSUMERS)
        count += 1
        if not form.CARRIES:
            if form.UNHURRIED:
                row0 = begin_tile(inputs, ring, turn, mine, form)
            slot = (turn & 1) ^ 1
            old_row0 = field(ring, slot, 0, form.WARPS)
            old_end = field(ring, slot, 1, form.WARPS)
            old_head = field(ring, slot, 2, form.WARPS)
            old_share = share_of(ring, slot, form)
            if not form.UNHURRIED:
                arrive_at(ring, FIELDS_EMPTY, slot, form)
            put_away(code, inputs, numbers, ring, form, False, old_row0, old_end, old_head,
                     old_share, 0, acc, total, top2, raw_top, mine, o_l)
            if form.UNHURRIED:
                arrive_at(ring, FIELDS_EMPTY, slot, form)
    if cid == 0:
        take_turn(cid, form)  # the last one nobody else takes
    if form.CARRIES:
        # there has always been one; but ptxas, if not told so, keeps numbers for this on the stack
        one_is_left = turn > 0 if form.PACK > 1 else True
        if one_is_left:
            put_away(code, inputs, numbers, ring, form, True, old_row0, old_end, old_head,
                     old_share, (turn + 1) % form.Q_BUFFERS, acc, total, top2, raw_top, mine, o_l)
    if form.CARRIES or form.SPOOLS:
        wait_until_sent(form)


@gluon.jit
def first_consumer(inputs, numbers, ring, form: gl.constexpr):
    if form.PAIRED:
        meet_peer()
    if form.ONE_CODE:
        consumer(0, warpgroup(), inputs, numbers, ring, form)
    else:
        consumer(0, 0, inputs, numbers, ring, form)


@gluon.jit
def second_consumer(inputs, numbers, ring, form: gl.constexpr):
    if form.PAIRED:
        meet_peer()
    consumer(1, 1, inputs, numbers, ring, form)


@gluon.jit
def third_consumer(inputs, numbers, ring, form: gl.constexpr):
    if form.PAIRED:
        meet_peer()
    consumer(2, 2, inputs, numbers, ring, form)


NUMBERS = ["num_tiles", "section", "num_heads", "group", "num_work", "most_parts",
           *(f"{of}_{name}" for of in ("all", "section", "group") for name in ("factor", "shift"))]


@gluon.jit(do_not_specialize=NUMBERS)
def hopper_fwd_kernel(
    O, Q, K, V, OUT, LSE, MAX_LOGITS, SINK, PARTS, MEETINGS, SHARES, TILES, RUNS, ROW_LO, ROW_HI,
    COUNTER, scale, softcap, num_tiles, section, num_heads, group, num_work, stride_ot, stride_oh,
    most_parts, all_factor, all_shift, section_factor, section_shift, group_factor, group_shift,
    FORM: gl.constexpr,
):
    Q_BUFFERS: gl.constexpr = FORM.Q_BUFFERS
    STAGES: gl.constexpr = FORM.STAGES
    CONSUMERS: gl.constexpr = FORM.CONSUMERS
    PACK: gl.constexpr = FORM.PACK
    PANELS: gl.constexpr = FORM.PANELS
    COLUMNS: gl.constexpr = FORM.D // PANELS
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    shares = None
    if FORM.CUTS:
        shares = gl.allocate_shared_memory(gl.int32, [2, 1], plain)
    places = gl.allocate_shared_memory(gl.int64, [FORM.PLACES, 1], barrier)
    ring = Ring(
        q=gl.allocate_shared_memory(
            Q.dtype, [PANELS * FORM.CODES * Q_BUFFERS, FORM.OWN_ROWS // PACK, PACK, COLUMNS],
            Q.layout),
        k=gl.allocate_shared_memory(K.dtype, [PANELS * STAGES, FORM.BN, 1, COLUMNS], K.layout),
        v=gl.allocate_shared_memory(V.dtype, [STAGES, FORM.BN, 1, FORM.DV], V.layout),
        fields=gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], plain),
        shares=shares,
        places=places,
        at=shared_place(),
    )
    set_up(ring, FORM)
    fence_async_shared()
    inputs = Inputs(
        Q, K, V, O, OUT, LSE, MAX_LOGITS, SINK, PARTS, MEETINGS, SHARES, TILES, RUNS, ROW_LO,
        ROW_HI, COUNTER)
    numbers = Numbers(scale, softcap, num_tiles, section, num_heads, group, num_work, stride_ot,
                      stride_oh, most_parts, all_factor, all_shift, section_factor, section_shift,
                      group_factor, group_shift)
    # registers of all but the first, which gets what is left of 512 for four threads, one of each
    if FORM.ONE_CODE and FORM.PAIRED:
        gl.warp_specialize([
            (first_consumer, (inputs, numbers, ring, FORM)),
            (producer, (inputs, numbers, ring, FORM)),
            (idle, ()),
            (idle, ()),
        ], [1, 2, 1], [FORM.PRODUCER_REGISTERS] * 3)
    elif FORM.ONE_CODE:
        gl.warp_specialize([
            (first_consumer, (inputs, numbers, ring, FORM)),
            (producer, (inputs, numbers, ring, FORM)),
        ], [1], [FORM.PRODUCER_REGISTERS])
    elif CONSUMERS == 3 and FORM.PAIRED:
        gl.warp_specialize([
            (first_consumer, (inputs, numbers, ring, FORM)),
            (second_consumer, (inputs, numbers, ring, FORM)),
            (third_consumer, (inputs, numbers, ring, FORM)),
            (producer, (inputs, numbers, ring, FORM)),
            (idle, ()),
            (idle, ()),
        ], [4, 4, 1, 2, 1], [160, 160, 32, 32, 32])
    elif CONSUMERS == 3:
        gl.warp_specialize([
            (first_consumer, (inputs, numbers, ring, FORM)),
            (second_consumer, (inputs, numbers, ring, FORM)),
            (third_consumer, (inputs, numbers, ring, FORM)),
            (producer, (inputs, numbers, ring, FORM)),
        ], [4, 4, 1], [160, 160, 32])
    elif FORM.PAIRED:
        gl.warp_specialize([
            (first_consumer, (inputs, numbers, ring, FORM)),
            (second_consumer, (inputs, numbers, ring, FORM)),
            (producer, (inputs, numbers, ring, FORM)),
            (idle, ()),
            (idle, ()),
        ], [4, 1, 2, 1], [240] + [FORM.PRODUCER_REGISTERS] * 3)
    else:
        gl.warp_specialize([
            (first_consumer, (inputs, numbers, ring, FORM)),
            (second_consumer, (inputs, numbers, ring, FORM)),
            (producer, (inputs, numbers, ring, FORM)),
        ], [4, 1], [240, FORM.PRODUCER_REGISTERS])


# fmt: on
