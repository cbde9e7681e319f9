"""QK-Clip on one GPU: a step for 60 layers of 64 heads, and the cost of maxima from q and k alone.

    python benchmarks/qk_clip.py
    python benchmarks/qk_clip.py --layers 24 --heads 32 --hidden 4096
    python benchmarks/qk_clip.py --quick            # 8 layers

Weights are bf16. `MHA` has hidden × (heads · 128) for queries and as much for keys in each layer,
`MLA` the shapes of Kimi K2: heads of 128 + 64 from 1536 latent numbers, keys and values from 512.
No head, one of each layer, or one in eight is above tau: a clip reads and writes its rows, so
memory bounds the last, and for MHA the second. Times are those of a whole step as the training loop
sees it, host included; `graph` replays the same step from a CUDA graph. A step whose weights are
wrong is not timed. Max logits from q and k are timed beside a forward of the attention. Results go
to benchmarks/results/qk_clip.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import machine, time_calls, write_csv
from torch import nn

import keel
from keel import masks
from keel.optim import (
    ClippedRows,
    LayerSpec,
    QKClip,
    key_rows,
    max_logits,
    mla_key_rows,
    mla_query_rows,
    query_rows,
)

RESULTS = Path(__file__).parent / "results"
DIM = 128
ROPE = 64
TAU = 100.0


@dataclass
class Row:
    """One line of the CSV: `step` beside `graph`, or `max_logits` beside `forward`."""

    what: str
    ms: float
    beside_ms: float
    beside: str
    layers: int
    heads: int
    hidden: int
    dtype: str = "bfloat16"
    gpu: str = ""
    torch: str = torch.__version__
    triton: str = ""
    keel: str = keel.__version__


class Layer(nn.Module):
    """Projections to queries and keys, as (inputs, outputs), and what the attention reports."""

    def __init__(self, heads: int, q: tuple[int, int], k: tuple[int, int]) -> None:
        super().__init__()
        where = {"device": "cuda", "dtype": torch.bfloat16}
        self.q = nn.Linear(*q, bias=False, **where)
        self.k = nn.Linear(*k, bias=False, **where)
        self.current_max_attn_logits = torch.zeros(heads, device="cuda")


def make(kind: str, layers: int, heads: int, hidden: int) -> tuple[list[Layer], QKClip]:
    if kind == "MHA":
        sizes = [(hidden, heads * DIM)] * 2
        layouts = query_rows(heads, DIM), key_rows(heads, DIM)
    else:
        sizes = [(1536, heads * (DIM + ROPE)), (512, heads * 2 * DIM)]
        layouts = mla_query_rows(heads, DIM, ROPE), mla_key_rows(heads, DIM, DIM)
    made = [Layer(heads, *sizes) for _ in range(layers)]
    specs = [
        LayerSpec(
            name=f"layer {n}",
            num_heads=heads,
            num_kv_heads=heads,
            rows=(ClippedRows(x.q, layouts[0], "q"), ClippedRows(x.k, layouts[1], "k")),
            source=x,
        )
        for n, x in enumerate(made)
    ]
    return made, QKClip(specs, tau=TAU, group="local")


def row_scales(kind: str, top: torch.Tensor) -> torch.Tensor:
    """(rows of the query projection,): by how much a step scales each."""
    gamma = (TAU / top).clamp(max=1)
    if kind == "MHA":
        return gamma.sqrt().repeat_interleave(DIM)
    nope, rope = gamma.sqrt()[:, None].expand(-1, DIM), gamma[:, None].expand(-1, ROPE)
    return torch.cat([nope, rope], 1).flatten()


def check(layers: list[Layer], clip: QKClip, scales: torch.Tensor) -> None:
    """Raises unless one step scales the first and the last layer as it should."""
    before = [layers[n].q.weight.detach().clone() for n in (0, -1)]
    clip.step()
    for n, old in zip((0, -1), before, strict=True):
        new = layers[n].q.weight.detach().float()
        torch.testing.assert_close(new, (old.float() * scales[:, None]).bfloat16().float())


def time_steps(kind: str, layers: list[Layer], clip: QKClip, clipped: int) -> tuple[float, float]:
    """(milliseconds of a step, of its replay), with so many heads of each layer above tau."""
    heads = len(layers[0].current_max_attn_logits)
    top = torch.full((heads,), 50.0, device="cuda")
    tops = [x.current_max_attn_logits for x in layers]

    def report() -> None:
        torch._foreach_copy_(tops, [top] * len(tops))

    top[:clipped] = 2 * TAU
    report()
    check(layers, clip, row_scales(kind, top))
    top[:clipped] = TAU * (1 + 1e-6)  # above it, but weights hardly shrink
    both = time_calls(lambda: (report(), clip.step()), budget_ms=100)
    alone = time_calls(report, budget_ms=50)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        report()
        clip.step()
    return both - alone, time_calls(graph.replay, budget_ms=100)


def time_maxima(tokens: int) -> tuple[float, float]:
    """(milliseconds of max_logits, of a forward with max logits)."""
    q = torch.randn(tokens, 64, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, tokens, 8, DIM, device="cuda", dtype=torch.bfloat16)
    mask = masks.causal(tokens)
    _, meta = keel.flex_flash_attn_func(q, k, v, mask, return_max_logits=True)
    torch.testing.assert_close(max_logits(q, k, mask), meta.max_logits, rtol=1e-5, atol=1e-5)
    forward = lambda: keel.flex_flash_attn_func(q, k, v, mask, return_max_logits=True)  # noqa: E731
    return time_calls(lambda: max_logits(q, k, mask)), time_calls(forward)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--quick", action="store_true", help="8 layers")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    sizes = (8 if args.quick else args.layers, args.heads, args.hidden)
    rows = []
    for kind in ("MHA", "MLA"):
        layers, clip = make(kind, *sizes)
        for clipped in sorted({0, 1, args.heads // 8}):
            times = time_steps(kind, layers, clip, clipped)
            what = f"step, {kind}, {clipped} of {args.heads} heads clipped"
            rows.append(Row(what, *times, "graph", *sizes))
    for tokens in (4096, 16384):
        pair = time_maxima(tokens)
        rows.append(Row(f"max_logits of {tokens} tokens", *pair, "forward", *sizes))
    for row in rows:
        row.gpu, row.triton = machine()
        print(f"{row.what}: {row.ms:.3f} ms, {row.beside} {row.beside_ms:.3f} ms")
    write_csv(rows, args.out / "qk_clip.csv")


if __name__ == "__main__":
    main()
