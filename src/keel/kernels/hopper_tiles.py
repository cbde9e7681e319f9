"""Which tiles the Hopper forward gets, and where parts of cut tiles meet."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from keel.masks import AttnMask
from keel.tile_parts import CutTiles, are_few, best_of_few
from keel.tile_records import PART, TileRecords, best_records

WIDE_TILE_TIME = 1.41
"""A block of 192 rows and 128 keys at head dim 64, in blocks of 128 rows: fitted to an H200."""

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


def tiles_for(
    mask: AttnMask,
    block_ns: tuple[int, ...],
    heads: int,
    *,
    sms: int,
    sm_margin: int,
    skips: bool,
    can_be_wide: bool,
) -> Tiles:
    """Tiles of 128 rows, where there are few the fastest ones for these heads, maybe cut along
    their keys; or else, if they may be wide, of 192 where those are faster.

    skips: with blocks of 128 keys, consumers compute the half of a partial block that they need.
    """
    cut = None
    if are_few(mask, heads, sms):
        # for the whole GPU, whatever the margin: cuts change the last bits of results
        records, cut = few_tiles(mask, block_ns, heads, sms, skips)
    else:
        records = best_records(mask, block_ns)
    if cut is not None:
        assert 2 * cut.num_cut * heads <= NUM_MEETINGS, f"{cut.num_cut} cut tiles of {heads} heads"
        return Tiles(records, cut=cut)
    if can_be_wide:
        wide = best_records(mask, (128,), 3 * PART)
        if three_are_faster(records, wide, heads, sms - sm_margin):
            return Tiles(wide, consumers=3)
    return Tiles(records)


@functools.lru_cache(maxsize=128)
def few_tiles(
    mask: AttnMask, block_ns: tuple[int, ...], heads: int, sms: int, skips: bool
) -> tuple[TileRecords, CutTiles | None]:
    """As `best_of_few`."""
    return best_of_few(mask, block_ns, heads, sms, skips=skips)


def three_are_faster(records: TileRecords, wide: TileRecords, heads: int, sms: int) -> bool:
    """Whether tiles of 192 rows end earlier than those of 128: where all blocks are full."""
    if records.block_n != 128 or len(wide.tiles) == 0 or wide.has_partial:
        return False
    turns = [-(-len(x.tiles) * heads // sms) for x in (records, wide)]
    blocks = [x.work.longest for x in (records, wide)]
    return turns[1] * blocks[1] * WIDE_TILE_TIME < turns[0] * blocks[0]


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
