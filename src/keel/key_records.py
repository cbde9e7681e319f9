"""Tiles as the Hopper backward wants them: per tile of keys, which blocks of rows see it.

A tile of keys stays with its block of threads while blocks of rows pass by, those that need a
mask first. A run is a stretch of such blocks. For each of its blocks, a partial run names by number
one of the sets of bounds that the rows of the block have: row r of it sees keys [lo, hi).

Tiles and blocks lie on a grid. Each tile is there, also where nobody sees it: its gradients are
zeros that somebody must write.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keel.masks.mask import AttnMask
from keel.tiling import PARTIAL_COST, Int32s, TileLists, TileWork, plan_tiles

KEYS = 128
"""Keys of a tile, two warpgroups of 64."""

KEY_FIELDS = 4
"""Numbers of a tile's record."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyRecords:
    """All int32."""

    tiles: Int32s
    """(tiles, KEY_FIELDS), most work first: first key, first run, first full run, end of runs."""
    runs: Int32s
    """(runs + 1, 4): first row, end of rows (whole blocks), number of the set (0 when full), 0;
    one more at the end, which kernels read ahead and never use."""
    set_base: Int32s
    """(blocks of rows,): where the sets of a block begin."""
    row_lo: Int32s
    """(sets, block_m), one more set than blocks have: TMA describes no empty tensor."""
    row_hi: Int32s
    block_m: int
    work: TileWork
    tile_work: NDArray[np.float64]
    """(tiles,) of each tile, in blocks of rows; partial ones count more."""


@functools.lru_cache(maxsize=128)
def key_records(mask: AttnMask, block_m: int) -> KeyRecords:
    """Records of a mask for blocks of block_m rows."""
    plan = plan_tiles(mask, block_m, KEYS)
    lists = plan.k
    tile = lists.order
    tiles = np.stack([tile * KEYS, lists.ptr[tile], lists.split[tile], lists.ptr[tile + 1]], 1)
    runs = np.zeros((len(lists.runs) + 1, 4), np.int32)
    runs[:-1, :2] = lists.runs[:, :2] * block_m
    runs[:-1, 2] = np.maximum(lists.runs[:, 2], 0)
    nothing = np.zeros((1, block_m), np.int32)
    row_lo, row_hi = (np.concatenate([x.numpy(), nothing]) for x in plan.row_sets)
    return KeyRecords(
        *(tiles.astype(np.int32), runs, plan.set_base, row_lo, row_hi, block_m, lists.work),
        tile_work=_tile_work(lists),
    )


def _tile_work(lists: TileLists) -> NDArray[np.float64]:
    blocks = (lists.runs[:, 1] - lists.runs[:, 0]).astype(np.float64)
    is_partial = lists.runs[:, 2] >= 0
    before = np.append(0.0, np.cumsum(np.where(is_partial, PARTIAL_COST * blocks, blocks)))
    return (before[lists.ptr[1:]] - before[lists.ptr[:-1]])[lists.order]


def key_blocks_of(records: KeyRecords) -> Iterable[tuple[int, int, int]]:
    """(first key, first row, row set or -1) of every block, in the order of the kernel."""
    for key, first, split, last in records.tiles.tolist():
        for run in range(first, last):
            row, end, number, _ = records.runs[run].tolist()
            for r in range(row, end, records.block_m):
                base = int(records.set_base[r // records.block_m])
                yield key, r, base + number if run < split else -1
