"""QK-Clip on one GPU: a step for 60 layers of 64 heads, and the cost of maxima from q and k alone.

    python benchmarks/qk_clip.py
    python benchmarks/qk_clip.py --layers 24 --heads 32 --hidden 4096
    python benchmarks/qk_clip.py --quick            # 8 layers

Weights are bf16, hidden × (heads · 128), one for queries and one for keys in each layer. `idle`
clips no head, `busy` one head in eight of every layer. Times are those of a whole step as the
training loop sees it, host included; `graph` replays the same step from a CUDA graph. A step whose
weights are wrong is not timed. Max logits from q and k are timed beside a forward of the attention.
Results go to benchmarks/results/qk_clip.csv.
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
from keel.optim import ClippedRows, LayerSpec, QKClip, key_rows, max_logits, query_rows

RESULTS = Path(__file__).parent / "results"
DIM = 128
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
    def __init__(self, heads: int, hidden: int) -> None:
        super().__init__()
        where = {"device": "cuda", "dtype": torch.bfloat16}
        self.q = nn.Linear(hidden, heads * DIM, bias=False, **where)
        self.k = nn.Linear(hidden, heads * DIM, bias=False, **where)
        self.current_max_attn_logits = torch.zeros(heads, device="cuda")


def make(layers: int, heads: int, hidden: int) -> tuple[list[Layer], QKClip]:
    made = [Layer(heads, hidden) for _ in range(layers)]
    specs = [
        LayerSpec(
            name=f"layer {n}",
            num_heads=heads,
            num_kv_heads=heads,
            rows=(
                ClippedRows(x.q, query_rows(heads, DIM), "q"),
                ClippedRows(x.k, key_rows(heads, DIM), "k"),
            ),
            source=x,
        )
        for n, x in enumerate(made)
    ]
    return made, QKClip(specs, tau=TAU, group="local")


def check(layers: list[Layer], clip: QKClip, top: torch.Tensor) -> None:
    """Raises unless one step scales the first and the last layer as it should."""
    before = [layers[n].q.weight.detach().clone() for n in (0, -1)]
    clip.step()
    scale = (TAU / top).clamp(max=1).sqrt().repeat_interleave(DIM)[:, None]
    for n, old in zip((0, -1), before, strict=True):
        new = layers[n].q.weight.detach().float()
        torch.testing.assert_close(new, (old.float() * scale).bfloat16().float())


def time_steps(layers: list[Layer], clip: QKClip, share: float) -> tuple[float, float]:
    """(milliseconds of a step, of its replay), with this share of the heads above tau."""
    heads = len(layers[0].current_max_attn_logits)
    top = torch.full((heads,), 50.0, device="cuda")
    top[: round(share * heads)] = TAU * (1 + 1e-6)  # above it, but weights hardly shrink
    tops = [x.current_max_attn_logits for x in layers]

    def report() -> None:
        torch._foreach_copy_(tops, [top] * len(tops))

    report()
    check(layers, clip, top)
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
    layers, clip = make(*sizes)
    for name, share in (("idle", 0.0), ("busy", 1 / 8)):
        rows.append(Row(f"step, {name}", *time_steps(layers, clip, share), "graph", *sizes))
    for tokens in (4096, 16384):
        pair = time_maxima(tokens)
        rows.append(Row(f"max_logits of {tokens} tokens", *pair, "forward", *sizes))
    for row in rows:
        row.gpu, row.triton = machine()
        print(f"{row.what}: {row.ms:.3f} ms, {row.beside} {row.beside_ms:.3f} ms")
    write_csv(rows, args.out / "qk_clip.csv")


if __name__ == "__main__":
    main()
