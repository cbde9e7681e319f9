"""Plans of context parallelism against dense masks: every pair once, and not a row too many."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import attn_masks as any_mask

from keel import masks
from keel.distributed import flex_key, varlen_key
from keel.distributed import keys as cp_keys
from keel.distributed.hierarchy import route_of
from keel.distributed.layout import Layout, contiguous, zigzag
from keel.distributed.plan import Plan, exchange_of, fresh_plan, fresh_plans, make_plan, slice_areas
from keel.distributed.work import tile_work
from keel.masks import AttnMask, AttnSlice


@st.composite
def layouts(draw: st.DrawFn, total: int, num_ranks: int) -> Layout:
    cuts = draw(st.lists(st.integers(0, total), max_size=12))
    bounds = np.array([0, *sorted(cuts), total])
    ranks = draw(
        st.lists(st.integers(0, num_ranks - 1), min_size=len(bounds) - 1, max_size=len(bounds) - 1)
    )
    return Layout(bounds[:-1], bounds[1:], ranks, num_ranks)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    mask = draw(any_mask())
    num_ranks = draw(st.integers(1, 5))
    q_layout = draw(layouts(mask.tq, num_ranks))
    k_layout = draw(layouts(mask.tk, num_ranks))
    return make_plan(mask, q_layout, k_layout, draw(st.integers(0, 4)))


def keys_of(plan: Plan, rank: int) -> list[np.ndarray]:
    """The global keys behind the columns of each stage's mask, moved as the exchanges say."""
    shards = [plan.k_layout.tokens_of(r) for r in range(plan.num_ranks)]
    keys = []
    for n, stage in enumerate(plan.stages_of(rank)):
        if stage.exchange is None:
            keys.append(shards[rank])
            continue
        received = []
        for source in range(plan.num_ranks):
            theirs = plan.stages_of(source)[n].exchange
            begin = sum(theirs.send_counts[:rank])
            part = theirs.send_rows[begin : begin + theirs.send_counts[rank]]
            assert len(part) == stage.exchange.recv_counts[source]
            received.append(shards[source][part])
        rows = np.concatenate(received)
        keys.append(rows if stage.exchange.order is None else rows[stage.exchange.order])
    return keys


@given(plans())
def test_every_pair_is_computed_once(plan):
    count = torch.zeros(plan.mask.shape, dtype=torch.int64)
    for rank in range(plan.num_ranks):
        queries = plan.q_layout.tokens_of(rank)
        for stage, keys in zip(plan.stages_of(rank), keys_of(plan, rank), strict=True):
            assert stage.mask.shape == (len(queries), len(keys))
            q, k = np.meshgrid(queries, keys, indexing="ij")
            count.index_put_(
                (torch.from_numpy(q), torch.from_numpy(k)),
                stage.mask.to_dense().long(),
                accumulate=True,
            )
    assert torch.equal(count, plan.mask.to_dense().long())


@given(plans())
def test_a_rank_receives_exactly_what_its_queries_see(plan):
    dense = plan.mask.to_dense().numpy()
    for rank in range(plan.num_ranks):
        seen = np.flatnonzero(dense[plan.q_layout.tokens_of(rank)].any(0))
        own = plan.k_layout.tokens_of(rank)
        foreign = np.setdiff1d(seen, own)
        assert plan.rows_received[rank].sum() == len(foreign)
        remote = keys_of(plan, rank)[1 if plan.degree else 0 :]
        arrived = np.concatenate([np.empty(0, np.int64), *remote])
        assert sorted(np.setdiff1d(arrived, own)) == foreign.tolist()
        assert len(arrived) == len(np.unique(arrived))
        for keys in remote:  # neighbours stay neighbours
            assert (np.diff(keys) > 0).all()
    assert plan.rows_received.sum() == plan.rows_sent.sum()


@given(st.data())
def test_a_row_crosses_between_two_nodes_once(data):
    mask = data.draw(any_mask())
    nodes, per_node = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    layout = data.draw(layouts(mask.tk, nodes * per_node))
    plan = make_plan(mask, data.draw(layouts(mask.tq, nodes * per_node)), layout, 1)
    dense = mask.to_dense().numpy()
    stage = plan.segments.select(plan.segments.stage == 1)
    for node in range(nodes):
        here = range(node * per_node, (node + 1) * per_node)
        seen = {
            int(key)
            for rank in here
            for key in np.flatnonzero(dense[plan.q_layout.tokens_of(rank)].any(0))
        }
        own = {int(key) for rank in here for key in layout.tokens_of(rank)}
        routes = [route_of(stage, layout, rank, per_node) for rank in here]
        assert sum(route.between.num_received for route in routes) == len(seen - own)
        for rank, route in zip(here, routes, strict=True):
            assert route.inside.num_received == plan.rows_received[rank, 1]


@given(plans())
def test_the_way_back_names_every_copy_in_the_order_of_the_ranks(plan):
    for rank in range(plan.num_ranks):
        for stage in plan.stages_of(rank)[1 if plan.degree else 0 :]:
            rows, bounds, places = stage.exchange.returning(torch.device("cpu"))
            copies = places.split(bounds.diff().tolist())
            assert sorted(places.tolist()) == list(range(len(stage.exchange.send_rows)))
            assert len(rows) == len(copies) == len(rows.unique())
            for row, where in zip(rows.tolist(), copies, strict=True):
                assert (where.diff() > 0).all() and len(where)
                assert (stage.exchange.send_rows[where.numpy()] == row).all()


@given(plans())
def test_stages_are_of_equal_size(plan):
    if plan.degree:
        rows = plan.rows_received[:, 1:]
        assert (rows <= -(-rows.sum(1, keepdims=True) // plan.degree)).all()


@given(st.data())
def test_areas_of_slices(data):
    mask = data.draw(any_mask())
    want = [AttnMask(mask.array[n : n + 1], *mask.shape).area() for n in range(mask.num_slices)]
    assert slice_areas(mask.array).tolist() == want


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("make", [contiguous, zigzag])
@pytest.mark.parametrize("total", [0, 1, 5, 97])
def test_simple_layouts_own_every_token_once(make, num_ranks, total):
    layout = make(total, num_ranks)
    tokens = np.concatenate([layout.tokens_of(r) for r in range(num_ranks)])
    assert sorted(tokens) == list(range(total))
    assert layout.rows.tolist() == [len(layout.tokens_of(r)) for r in range(num_ranks)]
    assert layout.rows.max() - layout.rows.min() <= (1 if make is contiguous else 2)


def test_zigzag_evens_out_a_causal_mask():
    mask = masks.causal(4096)
    area = {
        make: make_plan(mask, make(4096, 8), make(4096, 8), 1).areas.sum(1)
        for make in (contiguous, zigzag)
    }
    assert area[zigzag].max() / area[zigzag].mean() < 1.001
    assert area[contiguous].max() / area[contiguous].mean() > 1.8
    assert area[zigzag].sum() == mask.area()


@pytest.mark.parametrize("degrees", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("moves", [False, True])
def test_plans_made_together_are_those_made_alone(degrees, moves):
    layout = Layout([0, 8, 16, 24], [8, 16, 24, 32], [0, 1, 0, 1], 2)
    # Nobody sees keys 0..8: they stand before the others of rank 0, but are never fetched.
    slices = [AttnSlice(n, n + 8, n, n + 8, hi=0) for n in (8, 16, 24)]
    if moves:
        slices.append(AttnSlice(0, 8, 24, 32))
    mask = AttnMask(slices, 32, 32)
    for together in fresh_plans(mask, layout, layout, degrees):
        alone = fresh_plan(mask, layout, layout, together.degree)
        np.testing.assert_array_equal(together.slices, alone.slices)
        assert all(map(np.array_equal, together.segments, alone.segments))


def test_equal_plans_are_one_object():
    layouts_ = [contiguous(64, 4) for _ in range(2)]
    first, second = (make_plan(masks.causal(64), x, x, 2) for x in layouts_)
    assert first is second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((masks.causal(10), contiguous(10, 2), contiguous(12, 2), 1), "(10, 12) tokens"),
        ((masks.causal(10), contiguous(10, 2), contiguous(10, 3), 1), "2 ranks, keys over 3"),
        ((masks.causal(10), contiguous(10, 2), contiguous(10, 2), -1), "degree must be in"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        make_plan(*arguments)


def test_refused_layouts():
    with pytest.raises(ValueError, match="cover the tokens"):
        Layout([0, 4], [3, 6], [0, 1], 2)
    with pytest.raises(ValueError, match="at least 1 rank, got num_ranks=0"):
        Layout([0], [3], [0], 0)
    with pytest.raises(ValueError, match=r"in 0\.\.1"):
        Layout([0], [3], [2], 2)


def test_a_window_needs_little():
    mask = AttnMask([AttnSlice(0, 100, 0, 100, lo=-4, hi=0)], 100, 100)
    plan = make_plan(mask, contiguous(100, 5), contiguous(100, 5), 1)
    assert plan.rows_received.sum(1).tolist() == [0, 4, 4, 4, 4]
    exchange = exchange_of(plan.segments.select(plan.segments.stage == 1), plan.k_layout, 1)
    assert exchange.send_counts == [0, 0, 4, 0, 0] and exchange.recv_counts == [4, 0, 0, 0, 0]
    assert exchange.send_rows.tolist() == [16, 17, 18, 19] and exchange.order is None


def best_of(repeats: int, run: Callable[[], object]) -> float:
    """Seconds of one core, whatever else the machine does."""
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        run()
        times.append(time.thread_time() - began)
    return min(times)


@pytest.mark.parametrize("kind", ["causal", "documents", "many documents"])
def test_planning_is_quick(kind):
    """64 ranks, 1,048,576 tokens: layout, degree and all ranks' plans; then a key made again."""
    tokens = 1 << 20
    count, power = {"causal": (1, 1.0), "documents": (19, 1.7)}.get(kind, (1000, 1.0))
    bounds = (np.linspace(0, 1, count + 1) ** power * tokens).astype(np.int64)

    def fresh() -> None:
        cp_keys._solved.cache_clear()
        tile_work.cache_clear()
        make_plan.cache_clear()
        key = varlen_key(bounds, causal=True, num_ranks=64, rank=5)
        assert key.forward_plan.num_ranks == key.backward_plan.num_ranks == 64

    assert best_of(5, fresh) < 0.1
    mask = masks.documents(bounds, causal=True)
    flex_key(mask, num_ranks=64, rank=5, degree=1).forward_plan  # noqa: B018
    again = best_of(20, lambda: flex_key(mask, num_ranks=64, rank=5, degree=1).forward_plan)
    assert again < 50e-6
