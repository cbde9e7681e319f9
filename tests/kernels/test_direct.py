"""Calls seen before give bitwise what operators give, and the same gradients."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from keel import direct, flash_attn_func, flex_flash_attn_func, masks

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

TOKENS, HQ, HK, D = 20, 4, 2, 16
MASK = masks.documents([0, 7, TOKENS], causal=True)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "maxima": {"return_max_logits": True},
    "capped": {"softcap": 2.0, "softmax_scale": 0.5, "return_max_logits": True},
    "negative": {"softmax_scale": -0.5},
    "margin": {"sm_margin": 1, "return_max_logits": True},
    "sink": {"sink": torch.linspace(-1, 1, HQ)},
    "bias": {"bias": torch.linspace(-1, 1, TOKENS).view(1, TOKENS, 1)},
    "alibi": {"alibi_slopes": torch.linspace(0, 1, HQ), "deterministic": True},
}


@pytest.fixture(autouse=True)
def forgotten():
    direct._known.clear()
    yield
    direct._known.clear()


def make(seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(TOKENS, heads, D, generator=random).requires_grad_() for heads in (HQ, HK, HK)
    ]


def run(leaves: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    """out, lse, perhaps maxima, and all gradients."""
    own = {
        name: x.clone().requires_grad_() if name in ("sink", "bias") else x
        for name, x in options.items()
    }
    out, meta = flex_flash_attn_func(*leaves, MASK, backend="triton", **own)
    wanted = leaves + [x for name, x in own.items() if name in ("sink", "bias")]
    grads = torch.autograd.grad(out.square().sum() + meta.lse.sum(), wanted)
    results = [out.detach(), meta.lse.detach(), *grads]
    return results if meta.max_logits is None else [*results, meta.max_logits]


@pytest.mark.parametrize("name", OPTIONS)
def test_bitwise_what_the_operator_gives(name: str) -> None:
    options = OPTIONS[name]
    for seed in (0, 1, 2):  # worked out, found, found
        got = run(make(seed), options)
        with FlopCounterMode(display=False) as counter:  # whoever counts must see operators
            expected = run(make(seed), options)
        assert counter.get_total_flops() == 14 * MASK.area() * HQ * D
        assert len(got) == len(expected)
        assert all(map(torch.equal, got, expected))
    assert len(direct._known) == (0 if name == "negative" else 1)


def test_modes_share_a_call() -> None:
    """What was first met in inference serves training, and the other way round."""
    q, k, v = make(3)
    results = []
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            out, meta = flex_flash_attn_func(
                q, k, v, MASK, backend="triton", return_max_logits=True
            )
        assert out.requires_grad == (mode is torch.enable_grad) == meta.lse.requires_grad
        assert not meta.max_logits.requires_grad
        results.append((out, meta))
    assert len(direct._known) == 1
    for out, meta in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(meta.lse, results[0][1].lse)
        assert torch.equal(meta.max_logits, results[0][1].max_logits)
    trained = results[2][0]
    trained.sum().backward()
    assert q.grad is not None and q.grad.abs().sum() > 0


def test_running_maxima_are_raised_in_place() -> None:
    running = torch.full((HQ,), -torch.inf)
    expected = running.clone()
    for seed in range(4):
        q, k, v = make(seed)
        version = running._version
        _, meta = flex_flash_attn_func(q, k, v, MASK, backend="triton", max_logits_out=running)
        assert meta.max_logits is running and running._version > version
        _, meta = flex_flash_attn_func(q, k, v, MASK, backend="triton", return_max_logits=True)
        expected = torch.maximum(expected, meta.max_logits)
        assert torch.equal(running, expected)
    assert len(direct._known) == 2


def test_equal_masks_and_batched_calls_are_known() -> None:
    q, k, v = (x.detach() for x in make(4))
    batched = [x.unflatten(0, (2, TOKENS // 2)) for x in (q, k, v)]
    bounds = torch.tensor([[0, 10], [10, 20]])
    types = torch.tensor([1, 1])
    for _ in range(2):
        by_ranges, _ = flex_flash_attn_func(q, k, v, bounds, bounds, types, backend="triton")
        by_mask, _ = flex_flash_attn_func(
            q, k, v, masks.documents([0, 10, 20], causal=True), backend="triton"
        )
        by_batch = flash_attn_func(*batched, causal=True, backend="triton")
        assert torch.equal(by_ranges, by_mask)
        assert torch.equal(by_batch.flatten(0, 1), by_mask)
    values = {call.mask for call in direct._known.values()}
    assert len(direct._known) == len(values)


@pytest.mark.parametrize("name", ["sink", "alibi_slopes"])
@pytest.mark.parametrize("counted", [False, True])
def test_numbers_per_head_of_any_stride(name: str, counted: bool) -> None:
    """One number for all heads, expanded, and a column of a matrix; gradients reach them."""
    q, k, v = make(0)
    wide = torch.rand(HQ, 3).requires_grad_(name == "sink")
    for numbers in (wide[0, :1].expand(HQ), wide[:, 1]):
        results = []
        for given, backend in ((numbers, "triton"), (numbers.contiguous(), "blocked")):
            call: dict[str, Any] = {name: given, "backend": backend}
            if counted:
                with FlopCounterMode(display=False):
                    out, meta = flex_flash_attn_func(q, k, v, MASK, **call)
            else:
                out, meta = flex_flash_attn_func(q, k, v, MASK, **call)
            leaves = [q, k, v, wide] if name == "sink" else [q, k, v]
            grads = torch.autograd.grad(out.square().sum(), leaves)
            results.append([out.detach(), meta.lse.detach(), *grads])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
