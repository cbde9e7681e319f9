"""flash_attn_func and flash_attn_varlen_func against the oracle, one sample at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from keel import flash_attn_func, flash_attn_varlen_func, masks, reference
from keel.meta import Scoring

INF = float("inf")


def normal(*shape: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_()


def one_sample(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the two calls mean for one sample: FlashAttention's options in the oracle's words."""
    left, right = options.get("window_size", (-1, -1))
    mask = masks.sliding_window(
        q.shape[0], k.shape[0], left=left, right=0 if options.get("causal") else right
    )
    scale = options.get("softmax_scale")
    scoring = Scoring(
        scale=q.shape[2] ** -0.5 if scale is None else scale,
        softcap=options.get("softcap", 0.0),
        alibi_slopes=options.get("alibi_slopes"),
    )
    return reference.attention(q, k, v, mask, scoring)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-11, rtol=0, check_stride=False)


SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.05], dtype=torch.float64)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "left window": {"window_size": (4, -1)},
    "None is unbounded": {"window_size": (None, 1)},
    "causal window": {"causal": True, "window_size": (3, 5)},
    "scale and softcap": {"softmax_scale": -0.3, "softcap": 2.0, "causal": True},
    "alibi": {"alibi_slopes": SLOPES},
    "causal alibi": {"alibi_slopes": SLOPES, "causal": True, "softmax_scale": 0.2},
}

LENGTHS = [(7, 7), (4, 9), (9, 4)]


@pytest.mark.parametrize("hk", [4, 1])
@pytest.mark.parametrize(("sq", "sk"), LENGTHS)
@pytest.mark.parametrize("option", OPTIONS)
def test_batched(option: str, sq: int, sk: int, hk: int) -> None:
    options, batch = OPTIONS[option], 3
    q = normal(batch, sq, 4, 8, seed=0)
    k, v = normal(batch, sk, hk, 8, seed=1), normal(batch, sk, hk, 16, seed=2)
    out, lse, probs, top = flash_attn_func(
        q, k, v, return_attn_probs=True, return_max_logits=True, **options
    )
    assert (out.shape, lse.shape, probs) == ((batch, sq, 4, 16), (batch, 4, sq), None)
    want = [one_sample(q[n], k[n], v[n], options) for n in range(batch)]
    close(out, torch.stack([x[0] for x in want]))
    close(lse, torch.stack([x[1].T for x in want]))
    close(top, torch.stack([x[2] for x in want]).amax(0))
    got_grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    want_grads = torch.autograd.grad(sum(x[0].square().sum() for x in want), (q, k, v))
    for a, b in zip(got_grads, want_grads, strict=True):
        close(a, b)


CU_Q = [0, 5, 5, 9, 12, 13]
CU_K = [0, 5, 8, 15, 16, 16]  # longer, shorter and no keys at all; padding follows


@pytest.mark.parametrize("hk", [4, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("option", OPTIONS)
def test_packed(option: str, dtype: torch.dtype, hk: int) -> None:
    options = OPTIONS[option]
    q, k, v = normal(15, 4, 8, seed=0), normal(18, hk, 8, seed=1), normal(18, hk, 16, seed=2)
    cu_q, cu_k = torch.tensor(CU_Q, dtype=dtype), torch.tensor(CU_K, dtype=dtype)
    out, lse, probs, top = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 5, 7, return_attn_probs=True, return_max_logits=True, **options
    )
    assert (out.shape, lse.shape, probs) == ((15, 4, 16), (4, 15), None)
    parts = [
        one_sample(q[a:b], k[c:d], v[c:d], options)
        for (a, b), (c, d) in zip(pairwise(CU_Q), pairwise(CU_K), strict=True)
    ]
    close(out[:13], torch.cat([x[0] for x in parts]))
    close(lse.T[:13], torch.cat([x[1] for x in parts]))
    close(top, torch.stack([x[2] for x in parts]).amax(0))
    assert torch.all(out[13:] == 0) and torch.all(lse[:, 13:] == -INF)
    got_grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    want_grads = torch.autograd.grad(sum(x[0].square().sum() for x in parts), (q, k, v))
    for a, b in zip(got_grads, want_grads, strict=True):
        close(a, b)
    assert torch.all(got_grads[0][13:] == 0) and torch.all(got_grads[1][16:] == 0)


@pytest.mark.parametrize("alibi_slopes", [None, SLOPES], ids=["plain", "alibi"])
def test_no_documents(alibi_slopes: torch.Tensor | None) -> None:
    q, cu = normal(3, 4, 8, seed=0), torch.tensor([0], dtype=torch.int32)
    out = flash_attn_varlen_func(q, q, q, cu, cu, alibi_slopes=alibi_slopes)
    assert out.shape == (3, 4, 8) and torch.all(out == 0)


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("alibi_slopes", [None, SLOPES], ids=["plain", "alibi"])
def test_empty_batches(shape: tuple[int, int, int], alibi_slopes: torch.Tensor | None) -> None:
    batch, sq, sk = shape
    q, k = normal(batch, sq, 4, 8, seed=0), normal(batch, sk, 4, 8, seed=1)
    out, lse, _ = flash_attn_func(
        q, k, k, causal=True, return_attn_probs=True, alibi_slopes=alibi_slopes
    )
    assert out.shape == (batch, sq, 4, 8) and lse.shape == (batch, 4, sq)
    assert torch.all(out == 0) and torch.all(lse == -INF)


def test_what_is_returned() -> None:
    q, cu = normal(2, 5, 4, 8, seed=0), torch.tensor([0, 4, 10])
    packed = q.flatten(0, 1)
    for call in (
        lambda **asked: flash_attn_func(q, q, q, **asked),
        lambda **asked: flash_attn_varlen_func(packed, packed, packed, cu, cu, 6, 6, **asked),
    ):
        assert isinstance(call(), torch.Tensor)
        out, lse, probs = call(return_attn_probs=True)
        assert isinstance(out, torch.Tensor) and isinstance(lse, torch.Tensor) and probs is None
        out, top = call(return_max_logits=True)
        assert top.shape == (4,) and not top.requires_grad


def test_edits_of_lengths_are_noticed() -> None:
    q, cu = normal(10, 4, 8, seed=0), torch.tensor([0, 4, 10])
    flash_attn_varlen_func(q, q, q, cu, cu)
    cu[1] = 7
    want = torch.cat([one_sample(x, x, x, {})[0] for x in (q[:7], q[7:])])
    close(flash_attn_varlen_func(q, q, q, cu, cu), want)
