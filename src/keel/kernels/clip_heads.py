"""What QK-Clip does between its maxima and its rows, in one launch.

In torch these are nine small operations, and each takes longer to start than to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from keel.kernels.launch import Prepared, launch

BLOCK = 256

# fmt: off


@triton.jit
def gamma_of(top, tau, skipped):
    """min(1, tau / top), and 1 where top is no positive number or the step was skipped: a quotient
    is 1 for NaN and up to tau, and 0 for infinity, which is not above 0."""
    quotient = tl.div_rn(tau, tl.maximum(top, tau))
    return tl.where(quotient > skipped, quotient, 1.0)


@triton.jit
def clip_heads_kernel(
    TOP, TAU, GAMMA, CLIPS, LARGEST, PLACE, POWER, FACTOR, heads, entries, BLOCK: tl.constexpr
):
    """Gammas, counts and the largest logits of heads; then the factors of rows, entry by entry.

    TOP (heads + 1,): maxima, and whether the step was skipped. PLACE (entries,): 0 for a factor
    of 1, else one more than the head whose gamma is raised to POWER.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    skipped, tau = tl.load(TOP + heads), tl.load(TAU)

    here = i < heads
    top = tl.load(TOP + i, mask=here, other=0.0)
    gamma = gamma_of(top, tau, skipped)
    tl.store(GAMMA + i, gamma, mask=here)
    clips = tl.load(CLIPS + i, mask=here, other=0)
    tl.store(CLIPS + i, clips + (gamma < 1.0).to(tl.int64), mask=here)
    largest = tl.load(LARGEST + i, mask=here, other=0.0)
    tl.store(LARGEST + i, tl.where(top > largest, top, largest), mask=here)  # never a NaN

    here = i < entries
    place = tl.load(PLACE + i, mask=here, other=0)
    power = tl.load(POWER + i, mask=here, other=1.0)
    gamma = gamma_of(tl.load(TOP + place - 1, mask=place > 0, other=0.0), tau, skipped)
    factor = tl.where(power == 0.5, tl.sqrt_rn(gamma), tl.exp2(power * tl.log2(gamma)))
    as_it_is = (power == 1.0) | (gamma == 1.0)  # rows of 1 must not change by a bit
    tl.store(FACTOR + i, tl.where(as_it_is, gamma, factor), mask=here)


# fmt: on


def clip_heads(
    top: torch.Tensor,
    tau: torch.Tensor,
    *,
    gamma: torch.Tensor,
    clips: torch.Tensor,
    largest: torch.Tensor,
    places: torch.Tensor,
    powers: torch.Tensor,
) -> torch.Tensor:
    """(entries,) factors of rows; writes gamma (heads,), raises clips and largest (heads,).

    top: (heads + 1,) fp32, maxima and whether the step was skipped; tau: (1,), in memory, since it
    may change from step to step and recipes stay; places, powers: (entries,).
    """
    factors = torch.empty_like(powers)
    heads, entries = len(gamma), len(factors)
    launch(
        clip_heads_kernel,
        None,
        {
            **{"TOP": top, "TAU": tau, "GAMMA": gamma, "CLIPS": clips, "LARGEST": largest},
            **{"PLACE": places, "POWER": powers, "FACTOR": factors},
        },
        lambda: Prepared(
            (triton.cdiv(max(heads, entries), BLOCK),),
            {"heads": heads, "entries": entries, "BLOCK": BLOCK},
            num_warps=4,
        ),
    )
    return factors
