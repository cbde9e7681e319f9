"""Pictures of masks: text for terminals, PNG for pages.

Both show the exact share of attended pairs in each cell of a coarse grid. It comes from the row
intervals in closed form, so a mask of a million tokens costs as much as one of a thousand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keel.masks.arrays import Ints, ragged_range
from keel.masks.intervals import UNBOUNDED

if TYPE_CHECKING:
    from keel.masks.mask import AttnMask

PICTURE_CELLS = 512
OUTLINED_SLICES = 200


def draw(
    mask: AttnMask, path: str | None = None, *, size: int = 48, title: str | None = None
) -> str:
    """Text art at most size cells wide; with a path, also a PNG there (needs matplotlib).

    Small masks get one cell per pair; larger ones are scaled down, with half as many lines as
    columns because characters are about twice as high as wide.

    >>> from keel.masks import causal
    >>> print(draw(causal(3, 4)))
    3 x 4, 9 pairs (75.0%), 1 slice
      keys 0..3
    0 ██··
    1 ███·
    2 ████
    """
    if size < 1:
        raise ValueError(f"size must be at least 1 column, got {size}")
    lines = [title] if title else []
    lines.append(_summary(mask))
    exact = mask.tq <= size and mask.tk <= size
    rows = _grid(mask.tq, size if exact else max(1, size // 2))
    columns = _grid(mask.tk, size)
    area = cell_area(mask, rows, columns)
    whole = np.outer(np.diff(rows), np.diff(columns))
    cells = np.where(area == 0, "·", np.where(area == whole, "█", "▒"))
    gutter = len(str(int(rows[-2]))) if len(rows) > 1 else 0
    if mask.tk:
        scale = "" if len(columns) > mask.tk else f", about {mask.tk / (len(columns) - 1):.3g} each"
        lines.append(f"{'':{gutter}} keys 0..{mask.tk - 1}{scale}")
    for first, line in zip(rows[:-1].tolist(), cells.tolist(), strict=True):
        lines.append(f"{first:>{gutter}} {''.join(line)}")
    if path is not None:
        _save_picture(mask, path, title)
    return "\n".join(lines)


def cell_area(mask: AttnMask, rows: Ints, columns: Ints) -> Ints:
    """Attended pairs in each cell of the grid with these row and column edges (from 0 to the end).

    >>> from keel.masks import causal
    >>> cell_area(causal(4), np.array([0, 2, 4]), np.array([0, 2, 4])).tolist()
    [[3, 0], [4, 3]]
    """
    area = np.zeros((len(rows) - 1, len(columns) - 1), np.int64)
    intervals = mask.row_intervals()
    if len(intervals.lo_base) == 0:
        return area
    # Cut each interval's strip of rows at the row edges.
    strip = intervals.strip
    first = np.searchsorted(rows, intervals.start[strip], side="right") - 1
    count = np.searchsorted(rows, intervals.end[strip] - 1, side="right") - first
    which = np.repeat(np.arange(len(strip)), count)
    line = ragged_range(first, count)
    start = np.maximum(intervals.start[strip[which]], rows[line])
    num_rows = np.minimum(intervals.end[strip[which]], rows[line + 1]) - start
    lo, lo_slope = intervals.lo_base[which], intervals.lo_slope[which]
    hi, hi_slope = intervals.hi_base[which], intervals.hi_slope[which]
    lo, hi = lo + lo_slope * start, hi + hi_slope * start  # at the first row
    left = np.searchsorted(columns, lo, side="right") - 1
    right = np.searchsorted(columns, hi + hi_slope * (num_rows - 1), side="left")
    step = max(1, (1 << 21) // len(columns))  # bounds the memory for the pairs (piece, column)
    for begin in range(0, len(which), step):
        touched = right[begin : begin + step] - left[begin : begin + step]
        x = begin + np.repeat(np.arange(len(touched)), touched)
        column = ragged_range(left[begin : begin + step], touched)
        e0, e1, n = columns[column], columns[column + 1], num_rows[x]
        upper = _sum_min(hi[x], hi_slope[x], n, e1) - _sum_min(hi[x], hi_slope[x], n, e0)
        lower = _sum_min(lo[x], lo_slope[x], n, e1) - _sum_min(lo[x], lo_slope[x], n, e0)
        np.add.at(area, (line[x], column), upper - lower)
    return area


def _sum_min(first: Ints, slope: Ints, count: Ints, edge: Ints) -> Ints:
    """Sum of min(first + slope * i, edge) over i in [0, count); slopes are 0 or 1."""
    below = np.where(slope == 1, edge - first, np.where(first < edge, count, 0))
    below = np.clip(below, 0, count)  # the terms that stay below the edge come first
    total: Ints = below * first + slope * (below * (below - 1) // 2) + (count - below) * edge
    return total


def _grid(tokens: int, cells: int) -> Ints:
    """Edges of at most `cells` cells of almost equal size."""
    cells = min(tokens, cells)
    return np.arange(cells + 1) * tokens // max(cells, 1)


def _summary(mask: AttnMask) -> str:
    pairs = mask.tq * mask.tk
    share = f"{mask.area() / pairs:.1%}" if pairs else "of none"
    noun = "slice" if mask.num_slices == 1 else "slices"
    return f"{mask.tq} x {mask.tk}, {mask.area()} pairs ({share}), {mask.num_slices} {noun}"


def _save_picture(mask: AttnMask, path: str, title: str | None) -> None:
    try:
        # Not pyplot: it would choose a backend and keep figures for the whole process.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PolyCollection
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "a picture needs matplotlib: pip install keel-attn[viz], or leave path out for text"
        ) from None
    rows, columns = _grid(mask.tq, PICTURE_CELLS), _grid(mask.tk, PICTURE_CELLS)
    whole = np.outer(np.diff(rows), np.diff(columns))
    share = cell_area(mask, rows, columns) / np.maximum(whole, 1)
    figure = Figure(figsize=(6.4, 6.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = LinearSegmentedColormap.from_list("keel", ["#f4f1ea", "#7fb2c9", "#12466b"])
    axes.imshow(
        share if share.size else np.zeros((1, 1)),
        extent=(0, max(mask.tk, 1), max(mask.tq, 1), 0),
        cmap=colours,
        vmin=0,
        vmax=1,
        interpolation="nearest",
        aspect="auto",
    )
    if mask.num_slices < OUTLINED_SLICES:
        shapes = [_outline(s) for s in mask.array]
        axes.add_collection(
            PolyCollection(
                [s for s in shapes if len(s)],
                facecolors="none",
                edgecolors="#d9822b",
                linewidths=1.0,
            )
        )
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_title(f"{title}\n{_summary(mask)}" if title else _summary(mask), fontsize=10)
    figure.savefig(path, format="png")


def _outline(row: Ints) -> NDArray[np.float64]:
    """Corners (key, query) around one slice: its steps where it is small, else many of them."""
    q0, q1, k0, k1, lo, hi = row.tolist()
    edges = _grid(q1 - q0, PICTURE_CELLS) + q0
    left, right = np.full(len(edges) - 1, k0), np.full(len(edges) - 1, k1)
    if lo > -UNBOUNDED:
        left = np.maximum(left, edges[:-1] + lo)
    if hi < UNBOUNDED:
        right = np.minimum(right, edges[:-1] + hi + 1)
    sees = np.flatnonzero(left < right)
    if len(sees) == 0:
        return np.zeros((0, 2))
    top, bottom, left, right = (x[sees] for x in (edges[:-1], edges[1:], left, right))
    down = np.stack([np.repeat(left, 2), np.stack([top, bottom], 1).ravel()], 1)
    up = np.stack([np.repeat(right, 2), np.stack([top, bottom], 1).ravel()], 1)[::-1]
    return np.concatenate([down, up]).astype(np.float64)
