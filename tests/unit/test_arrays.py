"""Sorts of packed integers against numpy's own, also where the bits do not fit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keel.masks.arrays import distinct, order_by, ragged_arange, ragged_range, sort_with_index

keys = st.sampled_from([1, 3, 1 << 20, 1 << 40, 1 << 61]).flatmap(
    lambda most: st.lists(st.integers(0, most), max_size=30)
)


@given(keys)
def test_sort_with_index(values: list[int]) -> None:
    key = np.array(values, np.int64)
    found, order = sort_with_index(key)
    np.testing.assert_array_equal(order, np.argsort(key, kind="stable"))
    np.testing.assert_array_equal(found, np.sort(key))


@given(st.integers(1, 3).flatmap(lambda n: st.lists(st.tuples(*[st.integers(0, 9)] * n))), keys)
def test_order_by(rows: list[tuple[int, ...]], last: list[int]) -> None:
    count = min(len(rows), len(last))
    table = np.array(rows[:count], np.int64).reshape(count, len(rows[0]) if rows else 0)
    columns = [*table.T, np.array(last[:count], np.int64)]
    np.testing.assert_array_equal(order_by(*columns), np.lexsort(columns[::-1]))


@given(keys)
def test_distinct(values: list[int]) -> None:
    key = np.array(values, np.int64)
    np.testing.assert_array_equal(distinct(key), np.unique(key))


@given(st.lists(st.integers(0, 5)))
def test_ragged_arange(lengths: list[int]) -> None:
    want = [n for length in lengths for n in range(length)]
    assert ragged_arange(np.array(lengths, np.int64)).tolist() == want


@given(st.lists(st.tuples(st.integers(-9, 1 << 40), st.integers(0, 5))))
def test_ragged_range(ranges: list[tuple[int, int]]) -> None:
    starts, lengths = np.array(ranges, np.int64).reshape(-1, 2).T
    want = [start + n for start, length in ranges for n in range(length)]
    assert ragged_range(starts, lengths).tolist() == want
