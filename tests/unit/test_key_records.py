"""Records of key tiles for the Hopper backward: every pair once, full blocks full."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import attn_masks

from keel import masks
from keel.key_records import KEYS, KeyRecords, key_blocks_of, key_records
from keel.masks import AttnMask


def covered(records: KeyRecords, mask: AttnMask) -> torch.Tensor:
    """How often the kernel lets a pair through, (tq, tk); pairs past the ends count as wrong."""
    count = torch.zeros(mask.tq + records.block_m, mask.tk + KEYS, dtype=torch.int64)
    for key, row, row_set in key_blocks_of(records):
        block = count[row : row + records.block_m, key : key + KEYS]
        assert block.shape == (records.block_m, KEYS)
        if row_set < 0:
            block += 1
            continue
        lo, hi = (torch.from_numpy(x[row_set]) for x in (records.row_lo, records.row_hi))
        j = torch.arange(key, key + KEYS)
        block += (j >= lo[:, None]) & (j < hi[:, None])
    assert not count[mask.tq :].any() and not count[:, mask.tk :].any()
    return count[: mask.tq, : mask.tk]


@settings(max_examples=150)
@given(attn_masks(max_tokens=400), st.sampled_from([64, 128]))
def test_every_pair_once(mask, block_m):
    records = key_records(mask, block_m)
    assert torch.equal(covered(records, mask), mask.to_dense().long())
    assert sorted(records.tiles[:, 0].tolist()) == list(range(0, mask.tk, KEYS))
    for _, first, split, last in records.tiles.tolist():
        assert first <= split <= last < len(records.runs)
        assert (records.runs[first:last, 1] > records.runs[first:last, 0]).all()
    assert not records.runs[-1].any()
    assert np.allclose(records.tile_work.sum(), records.work.total)
    assert (np.diff(records.tile_work) <= 1e-9).all()
    assert records.row_lo.shape == records.row_hi.shape == (len(records.row_lo), block_m)
    assert not records.row_lo[-1].any() and not records.row_hi[-1].any()
    # a key tile reads the sets of a block of rows, and never those of the next
    assert len(records.set_base) == -(-mask.tq // block_m)


@pytest.mark.parametrize("block_m", [64, 128])
def test_causal_tiles_begin_with_the_diagonal(block_m):
    records = key_records(masks.causal(1024), block_m)
    assert records.tiles[:, 0].tolist() == list(range(0, 1024, KEYS))  # most work first
    for key, first, split, last in records.tiles.tolist():
        assert records.runs[first:split, :2].tolist() == [[key, key + KEYS]]
        assert records.runs[split:last, :2].tolist() == (
            [[key + KEYS, 1024]] if key + KEYS < 1024 else []
        )


def test_keys_that_nobody_sees_have_a_tile():
    records = key_records(AttnMask([], 50, 300), 64)
    assert records.tiles[:, 0].tolist() == [0, 128, 256]
    assert (records.tiles[:, 1:] == 0).all()
    assert records.row_lo.shape == (1, 64)
    assert len(key_records(masks.full(5, 0), 64).tiles) == 0
    assert len(key_records(masks.full(0, 5), 64).tiles) == 1


def test_a_mask_without_partial_blocks_has_no_masked_runs():
    records = key_records(masks.full(256, 512), 64)
    assert np.array_equal(records.tiles[:, 1], records.tiles[:, 2])
    assert records.runs[:-1, :2].tolist() == [[0, 256]] * 4
