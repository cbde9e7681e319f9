"""Tiles as the Hopper kernels want them: free to begin at any row and at any key.

Tiles on a regular grid waste what hangs over the ends of documents. So tiles are also tried that
begin where documents do, several small documents in one, with blocks of keys counted from the
first key that a tile sees. What is cheaper by a fitted model of the kernel's time is taken; the
same model chooses between narrow and wide blocks of keys.

Each tile has one run at least, so that the kernel needs no other way for rows that see nothing:
theirs is hidden altogether.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from keel.masks.arrays import Ints, ragged_range
from keel.masks.intervals import RowIntervals
from keel.masks.mask import AttnMask
from keel.tiling import (
    Int32s,
    Pieces,
    TileLists,
    TileWork,
    draw_row_sets,
    full_runs,
    pieces_of,
    ramps_of,
    tile_lists,
    with_partial,
)

PART = 64
"""Rows of one warpgroup."""

HALF = 64
"""Keys of half a block of 128."""

FAR = 250
"""Half blocks of a partial run; of longer ones all are needed."""

ROWS = 2 * PART
"""Rows of a tile, unless another number is asked for."""

FIELDS = 8
"""Numbers of a tile's record."""

BLOCK_TIME = {128: (1.0, 1.51), 64: (0.585, 0.65)}
"""Time of a full and of a partial block of so many keys, and"""

TILE_TIME = 1.3
"""what a tile costs beside its blocks, in full blocks of 128 keys: fitted to an H200."""


@dataclass(frozen=True, slots=True, eq=False)
class TileRecords:
    """All int32."""

    tiles: Int32s
    """(tiles, FIELDS), most work first: row0, end of rows, first run, first partial run, end of
    runs, row set of the first partial run, and first key and end of keys of the first run."""
    runs: Int32s
    """(runs + 1, 4): first key, end of keys, row set (0 when full), needs; one more at the end.
    Full ones come first: what a tile begins with overlaps with nothing, and should be short.

    Needs, of partial runs in tiles of two parts: a byte each for the first half block (64 keys) of
    the run that the first part of the rows sees, and the end of those; then the same for the other
    part. (0, 255) in runs longer than FAR."""
    row_lo: Int32s
    """(row sets, rows of a tile): row r sees keys [lo, hi); in the last set, nothing."""
    row_hi: Int32s
    block_n: int
    work: TileWork
    time: float
    """Of one head by the model, in full blocks of 128 keys."""

    @property
    def rows(self) -> int:
        """Of a tile."""
        return int(self.row_lo.shape[1])


@functools.lru_cache(maxsize=128)
def best_records(mask: AttnMask, block_ns: tuple[int, ...], tile_rows: int = ROWS) -> TileRecords:
    """The cheapest tiles of a mask with blocks of one of these numbers of keys."""
    best = min(choices_of_records(mask, block_ns, tile_rows), key=lambda records: records.time)
    return best if tile_rows == 3 * PART else with_needs(best)


def choices_of_records(
    mask: AttnMask, block_ns: tuple[int, ...], tile_rows: int = ROWS
) -> list[TileRecords]:
    """Tiles on a grid, and those that begin with documents, with each of these blocks; without
    needs."""
    rows = mask.row_intervals()
    grid = np.arange(0, mask.tq, tile_rows)
    cuts = [grid]
    aligned = document_cuts(rows, mask.tq, tile_rows)
    if not np.array_equal(aligned, grid):
        cuts.append(aligned)
    return [make_records(rows, mask.tq, starts, n, tile_rows) for n in block_ns for starts in cuts]


def with_needs(records: TileRecords) -> TileRecords:
    """Runs with what each half of the rows needs of them, in tiles of two parts."""
    key, end, row_set = records.runs[:, :3].T.astype(np.int64)
    nothing = records.row_lo >= records.row_hi
    low = np.where(nothing, np.iinfo(np.int32).max, records.row_lo)
    high = np.where(nothing, 0, records.row_hi)
    needs = np.zeros(len(key), np.int64)
    for part in range(2):
        rows = slice(part * records.rows // 2, (part + 1) * records.rows // 2)
        first = np.clip(low[:, rows].min(1)[row_set] - key, 0, end - key) // HALF
        behind = -(np.clip(high[:, rows].max(1)[row_set] - key, 0, end - key) // -HALF)
        too_long = end - key > FAR * HALF
        first, behind = np.where(too_long, 0, first), np.where(too_long, 255, behind)
        needs |= (first | behind << 8) << 16 * part
    runs = records.runs.copy()
    runs[:, 3] = needs.astype(np.uint32).view(np.int32)
    return dataclasses.replace(records, runs=runs)


def document_cuts(rows: RowIntervals, tq: int, tile_rows: int = ROWS) -> Ints:
    """First rows of tiles that hold as many whole documents as fit, or a part of one.

    A document begins where rows see only keys behind all that the rows before them saw.
    """
    starts = [np.zeros(0, np.int64)]
    begin = 0
    bounds = np.append(_document_starts(rows), tq)
    while begin < tq:
        at = int(np.searchsorted(bounds, begin + tile_rows, side="right")) - 1
        if bounds[at] > begin:  # whole documents
            starts.append(np.array([begin]))
            begin = int(bounds[at])
        else:  # inside of a long one
            count = (int(bounds[at + 1]) - begin) // tile_rows
            starts.append(begin + tile_rows * np.arange(count))
            begin += tile_rows * count
    return np.concatenate(starts)


def _document_starts(rows: RowIntervals) -> Ints:
    """Rows, ascending, that begin a document; 0 is one of them."""
    if len(rows.start) == 0:
        return np.zeros(1, np.int64)
    strip = rows.strip
    first, last = rows.start[strip], rows.end[strip] - 1
    ends = [
        (base + slope * row)
        for base, slope in ((rows.lo_base, rows.lo_slope), (rows.hi_base, rows.hi_slope))
        for row in (first, last)
    ]
    low = np.minimum.reduceat(np.minimum(ends[0], ends[1]), rows.ptr[:-1])
    high = np.maximum.reduceat(np.maximum(ends[2], ends[3]), rows.ptr[:-1])
    seen = np.maximum.accumulate(high)
    begins = np.append(True, low[1:] >= seen[:-1])
    return np.union1d([0], rows.start[begins])


def make_records(
    rows: RowIntervals,
    tq: int,
    starts: Ints,
    block_n: int,
    tile_rows: int = ROWS,
    *,
    short_are_partial: bool = False,
) -> TileRecords:
    """Records of the tiles that begin at these rows and end where the next one begins.

    tile_rows: the most that a tile may have.
    short_are_partial: also masks the rows that a tile of less than tile_rows does not have.
    """
    num_tiles = len(starts)
    ends = np.append(starts[1:], tq)
    pieces = _cut(rows, starts, ends)
    origin = np.full(num_tiles, np.iinfo(np.int64).max)
    np.minimum.at(origin, pieces.tile, pieces.lo_first)
    origin[origin == np.iinfo(np.int64).max] = 0
    # from here on, rows and keys are counted from where their tile begins to see any
    shift, place = origin[pieces.tile], pieces.tile * tile_rows - starts[pieces.tile]
    pieces = Pieces(
        *(pieces.tile, pieces.index, pieces.a + place, pieces.b + place),
        *(pieces.lo_first - shift, pieces.lo_last - shift),
        *(pieces.hi_first - shift, pieces.hi_last - shift),
    )
    num_k = -(-int(pieces.hi_last.max(initial=0)) // block_n)
    num_sets = np.zeros(num_tiles, np.int64)
    np.maximum.at(num_sets, pieces.tile, pieces.index + 1)
    set_base = np.cumsum(num_sets) - num_sets
    needed = np.full(num_tiles, tile_rows) if short_are_partial else ends - starts
    full = full_runs(pieces, num_k, needed, block_n)
    blocks = with_partial(full, pieces, num_sets, num_k, block_n)
    row_set = np.where(blocks.index < 0, 0, set_base[blocks.lane] + blocks.index)
    lists = tile_lists(blocks, num_tiles, row_set)
    ramps = torch.from_numpy(ramps_of(pieces, set_base, tile_rows))
    lo, hi = (x.numpy() for x in draw_row_sets(ramps, int(num_sets.sum()) + 1, tile_rows))
    first_key = np.append(np.repeat(origin, num_sets), 0).astype(np.int32)[:, None]
    return _written_out(lists, starts, ends, origin, lo + first_key, hi + first_key, block_n)


def _cut(rows: RowIntervals, starts: Ints, ends: Ints) -> Pieces:
    """Row intervals cut at tiles that begin and end anywhere."""
    strip = rows.strip
    begin, end = rows.start[strip], rows.end[strip]
    first_tile = np.searchsorted(starts, begin, side="right") - 1
    count = np.searchsorted(starts, end - 1, side="right") - first_tile
    which = np.repeat(np.arange(len(strip)), count)
    tile = ragged_range(first_tile, count)
    a, b = np.maximum(begin[which], starts[tile]), np.minimum(end[which], ends[tile])
    return pieces_of(rows, which, tile, a, b)


def _written_out(
    lists: TileLists,
    starts: Ints,
    ends: Ints,
    origin: Ints,
    row_lo: Int32s,
    row_hi: Int32s,
    block_n: int,
) -> TileRecords:
    lane = np.repeat(np.arange(len(origin)), np.diff(lists.ptr))
    order = np.argsort(2 * lane + ~_is_full(lists), kind="stable")
    nowhere = len(lane)  # the run of tiles that see nothing
    runs = np.zeros((nowhere + 2, 4), np.int32)
    runs[:nowhere, 0] = lists.runs[order, 0] * block_n + origin[lane]
    runs[:nowhere, 1] = lists.runs[order, 1] * block_n + origin[lane]
    runs[:nowhere, 2] = lists.runs[order, 2]
    runs[nowhere] = (0, block_n, len(row_lo) - 1, 0)
    tile = lists.order
    first, last = lists.ptr[tile], lists.ptr[tile + 1]
    split = first + last - lists.split[tile]
    nothing = first == last
    first, split = (np.where(nothing, nowhere, x) for x in (first, split))
    last = np.where(nothing, nowhere + 1, last)
    tiles = np.zeros((len(tile), FIELDS), np.int32)
    tiles[:, :5] = np.stack([starts[tile], ends[tile], first, split, last], 1)
    # a tile without partial runs reads some row set, and does not use it
    tiles[:, 5] = runs[np.minimum(split, last - 1), 2]
    tiles[:, 6:8] = runs[first, :2]
    return TileRecords(tiles, runs, row_lo, row_hi, block_n, lists.work, _time(lists, block_n))


def _time(lists: TileLists, block_n: int) -> float:
    blocks = lists.runs[:, 1] - lists.runs[:, 0]
    is_full = _is_full(lists)
    full, partial = BLOCK_TIME[block_n]
    time = full * blocks[is_full].sum() + partial * blocks[~is_full].sum()
    return float(time + TILE_TIME * len(lists.order))


def _is_full(lists: TileLists) -> npt.NDArray[np.bool_]:
    """(runs,) of lists, where the full ones of a tile come last."""
    return np.arange(len(lists.runs)) >= np.repeat(lists.split, np.diff(lists.ptr))
