"""A picture of a report: a timeline of each rank, with exposed communication standing out."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from keel.masks.arrays import Ints
from keel.overlap import intervals
from keel.overlap.classify import Kind
from keel.overlap.trace import Timeline

COLOURS = {
    "compute": "#4c78a8",
    "hidden communication": "#9ecae9",
    "exposed communication": "#e45756",
    "copies": "#bab0ac",
}
PIXELS = 4000
MAX_RANKS = 16


def plot_timelines(lines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Draw timelines of up to 16 ranks into a picture; needs matplotlib (the extra `viz`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = list(lines)[:MAX_RANKS]
    if not shown:
        raise ValueError("nothing to draw: no rank has GPU work")
    figure = Figure(figsize=(12, 1.3 + 0.95 * len(shown)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    longest = max(int(line.end.max() - line.start.min()) for line in shown)
    for n, line in enumerate(shown):
        compute, communication, copies = (line.of(kind) for kind in Kind)
        rows = (
            ("compute", compute, 0.02),
            ("hidden communication", intervals.intersect(communication, compute), 0.32),
            ("exposed communication", intervals.subtract(communication, compute), 0.32),
            ("copies", copies, 0.62),
        )
        for name, times, height in rows:
            bars = _visible(times - line.start.min(), longest)
            axes.broken_barh(bars, (n + height, 0.26), color=COLOURS[name], linewidth=0)
    axes.set_yticks([n + 0.45 for n in range(len(shown))], [f"rank {x.rank}" for x in shown])
    axes.set_ylim(len(shown) - 0.02, -0.06)
    axes.set_xlim(0, longest / 1e6)
    axes.set_xlabel("ms since the rank's first GPU event")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items()],
        loc="outside upper right",
        ncols=len(COLOURS),
        frameon=False,
    )
    left_out = len(lines) - len(shown)
    if left_out:
        axes.set_title(f"{left_out} more ranks not shown", loc="left", fontsize="small")
    figure.savefig(path)


def _visible(times: Ints, longest: int) -> list[tuple[float, float]]:
    """(left, width) in ms; gaps narrower than a pixel are closed where there are many bars."""
    blur = longest // PIXELS
    if len(times) > PIXELS:
        times = intervals.union(times[:, 0], times[:, 1] + blur)
    width = np.maximum(times[:, 1] - times[:, 0], blur)
    return [(float(a) / 1e6, float(w) / 1e6) for a, w in zip(times[:, 0], width, strict=True)]
