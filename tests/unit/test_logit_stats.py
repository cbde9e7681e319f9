"""max_logits on the CPU, against dense products; and its bad inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import attn_masks

from keel import flex_flash_attn_func, masks
from keel.optim import max_logits


@settings(max_examples=60)
@given(
    mask=attn_masks(max_tokens=40, max_slices=4),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    scale=st.sampled_from([None, 0.7, -0.4, 0.0]),
)
def test_as_attention_reports_them(mask: Any, heads: tuple[int, int], scale: float | None) -> None:
    torch.manual_seed(0)
    q = torch.randn(mask.tq, heads[0], 8, dtype=torch.float64)
    k = torch.randn(mask.tk, heads[1], 8, dtype=torch.float64)
    _, meta = flex_flash_attn_func(
        *(q, k, k, mask), softmax_scale=scale, return_max_logits=True, backend="reference"
    )
    got = max_logits(q, k, mask, softmax_scale=scale)
    assert meta.max_logits is not None
    torch.testing.assert_close(got, meta.max_logits)


def test_samples_that_share_a_mask() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(3, 20, 4, 8), torch.randn(3, 20, 2, 8)
    logits = torch.einsum("bihd,bjhd->hbij", q, k.repeat_interleave(2, 2)) / 8**0.5
    seen = logits.masked_fill(~torch.ones(20, 20).tril().bool(), -torch.inf)
    want = seen.amax((1, 2, 3))
    torch.testing.assert_close(max_logits(q, k, masks.causal(20)), want)
    running = torch.tensor([9.0, 0.0, 9.0, 0.0])
    assert max_logits(q, k, masks.causal(20), out=running) is running
    torch.testing.assert_close(running, want.maximum(torch.tensor([9.0, 0.0, 9.0, 0.0])))


def test_bf16_is_summed_in_fp32() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 30, 2, 64).bfloat16().unbind()
    top = max_logits(q, k, masks.full(30))
    assert top.dtype == torch.float32
    want = torch.einsum("ihd,jhd->hij", q.double(), k.double()).amax((1, 2)) / 8
    torch.testing.assert_close(top.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mask": None}, TypeError, "mask must be an AttnMask"),
        ({"mask": masks.causal(5)}, ValueError, r"the mask is \(5, 5\), but there are 6 queries"),
        ({"k": torch.zeros(6, 3, 8)}, ValueError, "query heads must be a multiple of key heads"),
        ({"k": torch.zeros(2, 6, 2, 8)}, ValueError, r"k must have shape \(tk, hk, d\)"),
        (
            {"out": torch.zeros(3)},
            ValueError,
            r"max_logits_out must be torch.float32 of shape \(4,\)",
        ),
        ({"backend": "reference"}, ValueError, "backend 'reference' has no max_logits"),
        ({"backend": "fast"}, ValueError, "unknown backend 'fast'"),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: Any, message: str) -> None:
    good = {"q": torch.zeros(6, 4, 8), "k": torch.zeros(6, 2, 8), "mask": masks.causal(6)}
    with pytest.raises(error, match=message):
        max_logits(**(good | arguments))
