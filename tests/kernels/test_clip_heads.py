"""Gammas, counts and factors by the kernel in Triton's interpreter, as by plain torch."""

from __future__ import annotations

import os

import pytest
import torch

from keel.optim.clip_specs import Block, Role
from keel.optim.clip_table import ClipTable
from keel.optim.qk_clip import _gamma

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from keel.kernels import clip_heads

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("skipped", [0.0, 1.0])
@pytest.mark.parametrize("alpha", [0.5, 0.3, 1.0])
def test_as_in_torch(alpha, skipped, monkeypatch):
    """More heads than a program takes, and more entries than heads."""
    monkeypatch.setattr(clip_heads, "BLOCK", 16)
    tau, strange = 7.0, [NAN, INF, -INF, 0.0, -3.0, 7.0, 7.000001, 1e30, 1e-30]
    top = torch.cat([torch.rand(30, generator=torch.Generator().manual_seed(1)) * 20,
                     torch.tensor([*strange, skipped])])  # fmt: skip
    heads = len(top) - 1
    table = ClipTable(alpha, "q_only", heads)
    roles = (Role.Q, Role.K, Role.Q_WHOLE, Role.REST)
    layout = tuple(Block(role, head, 1) for head in range(heads) for role in roles)
    where = {"first_gamma": 0, "heads": range(heads), "kv_heads": range(heads)}
    assert len(set(table.rows_of(layout, **where))) > 2 * heads
    factors = table.on(CPU, torch.float32)
    assert factors.of_one_gamma_each
    expected = torch.full((heads,), NAN)
    _gamma(top[:-1], torch.tensor([tau]), top[-1:], torch.ones(1), out=expected)
    assert 0 < (expected < 1).sum() < heads if not skipped else (expected == 1).all()

    places, powers = factors.terms[0]
    gamma = torch.full((heads,), NAN)
    clips, largest = torch.arange(heads), torch.linspace(-5, 15, heads)
    before = clips.clone(), largest.clone()
    state = {"gamma": gamma, "clips": clips, "largest": largest}
    got = clip_heads.clip_heads(top, torch.tensor([tau]), places=places, powers=powers, **state)
    assert torch.equal(gamma, expected)
    assert torch.equal(clips, before[0] + (expected < 1))
    assert torch.equal(largest, torch.fmax(before[1], top[:-1]))
    factors.gammas.copy_(expected)
    torch.testing.assert_close(got, factors.now(), rtol=1e-6, atol=0)
    whole = powers == 1
    assert torch.equal(got[whole], expected[places[whole] - 1])  # not by way of logarithms
    assert (got[powers == 0] == 1).all() and (got[factors.now() == 1] == 1).all()
