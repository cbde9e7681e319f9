"""The picture of the training demo: logits, losses, and which heads were clipped, over steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from keel.training.comparison import EXPLODED, Comparison, RunRecord

PAPER, LIGHT, DARK, ORANGE = "#f4f1ea", "#7fb2c9", "#12466b", "#d9822b"
TITLES = {"muon": "Muon", "muon_clip": "MuonClip"}


def draw(comparison: Comparison, path: Path) -> None:
    """A PNG; needs matplotlib."""
    # Not pyplot: it would choose a backend and keep figures for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 7.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2, 2)
    blues = LinearSegmentedColormap.from_list("keel", [PAPER, LIGHT, DARK])
    finite = [x[np.isfinite(x) & (x > 0)] for x in (run.by_layer for run in comparison.runs)]
    low, high = min(x.min() for x in finite), max(x.max() for x in finite)
    for axis, run in zip(axes[0], comparison.runs, strict=True):
        _draw_logits(axis, run, comparison.config.tau, blues)
        axis.set_ylim(low / 1.2, max(high, EXPLODED * comparison.config.tau) * 1.2)
    axes[0][0].set_ylabel("largest logit of a layer")
    axes[0][0].legend(loc="lower right", fontsize=8, frameon=False)
    _draw_losses(axes[1][0], comparison)
    _draw_clips(axes[1][1], comparison.muon_clip, figure, blues)
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.set_xlim(0, comparison.config.steps)
        axis.spines[["top", "right"]].set_visible(False)
    config = comparison.config
    figure.suptitle(
        f"Muon with and without QK-Clip, tau {config.tau:g}: the same GPT, seed and text, "
        f"learning rate {config.lr:g}, on {config.num_ranks} context-parallel ranks",
        fontsize=11,
    )
    figure.savefig(path, format="png")


def _draw_logits(axis: Any, run: RunRecord, tau: float, blues: Any) -> None:
    layers = run.by_layer.shape[1]
    steps = np.arange(1, len(run.loss) + 1)
    for layer in range(layers):
        shade = blues(0.4 + 0.6 * layer / max(layers - 1, 1))
        axis.plot(steps, run.by_layer[:, layer], color=shade, linewidth=1.4, label=f"layer {layer}")
    for factor, style in ((1.0, "-"), (EXPLODED, ":")):
        axis.axhline(factor * tau, color=ORANGE, linewidth=1.2, linestyle=style, zorder=0)
        name = "tau" if factor == 1 else f"{factor:g} tau"
        axis.annotate(
            name,
            (1.0, factor * tau),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            color=ORANGE,
            fontsize=8,
        )
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.set_title(TITLES[run.name], fontsize=10)
    axis.grid(alpha=0.25, which="both", linewidth=0.5)


def _draw_losses(axis: Any, comparison: Comparison) -> None:
    for run, colour in zip(comparison.runs, (ORANGE, DARK), strict=True):
        steps = np.arange(1, len(run.loss) + 1)
        axis.plot(steps, run.loss, color=colour, linewidth=0.6, alpha=0.35)
        axis.plot(
            steps,
            _smooth(run.loss),
            color=colour,
            linewidth=1.6,
            label=f"{TITLES[run.name]}, {run.final_loss:.3f} at the end",
        )
    axis.set_title("loss, in nats per byte", fontsize=10)
    axis.set_ylabel("loss")
    finite = np.concatenate([run.loss[np.isfinite(run.loss)] for run in comparison.runs])
    if len(finite):  # the first steps fall from far above and would flatten the rest
        axis.set_ylim(finite.min() - 0.1, np.percentile(finite, 96))
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.legend(fontsize=8, frameon=False)


def _smooth(loss: Any) -> Any:
    """Mean of the last 10 steps, fewer at the beginning."""
    total = np.cumsum(np.concatenate([[0.0], loss.astype(np.float64)]))
    end = np.arange(1, len(total))
    start = np.maximum(end - 10, 0)
    return (total[end] - total[start]) / (end - start)


def _draw_clips(axis: Any, run: RunRecord, figure: Any, blues: Any) -> None:
    steps, layers, heads = run.gamma.shape
    clip = 100 * (1 - run.gamma.reshape(steps, layers * heads).T)
    image = axis.imshow(
        clip,
        extent=(0, steps, layers * heads, 0),
        cmap=blues,
        vmin=0,
        vmax=max(float(np.nanpercentile(clip, 99.5)), 1.0),
        interpolation="nearest",
        aspect="auto",
    )
    for layer in range(1, layers):
        axis.axhline(layer * heads, color="white", linewidth=1.5)
    axis.set_yticks(
        [(layer + 0.5) * heads for layer in range(layers)],
        [f"layer {layer}" for layer in range(layers)],
    )
    axis.tick_params(axis="y", length=0)
    axis.set_title(f"heads that MuonClip clipped: {run.clips} in all", fontsize=10)
    figure.colorbar(image, ax=axis, label="percent off the logits", fraction=0.05, pad=0.02)
