"""Records of key tiles for the Hopper backward: every pair once, and no key twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import attn_masks

from keel import masks
from keel.key_records import KEYS, KeyRecords, key_records, transposed
from keel.masks import AttnMask


def covered(made: KeyRecords, mask: AttnMask, tile_keys: int) -> torch.Tensor:
    """How often the kernel lets a pair through, (tq, tk); pairs past the ends count as wrong.

    Unlike the forward, the kernel adds all keys of a tile up, also those that a short one does not
    have.
    """
    records = made.records
    count = torch.zeros(mask.tq + records.block_n, mask.tk + tile_keys, dtype=torch.int64)
    for key, _, first, split, last, *_ in records.tiles.tolist():
        for run in range(first, last):
            begin, end, key_set, _ = records.runs[run].tolist()
            for row in range(begin, end, records.block_n):
                block = count[row : row + records.block_n, key : key + tile_keys]
                if run < split:
                    block += 1
                    continue
                lo, hi = (torch.from_numpy(x[key_set]) for x in (records.row_lo, records.row_hi))
                i = torch.arange(row, row + len(block))[:, None]
                block += ((i >= lo) & (i < hi))[:, : block.shape[1]]
    assert not count[mask.tq :].any() and not count[:, mask.tk :].any()
    return count[: mask.tq, : mask.tk]


@settings(max_examples=150)
@given(attn_masks(max_tokens=400), st.sampled_from([(64, KEYS), (128, KEYS), (64, 64)]))
def test_every_pair_once(mask, sizes):
    block_m, tile_keys = sizes
    made = key_records(mask, block_m, tile_keys)
    records = made.records
    assert torch.equal(covered(made, mask, tile_keys), mask.to_dense().long())
    assert records.block_n == block_m and records.rows == tile_keys
    keys = sorted((a, b) for a, b, *_ in records.tiles.tolist())
    assert [a for a, _ in keys[1:]] == [b for _, b in keys[:-1]]  # one after the other
    assert (keys[0][0], keys[-1][1]) == (0, mask.tk) and all(
        0 < b - a <= tile_keys for a, b in keys
    )
    for key, end, first, split, last, whole, *_ in records.tiles.tolist():
        assert first <= split <= last < len(records.runs)
        ends_there = end == mask.tk and end > key + tile_keys // 2
        assert whole == (end == key + tile_keys or ends_there)
        seen = mask.to_dense()[:, key:end].any()
        assert (first < last) == bool(seen)
    blocks = (records.runs[:-2, 1] - records.runs[:-2, 0]).sum() / block_m
    assert blocks <= made.tile_work.sum() + 1e-9 <= 1.3 * blocks + 1e-6
    assert (np.diff(made.tile_work) <= 1e-9).all()


@given(attn_masks())
def test_transposed(mask):
    assert torch.equal(transposed(mask).to_dense(), mask.to_dense().T)
    assert transposed(transposed(mask)) == mask


@pytest.mark.parametrize("block_m", [64, 128])
def test_causal_tiles_end_with_the_diagonal(block_m):
    records = key_records(masks.causal(1024), block_m).records
    assert records.tiles[:, 0].tolist() == list(range(0, 1024, KEYS))  # most work first
    for key, _, first, split, last, *_ in records.tiles.tolist():
        assert records.runs[split:last, :2].tolist() == [[key, key + KEYS]]
        assert records.runs[first:split, :2].tolist() == (
            [[key + KEYS, 1024]] if key + KEYS < 1024 else []
        )


def test_tiles_and_blocks_begin_with_documents():
    records = key_records(masks.documents([0, 300, 310, 330, 1000], causal=True), 64).records
    keys = sorted(records.tiles[:, 0].tolist())
    assert keys == [0, 128, 256, 330, 458, 586, 714, 842, 970]
    first = {t[0]: records.runs[t[2] : t[4], 0].min() for t in records.tiles.tolist()}
    assert first[256] == 256 and first[330] == 330  # from the first row that sees them
    assert not records.tiles[records.tiles[:, 0] == 256, 5]  # 74 keys: TMA would write more


def test_keys_that_nobody_sees_have_a_tile_and_no_run():
    records = key_records(AttnMask([], 50, 300), 64).records
    assert sorted(records.tiles[:, 0].tolist()) == [0, 128, 256]
    assert (records.tiles[:, 2] == records.tiles[:, 4]).all()
    assert len(key_records(masks.full(5, 0), 64).records.tiles) == 0
    assert len(key_records(masks.full(0, 5), 64).records.tiles) == 1
