"""Records of tiles that begin anywhere: every pair once, full blocks full, documents not cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import attn_masks

from keel import masks
from keel.masks import AttnMask, AttnSlice
from keel.tile_records import (
    FAR,
    HALF,
    ROWS,
    TileRecords,
    best_records,
    document_cuts,
    make_records,
    with_needs,
)


def blocks_of(records: TileRecords) -> Iterable[tuple[Any, ...]]:
    """(first row, end of rows, first key, end of keys, row set or -1, needs, number in its run) of
    every block; needs are None for the first block of a tile, of which all is computed."""
    for row0, row_end, first, split, last, *_ in records.tiles.tolist():
        for run in range(first, last):
            key, end, row_set, needs = records.runs[run].tolist()
            for number, k in enumerate(range(key, end, records.block_n)):
                place = (row0, row_end, k, k + records.block_n, -1 if run < split else row_set)
                yield *place, None if run == first and number == 0 else needs, number


def halves_left_out(needs: int | None, part: int, block: int, halves: int = 2) -> list[int]:
    """Of so many in a block, as the kernel does."""
    if needs is None:
        return []
    first, end = needs >> 16 * part & 255, needs >> 16 * part + 8 & 255
    number = min(halves * block, FAR)
    return [half for half in range(halves) if not first <= number + half < end]


def covered(records: TileRecords, mask: AttnMask) -> torch.Tensor:
    """How often the kernel lets a pair through, (tq, tk); keys past the end count as wrong."""
    count = torch.zeros(mask.tq, mask.tk + records.block_n, dtype=torch.int64)
    for row0, row_end, key, end, row_set, needs, number in blocks_of(records):
        rows = row_end - row0
        if row_set < 0:
            count[row0:row_end, key:end] += 1
            continue
        lo, hi = (torch.from_numpy(x[row_set, :rows]) for x in (records.row_lo, records.row_hi))
        j = torch.arange(key, end)
        seen = (j >= lo[:, None]) & (j < hi[:, None])
        for part in range(2 if records.rows <= ROWS else 0):
            size = records.rows // 2
            for half in halves_left_out(needs, part, number, records.block_n // HALF):
                seen[part * size : (part + 1) * size, half * HALF : (half + 1) * HALF] = False
        count[row0:row_end, key:end] += seen
    assert not count[:, mask.tk :].any()
    return count[:, : mask.tk]


def check(records: TileRecords, mask: AttnMask) -> None:
    assert torch.equal(covered(records, mask), mask.to_dense().long())
    rows = sorted((row0, end) for row0, end, *_ in records.tiles.tolist())
    assert [a for a, _ in rows[1:]] == [b for _, b in rows[:-1]]  # one after the other
    assert all(0 < b - a <= records.rows for a, b in rows)
    if rows:
        assert (rows[0][0], rows[-1][1]) == (0, mask.tq)
    for _, _, first, split, last, row_set, key, end in records.tiles.tolist():
        assert first < last and first <= split <= last
        assert records.runs[first, :2].tolist() == [key, end]
        if split < last:
            assert records.runs[split, 2] == row_set
        assert (records.runs[first:last, 1] > records.runs[first:last, 0]).all()
    hidden = records.row_lo[-1], records.row_hi[-1]
    assert (hidden[0] >= hidden[1]).all()


@settings(max_examples=150)
@given(
    attn_masks(max_tokens=400), st.sampled_from([64, 128]), st.sampled_from([128, 192]), st.data()
)
def test_every_pair_once(mask, block_n, tile_rows, data):
    rows = mask.row_intervals()
    cuts = [0]
    while cuts[-1] + tile_rows < mask.tq:
        cuts.append(cuts[-1] + data.draw(st.integers(1, tile_rows)))
    by_chance = np.array(cuts[: mask.tq], np.int64)
    by_document = document_cuts(rows, mask.tq, tile_rows)
    for starts in (by_chance, by_document):
        records = make_records(rows, mask.tq, starts, block_n, tile_rows)
        assert records.rows == records.row_hi.shape[1] == tile_rows
        check(records if tile_rows > ROWS else with_needs(records), mask)
    for block_ns in ((64, 128), (128,)):
        check(best_records(mask, block_ns, tile_rows), mask)


def test_tiles_begin_with_documents():
    mask = masks.documents([0, 300, 310, 330, 1000], causal=True)
    cuts = document_cuts(mask.row_intervals(), 1000)
    # the end of the first document is one tile with the next two
    assert cuts.tolist() == [0, 128, 256, 330, 458, 586, 714, 842, 970]
    records = make_records(mask.row_intervals(), 1000, cuts, 64)
    blocks = [b for b in blocks_of(records) if b[0] == 330]
    assert [(b[2], b[3]) for b in blocks] == [(330, 394), (394, 458)]
    assert [b[4] < 0 for b in blocks] == [False, False]


def test_tiles_of_192_rows():
    mask = masks.documents([0, 300, 310, 330, 1000], causal=True)
    rows = mask.row_intervals()
    assert document_cuts(rows, 1000, 192).tolist() == [0, 192, 330, 522, 714, 906]
    records = best_records(masks.causal(1000), (128,), 192)
    assert sorted(records.tiles[:, 0].tolist()) == list(range(0, 1000, 192))
    # rows 384 to 575 see all keys up to 384, and are masked in the two blocks behind
    blocks = [b for b in blocks_of(records) if b[0] == 384]
    assert [(b[2], b[4] < 0) for b in blocks] == [
        *((key, True) for key in (0, 128, 256)),
        *((key, False) for key in (384, 512)),
    ]
    lo, hi = (x[blocks[-1][4]] for x in (records.row_lo, records.row_hi))
    assert lo.tolist() == [0] * 192 and hi.tolist() == list(range(385, 577))


def test_small_documents_share_tiles():
    mask = masks.documents(range(0, 1001, 20), causal=True)
    records = best_records(mask, (128,))
    assert len(records.tiles) == 9  # six of 20 rows in each, two in the last
    assert all(end - key == 128 for *_, key, end in records.tiles.tolist())


def test_plain_masks_stay_on_the_grid():
    for mask in (masks.causal(1000), masks.full(1000), masks.sliding_window(1000, left=200)):
        assert document_cuts(mask.row_intervals(), 1000).tolist() == list(range(0, 1000, ROWS))


@pytest.mark.parametrize(
    ("mask", "block_n"),
    [
        (masks.causal(8192), 128),
        (masks.sliding_window(8192, left=32), 64),
        (masks.sliding_window(8192, left=1024), 128),
    ],
)
def test_narrow_blocks_for_short_rows(mask, block_n):
    assert best_records(mask, (64, 128)).block_n == block_n


def test_rows_that_see_nothing_have_a_tile():
    mask = AttnMask([], 300, 50)
    records = best_records(mask, (64,))
    check(records, mask)
    assert len(records.tiles) == 3
    assert len(best_records(masks.full(0, 5), (64,)).tiles) == 0


def test_documents_that_fill_a_tile_to_the_row():
    cuts = document_cuts(masks.documents(range(0, 1025, 64)).row_intervals(), 1024)
    assert cuts.tolist() == list(range(0, 1024, 128))


def test_a_short_tile_has_full_blocks():
    """Rows behind the end of a tile belong to another one: they need not see its keys."""
    mask = masks.documents([0, 200, 1000])
    rows = mask.row_intervals()
    records = make_records(rows, 1000, document_cuts(rows, 1000), 64)
    blocks = [b for b in blocks_of(records) if b[0] == 128]
    assert [(b[1], b[2], b[4] < 0) for b in blocks] == [
        (200, 0, True),
        (200, 64, True),
        (200, 128, True),
        (200, 192, False),
    ]


def test_consumers_need_half_of_the_diagonal():
    records = best_records(masks.causal(512), (128,))
    left_out = [
        [halves_left_out(needs, part, number) for part in range(2)]
        for *_, row_set, needs, number in blocks_of(records)
        if row_set >= 0 and needs is not None
    ]
    assert left_out == [[[1], []]] * 3  # three of four tiles begin with a full block


def test_consumers_need_nothing_of_some_blocks():
    """Of two short documents each consumer has its own keys, and the second those of both."""
    mask = masks.documents([0, 64, 128, 192, 256], causal=True)
    records = best_records(mask, (64,))
    left_out = [
        [halves_left_out(needs, part, number, 1) for part in range(2)]
        for *_, row_set, needs, number in blocks_of(records)
        if row_set >= 0 and needs is not None
    ]
    assert left_out == [[[0], []]] * 2


def test_long_partial_runs_are_needed_whole():
    tokens = (FAR + 21) * HALF  # odd: a byte too few would end inside of a block
    mask = AttnMask([AttnSlice(0, 1, 0, tokens), AttnSlice(1, 2, tokens - 1, tokens)], 2, tokens)
    records = best_records(mask, (128,))
    check(records, mask)
    assert not any(halves_left_out(x[5], 0, x[6]) for x in blocks_of(records))
