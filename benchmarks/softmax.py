"""Fused softmax on one GPU: Keel beside eager torch, torch.compile, Liger and TransformerEngine.

    python benchmarks/softmax.py                    # lengths 128 to 131,072, and the classic table
    python benchmarks/softmax.py --lengths 2048     # one length
    python benchmarks/softmax.py --quick            # two lengths, fewer scores, also without a GPU
    python benchmarks/softmax.py --table            # the classic table again, from the CSV

Rate = bytes that must move / time, as a part of the measured device copy rate: columns inside the
mask's band are read once, all are written once, a mask tensor is read once. Every result is checked
against fp64 on some rows before it is timed. Providers take turns; the median over rounds counts.
Results go to benchmarks/results/softmax.csv and .png.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib.util
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import machine, time_calls, write_csv

import keel
from keel.softmax import explain, scaled_masked_softmax

RESULTS = Path(__file__).parent / "results"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
QUICK_LENGTHS = (512, 2048)
KINDS = ("plain", "causal", "masked")
CLASSIC = (8, 32, 2048, 2048)
ELEMENTS = 1 << 28
SCALE = 0.125
Softmax = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Row:
    """One line of the CSV; rate is a part of the copy rate."""

    provider: str
    kind: str
    direction: str
    shape: str
    sk: int
    ms: float
    tb_per_s: float
    rate: float
    copy_tb_per_s: float
    dtype: str = "bfloat16"
    gpu: str = ""
    torch: str = torch.__version__
    triton: str = ""
    keel: str = keel.__version__


@dataclass(frozen=True)
class Problem:
    kind: str
    shape: tuple[int, int, int, int]

    @property
    def causal(self) -> bool:
        return self.kind == "causal"

    def mask(self) -> torch.Tensor | None:
        """(b, 1, sq, sk) bool, half of it True; one for all heads."""
        if self.kind != "masked":
            return None
        b, _, sq, sk = self.shape
        return torch.rand(b, 1, sq, sk, device=DEVICE) > 0.5


def problem_of(sk: int, kind: str) -> Problem:
    """About ELEMENTS scores; square where causality wants it and memory allows."""
    sq = min(sk, 32_768) if kind == "causal" else min(2048, ELEMENTS // sk)
    if sk > 32_768:
        sq = 1024
    return Problem(kind, (1, max(1, ELEMENTS // (sq * sk)), sq, sk))


def keel_softmax(problem: Problem, mask: torch.Tensor | None) -> Softmax:
    return lambda x: scaled_masked_softmax(x, mask, scale=SCALE, causal=problem.causal)


def unfused(problem: Problem, mask: torch.Tensor | None) -> Softmax:
    """Megatron's plain path: to fp32, scale, fill, softmax, back."""
    sq, sk = problem.shape[2:]
    hidden = mask
    if problem.causal:
        hidden = torch.ones(sq, sk, dtype=torch.bool, device=DEVICE).triu(sk - sq + 1)

    def call(x: torch.Tensor) -> torch.Tensor:
        s = x.float() * SCALE
        if hidden is not None:
            s = s.masked_fill(hidden, -10000.0)
        return torch.softmax(s, -1).to(x.dtype)

    return call


def compiled(problem: Problem, mask: torch.Tensor | None) -> Softmax:
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # its backward runs many times on one graph
    torch._dynamo.reset()
    return torch.compile(unfused(problem, mask), dynamic=False)


def liger(problem: Problem, mask: torch.Tensor | None) -> Softmax | None:
    if problem.kind != "plain" or importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return lambda x: LigerSoftmaxFunction.apply(x * SCALE)


def transformer_engine(problem: Problem, mask: torch.Tensor | None) -> Softmax | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    from transformer_engine.pytorch.attention.dot_product_attention import softmax as te

    if problem.causal and problem.shape[2] == problem.shape[3]:
        return lambda x: te.ScaledUpperTriangMaskedSoftmax.apply(x.flatten(0, 1), SCALE).view_as(x)
    if problem.kind == "masked":
        return lambda x: te.ScaledMaskedSoftmax.apply(x, mask, SCALE)
    return lambda x: te.ScaledSoftmax.apply(x, SCALE)


PROVIDERS: dict[str, Callable[[Problem, torch.Tensor | None], Softmax | None]] = {
    "keel": keel_softmax,
    "compile": compiled,
    "eager": unfused,
    "liger": liger,
    "te": transformer_engine,
}


def copy_rate() -> float:
    """TB/s of a large device copy, read and write counted."""
    a = torch.randn(1 << (29 if DEVICE == "cuda" else 24), device=DEVICE, dtype=torch.bfloat16)
    b = torch.empty_like(a)
    times = [time_calls(lambda: b.copy_(a), 30) for _ in range(5)]
    return 2 * a.numel() * a.element_size() / statistics.median(times) / 1e9


def largest_error(problem: Problem, mask: torch.Tensor | None, softmax: Softmax) -> float:
    """Of probabilities and gradients, on a few rows of the last head, relative to the largest."""
    x = torch.randn(problem.shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    y = softmax(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    sq, sk = problem.shape[2:]
    rows = torch.arange(0, sq, max(1, sq // 37), device=DEVICE)
    exact = x[-1, -1, rows].detach().double().requires_grad_()
    s = exact * SCALE
    if problem.causal:
        s = s.masked_fill(torch.arange(sk, device=DEVICE) > rows[:, None] + sk - sq, -torch.inf)
    if mask is not None:
        s = s.masked_fill(mask[-1, 0, rows], -torch.inf)
    want = torch.softmax(s, -1)
    (grad,) = torch.autograd.grad(want, exact, dy[-1, -1, rows].double())
    pairs = ((y[-1, -1, rows].detach(), want.detach()), (dx[-1, -1, rows], grad))
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


def measure(problem: Problem, names: list[str], rounds: int, copy: float) -> list[Row]:
    mask = problem.mask()
    calls = {n: c for n in names if (c := PROVIDERS[n](problem, mask)) is not None}
    for name, call in calls.items():
        error = largest_error(problem, mask, call)
        if not error < 0.05:
            raise SystemExit(f"{name} is wrong on {problem}: relative error {error}")
    x = torch.randn(problem.shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            call = calls[name]
            with torch.no_grad():
                ms = time_calls(functools.partial(call, x))
            times.setdefault((name, "forward"), []).append(ms)
            gradient = functools.partial(torch.autograd.grad, call(x), x, dy, retain_graph=True)
            times.setdefault((name, "backward"), []).append(time_calls(gradient))
            del gradient
    cost = explain(x, mask, causal=problem.causal)
    rows = []
    for (name, direction), samples in times.items():
        moved = cost.bytes_forward if direction == "forward" else cost.bytes_backward
        ms = statistics.median(samples)
        speed = moved / ms / 1e9
        shape = "x".join(map(str, problem.shape))
        rows.append(
            Row(
                name,
                problem.kind,
                direction,
                shape,
                problem.shape[3],
                ms,
                speed,
                speed / copy,
                copy,
            )
        )
    return rows


def print_rows(rows: list[Row]) -> None:
    for direction in ("forward", "backward"):
        here = {r.provider: r for r in rows if r.direction == direction}
        ours = here["keel"]
        others = " | ".join(
            f"{name} {r.ms * 1e3:.0f} us, keel {r.ms / ours.ms:.2f}x"
            for name, r in here.items()
            if name != "keel"
        )
        print(
            f"{ours.shape:>22s} {ours.kind:7s} {direction:8s} keel {ours.ms * 1e3:7.0f} us, "
            f"{ours.rate:.2f} of copy | {others}",
            flush=True,
        )


def read_rows(path: Path) -> list[Row]:
    numbers = ("ms", "tb_per_s", "rate", "copy_tb_per_s")
    with open(path, newline="") as file:
        return [Row(**{**r, **{n: float(r[n]) for n in numbers}}) for r in csv.DictReader(file)]


def classic_table(rows: list[Row]) -> str:
    """Markdown at [8, 32, 2048, 2048]: unfused and fused, bytes, and a step of 96 layers."""
    shape = "x".join(map(str, CLASSIC))
    by = {(r.provider, r.kind, r.direction): r for r in rows if r.shape == shape}
    count = torch.Size(CLASSIC).numel()
    lines = [
        "| softmax | direction | unfused µs | torch.compile µs | Keel µs | speed-up | "
        "bytes before | after | saved in 96 layers |",
        "|" + "---|" * 9,
    ]
    for kind in KINDS:
        for direction in ("forward", "backward"):
            names = [by.get((p, kind, direction)) for p in ("eager", "compile", "keel")]
            if any(r is None for r in names):
                continue
            eager, torch_compile, ours = (r.ms * 1e3 for r in names)
            # fp32 copy 6, scale 8, fill 8, softmax 8, back 6 bytes per score; mirrored backward
            before = (28 if kind == "plain" else 36) * count
            after = names[2].tb_per_s * names[2].ms * 1e9
            lines.append(
                f"| {kind} | {direction} | {eager:.0f} | {torch_compile:.0f} | {ours:.0f} | "
                f"{eager / ours:.1f}x | {before / 1e9:.1f} GB | {after / 1e9:.1f} GB | "
                f"{96 * (eager - ours) / 1e3:.0f} ms |"
            )
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shape = "x".join(map(str, CLASSIC))
    rows = [r for r in rows if r.shape != shape]
    names = [n for n in PROVIDERS if any(r.provider == n for r in rows)]
    figure, axes = plt.subplots(2, 3, figsize=(13, 6), sharex=True, sharey=True)
    for line, direction in enumerate(("forward", "backward")):
        for column, kind in enumerate(KINDS):
            axis = axes[line][column]
            for name in names:
                points = sorted(
                    (r.sk, r.rate)
                    for r in rows
                    if (r.provider, r.kind, r.direction) == (name, kind, direction)
                )
                if points:
                    axis.plot(*zip(*points, strict=True), marker=".", label=name)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{kind}, {direction}")
            axis.grid(alpha=0.3)
            axis.axhline(1.0, color="grey", linewidth=0.7)
    for axis in axes[1]:
        axis.set_xlabel("columns")
    for axis in axes[:, 0]:
        axis.set_ylabel("part of the copy rate")
    axes[0][0].legend()
    figure.suptitle(f"Fused softmax, bf16, {rows[0].gpu}, copy {rows[0].copy_tb_per_s:.2f} TB/s")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    global ELEMENTS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", help=f"default: {LENGTHS}")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="providers to run besides keel")
    parser.add_argument("--no-classic", action="store_true", help=f"skip {list(CLASSIC)}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table of the last CSV")
    parser.add_argument("--quick", action="store_true", help="two lengths, fewer scores")
    args = parser.parse_args(arguments)
    if args.table:
        print(classic_table(read_rows(args.out / "softmax.csv")))
        return
    if DEVICE == "cpu" and not args.quick:
        raise SystemExit("this benchmark needs a CUDA GPU; --quick runs everywhere")
    torch.manual_seed(0)
    names = [n for n in PROVIDERS if n == "keel" or args.only is None or n in args.only]
    if args.quick:
        ELEMENTS = 1 << (26 if DEVICE == "cuda" else 20)
        args.no_classic = True
    default = QUICK_LENGTHS if args.quick else LENGTHS
    copy = copy_rate()
    print(f"copy rate {copy:.2f} TB/s", flush=True)
    problems = [problem_of(sk, kind) for sk in args.lengths or default for kind in args.kinds]
    if not args.no_classic:
        problems += [Problem(kind, CLASSIC) for kind in args.kinds]
    rows: list[Row] = []
    for problem in problems:
        fresh = measure(problem, names, args.rounds, copy)
        for row in fresh:
            row.gpu, row.triton = machine()
        print_rows(fresh)
        rows += fresh
    write_csv(rows, args.out / "softmax.csv")
    if not args.no_classic:
        print(classic_table(rows))
    plot(rows, args.out / "softmax.png")


if __name__ == "__main__":
    sys.exit(main())
