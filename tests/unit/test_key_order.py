"""The order of tiles in which they meet in the L2: complete, and worth its name when played."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import attn_masks

from keel import key_order, masks
from keel.key_order import LANE, STRIDE, TURN
from keel.key_records import KeyRecords, key_records
from keel.masks import AttnMask

SMS = 132


def placed(made: KeyRecords, lanes: int, group: int) -> np.ndarray:
    return key_order.in_order(made.records, made.tile_work, lanes, group, SMS)


@settings(max_examples=60)
@given(attn_masks(max_tokens=700), st.integers(1, 8), st.integers(1, 8))
def test_each_tile_once_for_each_lane(mask, lanes, group):
    made = key_records(mask, 64)
    found = placed(made, lanes, group)
    assert set(found[:, STRIDE].tolist()) <= {64, -64}
    times = made.records.tiles[np.argsort(made.records.tiles[:, 0])][:, :LANE]
    for lane in range(lanes):
        mine = found[found[:, LANE] == lane]
        assert np.array_equal(mine[np.argsort(mine[:, 0])][:, :LANE], times)


@settings(max_examples=60)
@given(
    attn_masks(max_tokens=700),
    st.sampled_from([(1, 1, 8), (6, 2, 3), (6, 6, 3), (8, 4, 8)]),
    st.integers(1, 9),
    st.sampled_from(["in turns", "as usual", "many"]),
)
def test_those_that_stay_have_each_tile_once(mask, heads, workers, way):
    """Dealt by rounds, with zeros behind the last of each: as if who is free took the next. Of too
    many tiles, all have as many, or one less."""
    lanes, section, group = heads
    made = key_records(mask, 64)
    given = (made.records, made.tile_work, lanes, group)
    if way == "in turns":
        dealt = key_order.in_order(*given, workers, stay=True)
        once = key_order.in_order(*given, workers)
    else:
        with mock.patch.object(key_order, "MOST", 0 if way == "many" else 1000):
            dealt = key_order.as_usual(*given, section=section, sms=workers)
        once = usual(made, lanes)
        once = once[np.argsort(once[:, LANE] // section, kind="stable")]
    workers = min(workers, len(once))
    rounds = dealt.reshape(-1, workers, key_order.FIELDS)
    there = rounds[:, :, 1] > 0
    assert not there[-1].any() and not rounds[~there].any()
    hands = [rounds[there[:, n], n].tolist() for n in range(workers)]
    assert [len(hand) for hand in hands] == [np.argmin(column) for column in there.T]
    work_of_key = dict(zip(made.records.tiles[:, 0].tolist(), made.tile_work, strict=True))
    load = [0.0] * workers
    for place, record in enumerate(once.tolist()):
        taker = load.index(min(load))
        if way == "many":  # from left to right, then back
            taker = place % workers
            taker = workers - 1 - taker if place // workers % 2 else taker
        assert hands[taker].pop(0) == record
        load[taker] += work_of_key[record[0]] * group + key_order.BESIDE
    assert not any(hands)


def test_documents_end_in_the_same_block_of_rows():
    records = key_records(masks.documents([0, 640, 1500], causal=True), 64).records
    by_key = np.argsort(records.tiles[:, 0])
    assert key_order.documents(records)[by_key].tolist() == [0] * 5 + [1] * 7
    assert key_order.rows_of(records)[1][by_key].tolist() == [640] * 5 + [1536] * 7
    small = key_records(masks.documents(range(0, 1001, 100), causal=True), 128).records
    assert len(set(key_order.documents(small).tolist())) == len(small.tiles)
    window = key_records(masks.sliding_window(2000, left=300), 64).records
    assert len(set(key_order.documents(window).tolist())) == 14  # the last 3 of 16 see the last row


def test_a_tile_that_nobody_sees():
    slices = masks.AttnSlice.of_type((0, 300), (400, 700), 1)
    made = key_records(AttnMask([slices], 300, 700), 64)
    first, end = (rows.tolist() for rows in key_order.rows_of(made.records))
    assert [x > 0 for x in end] == [x > 0 for x in made.tile_work]
    assert min(first) == 0 and max(end) == 320
    assert len(placed(made, 2, 4)) == 2 * len(made.tile_work)
    empty = key_records(AttnMask([], 300, 700), 64)
    assert not key_order.pays(empty.records, empty.tile_work, 8)
    assert len(placed(empty, 2, 4)) == 2 * len(empty.tile_work)


def steps(made: KeyRecords, record: list[int], group: int, *, turns: bool) -> Iterator[tuple]:
    """(lane, head, row) of each block of a tile, in the kernel's order."""
    _, _, first, _, last, _, lane, stride = record
    for head_first in [False] if turns else range(group):
        for begin, end in made.records.runs[first:last, :2].tolist():
            rows = list(range(begin, end, 64))[:: stride // 64]
            if turns:
                for n in range(0, len(rows), TURN):
                    yield from (
                        (lane, head, row) for head in range(group) for row in rows[n : n + TURN]
                    )
            else:
                yield from ((lane, head_first, row) for row in rows)


def share_from_memory(made: KeyRecords, order: np.ndarray, group: int, *, turns: bool) -> float:
    """Of blocks of rows, which an L2 of 32 MiB does not hold: the last ones, 64 KB each."""
    waiting = iter(order.tolist())
    rng = np.random.default_rng(0)
    running = [
        (0.0, n, steps(made, record, group, turns=turns))
        for n, record in zip(range(SMS), waiting, strict=False)
    ]
    held: OrderedDict[tuple, None] = OrderedDict()
    missed = count = 0
    while running:
        now, worker, left = running[0]
        block = next(left, None)
        if block is None:
            record = next(waiting, None)
            if record is None:
                heapq.heappop(running)
            else:
                entry = (now + 2.0, worker, steps(made, record, group, turns=turns))
                heapq.heapreplace(running, entry)
            continue
        count += 1
        missed += block not in held
        held[block] = None
        held.move_to_end(block)
        if len(held) > 512:
            held.popitem(last=False)
        heapq.heapreplace(running, (now + rng.uniform(0.9, 1.1), worker, left))
    return missed / count


def usual(made: KeyRecords, lanes: int) -> np.ndarray:
    """Longest tiles first, all lanes of each, upwards."""
    order = np.repeat(made.records.tiles, lanes, axis=0)
    order[:, LANE] = np.tile(np.arange(lanes), len(made.records.tiles))
    order[:, STRIDE] = 64
    return order


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (masks.causal(4096), 0.12),
        (masks.causal(8192), 0.10),
        (masks.documents([0, 1500, 4000, 8192], causal=True), 0.16),
    ],
)
def test_tiles_meet(mask, most):
    """64:8 heads on a machine whose blocks take 0.9 to 1.1 of their time each."""
    made = key_records(mask, 64)
    assert key_order.pays(made.records, made.tile_work, 8)
    met = share_from_memory(made, placed(made, 8, 8), 8, turns=True)
    lost = share_from_memory(made, usual(made, 8), 8, turns=False)
    assert met < most and lost > 3 * met


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (masks.causal(4096), True),
        (masks.full(4096), False),  # all tiles have the same work
        (masks.sliding_window(8192, left=1024), False),  # and other rows
        (masks.documents(range(0, 8193, 2048), causal=True), True),
        (masks.documents(range(0, 8193, 256), causal=True), False),  # few tiles for a row
        (masks.documents(range(0, 8193, 2048)), False),
        (masks.prefix_lm([0, 8192], prefix_lengths=[4096]), False),  # half of them are alike
        (masks.prefix_lm([0, 8192], prefix_lengths=[1024]), True),
        (masks.causal(300_000), False),  # too many to look at
    ],
)
def test_pays(mask, expected):
    made = key_records(mask, 64)
    assert key_order.pays(made.records, made.tile_work, 8) is expected
