"""`calc_attn` inside graphs: partial needs, strides, reuse, recomputation, compilation."""

from __future__ import annotations

import pytest
from tests.distributed import autograd_cases as cases

from keel.testing import run_ranks


@pytest.mark.parametrize(
    "check",
    [
        cases.some_need_gradients,
        cases.any_strides,
        cases.twice_in_one_graph,
        cases.evaluation_and_training,
    ],
    ids=lambda check: check.__name__,
)
def test_gradients(check):
    run_ranks(check, 2)


def test_keys_are_kept_only_for_a_backward():
    assert run_ranks(cases.stages_kept, 2) == [(3, 1)] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant):
    run_ranks(cases.recomputed, 2, reentrant)


def test_compiled_graphs_break_around_it():
    """One graph before it, one between it and the roll, one behind."""
    assert run_ranks(cases.compiled, 2) == [3, 3]


def test_second_derivatives_are_refused():
    for heard in run_ranks(cases.second_derivatives, 2):
        assert len(heard) == 2 and all("once_differentiable" in x for x in heard)
