"""The demo: packed documents, forward and backward, held against the fp64 oracle.

Pure logic: nothing here writes to a terminal or a disk.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from keel import masks
from keel.attention import flex_flash_attn_func
from keel.checks import check_qkv
from keel.masks import AttnMask
from keel.ops import explain_backend
from keel.testing import Case, Comparison, judge, run_case

STEPS = ("run", "check against the oracle", "time")

ORACLE_BYTES = 6 << 30
"""What the oracle may take: about eight fp64 matrices of (hq, tokens, tokens) live at once."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Sizes of the demo; wrong ones are refused here, before any work."""

    tokens: int = 768
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    seed: int = 197
    """With the other defaults: documents of 55 to 269 tokens, which make a readable picture."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")
        q, kv = (
            torch.empty(self.tokens, heads, self.head_dim, device="meta")
            for heads in (self.heads, self.kv_heads)
        )
        check_qkv(q, kv, kv)
        if 8 * 8 * self.heads * self.tokens**2 > ORACLE_BYTES:
            most = int((ORACLE_BYTES / (64 * self.heads)) ** 0.5)
            raise ValueError(
                f"the oracle holds dense {self.heads} x {self.tokens} x {self.tokens} matrices: "
                f"with {self.heads} heads take at most {most} tokens"
            )


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What ran, where, how right and how fast."""

    config: DemoConfig
    mask: AttnMask
    lengths: list[int]
    """Tokens of each document."""
    device: str
    dtype: str
    backend: str
    why: str
    """Why this backend was taken."""
    checks: list[Comparison]
    max_logits: list[float]
    """Largest logit of each query head."""
    forward_ms: float
    backward_ms: float

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The same in JSON's types; a number that is not finite becomes None."""
        return {
            "ok": self.ok,
            "device": self.device,
            "dtype": self.dtype,
            "backend": self.backend,
            "why": self.why,
            "documents": self.lengths,
            "heads": self.config.heads,
            "kv_heads": self.config.kv_heads,
            "head_dim": self.config.head_dim,
            "area": self.mask.area(),
            "checks": [
                {
                    "tensor": check.name,
                    "error": _finite(check.error),
                    "allowed": _finite(check.limit),
                    "plain_torch": _finite(check.error_low),
                    "ok": check.ok,
                }
                for check in self.checks
            ],
            "max_logits": [_finite(x) for x in self.max_logits],
            "forward_ms": self.forward_ms,
            "backward_ms": self.backward_ms,
        }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def run_demo(config: DemoConfig, on_step: Callable[[str], None] = lambda name: None) -> DemoResult:
    """Runs the demo on the first GPU in bf16, else on the CPU in fp32; announces each of STEPS.

    >>> result = run_demo(DemoConfig(tokens=24, heads=2, kv_heads=1, head_dim=8))
    >>> result.ok, sum(result.lengths), len(result.max_logits)
    (True, 24, 2)
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backend, why = explain_backend(device, dtype)
    bounds = document_bounds(config.tokens, config.seed)
    case = Case(
        mask=masks.documents(bounds, causal=True),
        hq=config.heads,
        hk=config.kv_heads,
        d=config.head_dim,
        dtype=dtype,
        device=str(device),
        seed=config.seed,
    )
    on_step(STEPS[0])
    got = run_case(case, backend=backend)
    on_step(STEPS[1])
    checks = judge(case, got)
    on_step(STEPS[2])
    forward_ms, backward_ms = _time_ms(case, backend)
    return DemoResult(
        config=config,
        mask=case.mask,
        lengths=[b - a for a, b in itertools.pairwise(bounds)],
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(dtype).removeprefix("torch."),
        backend=backend,
        why=why,
        checks=checks,
        max_logits=got["max_logits"].tolist(),
        forward_ms=forward_ms,
        backward_ms=backward_ms,
    )


def document_bounds(tokens: int, seed: int) -> list[int]:
    """Cumulative bounds of up to 7 documents of random lengths.

    >>> document_bounds(1, seed=0), document_bounds(100, seed=0)[-1]
    ([0, 1], 100)
    """
    random = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(tokens - 1, generator=random)[:6] + 1
    return [0, *sorted(cuts.tolist()), tokens]


def _time_ms(case: Case, backend: str) -> tuple[float, float]:
    """Median milliseconds of a forward and a backward; everything is compiled by now."""
    made = case.tensors()
    q, k, v = (made[name].requires_grad_() for name in ("q", "k", "v"))

    def now() -> float:
        if q.is_cuda:
            torch.cuda.synchronize(q.device)
        return time.perf_counter() * 1e3

    forward, backward = [], []
    for _ in range(20 if q.is_cuda else 3):
        start = now()
        out, _ = flex_flash_attn_func(q, k, v, case.mask, return_max_logits=True, backend=backend)
        middle = now()
        torch.autograd.grad(out, (q, k, v), made["dout"])
        forward.append(middle - start)
        backward.append(now() - middle)
    return statistics.median(forward), statistics.median(backward)
