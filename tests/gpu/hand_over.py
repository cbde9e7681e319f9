"""What racecheck says of a number that is handed over, in the least kernel there is.

    compute-sanitizer --tool racecheck --kernel-name kns=hand_over python tests/gpu/hand_over.py HOW

The giver writes only when the taker has read what was there, and the taker reads only when the
giver has written: there is no race. HOW they tell each other:

    lane     by mbarriers, at which one lane arrives when its whole warp is there: reported
    each     by mbarriers, at which each thread arrives for itself: not reported
    named    by named barriers, at which all threads of both are: reported
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

TURNS = 100
TAKERS = 4
"""Warps; the giver is one."""
THREADS = gl.constexpr(32 * (TAKERS + 1))
NAMED = gl.constexpr(14)
"""First of two named barriers that Triton does not take."""
FULL, EMPTY, NUMBER = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""Places of 8 bytes, the first in shared memory."""

# fmt: off


@gluon.jit
def place(WHICH: gl.constexpr):
    return gl.inline_asm_elementwise(f"mov.u32 $0, global_smem; add.u32 $0, $0, {8 * WHICH};",
                                     "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive(BARRIER: gl.constexpr, LANES: gl.constexpr):
    gl.inline_asm_elementwise(
        f"""{{
        .reg .pred mine;
        .reg .b32 lane;
        .reg .b64 state;
        mov.u32 lane, %laneid;
        setp.lt.u32 mine, lane, {LANES};
        bar.warp.sync 0xffffffff;
        @mine mbarrier.arrive.shared::cta.b64 state, [$1];
        mov.u32 $0, 0;
        }}""", "=r,r,~{memory}", [place(BARRIER)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def tell(BARRIER: gl.constexpr, LANES: gl.constexpr):
    if LANES == 0:
        gl.inline_asm_elementwise(
            f"bar.arrive {NAMED + BARRIER}, {THREADS}; mov.u32 $0, 0;", "=r,~{memory}", [],
            dtype=gl.int32, is_pure=False, pack=1)
    else:
        arrive(BARRIER, LANES)


@gluon.jit
def wait(places, BARRIER: gl.constexpr, phase, LANES: gl.constexpr):
    if LANES == 0:
        gl.inline_asm_elementwise(
            f"bar.sync {NAMED + BARRIER}, {THREADS}; mov.u32 $0, 0;", "=r,~{memory}", [],
            dtype=gl.int32, is_pure=False, pack=1)
    else:
        mbarrier.wait(places.index(BARRIER), phase)


@gluon.jit
def giver(places, OUT, TURNS: gl.constexpr, LANES: gl.constexpr):
    for turn in range(TURNS):
        wait(places, EMPTY, turn & 1, LANES)
        gl.inline_asm_elementwise("st.shared.b32 [$1], $2; mov.u32 $0, 0;", "=r,r,r,~{memory}",
                                  [place(NUMBER), turn], dtype=gl.int32, is_pure=False, pack=1)
        tell(FULL, LANES)
    wait(places, EMPTY, TURNS & 1, LANES)


@gluon.jit
def taker(places, OUT, TURNS: gl.constexpr, LANES: gl.constexpr):
    tell(EMPTY, LANES)
    total = 0
    for turn in range(TURNS):
        wait(places, FULL, turn & 1, LANES)
        total += gl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r,~{memory}",
                                           [place(NUMBER)], dtype=gl.int32, is_pure=False, pack=1)
        tell(EMPTY, LANES)
    gl.store(OUT, total)


@gluon.jit
def hand_over_kernel(OUT, TURNS: gl.constexpr, LANES: gl.constexpr, TAKERS: gl.constexpr):
    places = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    mbarrier.init(places.index(FULL), count=max(LANES, 1))
    mbarrier.init(places.index(EMPTY), count=max(LANES, 1) * TAKERS)
    gl.warp_specialize([
        (taker, (places, OUT, TURNS, LANES)),
        (giver, (places, OUT, TURNS, LANES)),
    ], [1], [24])


# fmt: on

LANES_OF = {"lane": 1, "each": 32, "named": 0}

if __name__ == "__main__":
    how = sys.argv[1] if len(sys.argv) == 2 else ""
    if how not in LANES_OF:
        raise SystemExit(f"one of {', '.join(LANES_OF)} is wanted, not {sys.argv[1:]}")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    hand_over_kernel[(1,)](out, TURNS, LANES_OF[how], TAKERS, num_warps=TAKERS)
    print("right" if out.item() == sum(range(TURNS)) else f"WRONG: {out.item()}")
