"""Context parallelism with real processes on gloo, against one rank that has everything."""

from __future__ import annotations

import pytest
import torch
from tests.distributed import cases

from keel.testing import run_ranks

BALANCES = ["contiguous", "zigzag", "solver", "traffic"]
EVERY_COMBINATION = {(degree, balance) for degree in cases.DEGREES for balance in cases.BALANCES}


def assert_exact(found):
    """fp64: out, lse, max_logits and all gradients of every mask; every degree on every balance."""
    for rank, results in enumerate(found):
        assert len(results) >= 40
        wrong = {name: x for name, x in results.items() if not x[2] < 1e-10}
        assert not wrong, f"rank {rank}: {wrong}"
        assert {x[:2] for x in results.values()} == EVERY_COMBINATION


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_every_mask_as_by_one_rank(num_ranks):
    """Each mask meets other options in each world, so that none is always with the same."""
    assert_exact(run_ranks(cases.check_every_mask, num_ranks, num_ranks))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_mask_with_other_options(num_ranks):
    assert_exact(run_ranks(cases.check_every_mask, num_ranks, num_ranks + 2))


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 3), (3, 2)])
def test_every_mask_over_nodes(nodes, per_node):
    assert_exact(run_ranks(cases.check_nodes, nodes * per_node, nodes, nodes, per_node))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_narrow_dtypes_by_the_rule(dtype):
    for broken in run_ranks(cases.check_by_the_rule, 3, dtype, dtype.itemsize):
        assert not broken


def test_many_tokens_on_seven_ranks():
    assert max(run_ranks(cases.check_long_documents, 7)) < 1e-10


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_movement(num_ranks, balance):
    run_ranks(cases.check_movement, num_ranks, balance)


def test_group_cast_and_group_reduce():
    run_ranks(cases.check_group_operations, 3)


def test_a_stranger_to_the_group_is_told():
    assert run_ranks(cases.message_of_a_stranger, 3) == [
        *("no error", "no error", "this process is not a member of the group")
    ]


def test_deferred_maxima_and_nan():
    run_ranks(cases.check_tracker, 2)


def test_two_calls_at_once():
    run_ranks(cases.check_two_calls_at_once, 2)


def test_results_repeat_bitwise():
    assert all(run_ranks(cases.same_bits_twice, 3))


def spare(at, what, number):
    """Seconds that a rank waited for a journey."""
    return at[f"{what} there", number] - at[f"{what} wanted", number]


def test_the_next_stage_travels_while_one_is_computed():
    for forward, backward in run_ranks(cases.check_overlap, 4, 1):
        for at in (forward, backward):  # the first three journeys bring keys
            fetches = {f: n for n, f in enumerate((0, 1, 2) if at is forward else (0, 1, 3))}
            for fetch, stage in fetches.items():  # stage + 1 is the one that needs it
                assert at["all starts", fetch] < at["computing", stage]
                assert at["computed", stage] < at["all wanted", fetch]
                assert spare(at, "all", fetch) < cases.DELAY / 2, "it had the time to arrive"
        # Gradients of stage 1 travel while 2 is computed, those of 2 while 3 is.
        for journey, stage in ((2, 1), (4, 2)):
            assert backward["computed", stage] < backward["all starts", journey]
            assert backward["all starts", journey] < backward["computing", stage + 1]
            assert backward["computed", stage + 1] < backward["all wanted", journey]
            assert spare(backward, "all", journey) < cases.DELAY / 2


def test_over_nodes_both_steps_travel_while_something_is_computed():
    for forward, backward in run_ranks(cases.check_overlap, 4, 2):
        assert forward["between starts", 0] < forward["computing", 0]
        assert forward["computed", 0] < forward["between wanted", 0]
        for at in (forward, backward):
            # (step, its number) and the stage it travels beside; stages 1..3 need keys
            inside = (1, 2) if at is forward else (1, 3)
            steps = [("between", 0, 0), ("between", 1, 0), ("between", 2, 1)]
            steps += [("inside", number, n + 1) for n, number in enumerate(inside)]
            for step, number, stage in steps:
                assert at[f"{step} starts", number] < at["computing", stage]
                assert at["computed", stage] < at[f"{step} wanted", number]
                assert spare(at, step, number) < cases.DELAY / 2
        # Gradients of stage 1: inside while 2 is computed, between while 3 is.
        for step, number, stage in (("inside", 2, 2), ("between", 3, 3)):
            assert backward["computed", stage - 1] < backward[f"{step} starts", number]
            assert backward[f"{step} starts", number] < backward["computing", stage]
            assert spare(backward, step, number) < cases.DELAY / 2


def test_two_stages_of_remote_keys_are_alive_at_most():
    """One that is computed, and one that arrives."""
    assert run_ranks(cases.most_stages_alive, 3) == [[2, 2]] * 3


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("mask", "mask"),
        ("degree", "degree"),
        ("layout", "layout of the queries"),
        ("keep_remote_keys", "keep_remote_keys"),
        ("return_max_logits", "max_logits"),
        ("defer_max_logits", "max_logits"),
        ("sink", "sink"),
        ("softmax_scale", "softmax_scale"),
        ("dtype", "dtype"),
        ("heads", "heads_and_dims"),
        ("gradients", "need_of_gradients"),
        ("tracker", "heads_of_max_logits"),
        ("shift", "roll"),
        ("call", "call"),
    ],
)
def test_ranks_that_disagree_say_on_what(what, named):
    for message in run_ranks(cases.message_of_disagreement, 3, what, timeout=20):
        assert f"disagree on the {named}: rank 1" in message


def test_a_rank_with_an_old_key_is_found_when_asked_for():
    for message in run_ranks(cases.message_of_an_old_key, 2):
        assert "disagree on the mask: rank 1" in message


def test_a_rank_that_changes_its_options_alone_is_found_by_the_timeout():
    zero, one, two = run_ranks(cases.message_of_a_late_change, 3, timeout=20)
    for message in (zero, two):
        assert message.startswith("fetching keys for stage 1 of")
        assert "rank 1 failed at comparing softmax_scale" in message
        assert "max_logits='returned'" in message
    assert one.startswith("comparing softmax_scale") and "rank 0 failed at fetching keys" in one


@pytest.mark.parametrize(
    ("when", "named"),
    [
        ("forward", "fetching keys for stage 1 of"),
        ("hang", "fetching keys for stage 1 of"),
        ("backward", "fetching keys for stage 1 of"),
        ("agreement", "comparing softmax_scale="),
        ("maximum", "taking the maximum of max logits"),
    ],
)
def test_a_rank_that_leaves_or_hangs_is_named(when, named):
    zero, one, two = run_ranks(cases.die_on_rank_one, 3, when, timeout=20)
    assert one == "left"
    for message in (zero, two):
        assert named in message and "no sign of life from rank 1 of the group" in message
