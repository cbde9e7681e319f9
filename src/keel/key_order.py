"""Tiles of keys in an order, and rows in a direction, in which they find rows in the L2.

Blocks of threads of the Hopper backward read queries and dout, and add to dq, for each query head
that shares their keys: 64 KB for 64 rows of a head of 128 columns. That is too much for memory, so
tiles of a document should be at the same rows at the same time. Their work differs: of a causal
document each tile sees a block of rows or two less than the one before it, times the heads of a
group. But all of them see the last row. So

- heads take turns every few blocks of rows (`TURN`), in place of one after the other;
- documents come one after the other, longest first, of as many key heads as fill the GPU;
- tiles that start together go downwards, from the last row of their document, and are at the same
  row until their own ends. When the shortest ends, the next tile takes its place, a long one; those
  that start in this way end together, so they go upwards, and meet on their way to the last row.

Which tiles start or end together is found by playing the schedule.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from keel.masks.arrays import Ints
from keel.tile_records import FIELDS, TileRecords
from keel.tiling import Int32s

Floats = NDArray[np.float64]

LANE, STRIDE = 6, 7
"""Fields of a record here: the key head, and from a block of rows to the next."""

BESIDE = 2.0
"""What a tile costs beside its blocks, in those."""

FILLED = 0.9
"""Of the SMs have a tile of one document, of as many key heads as that takes."""

TURN = 4
"""Blocks of rows of a head before it is the next one's turn. Turns of one block take 5 % longer on
an H200, why is not known; with longer ones short documents miss the L2."""

UNEVEN = 1.5
"""Times the mean of its document has the longest tile, or more, where tiles lose each other."""

MOST_ALIKE = 0.3
"""Of a document's tiles have the work of the longest, or nearly so, at most: these stay together
without help, and lose each other when some start later (a long prefix that all rows see)."""

LEAST_TILES = 4.0
"""That see a row, or else there is too little to share."""

NO_TURNS = 1 << 20
"""In the place of TURN: heads come one after the other, in each run of blocks."""

MOST = 16_384
"""Blocks of threads whose order is looked for, which takes twenty milliseconds, or that are dealt
to those that stay by playing their schedule."""


def rows_of(records: TileRecords) -> tuple[Ints, Ints]:
    """(tiles,) first and end of the rows that see a tile, in blocks; 0 and 0 where nobody does."""
    runs = np.append(records.runs[:, :2], [[0, 0]], axis=0).astype(np.int64)
    bounds = records.tiles[:, [2, 4]]  # its runs
    begin = np.minimum.reduceat(runs[:, 0], bounds.reshape(-1))[::2]
    end = np.maximum.reduceat(runs[:, 1], bounds.reshape(-1))[::2]
    seen = bounds[:, 0] < bounds[:, 1]
    return np.where(seen, begin, 0), np.where(seen, end, 0)


def documents(records: TileRecords) -> Ints:
    """(tiles,) a number for each set of neighbours that end in the same block of rows.

    A tile whose rows begin in that block is not one of them: it may be of the next document.
    """
    by_key = np.argsort(records.tiles[:, 0], kind="stable")
    begin, end = (rows[by_key] for rows in rows_of(records))
    apart = np.abs(np.diff(end)) >= records.block_n
    apart |= begin[1:] > end[:-1] - records.block_n
    found = np.empty(len(end), np.int64)
    found[by_key] = np.cumsum(np.append(False, apart)[: len(end)])
    return found


def pays(records: TileRecords, tile_work: Floats, lanes: int) -> bool:
    """Whether tiles lose each other in the usual order, and would find each other in this one:
    those of a document see the same last row, all differ in work, and are several for each row.

    tile_work: as for `in_order`. Whether all rows fit into the L2 anyway is not looked at.
    """
    if not 0 < len(tile_work) * lanes <= MOST or not tile_work.any():
        return False
    which = documents(records)
    size, longest = _longest(which, tile_work)
    uneven = (size * longest).sum() / tile_work.sum()
    alike = np.average(tile_work > 0.95 * longest[which], weights=longest[which])
    begin, end = (rows[tile_work > 0] for rows in rows_of(records))
    tiles_of_row = tile_work.sum() * records.block_n / (end.max() - begin.min())
    differ = uneven >= UNEVEN and alike <= MOST_ALIKE
    return bool(2 * len(size) <= len(which) and differ and tiles_of_row >= LEAST_TILES)


def as_usual(
    records: TileRecords, tile_work: Floats, lanes: int, group: int, section: int, sms: int
) -> Int32s:
    """(turns * workers, FIELDS): for blocks of threads that stay, longest tiles first, upwards;
    lanes in sections, one after the other."""
    tile, lane = (x.reshape(-1) for x in np.indices((len(records.tiles), lanes)))
    order = np.lexsort((lane, tile, lane // section))
    placed = records.tiles[tile[order]].copy()
    placed[:, LANE] = lane[order]
    placed[:, STRIDE] = records.block_n
    if len(placed) <= MOST:
        return _dealt(placed, _schedule(tile_work[tile[order]] * group + BESIDE, sms)[1])
    # so many that it does not matter: from left to right, then back
    workers = min(sms, len(placed))
    turn, worker = np.divmod(np.arange(len(placed)), workers)
    return _dealt(placed, np.where(turn % 2, workers - 1 - worker, worker))


def in_order(
    records: TileRecords,
    tile_work: Floats,
    lanes: int,
    group: int,
    sms: int,
    *,
    stay: bool = False,
) -> Int32s:
    """(tiles * lanes, FIELDS): a record for each tile and lane, in the order of their start.

    tile_work: (tiles,) blocks of rows of each tile, for each of the `group` query heads of a lane.
    stay: for blocks of threads that stay, (turns * workers, FIELDS), as `as_usual`.
    """
    which = documents(records)
    size, longest = _longest(which, tile_work)
    section = np.array([lanes_that_fill(n, lanes, sms) for n in size.tolist()])[which]
    tile, lane = (x.reshape(-1) for x in np.indices((len(which), lanes)))
    of_tile = (records.tiles[:, 0], -tile_work, which, -longest[which])
    key, less_work, document, shorter = (x[tile] for x in of_tile)
    order = np.lexsort((lane, key, less_work, lane // section[tile], document, shorter))
    tile, lane = tile[order], lane[order]
    times = tile_work[tile] * group + BESIDE
    start, worker = _schedule(times, sms)
    end = start + times
    placed = np.empty((len(tile), FIELDS), np.int32)
    placed[:] = records.tiles[tile]
    placed[:, LANE] = lane
    near = np.lexsort((np.arange(len(tile)), lane, which[tile]))
    together = (np.diff(which[tile][near]) == 0) & (np.diff(lane[near]) == 0)
    ends_closer = _gaps(end[near], together) < _gaps(start[near], together)
    placed[near, STRIDE] = np.where(ends_closer, records.block_n, -records.block_n)
    return _dealt(placed, worker) if stay else placed


def _longest(which: Ints, tile_work: Floats) -> tuple[Ints, Floats]:
    """(documents,) number of tiles, and work of the longest."""
    size = np.bincount(which)
    longest = np.zeros(len(size))
    np.maximum.at(longest, which, tile_work)
    return size, longest


def lanes_that_fill(tiles: int, lanes: int, sms: int) -> int:
    """The least divisor of lanes with which a document of so many tiles fills the SMs, or all."""
    fits = (n for n in range(1, lanes + 1) if lanes % n == 0 and n * tiles >= FILLED * sms)
    return next(fits, lanes)


def _schedule(times: Floats, workers: int) -> tuple[Floats, Ints]:
    """(items,) when each begins and with whom, if a worker takes the next whenever it is free."""
    free = [(0.0, worker) for worker in range(min(workers, len(times)))]
    starts, takers = [], []
    for time in times.tolist():
        start, taker = free[0]
        starts.append(start)
        takers.append(taker)
        heapq.heapreplace(free, (start + time, taker))
    return np.array(starts), np.array(takers, np.int64)


def _dealt(placed: Int32s, worker: Ints) -> Int32s:
    """(turns * workers, FIELDS): what each worker has in the first turn, in the second, and so on,
    in the order of the records, and zeros behind its last.

    worker: (records,) who takes each; all of them take one.
    """
    workers = int(worker.max(initial=-1)) + 1
    by_worker = np.argsort(worker, kind="stable")
    first = np.append(0, np.cumsum(np.bincount(worker)))
    turn = np.arange(len(placed)) - first[worker[by_worker]]
    dealt = np.zeros(((int(turn.max(initial=-1)) + 2) * workers, FIELDS), np.int32)
    dealt[turn * workers + worker[by_worker]] = placed[by_worker]
    return dealt


def _gaps(times: Floats, together: NDArray[np.bool_]) -> Floats:
    """From each to the nearer of its two neighbours; infinite without any."""
    gap = np.where(together, np.abs(np.diff(times)), np.inf)
    return np.minimum(np.append(np.inf, gap), np.append(gap, np.inf))
