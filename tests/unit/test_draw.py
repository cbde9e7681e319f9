"""Pictures: the cells are exact, the text is stable, the PNG has content."""

from __future__ import annotations

import builtins
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import attn_masks

from keel.masks import AttnMask, AttnSlice, causal, documents, sliding_window
from keel.masks.draw import cell_area, draw


@settings(max_examples=200)
@given(st.data(), attn_masks(max_tokens=48))
def test_cell_area_is_exact(data: st.DataObject, mask: AttnMask) -> None:
    def edges(tokens: int) -> list[int]:
        inner = data.draw(st.sets(st.integers(1, tokens), max_size=6))
        return sorted({0, tokens, *inner})

    rows, columns = edges(mask.tq), edges(mask.tk)
    dense = mask.to_dense().numpy().astype(np.int64)
    want = np.add.reduceat(np.add.reduceat(dense, rows[:-1], axis=0), columns[:-1], axis=1)
    np.testing.assert_array_equal(cell_area(mask, np.array(rows), np.array(columns)), want)


def test_snapshot_one_cell_per_pair() -> None:
    mask = sliding_window(6, 7, left=2, sink_tokens=1)
    assert mask.draw(title="window") == "\n".join(
        [
            "window",
            "6 x 7, 21 pairs (50.0%), 2 slices",
            "  keys 0..6",
            "0 ██·····",
            "1 ███····",
            "2 ████···",
            "3 █·███··",
            "4 █··███·",
            "5 █···███",
        ]
    )


def test_snapshot_scaled_down() -> None:
    mask = documents([0, 40, 100], causal=True)
    assert mask.draw(size=10) == "\n".join(
        [
            "100 x 100, 2650 pairs (26.5%), 2 slices",
            "   keys 0..99, about 10 each",
            " 0 ▒▒········",
            "20 ██▒▒······",
            "40 ····▒▒····",
            "60 ····██▒▒··",
            "80 ····████▒▒",
        ]
    )


@given(attn_masks(max_tokens=64), st.integers(1, 20))
def test_never_wider_than_asked(mask: AttnMask, size: int) -> None:
    art = [line.split()[-1] for line in draw(mask, size=size).splitlines()[2:]]
    assert len(art) <= size and {len(line) for line in art} == {min(size, mask.tk)}
    assert set("".join(art)) <= set("█▒·")


def test_million_tokens_are_quick() -> None:
    n = 1 << 20
    masks = [causal(n), sliding_window(n, left=4096, sink_tokens=64), documents(range(0, n, 100))]
    start = time.perf_counter()
    for mask in masks:
        assert len(draw(mask).splitlines()) == 26
    assert time.perf_counter() - start < 1


def test_masks_without_cells() -> None:
    assert draw(AttnMask([], 0, 5)) == "0 x 5, 0 pairs (of none), 0 slices\n keys 0..4"
    assert draw(AttnMask([], 2, 0)).splitlines()[0] == "2 x 0, 0 pairs (of none), 0 slices"
    assert draw(AttnMask([AttnSlice(0, 2, 1, 1)], 2, 2)).splitlines()[2:] == ["0 ··", "1 ··"]


def test_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    masks = {
        "causal": causal(1 << 20),
        "window": sliding_window(9, left=2, sink_tokens=1),
        "many": documents(range(0, 3000, 10)),
        "nothing": AttnMask([AttnSlice(0, 3, 0, 3, lo=9)], 3, 3),
        "empty": AttnMask([], 0, 0),
    }
    for name, mask in masks.items():
        path = tmp_path / f"{name}.png"
        assert mask.draw(str(path), title=name) == mask.draw(title=name)
        pixels = image.imread(path)
        assert min(pixels.shape[:2]) > 500
    dark = image.imread(tmp_path / "causal.png")[:, :, 0] < 0.2
    height, width = dark.shape
    # The attended triangle is at the bottom left.
    assert dark[3 * height // 4, width // 4] and not dark[height // 3, 3 * width // 4]
    assert 0.2 < dark.mean() < 0.6


def test_picture_leaves_no_global_state(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    causal(5).draw(str(tmp_path / "mask.png"))
    assert dict(matplotlib.rcParams) == before


def test_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real_import = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ValueError, match=r"pip install keel-attn\[viz\]"):
        causal(5).draw(str(tmp_path / "mask.png"))


def test_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="size must be at least 1 column, got 0"):
        draw(causal(3), size=0)
