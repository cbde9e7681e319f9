"""Attention on one GPU: Keel beside FlashAttention-3, cuDNN and FlexAttention, in one run.

    python benchmarks/attention.py --peers DIR             # DIR holds fa3_peer.py and fa3.so
    python benchmarks/attention.py --masks full causal --lengths 1024 65536 --dims 64 --heads 32:32
    python benchmarks/attention.py --providers keel flex --direction forward --budget-s 300
    python benchmarks/attention.py --list                  # what would run; needs no GPU
    python benchmarks/attention.py --table --dims 128      # tables and pictures from the CSV

bf16, random data. Each result is checked against fp64 before it is timed, on memory full of NaNs,
and again behind the replay of its CUDA graph; what is wrong is not timed. Providers take turns in
each round, in random order; the median over rounds counts. Backward is timed alone, on one kept
forward. TFLOP/s = 4 * area * hq * d (backward 2.5 times). The roof is what an 8192^3 product and a
large copy, timed in the same run, allow. Rows are added to benchmarks/results/attention.csv as
they come; ratios are made inside of one run only.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import attention_report as report
import torch
from attention_masks import DIRECTIONS, MASKS, Problem
from attention_peers import DEFAULT, PROVIDERS, Attend, Maker, can_do, is_ours, maker
from attention_report import Row
from exact import TOLERANCE, Exact, worst_error
from timing import (
    Call,
    TimeBudget,
    Trial,
    append_csv,
    capture,
    copy_rate,
    gemm_rate,
    poison_free_memory,
)

RESULTS = Path(__file__).parent / "results"
LENGTHS = (2048, 8192, 16384, 32768)
TIMINGS = ("graph", "eager")
DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    """A problem with heads."""

    problem: Problem
    hq: int
    hk: int
    d: int

    def tensors(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """[q, k, v] and dout, all (tokens, heads, d)."""
        make = functools.partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
        q, k, v, dout = (
            make(self.problem.tokens, h, self.d) for h in (self.hq, self.hk, self.hk, self.hq)
        )
        return [q, k, v], dout

    def __str__(self) -> str:
        p = self.problem
        return f"{p.name} {p.tokens}, {self.hq}:{self.hk} heads, d {self.d}"


@dataclass
class Bench:
    """What stays the same over the cases of a run."""

    makers: dict[str, Maker]
    directions: Sequence[str]
    timings: Sequence[str]
    rounds: int
    sample_ms: float
    budget: TimeBudget
    gemm: float
    copy: float
    about: dict[str, str] = field(default_factory=dict)
    """Columns that every row carries: gpu, triton, run."""
    failed: bool = False
    """A result of Keel was wrong, or raised."""

    def measure(self, case: Case) -> list[Row]:
        """One row for each provider, direction and timing that gave a right result."""
        qkv, dout = case.tensors()
        wants_grads = "backward" in self.directions
        exact = Exact(case.problem, qkv, dout if wants_grads else None, key_head=case.hk - 1)
        trials: dict[tuple[str, str, str], Trial] = {}
        errors: dict[tuple[str, str], float] = {}
        first: dict[str, list[torch.Tensor]] = {}
        for name, make in self.makers.items():
            if not can_do(name, case.problem):
                continue
            attend: Attend | None = None
            for direction in self.directions:
                # A peer that cannot do this size, or not its backward, must not end the run.
                with self.leaving_out(f"{case}: {name} {direction}", is_ours(name)):
                    attend = attend or make(case.problem)
                    assert attend is not None
                    got = run_poisoned(direction, attend, qkv, dout)
                    error = exact.error(direction, got)
                    if direction in first:  # the heads that fp64 did not look at
                        error = max(error, worst_error(got, first[direction]))
                    if not error < TOLERANCE:
                        raise ArithmeticError(f"wrong result, relative error {error:.2g}")
                    first.setdefault(direction, got)
                    errors[name, direction] = error
                    prepare = functools.partial(prepare_call, direction, attend, qkv, dout)
                    if "eager" in self.timings:
                        trials[name, direction, "eager"] = Trial(
                            prepare(), budget_ms=self.sample_ms
                        )
                    if "graph" in self.timings:
                        with self.leaving_out(
                            f"{case}: graph of {name} {direction}", is_ours(name)
                        ):
                            trials[name, direction, "graph"] = graph_trial(
                                prepare, got, self.sample_ms
                            )
        take_turns(trials, self.rounds, self.budget)
        return [self.row(case, *key, trial, errors[key[:2]]) for key, trial in trials.items()]

    @contextlib.contextmanager
    def leaving_out(self, what: str, ours: bool) -> Iterator[None]:
        """Turns an exception into a line of the report."""
        try:
            yield
        except Exception as problem:
            self.failed |= ours
            print(f"{what} left out: {_first_line(problem)}", flush=True)

    def row(
        self, case: Case, provider: str, direction: str, timing: str, trial: Trial, error: float
    ) -> Row:
        p = case.problem
        flops = p.flops(direction, case.hq, case.d)
        num_bytes = p.least_bytes(direction, case.hq, case.hk, case.d)
        return Row(
            *(p.name, p.tokens, provider, direction, timing),
            ms=trial.ms,
            tflops=flops / trial.ms / 1e9,
            error=error,
            spread=trial.spread,
            roof_tflops=report.roofline(flops, num_bytes, self.gemm, self.copy),
            gemm_tflops=self.gemm,
            hq=case.hq,
            hk=case.hk,
            d=case.d,
            **self.about,
        )


def run_poisoned(
    direction: str, attend: Attend, qkv: list[torch.Tensor], dout: torch.Tensor
) -> list[torch.Tensor]:
    """[out] or [dq, dk, dv], computed on memory full of NaNs."""
    poison_free_memory(8 * sum(x.nbytes for x in qkv))
    return _listed(prepare_call(direction, attend, qkv, dout)())


def prepare_call(
    direction: str, attend: Attend, qkv: list[torch.Tensor], dout: torch.Tensor
) -> Call:
    """The call to time; for a backward the forward is made here, once."""
    if direction == "forward":
        return functools.partial(attend, *qkv)
    # Leaves of its own: autograd binds a leaf to the stream where it was first used, and one bound
    # to another stream than that of a capture would break it.
    leaves = [x.detach().requires_grad_() for x in qkv]
    return functools.partial(torch.autograd.grad, attend(*leaves), leaves, dout, retain_graph=True)


def graph_trial(
    prepare: Callable[[], Call], expected: list[torch.Tensor], sample_ms: float
) -> Trial:
    """A CUDA graph of the call; its replay has to give what the checked call gave."""
    replay, inside, result = capture(prepare)
    results = _listed(result)
    for x in results:
        x.fill_(float("nan"))
    replay()
    if not (error := worst_error(results, expected)) < TOLERANCE:
        raise ArithmeticError(f"wrong result, relative error {error:.2g}")
    return Trial(replay, inside, sample_ms)


def _listed(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def take_turns(trials: dict[tuple[str, str, str], Trial], rounds: int, budget: TimeBudget) -> None:
    """Samples every trial once a round; what is compared is timed side by side, in random order.

    Ends after the first round at the earliest, so that every trial has a sample.
    """
    groups: dict[tuple[str, str], list[Trial]] = {}
    for (_, direction, timing), trial in trials.items():
        groups.setdefault((direction, timing), []).append(trial)
    for n in range(rounds):
        if n and budget.is_over():
            return
        for group in groups.values():
            for trial in random.sample(group, len(group)):
                trial.sample()


def _first_line(problem: Exception) -> str:
    text = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {text[0][:200] if text else ''}"


def heads(text: str) -> tuple[int, int]:
    """'64:8' -> (64, 8)."""
    try:
        hq, hk = map(int, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"heads are given as 64:8, got {text!r}") from None
    if hk < 1 or hq < 1 or hq % hk:
        raise argparse.ArgumentTypeError(
            f"query heads must be a multiple of key heads, got {hq}:{hk}"
        )
    return hq, hk


def cases(args: argparse.Namespace) -> list[Case]:
    """Short ones first, so that a small budget sees every mask."""
    return [
        Case(MASKS[name](tokens), hq, hk, d)
        for tokens in args.lengths or LENGTHS
        for d in args.dims or (128,)
        for hq, hk in args.heads or ((64, 8),)
        for name in args.masks or MASKS
    ]


def chosen_rows(rows: Sequence[Row], args: argparse.Namespace) -> list[Row]:
    """Those that the filters of the command line leave."""
    wanted = (
        (args.masks, lambda r: r.mask),
        (args.lengths, lambda r: r.tokens),
        (args.dims, lambda r: r.d),
        (args.heads, lambda r: (r.hq, r.hk)),
        (args.direction, lambda r: r.direction),
        (args.timing, lambda r: r.timing),
        (args.providers, lambda r: r.provider),
    )
    return [r for r in rows if all(not values or of(r) in values for values, of in wanted)]


def list_cases(found: Sequence[Case], providers: Sequence[str]) -> str:
    lines = []
    for case in found:
        p = case.problem
        able = [name for name in providers if can_do(name, p)]
        lines.append(
            f"{case}: {p.mask.num_slices} slices, {p.mask.area() / p.tokens**2:.1%} attended, "
            f"{p.flops('forward', case.hq, case.d) / 1e12:.3g} TFLOP forward; {', '.join(able)}"
        )
    return "\n".join(lines)


def make_all(names: Sequence[str], peers: Path | None) -> dict[str, Maker]:
    makers = {}
    for name in sorted(names, key=lambda name: not is_ours(name)):  # peers are held against Keel
        try:
            makers[name] = maker(name, peers)
        except (FileNotFoundError, ImportError, OSError) as problem:
            print(f"{name} left out: {_first_line(problem)}", flush=True)
    return makers


def run(args: argparse.Namespace) -> bool:
    """Measures, prints and writes; whether all of Keel's results were right."""
    import triton

    torch.manual_seed(0)
    budget = TimeBudget(args.budget_s)
    bench = Bench(
        make_all(args.providers or DEFAULT, args.peers),
        args.direction or DIRECTIONS,
        args.timing or TIMINGS,
        args.rounds,
        args.sample_ms,
        budget,
        gemm_rate(),
        copy_rate(),
        {
            "gpu": torch.cuda.get_device_name(),
            "triton": triton.__version__,
            "run": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    )
    print(f"8192^3 product {bench.gemm:.0f} TFLOP/s, copy {bench.copy:.2f} TB/s", flush=True)
    path = args.out / "attention.csv"
    report.migrate(path)
    found, rows = cases(args), []
    for n, case in enumerate(found):
        if not budget.has_room():
            print(f"--budget-s {budget.seconds:.0f} ends the run: {n} of {len(found)} cases done")
            break
        with budget.piece():
            fresh = bench.measure(case)
        append_csv(fresh, path)
        rows += fresh
        for key in dict.fromkeys((r.direction, r.timing) for r in fresh):
            together = {r.provider: r for r in fresh if (r.direction, r.timing) == key}
            print(report.describe(together), flush=True)
    print(f"\n{report.tables(rows)}\n\n{len(rows)} rows in {budget.spent:.0f} s", flush=True)
    if rows and not args.no_plots:
        report.plot(report.read_rows(path), args.out)
    return not bench.failed


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    many = functools.partial(made.add_argument, nargs="+")
    many("--masks", choices=list(MASKS), help="default: all")
    many("--lengths", "--seqlens", type=int, help=f"default: {' '.join(map(str, LENGTHS))}")
    many("--dims", type=int, help="head dims; default: 128")
    many("--heads", type=heads, help="query:key heads; default: 64:8")
    many("--direction", choices=DIRECTIONS, help="default: both")
    many("--timing", choices=TIMINGS, help="default: both")
    many(
        "--providers", help=f"of {', '.join(PROVIDERS)}; keel:BACKEND; default: {' '.join(DEFAULT)}"
    )
    made.add_argument("--peers", type=Path, help="folder with fa3_peer.py and fa3.so")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--sample-ms", type=float, default=20.0, help="length of one measurement")
    made.add_argument("--budget-s", type=float, help="ends by itself within about this time")
    made.add_argument("--out", type=Path, default=RESULTS)
    made.add_argument("--no-plots", action="store_true")
    made.add_argument("--list", action="store_true", help="what would run, no run")
    made.add_argument("--table", action="store_true", help="show results of the CSV again, no run")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    for name in args.providers or ():
        if name not in PROVIDERS and not is_ours(name):
            raise SystemExit(f"unknown provider {name!r}: one of {', '.join(PROVIDERS)}")
    if args.list:
        print(list_cases(cases(args), args.providers or DEFAULT))
        return 0
    if args.table:
        path = args.out / "attention.csv"
        if not path.exists():
            raise SystemExit(f"{path} is not there: run without --table first, or give --out")
        rows = chosen_rows(report.read_rows(path), args)
        print(report.tables(rows))
        if not args.no_plots:
            report.plot(rows, args.out)
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; `make demo` runs everywhere")
    return 0 if run(args) else 1


if __name__ == "__main__":
    sys.exit(main())
