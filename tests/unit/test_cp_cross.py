"""Cross-attention: queries balanced by their work, keys with those who read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import attn_masks

from keel import masks
from keel.distributed import CostModel, flex_key
from keel.distributed.layout import Layout, contiguous, zigzag
from keel.distributed.placement import near_readers
from keel.distributed.report import simulate
from keel.distributed.work import rows_received, tiles_read, work_of_ranks
from keel.masks import AttnMask

FREE = CostModel(gb_per_s=1e9, latency_us=0.0)
units = st.integers(1, 9)


@st.composite
def layouts(draw: st.DrawFn, total: int, num_ranks: int) -> Layout:
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=6)))
    ranks = draw(st.lists(st.integers(0, num_ranks - 1), min_size=7, max_size=7))
    return Layout([0, *cuts], [*cuts, total], ranks[: len(cuts) + 1], num_ranks)


@st.composite
def masks_and_layouts(draw: st.DrawFn) -> tuple[AttnMask, Layout, Layout]:
    mask, num_ranks = draw(attn_masks()), draw(st.integers(1, 5))
    return mask, draw(layouts(mask.tq, num_ranks)), draw(layouts(mask.tk, num_ranks))


def cross_documents(num_ranks: int, causal: bool = False) -> AttnMask:
    """40 documents whose lengths of queries and of keys have nothing to do with each other."""
    random = np.random.default_rng(0)
    bounds = []
    for tokens in (8192 * num_ranks, 4096 * num_ranks):
        ends = random.lognormal(0, 1.2, 40).cumsum()
        bounds.append(np.append(0, (ends / ends[-1] * tokens).round()).astype(int))
    return masks.documents(*bounds, causal=causal)


@given(masks_and_layouts())
def test_rows_received_are_those_of_the_dense_mask(drawn: Any) -> None:
    mask, q_layout, k_layout = drawn
    dense, expected = mask.to_dense().numpy(), []
    for rank in range(q_layout.num_ranks):
        seen = set(np.flatnonzero(dense[q_layout.tokens_of(rank)].any(0)))
        expected.append(len(seen - set(k_layout.tokens_of(rank))))
    assert rows_received(mask, q_layout, k_layout).tolist() == expected


@given(masks_and_layouts(), units)
def test_rows_that_are_read_are_those_of_the_dense_mask(drawn: Any, unit: int) -> None:
    mask, layout, _ = drawn
    rows, tiles = tiles_read(mask, layout, unit)
    dense, count = mask.to_dense().numpy(), -(-mask.tk // unit)
    assert rows.shape == tiles.shape == (layout.num_ranks, count)
    for rank in range(layout.num_ranks):
        padded = np.zeros(count * unit, bool)
        padded[: mask.tk] = dense[layout.tokens_of(rank)].any(0)
        want = padded.reshape(count, unit).sum(1)
        assert rows[rank].tolist() == want.tolist()
        assert ((tiles[rank] > 0) == (want > 0)).all()


@given(masks_and_layouts(), units)
def test_every_key_once_and_equal_shares(drawn: Any, unit: int) -> None:
    mask, q_layout, _ = drawn
    found = near_readers(mask, q_layout, unit=unit)
    assert (found.total, found.num_ranks) == (mask.tk, q_layout.num_ranks)
    assert (found.starts % unit == 0).all()
    assert found.rows.max() - found.rows.min() <= unit
    assert near_readers(mask, q_layout, unit=unit) == found  # every rank gets the same answer


@given(masks_and_layouts())
def test_near_readers_little_travels(drawn: Any) -> None:
    """Never more than if keys were somewhere, to the row a rank that reads nothing may take."""
    mask, q_layout, _ = drawn
    found = rows_received(mask, q_layout, near_readers(mask, q_layout, unit=1)).sum()
    others = [contiguous(mask.tk, q_layout.num_ranks), zigzag(mask.tk, q_layout.num_ranks)]
    for other in others:
        if other.rows.max() - other.rows.min() <= 1:  # zigzag may have an advantage of two rows
            assert found <= rows_received(mask, q_layout, other).sum() + q_layout.num_ranks


def test_keys_stay_with_their_only_reader() -> None:
    """Four documents on four ranks, in another order: nothing travels."""
    mask = masks.documents([0, 100, 200, 300, 400], [0, 256, 512, 768, 1024])
    queries = Layout([0, 100, 200, 300], [100, 200, 300, 400], [2, 0, 3, 1], 4)
    keys = near_readers(mask, queries)
    assert keys.ranks.tolist() == [2, 0, 3, 1]
    assert rows_received(mask, queries, keys).sum() == 0


def test_what_nobody_reads_takes_no_room_from_readers() -> None:
    """Row i sees keys up to i + 6 of 14: those from 9 on are for the rank that reads nothing."""
    mask = AttnMask(np.array([[0, 3, 0, 14, -3, 6]]), 3, 14)
    queries = Layout([0, 1], [1, 3], [0, 1], 3)
    keys = near_readers(mask, queries, unit=1)
    assert keys.tokens_of(2).tolist() == [9, 10, 11, 12, 13]
    assert rows_received(mask, queries, keys).sum() == 7  # of 16: nine are with a reader


def test_rows_count_before_work() -> None:
    """Of the first eight keys, one query on rank 0 reads seven, and 99 on rank 1 one."""
    mask = AttnMask.from_ranges([(0, 1), (1, 100)], [(0, 7), (7, 8)], 0, 100, 16)
    queries = Layout([0, 1], [1, 100], [0, 1], 2)
    keys = near_readers(mask, queries, unit=8)
    assert keys.ranks.tolist() == [0, 1]
    assert rows_received(mask, queries, keys).tolist() == [0, 1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_ranks", [8, 64])
def test_balance_and_traffic_of_documents(num_ranks: int, causal: bool) -> None:
    mask = cross_documents(num_ranks, causal)
    options: dict[str, Any] = {"num_ranks": num_ranks, "rank": 0, "cost": FREE}
    key = flex_key(mask, **options, balance="solver", k_balance="solver")
    work = work_of_ranks(mask, key.q_layout)
    assert work.max() <= 1.03 * work.mean()
    plain = work_of_ranks(mask, contiguous(mask.tq, num_ranks))
    assert plain.max() > 1.9 * plain.mean()  # there was something to do
    for layout in (key.q_layout, key.k_layout):
        assert layout.rows.max() - layout.rows.min() <= 128
    rows = key.forward_plan.rows_received.sum()
    assert rows == rows_received(mask, key.q_layout, key.k_layout).sum()
    read = tiles_read(mask, key.q_layout, 128)[0].sum()
    in_order = rows_received(mask, key.q_layout, contiguous(mask.tk, num_ranks)).sum()
    held = read - rows  # keys that live with a reader; some have readers without room for them
    assert held > 0.65 * mask.tk and held > 2 * (read - in_order)


def test_what_is_given_stays() -> None:
    mask = cross_documents(8)
    options: dict[str, Any] = {"num_ranks": 8, "rank": 3, "cost": FREE}
    keys = zigzag(mask.tk, 8)
    by_name = flex_key(mask, **options, balance="solver", k_balance="zigzag")
    assert by_name.k_layout == keys and by_name.q_layout != contiguous(mask.tq, 8)
    work = work_of_ranks(mask, by_name.q_layout)
    assert work.max() <= 1.03 * work.mean()
    queries = contiguous(mask.tq, 8)
    other = flex_key(mask, **options, balance=queries, k_balance="solver")
    assert other.q_layout == queries and other.k_layout == near_readers(mask, queries)
    assert flex_key(mask, **options, balance=queries, k_balance=keys).k_layout == keys


def test_an_even_mask_stays_in_order() -> None:
    key = flex_key(masks.full(4096, 2048), num_ranks=4, balance="solver", k_balance="solver")
    assert (key.q_layout, key.k_layout) == (contiguous(4096, 4), contiguous(2048, 4))


def test_a_simulation_shows_the_solver() -> None:
    mask = cross_documents(8, causal=True)
    simulation = simulate(mask, 8, model=FREE)
    found = {x.name: x for x in simulation.strategies}
    assert found["solver"].balance < 1.2 < 1.9 < found["contiguous"].balance
    key = flex_key(mask, num_ranks=8, cost=FREE, balance="solver", k_balance="solver")
    assert simulation.forward_plan.k_layout == key.k_layout
