"""Divisions that the Hopper forward's producer makes by multiplying."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from keel import masks
from keel.kernels import hopper_launch
from keel.kernels.hopper_forms import Form
from keel.kernels.hopper_launch import as_factor
from keel.meta import Scoring

MOST = 2**31 - 1


def quotient(number: int, factor: int, shift: int) -> int:
    """As the kernel's: 32 bits times 32 bits, shifted."""
    assert -(2**31) <= factor < 2**31 and 0 <= shift < 64, "kernels take 32 bits"
    return ((number * (factor % 2**32)) >> shift) % 2**32


@given(st.integers(1, MOST), st.integers(0, MOST))
@example(1, MOST)
@example(MOST, MOST)
@example(MOST, MOST - 1)
@example(2**30 + 1, MOST)
def test_quotients(divisor, number):
    for n in {number, number // divisor * divisor, max(number // divisor * divisor - 1, 0)}:
        assert quotient(n, *as_factor(divisor)) == n // divisor


@pytest.mark.parametrize("section", [8, 24, 56])
def test_which_tile_and_head_a_number_is(section, monkeypatch):
    """All work of a launch, as `tile_and_head` finds it, is each tile of each head once."""
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(hopper_launch, "section_heads", lambda *_: section)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tokens, hq, hk = 5000, 168, 24
    q = torch.empty(tokens, hq, 128, dtype=torch.bfloat16)
    k = v = torch.empty(tokens, hk, 128, dtype=torch.bfloat16)
    scoring = Scoring(scale=1.0)
    tiles = hopper_launch._tiles_for(q, v, masks.causal(tokens), scoring, None)
    made = hopper_launch._prepare(q, k, v, tiles, scoring, q, None, False, 0, None)
    assert made is not None
    told = made.arguments
    assert told["FORM"].by_factors and told["section"] == section

    def divided(number: int, name: str) -> int:
        return quotient(number, told[f"{name}_factor"], told[f"{name}_shift"])

    found = []
    for work in range(told["num_work"]):
        sections = divided(work, "all")
        in_section = work - sections * told["num_tiles"] * section
        tile = divided(in_section, "section")
        head = in_section + (sections - tile) * section
        assert divided(head, "group") == head // 7
        found.append((head // section, tile, head % section))
    each = ((head // section, tile) for head in range(hq) for tile in range(told["num_tiles"]))
    assert found == sorted(found) and len(set(found)) == len(found)
    assert {(part, tile) for part, tile, _ in found} == set(each)


def test_which_forms_have_factors():
    assert Form(128, 128, 128).by_factors and Form(64, 64, 128, consumers=3).by_factors
    assert not Form(64, 64, 128, consumers=3, accumulate=True).by_factors
    assert not Form(128, 128, 128, cuts=True).by_factors
    assert not Form(128, 128, 128, pack=8).by_factors
    assert not Form(256, 256, 64, q_buffers=1).by_factors
