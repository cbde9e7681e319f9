"""Muon on one GPU: Keel beside torch.optim.Muon, matrix by matrix and as whole steps of a GPT.

    python benchmarks/muon.py                       # 4096 × 4096, 4096 × 11008, and 24 layers
    python benchmarks/muon.py --forms               # both forms, to see where one beats the other
    python benchmarks/muon.py --sweep               # tile configs of the symmetric products
    python benchmarks/muon.py --quick               # small matrices, also without a GPU
    python benchmarks/muon.py --table               # the table again, from the CSV

Rate = FLOPs of the plain form (4 m² n + 2 m³ a step) / time, whatever a provider really computes.
Every result is checked against the same steps in fp32 before it is timed, and must be no farther
from them than 1.5 times what torch.optim.Muon's own is. Providers take turns; the median over
rounds counts. Results go to benchmarks/results/muon.csv and .png.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import machine, time_calls, write_csv

import keel
from keel.optim import Muon, newton_schulz, orthogonalize

RESULTS = Path(__file__).parent / "results"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, INNER, LAYERS, STEPS = 4096, 11_008, 24, 5
LAYER: list[tuple[int, ...]] = [(HIDDEN, HIDDEN)] * 4 + [(HIDDEN, INNER)] * 3
SHAPES: list[tuple[int, ...]] = [(HIDDEN, HIDDEN), (HIDDEN, INNER)]
QUICK_SHAPES: list[tuple[int, ...]] = [(48, 48), (48, 128)]
"""Of CPUs, most of which multiply bf16 slowly."""


@dataclass
class Row:
    """One line of the CSV; tflops counts the plain form's FLOPs."""

    provider: str
    what: str
    ms: float
    tflops: float
    error: float
    dtype: str = "bfloat16"
    gpu: str = ""
    torch: str = torch.__version__
    triton: str = ""
    keel: str = keel.__version__


@dataclass
class Product:
    """One line of the sweep; tflops counts whole products, of which half is computed."""

    config: str
    what: str
    ms: float
    tflops: float
    times_torch: float


def flops(shapes: list[tuple[int, ...]]) -> int:
    total = 0
    for *batch, rows, columns in shapes:
        m, n = sorted((rows, columns))
        total += math.prod(batch) * STEPS * (4 * m * m * n + 2 * m**3)
    return total


def torch_orthogonalize(x: torch.Tensor) -> torch.Tensor:
    from torch.optim._muon import _zeropower_via_newtonschulz

    if x.ndim > 2:  # it takes one matrix after the other
        return torch.stack([torch_orthogonalize(matrix) for matrix in x])
    return _zeropower_via_newtonschulz(x, newton_schulz.QUINTIC, STEPS, 1e-7)


PROVIDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "keel": orthogonalize,
    "torch": torch_orthogonalize,
    "keel plain": functools.partial(orthogonalize, form="plain"),
    "keel gram": functools.partial(orthogonalize, form="gram"),
}


def in_turns(
    calls: dict[str, Callable[[], object]], rounds: int, budget_ms: float = 60
) -> dict[str, float]:
    """Median milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(time_calls(calls[name], budget_ms))
    return {name: statistics.median(samples) for name, samples in times.items()}


def errors_of(names: list[str], shape: tuple[int, ...]) -> dict[str, float]:
    """Relative distance from the steps in fp32, for a matrix with singular values over a decade."""
    x = torch.randn(shape, device=DEVICE) + 3 * torch.randn(*shape[:-1], 1, device=DEVICE) / 10
    exact = orthogonalize(x, dtype=torch.float32, form="plain")
    found = {n: float((PROVIDERS[n](x).float() - exact).norm() / exact.norm()) for n in names}
    for name, error in found.items():
        if not error < 1.5 * found["torch"]:
            raise SystemExit(
                f"{name} is wrong on {shape}: {error} where torch has {found['torch']}"
            )
    return found


def measure_shape(shape: tuple[int, ...], names: list[str], rounds: int) -> list[Row]:
    errors = errors_of(names, shape)
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    times = in_turns({n: functools.partial(PROVIDERS[n], x) for n in names}, rounds)
    what = "x".join(map(str, shape))
    return [Row(n, what, ms, flops([shape]) / ms / 1e9, errors[n]) for n, ms in times.items()]


def measure_step(layer: list[tuple[int, ...]], layers: int, rounds: int) -> list[Row]:
    """Whole steps, bf16 parameters; both optimizers look at the same gradients."""
    shapes = layer * layers
    params = {n: [] for n in ("keel", "torch")}
    for shape in shapes:
        # from zero on: bf16 weights of usual size would round most of a step away
        grad = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        for mine in params.values():
            mine.append(torch.nn.Parameter(torch.zeros_like(grad)))
            mine[-1].grad = grad
    options = {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = {
        "keel": Muon(params["keel"], **options),
        "torch": torch.optim.Muon(params["torch"], **options),
    }
    for optimizer in optimizers.values():
        optimizer.step()
    error = 0.0
    for a, b in zip(*(mine[: len(layer)] for mine in params.values()), strict=True):
        mine, other = a.detach().float(), b.detach().float()
        error = max(error, float((mine - other).norm() / other.norm()))
    if not error < 0.1:
        raise SystemExit(f"keel's step is {error} away from torch's")
    times = in_turns({n: o.step for n, o in optimizers.items()}, rounds, budget_ms=1000)
    what = f"{layers} layers"
    return [Row(n, what, ms, flops(shapes) / ms / 1e9, error) for n, ms in times.items()]


def sweep(rounds: int) -> list[Product]:
    """Tile configs on X·Xᵀ of both shapes and on the polynomial, one matrix and four at once."""
    from keel.kernels.gram import GramConfig, symmetric_product

    tiles = [(128, 128, 64), (128, 256, 64), (256, 128, 64), (128, 128, 128)]
    configs = [
        GramConfig(*tile, num_warps=warps, num_stages=stages, group=group, tma=tma)
        for tile, warps, stages, group, tma in itertools.product(
            tiles, (4, 8), (3, 4), (4, 8, 16), (True, False)
        )
        if warps == 8 or tile[0] * tile[1] <= 128 * 128  # or accumulators spill
    ]
    products = []
    for batch, (m, k), polynomial in itertools.product((1, 4), SHAPES, (False, True)):
        if polynomial and k != m:
            continue
        x = torch.randn(batch, m, k, device=DEVICE, dtype=torch.bfloat16) / k**0.5
        if polynomial:
            x = (x + x.mT) / 2
        third = {"c": x, "alpha": 2.0, "beta": -4.0} if polynomial else {}
        if polynomial:
            plain = functools.partial(torch.baddbmm, x, x, x, beta=-4.0, alpha=2.0)
        else:
            plain = functools.partial(torch.bmm, x, x.mT)
        want = plain().float()
        ms = in_turns({"torch": plain}, rounds)["torch"]
        what = f"{batch} x {m}x{k}" + (" polynomial" if polynomial else "")
        amount = batch * 2 * m * m * k
        print(f"{what}: torch {ms * 1e3:.0f} us, {amount / ms / 1e9:.0f} TFLOP/s", flush=True)
        found = []
        for config in configs:
            call = functools.partial(symmetric_product, x, x, config=config, **third)
            try:
                error = float((call().float() - want).abs().max() / want.abs().max())
            except Exception as failure:  # too much shared memory, say
                print(f"  {config}: {type(failure).__name__}", flush=True)
                continue
            if not error < 0.02:
                raise SystemExit(f"{config} is wrong: {error}")
            mine = in_turns({"keel": call}, rounds, budget_ms=10)["keel"]
            found.append(Product(str(config), what, mine, amount / mine / 1e9, ms / mine))
        for product in sorted(found, key=lambda p: p.ms)[:5]:
            print(f"  {product.ms * 1e3:.0f} us, {product.times_torch:.2f}x {product.config}")
        products += found
    return products


def table(rows: list[Row]) -> str:
    lines = ["| matrices | torch.optim.Muon | Keel | speed-up |", "|---|---|---|---|"]
    for what in dict.fromkeys(r.what for r in rows):
        by = {r.provider: r for r in rows if r.what == what}
        if "keel" in by and "torch" in by:
            ours, theirs = by["keel"], by["torch"]
            lines.append(
                f"| {what.replace('x', ' × ')} | {theirs.ms:.2f} ms, {theirs.tflops:.0f} TFLOP/s | "
                f"{ours.ms:.2f} ms, {ours.tflops:.0f} TFLOP/s | {theirs.ms / ours.ms:.2f}x |"
            )
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    whats = list(dict.fromkeys(r.what for r in rows))
    names = list(dict.fromkeys(r.provider for r in rows))
    figure, axis = plt.subplots(figsize=(8, 4))
    for number, name in enumerate(names):
        points = [(whats.index(r.what), r.tflops) for r in rows if r.provider == name]
        places = [x + number * 0.8 / len(names) for x, _ in points]
        axis.bar(places, [y for _, y in points], 0.8 / len(names), label=name, align="edge")
    axis.set_xticks([x + 0.4 for x in range(len(whats))], whats)
    axis.set_ylabel("TFLOP/s of the plain form")
    axis.set_title(f"Orthogonalising, bf16, five steps, {rows[0].gpu}")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def read_rows(path: Path) -> list[Row]:
    numbers = ("ms", "tflops", "error")
    with open(path, newline="") as file:
        return [Row(**{**r, **{n: float(r[n]) for n in numbers}}) for r in csv.DictReader(file)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS, help="0: no whole steps")
    parser.add_argument("--forms", action="store_true", help="both forms, at more shapes")
    parser.add_argument("--sweep", action="store_true", help="tile configs instead")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table of the last CSV")
    parser.add_argument("--quick", action="store_true", help="small matrices")
    args = parser.parse_args(arguments)
    if args.table:
        print(table(read_rows(args.out / "muon.csv")))
        return
    if DEVICE == "cpu" and not args.quick:
        raise SystemExit("this benchmark needs a CUDA GPU; --quick runs everywhere")
    torch.manual_seed(0)
    if args.sweep:
        write_csv(sweep(args.rounds), args.out / "muon_sweep.csv")
        return
    shapes, names, layer = SHAPES, ["keel", "torch"], LAYER
    if args.quick and DEVICE == "cpu":
        shapes = QUICK_SHAPES
        layer = QUICK_SHAPES[:1] * 4 + QUICK_SHAPES[1:] * 3
    if args.forms:
        wider = [(m, int(m * a)) for m in (512, 1024, 2048, 4096) for a in (1, 1.25, 1.5, 2, 4)]
        several = [(4, 1024, 1024), (16, 1024, 1024), (16, 1024, 4096), (4, 2048, 2048)]
        shapes, names = wider + several, list(PROVIDERS)
    rows: list[Row] = []
    for shape in shapes:
        rows += measure_shape(shape, names, args.rounds)
        print(*(f"{r.provider} {r.what} {r.ms:.3f} ms" for r in rows[-len(names) :]), sep=" | ")
    if args.layers and not args.forms:
        rows += measure_step(layer, 1 if args.quick else args.layers, args.rounds)
    for row in rows:
        row.gpu, row.triton = machine()
    write_csv(rows, args.out / ("muon_forms.csv" if args.forms else "muon.csv"))
    print(table(rows))
    if not args.forms:
        plot(rows, args.out / "muon.png")


if __name__ == "__main__":
    sys.exit(main())
