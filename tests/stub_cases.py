"""Calls on a GPU that does nothing, and what they launched."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # scripts: plain names

from host_stub import Stub

from keel import flex_flash_attn_func, masks

__all__ = ["Stub"]
TOKENS, HQ, HK, D = 24, 4, 2, 64
MASK = masks.causal(TOKENS)


def make(
    dtype: torch.dtype = torch.bfloat16, d: int = D, tokens: int = TOKENS
) -> list[torch.Tensor]:
    return [torch.randn(tokens, heads, d).to(dtype) for heads in (HQ, HK, HK)]


def attend(q: Any, k: Any, v: Any, mask: Any = MASK, **options: Any) -> Any:
    return flex_flash_attn_func(q, k, v, mask, **{"backend": "hopper", **options})


def map_of(x: torch.Tensor) -> tuple[Any, ...]:
    return ("map", x.data_ptr(), list(x.shape), list(x.stride()))


def gradients(out: torch.Tensor, inputs: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out, inputs, dout, retain_graph=True)


def last_launch(stub: Stub) -> dict[str, Any]:
    """Of the hopper forward: descriptors O, Q, K and V are followed by three shapes and strides."""
    name, stream, arguments = stub.launches[-1]
    assert name == "hopper_fwd_kernel"
    maps = {n: arguments[7 * i] for i, n in enumerate("OQKV")}
    rest = ("OUT", "LSE", "MAX_LOGITS", "SINK", "PARTS", "MEETINGS", "SHARES")
    rest += ("TILES", "RUNS", "ROW_LO", "ROW_HI", "COUNTER")
    scalars = ("scale", "softcap")
    return {**maps, **dict(zip(rest + scalars, arguments[28:], strict=False)), "stream": stream}
