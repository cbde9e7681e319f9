"""QK-Clip with real processes on gloo: ranks agree, and shards are clipped as the whole is."""

from __future__ import annotations

import numpy as np
from tests.distributed import clip_cases as cases

from keel.testing import run_ranks


def test_one_collective_whatever_the_number_of_layers() -> None:
    for found in run_ranks(cases.collectives_of_a_step, 2):
        assert [layers for layers, _ in found] == [1, 3, 7]
        assert all(calls == ["all_reduce"] for _, calls in found)


def test_ranks_stay_bit_identical_over_200_steps() -> None:
    one, two = run_ranks(cases.train, 2, 200)
    assert one["clipped"] == two["clipped"] > 100
    assert min(one["raised by others"], two["raised by others"]) > 100  # ranks saw other maxima
    for name, x in one["weights"].items():
        assert np.array_equal(x, two["weights"][name]), name
        assert np.isfinite(x).all()


def test_context_parallel_ranks_as_one() -> None:
    for errors in run_ranks(cases.check_context_parallel, 2):
        assert len(errors) > 60
        wrong = {name: error for name, error in errors.items() if not error < 1e-9}
        assert not wrong


def test_what_one_rank_knows_stops_all() -> None:
    run_ranks(cases.check_nan_and_found_inf, 2)


def test_fsdp2_shards() -> None:
    """The clip is made after the model was sharded."""
    for results in run_ranks(cases.in_each_mode, 2, "check_fsdp", False):
        assert len(results) == 3
        assert max(error for error, _ in results.values()) < 1e-6


def test_fsdp2_shards_that_came_later() -> None:
    results = run_ranks(cases.check_fsdp, 4, "compensated", True)
    assert max(error for error, _ in results) < 1e-6
    held = set().union(*(rows for _, rows in results))
    assert 0 in held and len(held) > 5  # empty, uneven and even shards


def test_tensor_parallel_shards() -> None:
    for results in run_ranks(cases.in_each_mode, 2, "check_tp"):
        for error, _, message in results.values():
            assert error < 1e-6
            assert "layer 0 has its heads spread over ranks: pass the group" in message


def test_both_at_once() -> None:
    results = run_ranks(cases.check_fsdp_and_tp, 4, "compensated")
    assert max(error for error, _ in results) < 1e-6


def test_a_sharded_model_in_training() -> None:
    for errors in run_ranks(cases.check_sharded_training, 2):
        assert len(errors) > 30 and max(errors.values()) < 1e-6
