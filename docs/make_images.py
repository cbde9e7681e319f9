"""Draws the pictures of the README: python docs/make_images.py (needs matplotlib)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from keel import masks
from keel.masks import AttnMask
from keel.masks.draw import cell_area

TOKENS, CELLS = 960, 960
PAPER, INK, MUTED, OUTLINE = "#f4f1ea", "#22303a", "#7b848c", "#b9b3a6"
SLICES = ("#12466b", "#2f86a6", "#7cc0b5", "#e0a458")
"""Colours of the slices of a mask, in turn."""

DOCUMENTS = [0, 150, 470, 580, TOKENS]
TWO_DOCUMENTS = [0, 560, TOKENS]
PANELS = (
    ("documents, causal", masks.documents(DOCUMENTS, causal=True), DOCUMENTS),
    (
        "sliding window + sink tokens",
        masks.sliding_window(TOKENS, left=200, sink_tokens=56),
        [0, TOKENS],
    ),
    ("block-causal", masks.block_causal(112, TWO_DOCUMENTS), TWO_DOCUMENTS),
    ("prefix-LM", masks.prefix_lm(TWO_DOCUMENTS, [240, 120]), TWO_DOCUMENTS),
)


def main() -> None:
    figure = Figure(figsize=(12, 3.65), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes, (title, mask, bounds) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        axes.imshow(_picture(mask), extent=(0, TOKENS, TOKENS, 0), interpolation="nearest")
        for start, end in pairwise(bounds):  # each document sees at most its own square
            axes.plot(
                [start, end, end, start, start],
                [start, start, end, end, start],
                color=OUTLINE,
                linewidth=1.0,
                solid_joinstyle="miter",
            )
        share = mask.area() / (mask.tq * mask.tk)
        axes.set_title(title, fontsize=12, color=INK, pad=8)
        axes.set_xlabel(
            f"{mask.num_slices} slices, {share:.0%} of all pairs", fontsize=10, color=MUTED
        )
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlim(-5, TOKENS + 5)
        axes.set_ylim(TOKENS + 5, -5)
        for side in axes.spines.values():
            side.set_visible(False)
    folder = Path(__file__).parent / "images"
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / "masks.png")


def _picture(mask: AttnMask) -> NDArray[np.float64]:
    """(CELLS, CELLS, 3): each slice in its colour, earlier ones on top where they overlap."""
    edges = np.arange(CELLS + 1) * TOKENS // CELLS
    whole = np.outer(np.diff(edges), np.diff(edges))
    picture = np.broadcast_to(to_rgb(PAPER), (CELLS, CELLS, 3))
    for n, part in reversed(list(enumerate(mask))):
        share = cell_area(AttnMask([part], mask.tq, mask.tk), edges, edges) / whole
        colour = np.array(to_rgb(SLICES[n % len(SLICES)]))
        picture = picture * (1 - share[..., None]) + colour * share[..., None]
    return picture


if __name__ == "__main__":
    main()
