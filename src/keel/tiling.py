"""From masks to tiles: which (q tile, k tile) blocks a kernel computes, and which need masking.

Plan of a mask for tiles of block_m queries x block_n keys:

- ``q``: per q tile, runs [start, end) of k tiles, masked ("partial") runs first, then full ones.
  A partial run names the *row set* to mask with: one key interval [lo, hi) per row.
  A row with several intervals in one tile appears in several row sets, which are disjoint.
  ``ramps`` holds them piece by piece; `draw_row_sets` writes the rows out where they are needed.
- ``k``: the same blocks transposed, per k tile, for the backward.
- Both come with their tiles by falling work, so that the longest start first.

A block is full when every one of its block_m x block_n pairs attends; blocks that hang over the
end of a tensor are therefore partial, and kernels need no bounds checks on full ones.
Runs, not blocks, are stored: a plan grows with the slices and tiles, never with tq x tk.
Planning is numpy on the host; plans are cached by value.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from keel.masks.arrays import Ints, order_by, ragged_range, sort_with_index
from keel.masks.intervals import RowIntervals
from keel.masks.mask import AttnMask

Int32s = NDArray[np.int32]

PARTIAL_COST = 1.3
"""Work of a masked block in units of a full one; orders tiles, never changes results."""

_ALIGN = 32
"""Sections of the packed buffer start at multiples of 128 bytes."""


class TileWork(NamedTuple):
    """How work spreads over the tiles of one side, in blocks."""

    longest: float
    total: float
    tiles: int

    @property
    def is_even(self) -> bool:
        """Whether no tile has much more than they have on average."""
        return self.longest * self.tiles <= 1.2 * self.total


@dataclass(frozen=True, slots=True, eq=False)
class TileLists:
    """int32: for each of n tiles of one side, runs of tiles of the other side."""

    order: Int32s
    """(n,) tiles, most work first."""
    ptr: Int32s
    """(n + 1,) runs of tile t are ptr[t]:ptr[t+1] ..."""
    split: Int32s
    """(n,) ... of which those before split[t] are partial, the others full."""
    runs: Int32s
    """(runs, 3): first tile, end tile, row set; -1 when full."""
    work: TileWork


@dataclass(frozen=True, eq=False)
class TilePlan:
    """The tiles of a mask; n = num_q_tiles."""

    tq: int
    tk: int
    block_m: int
    block_n: int
    q: TileLists
    """Per q tile, runs of k tiles."""
    blocks: _Runs
    """What both lists are made of."""
    set_base: Int32s
    """(n,) first row set of each q tile."""
    num_row_sets: int
    ramps: Int32s
    """(r, 7): row set, first row in its tile, rows, lo, step of lo, hi, step of hi: what row sets
    hold, piece by piece. Rows of no piece see nothing."""

    @property
    def num_q_tiles(self) -> int:
        return -(-self.tq // self.block_m)

    @property
    def num_k_tiles(self) -> int:
        return -(-self.tk // self.block_n)

    @functools.cached_property
    def k(self) -> TileLists:
        """Per k tile, runs of q tiles; made when a backward first asks for it.

        In place of a row set, runs hold a set number r: the row set of a q tile is
        set_base[q tile] + r.
        """
        flipped = _transpose(self.blocks, self.num_q_tiles, self.num_k_tiles)
        return tile_lists(flipped, self.num_k_tiles, flipped.index)

    @functools.cached_property
    def num_full(self) -> int:
        """Full blocks."""
        return self._count(self.q.runs[:, 2] < 0)

    @functools.cached_property
    def num_partial(self) -> int:
        """Partial blocks; a block with several row sets counts once for each."""
        return self._count(self.q.runs[:, 2] >= 0)

    def _count(self, which: NDArray[np.bool_]) -> int:
        runs = self.q.runs[which].astype(np.int64)
        return int((runs[:, 1] - runs[:, 0]).sum())

    @functools.cached_property
    def row_sets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`draw_row_sets` of this plan, on the CPU."""
        return draw_row_sets(torch.from_numpy(self.ramps), self.num_row_sets, self.block_m)

    def pack(self, side: Literal["q", "k"]) -> tuple[Int32s, dict[str, tuple[int, int]]]:
        """The arrays of one side in one buffer, for one copy to a device: (buffer, places).

        A place is the (offset, length) of an array, by its name.
        """
        lists = self.q if side == "q" else self.k
        arrays = {name: getattr(lists, name) for name in ("order", "ptr", "split", "runs")}
        arrays |= {"set_base": self.set_base, "ramps": self.ramps}
        places: dict[str, tuple[int, int]] = {}
        size = 0
        for name, array in arrays.items():
            places[name] = (size, array.size)
            size += -(-max(array.size, 1) // _ALIGN) * _ALIGN
        buffer = np.zeros(size, np.int32)
        for name, (offset, length) in places.items():
            buffer[offset : offset + length] = arrays[name].reshape(-1)
        return buffer, places

    def describe(self) -> str:
        """One line for people."""
        blocks = self.num_q_tiles * self.num_k_tiles
        return (
            f"{self.tq} x {self.tk} in tiles of {self.block_m} x {self.block_n}: "
            f"{self.num_full} full + {self.num_partial} partial of {blocks} blocks, "
            f"{len(self.q.runs)} runs, {self.num_row_sets} row sets"
        )


@functools.lru_cache(maxsize=128)
def plan_tiles(mask: AttnMask, block_m: int, block_n: int) -> TilePlan:
    """The plan of a mask; the same mask by value gives the same object."""
    if block_m <= 0 or block_n <= 0:
        raise ValueError(f"block sizes must be positive, got {block_m} x {block_n}")
    num_q, num_k = -(-mask.tq // block_m), -(-mask.tk // block_n)
    pieces = _cut_at_tiles(mask.row_intervals(), block_m)
    num_sets = np.zeros(num_q, np.int64)
    np.maximum.at(num_sets, pieces.tile, pieces.index + 1)
    set_base = np.cumsum(num_sets) - num_sets
    full = full_runs(pieces, num_k, block_m, block_n)
    runs = with_partial(full, pieces, num_sets, num_k, block_n)
    row_set = np.where(runs.index < 0, -1, set_base[runs.lane] + runs.index)
    return TilePlan(
        tq=mask.tq,
        tk=mask.tk,
        block_m=block_m,
        block_n=block_n,
        q=tile_lists(runs, num_q, row_set),
        blocks=runs,
        set_base=set_base.astype(np.int32),
        num_row_sets=int(num_sets.sum()),
        ramps=ramps_of(pieces, set_base, block_m),
    )


@dataclass(frozen=True, slots=True)
class Pieces:
    """Row intervals cut at q tiles: rows [a, b) of a tile see [lo, hi), both affine."""

    tile: Ints
    index: Ints  # position of the interval in its row = set number within the tile
    a: Ints
    b: Ints
    lo_first: Ints
    lo_last: Ints
    hi_first: Ints
    hi_last: Ints


@dataclass(frozen=True, slots=True)
class _Runs:
    """k tiles [start, end) of q tile `lane` for set number `index`, -1 when full; or transposed.

    Sorted by lane, then set, full ones last, then start.
    """

    lane: Ints
    index: Ints
    start: Ints
    end: Ints


def _cut_at_tiles(rows: RowIntervals, block_m: int) -> Pieces:
    strip = rows.strip
    start, end = rows.start[strip], rows.end[strip]
    first_tile = start // block_m
    count = (end - 1) // block_m - first_tile + 1
    which = np.repeat(np.arange(len(strip)), count)
    tile = ragged_range(first_tile, count)
    a = np.maximum(start[which], tile * block_m)
    b = np.minimum(end[which], (tile + 1) * block_m)
    return pieces_of(rows, which, tile, a, b)


def pieces_of(rows: RowIntervals, which: Ints, tile: Ints, a: Ints, b: Ints) -> Pieces:
    """Rows [a, b) of the intervals `which`, each inside of one tile."""
    lo_base, lo_slope = rows.lo_base[which], rows.lo_slope[which]
    hi_base, hi_slope = rows.hi_base[which], rows.hi_slope[which]
    return Pieces(
        *(tile, rows.index[which], a, b),
        *(lo_base + lo_slope * a, lo_base + lo_slope * (b - 1)),
        *(hi_base + hi_slope * a, hi_base + hi_slope * (b - 1)),
    )


def full_runs(pieces: Pieces, num_k: int, rows: int | Ints, block_n: int) -> _Runs:
    """A block is full when pieces that span its k tile hold all rows of its tile together.

    rows: of every tile, or (tiles,) of each.
    """
    start, end = -(-pieces.lo_last // block_n), pieces.hi_first // block_n
    spans = np.flatnonzero(start < end)  # faster to index with than what it is made of
    lane, first, last = _sweep(
        pieces.tile[spans],
        start[spans],
        end[spans],
        pieces.b[spans] - pieces.a[spans],
        num_k,
        need=rows,
    )
    return _Runs(lane, np.full(len(lane), -1), first, last)


def with_partial(full: _Runs, pieces: Pieces, num_sets: Ints, num_k: int, block_n: int) -> _Runs:
    """All runs, by (tile, set): the k tiles that pieces touch, less the full ones; full last."""
    sets = int(num_sets.max(initial=0)) + 1  # one more for the full runs
    touched = _united(
        pieces.tile * sets + pieces.index,
        pieces.lo_first // block_n,
        -(-pieces.hi_last // block_n),
        num_k,
    )
    # Only in tiles that have full blocks is there anything to take out.
    mixed = np.zeros(len(num_sets), bool)
    mixed[full.lane] = True
    mixed = mixed[touched[0] // sets]
    alone, beside = np.flatnonzero(~mixed), np.flatnonzero(mixed)
    copies = num_sets[full.lane]  # a full block is taken out of every set of its tile
    out = (
        ragged_range(full.lane * sets, copies),
        np.repeat(full.start, copies),
        np.repeat(full.end, copies),
    )
    lane, start, end = (np.concatenate([x[beside], y]) for x, y in zip(touched, out, strict=True))
    weight = np.repeat([1, -2], [len(beside), len(out[0])])
    rest = _sweep(lane, start, end, weight, num_k)
    last = ((full.lane + 1) * sets - 1, full.start, full.end)
    lane, start, end = (
        np.concatenate([x[alone], y, z]) for x, y, z in zip(touched, rest, last, strict=True)
    )
    order = order_by(lane)
    tile, index = np.divmod(lane[order], sets)
    return _Runs(tile, np.where(index == sets - 1, -1, index), start[order], end[order])


def _united(lane: Ints, start: Ints, end: Ints, length: int) -> tuple[Ints, Ints, Ints]:
    """Maximal segments that the segments [start, end) of each lane cover together."""
    stride = length + 1  # a gap behind each lane
    offset = lane * stride
    first, order = sort_with_index(offset + start)
    reach = np.maximum.accumulate((offset + end)[order])
    opens = np.flatnonzero(np.append(True, first[1:] > reach[:-1])[: len(first)])
    first, last = first[opens], reach[np.append(opens[1:], len(reach))[: len(opens)] - 1]
    lane = first // stride
    return lane, first - lane * stride, last - lane * stride


def _sweep(
    lane: Ints, start: Ints, end: Ints, weight: Ints, length: int, need: int | Ints | None = None
) -> tuple[Ints, Ints, Ints]:
    """Maximal segments of each lane whose weights sum to its `need` (default: to more than 0)."""
    stride = length + 1
    key = np.concatenate([lane * stride + start, lane * stride + end])
    change = np.concatenate([weight, -weight])
    key, order = sort_with_index(key)
    level = np.cumsum(change[order])[:-1]
    if isinstance(need, np.ndarray):
        need = need[key[:-1] // stride]
    inside = (key[1:] > key[:-1]) & (level > 0 if need is None else level == need)
    at = np.flatnonzero(inside)
    first, last = key[at], key[at + 1]
    touches = first[1:] == last[:-1]
    first = first[np.append(True, ~touches)[: len(first)]]
    last = last[np.append(~touches, True)[: len(last)]]
    lane = first // stride
    return lane, first - lane * stride, last - lane * stride


def _transpose(runs: _Runs, num_q: int, num_k: int) -> _Runs:
    """The same blocks as runs of q tiles per k tile.

    A block becomes one integer, its cell: that of the next q tile (same k tile, same set) is the
    next integer. Few blocks are simply sorted. Where runs are long, only cells where a transposed
    run begins or ends are made, so that the cost never follows the area of the mask.
    """
    sets = int(runs.index.max(initial=-1)) + 2
    index = np.where(runs.index < 0, sets - 1, runs.index)
    stride = num_q + 2  # a gap on both sides of each set
    lane = index * stride + runs.lane + 1
    if (runs.end - runs.start).sum() <= 4 * len(lane):
        cell = _cells(lane, runs.start, runs.end, sets * stride)
        begins = np.flatnonzero(np.diff(cell, prepend=-1) > 1)
        first, last = cell[begins], cell[np.append(begins[1:], len(cell))[: len(begins)] - 1]
    else:
        first, last = (
            _cells(
                *_sweep(
                    np.concatenate([lane, lane + neighbour]),
                    np.tile(runs.start, 2),
                    np.tile(runs.end, 2),
                    np.repeat([1, -2], len(lane)),
                    num_k,
                ),
                sets * stride,
            )
            for neighbour in (+1, -1)
        )
    k_tile, first = np.divmod(first, sets * stride)
    index, first = np.divmod(first, stride)
    return _Runs(k_tile, np.where(index == sets - 1, -1, index), first - 1, last % stride)


def _cells(lane: Ints, start: Ints, end: Ints, stride: int) -> Ints:
    """Sorted lane + stride * k for every k of [start, end)."""
    count = end - start
    behind = np.cumsum(count) - count
    cells = np.repeat(lane + stride * (start - behind), count)
    cells += stride * np.arange(len(cells))
    if cells.max(initial=0) < 1 << 31:  # these have no order to profit from: halve the bytes
        return np.sort(cells.astype(np.int32))
    return np.sort(cells)


def tile_lists(runs: _Runs, num_lanes: int, row_set: Ints) -> TileLists:
    is_partial = runs.index >= 0
    ptr = np.concatenate([[0], np.cumsum(np.bincount(runs.lane, minlength=num_lanes))])
    split = ptr[:-1] + np.bincount(runs.lane[is_partial], minlength=num_lanes)
    cost = (runs.end - runs.start) * np.where(is_partial, PARTIAL_COST, 1.0)
    work = np.bincount(runs.lane, weights=cost, minlength=num_lanes)
    return TileLists(
        order=np.argsort(-work, kind="stable").astype(np.int32),
        ptr=ptr.astype(np.int32),
        split=split.astype(np.int32),
        runs=_columns(runs.start, runs.end, row_set),
        work=TileWork(float(work.max(initial=0)), float(work.sum()), num_lanes),
    )


def _columns(*columns: Ints | NDArray[np.bool_]) -> Int32s:
    """(n, len(columns))"""
    table = np.empty((len(columns[0]), len(columns)), np.int32)
    for n, column in enumerate(columns):
        table[:, n] = column
    return table


def ramps_of(pieces: Pieces, set_base: Ints, block_m: int) -> Int32s:
    row_set, first = set_base[pieces.tile] + pieces.index, pieces.a - pieces.tile * block_m
    return _columns(
        *(row_set, first, pieces.b - pieces.a),
        *(pieces.lo_first, pieces.lo_last > pieces.lo_first),  # steps are 0 or 1
        *(pieces.hi_first, pieces.hi_last > pieces.hi_first),
    )


def draw_row_sets(
    ramps: torch.Tensor, num_sets: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row_lo, row_hi), int32 (num_sets, block_m), from `TilePlan.ramps` on any device.

    Row r of a set sees keys [lo, hi); lo == hi where it sees nothing. A ramp lo, lo + step, ...
    between zeros has four second differences, so two running sums over the array draw all ramps
    at once. Sums may wrap around on the way; the results are exact.
    """
    row_set, row, rows, lo, lo_step, hi, hi_step = ramps.unbind(1)
    place = row_set.long() * block_m + row
    end = place + rows
    where = torch.cat([place, place + 1, end, end + 1])
    drawn = []
    for first, step in ((lo, lo_step), (hi, hi_step)):
        last = first + step * (rows - 1)
        change = torch.cat([first, step - first, -last - step, last])
        differences = change.new_zeros(num_sets * block_m + 2).index_add_(0, where, change)
        twice = differences.cumsum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        drawn.append(twice[:-2].view(num_sets, block_m))
    return drawn[0], drawn[1]
