"""What racecheck says of a number that is handed over by mbarriers, in the least kernel there is.

    compute-sanitizer --tool racecheck --kernel-name kns=hand_over python tests/gpu/hand_over.py

The giver writes only when the taker has arrived at `empty`, the taker reads only when the giver has
arrived at `full`: there is no race. Racecheck reports one.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

TURNS = 100

# fmt: off


@gluon.jit
def giver(number, full, empty, OUT, TURNS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for turn in range(TURNS):
        mbarrier.wait(empty, (turn & 1) ^ 1)
        number.store(gl.full([1], turn, gl.int32, layout))
        mbarrier.arrive(full, count=1)


@gluon.jit
def taker(number, full, empty, OUT, TURNS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = 0
    for turn in range(TURNS):
        mbarrier.wait(full, turn & 1)
        total += gl.max(number.load(layout), 0)
        mbarrier.arrive(empty, count=1)
    gl.store(OUT, total)


@gluon.jit
def hand_over_kernel(OUT, TURNS: gl.constexpr):
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    number = gl.allocate_shared_memory(gl.int32, [1], plain)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize([
        (taker, (number, full, empty, OUT, TURNS)),
        (giver, (number, full, empty, OUT, TURNS)),
    ], [1], [24])


# fmt: on

if __name__ == "__main__":
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    hand_over_kernel[(1,)](out, TURNS, num_warps=4)
    print("right" if out.item() == sum(range(TURNS)) else f"WRONG: {out.item()}")
