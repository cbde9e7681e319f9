"""Layouts that balance: every token once, equal shares, and the traffic that is counted is real."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cp_masks import document_mask, short_bounds
from tests.strategies import attn_masks, attn_slices

from keel import masks
from keel.distributed.balance import balanced
from keel.distributed.layout import Layout, contiguous, zigzag
from keel.distributed.work import rows_received, tile_work, work_of_ranks
from keel.masks import AttnMask

PER_RANK = 16384
units = st.integers(1, 12)


@st.composite
def square_masks(draw: st.DrawFn, max_tokens: int = 64) -> AttnMask:
    tokens = draw(st.integers(0, max_tokens))
    slices = draw(st.lists(attn_slices(tokens, tokens), max_size=6)) if tokens else []
    return AttnMask(slices, tokens, tokens)


@st.composite
def layouts(draw: st.DrawFn, total: int) -> Layout:
    num_ranks = draw(st.integers(1, 5))
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=6)))
    ranks = draw(st.lists(st.integers(0, num_ranks - 1), min_size=7, max_size=7))
    return Layout([0, *cuts], [*cuts, total], ranks[: len(cuts) + 1], num_ranks)


def lognormal_documents(tokens: int) -> AttnMask:
    return document_mask("packed", tokens)


def thousand_documents(tokens: int) -> AttnMask:
    return masks.documents(short_bounds(tokens, 1000), causal=True)


@given(mask=attn_masks(), unit=units)
def test_tile_work_counts_the_tiles_of_the_dense_mask(mask: AttnMask, unit: int) -> None:
    rows, columns = -(-mask.tq // unit), -(-mask.tk // unit)
    padded = np.zeros((rows * unit, columns * unit), bool)
    padded[: mask.tq, : mask.tk] = mask.to_dense().numpy()
    touched = padded.reshape(rows, unit, columns, unit).any((1, 3))
    assert tile_work(mask, unit).tolist() == touched.sum(1).tolist()


@given(mask=square_masks(), data=st.data())
def test_rows_received_are_those_of_the_dense_mask(mask: AttnMask, data: st.DataObject) -> None:
    layout = data.draw(layouts(mask.tq))
    dense, expected = mask.to_dense().numpy(), []
    for rank in range(layout.num_ranks):
        mine = layout.tokens_of(rank)
        expected.append(len(set(np.flatnonzero(dense[mine].any(0))) - set(mine)))
    assert rows_received(mask, layout).tolist() == expected


@given(mask=square_masks(), unit=units, data=st.data())
def test_work_of_ranks_adds_up_and_follows_the_tokens(
    mask: AttnMask, unit: int, data: st.DataObject
) -> None:
    layout = data.draw(layouts(mask.tq))
    work, expected = tile_work(mask, unit), np.zeros(layout.num_ranks)
    for rank in range(layout.num_ranks):
        for token in layout.tokens_of(rank).tolist():
            size = min(mask.tq, (token // unit + 1) * unit) - token // unit * unit
            expected[rank] += work[token // unit] / size
    assert work_of_ranks(mask, layout, unit) == pytest.approx(expected)
    assert work_of_ranks(mask, layout, unit).sum() == pytest.approx(work.sum())


@settings(max_examples=300)
@given(mask=square_masks(96), num_ranks=st.integers(1, 12), unit=units)
def test_every_token_once_in_whole_units_and_equal_shares(
    mask: AttnMask, num_ranks: int, unit: int
) -> None:
    layout = balanced(mask, num_ranks, unit=unit)
    assert (layout.total, layout.num_ranks) == (mask.tq, num_ranks)
    owned = np.concatenate([layout.tokens_of(rank) for rank in range(num_ranks)])
    assert sorted(owned.tolist()) == list(range(mask.tq))
    assert (layout.starts % unit == 0).all()
    assert layout.rows.max() - layout.rows.min() <= unit
    assert balanced(mask, num_ranks, unit=unit) == layout  # every rank gets the same answer


@settings(max_examples=100, deadline=None)
@given(mask=square_masks(200), num_ranks=st.integers(1, 6))
def test_never_less_balanced_than_in_order(mask: AttnMask, num_ranks: int) -> None:
    tokens = mask.tq // num_ranks * num_ranks  # so that units of one token split evenly
    mask = mask.cut((0, tokens), (0, tokens))
    ours, plain = (
        work_of_ranks(mask, layout, 1).max(initial=0)
        for layout in (balanced(mask, num_ranks, unit=1), contiguous(tokens, num_ranks))
    )
    assert ours <= max(plain, 1.02 * work_of_ranks(mask, contiguous(tokens, 1), 1)[0] / num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "most_rows"),
    [(8, 170e3), (16, 715e3), (32, 2.7e6), (64, 10.6e6), (128, 42e6)],
)
def test_long_documents(num_ranks: int, most_rows: float) -> None:
    """What was reached; the bar is 182e3, 788e3, 3.25e6 and 13.0e6: half of a plain heap's rows."""
    check_bars(lognormal_documents(PER_RANK * num_ranks), num_ranks, most_rows)


@pytest.mark.parametrize(
    ("num_ranks", "most_rows"), [(8, 600), (16, 7600), (32, 22e3), (64, 85e3), (128, 350e3)]
)
def test_many_short_documents(num_ranks: int, most_rows: float) -> None:
    """What was reached; the bar at 64 ranks is 141e3."""
    check_bars(thousand_documents(PER_RANK * num_ranks), num_ranks, most_rows)


def test_few_units_a_rank() -> None:
    mask = lognormal_documents(4096 * 64)  # 32 units: one of them may be a tenth of the work
    check_bars(mask, 64, math.inf)


def test_equal_documents_are_dealt_apart() -> None:
    one, two = masks.causal(32768), masks.documents([0, 32768, 65536], causal=True)
    check_bars(two, 8, 2 * rows_received(one, zigzag(32768, 4)).sum())


@pytest.mark.parametrize("num_ranks", [8, 64])
def test_one_causal_document_travels_no_more_than_in_zigzag(num_ranks: int) -> None:
    mask = masks.causal(PER_RANK * num_ranks)
    check_bars(mask, num_ranks, rows_received(mask, zigzag(mask.tq, num_ranks)).sum())


def check_bars(mask: AttnMask, num_ranks: int, most_rows: float) -> None:
    layout = balanced(mask, num_ranks)
    work = work_of_ranks(mask, layout)
    assert layout.rows.max() - layout.rows.min() <= 128
    assert work.max() <= 1.03 * work.mean()
    assert rows_received(mask, layout).sum() <= most_rows


@pytest.mark.parametrize(
    "mask",
    [
        masks.full(65536),
        masks.sliding_window(65536, left=1024, right=0),
        AttnMask([], 65536, 65536),
    ],
    ids=["full", "window", "empty"],
)
def test_what_is_even_stays_in_order(mask: AttnMask) -> None:
    assert balanced(mask, 8) == contiguous(mask.tq, 8)


def test_inverse_causal_is_as_easy_as_causal() -> None:
    mask = AttnMask.from_ranges([(0, 65536)], [(0, 65536)], "inv_causal", 65536, 65536)
    check_bars(mask, 4, rows_received(mask, zigzag(65536, 4)).sum())


def test_more_ranks_than_units_leaves_ranks_empty() -> None:
    layout = balanced(masks.causal(300), 8, unit=128)
    assert sorted(layout.rows.tolist()) == [0, 0, 0, 0, 0, 44, 128, 128]


@pytest.mark.parametrize(
    "mask",
    [lognormal_documents(1 << 20), thousand_documents(1 << 20), masks.causal(1 << 20)],
    ids=["19 documents", "1000 documents", "causal"],
)
def test_a_million_tokens_are_dealt_in_a_moment(mask: AttnMask) -> None:
    times = []
    for _ in range(3):
        tile_work.cache_clear()
        start = time.perf_counter()
        balanced(AttnMask(mask.array, *mask.shape), 64)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.2  # a quiet core takes a tenth of it


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="say with keys_of where they are"):
        balanced(masks.full(4, 8), 2)
    with pytest.raises(ValueError, match="must be positive"):
        balanced(masks.full(4), 0)
    with pytest.raises(ValueError, match="must be positive"):
        balanced(masks.full(4), 2, unit=0)
    with pytest.raises(ValueError, match=r"layouts of \(5, 5\) tokens do not fit"):
        rows_received(masks.full(4), contiguous(5, 2))
