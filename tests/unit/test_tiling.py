"""Tile plans against the dense mask: every pair once and nothing else, planned fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.strategies import attn_masks

from keel import masks
from keel.masks import AttnMask
from keel.tiling import PARTIAL_COST, TilePlan, plan_tiles

Block = tuple[int, int, int]
"""(q tile, k tile, row set), row set -1 for a full block."""

sizes = st.integers(1, 20)


def q_major(plan: TilePlan) -> list[list[Block]]:
    """The blocks of each q tile in the order of its runs."""
    tiles = []
    for tile in range(plan.num_q_tiles):
        runs = plan.q.runs[plan.q.ptr[tile] : plan.q.ptr[tile + 1]].tolist()
        tiles.append([(tile, k, row_set) for a, b, row_set in runs for k in range(a, b)])
    return tiles


def k_major(plan: TilePlan) -> list[list[Block]]:
    """The blocks of each k tile, with set numbers turned back into row sets."""
    tiles = []
    for tile in range(plan.num_k_tiles):
        runs = plan.k.runs[plan.k.ptr[tile] : plan.k.ptr[tile + 1]].tolist()
        tiles.append(
            [
                (q, tile, -1 if number < 0 else int(plan.set_base[q]) + number)
                for a, b, number in runs
                for q in range(a, b)
            ]
        )
    return tiles


def joined(tiles: list[list[Block]]) -> list[Block]:
    return list(chain.from_iterable(tiles))


def pairs_of(plan: TilePlan, block: Block) -> NDArray[np.bool_]:
    """(block_m, block_n): the pairs that a kernel computes for a block."""
    _, k_tile, row_set = block
    if row_set < 0:
        return np.ones((plan.block_m, plan.block_n), bool)
    key = k_tile * plan.block_n + np.arange(plan.block_n)
    lo, hi = (x[row_set].numpy()[:, None] for x in plan.row_sets)
    return (key >= lo) & (key < hi)


def padded(mask: AttnMask, block_m: int, block_n: int) -> NDArray[np.bool_]:
    """The dense mask as whole tiles: (q tiles, block_m, k tiles, block_n)."""
    n, m = -(-mask.tq // block_m), -(-mask.tk // block_n)
    dense = np.zeros((n * block_m, m * block_n), bool)
    dense[: mask.tq, : mask.tk] = mask.to_dense().numpy()
    return dense.reshape(n, block_m, m, block_n)


@settings(max_examples=400)
@given(attn_masks(), sizes, sizes)
def test_every_attended_pair_once_and_no_other(mask: AttnMask, block_m: int, block_n: int) -> None:
    plan, want = plan_tiles(mask, block_m, block_n), padded(mask, block_m, block_n)
    times = np.zeros(want.shape, np.int64)
    for block in joined(q_major(plan)):
        pairs = pairs_of(plan, block)
        assert pairs.any(), f"block {block} has nothing to do"
        times[block[0], :, block[1], :] += pairs
    # Padded tiles: what hangs over either end must stay at 0 as well.
    np.testing.assert_array_equal(times, want)


@settings(max_examples=200)
@given(attn_masks(), sizes, sizes)
def test_full_means_full(mask: AttnMask, block_m: int, block_n: int) -> None:
    plan = plan_tiles(mask, block_m, block_n)
    full = {(q, k) for q, k, row_set in joined(q_major(plan)) if row_set < 0}
    all_seen = padded(mask, block_m, block_n).all((1, 3))
    assert full == set(zip(*(x.tolist() for x in np.nonzero(all_seen)), strict=True))
    assert plan.num_full == len(full)
    assert plan.num_partial == len(joined(q_major(plan))) - len(full)


@settings(max_examples=200)
@given(attn_masks(), sizes, sizes)
def test_runs_are_ordered_and_maximal(mask: AttnMask, block_m: int, block_n: int) -> None:
    plan = plan_tiles(mask, block_m, block_n)
    for ptr, split, runs, limit in (
        (plan.q.ptr, plan.q.split, plan.q.runs, plan.num_k_tiles),
        (plan.k.ptr, plan.k.split, plan.k.runs, plan.num_q_tiles),
    ):
        assert ptr[0] == 0 and ptr[-1] == len(runs) and np.all(np.diff(ptr) >= 0)
        assert np.all((runs[:, 0] >= 0) & (runs[:, 0] < runs[:, 1]) & (runs[:, 1] <= limit))
        for a, middle, b in zip(ptr[:-1], split, ptr[1:], strict=True):
            assert a <= middle <= b
            assert np.all(runs[a:middle, 2] >= 0) and np.all(runs[middle:b, 2] == -1)
            order = [(r if r >= 0 else np.inf, start) for start, _, r in runs[a:b].tolist()]
            assert order == sorted(order), "by set, full ones last, then by start"
            lane = runs[a:b].tolist()
            ends, starts = {(e, r) for _, e, r in lane}, {(s, r) for s, _, r in lane}
            assert not ends & starts, "two runs of one set touch: they are one run"


@settings(max_examples=200)
@given(attn_masks(), sizes, sizes)
def test_transposed_lists_hold_the_same_blocks(mask: AttnMask, block_m: int, block_n: int) -> None:
    plan = plan_tiles(mask, block_m, block_n)
    by_q, by_k = joined(q_major(plan)), joined(k_major(plan))
    assert sorted(by_k) == sorted(by_q)
    assert len(set(by_q)) == len(by_q)


@settings(max_examples=200)
@given(attn_masks(), sizes, sizes)
def test_longest_first(mask: AttnMask, block_m: int, block_n: int) -> None:
    plan = plan_tiles(mask, block_m, block_n)
    for order, tiles, summary in (
        (plan.q.order, q_major(plan), plan.q.work),
        (plan.k.order, k_major(plan), plan.k.work),
    ):
        assert sorted(order.tolist()) == list(range(len(tiles)))
        work = [sum(1.0 if s < 0 else PARTIAL_COST for _, _, s in tiles[t]) for t in order.tolist()]
        assert all(a >= b - 1e-9 for a, b in pairwise(work))
        assert summary.longest == pytest.approx(max(work, default=0))
        assert summary.total == pytest.approx(sum(work))


@settings(max_examples=200)
@given(attn_masks(), sizes, sizes)
def test_row_sets(mask: AttnMask, block_m: int, block_n: int) -> None:
    plan = plan_tiles(mask, block_m, block_n)
    lo, hi = (x.numpy() for x in plan.row_sets)
    assert lo.shape == hi.shape == (plan.num_row_sets, block_m)
    assert np.all((lo >= 0) & (lo <= hi) & (hi <= mask.tk))
    for tile, base in enumerate(plan.set_base.tolist()):
        end = int(np.append(plan.set_base, plan.num_row_sets)[tile + 1])
        row = tile * block_m + np.arange(block_m)
        behind = row >= mask.tq
        assert np.all(lo[base:end, behind] == hi[base:end, behind])
        count = sum(len(mask.row_intervals().of_row(i)) for i in row[~behind].tolist())
        assert np.sum(lo[base:end] < hi[base:end]) == count


@settings(max_examples=200)
@given(attn_masks(), sizes, sizes)
def test_pack_round_trips(mask: AttnMask, block_m: int, block_n: int) -> None:
    plan = plan_tiles(mask, block_m, block_n)
    for side, lists in (("q", plan.q), ("k", plan.k)):
        buffer, places = plan.pack(side)
        assert buffer.dtype == np.int32 and buffer.ndim == 1
        end = 0
        for name, (offset, length) in places.items():
            assert offset >= end and offset * 4 % 128 == 0
            section = getattr(plan if name in ("set_base", "ramps") else lists, name)
            assert section.dtype == np.int32
            np.testing.assert_array_equal(
                buffer[offset : offset + length].reshape(section.shape), section
            )
            end = offset + length
        assert end <= len(buffer) and len(places) == 6


@pytest.mark.parametrize(("tq", "tk"), [(0, 0), (0, 7), (7, 0), (7, 5)])
@pytest.mark.parametrize("sliced", [False, True])
def test_nothing_to_attend(tq: int, tk: int, sliced: bool) -> None:
    empty_slices = [masks.AttnSlice(0, tq, 0, 0), masks.AttnSlice(0, 0, 0, tk)]
    plan = plan_tiles(AttnMask(empty_slices if sliced else [], tq, tk), 4, 2)
    assert (plan.num_q_tiles, plan.num_k_tiles) == (-(-tq // 4), -(-tk // 2))
    assert plan.num_full == plan.num_partial == len(plan.q.runs) == len(plan.k.runs) == 0
    assert len(plan.q.ptr) == plan.num_q_tiles + 1 and not plan.q.ptr.any()
    assert len(plan.k.ptr) == plan.num_k_tiles + 1 and not plan.k.ptr.any()
    assert [x.shape for x in plan.row_sets] == [(0, 4), (0, 4)]
    assert sorted(plan.q.order.tolist()) == list(range(plan.num_q_tiles))
    plan.pack("q")
    plan.pack("k")


def test_describe() -> None:
    text = plan_tiles(masks.causal(10), 4, 2).describe()
    assert text == "10 x 10 in tiles of 4 x 2: 2 full + 9 partial of 15 blocks, 4 runs, 3 row sets"


@pytest.mark.parametrize("blocks", [(0, 4), (4, 0), (-1, 4)])
def test_block_sizes_must_be_positive(blocks: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="block sizes must be positive, got"):
        plan_tiles(masks.causal(10), *blocks)


def test_plans_are_cached_by_value() -> None:
    plan = plan_tiles(masks.causal(50), 4, 2)
    assert plan_tiles(masks.causal(50), 4, 2) is plan
    assert plan_tiles(AttnMask(list(masks.causal(50)), 50, 50), 4, 2) is plan
    assert plan_tiles(masks.causal(50), 4, 4) is not plan
    assert plan_tiles(masks.causal(51), 4, 2) is not plan


def document_bounds(count: int, tokens: int, seed: int) -> NDArray[np.int64]:
    random = np.random.default_rng(seed)
    cuts = np.sort(random.choice(np.arange(1, tokens), count - 1, replace=False))
    return np.concatenate([[0], cuts, [tokens]])


def packed_documents(count: int, tokens: int, seed: int) -> AttnMask:
    return masks.documents(document_bounds(count, tokens, seed), causal=True)


def seconds(make: Callable[[int], Any], work: Callable[[Any], Any], bar: float) -> float:
    """The best time of work(make(n)) over several n; stops once it is below the bar."""
    best = float("inf")
    for n in range(40):
        subject = make(n)
        start = time.perf_counter()
        work(subject)
        best = min(best, time.perf_counter() - start)
        if best <= bar:
            break
        time.sleep(0.02)  # let a busy neighbour finish
    return best


def overlapping_documents(count: int, tokens: int, seed: int) -> AttnMask:
    """Two slices per document that overlap in part: a window, and its first tokens."""
    bounds = document_bounds(count // 2, tokens, seed)
    return masks.documents(bounds, causal=True, window=(64, 0), sink_tokens=4)


def scattered_slices(count: int, tokens: int, seed: int) -> AttnMask:
    """Slices of all types, up to 400 wide, anywhere: rows overlap, keys hardly."""
    random = np.random.default_rng(seed)
    sides = [
        np.minimum(
            random.integers(0, tokens, (count, 1)) + random.integers(0, 400, (count, 2)).cumsum(1),
            tokens,
        )
        for _ in range(2)
    ]
    types = random.integers(0, 4, count)
    return AttnMask.from_ranges(*map(torch.from_numpy, (*sides, types)), tokens, tokens)


SPEED = [
    (packed_documents, 10_000, 1_048_576, 0.060),
    (overlapping_documents, 10_000, 1_048_576, 0.060),
    (scattered_slices, 10_000, 1_048_576, 0.060),
    (packed_documents, 1_000, 131_072, 0.008),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "count", "tokens", "bar"), SPEED)
def test_planning_is_fast(
    make: Callable[..., AttnMask], count: int, tokens: int, bar: float
) -> None:
    best = seconds(
        lambda n: make(count, tokens, seed=n),  # fresh: row intervals count too
        lambda mask: [plan_tiles(mask, 128, 64).pack(side) for side in ("q", "k")],
        bar,
    )
    plan_tiles.cache_clear()
    assert best <= bar, f"{best * 1e3:.1f} ms"


@pytest.mark.slow
def test_cache_hits_are_fast() -> None:
    mask, equal = (packed_documents(10_000, 1_048_576, seed=0) for _ in range(2))
    for first, known in ((mask, mask), (mask, equal)):
        assert plan_tiles(first, 128, 64) is plan_tiles(known, 128, 64)
        best = seconds(lambda _, m=known: m, lambda m: plan_tiles(m, 128, 64), 20e-6)
        assert best <= 20e-6, f"{best * 1e6:.1f} us"


@pytest.mark.slow
def test_a_plan_grows_with_tiles_not_with_blocks() -> None:
    tokens = 1 << 20

    def plan(mask: AttnMask) -> TilePlan:
        plan_tiles.cache_clear()
        return plan_tiles(mask, 128, 64)

    assert seconds(lambda _: masks.causal(tokens), plan, 0.3) <= 0.3
    huge = plan(masks.causal(tokens))
    tiles = huge.num_q_tiles + huge.num_k_tiles
    assert len(huge.q.runs) + len(huge.k.runs) <= 2 * tiles
    assert huge.pack("k")[0].nbytes <= 8 * tokens + 64 * tiles
    assert huge.num_full * 128 * 64 > 0.99 * masks.causal(tokens).area()
    plan_tiles.cache_clear()
