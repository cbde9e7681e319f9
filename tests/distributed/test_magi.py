"""Scripts written for MagiAttention, on two ranks, against plain torch on one."""

from __future__ import annotations

import pytest
from tests.distributed import magi_cases

from keel.testing import run_ranks


def assert_small(found, names):
    for rank, errors in enumerate(found):
        assert set(errors) == set(names)
        wrong = {name: error for name, error in errors.items() if not error < 1e-10}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("overlap", [{}, {"degree": 0}, {"degree": 3}, {"degree": None}], ids=str)
def test_quickstart(overlap):
    """fp64: out, lse, max_logits, and gradients of x, the sink and the projections."""
    names = ["out", "lse", "max_logits", "dx", "dsink", "dq_proj", "dk_proj", "dv_proj"]
    assert_small(run_ranks(magi_cases.quickstart, 2, overlap), names)


def test_new_masks_on_one_layout():
    assert_small(run_ranks(magi_cases.new_masks, 2), ["window", "types", "documents"])


def test_dispatch_undispatch_roll():
    run_ranks(magi_cases.movement, 2)


def test_cross_attention():
    assert_small(run_ranks(magi_cases.cross_attention, 2), ["out", "q", "k", "v"])


def test_recent_keys():
    run_ranks(magi_cases.recent_keys, 2)
