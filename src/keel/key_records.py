"""Tiles as the Hopper backward wants them: per tile of keys, which blocks of rows see it.

These are the records of the transposed mask: its rows are keys, and what a key sees is the rows
that see it. So tiles of keys begin on a grid or where documents do, blocks of rows anywhere, and a
mask is two numbers per key, which stay in registers for a whole run.

What differs: a short tile masks the keys that it does not have, since they would add to
dq; and a tile that nobody sees has no run, since its gradients are zeros without one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from keel.masks.mask import AttnMask
from keel.tile_records import ROWS, TileRecords, document_cuts, make_records
from keel.tiling import PARTIAL_COST

KEYS = ROWS
"""Keys of a tile, two warpgroups of 64, unless another number is asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyRecords:
    """What the kernel reads, and what the host decides by."""

    records: TileRecords
    """Of the transposed mask, with blocks of block_n rows. In the place of the first run's row set,
    tiles hold 1 where TMA may write: all keys are there, or the tensor ends in the second half."""
    tile_work: NDArray[np.float64]
    """(tiles,) in blocks of rows; partial ones count more."""


@functools.lru_cache(maxsize=128)
def key_records(mask: AttnMask, block_m: int, tile_keys: int = KEYS) -> KeyRecords:
    """The cheapest tiles of a mask for blocks of block_m rows; tile_keys: the most of a tile."""
    keys = transposed(mask).row_intervals()
    grid = np.arange(0, mask.tk, tile_keys)
    cuts = [grid]
    aligned = document_cuts(keys, mask.tk, tile_keys)
    if not np.array_equal(aligned, grid):
        cuts.append(aligned)
    choices = [
        make_records(keys, mask.tk, starts, block_m, tile_keys, short_are_partial=True)
        for starts in cuts
    ]
    records = min(choices, key=lambda choice: choice.time)
    tiles = records.tiles.copy()
    seen_by_none = tiles[:, 2] == len(records.runs) - 2
    tiles[seen_by_none, 3:5] = tiles[seen_by_none, 2:3]
    size = tiles[:, 1] - tiles[:, 0]
    tiles[:, 5] = (size == tile_keys) | ((tiles[:, 1] == mask.tk) & (size > tile_keys // 2))
    records = replace(records, tiles=tiles)
    return KeyRecords(records, _tile_work(records))


def transposed(mask: AttnMask) -> AttnMask:
    """Pairs (j, i) for pairs (i, j)."""
    flipped = mask.array[:, [2, 3, 0, 1, 5, 4]].copy()
    flipped[:, 4:] *= -1
    return AttnMask(flipped, mask.tk, mask.tq)


def _tile_work(records: TileRecords) -> NDArray[np.float64]:
    blocks = (records.runs[:, 1] - records.runs[:, 0]) // records.block_n
    before = np.append(0.0, np.cumsum(blocks))
    first, split, last = (before[records.tiles[:, n]] for n in (2, 3, 4))
    return (last - first) + (PARTIAL_COST - 1.0) * (last - split)
