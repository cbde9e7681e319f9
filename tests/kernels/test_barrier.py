"""Marks and waits of a barrier, in the interpreter: one after the other, on a clock of polls."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.overlap import KernelBarrier, barrier_misses

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)


def barrier(target: int) -> KernelBarrier:
    return KernelBarrier(target, device="cpu", timeout_us=20)


def rounds(held: KernelBarrier, marks: list[int]) -> list[int]:
    """Misses after each wait, with so many marks before each."""
    counts = []
    for some in marks:
        for _ in range(some):
            held.mark()
        held.wait()
        counts.append(held.misses())
    return counts


@pytest.mark.parametrize("target", [1, 3])
def test_marks_are_used_up(target):
    assert rounds(barrier(target), [target] * 4) == [0, 0, 0, 0]


def test_too_few_marks_are_missed():
    assert rounds(barrier(2), [1]) == [1]
    assert rounds(barrier(1), [0]) == [1]


def test_a_late_mark_does_not_release_the_next_wait():
    held = barrier(2)
    assert rounds(held, [1]) == [1]
    held.mark()  # the one that was missing, late
    assert rounds(held, [1]) == [2]  # 2 marks came since, but one of them was owed
    assert rounds(barrier(1), [0, 2, 1, 1]) == [1, 1, 1, 1]  # late and on time


def test_what_was_never_launched_is_forgotten():
    """A debt that nobody pays costs one more miss, not one in every round."""
    assert rounds(barrier(1), [0, 1, 1, 1]) == [1, 2, 2, 2]
    assert rounds(barrier(2), [0, 0, 0, 2, 2, 2]) == [1, 2, 3, 4, 4, 4]


def test_marks_that_come_early_stay():
    held = barrier(1)
    for _ in range(3):
        held.mark()
    assert rounds(held, [0, 0, 0, 0]) == [0, 0, 0, 1]


@given(st.integers(1, 3), st.lists(st.integers(0, 4), max_size=8))
def test_after_any_past_two_good_rounds_are_enough(target, past):
    """And no mark is left over: a round without marks is missed."""
    held = barrier(target)
    rounds(held, past)
    held.flag[0].clamp_(max=target)  # of marks too many, at most a round's
    rounds(held, [target, target])
    before = held.misses()
    assert rounds(held, [target]) == [before]
    surplus = int(held.flag[0])
    rounds(held, [0] * (surplus // target))
    assert rounds(held, [0]) == [before + 1]


def test_a_wait_takes_no_longer_than_its_bound():
    held = barrier(1)
    held.wait()
    assert int(held.flag[3]) <= 21_000  # nanoseconds of the clock of polls
    held.flag[3] = 0
    held.mark()
    held.wait()  # pays the debt, and waits for its own
    assert 0 < int(held.flag[3]) <= 21_000


def test_misses_are_said_once_and_counted_for_the_device(caplog):
    before = barrier_misses("cpu")
    held, other = barrier(1), barrier(1)
    held.wait()
    other.wait()
    with caplog.at_level(logging.WARNING, "keel"):
        assert held.misses() == held.misses() == 1
    assert len([r for r in caplog.records if "gave up" in r.getMessage()]) == 1
    assert "20 us" in caplog.text
    assert barrier_misses("cpu") == before + 2


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="target must be an int, got True"):
        KernelBarrier(True, device="cpu")
    with pytest.raises(ValueError, match="target must be at least 0, got -1"):
        KernelBarrier(-1, device="cpu")
    with pytest.raises(ValueError, match="timeout_us must be at least 1, got 0"):
        KernelBarrier(1, device="cpu", timeout_us=0)
    with pytest.raises(ValueError, match="settle_us must be at most 1000, got 2000"):
        KernelBarrier(1, device="cpu", settle_us=2000)
    with pytest.raises(ValueError, match=r"holds a stream of a CUDA device, got meta"):
        KernelBarrier(1, device="meta")


def test_a_target_of_zero_launches_and_allocates_nothing(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("launched")

    monkeypatch.setattr("keel.kernels.barrier.launch", refuse)
    monkeypatch.setattr(torch, "zeros", refuse)
    held = KernelBarrier(0)
    held.mark()
    held.wait()
    assert held.misses() == 0 and held.flag is None
