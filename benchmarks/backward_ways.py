"""What other ways of the backward cost beside the plain one: fixed order, SM margins, portable.

    python benchmarks/backward_ways.py --lengths 4096 8192 --masks full causal vcausal
    python benchmarks/backward_ways.py --dims 64 --heads 32:32
    python benchmarks/backward_ways.py --terms bias alibi

bf16 on a Hopper GPU. A bias is (1, tokens, tokens) and wants its gradient. Each way is captured in
a CUDA graph, replayed and checked against fp64, gradients of a bias against those of another way;
those that claim it must also give the same bits each time; what is wrong is not timed. Ways take
turns, the median counts. Rows are added to benchmarks/results/backward_ways.csv.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attention_masks import MASKS, Problem
from exact import TOLERANCE, Exact, worst_error
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
TERMS = ("none", "bias", "alibi")
WAYS_WITH_TERMS = ("plain", "portable")


@dataclass
class Row:
    """One line of the CSV."""

    mask: str
    tokens: int
    hq: int
    hk: int
    d: int
    terms: str
    way: str
    ms: float
    spread: float
    of_plain: float
    tflops: float
    error: float
    gpu: str = ""
    torch: str = torch.__version__
    keel: str = keel.__version__


@dataclass(frozen=True, slots=True)
class Terms:
    """What logits have on top, for a call and for the fp64 check of one key head."""

    options: dict[str, torch.Tensor]
    added: Callable[[slice, slice], torch.Tensor] | None = None


def make_terms(name: str, tokens: int, hq: int, hk: int) -> Terms:
    if name == "none":
        return Terms({})
    if name == "bias":
        bias = torch.randn(1, tokens, tokens, device="cuda", dtype=torch.bfloat16)
        return Terms(
            {"bias": bias.requires_grad_()},
            lambda rows, keys: bias.detach()[:, rows, keys].double(),
        )
    slopes = torch.exp2(torch.linspace(-1, -8, hq, device="cuda"))

    def distances(rows: slice, keys: slice) -> torch.Tensor:
        i, j = (torch.arange(x.start, x.stop, device="cuda") for x in (rows, keys))
        return -slopes[-(hq // hk) :, None, None].double() * (i[:, None] - j).abs()

    return Terms({"alibi_slopes": slopes}, distances)


def measure(problem: Problem, hq: int, hk: int, d: int, terms: str, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    made = make_terms(terms, problem.tokens, hq, hk)
    shapes = [(problem.tokens, heads, d) for heads in (hq, hk, hk)]
    qkv = [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]
    dout = torch.randn(problem.tokens, hq, d, device="cuda", dtype=torch.bfloat16)
    exact = Exact(problem, qkv, dout, key_head=hk - 1, added=made.added)
    backend = "auto" if made.options else "hopper"  # the forward with terms is the portable one
    wanted = [*qkv, *(x for x in made.options.values() if x.requires_grad)]
    trials, errors, kept, bias_grads = {}, {}, [], []
    for way in WAYS if terms == "none" else WAYS_WITH_TERMS:

        def prepare(options: dict[str, Any] = WAYS[way]) -> Callable[[], Sequence[torch.Tensor]]:
            out, _ = keel.flex_flash_attn_func(
                *qkv, problem.mask, **{"backend": backend, **made.options, **options}
            )
            kept.append(out)  # and what it saved: a graph holds on to addresses alone
            return lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)

        replay, calls, grads = capture(prepare)
        replay()
        first = [x.clone() for x in grads]
        replay()
        errors[way] = exact.error("backward", grads[:3])
        if len(first) > 3:  # a sum over all heads, so against that of the first way
            bias_grads.append(first[3][0])
            errors[way] = max(errors[way], worst_error([first[3][0]], bias_grads[:1]))
        repeated = [torch.equal(x, y) for x, y in zip(first, grads, strict=True)]
        fixed = way in ("deterministic", "portable") and terms == "none"
        same = all(repeated if fixed else repeated[1:3])  # dq and dbias may be sums in any order
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
            *(problem.name, problem.tokens, hq, hk, d, terms, way, trial.ms, trial.spread),
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
    parser.add_argument("--terms", nargs="+", choices=TERMS, default=["none"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    hopper_needed(parser)
    hq, hk = given.heads
    grid = itertools.product(given.dims, given.lengths, given.masks, given.terms)
    for d, tokens, name, terms in grid:
        rows = measure(MASKS[name](tokens), hq, hk, d, terms, given.rounds)
        for row in rows:
            print(
                f"{row.mask:8} {row.tokens:6} d {row.d:3} {row.terms:5} {row.way:13} "
                f"{row.ms:8.3f} ms {row.tflops:6.0f} TFLOP/s  {row.of_plain:5.2f} x plain  "
                f"(spread {row.spread:.1%}, error {row.error:.4f})",
                flush=True,
            )
        append_csv(rows, given.out / "backward_ways.csv")


if __name__ == "__main__":
    main()
