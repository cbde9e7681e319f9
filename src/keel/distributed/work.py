"""What a layout means for a mask: tiles that ranks compute, and rows that they receive."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from keel.distributed.layout import Layout
from keel.distributed.plan import merged
from keel.masks.arrays import Ints, order_by, ragged_range
from keel.masks.intervals import RowIntervals
from keel.masks.mask import AttnMask

Floats = NDArray[np.float64]


@functools.lru_cache(maxsize=8)
def tile_work(mask: AttnMask, unit: int) -> Floats:
    """(ceil(tq / unit),) tiles of unit x unit pairs that each unit of queries touches."""
    count = -(-mask.tq // unit)
    tile, lo, hi = _seen(mask.row_intervals(), np.arange(count + 1) * unit)
    work = _covered(tile, lo // unit, -(-hi // unit), count).astype(np.float64)
    work.flags.writeable = False  # all who ask get this one
    return work


def keys_seen(mask: AttnMask, unit: int) -> tuple[Ints, Ints]:
    """(ceil(tq / unit),) twice: first and last + 1 of the keys that each unit of queries sees.

    A unit that sees nothing has (tk, 0).
    """
    count = -(-mask.tq // unit)
    tile, lo, hi = _seen(mask.row_intervals(), np.arange(count + 1) * unit)
    tile, lo, hi = tile[lo < hi], lo[lo < hi], hi[lo < hi]
    first, last = np.full(count, mask.tk, np.int64), np.zeros(count, np.int64)
    np.minimum.at(first, tile, lo)
    np.maximum.at(last, tile, hi)
    return first, last


def least_seen(units: Floats, work: Floats, keys: Ints, most: float) -> int:
    """Keys that the busiest rank sees at least, if every unit of a document sees all of it.

    Documents have so many units, with so much work in all, that see so many keys; most: work of a
    unit, averaged over a rank, that no rank passes. The ranks with units of a document above it
    must hold others that are below, and if no rank sees more than n keys, these come from documents
    of at most n less its own.

    >>> lengths = np.array([8, 4, 2, 1, 1])
    >>> least_seen(lengths * 1.0, lengths * lengths * 1.0, lengths, most=5.5)
    12
    """
    spare, least = units * most - work, int(keys.max(initial=0))
    for document in np.flatnonzero(spare < 0):
        others = np.flatnonzero(spare > 0)
        others = others[np.argsort(keys[others], kind="stable")]
        enough = int(np.searchsorted(spare[others].cumsum(), -spare[document]))
        if len(others):
            beside = keys[others[min(enough, len(others) - 1)]]
            least = max(least, int(keys[document] + beside))
    return least


def work_of_ranks(mask: AttnMask, layout: Layout, unit: int = 128) -> Floats:
    """(num_ranks,) tiles of each rank; ranks that share a unit share its tiles by tokens."""
    work = tile_work(mask, unit)
    bounds = np.minimum(np.arange(len(work) + 1) * unit, mask.tq)
    before = np.append(0.0, np.cumsum(work))
    mine = np.interp(layout.ends, bounds, before) - np.interp(layout.starts, bounds, before)
    return np.bincount(layout.ranks, mine, layout.num_ranks).astype(np.float64)


@functools.lru_cache(maxsize=8)
def rows_received(mask: AttnMask, layout: Layout, k_layout: Layout | None = None) -> Ints:
    """(num_ranks,) distinct keys that the queries of a rank see and that it does not hold.

    k_layout: where keys are, if they are other tokens than the queries.
    """
    k_layout = layout if k_layout is None else k_layout
    if mask.shape != (layout.total, k_layout.total):
        raise ValueError(
            f"layouts of {(layout.total, k_layout.total)} tokens do not fit a mask of {mask.shape}"
        )
    piece, lo, hi = _seen(mask.row_intervals(), np.append(layout.starts, layout.total))
    rank = np.concatenate([layout.ranks[piece], k_layout.ranks])
    lo, hi = np.concatenate([lo, k_layout.starts]), np.concatenate([hi, k_layout.ends])
    rows = _covered(rank, lo, hi, layout.num_ranks) - k_layout.rows
    rows.flags.writeable = False
    return rows


def tiles_read(mask: AttnMask, layout: Layout, unit: int) -> tuple[Floats, Floats]:
    """(num_ranks, ceil(tk / unit)) each: rows of a unit of keys that the queries of a rank see, and
    tiles of unit x unit pairs in which they see some of them."""
    count, num_ranks = -(-mask.tk // unit), layout.num_ranks
    grid = np.arange(0, mask.tq, unit)
    bounds = np.unique(np.concatenate([grid, layout.starts, [mask.tq]]))
    part, lo, hi = _seen(mask.row_intervals(), bounds)
    rank = layout.ranks[np.searchsorted(layout.ends, bounds[:-1], "right")][part]
    lo, hi, rank = lo[lo < hi], hi[lo < hi], rank[lo < hi]
    steps = np.zeros((num_ranks, count + 1))
    np.add.at(steps, (rank, lo // unit), 1.0)
    np.add.at(steps, (rank, (hi - 1) // unit + 1), -1.0)
    # Of each rank's union of intervals, what lies in front of each bound of units.
    width = mask.tk + 1
    lo, hi = merged(rank * width + lo, rank * width + hi)
    before = np.append(0, np.cumsum(hi - lo))
    edges = np.minimum(np.arange(count + 1) * unit, mask.tk) + np.arange(num_ranks)[:, None] * width
    at = np.searchsorted(lo, edges, "right")
    seen = before[at] - np.maximum(np.append(0, hi)[at] - edges, 0)
    return np.diff(seen, axis=1).astype(np.float64), steps.cumsum(1)[:, :-1]


def _seen(rows: RowIntervals, bounds: Ints) -> tuple[Ints, Ints, Ints]:
    """(part, lo, hi): the rows bounds[part]..bounds[part + 1] see keys [lo, hi), and so on.

    Intervals of neighbouring rows of a strip overlap or touch, so together they are one stretch.
    """
    strip = rows.strip
    start, end = rows.start[strip], rows.end[strip]
    first = np.searchsorted(bounds, start, "right") - 1
    count = np.searchsorted(bounds, end, "left") - first
    which = np.repeat(np.arange(len(strip)), count)
    part = ragged_range(first, count)
    top = np.maximum(start[which], bounds[part])
    bottom = np.minimum(end[which], bounds[part + 1]) - 1
    lo = rows.lo_base[which] + rows.lo_slope[which] * top
    hi = rows.hi_base[which] + rows.hi_slope[which] * bottom
    return part, lo, hi


def _covered(lane: Ints, start: Ints, end: Ints, num_lanes: int) -> Ints:
    """(num_lanes,) places that the stretches [start, end) of each lane cover together."""
    order = order_by(lane, start)
    lane = lane[order]
    offset = lane * (int(end.max(initial=0)) + 1)  # keeps lanes apart in the running maximum
    start, end = start[order] + offset, end[order] + offset
    reach = np.maximum.accumulate(np.append(0, end))
    fresh = np.maximum(end - np.maximum(start, reach[:-1]), 0)
    return np.bincount(lane, fresh, num_lanes).astype(np.int64)
