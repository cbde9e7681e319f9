"""Muon on sharded parameters, with real processes on gloo, against one rank that has everything."""

from __future__ import annotations

import pytest
from tests.distributed import muon_cases as cases

from keel.testing import run_ranks

MATRICES = cases.STEPS * (4 + 2 + 1 + 1 + 4 + 3 + 1)
"""Four heads, two splits, two single ones, experts, and a tall one, at every step."""

TWO_RANKS = ["fsdp", "rows", "columns", "replicated", "plain"]
MOVES = [("fsdp", "fsdp"), ("columns", "fsdp and tp"), ("fsdp", "shuffled")]


def check(found):
    """Every layout, on every rank, by name."""
    for layout in found[0]:
        for rank, outcome in enumerate(found):
            wrong = {name: error for name, error in outcome[layout][0].items() if not error < 1e-6}
            assert not wrong, f"{layout}, rank {rank}: {wrong}"
        counts = [outcome[layout][1] for outcome in found]
        assert sum(counts) == MATRICES, layout
        assert min(counts) > 0, layout


def test_two_ranks_and_their_checkpoints_on_four(tmp_path):
    check(run_ranks(cases.check_layouts, 2, TWO_RANKS[:4], str(tmp_path)))
    for loaded in run_ranks(cases.load_and_go_on, 4, MOVES, str(tmp_path)):
        for move, errors in zip(MOVES, loaded, strict=True):
            assert max(errors.values()) < 1e-6, move


@pytest.mark.parametrize(("num_ranks", "layouts"), [(3, TWO_RANKS), (4, [*cases.LAYOUTS, "plain"])])
def test_as_by_one_rank_and_each_matrix_once(num_ranks, layouts):
    check(run_ranks(cases.check_layouts, num_ranks, layouts))


def test_odd_cases():
    """Gradients that are partial sums or missing; ranks that disagree; layouts nobody knows."""
    for found in run_ranks(cases.odd_cases, 2):
        assert max(found["partial"].values()) < 1e-6
        assert max(found["missing"].values()) < 1e-6
        assert "ranks disagree on the parameters of Muon: rank 1" in found["disagreement"]
        assert "parameter 'layer.weight' has placements" in found["layout"]
