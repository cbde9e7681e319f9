"""Gradients in fp32 leave as they should: zeroed before, summed in order, scaled, rounded."""

from __future__ import annotations

import functools
import math
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from keel.kernels import gradient_sums as module
from keel.kernels.flash_bwd import row_terms
from keel.kernels.gradient_sums import gradient_sums


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])  # bf16 is cut off there
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize(("tokens", "d", "dim_v"), [(1, 8, 8), (3, 40, 24), (8, 64, 128)])
def test_bitwise_what_torch_gives(tokens, d, dim_v, splits, dtype, monkeypatch):
    """Sums in the order of parts; blocks that end with a tensor, and ones that do not."""
    monkeypatch.setattr(module, "BLOCK", 512)
    hq, hk = 4, 1
    dq32 = torch.randn(tokens, hq, d)
    shapes = {"dk": (tokens + 2, hk, d), "dv": (tokens + 2, hk, dim_v)}
    # one number more behind each result, which nobody may touch
    outs = {n: torch.full((torch.Size(s).numel() + 1,), torch.nan, dtype=dtype)
            for n, s in {"dq": dq32.shape, **shapes}.items()}  # fmt: skip
    views = {n: outs[n][:-1].view(s) for n, s in {"dq": dq32.shape, **shapes}.items()}
    parts = {n: views[n] for n in shapes}
    if splits > 1:
        parts = {n: torch.randn(s[0], hk * splits, s[2]) for n, s in shapes.items()}
    gradient_sums(
        *(dq32, views["dq"], parts["dk"], views["dk"], parts["dv"], views["dv"]), 0.3, splits
    )
    assert torch.equal(views["dq"], (dq32 * 0.3).to(dtype))
    for name, shape in shapes.items():
        if splits == 1:  # written by others
            assert views[name].isnan().all()
            continue
        by_part = parts[name].view(shape[0], hk, splits, shape[2]).unbind(2)
        assert torch.equal(views[name], functools.reduce(torch.add, by_part).to(dtype))
    assert all(x[-1].isnan() for x in outs.values())


def test_parts_alone():
    """Where dq is ready."""
    dq = torch.full((2, 2, 8), torch.nan)
    dk, dv = torch.empty(3, 1, 8), torch.empty(3, 1, 16)
    parts = torch.randn(3, 2, 8), torch.randn(3, 2, 16)
    gradient_sums(None, dq, parts[0], dk, parts[1], dv, 0.3, 2)
    assert dq.isnan().all()
    assert torch.equal(dk[:, 0], parts[0].sum(1)) and torch.equal(dv[:, 0], parts[1].sum(1))


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize(("tokens", "d", "dim_v"), [(1, 64, 64), (70, 40, 24), (128, 24, 96)])
def test_row_terms_zero_on_the_way(tokens, d, dim_v, with_dlse):
    """And give bitwise what they give without."""
    torch.manual_seed(0)
    hq = 3
    out, dout = torch.randn(2, tokens, hq, dim_v).bfloat16().unbind()
    lse = torch.randn(tokens, hq)
    lse[0] = -torch.inf
    dlse = torch.randn(tokens, hq) if with_dlse else None
    dirty = torch.full((tokens * hq * d + 1,), torch.nan)
    dq32 = dirty[:-1].view(tokens, hq, d)
    terms = row_terms(out, dout, lse, dlse, dq32=dq32)
    assert (dq32 == 0).all() and dirty[-1].isnan()
    for got, expected in zip(terms, row_terms(out, dout, lse, dlse), strict=True):
        assert torch.equal(got, expected)
    assert (terms[0][:, 0] == torch.inf).all()
    delta = (out.double() * dout.double()).sum(-1) - (0 if dlse is None else dlse)
    torch.testing.assert_close(terms[1].double(), delta.T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(terms[0][:, 1:], lse[1:].T / math.log(2))
