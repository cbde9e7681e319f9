"""Where parts of a tile of the Hopper forward, cut along its keys, become one."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from keel._versions import thread_barrier
from keel.kernels.hopper_common import PART, SHARE_BITS, unknown_zero
from keel.kernels.hopper_rows import token_of

# fmt: off

THREADS = gl.constexpr(128)
"""Of a consumer."""
BOTH = gl.constexpr(8)
"""Numbers for each row beside its sums: highest score and total, by four threads."""
ROWS_LAYOUT = gl.constexpr(gl.BlockedLayout([2, 1, 2], [1, 32, 1], [1, 4, 1], [2, 1, 0]))
"""Of (2, thread, 2): the two rows of a thread, 8 apart."""


@gluon.jit
def meet(cid: gl.constexpr, inputs, numbers, form: gl.constexpr, share, head, row0, row_end, acc,
         total, top2, o_l: gl.constexpr):
    """Leaves what a part of a tile has summed up; the last part to come adds up all of them.

    Consumers of the same rows meet, each by itself, and none ever waits for another one: a part
    that is not the last leaves. All parts are read back, the last one's own as well, in the order
    of their keys: who comes last changes no bit. Of rows that the tile has not, no sums are left.

    Each thread leaves its own numbers, four in a row, and finds those of the same thread of other
    parts: one address serves for all of them.

    Why what is read is what was written: each thread's stores come before the barrier of its
    warpgroup, and that before the atomic of one of its threads, which releases them to the whole
    GPU (a release covers what the releasing thread has seen by way of a barrier). The last one's
    atomic reads a number that all others have added to, in one chain of atomics, and acquires
    their stores; its warpgroup learns of the number behind another barrier. Loads pass by the L1.
    """
    srow_l: gl.constexpr = top2.type.layout
    parts = (share >> SHARE_BITS) & ((1 << SHARE_BITS) - 1)
    meeting = (share >> (2 * SHARE_BITS)) * numbers.num_heads + head
    zero = unknown_zero(head)  # else products and addresses are kept, on the stack
    first = inputs.PARTS + meeting.to(gl.int64) * (numbers.most_parts + zero) * stride_of(form)
    own = first + (share & ((1 << SHARE_BITS) - 1)) * stride_of(form)
    mine, cells, inside = places_of_sums(cid, 0, form.DV, zero, row0, row_end, form)
    gl.store((own + mine) + cells, by_thread(acc), mask=inside)
    mine, cells = places_of_rows(cid, zero, form)
    gl.store((own + mine) + cells, rows_by_thread(top2, total))
    thread_barrier()
    counter = inputs.MEETINGS + meeting * form.CONSUMERS + cid
    came = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    complete = came == parts - 1
    if complete:
        gl.store(counter, 0)  # nobody else comes; ready for the next launch
        if form.DV == 256:  # by halves: what is kept meanwhile would be on the stack
            low, tops, totals = add_up(cid, first, parts, 0, 128, zero, row0, row_end, form)
            high, tops, totals = add_up(cid, first, parts, 128, 128, zero, row0, row_end, form)
            acc = gl.join(low, high).permute((0, 2, 1)).reshape([PART, form.DV])
        else:
            acc, tops, totals = add_up(cid, first, parts, 0, form.DV, zero, row0, row_end, form)
        acc = gl.convert_layout(acc, o_l)
        top2 = gl.convert_layout(row_of_threads(tops), srow_l)
        total = gl.convert_layout(row_of_threads(totals), srow_l)
    return acc, total, top2, complete


@gluon.jit
def add_up(cid: gl.constexpr, first, parts, BEGIN: gl.constexpr, COLUMNS: gl.constexpr, zero, row0,
           row_end, form: gl.constexpr):
    """Sums of parts, (64, COLUMNS) from column BEGIN on, and their rows' highest scores and totals,
    (2, thread)."""
    sums_l: gl.constexpr = sums_layout(COLUMNS)
    row_l: gl.constexpr = gl.SliceLayout(2, ROWS_LAYOUT)
    mine, cells, inside = places_of_sums(cid, BEGIN, COLUMNS, zero, row0, row_end, form)
    mine_of_rows, cells_of_rows = places_of_rows(cid, zero, form)
    tops = gl.full([2, THREADS], float("-inf"), gl.float32, row_l)
    totals = gl.zeros([2, THREADS], gl.float32, row_l)
    sums = gl.zeros([COLUMNS // 16, 2, THREADS, 4], gl.float32, sums_l)
    for part in range(parts):
        base = first + part * stride_of(form)
        its = gl.load((base + mine_of_rows) + cells_of_rows, cache_modifier=".cg")
        its_sums = gl.load((base + mine) + cells, mask=inside, other=0.0, cache_modifier=".cg")
        its_top, its_total = gl.split(its)
        its_top = gl.convert_layout(its_top, row_l)
        its_total = gl.convert_layout(its_total, row_l)
        new_top = gl.maximum(tops, its_top)
        shift = gl.where(new_top == float("-inf"), 0.0, new_top)
        decay = gl.exp2(tops - shift)
        weight = gl.exp2(its_top - shift)
        tops = new_top
        totals = totals * decay + its_total * weight
        sums = sums * for_sums(decay, sums_l) + its_sums * for_sums(weight, sums_l)
    return of_threads(sums), tops, totals


@gluon.constexpr_function
def size_of(form):
    """Numbers that a consumer leaves."""
    return PART * (form.DV + BOTH)


@gluon.constexpr_function
def stride_of(form):
    """Numbers of a part."""
    return form.CONSUMERS * size_of(form)


@gluon.jit
def places_of_sums(cid: gl.constexpr, BEGIN: gl.constexpr, COLUMNS: gl.constexpr, zero, row0,
                   row_end, form: gl.constexpr):
    """Where a thread's sums lie, and whether its tile has the row.

    Added to the pointer in two steps, the thread's own first: what is left are constants, which
    instructions hold.
    """
    sums_l: gl.constexpr = sums_layout(COLUMNS)
    group = gl.arange(0, COLUMNS // 16, of_dim(0, sums_l))[:, None, None, None]
    upper = gl.arange(0, 2, of_dim(1, sums_l))[None, :, None, None]
    thread = gl.arange(0, THREADS, of_dim(2, sums_l))[None, None, :, None]
    number = gl.arange(0, 4, of_dim(3, sums_l))[None, None, None, :]
    # times 64, so that four numbers are still seen to begin at a multiple of four
    mine = thread * 4 + zero * 64
    cells = cid * size_of(form) + BEGIN * PART + (group * 2 + upper) * (THREADS * 4) + number
    row = cid * PART + thread // 32 * 16 + thread // 4 % 8 + upper * 8
    return mine, cells, row0 + token_of(row, form) < row_end


@gluon.jit
def places_of_rows(cid: gl.constexpr, zero, form: gl.constexpr):
    """Where a thread's highest scores and totals lie, behind all sums."""
    layout: gl.constexpr = ROWS_LAYOUT
    thread = gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    upper = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    number = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    mine = thread * 4 + zero * 64
    return mine, cid * size_of(form) + PART * form.DV + upper * 2 + number


@gluon.constexpr_function
def sums_layout(columns):
    """Of (columns / 16, 2, thread, 4)."""
    return gl.BlockedLayout([columns // 16, 2, 1, 4], [1, 1, 32, 1], [1, 1, 4, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def of_dim(dim, layout):
    """Layout of one of four dimensions."""
    for other in (3, 2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def by_thread(acc):
    """(64, dv) as (dv / 16, 2, thread, 4): a thread holds two rows, 8 apart, and of each 16 columns
    two pairs, 8 apart. No number moves."""
    GROUPS: gl.constexpr = acc.shape[1] // 16
    x = acc.reshape([4, 2, 8, GROUPS, 2, 4, 2]).permute((3, 1, 0, 2, 5, 4, 6))
    return gl.convert_layout(x.reshape([GROUPS, 2, THREADS, 4]), sums_layout(acc.shape[1]))


@gluon.jit
def of_threads(sums):
    GROUPS: gl.constexpr = sums.shape[0]
    x = sums.reshape([GROUPS, 2, 4, 8, 4, 2, 2]).permute((2, 1, 3, 0, 5, 4, 6))
    return x.reshape([PART, GROUPS * 16])


@gluon.jit
def rows_by_thread(top2, total):
    """Two times (64,) as (2, thread, 2): four threads have the same rows."""
    pair_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])
    first = gl.convert_layout(top2, gl.SliceLayout(1, pair_l))[:, None]
    second = gl.convert_layout(total, gl.SliceLayout(1, pair_l))[:, None]
    is_first = gl.arange(0, 8, gl.SliceLayout(0, pair_l))[None, :] % 2 == 0
    x = gl.where(is_first, first, second).reshape([4, 2, 8, 4, 2]).permute((1, 0, 2, 3, 4))
    return gl.convert_layout(x.reshape([2, THREADS, 2]), ROWS_LAYOUT)


@gluon.jit
def row_of_threads(x):
    """(2, thread) as (64,): the same in four threads."""
    x = x.reshape([2, 4, 8, 4]).permute((1, 0, 2, 3)).reshape([PART, 4])
    return gl.max(x, 1)


@gluon.jit
def for_sums(x, sums_l: gl.constexpr):
    """(2, thread), to be multiplied by (dv / 16, 2, thread, 4)."""
    x = gl.convert_layout(x, gl.SliceLayout(0, gl.SliceLayout(3, sums_l)))
    return x[None, :, :, None]


# fmt: on
