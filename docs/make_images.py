"""Draws the pictures of masks: python docs/make_images.py (needs matplotlib).

Those of masks.md show the mask of the Python block above them, token by token; the README's is a
panel of four.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imsave
from numpy.typing import NDArray

from keel import masks
from keel.masks import AttnMask
from keel.masks.draw import cell_area

HERE = Path(__file__).parent
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
    (HERE / "images" / "masks").mkdir(parents=True, exist_ok=True)
    for name, mask in masks_of_page().items():
        imsave(HERE / name, small_picture(mask))
    draw_panels(HERE / "images" / "masks.png")


def masks_of_page() -> dict[str, AttnMask]:
    """What each picture of masks.md shows: `mask`, as the blocks up to it have left it."""
    page = (HERE / "masks.md").read_text(encoding="utf-8")
    parts = re.finditer(
        r"^```python\n(?P<code>.*?)^```|!\[.*?\]\((?P<name>images/masks/\w+\.png)\)",
        page,
        re.MULTILINE | re.DOTALL,
    )
    names: dict[str, AttnMask] = {}
    found = {}
    for part in parts:
        if part["name"] is None:
            exec(part["code"], names)
        else:
            found[part["name"]] = names["mask"]
    return found


def small_picture(mask: AttnMask) -> NDArray[np.float32]:
    """(tq, tk, 3) in steps of 1/255: a token is a pixel, with a frame around all."""
    picture = _picture(mask, mask.tq)
    for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1]):
        edge[:] = to_rgb(OUTLINE)
    return (np.round(picture * 255) / 255).astype(np.float32)


def draw_panels(path: Path) -> None:
    """Four usual masks side by side."""
    figure = Figure(figsize=(12, 3.65), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes, (title, mask, bounds) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        axes.imshow(_picture(mask, CELLS), extent=(0, TOKENS, TOKENS, 0), interpolation="nearest")
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
    figure.savefig(path)


def _picture(mask: AttnMask, cells: int) -> NDArray[np.float64]:
    """(cells, cells, 3): each slice in its colour, earlier ones on top where they overlap."""
    edges = np.arange(cells + 1) * mask.tq // cells
    whole = np.outer(np.diff(edges), np.diff(edges))
    picture = np.broadcast_to(to_rgb(PAPER), (cells, cells, 3))
    for n, part in reversed(list(enumerate(mask))):
        share = cell_area(AttnMask([part], mask.tq, mask.tk), edges, edges) / whole
        colour = np.array(to_rgb(SLICES[n % len(SLICES)]))
        picture = picture * (1 - share[..., None]) + colour * share[..., None]
    return picture


if __name__ == "__main__":
    main()
