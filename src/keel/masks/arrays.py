"""Numpy idioms that planning stands on: ragged ranges and fast sorts of small integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def ragged_arange(lengths: Ints) -> Ints:
    """0..n-1 for each n in lengths, concatenated.

    >>> ragged_arange(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return ragged_range(np.zeros(len(lengths), np.int64), lengths)


def ragged_range(starts: Ints, lengths: Ints) -> Ints:
    """a..a+n-1 for each a of starts and n of lengths, concatenated.

    >>> ragged_range(np.array([7, 0, 4]), np.array([2, 0, 3])).tolist()
    [7, 8, 4, 5, 6]
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + lengths, lengths)


def ascending(values: Ints) -> Ints:
    """Sorted values. Planning sorts what is nearly sorted, where a merge sort takes little time."""
    return np.sort(values, kind="stable")


def distinct(values: Ints) -> Ints:
    """Sorted distinct values; several times faster than np.unique, which hashes."""
    values = ascending(values)
    keep = np.ones(len(values), bool)
    keep[1:] = values[1:] > values[:-1]
    return values[keep]


def sort_with_index(key: Ints) -> tuple[Ints, Ints]:
    """(sorted, order) of non-negative integers, stable: sorted == key[order].

    Sorting values is two to four times faster than sorting an index, so key and index are packed
    into one integer where 63 bits are enough for both.
    """
    width = len(key).bit_length()
    if int(key.max(initial=0)).bit_length() + width > 63:
        order = np.argsort(key, kind="stable")
        return key[order], order
    packed = ascending((key << width) | np.arange(len(key)))
    return packed >> width, packed & ((1 << width) - 1)


def order_by(*keys: Ints) -> Ints:
    """The stable order by non-negative keys, the most significant first.

    >>> order_by(np.array([1, 0, 1]), np.array([5, 7, 4])).tolist()
    [1, 2, 0]
    """
    widths = [int(key.max(initial=0)).bit_length() for key in keys]
    if sum(widths) > 63:
        return np.lexsort(keys[::-1])
    packed = keys[0]
    for key, width in zip(keys[1:], widths[1:], strict=True):
        packed = (packed << width) | key
    return sort_with_index(packed)[1]
