"""Row intervals: what each query sees, as disjoint key intervals that are affine in the row.

Every slice is, per row, one interval whose ends are constant or move with the row. So the query
axis falls into a few *strips* in which the union of all slices is a fixed list of intervals
``[lo, hi)`` with ``lo = lo_base + lo_slope * i`` (slopes 0 or 1). Strips are the exact, compact
form of a mask: its size follows the number of slices, not the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keel.masks.arrays import Ints, distinct, order_by, ragged_arange, ragged_range

UNBOUNDED = 1 << 40
"""Band limit that no pair of tokens reaches (token counts stay below 2**31)."""


@dataclass(frozen=True, slots=True)
class RowIntervals:
    """Strips [start[s], end[s]) of rows; strip s owns intervals ptr[s]:ptr[s+1], sorted by key.

    Rows outside every strip see nothing. Intervals of a row are disjoint and not empty.
    """

    start: Ints
    end: Ints
    ptr: Ints
    lo_base: Ints
    lo_slope: Ints
    hi_base: Ints
    hi_slope: Ints

    @property
    def strip(self) -> Ints:
        """Strip of each interval."""
        return np.repeat(np.arange(len(self.start)), np.diff(self.ptr))

    @property
    def index(self) -> Ints:
        """Position of each interval in its row: 0 for the leftmost."""
        return np.arange(len(self.lo_base)) - np.repeat(self.ptr[:-1], np.diff(self.ptr))

    def area(self) -> int:
        """Exact number of attended pairs: widths are arithmetic series within a strip."""
        strip = self.strip
        first, last = self.start[strip], self.end[strip] - 1
        width_first = self.hi_base - self.lo_base + (self.hi_slope - self.lo_slope) * first
        width_last = self.hi_base - self.lo_base + (self.hi_slope - self.lo_slope) * last
        return int(((last - first + 1) * (width_first + width_last) // 2).sum())

    def of_row(self, i: int) -> list[tuple[int, int]]:
        """The intervals [(lo, hi), ...] of row i."""
        s = int(np.searchsorted(self.start, i, side="right")) - 1
        if s < 0 or i >= self.end[s]:
            return []
        part = slice(self.ptr[s], self.ptr[s + 1])
        lo = self.lo_base[part] + self.lo_slope[part] * i
        hi = self.hi_base[part] + self.hi_slope[part] * i
        return [(int(a), int(b)) for a, b in zip(lo, hi, strict=True)]

    def expand(self) -> tuple[Ints, Ints, Ints]:
        """(row, lo, hi) of every interval of every row; as long as the mask has row intervals."""
        strip = self.strip
        length = (self.end - self.start)[strip]
        which = np.repeat(np.arange(len(strip)), length)
        row = ragged_range(self.start[strip], length)
        lo = self.lo_base[which] + self.lo_slope[which] * row
        hi = self.hi_base[which] + self.hi_slope[which] * row
        return row, lo, hi


def row_intervals(slices: Ints) -> RowIntervals:
    """The union of slices (n, 6) [q0, q1, k0, k1, lo, hi] as row intervals."""
    pieces = _affine_pieces(slices)
    start, end = pieces[0], pieces[1]
    if np.all(start[1:] >= end[:-1]):  # nothing overlaps: pieces are strips
        return _coalesce(start, end, np.arange(len(start) + 1), *pieces[2:])
    bounds = distinct(np.concatenate([start, end]))
    crossings = _crossings(bounds, pieces)
    if len(crossings):
        bounds = distinct(np.concatenate([bounds, crossings]))
    return _merge(bounds, pieces)


Pieces = tuple[Ints, Ints, Ints, Ints, Ints, Ints]


def _affine_pieces(slices: Ints) -> Pieces:
    """Cuts slices where a bound changes slope: (start, end, lo_base, lo_slope, hi_base, hi_slope).

    Sorted by start; every row of a piece sees at least one key.
    """
    q0, q1, k0, k1, lo, hi = slices.T
    a, b = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    keep = (a < b) & (k0 < k1) & (lo <= hi)
    a, b, k0, k1, lo, hi = (x[keep] for x in (a, b, k0, k1, lo, hi))
    lo_moves, hi_stops = np.clip(k0 - lo, a, b), np.clip(k1 - hi - 1, a, b)
    mid0, mid1 = np.minimum(lo_moves, hi_stops), np.maximum(lo_moves, hi_stops)
    start, end = np.concatenate([a, mid0, mid1]), np.concatenate([mid0, mid1, b])
    k0, k1, lo, hi = (np.tile(x, 3) for x in (k0, k1, lo, hi))
    lo_slope, hi_slope = start >= k0 - lo, start < k1 - hi - 1
    lo_base, hi_base = np.where(lo_slope, lo, k0), np.where(hi_slope, hi + 1, k1)
    order = np.flatnonzero(start < end)
    order = order[order_by(start[order])]
    columns = (start, end, lo_base, lo_slope, hi_base, hi_slope)
    return tuple(x[order].astype(np.int64) for x in columns)  # type: ignore[return-value]


def _active(bounds: Ints, pieces: Pieces) -> tuple[Ints, Ints]:
    """(strip, piece) pairs: which pieces are active between neighbouring bounds."""
    first, last = np.searchsorted(bounds, pieces[0]), np.searchsorted(bounds, pieces[1])
    count = last - first
    return ragged_range(first, count), np.repeat(np.arange(len(first)), count)


def _crossings(bounds: Ints, pieces: Pieces) -> Ints:
    """Rows where a fixed and a moving bound of one strip meet, and the rows after them.

    Cutting there leaves strips in which any two bounds keep their order on all rows.
    """
    strip, piece = _active(bounds, pieces)
    _, _, lo_base, lo_slope, hi_base, hi_slope = pieces
    crowded = _crowded(bounds, strip, piece, pieces)
    strip, piece = strip[crowded], piece[crowded]
    base = np.concatenate([lo_base[piece], hi_base[piece]])
    slope = np.concatenate([lo_slope[piece], hi_slope[piece]])
    # One integer per (strip, base): sorted, what a strip holds between two keys is one stretch.
    fixed = distinct((np.tile(strip, 2)[slope == 0] << 32) + base[slope == 0])
    moving = np.tile(strip, 2)[slope == 1], base[slope == 1]
    key = (moving[0] << 32) + moving[1]
    begin = np.searchsorted(fixed, key + bounds[moving[0]])
    count = np.searchsorted(fixed, key + bounds[moving[0] + 1]) - begin
    row = fixed[ragged_range(begin, count)] - np.repeat(key, count)
    where = np.repeat(moving[0], count)
    row, where = np.concatenate([row, row + 1]), np.tile(where, 2)
    return distinct(row[(row > bounds[where]) & (row < bounds[where + 1])])


def _crowded(bounds: Ints, strip: Ints, piece: Ints, pieces: Pieces) -> NDArray[np.bool_]:
    """Which active pieces are in strips where keys of two pieces meet: only there bounds cross."""
    _, _, lo_base, lo_slope, hi_base, hi_slope = pieces
    low = lo_base[piece] + lo_slope[piece] * bounds[strip]
    high = hi_base[piece] + hi_slope[piece] * (bounds[strip + 1] - 1)
    order = order_by(strip, low)
    offset = strip[order] * (int(high.max()) + 1)  # keeps strips apart, as in `_merge`
    reach = np.maximum.accumulate(high[order] + offset)
    meets = low[order][1:] + offset[1:] <= reach[:-1]
    meets &= strip[order][1:] == strip[order][:-1]
    found = np.zeros(len(bounds), bool)
    found[strip[order][1:][meets]] = True
    return found[strip]


def _merge(bounds: Ints, pieces: Pieces) -> RowIntervals:
    """Unites the intervals of each strip; the order of bounds is constant within a strip."""
    strip, piece = _active(bounds, pieces)
    _, _, lo_base, lo_slope, hi_base, hi_slope = pieces
    # Starts keep their order within a strip: the sum of the first and the last tells it.
    starts = 2 * lo_base[piece] + lo_slope[piece] * (bounds[strip] + bounds[strip + 1] - 1)
    order = order_by(strip, starts)
    strip, piece = strip[order], piece[order]
    first, last = bounds[strip], bounds[strip + 1] - 1
    lo_base, lo_slope, hi_base, hi_slope = (x[piece] for x in pieces[2:])
    lo_first, lo_last = lo_base + lo_slope * first, lo_base + lo_slope * last
    hi_first, hi_last = hi_base + hi_slope * first, hi_base + hi_slope * last
    # Running maximum per strip: an offset that grows with the strip keeps strips apart.
    offset = strip * (int(hi_last.max()) + 1)
    hi_first = np.maximum.accumulate(hi_first + offset) - offset
    hi_last = np.maximum.accumulate(hi_last + offset) - offset
    opens = np.ones(len(strip), bool)
    opens[1:] = (
        (strip[1:] != strip[:-1]) | (lo_first[1:] > hi_first[:-1]) | (lo_last[1:] > hi_last[:-1])
    )
    head = np.flatnonzero(opens)
    tail = np.append(head[1:], len(strip)) - 1
    # Slopes are 0 or 1.
    lo_slope = (lo_last[head] > lo_first[head]).astype(np.int64)
    hi_slope = (hi_last[tail] > hi_first[tail]).astype(np.int64)
    ptr = np.flatnonzero(np.append(True, np.diff(strip[head]) > 0))
    strips = strip[head][ptr]
    return _coalesce(
        bounds[strips],
        bounds[strips + 1],
        np.append(ptr, len(head)),
        lo_first[head] - lo_slope * first[head],
        lo_slope,
        hi_first[tail] - hi_slope * first[head],
        hi_slope,
    )


def _coalesce(
    start: Ints, end: Ints, ptr: Ints, lo_base: Ints, lo_slope: Ints, hi_base: Ints, hi_slope: Ints
) -> RowIntervals:
    """Joins neighbouring strips that hold the same intervals."""
    count = np.diff(ptr)
    joins = np.zeros(len(start), bool)
    joins[1:] = (end[:-1] == start[1:]) & (count[:-1] == count[1:])
    if joins.any():
        columns = (lo_base, lo_slope, hi_base, hi_slope)
        strip = np.repeat(np.arange(len(start)), count)
        candidates = np.flatnonzero(joins[strip])
        before = candidates - count[strip[candidates]]
        differs = np.zeros(len(candidates), bool)
        for column in columns:
            differs |= column[candidates] != column[before]
        joins[strip[candidates[differs]]] = False
        keep = ~joins
        last = np.append(np.flatnonzero(keep)[1:], len(start)) - 1
        kept = np.flatnonzero(keep[strip])
        lo_base, lo_slope, hi_base, hi_slope = (column[kept] for column in columns)
        start, end = start[keep], end[last]
        ptr = np.concatenate([[0], np.cumsum(count[keep])])
    return RowIntervals(start, end, ptr, lo_base, lo_slope, hi_base, hi_slope)


def slices_of_rows(row: Ints, lo: Ints, hi: Ints) -> Ints:
    """The inverse: intervals (row, lo, hi), sorted by row then key, as few slices (n, 6).

    Neighbouring rows join as long as both ends stay or both move by their own constant 0 or 1.
    """
    if len(row) == 0:
        return np.zeros((0, 6), np.int64)
    counts = np.bincount(row)
    index = ragged_arange(counts)
    order = np.lexsort((row, index))  # by position in the row, then by row
    row, lo, hi, index = row[order], lo[order], hi[order], index[order]
    dlo, dhi = np.diff(lo), np.diff(hi)
    same_shape = (np.diff(row) == 1) & (np.diff(index) == 0) & (counts[row[1:]] == counts[row[:-1]])
    steps = same_shape & (dlo >= 0) & (dlo <= 1) & (dhi >= 0) & (dhi <= 1)
    # A run of rows may grow only while its slopes stay the ones of its first step.
    opens = np.ones(len(row), bool)
    opens[1:] = ~steps
    changes = np.zeros(len(row), bool)
    changes[2:] = steps[1:] & steps[:-1] & ((dlo[1:] != dlo[:-1]) | (dhi[1:] != dhi[:-1]))
    opens |= changes
    head = np.flatnonzero(opens)
    tail = np.append(head[1:], len(row)) - 1
    has_slope = tail > head
    nxt = np.minimum(head + 1, len(row) - 1)
    lo_moves, hi_moves = has_slope & (lo[nxt] > lo[head]), has_slope & (hi[nxt] > hi[head])
    band_lo = np.where(lo_moves, lo[head] - row[head], -UNBOUNDED)
    band_hi = np.where(hi_moves, hi[head] - 1 - row[head], UNBOUNDED)
    return np.stack([row[head], row[tail] + 1, lo[head], hi[tail], band_lo, band_hi], 1)
