"""Tiles as the Hopper kernels want them: free to begin at any row and any key.

The blocks of `tiling.plan_tiles`, written out per tile. Each tile has one run at least, so that the
kernel needs no other way for rows that see nothing: theirs is hidden altogether.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from keel.masks.mask import AttnMask
from keel.tiling import Int32s, TileWork, plan_tiles

ROWS = 128
"""Rows of a tile, two warpgroups of 64."""

FIELDS = 8
"""Numbers of a tile's record."""


@dataclass(frozen=True, slots=True, eq=False)
class TileRecords:
    """All int32."""

    tiles: Int32s
    """(tiles, FIELDS), most work first: row0, end of rows, first run, first full run, end of runs,
    and of the first run its row set, first key and end of keys."""
    runs: Int32s
    """(runs + 1, 4): first key, end of keys, row set (0 when full), 0; one more at the end."""
    row_lo: Int32s
    """(row sets, ROWS): row r of a tile sees keys [lo, hi); in the last set, nothing."""
    row_hi: Int32s
    work: TileWork


@functools.lru_cache(maxsize=128)
def records_of(mask: AttnMask, block_n: int) -> TileRecords:
    """The tiles of a mask on a regular grid."""
    plan = plan_tiles(mask, ROWS, block_n)
    lists = plan.q
    lo, hi = (np.append(x.numpy(), np.zeros((1, ROWS), np.int32), axis=0) for x in plan.row_sets)
    hidden = plan.num_row_sets
    runs = np.zeros((len(lists.runs) + 2, 4), np.int32)
    runs[:-2, 0] = lists.runs[:, 0] * block_n
    runs[:-2, 1] = lists.runs[:, 1] * block_n
    runs[:-2, 2] = np.maximum(lists.runs[:, 2], 0)
    nowhere = len(lists.runs)  # the run of tiles that see nothing
    runs[nowhere] = (0, block_n, hidden, 0)
    tile = lists.order
    first, split, last = lists.ptr[tile], lists.split[tile], lists.ptr[tile + 1]
    nothing = first == last
    first = np.where(nothing, nowhere, first)
    split, last = (np.where(nothing, nowhere + 1, x) for x in (split, last))
    tiles = np.zeros((len(tile), FIELDS), np.int32)
    tiles[:, 0] = tile * ROWS
    tiles[:, 1] = np.minimum(tiles[:, 0] + ROWS, mask.tq)
    tiles[:, 2], tiles[:, 3], tiles[:, 4] = first, split, last
    tiles[:, 5], tiles[:, 6], tiles[:, 7] = runs[first, 2], runs[first, 0], runs[first, 1]
    return TileRecords(tiles, runs, lo, hi, lists.work)
