"""Attention on one GPU: Keel beside FlexAttention, cuDNN and FlashAttention-3, in one run.

    python benchmarks/attention.py                              # 8k and 16k, all masks
    python benchmarks/attention.py --seqlens 4096 --peers DIR   # DIR holds fa3_peer.py and fa3.so

64:8 heads, d 128, bf16, random data, eager calls. Every provider is first checked against the
fp64 oracle on a small problem and against Keel on the timed one: no ratio is printed for a wrong
result. Providers take turns within each round; the median over rounds counts. The cost of max
logits is measured apart, turn by turn, as eager calls and as CUDA graphs. Backward time is
(forward + backward) - forward, for all alike. TFLOP/s = 4 * area * hq * d (backward 2.5 times).
Results go to benchmarks/results/attention.csv and .png.
"""

from __future__ import annotations

import argparse
import csv
import functools
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from timing import time_calls, write_csv

import keel
from keel import masks, reference
from keel.masks import AttnMask
from keel.meta import Scoring

HQ, HK, D = 64, 8, 128
WINDOW = 1024
KINDS = ("full", "causal", "vfull", "vcausal", "swa")
RESULTS = Path(__file__).parent / "results"
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens, heads, d) q, k, v -> out of the same layout, differentiable."""


def document_bounds(tokens: int, seed: int = 0) -> list[int]:
    """Lengths lognormal with median tokens/24 and sigma 1.2, clipped to [16, tokens/4]."""
    rng, bounds = np.random.default_rng(seed), [0]
    while bounds[-1] < tokens:
        length = int(np.clip(rng.lognormal(np.log(tokens / 24), 1.2), 16, tokens / 4))
        bounds.append(min(tokens, bounds[-1] + length))
    return bounds


@dataclass(frozen=True)
class Problem:
    """One mask at one length, in the words of each peer."""

    name: str
    tokens: int
    mask: AttnMask
    causal: bool = False
    window: int = -1
    bounds: tuple[int, ...] | None = None


def problems(tokens: int) -> list[Problem]:
    bounds = tuple(document_bounds(tokens))
    return [
        Problem("full", tokens, masks.full(tokens)),
        Problem("causal", tokens, masks.causal(tokens), causal=True),
        Problem("vfull", tokens, masks.documents(bounds), bounds=bounds),
        Problem("vcausal", tokens, masks.documents(bounds, causal=True), True, bounds=bounds),
        Problem("swa", tokens, masks.sliding_window(tokens, left=WINDOW, right=0), True, WINDOW),
    ]


def keel_with_max(problem: Problem) -> Attend:
    return lambda q, k, v: keel.flex_flash_attn_func(q, k, v, problem.mask, return_max_logits=True)[
        0
    ]


def keel_without_max(problem: Problem) -> Attend:
    return lambda q, k, v: keel.flex_flash_attn_func(q, k, v, problem.mask)[0]


def flex(problem: Problem) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    block_mask = None
    if problem.name != "full":
        document = torch.zeros(problem.tokens, dtype=torch.int32, device="cuda")
        for n, start in enumerate(problem.bounds or ()):
            document[start:] = n
        window = problem.window if problem.window >= 0 else problem.tokens

        def mask_mod(b, h, i, j):
            keep = document[i] == document[j]
            return keep & (i >= j) & (i - j <= window) if problem.causal else keep

        def plain_causal(b, h, i, j):
            return i >= j

        mod = plain_causal if problem.name == "causal" else mask_mod
        block_mask = create_block_mask(mod, None, None, problem.tokens, problem.tokens, "cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=True)[0].transpose(0, 1)

    return attend


def cudnn(problem: Problem) -> Attend | None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if problem.name not in ("full", "causal"):
        return None

    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=problem.causal, enable_gqa=True
            )
        return out[0].transpose(0, 1)

    return attend


def flash3(problem: Problem, folder: Path | None) -> Attend | None:
    if folder is None or not (folder / "fa3_peer.py").exists():
        return None
    sys.path.insert(0, str(folder))
    from fa3_peer import load

    peer = load(str(folder))
    cu, longest = None, None
    if problem.bounds:
        cu = torch.tensor(problem.bounds, dtype=torch.int32, device="cuda")
        longest = int(cu.diff().max())

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            batch = [x if cu is not None else x[None] for x in (q, k, v)]
            out, lse = peer.fwd(*batch, cu, longest, problem.causal, problem.window)
            ctx.save_for_backward(*batch, out, lse)
            return out if cu is not None else out[0]

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, lse = ctx.saved_tensors
            dout = dout if cu is not None else dout[None]
            grads = peer.bwd(dout, q, k, v, out, lse, cu, longest, problem.causal, problem.window)
            return tuple(x if cu is not None else x[0] for x in grads)

    return Attention.apply


def inputs(tokens: int, hq: int, hk: int) -> list[torch.Tensor]:
    return [
        torch.randn(tokens, h, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (hq, hk, hk)
    ]


def run(attend: Attend, qkv: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    out = attend(*qkv)
    return [out, *torch.autograd.grad(out, qkv, dout)]


def check_against_oracle(provider: Callable[[Problem], Attend | None]) -> float:
    """Worst relative error (largest error / largest value) over masks, of out and gradients."""
    worst = 0.0
    for problem in problems(640):
        attend = provider(problem)
        if attend is None:
            continue
        qkv = inputs(problem.tokens, 8, 2)
        exact = [x.detach().double().requires_grad_() for x in qkv]
        out, _, _ = reference.attention(*exact, problem.mask, Scoring(scale=D**-0.5))
        dout = torch.randn_like(qkv[0])
        expected = [out, *torch.autograd.grad(out, exact, dout.double())]
        worst = max(worst, worst_error(run(attend, qkv, dout), expected))
    return worst


def worst_error(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest error relative to the largest value, over tensors; infinite for NaN."""
    worst = 0.0
    for x, ref in zip(got, expected, strict=True):
        ref = ref.detach().double()
        error = (x.detach().double() - ref).abs().max() / ref.abs().max()
        worst = max(worst, float("inf") if error.isnan() else float(error))
    return worst


def graphed(call: Callable[[], object], times: int = 10) -> Callable[[], None]:
    """Ten calls as one CUDA graph: kernel time without the host."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph.replay


@dataclass
class Row:
    """One line of the CSV."""

    mask: str
    tokens: int
    provider: str
    direction: str
    ms: float
    tflops: float
    error: float
    hq: int = HQ
    hk: int = HK
    d: int = D
    dtype: str = "bfloat16"
    gpu: str = ""
    torch: str = torch.__version__
    triton: str = ""
    keel: str = keel.__version__


def measure(problem: Problem, attends: dict[str, Attend], rounds: int) -> list[Row]:
    qkv = inputs(problem.tokens, HQ, HK)
    dout = torch.randn_like(qkv[0])
    expected = run(attends["keel"], qkv, dout)
    errors = {n: worst_error(run(a, qkv, dout), expected) for n, a in attends.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name in random.sample(list(attends), len(attends)):
            attend = attends[name]
            with torch.no_grad():
                forward = time_calls(functools.partial(attend, *qkv), 60)
            train = time_calls(functools.partial(attend, *qkv), 60)
            both = time_calls(functools.partial(run, attend, qkv, dout), 100)
            times.setdefault((name, "forward"), []).append(forward)
            times.setdefault((name, "backward"), []).append(both - train)
    rows = []
    for (name, direction), samples in times.items():
        ms = statistics.median(samples)
        flops = (4 if direction == "forward" else 10) * problem.mask.area() * HQ * D
        rows.append(
            Row(problem.name, problem.tokens, name, direction, ms, flops / ms / 1e9, errors[name])
        )
    return rows


def measure_max_logits(problem: Problem, rounds: int) -> list[Row]:
    """The forward with and without max logits, turn by turn: eager, and as CUDA graphs."""
    qkv = [x.detach() for x in inputs(problem.tokens, HQ, HK)]
    plain, with_max = (make(problem) for make in (keel_without_max, keel_with_max))
    calls = {"without": lambda: plain(*qkv), "with": lambda: with_max(*qkv)}
    rows = []
    for direction, wrap, per in (("forward", lambda c: c, 1), ("forward, graph", graphed, 10)):
        wrapped = {name: wrap(call) for name, call in calls.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for n in range(4 * rounds):
            for name in list(calls) if n % 2 else reversed(list(calls)):
                samples[name].append(time_calls(wrapped[name], 15) / per)
        for name in calls:
            ms = statistics.median(samples[name])
            tflops = 4 * problem.mask.area() * HQ * D / ms / 1e9
            provider = f"keel {name} max logits"
            rows.append(Row(problem.name, problem.tokens, provider, direction, ms, tflops, 0.0))
        without, having = rows[-2].ms, rows[-1].ms
        print(
            f"{problem.tokens:6d} {problem.mask.num_slices:4d} slices {problem.name:8s} "
            f"max logits, {direction}: {without:.4f} -> {having:.4f} ms "
            f"({having / without - 1:+.2%})",
            flush=True,
        )
    return rows


def gemm_ceiling() -> float:
    """TFLOP/s of an 8192^3 bf16 product of random matrices: what the chip gives on a good day."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / statistics.median(time_calls(lambda: a @ b, 60) for _ in range(7)) / 1e9


def print_ratios(rows: list[Row], ceiling: float) -> None:
    by = {(r.mask, r.tokens, r.provider, r.direction): r for r in rows}
    for row in rows:
        if row.provider != "keel":
            continue
        line = f"{row.tokens:6d} {row.mask:8s} {row.direction:8s} keel {row.tflops:5.0f} TFLOP/s"
        line += f" ({row.tflops / ceiling:4.0%} of GEMM)"
        for name in ("flex", "cudnn", "fa3"):
            peer = by.get((row.mask, row.tokens, name, row.direction))
            if peer is None:
                continue
            right = peer.error < 0.05
            line += f" | {name} " + (
                f"{peer.tflops:5.0f}, keel {peer.ms / row.ms:.3f}x" if right else "WRONG RESULT"
            )
        print(line)


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    beside_peers = {r.tokens for r in rows if r.provider in ("flex", "cudnn", "fa3")}
    lengths = sorted(beside_peers or {r.tokens for r in rows})
    names = [n for n in ("keel", "flex", "cudnn", "fa3") if any(r.provider == n for r in rows)]
    kinds = list(KINDS)
    figure, axes = plt.subplots(
        len(lengths), 2, figsize=(12, 3.2 * len(lengths)), squeeze=False, sharey="col"
    )
    for line, tokens in enumerate(lengths):
        for column, direction in enumerate(("forward", "backward")):
            axis = axes[line][column]
            for n, name in enumerate(names):
                found = {
                    r.mask: r.tflops
                    for r in rows
                    if (r.tokens, r.direction, r.provider) == (tokens, direction, name)
                }
                place = [
                    kinds.index(m) + (n - len(names) / 2 + 0.5) * 0.8 / len(names) for m in found
                ]
                axis.bar(place, list(found.values()), 0.8 / len(names), label=name)
            axis.set_xticks(range(len(kinds)), kinds)
            axis.set_title(f"{direction}, {tokens} tokens")
            axis.set_ylabel("TFLOP/s")
            axis.grid(axis="y", alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="upper right", ncols=len(names))
    title = f"{HQ}:{HK} heads, d {D}, bf16, {rows[0].gpu}, torch {rows[0].torch}"
    figure.suptitle(title, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def read_rows(path: Path) -> list[Row]:
    kinds = {"tokens": int, "ms": float, "tflops": float, "error": float}
    with open(path, newline="") as file:
        return [
            Row(**{name: kinds.get(name, str)(x) for name, x in line.items()})
            for line in csv.DictReader(file)
        ]


def table(rows: list[Row]) -> str:
    """Markdown, forward / backward, of the problems that peers ran too: what the README shows."""
    found = {(r.tokens, r.mask, r.provider, r.direction): r.tflops for r in rows}
    lines = [
        "| tokens | mask | Keel | FlexAttention | cuDNN | FlashAttention-3 |",
        "|" + "---|" * 6,
    ]
    for tokens, mask in sorted({key[:2] for key in found}, key=lambda k: (k[0], KINDS.index(k[1]))):
        cells = []
        for name in ("keel", "flex", "cudnn", "fa3"):
            both = [found.get((tokens, mask, name, d)) for d in ("forward", "backward")]
            cells.append("–" if None in both else " / ".join(f"{x:.0f}" for x in both))
        if cells[1] != "–":
            lines.append(f"| {tokens} | {mask} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--peers", type=Path, help="folder with fa3_peer.py and fa3.so")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="providers to run besides keel")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="show the last results again, no run")
    args = parser.parse_args()
    if args.table:
        rows = read_rows(args.out / "attention.csv")
        print(table(rows))
        plot(rows, args.out / "attention.png")
        return
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; `make demo` runs everywhere")
    torch.manual_seed(0)
    providers: dict[str, Callable[[Problem], Attend | None]] = {
        "keel": keel_with_max,
        "flex": flex,
        "cudnn": cudnn,
        "fa3": lambda problem: flash3(problem, args.peers),
    }
    if args.only is not None:
        providers = {n: p for n, p in providers.items() if n == "keel" or n in args.only}
    error = check_against_oracle(keel_with_max)
    print(f"keel against fp64 on 640 tokens: largest relative error {error:.1e}", flush=True)
    if error > 0.02:
        raise SystemExit("Keel's result is wrong: nothing is timed")

    import triton

    ceiling = gemm_ceiling()
    print(f"GEMM ceiling {ceiling:.0f} TFLOP/s", flush=True)
    rows: list[Row] = []
    for tokens in args.seqlens:
        for problem in problems(tokens):
            attends = {n: a for n, p in providers.items() if (a := p(problem)) is not None}
            fresh = measure(problem, attends, args.rounds)
            cost = measure_max_logits(problem, args.rounds)
            for row in fresh + cost:
                row.gpu, row.triton = torch.cuda.get_device_name(), triton.__version__
            print_ratios(fresh, ceiling)
            sys.stdout.flush()
            rows += fresh + cost
    write_csv(rows, args.out / "attention.csv")
    plot(rows, args.out / "attention.png")


if __name__ == "__main__":
    main()
