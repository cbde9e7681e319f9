"""Launch recipes: made once per layout, never used for another one, bounded in number."""

from __future__ import annotations

import pytest
import torch

from keel import direct, flex_flash_attn_func, masks
from keel.kernels import flash_fwd, launch

MASK = masks.causal(20)


@pytest.fixture
def prepared(monkeypatch):
    """Counts how often a forward had to be worked out."""
    calls = []
    prepare = flash_fwd._prepare

    def counting(*args):
        calls.append(args)
        return prepare(*args)

    monkeypatch.setattr(flash_fwd, "_prepare", counting)
    for remembered in (launch._recipes, direct._known):
        remembered.clear()
    yield calls
    for remembered in (launch._recipes, direct._known):
        remembered.clear()


def check(q, k, v, mask=MASK, **options):
    got, _ = flex_flash_attn_func(q, k, v, mask, backend="triton", **options)
    want, _ = flex_flash_attn_func(q, k, v, mask, backend="reference", **options)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_the_same_layout_is_prepared_once(prepared):
    for _ in range(3):
        check(*torch.randn(3, 20, 2, 16).unbind())
    check(*torch.randn(3, 20, 2, 16).unbind(), mask=masks.causal(20))  # equal, not the same
    assert len(prepared) == 1


def test_what_differs_is_prepared_anew(prepared):
    q, k, v = torch.randn(3, 20, 2, 16).unbind()
    wide = torch.randn(20, 2, 32)
    odd = torch.empty(20 * 2 * 16 + 1)[1:].view(20, 2, 16).normal_()  # not at a multiple of 16
    cases = [
        lambda: check(q, k, v),
        lambda: check(wide[..., :16], k, v),
        lambda: check(odd, k, v),
        lambda: check(q, odd, v),
        lambda: check(q, k, v[..., :8]),
        lambda: check(q.half().float(), k[:, :1], v[:, :1]),
        lambda: check(q, k, v, mask=masks.full(20)),
        lambda: check(q, k, v, softmax_scale=0.5),
        lambda: check(q, k, v, softcap=2.0),
        lambda: check(q, k, v, sink=torch.zeros(2)),
        lambda: check(q, k, v, bias=torch.randn(1, 20, 20)),
        lambda: check(q, k, v, bias=torch.randn(2, 1, 20)),
        lambda: check(q, k, v, sm_margin=1),
    ]
    for n, case in enumerate(cases, 1):
        case()
        case()
        assert len(prepared) == n


def test_recipes_are_bounded(prepared, monkeypatch):
    monkeypatch.setattr(launch, "MAX_RECIPES", 3)
    q, k, v = torch.randn(3, 20, 2, 16).unbind()
    for width in (1, 2, 3, 4, 1):
        check(q, k, v, mask=masks.sliding_window(20, left=width, right=0))
        assert len(launch._recipes) <= 3
    assert len(prepared) == 5  # the first had to go


def test_nothing_to_do_is_remembered_too(prepared):
    q, k, v = torch.randn(3, 20, 2, 16).unbind()
    for _ in range(2):
        out, meta = flex_flash_attn_func(
            q[:0], k, v, masks.AttnMask([], 0, 20), backend="triton", return_max_logits=True
        )
        assert out.shape == (0, 2, 16) and (meta.max_logits == -torch.inf).all()
    assert len(prepared) == 1
