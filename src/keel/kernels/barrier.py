"""A start signal between streams: communication marks that it runs, compute waits for the marks.

Four int64 numbers on the device: marks that came and were not used up, marks that earlier waits
still miss, waits that gave up, and a clock for where there is no other. Marks only add, and a wait
takes off what it used, so nothing is ever set to zero under way: that makes a round repeatable,
also as a CUDA graph, which repeats its numbers.

A wait that gives up leaves a debt: the marks it did not see. Late ones pay that first, so they
never pass for the start of the next communication. Marks of what was never launched would be missed
forever; so where a wait gives up although as many came as it asked for, debts are forgotten.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from keel.kernels.flash_common import HAS_PTX
from keel.kernels.launch import Prepared, launch

MARKS, DEBT, MISSES, CLOCK = (tl.constexpr(n) for n in range(4))
STATE_SIZE = 4
TICK = tl.constexpr(1000)
"""What a poll counts as, in nanoseconds, where the GPU has no clock for us."""


@triton.jit
def mark_started(STATE):
    """One mark; the first instruction of a communication kernel."""
    tl.atomic_add(STATE + MARKS, 1, sem="release", scope="gpu")


@triton.jit
def _spin(STATE, needed, bound_ns, PTX: tl.constexpr):
    """Polls until `needed` marks came or the time is over; how many there were in the end.

    In PTX the loop is one instruction to Triton: every lane leaves it when it likes, which a loop
    of Triton's, with a barrier behind each atomic, would not survive.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred over;
            .reg .b64 began, now;
            .reg .b32 nap;
            mov.u64 began, %globaltimer;
            mov.u32 nap, 32;
            AGAIN:
            ld.acquire.gpu.global.s64 $0, [$1];
            setp.ge.s64 over, $0, $2;
            @over bra DONE;
            mov.u64 now, %globaltimer;
            sub.u64 now, now, began;
            setp.ge.s64 over, now, $3;
            @over bra DONE;
            nanosleep.u32 nap;
            shl.b32 nap, nap, 1;
            min.u32 nap, nap, 512;
            bra AGAIN;
            DONE:
            }""",
            "=&l,l,l,l",
            [(STATE + MARKS).to(tl.int64, bitcast=True), needed, bound_ns],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        began = tl.load(STATE + CLOCK)
        seen = tl.atomic_add(STATE + MARKS, 0, sem="acquire")
        while (seen < needed) & (tl.atomic_add(STATE + CLOCK, TICK) - began < bound_ns):
            seen = tl.atomic_add(STATE + MARKS, 0, sem="acquire")
        return seen


@triton.jit
def _nap(nanoseconds, PTX: tl.constexpr):
    if PTX:
        tl.inline_asm_elementwise(
            "nanosleep.u32 $1; mov.b32 $0, 0;",
            "=r,r",
            [nanoseconds],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def mark_kernel(STATE):
    mark_started(STATE)


@triton.jit(do_not_specialize=["target", "bound_ns", "settle_ns"])
def wait_kernel(STATE, ALL_MISSES, target, bound_ns, settle_ns, PTX: tl.constexpr):
    target = target.to(tl.int64)
    debt = tl.load(STATE + DEBT)
    needed = debt + target
    seen = _spin(STATE, needed, bound_ns.to(tl.int64), PTX)
    # Lanes may have seen different numbers; thread 0 alone writes, so no branch depends on them.
    missed = seen < needed
    used = tl.where(missed, seen, needed)
    left = tl.where(missed & (seen < target), needed - seen, 0)
    tl.store(STATE + DEBT, left)
    tl.atomic_add(STATE + MARKS, -used, sem="relaxed")
    tl.atomic_add(STATE + MISSES, missed.to(tl.int64), sem="relaxed")
    tl.atomic_add(ALL_MISSES, missed.to(tl.int64), sem="relaxed")
    _nap(settle_ns, PTX)


def mark(state: torch.Tensor) -> None:
    """Queues one mark on the current stream."""
    launch(mark_kernel, "mark", {"STATE": state}, lambda: Prepared((1,), {}, num_warps=1))


def wait(
    state: torch.Tensor,
    all_misses: torch.Tensor,
    target: int,
    *,
    bound_ns: int,
    settle_ns: int = 0,
) -> None:
    """What the current stream is given from now on waits for `target` marks, at most `bound_ns`."""
    arguments = {"target": target, "bound_ns": bound_ns, "settle_ns": settle_ns, "PTX": HAS_PTX}
    launch(
        wait_kernel,
        tuple(arguments.values()),
        {"STATE": state, "ALL_MISSES": all_misses},
        lambda: Prepared((1,), arguments, num_warps=1),
    )
