"""The lab's rows as a heat map: overlap by margin and by all other levers."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from keel.overlap.lab import CONNECTIONS, Row


def plot_lab(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Writes a PNG; needs matplotlib. Left: overlap, right: what attention loses."""
    from matplotlib.figure import Figure

    seen = [
        row for row in rows if row.get("scenario") == "behind" and row.get("overlap") is not None
    ]
    if not seen:
        raise ValueError("there is nothing to draw: no setting gave a result")
    margins = sorted({int(row["sm_margin"]) for row in seen})
    columns = [("tiles", 0), *(("persistent", margin) for margin in margins)]
    lines = sorted({_levers(row) for row in seen}, key=_order)
    maps = np.full((2, len(lines), len(columns)), np.nan)
    for row in seen:
        at = lines.index(_levers(row)), columns.index((row["grid"], int(row["sm_margin"])))
        maps[(0, *at)] = 100 * row["overlap"]
        maps[(1, *at)] = 100 * row["slowdown"]
    figure = Figure(figsize=(4 + 1.1 * len(columns), 1.6 + 0.24 * len(lines)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    limits = [(0, 100), (0, 30)]
    titles = ["communication beside attention, %", "attention slower by, %"]
    for axis, values, title, limit, colours in zip(
        axes, maps, titles, limits, ("RdYlGn", "YlOrRd"), strict=True
    ):
        axis.imshow(values, aspect="auto", cmap=colours, vmin=limit[0], vmax=limit[1])
        for (y, x), value in np.ndenumerate(values):
            if np.isfinite(value):
                axis.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=7)
        for y in range(1, len(lines)):
            if lines[y][0] != lines[y - 1][0]:  # other connections
                axis.axhline(y - 0.5, color="black", linewidth=1.5)
        axis.set_title(title, fontsize=9)
        axis.set_xticks(range(len(columns)), [_column(*x) for x in columns], fontsize=7)
        axis.set_xlabel("grid of attention: tiles, or persistent with an SM margin of", fontsize=8)
    axes[0].set_yticks(range(len(lines)), [_line(*x) for x in lines], fontsize=7)
    first = seen[0]
    figure.suptitle(
        f"{first.get('gpu', '')}: {first.get('blocks')} blocks of communication, launched behind "
        "attention",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _levers(row: Row) -> tuple[int, int, bool, bool]:
    return int(row["connections"]), int(row["cluster"]), bool(row["priority"]), bool(row["barrier"])


def _order(levers: tuple[int, int, bool, bool]) -> tuple[bool, int, bool, bool, int]:
    connections, cluster, priority, barrier = levers
    return connections != CONNECTIONS[0], connections, barrier, priority, cluster


def _line(connections: int, cluster: int, priority: bool, barrier: bool) -> str:
    levers = [f"cluster {cluster}", *(["priority"] if priority else [])]
    levers += ["barrier"] if barrier else []
    return f"{', '.join(levers)}; {connections} conn."


def _column(grid: str, margin: int) -> str:
    return "tiles" if grid == "tiles" else str(margin)
