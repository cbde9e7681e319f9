"""Query heads that share tiles of the Hopper forward: where they do, and which rows tiles have."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import attn_masks
from tests.unit.test_tile_records import covered

from keel import masks
from keel.kernels import hopper_tiles
from keel.kernels.hopper_tiles import Tiles, has_idle_rows, may_pack, tiles_for
from keel.masks import AttnMask, AttnSlice
from keel.tile_parts import MAX_PARTS, MAX_PLACES, choose_cuts
from keel.tile_records import ROWS, best_records


def chosen(mask: AttnMask, hq: int, hk: int, **options: object) -> Tiles:
    given: dict = {"group": hq // hk, "sms": 132, "skips": True, "can_be_wide": False}
    given |= options
    return tiles_for(mask, (64, 128), hq, **given)


def sequences(number: int, queries: int, keys: int) -> AttnMask:
    """So many, each with a few queries at the end of its keys."""
    return AttnMask(
        [
            AttnSlice.of_type((n * queries, (n + 1) * queries), (n * keys, (n + 1) * keys), 1)
            for n in range(number)
        ],
        *(number * queries, number * keys),
    )


@pytest.mark.parametrize(
    ("mask", "heads", "pack"),
    [
        *((masks.full(tq, tk), (64, 8), 8) for tq in (1, 16, 64) for tk in (4096, 65536)),
        (masks.full(16, 16384), (32, 2), 16),
        (masks.full(1, 16384), (64, 1), 64),
        (AttnMask([AttnSlice.of_type((0, 40), (0, 8232), 1)], 40, 8232), (64, 8), 8),
        (sequences(64, 1, 4096), (64, 8), 8),
        (sequences(128, 16, 2048), (32, 8), 4),
        (masks.full(96, 4096), (64, 8), 1),  # three quarters of the rows are busy
        (masks.full(128, 65536), (64, 8), 1),
        (masks.full(16, 512), (64, 8), 1),  # all of it is over soon
        (masks.full(16, 65536), (48, 8), 1),  # six heads leave rows over
        (masks.full(16, 65536), (8, 8), 1),
        (masks.causal(1024), (64, 8), 1),
        (masks.full(16384), (64, 8), 1),
        (masks.causal(16384), (64, 8), 1),
        (masks.sliding_window(8192, left=1024, right=0), (64, 8), 1),
        (masks.documents(range(0, 8401, 300), causal=True), (64, 8), 1),
        (masks.documents(range(0, 8801, 1100)), (64, 8), 1),
        (masks.full(0, 4096), (64, 8), 1),
        (AttnMask([], 16, 4096), (64, 8), 1),
    ],
)
def test_where_heads_are_packed(mask, heads, pack):
    tiles = chosen(mask, *heads)
    assert tiles.pack == pack
    assert tiles.records.rows * tiles.pack == ROWS


def test_packed_tiles_are_cut_for_all_sms():
    """Eight tiles, one for each key head, in as many parts as 132 SMs take."""
    tiles = chosen(masks.full(16, 65536), 64, 8)
    assert tiles.cut is not None and (tiles.cut.num_cut, tiles.cut.most_parts) == (1, 16)
    assert len(tiles.records.tiles) == 16
    # a top, a total and 128 sums for each of 128 rows of 16 parts, for 8 key heads
    assert tiles.cut.numbers_between(64, 128) == 8 * 16 * 128 * 136


def test_the_switch(monkeypatch):
    mask = masks.full(16, 65536)
    monkeypatch.setattr(hopper_tiles, "LEAST_GAIN", math.inf)
    assert chosen(mask, 64, 8).pack == 1
    assert chosen(mask, 64, 8, pack=8).pack == 8
    assert chosen(masks.causal(512), 64, 8, pack=4).records.rows == 32


@settings(max_examples=100)
@given(
    attn_masks(max_tokens=300), st.sampled_from([2, 4, 8, 16, 32, 64]), st.sampled_from([64, 128])
)
def test_every_pair_once(mask, pack, block_n):
    records = best_records(mask, (block_n,), ROWS // pack)
    assert records.rows == ROWS // pack
    assert (covered(records, mask).numpy() == mask.to_dense().numpy()).all()


def test_halves_that_a_consumer_needs():
    """16 tokens of eight heads: the first consumer has the first eight of them."""
    records = best_records(
        AttnMask([AttnSlice(0, 8, 0, 30), AttnSlice(8, 16, 70, 128)], 16, 128), (128,), 16
    )
    (needs,) = {int(x) for x in records.runs[:1, 3]}
    assert [needs >> 8 * n & 255 for n in range(4)] == [0, 1, 1, 2]


def test_groups_that_fill_a_warpgroup():
    assert [n for n in range(200) if may_pack(n)] == [2, 4, 8, 16, 32, 64]


def test_rows_are_idle_where_a_tile_has_few():
    def idle(mask: AttnMask) -> bool:
        return has_idle_rows(mask, best_records(mask, (64, 128)))

    assert idle(masks.full(85, 4096)) and not idle(masks.full(86, 4096))
    assert idle(masks.full(16, 512)) and not idle(masks.full(16, 511))
    assert not idle(AttnMask([], 16, 4096))


def test_parts_have_bounded_memory():
    """One tile in 32 parts and 60 in two, if 160 SMs had their way: room for 32 parts of each."""
    slices = [AttnSlice(0, 128, 0, 1 << 20)]
    slices += [AttnSlice(n, n + 128, 0, 1 << 16) for n in range(128, 61 * 128, 128)]
    counts, _ = choose_cuts(best_records(AttnMask(slices, 61 * 128, 1 << 20), (128,)), 1, 160)
    assert 8 < max(counts) <= MAX_PARTS
    assert sum(n > 1 for n in counts) * max(counts) <= MAX_PLACES


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ((256, 256), {"pack": 8}),
        ((64, 64), {"pack": 2, "consumers": 3}),
        ((64, 64), {"pack": 6}),
        ((64, 64), {"pack": 128}),
    ],
)
def test_forms_that_cannot_pack(dims, options):
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    from keel.kernels.hopper_launch import choose_form

    with pytest.raises(ValueError, match=r"pack=\d+ with head dims"):
        choose_form(*dims, 64, out_matches=True, **options)


def test_what_a_packed_launch_is_told(monkeypatch):
    """Work, lse and meetings go by key head; boxes of queries and results hold a group."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    from keel.kernels import hopper_launch
    from keel.meta import Scoring

    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    mask, scoring = masks.full(16, 65536), Scoring(scale=1.0)
    q = torch.empty(16, 64, 128, dtype=torch.bfloat16)
    k = v = torch.empty(65536, 8, 128, dtype=torch.bfloat16)
    tiles = hopper_launch._tiles_for(q, v, mask, scoring, None)
    made = hopper_launch._prepare(q, k, v, tiles, scoring, q, None, False, 0, None)
    assert made is not None and made.grid == (128,)
    told = {n: made.arguments[n] for n in ("num_tiles", "num_heads", "group", "num_work")}
    assert told == {"num_tiles": 16, "num_heads": 8, "group": 1, "num_work": 128}
    form = made.arguments["FORM"]
    assert (form.pack, form.tokens, form.pack_bits, form.cuts) == (8, 16, 3, True)
    boxes = {name: describe(q).block_shape for name, describe in made.streamed.items()}
    assert boxes["Q"] == boxes["O"] == [8, 8, 128] and boxes["K"] == [128, 1, 128]
