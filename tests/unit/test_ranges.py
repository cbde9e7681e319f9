"""AttnRange and AttnRanges against Python sets of tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import spans

from keel.masks import AttnRange, AttnRanges

Pair = tuple[int, int]

short = st.tuples(st.integers(0, 30), st.integers(0, 5)).map(lambda p: (p[0], p[0] + p[1]))
pairs = short | spans(40)  # mostly short ones: long ones merge to a single range
pair_lists = st.lists(short, max_size=8) | st.lists(pairs, max_size=5)


def tokens(ranges: AttnRanges | list[Pair]) -> set[int]:
    values = ranges.to_list() if isinstance(ranges, AttnRanges) else ranges
    return {t for start, end in values for t in range(start, end)}


@given(pairs, pairs, st.integers(0, 40))
def test_range_is_a_set_of_tokens(a: Pair, b: Pair, token: int) -> None:
    ra, rb = AttnRange.of(a), AttnRange(*b)
    sa, sb = set(range(*a)), set(range(*b))
    assert len(ra) == ra.seqlen == len(sa)
    assert ra.is_empty() == (not sa)
    assert (token in ra) == (token in sa) == (np.int64(token) in ra)
    if sb:
        assert (rb in ra) == (b in ra) == (sb <= sa)
    assert tokens([(ra.intersect(b).start, ra.intersect(b).end)]) == sa & sb
    assert ra.intersect_size(rb) == len(sa & sb)
    assert ra.union_size(rb) == len(sa | sb)
    assert ra.is_overlap_with(b) == bool(sa & sb)
    assert ra.cut(*b) == ra.intersect(rb)
    assert ra.offset(3) == AttnRange(a[0] + 3, a[1] + 3)


@given(pairs, pairs, st.none() | st.integers(0, 40), st.none() | st.integers(0, 40))
def test_parts_and_sums_of_ranges(a: Pair, b: Pair, start: int | None, end: int | None) -> None:
    ra, rb = AttnRange(*a), AttnRange.from_range(b, check=True)
    sa, sb = set(range(*a)), set(range(*b))
    united = ra.union(b)
    assert tokens([r.to_naive_range() for r in united]) == sa | sb
    assert len(united) == (2 if sa and sb and (a[1] < b[0] or b[1] < a[0]) else 1)
    assert united == sorted(united)
    left = ra.diff_by(rb)
    assert tokens([r.to_naive_range() for r in left]) == sb - sa
    assert len(left) <= 2 and not any(r.is_empty() for r in left)
    assert ra.is_subrange_of(b) == (b[0] <= a[0] and a[1] <= b[1])
    kept = {t for t in sa if (start is None or t >= start) and (end is None or t < end)}
    assert set(range(*ra.truncate(start, end).to_naive_range())) == kept
    assert ra.clone() == ra


def test_range_accepts_pairs_of_integers() -> None:
    assert AttnRange.of([np.int32(1), 4]) == AttnRange(1, 4)
    assert AttnRange.of(AttnRange(1, 4)) == AttnRange(1, 4)
    assert hash(AttnRange(1, 4)) == hash(AttnRange(1, 4))
    assert AttnRange(1, 4) < AttnRange(1, 5) < AttnRange(2, 3)


def test_range_rejects_nonsense() -> None:
    with pytest.raises(ValueError, match=r"\[-1, 3\) starts below 0"):
        AttnRange(-1, 3)
    with pytest.raises(ValueError, match=r"\[5, 3\) is reversed"):
        AttnRange(5, 3)
    with pytest.raises(ValueError, match=r"pair \(start, end\), got \(1, 2, 3\)"):
        AttnRange.of((1, 2, 3))
    with pytest.raises(ValueError, match=r"pair \(start, end\), got 7"):
        AttnRange.of(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"two integers, got \(0, 1.5\)"):
        AttnRange.of((0, 1.5))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="starts below 0"):
        AttnRange(1, 2).offset(-2)


@given(pair_lists)
def test_one_list_of_ranges(values: list[Pair]) -> None:
    ranges, content = AttnRanges.from_ranges(values), tokens(values)
    merged = ranges.merge()
    assert tokens(merged) == content
    assert merged.is_merged() and merged.is_sorted() and merged.is_non_overlap()
    assert all(a.end < b.start for a, b in pairwise(merged))
    assert ranges.is_merged() == (ranges == merged)
    assert ranges.is_sorted() == (values == sorted(values))
    assert ranges.sort().to_list() == sorted(values)
    assert ranges.to_list() == values, "operations must not change their operand"
    assert ranges.total_seqlen == sum(b - a for a, b in values)
    assert ranges.max_seqlen == max((b - a for a, b in values), default=0)
    assert ranges.union_size() == len(content)
    assert ranges.intersect_size() == ranges.total_seqlen - len(content)
    assert ranges.is_non_overlap() == (ranges.total_seqlen == len(content))
    assert ranges.points == sorted({x for pair in values for x in pair})
    if values:
        assert ranges.start == min(a for a, _ in values)
        assert ranges.end == max(b for _, b in values)
    assert ranges.to_tensor().tolist() == [list(pair) for pair in values]


@settings(max_examples=300)
@given(pair_lists, pair_lists)
def test_two_lists_of_ranges(a: list[Pair], b: list[Pair]) -> None:
    ra, rb = AttnRanges.from_ranges(a), AttnRanges.from_ranges(b)
    hole, overlap = ra.find_hole_ranges(rb), ra.find_overlap_ranges(rb)
    assert tokens(hole) == tokens(a) - tokens(b)
    assert tokens(overlap) == tokens(a) & tokens(b)
    assert hole.is_merged() and overlap.is_merged()
    assert ra.intersect_size_with(rb) == len(tokens(a) & tokens(b))


@given(pair_lists, st.integers(1, 50))
def test_chunk_packs_tokens_in_order(values: list[Pair], chunk_size: int) -> None:
    chunks = AttnRanges.from_ranges(values).chunk(chunk_size)
    packed = [t for chunk in chunks for r in chunk for t in range(r.start, r.end)]
    assert packed == [t for pair in values for t in range(*pair)]
    assert all(chunk.total_seqlen == chunk_size for chunk in chunks[:-1])
    assert all(0 < chunk.total_seqlen <= chunk_size for chunk in chunks)


@given(pair_lists, pairs)
def test_local_coordinates_count_own_tokens(values: list[Pair], value: Pair) -> None:
    ranges, order = AttnRanges.from_ranges(values), sorted(tokens(values))
    wanted = list(range(*value))
    if not wanted:
        return
    if set(wanted) <= set(order):
        local = ranges.make_range_local(value)
        assert [order[n] for n in range(local.start, local.end)] == wanted
        assert ranges.make_ranges_local([value, value]).to_list() == [(local.start, local.end)] * 2
    else:
        with pytest.raises(ValueError, match="is not inside"):
            ranges.make_range_local(value)


def test_local_range_may_span_ranges_that_touch() -> None:
    ranges = AttnRanges.from_ranges([(20, 25), (5, 8), (8, 10)])
    assert ranges.make_range_local((6, 10)) == AttnRange(1, 5)
    assert ranges.make_range_local((21, 25)) == AttnRange(6, 10)
    with pytest.raises(ValueError, match="is not inside"):
        ranges.make_range_local((9, 21))


def test_cu_seqlens_round_trip() -> None:
    ranges = AttnRanges.from_cu_seqlens(torch.tensor([0, 3, 3, 9]), 9)
    assert ranges.to_list() == [(0, 3), (3, 3), (3, 9)]
    assert ranges.to_cu_seqlens() == [0, 3, 3, 9]
    assert AttnRanges.from_cu_seqlens([0]).to_cu_seqlens() == [0]
    with pytest.raises(ValueError, match="start with 0"):
        AttnRanges.from_cu_seqlens([1, 3], 3)
    with pytest.raises(ValueError, match="start with 0"):
        AttnRanges.from_cu_seqlens([], 0)
    with pytest.raises(ValueError, match="not decrease, got 5 then 3 at 2"):
        AttnRanges.from_cu_seqlens([0, 5, 3], 3)
    with pytest.raises(ValueError, match="end with seq_len=8, got 5"):
        AttnRanges.from_cu_seqlens([0, 5], 8)
    with pytest.raises(ValueError, match="range 1 starts at 4 where 3 was expected"):
        AttnRanges.from_ranges([(0, 3), (4, 5)]).to_cu_seqlens()


@given(pair_lists, st.none() | st.integers(0, 40), st.none() | st.integers(0, 40))
def test_parts_of_a_list(values: list[Pair], start: int | None, end: int | None) -> None:
    ranges = AttnRanges.from_ranges(values, check=True)
    some = [p for p in values if p[0] < p[1]]
    assert ranges.clear_empty().to_naive_ranges() == some
    cut = [
        (max(a, a if start is None else start), min(b, b if end is None else end)) for a, b in some
    ]
    assert ranges.truncate(start, end).to_list() == [p for p in cut if p[0] < p[1]]
    for alignment in (1, 4):
        wide = ranges.merge_with_split_alignment(alignment)
        want = {t // alignment for t in tokens(ranges)}
        assert tokens(wide) == {t for t in range(50) if t // alignment in want}
        assert wide.is_merged() and all(x % alignment == 0 for x in wide.points)
    assert ranges.to_list() == values  # as it was
    if not ranges.is_non_overlap():
        with pytest.raises(ValueError, match="overlap"):
            ranges.chunk(3, check=True)
    else:
        assert ranges.chunk(3, check=True) == ranges.chunk(3)


def test_changes_of_a_list() -> None:
    ranges = AttnRanges.from_ranges([(0, 4), (4, 6)])
    other = ranges.clone()
    other.insert(1, (7, 8), check=True)
    other.insert(99, (8, 9))
    assert other.to_list() == [(0, 4), (7, 8), (4, 6), (8, 9)] and other.size == 4
    assert other.pop() == AttnRange(8, 9) and other.pop(0) == AttnRange(0, 4)
    other[0] = (1, 2)
    assert other.to_list() == [(1, 2), (4, 6)]
    assert ranges.to_list() == [(0, 4), (4, 6)] and not ranges.is_empty()
    assert AttnRanges().is_empty() and AttnRanges().size == 0
    with pytest.raises(IndexError):
        AttnRanges().pop()
    with pytest.raises(ValueError, match="at least 1"):
        ranges.merge_with_split_alignment(0)


def test_cu_seqlens_are_recognised() -> None:
    ranges = AttnRanges.from_ranges([(0, 4), (4, 4), (4, 6)])
    assert ranges.is_cu_seqlens(6) and not ranges.is_cu_seqlens(7)
    assert ranges.to_cu_seqlens(6) == [0, 4, 4, 6]
    assert not AttnRanges([(0, 4), (5, 6)]).is_cu_seqlens(6)
    assert not AttnRanges([(1, 6)]).is_cu_seqlens(6)
    assert AttnRanges().is_cu_seqlens(0) and not AttnRanges().is_cu_seqlens(1)
    with pytest.raises(ValueError, match="end at 6, not at seq_len=7"):
        ranges.to_cu_seqlens(7)


def test_behaves_like_a_list() -> None:
    ranges = AttnRanges()
    ranges.append((4, 9))
    ranges.extend([AttnRange(0, 2), [9, 9]])
    assert len(ranges) == 3 and ranges[0] == AttnRange(4, 9) and ranges[-1].is_empty()
    assert list(ranges) == [AttnRange(4, 9), AttnRange(0, 2), AttnRange(9, 9)]
    assert ranges[:2] == AttnRanges([(4, 9), (0, 2)]) and ranges != AttnRanges()
    assert ranges != [(4, 9)] and repr(ranges[:1]) == "AttnRanges([(4, 9)])"
    assert AttnRange(0, 2) in ranges
    with pytest.raises(TypeError, match="unhashable"):
        hash(ranges)
    with pytest.raises(ValueError, match="reversed"):
        ranges.append((3, 1))


def test_empty_list() -> None:
    none = AttnRanges()
    assert none.merge() == none and none.chunk(4) == [] and none.points == []
    assert none.to_tensor().shape == (0, 2) and none.to_tensor().dtype == torch.int32
    assert none.total_seqlen == none.max_seqlen == none.union_size() == 0
    with pytest.raises(ValueError, match="have no start"):
        _ = none.start
    with pytest.raises(ValueError, match="have no end"):
        _ = none.end
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        none.chunk(0)
