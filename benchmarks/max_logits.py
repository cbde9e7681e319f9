"""What `return_max_logits` costs: the forward with it against without it, in one run.

    python benchmarks/max_logits.py                          # 1k to 16k, four masks
    python benchmarks/max_logits.py --masks causal --lengths 4096 --pairs 60
    python benchmarks/max_logits.py --table                  # table and picture from the CSV

64:8 heads, d 128, bf16, random data; kernel time, by replay of CUDA graphs. Maxima and outputs are
checked against fp64 first. The two are timed in pairs, one right behind the other, and who goes
first alternates, so that drifting clocks cancel. Graphs of the same calls differ by up to 0.5 %, by
where their tensors lie, so each kind is captured four times. The cost is the median of the ratios
of pairs, with a 95 % interval of that median by bootstrap. Rows are added to
benchmarks/results/max_logits.csv as they come.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from attention_masks import MASKS, Problem
from exact import TOLERANCE, Exact
from timing import TimeBudget, Trial, append_csv, capture

import keel

RESULTS = Path(__file__).parent / "results"
KINDS = ("full", "causal", "vfull", "vcausal")
LENGTHS = (1024, 2048, 4096, 8192, 16384)
HQ, HK, D = 64, 8, 128
DEVICE = "cuda"
CAPTURES = 4


@dataclass
class Row:
    """One line of the CSV; costs are ratios - 1."""

    mask: str
    tokens: int
    pairs: int
    cost: float
    cost_low: float
    cost_high: float
    ms_without: float
    ms_with: float
    tflops_without: float
    tflops_with: float
    backend: str = "auto"
    hq: int = HQ
    hk: int = HK
    d: int = D
    dtype: str = "bfloat16"
    gpu: str = ""
    torch: str = torch.__version__
    triton: str = ""
    keel: str = keel.__version__
    run: str = ""


def allowed_cost(tokens: int) -> float:
    """What Keel promises: 0.5 % from 4k tokens on, 1 % below."""
    return 0.005 if tokens >= 4096 else 0.01


def median_interval(
    values: Sequence[float], *, resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """(median, low, high): 95 % of the medians of resampled values lie between.

    >>> median_interval([2.0, 2.0, 2.0])
    (2.0, 2.0, 2.0)
    """
    array = np.asarray(values, np.float64)
    draws = np.random.default_rng(seed).integers(0, len(array), (resamples, len(array)))
    low, high = np.quantile(np.median(array[draws], axis=1), [0.025, 0.975])
    return float(np.median(array)), float(low), float(high)


def time_pairs(both: Sequence[tuple[Trial, Trial]], pairs: int, budget: TimeBudget) -> list[float]:
    """Ratio having / without of each pair; which of the two goes first alternates.

    both: graphs without and with max logits, which take turns.
    """
    ratios = []
    for n in range(pairs):
        if n and budget.is_over():
            break
        without, having = both[n // 2 % len(both)]
        order = (without, having) if n % 2 else (having, without)
        for trial in order:
            trial.sample()
        ratios.append(having.samples[-1] / without.samples[-1])
    return ratios


def make_trial(
    problem: Problem, qkv: list[torch.Tensor], exact: Exact, backend: str, with_max: bool
) -> Trial:
    """A checked CUDA graph of the forward."""

    def call() -> tuple[torch.Tensor, torch.Tensor | None]:
        out, meta = keel.flex_flash_attn_func(
            *qkv, problem.mask, return_max_logits=with_max, backend=backend
        )
        return out, meta.max_logits

    replay, inside, (out, top) = capture(lambda: call)
    for x in (out, top):
        if x is not None:
            x.fill_(float("nan"))
    replay()
    check(exact, out, top)
    return Trial(replay, inside)


def check(exact: Exact, out: torch.Tensor, top: torch.Tensor | None) -> None:
    """Raises where the output or a maximum of the checked heads is not that of fp64."""
    error = exact.error("forward", [out])
    if top is not None:
        want = exact.max_logits
        # Sums of d products of bf16 numbers in fp32: exact to about 1e-6.
        off = ((top[exact.q_heads].double() - want).abs() / want.abs()).max()
        error = max(error, 100 * float(off.nan_to_num(torch.inf)))
    if not error < TOLERANCE:
        raise ArithmeticError(f"wrong result, nothing is timed: relative error {error:.2g}")


def measure(problem: Problem, pairs: int, backend: str, budget: TimeBudget) -> Row:
    qkv = [
        torch.randn(problem.tokens, h, D, device=DEVICE, dtype=torch.bfloat16) for h in (HQ, HK, HK)
    ]
    exact = Exact(problem, qkv, None, key_head=HK - 1)
    both = [
        tuple(make_trial(problem, qkv, exact, backend, on) for on in (False, True))
        for _ in range(CAPTURES)
    ]
    for trial in itertools.chain(*both):  # finds its number of calls; not part of a pair
        trial.sample()
        trial.samples.clear()
    ratios = time_pairs(both, pairs, budget)
    return row_of(problem, ratios, *(pooled(trials) for trials in zip(*both, strict=True)), backend)


def pooled(trials: Sequence[Trial]) -> float:
    """Median of all their samples, in milliseconds."""
    return statistics.median(itertools.chain(*(trial.samples for trial in trials)))


def row_of(
    problem: Problem, ratios: Sequence[float], without: float, having: float, backend: str
) -> Row:
    """without, having: milliseconds."""
    median, low, high = median_interval(ratios)
    flops = problem.flops("forward", HQ, D)
    return Row(
        *(problem.name, problem.tokens, len(ratios), median - 1, low - 1, high - 1),
        *(without, having, flops / without / 1e9, flops / having / 1e9, backend),
    )


def describe(row: Row) -> str:
    verdict = "within" if row.cost <= allowed_cost(row.tokens) else "ABOVE"
    return (
        f"{row.tokens:6d} {row.mask:8s} {row.ms_without * 1e3:8.1f} -> {row.ms_with * 1e3:8.1f} us "
        f"{row.cost:+.2%} ({row.cost_low:+.2%} .. {row.cost_high:+.2%}, {row.pairs} pairs), "
        f"{verdict} {allowed_cost(row.tokens):.1%}"
    )


def read_rows(path: Path) -> list[Row]:
    kinds = {f.name: {"int": int, "float": float}.get(f.type, str) for f in dataclasses.fields(Row)}
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    return [Row(**{name: kinds[name](x) for name, x in line.items()}) for line in lines]


def latest(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """The last row of each mask and length."""
    return {(row.mask, row.tokens): row for row in sorted(rows, key=lambda row: row.run)}


def table(rows: Sequence[Row]) -> str:
    """Markdown: cost and its interval, a line for each length."""
    found = latest(rows)
    kinds = [kind for kind in MASKS if any(key[0] == kind for key in found)]
    lines = [f"| tokens | {' | '.join(kinds)} |", "|" + "---|" * (len(kinds) + 1)]
    for tokens in sorted({key[1] for key in found}):
        cells = [found.get((kind, tokens)) for kind in kinds]
        shown = [
            f"{row.cost:+.2%} ({row.cost_low:+.2%} .. {row.cost_high:+.2%})" if row else "–"
            for row in cells
        ]
        lines.append(f"| {tokens} | {' | '.join(shown)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Speed with and without, a panel for each mask; below it the cost with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = latest(rows)
    kinds = [kind for kind in MASKS if any(key[0] == kind for key in found)]
    figure, axes = plt.subplots(
        2, len(kinds), figsize=(3.2 * len(kinds) + 1, 6), squeeze=False, sharex=True, sharey="row"
    )
    for kind, (speed, cost) in zip(kinds, axes.T, strict=True):
        own = [row for (mask, _), row in sorted(found.items()) if mask == kind]
        tokens = [row.tokens for row in own]
        speed.plot(tokens, [row.tflops_without for row in own], ".-", label="without")
        speed.plot(tokens, [row.tflops_with for row in own], ".--", label="with max logits")
        speed.set_title(kind)
        middle = [100 * row.cost for row in own]
        below = [100 * (row.cost - row.cost_low) for row in own]
        above = [100 * (row.cost_high - row.cost) for row in own]
        cost.errorbar(tokens, middle, (below, above), fmt="k.-", capsize=3)
        limit = [100 * allowed_cost(n) for n in tokens]
        cost.plot(tokens, limit, "r_", markersize=14, label="allowed")
        cost.axhline(0, color="grey", linewidth=0.7)
        cost.set_xscale("log", base=2)
        cost.set_xlabel("tokens")
        for axis in (speed, cost):
            axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("TFLOP/s")
    axes[1][0].set_ylabel("cost in %")
    row = next(iter(found.values()))
    figure.suptitle(f"{row.hq}:{row.hk} heads, d {row.d}, {row.dtype}, {row.gpu}, forward")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def at_least_30(text: str) -> int:
    if int(text) < 30:
        raise argparse.ArgumentTypeError(f"less than 30 pairs say little, got {text}")
    return int(text)


def run(args: argparse.Namespace) -> None:
    import triton

    torch.manual_seed(0)
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    budget, rows = TimeBudget(args.seconds), []
    for problem in (MASKS[name](tokens) for tokens in args.lengths for name in args.masks):
        if not budget.has_room():
            print(f"--seconds {args.seconds:.0f} ends the run after {len(rows)} cases")
            break
        with budget.piece():
            row = measure(problem, args.pairs, args.backend, budget)
        row.gpu, row.triton, row.run = torch.cuda.get_device_name(), triton.__version__, began
        append_csv([row], args.out / "max_logits.csv")
        rows.append(row)
        print(describe(row), flush=True)
    if rows:
        worst = statistics.median(row.cost for row in rows), max(row.cost for row in rows)
        print(f"cost: median {worst[0]:+.2%}, largest {worst[1]:+.2%}; {budget.spent:.0f} s")
        plot(read_rows(args.out / "max_logits.csv"), args.out / "max_logits.png")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--masks", nargs="+", choices=list(MASKS), default=list(KINDS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--pairs", type=at_least_30, default=40)
    parser.add_argument("--backend", default="auto")
    parser.add_argument(
        "--seconds", "--budget-s", type=float, help="ends by itself within about this time"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="show results of the CSV, no run")
    args = parser.parse_args(arguments)
    if args.table:
        path = args.out / "max_logits.csv"
        if not path.exists():
            raise SystemExit(f"{path} is not there: run without --table first, or give --out")
        rows = read_rows(path)
        print(table(rows))
        plot(rows, args.out / "max_logits.png")
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; `make demo` runs everywhere")
    run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
