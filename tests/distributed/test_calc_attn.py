"""Context parallelism with real processes on gloo, against one rank that has everything."""

from __future__ import annotations

import pytest
import torch
from tests.distributed import cases

from keel.distributed import CostModel
from keel.testing import run_ranks

FREE = CostModel(gb_per_s=1e9, latency_us=0.0)  # or the solver would leave few tokens in order
BALANCES = ["contiguous", "zigzag", "solver"]
VARIANTS = [  # every world size, degree and balance, not every combination
    (1, {"degree": 1, "balance": "solver", "cost": FREE}),
    (2, {"degree": 0, "balance": "zigzag"}),
    (2, {"degree": 2, "balance": "solver", "cost": FREE, "backward_degree": 0}),
    (3, {"degree": 3, "balance": "contiguous", "keep_remote_keys": True}),
    (4, {"degree": 1, "balance": "zigzag"}),
    (4, {"degree": 4, "balance": "solver", "cost": FREE, "backward_degree": 1}),
    (8, {"degree": 2, "balance": "zigzag"}),
]


@pytest.mark.parametrize(("num_ranks", "options"), VARIANTS, ids=range(len(VARIANTS)))
def test_every_mask_as_by_one_rank(num_ranks, options):
    """fp64: out, lse, max_logits and all gradients."""
    for rank, errors in enumerate(run_ranks(cases.check_every_mask, num_ranks, options)):
        assert len(errors) >= 40
        wrong = {name: error for name, error in errors.items() if not error < 1e-10}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize(("nodes", "per_node", "degree"), [(2, 2, 1), (2, 3, 0), (3, 2, 2)])
def test_every_mask_over_nodes(nodes, per_node, degree):
    for errors in run_ranks(cases.check_nodes, nodes * per_node, nodes, per_node, degree):
        assert len(errors) >= 40 and max(errors.values()) < 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_narrow_dtypes_by_the_rule(dtype):
    options = {"degree": 2, "balance": "zigzag"}
    for broken in run_ranks(cases.check_by_the_rule, 3, dtype, options):
        assert not broken


def test_many_tokens_on_seven_ranks():
    assert max(run_ranks(cases.check_long_documents, 7)) < 1e-10


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_movement(num_ranks, balance):
    run_ranks(cases.check_movement, num_ranks, balance)


def test_deferred_maxima_and_nan():
    run_ranks(cases.check_tracker, 2)


def test_two_calls_at_once():
    run_ranks(cases.check_two_calls_at_once, 2)


def test_results_repeat_bitwise():
    assert all(run_ranks(cases.same_bits_twice, 3))


def test_the_next_stage_travels_while_one_is_computed():
    for events, most in run_ranks(cases.check_overlap, 4):
        at = {(name, number): time for name, number, time in events}
        assert at["sent", 1] < at["computing", 0] < at["wanted", 1]
        for stage in (2, 3):
            assert at["sent", stage] < at["computing", stage - 1] < at["computed", stage - 1]
            assert at["computed", stage - 1] < at["wanted", stage]
        assert most == 2  # one computed, one on its way


@pytest.mark.parametrize(
    ("what", "named"), [("mask", "mask"), ("degree", "degree"), ("layout", "layout of the queries")]
)
def test_ranks_that_disagree_say_on_what(what, named):
    for message in run_ranks(cases.message_of_disagreement, 3, what):
        assert f"disagree on the {named}: rank 1" in message


def test_a_rank_with_an_old_key_is_found_when_asked_for():
    for message in run_ranks(cases.message_of_an_old_key, 2):
        assert "disagree on the mask: rank 1" in message


def test_a_rank_that_leaves_is_an_error():
    zero, one = run_ranks(cases.die_on_rank_one, 2, timeout=20)
    assert one == "left" and "fetching keys for stage 1" in zero
