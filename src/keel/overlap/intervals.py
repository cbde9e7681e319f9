"""Sets of time as sorted, disjoint intervals: unions, intersections, complements, lengths.

A set is an int64 array (n, 2) of [start, end) rows in ascending order that neither overlap nor
touch; `union` makes one out of any rows. Times are integers (nanoseconds), so every length is
exact and identities between them hold without a tolerance.
"""

from __future__ import annotations

import numpy as np

from keel.masks.arrays import Ints, ragged_range

EMPTY: Ints = np.empty((0, 2), np.int64)


def union(start: Ints, end: Ints) -> Ints:
    """The set of times that any of the intervals [start[i], end[i]) covers; empty ones vanish.

    >>> union(np.array([5, 0, 2]), np.array([9, 3, 4])).tolist()
    [[0, 4], [5, 9]]
    """
    real = end > start
    start, end = start[real], end[real]
    if len(start) == 0:
        return EMPTY
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.ones(len(start), bool)
    first[1:] = start[1:] > end[:-1]
    last = np.ones(len(start), bool)
    last[:-1] = first[1:]
    return np.stack([start[first], end[last]], axis=1)


def unite(*sets: Ints) -> Ints:
    """The union of sets."""
    rows = np.concatenate([EMPTY, *sets])
    return union(rows[:, 0], rows[:, 1])


def intersect(a: Ints, b: Ints) -> Ints:
    """Times in both sets.

    >>> intersect(np.array([[0, 4], [5, 9]]), np.array([[3, 6], [8, 12]])).tolist()
    [[3, 4], [5, 6], [8, 9]]
    """
    low = np.searchsorted(b[:, 1], a[:, 0], side="right")
    high = np.searchsorted(b[:, 0], a[:, 1], side="left")
    count = np.maximum(high - low, 0)
    mine = np.repeat(np.arange(len(a)), count)
    other = ragged_range(low, count)
    start = np.maximum(a[mine, 0], b[other, 0])
    end = np.minimum(a[mine, 1], b[other, 1])
    return np.stack([start, end], axis=1)


def gaps(a: Ints, start: int, end: int) -> Ints:
    """Times of [start, end) that are not in the set.

    >>> gaps(np.array([[2, 4], [6, 8]]), 0, 8).tolist()
    [[0, 2], [4, 6]]
    """
    a = intersect(a, union(np.array([start]), np.array([end])))
    return union(np.append(start, a[:, 1]), np.append(a[:, 0], end))


def subtract(a: Ints, b: Ints) -> Ints:
    """Times in the first set alone."""
    if len(a) == 0:
        return EMPTY
    return intersect(a, gaps(b, int(a[0, 0]), int(a[-1, 1])))


def length(a: Ints) -> int:
    """How long all intervals are together."""
    return int((a[:, 1] - a[:, 0]).sum())
