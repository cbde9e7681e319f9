"""QK-Clip with real processes on gloo: ranks agree, and shards are clipped as the whole is."""

from __future__ import annotations

import numpy as np
import pytest
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


@pytest.mark.parametrize(("ranks", "late"), [(2, False), (4, True)])
def test_fsdp2_shards(ranks: int, late: bool) -> None:
    held = set()
    for results in run_ranks(cases.in_each_mode, ranks, "check_fsdp", late):
        assert len(results) == 3
        assert max(error for error, _ in results.values()) < 1e-6
        held |= results["group"][1]
    assert 0 in held and len(held) > 5  # empty, uneven and even shards


def test_tensor_parallel_shards() -> None:
    for results in run_ranks(cases.in_each_mode, 2, "check_tp"):
        for error, _, message in results.values():
            assert error < 1e-6
            assert "layer 0 has its heads spread over ranks: pass the group" in message


def test_both_at_once() -> None:
    for results in run_ranks(cases.in_each_mode, 4, "check_fsdp_and_tp"):
        assert max(error for error, _ in results.values()) < 1e-6


def test_a_sharded_model_in_training() -> None:
    for errors in run_ranks(cases.check_sharded_training, 2):
        assert len(errors) > 30 and max(errors.values()) < 1e-6
