"""Interval sets against brute force: a set of integers as a row of booleans."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keel.overlap import intervals

SIZE = 40
PAIRS = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=12)


def grid(pairs: list[tuple[int, int]]) -> np.ndarray:
    cells = np.zeros(SIZE, bool)
    for start, end in pairs:
        cells[start:end] = True
    return cells


def as_set(pairs: list[tuple[int, int]]) -> np.ndarray:
    rows = np.array(pairs, np.int64).reshape(-1, 2)
    return intervals.union(rows[:, 0], rows[:, 1])


def assert_is(got: np.ndarray, cells: np.ndarray) -> None:
    """The same times, as few intervals as possible, in order."""
    edges = np.flatnonzero(np.diff(np.r_[False, cells, False]))
    np.testing.assert_array_equal(got, edges.reshape(-1, 2))
    assert intervals.length(got) == cells.sum()


@given(PAIRS)
def test_union(a: list[tuple[int, int]]) -> None:
    assert_is(as_set(a), grid(a))


@given(PAIRS, PAIRS)
def test_two_sets(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    x, y = as_set(a), as_set(b)
    assert_is(intervals.unite(x, y), grid(a) | grid(b))
    assert_is(intervals.intersect(x, y), grid(a) & grid(b))
    assert_is(intervals.subtract(x, y), grid(a) & ~grid(b))


@given(PAIRS, st.integers(0, SIZE), st.integers(0, SIZE))
def test_gaps(a: list[tuple[int, int]], start: int, end: int) -> None:
    assert_is(intervals.gaps(as_set(a), start, end), grid([(start, end)]) & ~grid(a))
