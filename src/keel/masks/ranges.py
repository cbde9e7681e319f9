"""Token ranges: half-open intervals ``[start, end)`` and the set arithmetic of lists of them."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import SupportsIndex, overload

import torch


@dataclass(frozen=True, slots=True, order=True)
class AttnRange:
    """Tokens ``start <= i < end``; may be empty. Orders by start, then by end.

    >>> r = AttnRange(2, 10)
    >>> len(r), 9 in r, r.intersect((5, 20)), r.offset(3)
    (8, True, AttnRange(5, 10), AttnRange(5, 13))
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ValueError(
                f"range [{self.start}, {self.end}) starts below 0: tokens count from 0"
            )
        if self.end < self.start:
            raise ValueError(
                f"range [{self.start}, {self.end}) is reversed: give (start, end) with start <= end"
            )

    @classmethod
    def of(cls, value: RangeLike) -> AttnRange:
        """A range from itself or from a pair of integers."""
        if isinstance(value, AttnRange):
            return value
        try:
            start, end = value
        except (TypeError, ValueError):
            raise ValueError(f"a range must be a pair (start, end), got {value!r}") from None
        try:
            return cls(operator.index(start), operator.index(end))
        except TypeError:
            raise TypeError(f"a range must hold two integers, got {value!r}") from None

    @classmethod
    def from_range(cls, value: RangeLike, check: bool = False) -> AttnRange:
        """`of`. Ranges are checked when they are made, whatever `check` says; so everywhere."""
        return cls.of(value)

    def to_naive_range(self) -> tuple[int, int]:
        return self.start, self.end

    def clone(self) -> AttnRange:
        """Itself: ranges do not change."""
        return self

    @property
    def seqlen(self) -> int:
        """Number of tokens."""
        return self.end - self.start

    def __len__(self) -> int:
        return self.end - self.start

    def __repr__(self) -> str:
        return f"AttnRange({self.start}, {self.end})"

    def is_empty(self) -> bool:
        return self.start == self.end

    def __contains__(self, item: SupportsIndex | RangeLike) -> bool:
        """Whether a token, or every token of a range, lies in this range."""
        if isinstance(item, SupportsIndex):
            return self.start <= operator.index(item) < self.end
        other = AttnRange.of(item)
        return self.start <= other.start and other.end <= self.end

    def cut(self, start: int, end: int) -> AttnRange:
        """The part in [start, end); empty when they do not meet."""
        first = max(self.start, start)
        return AttnRange(first, max(first, min(self.end, end)))

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRange:
        """`cut`, where a side that is not given stays."""
        return self.cut(self.start if start is None else start, self.end if end is None else end)

    def intersect(self, other: RangeLike) -> AttnRange:
        """The common part; empty when there is none."""
        other = AttnRange.of(other)
        return self.cut(other.start, other.end)

    def intersect_size(self, other: RangeLike) -> int:
        """Number of tokens in both."""
        return len(self.intersect(other))

    def union_size(self, other: RangeLike) -> int:
        """Number of tokens in either."""
        return len(self) + len(AttnRange.of(other)) - self.intersect_size(other)

    def union(self, other: RangeLike) -> list[AttnRange]:
        """The tokens of both: one range if they overlap or touch, else two, ascending.

        >>> AttnRange(4, 6).union((0, 4)), AttnRange(4, 6).union((0, 3))
        ([AttnRange(0, 6)], [AttnRange(0, 3), AttnRange(4, 6)])
        """
        return [*AttnRanges([self, other]).merge()] or [self]

    def diff_by(self, other: RangeLike) -> list[AttnRange]:
        """The tokens of the *other* that are not in this one, as up to two ranges.

        >>> AttnRange(2, 4).diff_by((0, 9))
        [AttnRange(0, 2), AttnRange(4, 9)]
        """
        return [*AttnRanges([other]).find_hole_ranges(AttnRanges([self]))]

    def is_subrange_of(self, other: RangeLike) -> bool:
        """Whether both ends lie in the other one."""
        return self in AttnRange.of(other)

    def is_overlap_with(self, other: RangeLike) -> bool:
        return self.intersect_size(other) > 0

    def offset(self, n: int) -> AttnRange:
        """The range moved by n tokens."""
        return AttnRange(self.start + n, self.end + n)


RangeLike = AttnRange | tuple[int, int] | Sequence[int]


class AttnRanges(Sequence[AttnRange]):
    """A list of ranges in any order, overlapping or not; the set operations sort and merge.

    >>> ranges = AttnRanges.from_ranges([(8, 12), (0, 4), (4, 6)])
    >>> ranges.merge()
    AttnRanges([(0, 6), (8, 12)])
    >>> ranges.find_hole_ranges(AttnRanges.from_ranges([(2, 9)]))
    AttnRanges([(0, 2), (9, 12)])
    >>> ranges.make_range_local((9, 11))
    AttnRange(7, 9)
    """

    __slots__ = ("_ranges",)

    def __init__(self, ranges: Iterable[RangeLike] = ()) -> None:
        self._ranges = [AttnRange.of(r) for r in ranges]

    @classmethod
    def from_ranges(cls, ranges: Iterable[RangeLike], check: bool = False) -> AttnRanges:
        """From pairs (start, end)."""
        return cls(ranges)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Iterable[int], seq_len: int | None = None) -> AttnRanges:
        """The documents between cumulative bounds 0 = c0 <= c1 <= ... <= cn (= seq_len)."""
        bounds = [operator.index(c) for c in cu_seqlens]
        if not bounds or bounds[0] != 0:
            raise ValueError(f"cu_seqlens must start with 0, got {bounds[:4]}")
        for n, (a, b) in enumerate(pairwise(bounds)):
            if b < a:
                raise ValueError(f"cu_seqlens must not decrease, got {a} then {b} at {n + 1}")
        if seq_len is not None and bounds[-1] != seq_len:
            raise ValueError(f"cu_seqlens must end with seq_len={seq_len}, got {bounds[-1]}")
        return cls(pairwise(bounds))

    def to_list(self) -> list[tuple[int, int]]:
        """Pairs (start, end)."""
        return [(r.start, r.end) for r in self._ranges]

    to_naive_ranges = to_list

    def clone(self) -> AttnRanges:
        """A list of its own with the same ranges."""
        return AttnRanges(self._ranges)

    def to_tensor(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """(n, 2) int32 tensor."""
        return torch.tensor(self.to_list(), dtype=torch.int32, device=device).reshape(-1, 2)

    def is_cu_seqlens(self, seqlen: int) -> bool:
        """Whether the ranges follow each other from 0 to seqlen without gaps."""
        bounds = [0, *(r.end for r in self._ranges)]
        return bounds[-1] == seqlen and [r.start for r in self._ranges] == bounds[:-1]

    def to_cu_seqlens(self, seq_len: int | None = None) -> list[int]:
        """Cumulative bounds; the ranges must follow each other from 0 (to seq_len) without gaps."""
        bounds = [0]
        for n, r in enumerate(self._ranges):
            if r.start != bounds[-1]:
                raise ValueError(
                    f"range {n} starts at {r.start} where {bounds[-1]} was expected: "
                    "only ranges that follow each other from 0 have cu_seqlens"
                )
            bounds.append(r.end)
        if seq_len is not None and bounds[-1] != seq_len:
            raise ValueError(f"the ranges end at {bounds[-1]}, not at seq_len={seq_len}")
        return bounds

    def append(self, value: RangeLike, check: bool = False) -> None:
        self._ranges.append(AttnRange.of(value))

    def insert(self, idx: int, value: RangeLike, check: bool = False) -> None:
        """Before the range at idx; at the end if there is none."""
        self._ranges.insert(idx, AttnRange.of(value))

    def extend(self, values: Iterable[RangeLike], check: bool = False) -> None:
        self._ranges.extend([AttnRange.of(r) for r in values])

    def pop(self, idx: int = -1) -> AttnRange:
        """Takes a range out, the last one if not told."""
        return self._ranges.pop(idx)

    def __setitem__(self, index: int, value: RangeLike) -> None:
        self._ranges[index] = AttnRange.of(value)

    @property
    def size(self) -> int:
        """Number of ranges."""
        return len(self._ranges)

    def is_empty(self) -> bool:
        """Whether there are no ranges."""
        return not self._ranges

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[AttnRange]:
        return iter(self._ranges)

    @overload
    def __getitem__(self, index: int) -> AttnRange: ...
    @overload
    def __getitem__(self, index: slice) -> AttnRanges: ...
    def __getitem__(self, index: int | slice) -> AttnRange | AttnRanges:
        if isinstance(index, slice):
            return AttnRanges(self._ranges[index])
        return self._ranges[index]

    __hash__ = None  # type: ignore[assignment]  # it can grow

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttnRanges):
            return NotImplemented
        return self._ranges == other._ranges

    def __repr__(self) -> str:
        return f"AttnRanges({self.to_list()})"

    def sort(self) -> AttnRanges:
        """A copy in ascending order."""
        return AttnRanges(sorted(self._ranges))

    def merge(self) -> AttnRanges:
        """The same tokens as few ascending ranges: joins what overlaps or touches, no empties."""
        merged: list[list[int]] = []
        for r in sorted(self._ranges):
            if r.is_empty():
                continue
            if merged and r.start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], r.end)
            else:
                merged.append([r.start, r.end])
        return AttnRanges(merged)

    def merge_with_split_alignment(self, split_alignment: int = 1) -> AttnRanges:
        """`merge` of ranges widened to multiples of split_alignment.

        >>> AttnRanges([(1, 3), (7, 9)]).merge_with_split_alignment(4)
        AttnRanges([(0, 12)])
        """
        if split_alignment < 1:
            raise ValueError(f"split_alignment must be at least 1, got {split_alignment}")
        a = split_alignment
        wide = [(r.start // a * a, -(-r.end // a) * a) for r in self.clear_empty()]
        return AttnRanges(wide).merge()

    def clear_empty(self) -> AttnRanges:
        """A copy without empty ranges."""
        return AttnRanges(r for r in self._ranges if not r.is_empty())

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRanges:
        """The parts in [start, end), without those that become empty."""
        return AttnRanges(r.truncate(start, end) for r in self._ranges).clear_empty()

    def chunk(self, chunk_size: int, check: bool = False) -> list[AttnRanges]:
        """Packs the tokens, in the order of the ranges, into chunks of chunk_size tokens each.

        The last chunk may be shorter. With `check`, ranges that overlap are an error.

        >>> AttnRanges.from_ranges([(0, 3), (10, 15)]).chunk(4)
        [AttnRanges([(0, 3), (10, 11)]), AttnRanges([(11, 15)])]
        """
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
        if check and not self.is_non_overlap():
            raise ValueError(f"the ranges to chunk overlap: {self}")
        chunks: list[AttnRanges] = []
        room = 0
        for r in self._ranges:
            start = r.start
            while start < r.end:
                if room == 0:
                    chunks.append(AttnRanges())
                    room = chunk_size
                end = min(r.end, start + room)
                chunks[-1].append((start, end))
                room -= end - start
                start = end
        return chunks

    def find_hole_ranges(self, other: AttnRanges) -> AttnRanges:
        """Tokens of self that are not in other, merged."""
        holes: list[tuple[int, int]] = []
        taken = other.merge()._ranges
        n = 0
        for r in self.merge():
            start = r.start
            while n < len(taken) and taken[n].end <= start:
                n += 1
            m = n
            while m < len(taken) and taken[m].start < r.end:
                if start < taken[m].start:
                    holes.append((start, taken[m].start))
                start = taken[m].end
                m += 1
            if start < r.end:
                holes.append((start, r.end))
        return AttnRanges(holes)

    def find_overlap_ranges(self, other: AttnRanges) -> AttnRanges:
        """Tokens in both, merged."""
        found: list[AttnRange] = []
        ours, theirs = self.merge()._ranges, other.merge()._ranges
        n = m = 0
        while n < len(ours) and m < len(theirs):
            common = ours[n].intersect(theirs[m])
            if not common.is_empty():
                found.append(common)
            if ours[n].end < theirs[m].end:
                n += 1
            else:
                m += 1
        return AttnRanges(found)

    def make_range_local(self, value: RangeLike) -> AttnRange:
        """The range in packed coordinates: token t becomes the number of own tokens before t.

        Packed means merged: ascending, each token once.
        """
        return self.make_ranges_local([value])[0]

    def make_ranges_local(self, values: Iterable[RangeLike]) -> AttnRanges:
        """`make_range_local` of each range; merges self only once."""
        merged = self.merge()._ranges
        starts = [r.start for r in merged]
        packed = [0]
        for r in merged:
            packed.append(packed[-1] + len(r))
        local = AttnRanges()
        for r in map(AttnRange.of, values):
            n = bisect_right(starts, r.start) - 1
            if n < 0 or r not in merged[n]:
                raise ValueError(f"{r} is not inside one of the ranges {[*merged]}")
            local.append(r.offset(packed[n] - merged[n].start))
        return local

    def is_sorted(self) -> bool:
        return all(a <= b for a, b in pairwise(self._ranges))

    def is_merged(self) -> bool:
        """Ascending, not empty, with a gap between any two."""
        gaps = all(a.end < b.start for a, b in pairwise(self._ranges))
        return gaps and not any(r.is_empty() for r in self._ranges)

    def is_non_overlap(self) -> bool:
        return self.total_seqlen == self.union_size()

    @property
    def total_seqlen(self) -> int:
        """Number of tokens; one that lies in two ranges counts twice."""
        return sum(len(r) for r in self._ranges)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest range; 0 without ranges."""
        return max((len(r) for r in self._ranges), default=0)

    @property
    def start(self) -> int:
        """The lowest start."""
        self._require_some("start")
        return min(r.start for r in self._ranges)

    @property
    def end(self) -> int:
        """The highest end."""
        self._require_some("end")
        return max(r.end for r in self._ranges)

    def _require_some(self, what: str) -> None:
        if not self._ranges:
            raise ValueError(f"AttnRanges without ranges have no {what}: check len() first")

    @property
    def points(self) -> list[int]:
        """All bounds, ascending, each once."""
        return sorted({p for r in self._ranges for p in (r.start, r.end)})

    def union_size(self) -> int:
        """Number of different tokens."""
        return self.merge().total_seqlen

    def intersect_size(self) -> int:
        """How many tokens too many the ranges hold: total_seqlen - union_size()."""
        return self.total_seqlen - self.union_size()

    def intersect_size_with(self, other: AttnRanges) -> int:
        """Number of different tokens in both."""
        return self.find_overlap_ranges(other).total_seqlen
