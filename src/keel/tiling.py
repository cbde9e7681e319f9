"""From masks to tiles: which (q tile, k tile) blocks a kernel computes, and which need masking.

Plan of a mask for tiles of block_m queries x block_n keys:

- ``q_runs``: per q tile, runs [start, end) of k tiles, masked ("partial") runs first, then full
  ones. A partial run names the *row set* to mask with: one key interval [lo, hi) per row.
  A row with several intervals in one tile appears in several row sets, which are disjoint.
- ``k_runs``: the same blocks transposed, per k tile, for the backward.
- ``q_order`` / ``k_order``: tiles by falling work, so that the longest start first.

A block is full when every one of its block_m x block_n pairs attends; blocks that hang over the
end of a tensor are therefore partial, and kernels need no bounds checks on full ones.
Runs, not blocks, are stored: a plan grows with the slices and tiles, never with tq x tk.
Everything is numpy on the host; plans are cached by value.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keel.masks.intervals import Ints, RowIntervals, ragged_arange
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


@dataclass(frozen=True, eq=False)
class TilePlan:
    """int32 arrays; n = num_q_tiles, m = num_k_tiles, s = number of row sets."""

    tq: int
    tk: int
    block_m: int
    block_n: int
    q_order: Int32s
    """(n,) q tiles, most work first."""
    q_ptr: Int32s
    """(n + 1,) runs of q tile t are q_ptr[t]:q_ptr[t+1] ..."""
    q_split: Int32s
    """(n,) ... of which those before q_split[t] are partial, the others full."""
    q_runs: Int32s
    """(runs, 3): first k tile, end k tile, row set (-1 when full)."""
    k_order: Int32s
    """(m,) k tiles, most work first."""
    k_ptr: Int32s
    """(m + 1,) as q_ptr."""
    k_split: Int32s
    """(m,) as q_split."""
    k_runs: Int32s
    """(runs, 3): first q tile, end q tile, set number r (-1 when full): the row set of a q tile
    is set_base[q tile] + r."""
    set_base: Int32s
    """(n,) first row set of each q tile."""
    row_lo: Int32s
    """(s, block_m) first key of each row's interval."""
    row_hi: Int32s
    """(s, block_m) end of it; lo == hi for rows that see nothing."""

    q_work: TileWork
    k_work: TileWork

    SECTIONS = (
        *("q_order", "q_ptr", "q_split", "q_runs", "k_order", "k_ptr", "k_split", "k_runs"),
        *("set_base", "row_lo", "row_hi"),
    )

    @property
    def num_q_tiles(self) -> int:
        return len(self.q_order)

    @property
    def num_k_tiles(self) -> int:
        return len(self.k_order)

    @functools.cached_property
    def num_full(self) -> int:
        """Full blocks."""
        return self._count(self.q_runs[:, 2] < 0)

    @functools.cached_property
    def num_partial(self) -> int:
        """Partial blocks; a block with several row sets counts once for each."""
        return self._count(self.q_runs[:, 2] >= 0)

    def _count(self, which: NDArray[np.bool_]) -> int:
        runs = self.q_runs[which].astype(np.int64)
        return int((runs[:, 1] - runs[:, 0]).sum())

    def pack(self) -> tuple[Int32s, dict[str, tuple[int, int]]]:
        """All arrays in one buffer, for one copy to a device, with (offset, length) of each."""
        place: dict[str, tuple[int, int]] = {}
        size = 0
        for name in self.SECTIONS:
            length = getattr(self, name).size
            place[name] = (size, length)
            size += -(-max(length, 1) // _ALIGN) * _ALIGN
        buffer = np.zeros(size, np.int32)
        for name, (offset, length) in place.items():
            buffer[offset : offset + length] = getattr(self, name).reshape(-1)
        return buffer, place

    def describe(self) -> str:
        """One line for people."""
        blocks = self.num_q_tiles * self.num_k_tiles
        return (
            f"{self.tq} x {self.tk} in tiles of {self.block_m} x {self.block_n}: "
            f"{self.num_full} full + {self.num_partial} partial of {blocks} blocks, "
            f"{len(self.q_runs)} runs, {len(self.row_lo)} row sets"
        )


@functools.lru_cache(maxsize=128)
def plan_tiles(mask: AttnMask, block_m: int, block_n: int) -> TilePlan:
    """The plan of a mask; the same mask by value gives the same object."""
    if block_m <= 0 or block_n <= 0:
        raise ValueError(f"block sizes must be positive, got {block_m} x {block_n}")
    num_q, num_k = -(-mask.tq // block_m), -(-mask.tk // block_n)
    pieces = _cut_at_tiles(mask.row_intervals(), block_m)
    full = _full_runs(pieces, num_k, block_m, block_n)
    partial = _partial_runs(pieces, full, num_k, block_n)

    num_sets = np.zeros(num_q, np.int64)
    np.maximum.at(num_sets, pieces.tile, pieces.index + 1)
    set_base = np.cumsum(num_sets) - num_sets
    row_lo, row_hi = _row_sets(pieces, set_base, int(num_sets.sum()), block_m)

    q_order, q_ptr, q_split, q_runs, q_work = _pack_runs(
        num_q,
        (partial.lane, partial.start, partial.end, set_base[partial.lane] + partial.index),
        (full.lane, full.start, full.end, np.full(len(full.lane), -1)),
    )
    full_k, full_first, full_end, _ = _transpose(full, num_q, num_k)
    k_order, k_ptr, k_split, k_runs, k_work = _pack_runs(
        num_k,
        _transpose(partial, num_q, num_k),
        (full_k, full_first, full_end, np.full(len(full_k), -1)),
    )
    return TilePlan(
        tq=mask.tq,
        tk=mask.tk,
        block_m=block_m,
        block_n=block_n,
        q_order=q_order,
        q_ptr=q_ptr,
        q_split=q_split,
        q_runs=q_runs,
        k_order=k_order,
        k_ptr=k_ptr,
        k_split=k_split,
        k_runs=k_runs,
        set_base=set_base.astype(np.int32),
        row_lo=row_lo,
        row_hi=row_hi,
        q_work=q_work,
        k_work=k_work,
    )


@dataclass(frozen=True, slots=True)
class _Pieces:
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
    """k tiles [start, end) of q tile `lane`, for set number `index`."""

    lane: Ints
    index: Ints
    start: Ints
    end: Ints


def _cut_at_tiles(rows: RowIntervals, block_m: int) -> _Pieces:
    strip = rows.strip
    start, end = rows.start[strip], rows.end[strip]
    first_tile = start // block_m
    count = (end - 1) // block_m - first_tile + 1
    which = np.repeat(np.arange(len(strip)), count)
    tile = first_tile[which] + ragged_arange(count)
    a = np.maximum(start[which], tile * block_m)
    b = np.minimum(end[which], (tile + 1) * block_m)
    lo_base, lo_slope = rows.lo_base[which], rows.lo_slope[which]
    hi_base, hi_slope = rows.hi_base[which], rows.hi_slope[which]
    return _Pieces(
        *(tile, rows.index[which], a, b),
        *(lo_base + lo_slope * a, lo_base + lo_slope * (b - 1)),
        *(hi_base + hi_slope * a, hi_base + hi_slope * (b - 1)),
    )


def _full_runs(pieces: _Pieces, num_k: int, block_m: int, block_n: int) -> _Runs:
    """A block is full when pieces that span its k tile hold block_m rows together."""
    start, end = -(-pieces.lo_last // block_n), pieces.hi_first // block_n
    spans = start < end
    lane, first, last = _sweep(
        pieces.tile[spans],
        start[spans],
        end[spans],
        (pieces.b - pieces.a)[spans],
        num_k,
        need=block_m,
    )
    return _Runs(lane, np.zeros_like(lane), first, last)


def _partial_runs(pieces: _Pieces, full: _Runs, num_k: int, block_n: int) -> _Runs:
    """Per (tile, set): the k tiles that pieces touch, less the full ones."""
    sets = int(pieces.index.max(initial=0)) + 1
    lane = np.concatenate([pieces.tile * sets + pieces.index, np.repeat(full.lane * sets, sets)])
    lane[len(pieces.tile) :] += np.tile(np.arange(sets), len(full.lane))
    start = np.concatenate([pieces.lo_first // block_n, np.repeat(full.start, sets)])
    end = np.concatenate([-(-pieces.hi_last // block_n), np.repeat(full.end, sets)])
    weight = np.ones(len(lane), np.int64)
    weight[len(pieces.tile) :] = -(len(pieces.tile) + 1)  # outweighs any number of pieces
    lane, start, end = _sweep(lane, start, end, weight, num_k)
    return _Runs(lane // sets, lane % sets, start, end)


def _sweep(
    lane: Ints, start: Ints, end: Ints, weight: Ints, length: int, need: int | None = None
) -> tuple[Ints, Ints, Ints]:
    """Maximal segments of each lane whose weights sum to `need` (default: to more than 0)."""
    stride = length + 1
    key = np.concatenate([lane * stride + start, lane * stride + end])
    change = np.concatenate([weight, -weight])
    order = np.argsort(key, kind="stable")
    key = key[order]
    level = np.cumsum(change[order])[:-1]
    inside = (key[1:] > key[:-1]) & (level > 0 if need is None else level == need)
    first, last = key[:-1][inside], key[1:][inside]
    touches = first[1:] == last[:-1]
    first = first[np.append(True, ~touches)[: len(first)]]
    last = last[np.append(~touches, True)[: len(last)]]
    lane = first // stride
    return lane, first - lane * stride, last - lane * stride


def _transpose(runs: _Runs, num_q: int, num_k: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Runs of q tiles per k tile: (k tile, first q tile, end q tile, set number).

    A run begins where a k tile is in q tile t but not in t - 1, and ends where it is not in
    t + 1. Only those cells are enumerated, so the cost follows the number of resulting runs.
    """
    lane = runs.index * (num_q + 2) + runs.lane + 1  # a gap on both sides of each set

    def edges(neighbour: int) -> tuple[Ints, Ints]:
        here, start, end = _sweep(
            np.concatenate([lane, lane + neighbour]),
            np.tile(runs.start, 2),
            np.tile(runs.end, 2),
            np.repeat([1, -2], len(lane)),
            num_k,
        )
        count = end - start
        return np.repeat(here, count), np.repeat(start, count) + ragged_arange(count)

    (begin_lane, begin_k), (end_lane, end_k) = edges(+1), edges(-1)
    begin = np.lexsort((begin_lane, begin_k, begin_lane // (num_q + 2)))
    end = np.lexsort((end_lane, end_k, end_lane // (num_q + 2)))
    index, first = np.divmod(begin_lane[begin], num_q + 2)
    return begin_k[begin], first - 1, end_lane[end] % (num_q + 2), index


def _pack_runs(
    num_lanes: int,
    partial: tuple[Ints, Ints, Ints, Ints],
    full: tuple[Ints, Ints, Ints, Ints],
) -> tuple[Int32s, Int32s, Int32s, Int32s, TileWork]:
    """CSR of runs per lane, partial before full, with lanes ordered by falling work."""
    lane, start, end, row_set = (np.concatenate(x) for x in zip(partial, full, strict=True))
    is_full = np.arange(len(lane)) >= len(partial[0])
    order = np.lexsort((start, is_full, lane))
    count = np.bincount(lane, minlength=num_lanes)
    ptr = np.concatenate([[0], np.cumsum(count)])
    split = ptr[:-1] + np.bincount(partial[0], minlength=num_lanes)
    cost = (end - start) * np.where(is_full, 1.0, PARTIAL_COST)
    work = np.bincount(lane, weights=cost, minlength=num_lanes)
    longest_first = np.argsort(-work, kind="stable")
    runs = np.stack([start, end, row_set], 1)[order]
    total = TileWork(float(work.max(initial=0)), float(work.sum()), num_lanes)
    arrays = (x.astype(np.int32) for x in (longest_first, ptr, split, runs))
    return *arrays, total  # type: ignore[return-value]


def _row_sets(
    pieces: _Pieces, set_base: Ints, num_sets: int, block_m: int
) -> tuple[Int32s, Int32s]:
    """Per row set and row of its tile, the interval [lo, hi); 0, 0 where there is none.

    A piece is a ramp first, first + slope, ..., last between zeros. Its second differences are
    four numbers, so two running sums over the whole array draw all ramps at once, several times
    faster than writing them row by row. Sums may wrap around on the way; the results are exact.
    """
    length = pieces.b - pieces.a
    place = (set_base[pieces.tile] + pieces.index) * block_m + pieces.a - pieces.tile * block_m
    end = place + length
    sets = []
    for first, last in ((pieces.lo_first, pieces.lo_last), (pieces.hi_first, pieces.hi_last)):
        slope = (last - first) // np.maximum(length - 1, 1)
        rows = np.zeros(num_sets * block_m + 2, np.int32)
        for where, change in (
            (place, first),
            (place + 1, slope - first),
            (end, -last - slope),
            (end + 1, last),
        ):
            rows[where] += change.astype(np.int32)  # pieces are disjoint: no place comes twice
        np.cumsum(rows, dtype=np.int32, out=rows)
        np.cumsum(rows, dtype=np.int32, out=rows)
        sets.append(rows[:-2].reshape(num_sets, block_m))
    return sets[0], sets[1]
