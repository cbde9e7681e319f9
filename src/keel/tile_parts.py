"""Tiles cut along their keys, where there are too few of them for a GPU, or a few are too long.

SMs take tiles longest first, each whenever it is free. With few heads and short lengths that ends
when the longest tile does, or leaves SMs without any. Parts of a tile see the same rows and some of
the keys each; the Hopper forward adds them up when the last one is done. That costs time, too, so
`choose_cuts` compares when all would be done. With many tiles nothing is gained: 64 heads of 1k
tokens are within 3 % of an even distribution as they are.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keel.masks.arrays import Ints, ragged_arange
from keel.masks.mask import AttnMask
from keel.tile_records import (
    BLOCK_TIME,
    PART,
    ROWS,
    TILE_TIME,
    TileRecords,
    choices_of_records,
    with_needs,
)
from keel.tiling import Int32s, TileWork

Floats = npt.NDArray[np.float64]

MEET_TIME = 4.0
"""What a part costs beside its blocks and TILE_TIME, in full blocks of 128 keys: 64 KB written, a
counter, and SMs that were free and are busy now. Fitted to an H200 (8 and 16 heads, 1k and 2k)."""

READ_TIME = 0.4
"""What the last part needs to read one of them back; an estimate."""

LAUNCH_TIME = 4.5

WORTH_IT = 1.25
"""Whole tiles must take so many times as long as cut ones, of a model that is 15 % off at times;"""

WORTH_A_CHANGE = 1.1
"""and the cheapest tiles so many times as long as others that are done earlier."""

SHARE_BITS = 6
"""Of a share, for the number of parts and for that of a part each."""

MAX_PARTS = 32
"""Of one tile."""

MAX_PLACES = 1024
"""Of cut tiles times heads times the most parts: 71 MB with 128 values a row."""

NUM_TARGETS = 36
"""Lengths of parts that are tried, from the longest tile's down to one of MAX_PARTS of it."""

TURNS = 2
"""Tiles are few if there are no more of them than this for each SM; 0: never."""


@dataclass(frozen=True, slots=True, eq=False)
class CutTiles:
    """Tiles of which some are parts of one tile."""

    records: TileRecords
    shares: Int32s
    """(tiles,): -1 of a whole tile; of a part, from the lowest bits, SHARE_BITS each for its number
    and for how many there are, then the number of its tile. Cut tiles are counted from 0."""
    num_cut: int
    most_parts: int
    """Of one tile."""

    def numbers_between(self, heads: int, dv: int) -> int:
        """How many fp32 numbers parts leave for each row: sums of dv values, and a top and a total
        by each of the four threads that share it.

        heads: of queries; where some of them share a tile, it has as many tokens less.
        """
        return self.num_cut * heads * self.most_parts * self.records.rows * (dv + 8)


def are_few(mask: AttnMask, heads: int, sms: int, tile_rows: int = ROWS) -> bool:
    """Whether the tiles of a mask are worth a closer look, and cuts."""
    return 0 < -(mask.tq // -tile_rows) * heads <= TURNS * sms


def end_of_last(times: Sequence[float], workers: int) -> float:
    """When all is done, if each worker takes the next item whenever it is free.

    >>> end_of_last([4, 3, 3, 2], workers=2)
    6.0
    """
    free = [0.0] * workers
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)


def best_of_few(
    mask: AttnMask,
    block_ns: tuple[int, ...],
    heads: int,
    sms: int,
    *,
    tile_rows: int = ROWS,
    skips: bool = False,
) -> tuple[TileRecords, CutTiles | None, float]:
    """The tiles with which all heads are done first, how they are cut, if they are, and when that
    is expected to be: see `expected_end`.

    skips: with blocks of 128 keys, consumers compute the half of a partial block that they need.
    """
    choices = [with_needs(x) for x in choices_of_records(mask, block_ns, tile_rows)]
    plans = [
        (records, *choose_cuts(records, heads, sms, skips=skips and records.block_n == 128))
        for records in choices
    ]
    cheapest = min(records.time for records in choices)

    def price(plan: tuple[TileRecords, list[int], float]) -> tuple[float, float]:
        records, counts, end = plan
        if max(counts, default=1) > 1:
            end *= WORTH_IT
        elif records.time > cheapest:
            end *= WORTH_A_CHANGE
        return end, records.time

    records, counts, end = min(plans, key=price)
    cut = cut_tiles(records, counts, skips=skips and records.block_n == 128)
    return records if cut is None else cut.records, cut, end


def choose_cuts(
    records: TileRecords, heads: int, sms: int, *, skips: bool = False
) -> tuple[list[int], float]:
    """Parts of each tile with which all heads are done first, all 1 where cuts do not pay; and when
    that is expected to be."""
    best = np.ones(len(records.tiles), np.int64)
    if len(best) == 0:
        return [], LAUNCH_TIME
    blocks = block_times(records, skips)
    time, length = np.array([x.sum() for x in blocks]), np.array([len(x) for x in blocks])
    whole_end = expected_end(time, length, best, heads, sms)
    best_end = whole_end / WORTH_IT
    if len(best) * heads > TURNS * sms:
        return best.tolist(), whole_end
    targets = time.max() * MAX_PARTS ** -np.linspace(0, 1, NUM_TARGETS)
    wanted = np.minimum(np.ceil(time / targets[:, None] - 1e-9), np.minimum(length, MAX_PARTS))
    for counts in np.unique(wanted.astype(np.int64), axis=0):  # ascending, as all of them grow
        beside = TILE_TIME * counts + MEET_TIME * np.where(counts > 1, counts, 0)
        if LAUNCH_TIME + heads * (time + beside).sum() / sms > best_end:
            break  # not even if it were evenly distributed; finer cuts cost more
        if (counts > 1).sum() * heads * counts.max() > MAX_PLACES:
            continue
        end = expected_end(time, length, counts, heads, sms)
        if end < best_end:
            best, best_end = counts, end
    return best.tolist(), best_end if best.max() > 1 else whole_end


def expected_end(time: Floats, length: Ints, counts: Ints, heads: int, sms: int) -> float:
    """When all heads are done, from a launch on, in full blocks of 128 keys.

    time, length, counts: of each tile, that of its blocks, how many they are, in how many parts.
    """
    longest = time * (-(length // -counts) / length)
    each = longest + TILE_TIME + np.where(counts > 1, MEET_TIME, 0.0)
    order = np.argsort(-each, kind="stable")
    end = end_of_last(np.repeat(each[order], heads * counts[order]).tolist(), sms)
    most = int(counts.max())
    return LAUNCH_TIME + end + (READ_TIME * most if most > 1 else 0.0)


def block_times(records: TileRecords, skips: bool = False) -> list[Floats]:
    """Of each tile, the time of its blocks, in the order in which the kernel takes them."""
    full, partial = BLOCK_TIME[records.block_n]
    times = []
    for first, split, last in records.tiles[:, 2:5].tolist():
        each = [np.zeros(0)]
        for run in range(first, last):
            key, end, _, needs = records.runs[run].tolist()
            time = np.full((end - key) // records.block_n, full if run < split else partial)
            if skips and run >= split:
                time *= [_needed_part(needs, 2 * n) for n in range(len(time))]
            each.append(time)
        times.append(np.concatenate(each))
    return times


def _needed_part(needs: int, half: int) -> float:
    """How much of a partial block of two halves is computed: consumers leave out what they can.

    To pass a block by counts as half of a half: values are added up all the same.
    """
    computed = 0.0
    for part in range(2):
        first, end = needs >> 16 * part & 255, needs >> 16 * part + 8 & 255
        computed += max(0.5, (first <= half < end) + (first <= half + 1 < end))
    return computed / 4


def _part_of(times: Floats, count: int) -> npt.NDArray[np.int64]:
    """(blocks,): the part of each, ascending from 0, none left out, about the same time in each."""
    middle = np.cumsum(times) - times / 2
    part = np.minimum(count * middle / times.sum(), count - 1).astype(np.int64)
    return np.unique(part, return_inverse=True)[1].reshape(-1)


def cut_tiles(
    records: TileRecords, counts: Sequence[int], *, skips: bool = False
) -> CutTiles | None:
    """Tiles in so many parts each, or fewer where there are not as many blocks; None if all are
    whole. Parts hold consecutive blocks, full ones first, as their tile does."""
    if max(counts, default=1) == 1:
        return None
    blocks = block_times(records, skips)
    runs = [records.runs[:-1]]  # those of whole tiles stay where they are
    end_of_runs = len(records.runs) - 1
    tiles, shares, times, lengths = [], [], [], []
    num_cut, most_parts = 0, 1
    for record, each, count in zip(records.tiles, blocks, counts, strict=True):
        part_of = _part_of(each, count)
        parts = int(part_of[-1]) + 1
        if parts == 1:
            tiles.append(record)
            shares.append(-1)
            times.append(each.sum())
            lengths.append(len(each))
            continue
        first, split, last = record[2:5].tolist()
        mine = records.runs[first:last]
        run_of = np.repeat(np.arange(last - first), (mine[:, 1] - mine[:, 0]) // records.block_n)
        key_of = mine[run_of, 0] + records.block_n * ragged_arange(np.bincount(run_of))
        for part in range(parts):
            taken = part_of == part
            which, begin, length = np.unique(run_of[taken], return_index=True, return_counts=True)
            cut = mine[which].copy()
            cut[:, 0] = key_of[taken][begin]
            cut[:, 1] = cut[:, 0] + records.block_n * length
            begin_split = end_of_runs + int((which < split - first).sum())
            made = record.copy()
            made[2:5] = end_of_runs, begin_split, end_of_runs + len(cut)
            made[5] = cut[min(begin_split - end_of_runs, len(cut) - 1), 2]
            made[6:8] = cut[0, :2]
            tiles.append(made)
            shares.append((num_cut << SHARE_BITS | parts) << SHARE_BITS | part)
            times.append(each[taken].sum())
            lengths.append(int(taken.sum()))
            runs.append(cut)
            end_of_runs += len(cut)
        num_cut, most_parts = num_cut + 1, max(most_parts, parts)
    if num_cut == 0:
        return None
    runs.append(records.runs[-1:])
    order = np.argsort(-np.array(times), kind="stable")
    cut_records = dataclasses.replace(
        records,
        tiles=np.stack(tiles)[order],
        runs=np.concatenate(runs),
        work=TileWork(max(lengths), sum(lengths), len(tiles)),
    )
    if records.rows != 3 * PART:
        cut_records = with_needs(cut_records)
    return CutTiles(cut_records, np.array(shares, np.int32)[order], num_cut, most_parts)
