"""Attention on one machine: Keel beside FlashAttention 2 and 3, cuDNN and FlexAttention.

    python benchmarks/attention.py                         # all of it, in about twenty minutes
    python benchmarks/attention.py --masks full causal --lengths 1024 65536 --dims 64 --heads 32:32
    python benchmarks/attention.py --peers flex --forward --seconds 300
    python benchmarks/attention.py --quick                 # small sizes, also without a GPU
    python benchmarks/attention.py --list                  # what would run; needs no GPU
    python benchmarks/attention.py --table --dims 128      # tables from the CSV, and all pictures

FlashAttention-3 is the installed package, or what fa3_peer.py loads from the folder of --fa3 (or
KEEL_BENCH_FA3, or .peers). bf16, fresh random data for each cell. Each result is checked against
fp64 before it is timed, on memory full of NaNs, and again behind the replay of its CUDA graph; what
is wrong is not timed, and what a library cannot do is written where its figure would be. Providers
take turns in each round, in random order, each behind 0.2 s of its own calls, when a GPU at its
power limit has found the clocks for them; the median over rounds counts. Backward is timed alone,
on one kept forward. TFLOP/s = 4 * area * hq * d (backward 2.5 times). The roof is what an 8192^3
product and a large copy, timed in the same run, allow. Rows are added to
benchmarks/results/attention.csv as they come; ratios are made inside of one run only.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attention_report as report
import torch
from attention_bench import FLEX_CELLS, NOT_RUN, Bench, Case
from attention_masks import DIRECTIONS, MASKS
from attention_peers import (
    ON_CPU,
    ON_GPU,
    OURS,
    PEERS,
    Maker,
    Missing,
    default_folder,
    is_ours,
    maker,
    why_not,
)
from attention_report import Row
from timing import TimeBudget, append_csv, copy_rate, dims, gemm_rate, heads, machine, settled

RESULTS = Path(__file__).parent / "results"
TIMINGS = ("graph", "eager")
MAIN = ((64, 8, 128),)
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
OTHERS = ((32, 32, 64), (64, 8, 64), (16, 16, 128), (16, 16, 256), (64, 8, 256), (32, 32, 192, 128))
"""Other heads and head dims, multi-latent ones last, of which a run without choices looks at three
masks in one length."""
OTHER_LENGTHS = (8192,)
OTHER_MASKS = ("full", "causal", "vcausal")
QUICK = {"cuda": (1024, 4096), "cpu": (256, 768)}
QUICK_SHAPES = {"cuda": ((64, 8, 128),), "cpu": ((4, 2, 64),)}
SECONDS = 1200.0


def cases(args: argparse.Namespace) -> list[Case]:
    """Cheap ones first, so that a small budget sees as many as it can."""
    device = device_of()
    if args.quick:
        shapes, lengths = QUICK_SHAPES[device], QUICK[device]
    else:
        shapes, lengths = MAIN, LENGTHS
    if args.dims or args.heads:
        shapes = tuple(
            (hq, hk, *columns)
            for hq, hk in args.heads or ((64, 8),)
            for columns in args.dims or ((128,),)
        )
    grid = [
        (name, tokens, shape)
        for tokens in args.lengths or lengths
        for shape in shapes
        for name in args.masks or MASKS
    ]
    if not (args.quick or args.dims or args.heads or args.lengths):
        grid += [
            (name, tokens, shape)
            for tokens in OTHER_LENGTHS
            for shape in OTHERS
            for name in OTHER_MASKS
            if not args.masks or name in args.masks
        ]
    found = [Case(MASKS[name](tokens), *shape) for name, tokens, shape in grid]
    return sorted(found, key=lambda case: case.flops("forward"))


def device_of() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def peers_of(args: argparse.Namespace) -> Sequence[str]:
    if args.peers is not None:
        return args.peers
    return ON_GPU if device_of() == "cuda" or args.list else ON_CPU


def chosen_rows(rows: Sequence[Row], args: argparse.Namespace) -> list[Row]:
    """Those that the filters of the command line leave."""
    wanted: tuple[tuple[Sequence | None, Callable[[Row], object]], ...] = (
        (args.masks, lambda r: r.mask),
        (args.lengths, lambda r: r.tokens),
        (args.dims, lambda r: (r.d, r.dv) if r.dv else (r.d,)),
        (args.heads, lambda r: (r.hq, r.hk)),
        (args.passes, lambda r: r.direction),
        (args.timing, lambda r: r.timing),
        (args.peers and [*args.peers, *args.ours], lambda r: r.provider),
    )
    return [r for r in rows if all(not values or of(r) in values for values, of in wanted)]


def list_cases(found: Sequence[Case], providers: Sequence[str]) -> str:
    lines = []
    for case in found:
        p = case.problem
        able = [name for name in providers if why_not(name, p) is None]
        lines.append(
            f"{case}: {p.mask.num_slices} slices, {p.mask.area() / p.tokens**2:.1%} attended, "
            f"{case.flops('forward') / 1e12:.3g} TFLOP forward; {', '.join(able)}"
        )
    return "\n".join(lines)


def make_all(names: Sequence[str], folder: Path | None) -> dict[str, Maker | Missing]:
    """Keel first: peers are held against it."""
    makers: dict[str, Maker | Missing] = {}
    for name in sorted(names, key=lambda name: not is_ours(name)):
        try:
            makers[name] = maker(name, folder)
        except (Missing, ImportError, OSError) as problem:
            makers[name] = Missing(str(problem).partition("\n")[0] or type(problem).__name__)
            print(f"{name} is missing: {makers[name]}", flush=True)
    return makers


def shown_command(arguments: Sequence[str]) -> str:
    """The command for the CSV, without this machine's folders."""
    shown = [
        "DIR" if before in ("--fa3", "--out") else text
        for before, text in zip(["", *arguments], arguments, strict=False)
    ]
    return shlex.join(["python", "benchmarks/attention.py", *shown])


def about_machine(command: str) -> dict[str, str]:
    gpu, triton = machine()
    return {
        "gpu": gpu,
        "triton": triton,
        "cuda": torch.version.cuda or "",
        "command": command,
        "run": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def run(args: argparse.Namespace, command: str) -> bool:
    """Measures, prints and writes; whether all of Keel's results were right."""
    torch.manual_seed(args.seed)
    device = device_of()
    budget = TimeBudget(args.seconds)
    bench = Bench(
        make_all([*args.ours, *peers_of(args)], args.fa3 or default_folder()),
        args.passes or DIRECTIONS,
        ("eager",) if device == "cpu" else args.timing or TIMINGS,
        args.rounds,
        args.sample_ms,
        budget,
        gemm_rate(),
        copy_rate(),
        lead_ms=args.lead_ms,
        cell_s=args.cell_seconds,
        flex_cells=None if args.peers else FLEX_CELLS,
        device=device,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        about=about_machine(command),
    )
    print(f"large product {bench.gemm:.3g} TFLOP/s, copy {bench.copy:.2g} TB/s", flush=True)
    path = args.out / "attention.csv"
    report.migrate(path)
    found, rows, skipped = cases(args), [], []
    for n, case in enumerate(found):
        if not budget.has_room(bench.expected_s(case)):
            skipped += [
                bench.empty_row(case, args.ours[0], *key, f"{NOT_RUN}: --seconds {args.seconds:g}")
                for key in ((d, t) for d in bench.directions for t in bench.timings)
            ]
            continue
        with budget.piece():
            fresh = bench.measure(case)
        append_csv(fresh, path)
        rows += fresh
        print(f"[{n + 1}/{len(found)}, {budget.spent:.0f} s] {case}", flush=True)
        for key in dict.fromkeys((r.direction, r.timing) for r in fresh):
            together = {r.provider: r for r in fresh if (r.direction, r.timing) == key}
            if any(r.ok for r in together.values()):
                print(report.describe(together), flush=True)
    show(rows + skipped)
    print(f"\n{len(rows)} rows, {len(found)} cells in {budget.spent:.0f} s", flush=True)
    if any(row.ok for row in rows) and not args.no_plots:
        for picture in report.plot(report.read_rows(path), args.out):
            print(f"picture: {picture.name}")
    return not bench.failed


def show(rows: Sequence[Row]) -> None:
    """Tables, what is missing and why, and the ratios last, where a terminal shows them."""
    print(f"\n{report.tables(rows)}\n")
    for line in report.reasons(rows):
        print(line)
    print(f"\n{report.ratio_grid(rows)}", flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    many = functools.partial(made.add_argument, nargs="+")
    many("--masks", choices=list(MASKS), metavar="MASK", help=f"of {', '.join(MASKS)}; all")
    many("--lengths", "--seqlens", type=int, help=f"default: {' '.join(map(str, LENGTHS))}")
    many("--dims", type=dims, help="64, or 192/128; default: 128, and a few cells of 64 and 256")
    many("--heads", type=heads, help="query:key heads; default: 64:8, and a few cells of others")
    many("--passes", "--direction", choices=DIRECTIONS, help="default: both")
    made.add_argument("--forward", action="store_true", help="short for --passes forward")
    made.add_argument("--backward", action="store_true", help="short for --passes backward")
    many("--timing", choices=TIMINGS, help="default: both; on CPUs eager")
    many("--peers", help=f"of {', '.join(PEERS)}, or none; default: those that can run here")
    many("--ours", default=["keel"], help=f"of {', '.join(OURS)}; with :BACKEND for one of them")
    made.add_argument("--fa3", type=Path, help="folder with fa3_peer.py and fa3.so")
    made.add_argument("--rounds", type=int, default=5)
    settled(made, device_of())
    made.add_argument(
        "--seconds", "--budget-s", type=float, default=SECONDS, help="ends within about this time"
    )
    made.add_argument(
        "--cell-seconds", type=float, default=15.0, help="a cell beyond it makes fewer rounds"
    )
    made.add_argument("--seed", type=int, default=0, help="of the random data")
    made.add_argument("--quick", action="store_true", help="a few small sizes")
    made.add_argument("--out", type=Path, default=RESULTS)
    made.add_argument("--no-plots", action="store_true")
    made.add_argument("--list", action="store_true", help="what would run, no run")
    made.add_argument("--table", action="store_true", help="show results of the CSV again, no run")
    return made


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """Names that nobody knows are told with those that are known."""
    if args.peers == ["none"]:
        args.peers = []
    for name in args.peers or ():
        if name not in PEERS:
            raise SystemExit(f"unknown peer {name!r}: one of {', '.join(PEERS)}")
    for name in args.ours:
        if not is_ours(name):
            raise SystemExit(f"unknown variant {name!r} of Keel: one of {', '.join(OURS)}")
    if args.forward or args.backward:
        if args.passes:
            raise SystemExit("--passes says it already: leave --forward and --backward out")
        args.passes = [x for x in DIRECTIONS if getattr(args, x)]
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = checked(parser().parse_args(arguments))
    if args.list:
        print(list_cases(cases(args), [*args.ours, *peers_of(args)]))
        return 0
    if args.table:
        path = args.out / "attention.csv"
        if not path.exists():
            raise SystemExit(f"{path} is not there: run without --table first, or give --out")
        rows = report.read_rows(path)
        chosen = chosen_rows(rows, args)
        if not chosen:
            raise SystemExit(f"{path} has no row of what was asked for: run it first")
        show(chosen)
        if not args.no_plots:  # of all rows: a question about a few must not take the others away
            report.plot(rows, args.out)
        return 0
    if device_of() == "cpu" and not args.quick:
        raise SystemExit("this needs a CUDA GPU; `attention.py --quick` runs everywhere")
    return 0 if run(args, shown_command(arguments)) else 1


if __name__ == "__main__":
    sys.exit(main())
