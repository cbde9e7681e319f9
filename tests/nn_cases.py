"""Dense attention in fp64, and what tests of `DotProductAttention` hold against it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keel.nn import DotProductAttention, TransformerConfig
from keel.nn import attention as under_test
from keel.testing import poisoned_memory

INF = float("inf")
HEADS, BATCH = 4, 2
PATHS = ["flash", "probabilities"]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}

Tensors = dict[str, torch.Tensor]


def make_config(**changes: Any) -> TransformerConfig:
    sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": HEADS}
    return TransformerConfig(**(sizes | {"params_dtype": torch.float64} | changes))


def make(
    sq: int = 7,
    sk: int | None = None,
    *,
    groups: int = HEADS,
    batch: tuple[int, ...] = (BATCH,),
    hn: int = 8,
    hv: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Tensors:
    """query, key and value, [s, b, heads, channels], that want gradients."""
    random = torch.Generator().manual_seed(seed)
    sk = sq if sk is None else sk
    shapes = {
        "query": (sq, *batch, HEADS, hn),
        "key": (sk, *batch, groups, hn),
        "value": (sk, *batch, groups, hv or hn),
    }
    return {
        name: torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)


def make_module(path: str, config: TransformerConfig, *args: Any, **kwargs: Any) -> Any:
    """An attention that takes the given path, with random softmax offsets where it learns them."""
    module = DotProductAttention(config, *args, **kwargs, need_probs=path == "probabilities")
    if config.softmax_type == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(normal(len(module.softmax_offset), seed=5))
    return module


def band(sq: int, sk: int, causal: bool, window: tuple[int, int] | None) -> torch.Tensor:
    """(sq, sk), True where a pair is hidden; diagonals meet in the bottom-right corner."""
    distance = torch.arange(sk) - torch.arange(sq)[:, None] - (sk - sq)
    left, right = window or (-1, -1)
    hidden = torch.zeros(sq, sk, dtype=torch.bool)
    hidden |= (distance > 0) if causal else False
    hidden |= (distance < -left) if left >= 0 else False
    hidden |= (distance > right) if right >= 0 else False
    return hidden


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    *,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> Tensors:
    """Attention as the textbook has it, in fp64: out, probs, and each head's largest logit."""
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias.double()
    hidden = hidden.expand_as(logits)
    logits = logits.masked_fill(hidden, -INF)
    top = logits.amax((0, 2, 3)).detach()
    offset = torch.full((q.shape[1],), -INF) if sink is None else sink
    columns = offset.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    nothing = hidden.all(-1, keepdim=True)
    probs = torch.softmax(torch.cat([logits.masked_fill(nothing, 0.0), columns], -1), -1)[..., :-1]
    probs = probs.masked_fill(nothing, 0.0)
    out = (probs @ v).permute(2, 0, 1, 3).flatten(2)
    return {"out": out, "probs": probs.detach(), "top": top}


def with_gradients(out: torch.Tensor, leaves: Tensors) -> Tensors:
    """out, and d<name> of each leaf for some gradient of out."""
    upstream = normal(*out.shape, seed=9).to(out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), upstream)
    named = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"out": out.detach(), **named}


def assert_same(got: Tensors, want: Tensors, dtype: torch.dtype) -> None:
    assert got.keys() == want.keys()
    for name, x in got.items():
        error = f"{name}: {{}}".format
        torch.testing.assert_close(
            x.double(), want[name].double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], msg=error
        )


def leaves_of(module: DotProductAttention, tensors: Tensors, *more: str) -> Tensors:
    names = ("query", "key", "value", *more)
    leaves = {name: tensors[name] for name in names}
    if module.config.softmax_type == "learnable":
        assert module.softmax_offset is not None
        leaves["sink"] = module.softmax_offset
    return leaves


def check(module: DotProductAttention, tensors: Tensors, hidden: torch.Tensor, **call: Any) -> None:
    """One call of a module against dense attention: out, gradients, probabilities, maximum."""
    bias = call.get("attention_bias")
    if bias is not None and bias.requires_grad:
        tensors = tensors | {"bias": bias}
    leaves = leaves_of(module, tensors, *(["bias"] if "bias" in tensors else []))
    dtype = tensors["query"].dtype
    qkv = [tensors[name] for name in ("query", "key", "value")]
    with poisoned_memory():
        out = module(*qkv, **call)
        got = with_gradients(out, leaves)
    assert out.dtype == dtype and out.shape[:2] == qkv[0].shape[:2]
    want = dense(*(*qkv, hidden), scale=module.softmax_scale, bias=bias, sink=module.softmax_offset)
    assert_same(got, with_gradients(want["out"], leaves), dtype)
    if module.need_probs:
        assert module.last_probs is not None and not module.last_probs.requires_grad
        assert_same({"probs": module.last_probs}, {"probs": want["probs"]}, dtype)
    if module.config.qk_clip:
        top = module.current_max_attn_logits
        assert top is not None and top.dtype == (dtype if dtype.itemsize == 8 else torch.float32)
        assert_same({"top": top}, {"top": want["top"]}, dtype)


def watch_paths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """(path, keywords) of each call of attention or softmax by a module."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def watch(name: str, path: str) -> None:
        real: Callable[..., Any] = getattr(under_test, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.append((path, kwargs | {"args": args}))
            return real(*args, **kwargs)

        monkeypatch.setattr(under_test, name, watched)

    watch("flex_flash_attn_func", "flash")
    watch("scaled_masked_softmax", "probabilities")
    return calls


def pack(*lengths: list[int], dtype: torch.dtype = torch.int32) -> SimpleNamespace:
    q, k = (torch.tensor([0, *x]).cumsum(0).to(dtype) for x in lengths)
    return SimpleNamespace(qkv_format="thd", cu_seqlens_q=q, cu_seqlens_kv=k)


def ranks(**sizes: int) -> SimpleNamespace:
    """A collection of process groups."""
    return SimpleNamespace(
        **{name: SimpleNamespace(size=lambda n=n: n) for name, n in sizes.items()}
    )
