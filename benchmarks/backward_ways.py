"""What other ways of the backward cost beside the plain one: fixed order, SM margins, portable.

    python benchmarks/backward_ways.py --lengths 4096 8192 --masks full causal vcausal
    python benchmarks/backward_ways.py --dims 64 --heads 32:32

bf16 on a Hopper GPU. Each way is captured in a CUDA graph, replayed and checked against fp64; those
that claim it must also give the same bits each time; what is wrong is not timed. Ways take turns,
the median counts. Rows are added to benchmarks/results/backward_ways.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attention_masks import MASKS, Problem
from exact import TOLERANCE, Exact
from timing import Trial, append_csv, capture, heads, hopper_needed

import keel

RESULTS = Path(__file__).parent / "results"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "margin 1": {"sm_margin": 1},
    "margin 16": {"sm_margin": 16},
    "portable": {"backend": "triton"},
}


@dataclass
class Row:
    """One line of the CSV."""

    mask: str
    tokens: int
    hq: int
    hk: int
    d: int
    way: str
    ms: float
    spread: float
    of_plain: float
    tflops: float
    error: float
    gpu: str = ""
    torch: str = torch.__version__
    keel: str = keel.__version__


def measure(problem: Problem, hq: int, hk: int, d: int, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    shapes = [(problem.tokens, heads, d) for heads in (hq, hk, hk)]
    qkv = [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]
    dout = torch.randn(problem.tokens, hq, d, device="cuda", dtype=torch.bfloat16)
    exact = Exact(problem, qkv, dout, key_head=hk - 1)
    trials, errors, kept = {}, {}, []
    for way, options in WAYS.items():

        def prepare(options: dict[str, Any] = options) -> Callable[[], Sequence[torch.Tensor]]:
            out, _ = keel.flex_flash_attn_func(
                *qkv, problem.mask, **{"backend": "hopper", **options}
            )
            kept.append(out)  # and what it saved: a graph holds on to addresses alone
            return lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True)

        replay, calls, grads = capture(prepare)
        replay()
        first = [x.clone() for x in grads]
        replay()
        errors[way] = exact.error("backward", grads)
        repeated = [torch.equal(x, y) for x, y in zip(first, grads, strict=True)]
        same = all(repeated if way in ("deterministic", "portable") else repeated[1:])
        if errors[way] > TOLERANCE or not same:
            print(f"{problem.name} {problem.tokens} {way}: WRONG, {errors[way]:.2g}, {repeated}")
            continue
        trials[way] = Trial(replay, calls)
    for _ in range(rounds):
        for trial in trials.values():
            trial.sample()
    flops = problem.flops("backward", hq, d)
    nan = float("nan")
    return [
        Row(
            *(problem.name, problem.tokens, hq, hk, d, way, trial.ms, trial.spread),
            of_plain=trial.ms / trials["plain"].ms if "plain" in trials else nan,
            tflops=flops / trial.ms / 1e9,
            error=errors[way],
            gpu=torch.cuda.get_device_name(),
        )
        for way, trial in trials.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=["full", "causal", "vcausal"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 16384])
    parser.add_argument("--dims", nargs="+", type=int, default=[128])
    parser.add_argument("--heads", type=heads, default=(64, 8))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    hopper_needed(parser)
    hq, hk = given.heads
    for d in given.dims:
        for tokens in given.lengths:
            for name in given.masks:
                rows = measure(MASKS[name](tokens), hq, hk, d, given.rounds)
                for row in rows:
                    print(
                        f"{row.mask:8} {row.tokens:6} d {row.d:3} {row.way:13} {row.ms:8.3f} ms "
                        f"{row.tflops:6.0f} TFLOP/s  {row.of_plain:5.2f} x plain  "
                        f"(spread {row.spread:.1%}, error {row.error:.4f})"
                    )
                append_csv(rows, given.out / "backward_ways.csv")


if __name__ == "__main__":
    main()
