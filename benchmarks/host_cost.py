"""What a call costs the host, in microseconds: a GPU that waits for its host does nothing.

    python benchmarks/host_cost.py                 # on a GPU, beside torch's own attention
    python benchmarks/host_cost.py --stub          # anywhere: Keel's Python alone, no GPU in it

One small problem (a causal mask of 64 tokens, 16:2 heads, d 64, bf16), so that kernels end before
the host is back. Calls are timed in batches with a synchronisation between, so that no launch
waits for room in the queue, and take turns; the figure is the median batch. Backward: autograd's
whole way from the gradient of out to those of q, k and v. Results go to
benchmarks/results/host_cost.csv (host_cost_stub.csv with --stub).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import write_csv

import keel
from keel import masks

RESULTS = Path(__file__).parent / "results"
TOKENS, HQ, HK, D = 64, 16, 2, 64
BATCH = 50


@dataclass
class Row:
    """One line of the CSV."""

    backend: str
    direction: str
    grad: bool
    max_logits: bool
    us: float
    us_least: float
    calls: int
    tokens: int = TOKENS
    hq: int = HQ
    hk: int = HK
    d: int = D
    gpu: str = ""
    torch: str = torch.__version__
    triton: str = ""
    keel: str = keel.__version__


def batch_us(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Microseconds per call of one batch."""
    synchronize()
    start = time.perf_counter()
    for _ in range(BATCH):
        call()
    return (time.perf_counter() - start) / BATCH * 1e6


def measure(backends: list[str], calls: int, device: str) -> list[Row]:
    """All combinations, Keel's and torch's. They take turns: a host is not always as fast."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    plain = [torch.randn(TOKENS, h, D, dtype=torch.bfloat16, device=device) for h in (HQ, HK, HK)]
    dout = torch.randn_like(plain[0])
    mask = masks.causal(TOKENS)
    todo: list[tuple[tuple[str, str, bool, bool], Callable[[], object]]] = []
    for backend in backends:
        for grad in (False, True):
            q, k, v = (x.detach().requires_grad_(grad) for x in plain)
            for max_logits in (False, True):

                def forward(
                    backend: str = backend,
                    max_logits: bool = max_logits,
                    qkv: tuple[torch.Tensor, ...] = (q, k, v),
                ) -> torch.Tensor:
                    out, _ = keel.flex_flash_attn_func(
                        *(*qkv, mask), return_max_logits=max_logits, backend=backend
                    )
                    return out

                if backend == "sdpa":
                    if max_logits:
                        continue
                    forward = _torch_attention(q, k, v)
                todo.append(((backend, "forward", grad, max_logits), forward))
                if grad and not max_logits:
                    out = forward()
                    d_out = dout.view(out.shape) if out.shape == dout.shape else out.detach()
                    backward = functools.partial(
                        torch.autograd.grad, out, (q, k, v), d_out, retain_graph=True
                    )
                    todo.append(((backend, "backward", grad, max_logits), backward))
    times: list[list[float]] = [[] for _ in todo]
    for turn in range(1 + max(1, calls // BATCH)):
        for found, (_, call) in zip(times, todo, strict=True):
            us = batch_us(call, synchronize)
            if turn > 0:  # the first compiles, and finds its way
                found.append(us)
    synchronize()
    return [
        Row(*what, statistics.median(found), min(found), BATCH * len(found))
        for (what, _), found in zip(todo, times, strict=True)
    ]


def _torch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), is_causal=True, enable_gqa=True
        )

    return forward


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stub", action="store_true", help="no GPU: Keel's Python alone")
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--backends", nargs="+", default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if not given.stub and not torch.cuda.is_available():
        sys.exit("there is no GPU here: --stub measures Keel's Python alone")
    device = "cpu" if given.stub else "cuda"
    backends = given.backends or ["hopper", "triton"] + ([] if given.stub else ["sdpa"])
    if not given.stub and torch.cuda.get_device_capability() != (9, 0):
        backends = [name for name in backends if name != "hopper"]
    import triton

    with contextlib.ExitStack() as stack:
        if given.stub:
            from host_stub import stubbed

            stack.enter_context(stubbed()).keep = False
        rows = measure(backends, given.calls, device)
    print(f"{'backend':8} {'':9} {'grad':5} {'max logits':10} {'us':>7} {'least':>7}")
    for row in rows:
        row.gpu = "stub" if given.stub else torch.cuda.get_device_name()
        row.triton = triton.__version__
        print(
            f"{row.backend:8} {row.direction:9} {row.grad!s:5} {row.max_logits!s:10} "
            f"{row.us:7.1f} {row.us_least:7.1f}"
        )
    path = given.out / ("host_cost_stub.csv" if given.stub else "host_cost.csv")
    write_csv(rows, path)
    print(f"written to {path}")
    return rows


if __name__ == "__main__":
    main()
