"""Shared memory of the Hopper forward by address: barriers, and maxima of rows (Gluon, sm_90).

Triton stops all warps of a partition between two waits at barriers of one array, and before it
arrives at one. So warps wait and arrive by themselves here, at addresses that Triton does not tell.
It lays the largest arrays down first, in the order in which they are made: queries, keys, values,
then PLACES, which all barriers are in, and what consumers leave for the producer.
`hopper_launch.check_compiled` looks at compiled kernels whether that is so, before they run.

Only thus can two consumers run the same code: a partition of eight warps has half of the
instructions of two of four, and what a tile does once is then found in the instruction cache. With
Triton's barriers they would stop for each other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from keel._versions import reinterpreted, thread_barrier
from keel.kernels.hopper_common import PART
from keel.kernels.hopper_forms import (
    FIELDS_EMPTY_AT,
    FIELDS_FULL_AT,
    K_FULL_AT,
    K_SHARED_AT,
    NEWS,
    NEWS_AT,
    Q_EMPTY_AT,
    Q_FULL_AT,
    TOPS_AT,
    V_FULL_AT,
    V_SHARED_AT,
)

# fmt: off

Q_FULL = gl.constexpr(Q_FULL_AT)
Q_EMPTY = gl.constexpr(Q_EMPTY_AT)
FIELDS_FULL = gl.constexpr(FIELDS_FULL_AT)
FIELDS_EMPTY = gl.constexpr(FIELDS_EMPTY_AT)
K_FULL = gl.constexpr(K_FULL_AT)
V_FULL = gl.constexpr(V_FULL_AT)
TOPS = gl.constexpr(TOPS_AT)
V_FREE = gl.constexpr(12)
"""First named barrier of the stages of values; of keys, and of all others, `Form.keys_free`."""


@gluon.jit
def shared_place():
    """Address of all shared memory."""
    return gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32,
                                     is_pure=False, pack=1)


@gluon.jit
def place_in(ring, form: gl.constexpr):
    """The same, or made anew where no register is left to keep it in."""
    if form.SEEKS:
        return shared_place()
    else:
        return ring.at


@gluon.jit
def warpgroup():
    """0 or 1, of eight warps. To Triton it is the same number in all of them, so a branch by it
    must not hold a barrier of Triton's."""
    return gl.inline_asm_elementwise("mov.u32 $0, %tid.x; shr.u32 $0, $0, 7;", "=r", [],
                                     dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def one_of(ring, FIRST: gl.constexpr, number):
    """A barrier, for Triton; FIRST is where the first of its kind is in PLACES."""
    return ring.places.index(FIRST + number)


@gluon.constexpr_function
def _counts(form):
    """(number in PLACES, arrivals) of all barriers but the first."""
    counts = [(Q_FULL_AT + i, 1) for i in range(1, form.q_buffers)]
    counts += [(Q_EMPTY_AT + i, form.arrivals) for i in range(form.q_buffers)]
    counts += [(FIELDS_FULL_AT + i, 1) for i in range(2)]
    counts += [(FIELDS_EMPTY_AT + i, form.arrivals) for i in range(2)]
    by_stage = [K_FULL_AT, V_FULL_AT]
    if form.paired:
        by_stage += [K_SHARED_AT, V_SHARED_AT]
        counts += [(NEWS_AT + i, 1) for i in range(NEWS)]
    return counts + [(first + i, 1) for first in by_stage for i in range(form.stages)]


@gluon.constexpr_function
def _set_up(form):
    lines = (
        f"@first mbarrier.init.shared::cta.b64 [$1+{form.places_at + 8 * number}], {arrivals};"
        for number, arrivals in _counts(form)
    )
    seen = "fence.mbarrier_init.release.cluster; " if form.paired else ""
    return "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; " \
        "setp.eq.u32 first, thread, 0; " + " ".join(lines) + f" {seen}mov.u32 $0, 0; }}"


@gluon.jit
def show_place(memory, SIZE: gl.constexpr):
    """Of so many numbers of 16 bits."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    begin = reinterpreted(memory, gl.int64, [SIZE // 4, 1], barrier)
    mbarrier.init(begin.index(0), 1)
    mbarrier.invalidate(begin.index(0))


@gluon.jit
def set_up(ring, form: gl.constexpr):
    """All of PLACES. Triton would stop all threads between two of them, so it has to do with the
    first; and with the first number of other arrays for once, for `check_compiled` to see where
    they are."""
    show_place(ring.q, form.Q_BUFFERS * form.ROWS * form.D)
    if form.PAIRED:
        show_place(ring.k, form.STAGES * form.BN * form.D)
        show_place(ring.v, form.STAGES * form.BN * form.DV)
    mbarrier.init(one_of(ring, Q_FULL, 0), 1)
    gl.inline_asm_elementwise(_set_up(form), "=r,r,~{memory}", [ring.at], dtype=gl.int32,
                              is_pure=False, pack=1)
    thread_barrier()  # else Triton would have one in each tile, before queries are read


@gluon.jit
def wait_at(ring, FIRST: gl.constexpr, number, phase, form: gl.constexpr):
    AT: gl.constexpr = form.PLACES_AT + 8 * FIRST
    gl.inline_asm_elementwise(
        f"""{{
        .reg .pred done;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$1+{AT}], $2;
        @!done bra.uni again;
        mov.u32 $0, 0;
        }}""", "=r,r,r,~{memory}", [place_in(ring, form) + number * 8, phase],
        dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_at(ring, FIRST: gl.constexpr, number, form: gl.constexpr):
    """Each warp by itself, when all of its threads are there."""
    AT: gl.constexpr = form.PLACES_AT + 8 * FIRST
    gl.inline_asm_elementwise(
        f"""{{
        .reg .pred first;
        .reg .b32 lane;
        .reg .b64 state;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        bar.warp.sync 0xffffffff;
        @first mbarrier.arrive.shared::cta.b64 state, [$1+{AT}];
        mov.u32 $0, 0;
        }}""", "=r,r,~{memory}", [place_in(ring, form) + number * 8],
        dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def leave_tops(ring, buffer, row, tops, form: gl.constexpr):
    """Highest scores of rows, for `left_tops`."""
    AT: gl.constexpr = form.PLACES_AT + TOPS
    gl.inline_asm_elementwise(
        f"st.shared.f32 [$1+{AT}], $2; mov.u32 $0, 0;", "=r,r,f,~{memory}",
        [ring.at + (buffer * form.ROWS + row) * 4, tops], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def left_tops(ring, buffer, part: gl.constexpr, layout: gl.constexpr, form: gl.constexpr):
    """Those of 64 rows, of which a lane has two neighbours."""
    AT: gl.constexpr = form.PLACES_AT + TOPS + part * PART * 4
    row = gl.arange(0, PART, layout)
    return gl.inline_asm_elementwise(
        f"ld.shared.v2.f32 {{$0, $1}}, [$2+{AT}];", "=f,=f,r,r,~{memory}",
        [ring.at + (buffer * form.ROWS + row) * 4], dtype=gl.float32, is_pure=False, pack=2)


# fmt: on
