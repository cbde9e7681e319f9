"""Which tiles the Hopper forward gets, and where parts of cut tiles meet."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from keel.masks import AttnMask
from keel.tile_parts import LAUNCH_TIME, CutTiles, are_few, best_of_few, end_of_last
from keel.tile_records import PART, ROWS, TileRecords, best_records

NARROW_TIMES = (1.92, 1.0, 0.73)
"""What a tile of 128 rows costs, each of its full blocks of 128 keys and each partial one, at head
dim 64, in full blocks; and"""

WIDE_TIMES = (2.87, 1.32, 1.89)
"""the same of 192 rows: fitted to 18 graph times on an H200, which they meet to 7 %, one to 14."""

LEAST_WIDE_GAIN = 1.03
"""How many times as long narrow tiles must take."""

MANY_TURNS = 16
"""So many tiles for each SM end together, whichever are long."""

LEAST_SAVING = 1.5
"""How many times fewer blocks packed heads must have, and"""

LEAST_GAIN = 1.1
"""how many times as long all would take without; infinite: never packed."""

LONG_ROW = 512
"""Keys that rows must see on average, before packed heads are thought about."""

NUM_MEETINGS = 1024
"""Counters of one launch: cut tiles times heads times consumers."""

NUM_SPARES = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """What is worked on, and by how many consumers."""

    records: TileRecords
    consumers: int = 2
    cut: CutTiles | None = None
    """Whose records these are."""
    pack: int = 1
    """Query heads of one key head that share a tile; its tokens are as many times fewer."""


def tiles_for(
    mask: AttnMask,
    block_ns: tuple[int, ...],
    heads: int,
    *,
    group: int,
    sms: int,
    skips: bool,
    can_be_wide: bool,
    can_be_cut: bool = True,
    pack: int | None = None,
) -> Tiles:
    """Tiles of 128 rows, where there are few the fastest ones for these heads, maybe cut along
    their keys; those of packed heads where they are clearly faster; or else, if they may be wide,
    of 192 where those are clearly faster.

    group: query heads that share a key head.
    skips: with blocks of 128 keys, consumers compute the half of a partial block that they need;
    not where heads are packed.
    can_be_cut: else few tiles are chosen as many are.
    pack: None for what pays.
    """
    # for the whole GPU: no margin of SMs is to change the last bits of results
    tiles, end = _of_128_rows(mask, block_ns, heads, sms, skips, pack or 1, can_be_cut)
    if pack is None and may_pack(group) and has_idle_rows(mask, tiles.records):
        packed, packed_end = _of_128_rows(mask, block_ns, heads, sms, False, group, can_be_cut)
        computed, wanted = _keys_computed(tiles, heads), _keys_computed(packed, heads)
        if computed >= LEAST_SAVING * wanted and end >= LEAST_GAIN * packed_end:
            return packed
    if can_be_wide and tiles.cut is None and tiles.pack == 1:
        wide = best_records(mask, (128,), 3 * PART)
        if three_are_faster(tiles.records, wide, heads, sms):
            return Tiles(wide, consumers=3)
    return tiles


def may_pack(group: int) -> bool:
    """Whether so many heads fill a warpgroup's rows without a rest."""
    return 1 < group <= PART and group & (group - 1) == 0


def has_idle_rows(mask: AttnMask, records: TileRecords) -> bool:
    """Whether rows are long, and tiles so empty that others may have LEAST_SAVING times fewer
    blocks."""
    computed = records.work.total * records.block_n * ROWS
    return LONG_ROW * mask.tq <= mask.area() and LEAST_SAVING * mask.area() <= computed


def _keys_computed(tiles: Tiles, heads: int) -> float:
    """Of 128 rows each, for all heads."""
    return tiles.records.work.total * tiles.records.block_n * (heads // tiles.pack)


def _of_128_rows(
    mask: AttnMask,
    block_ns: tuple[int, ...],
    heads: int,
    sms: int,
    skips: bool,
    pack: int,
    can_be_cut: bool,
) -> tuple[Tiles, float]:
    """Tiles, and when all heads are expected to be done with them."""
    tokens, heads = ROWS // pack, heads // pack
    if can_be_cut and are_few(mask, heads, sms, tokens):
        records, cut, end = few_tiles(mask, block_ns, heads, sms, skips, tokens)
        if cut is not None:
            met = 2 * cut.num_cut * heads
            assert met <= NUM_MEETINGS, f"{cut.num_cut} cut tiles of {heads} heads"
        return Tiles(records, cut=cut, pack=pack), end
    records = best_records(mask, block_ns, tokens)
    return Tiles(records, pack=pack), LAUNCH_TIME + heads * records.time / sms


@functools.lru_cache(maxsize=128)
def few_tiles(
    mask: AttnMask,
    block_ns: tuple[int, ...],
    heads: int,
    sms: int,
    skips: bool,
    tile_rows: int = ROWS,
) -> tuple[TileRecords, CutTiles | None, float]:
    """As `best_of_few`."""
    return best_of_few(mask, block_ns, heads, sms, tile_rows=tile_rows, skips=skips)


@functools.lru_cache(maxsize=128)
def three_are_faster(records: TileRecords, wide: TileRecords, heads: int, sms: int) -> bool:
    """Whether tiles of 192 rows end clearly earlier than those of 128: where few blocks are
    partial, as in long causal sequences."""
    if records.block_n != 128 or len(wide.tiles) == 0:
        return False
    narrow_end = _end_of(records, NARROW_TIMES, heads, sms)
    return narrow_end >= LEAST_WIDE_GAIN * _end_of(wide, WIDE_TIMES, heads, sms)


def _end_of(records: TileRecords, times: tuple[float, float, float], heads: int, sms: int) -> float:
    """When all heads are done, by what a tile, a full and a partial block take."""
    first, split, last = records.tiles[:, 2:5].T
    blocks = (records.runs[:, 1] - records.runs[:, 0]) // records.block_n
    before = np.append(0, np.cumsum(blocks))
    tile, full, partial = times
    each = tile + full * (before[split] - before[first]) + partial * (before[last] - before[split])
    each = np.sort(each)[::-1]
    if len(each) * heads > MANY_TURNS * sms:
        return float(each.sum() * heads / sms + each[-1] / 2)
    return end_of_last(np.repeat(each, heads).tolist(), sms)


_meetings: dict[tuple[int | None, int], torch.Tensor] = {}
_spares: dict[int | None, list[torch.Tensor]] = {}
_taken: list[torch.Tensor] = []


def meetings(device: torch.device, stream: int | None) -> torch.Tensor:
    """NUM_MEETINGS zeros before and after each launch, as `hopper_launch.work_counter` has one.

    stream: None during the capture of a graph, each launch of which gets a row of its own for good;
    where none is left, zeros that replays fill.
    """
    if stream is None:
        spares = _spares.get(device.index)
        if not spares:
            return torch.zeros(NUM_MEETINGS, dtype=torch.int32, device=device)
        _taken.append(spares.pop())
        return _taken[-1]
    key = (device.index, stream)
    if key not in _meetings:
        _meetings[key] = _new_rows(1, device)[0]
        if device.index not in _spares:
            _spares[device.index] = _new_rows(NUM_SPARES, device)
            if device.type == "cuda":  # graphs use them on other streams
                torch.cuda.current_stream(device).synchronize()
    return _meetings[key]


def _new_rows(number: int, device: torch.device) -> list[torch.Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        rows = torch.zeros(number, NUM_MEETINGS, dtype=torch.int32, device=device)
        return list(rows.unbind())
