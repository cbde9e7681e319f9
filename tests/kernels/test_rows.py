"""Kernels that move rows, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from keel.kernels import rows

WIDTHS = [(8, 8), (1500, 20), (3, 2049), (64, 0)]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_copy_rows(widths, dtype):
    torch.manual_seed(0)
    sources = tuple(torch.randn(9, 7 + w, dtype=dtype)[:, 7:] for w in widths)  # strided
    index = torch.tensor([3, 3, 0, 8, 5])
    buffer = torch.full((6, sum(widths) + 1), 7.0, dtype=dtype)
    targets = (buffer[:5, : widths[0]], buffer[:5, widths[0] : sum(widths)])
    rows.copy_rows(sources, targets, index)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source[index])
    assert (buffer[5] == 7).all() and (buffer[:, -1] == 7).all()
    rows.copy_rows(sources, targets, index[:0])


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_add_rows(widths, dtype):
    torch.manual_seed(0)
    sources = tuple(torch.randn(6, w, dtype=dtype) for w in widths)
    targets = tuple(torch.randn(8, w) for w in widths)
    want = [target.clone() for target in targets]
    where = torch.tensor([2, 5, 7, 2, 7, 7])  # the rows that the sources come back to
    for source, target in zip(sources, want, strict=True):
        for place, row in enumerate(where.tolist()):
            target[row] += source[place].float()
    places = torch.argsort(where, stable=True)
    bounds = torch.tensor([0, 2, 3, 6])
    rows.add_rows(sources, targets, torch.tensor([2, 5, 7]), bounds, places)
    for target, expected in zip(targets, want, strict=True):
        assert torch.equal(target, expected)  # the same order of additions: the same bits
