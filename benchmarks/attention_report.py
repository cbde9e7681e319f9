"""Results of benchmarks/attention.py: rows of the CSV, tables of ratios, pictures."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from attention_masks import DIRECTIONS, MASKS
from attention_peers import PEERS, is_ours
from timing import write_csv

import keel

LABELS = {
    "keel": "Keel",
    "keel-plain": "Keel, no max logits",
    "flex": "FlexAttention",
    "cudnn": "cuDNN",
    "fa3": "FlashAttention-3",
    "fa3-loop": "FlashAttention-3, a call per block",
    "flash": "FlashAttention-2 in torch",
    "sdpa": "torch",
}
OK = "ok"


@dataclass
class Row:
    """One line of the CSV."""

    mask: str
    tokens: int
    provider: str
    direction: str
    timing: str
    """graph: kernels alone, replayed; eager: calls as a program makes them."""
    ms: float
    tflops: float
    error: float
    spread: float = 0.0
    """Distance of the quartiles / median."""
    roof_tflops: float = 0.0
    """What the product rate and the copy rate of this run allow; 0 where they were not taken."""
    gemm_tflops: float = 0.0
    hq: int = 64
    hk: int = 8
    d: int = 128
    dtype: str = "bfloat16"
    gpu: str = ""
    torch: str = torch.__version__
    triton: str = ""
    keel: str = keel.__version__
    run: str = ""
    """When the run began: ratios are made inside of one run only."""
    rounds: int = 0
    """Samples of which `ms` is the median; 0 where they were not counted."""
    status: str = OK
    """Why there is no figure: a short word, mostly a colon and the reason."""
    cuda: str = ""
    command: str = ""
    dv: int = 0
    """Of values, where that is not d."""
    lead_ms: float = 0.0
    """Of calls in front of each sample, at least; 0: a third of the sample, of 20 ms mostly."""

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def word(self) -> str:
        """The status in a table."""
        return self.status.partition(":")[0]


@dataclass(frozen=True, order=True)
class Shape:
    """What one table or picture is about."""

    hq: int
    hk: int
    d: int
    timing: str
    dv: int = 0

    @staticmethod
    def of(row: Row) -> Shape:
        return Shape(row.hq, row.hk, row.d, row.timing, row.dv)

    def __str__(self) -> str:
        values = f"/{self.dv}" if self.dv else ""
        return f"{self.hq}:{self.hk} heads, d {self.d}{values}, {self.timing}"

    @property
    def file_name(self) -> str:
        values = f"x{self.dv}" if self.dv else ""
        return f"attention-{self.hq}x{self.hk}-d{self.d}{values}-{self.timing}.png"


def roofline(flops: float, num_bytes: float, gemm_tflops: float, copy_tbps: float) -> float:
    """TFLOP/s that products at `gemm_tflops` and bytes at `copy_tbps` allow at best.

    >>> roofline(600e12, 1e12, 600.0, 4.0), roofline(6e12, 1e12, 600.0, 4.0)
    (600.0, 24.0)
    """
    return flops / max(flops / gemm_tflops, num_bytes / copy_tbps)


def read_rows(path: Path) -> list[Row]:
    """Rows of this version, and of those before it, which had fewer columns."""
    kinds = {f.name: {"int": int, "float": float}.get(f.type, str) for f in dataclasses.fields(Row)}
    rows = []
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            if "timing" not in line:
                line["direction"], _, timing = line["direction"].partition(", ")
                line["timing"] = timing or "eager"
            rows.append(Row(**{name: kinds[name](x) for name, x in line.items()}))
    return rows


def migrate(path: Path) -> None:
    """Gives a file of a version before this one its columns, so that rows can be added."""
    if not path.exists():
        return
    with open(path, newline="") as file:
        columns = next(csv.reader(file), None)
    if columns and columns != [f.name for f in dataclasses.fields(Row)]:
        write_csv(read_rows(path), path)


def latest(rows: Iterable[Row]) -> dict[tuple[str, int, str], dict[str, Row]]:
    """(mask, tokens, direction) -> provider -> row, of one run for each cell.

    Of the last in which each peer was timed beside Keel, the run where a peer comes off best: one
    that asked slow peers alone hides none that is faster. Without a peer, the last that timed Keel.
    For rows of one shape. Rows of different runs are never put side by side.
    """
    runs: dict[tuple[str, int, str], dict[str, dict[str, Row]]] = {}
    for row in rows:
        if not row.ok:
            continue
        by_run = runs.setdefault((row.mask, row.tokens, row.direction), {})
        by_run.setdefault(row.run, {})[row.provider] = row
    found = {}
    for key, by_run in runs.items():
        with_ours = [run for run in sorted(by_run) if ours(by_run[run])]
        last = {name: run for run in with_ours for name in by_run[run] if name in PEERS}
        of_peers = [(_advantage(by_run[run], name), run) for name, run in last.items()]
        if with_ours:
            found[key] = by_run[min(of_peers)[1] if of_peers else with_ours[-1]]
    return found


def _advantage(providers: dict[str, Row], peer: str) -> float:
    """Keel's speed / that of a peer, both of one run."""
    mine = ours(providers)
    return providers[peer].ms / mine.ms if mine else float("nan")


def failures(rows: Iterable[Row]) -> dict[tuple[str, int, str], dict[str, Row]]:
    """(mask, tokens, direction) -> provider -> row without a figure, of the runs `latest` takes.

    Where Keel itself has no figure, of the last run.
    """
    rows = list(rows)
    taken = {key: next(iter(found.values())).run for key, found in latest(rows).items()}
    last: dict[tuple[str, int, str], str] = {}
    for row in rows:
        key = row.mask, row.tokens, row.direction
        last[key] = max(last.get(key, ""), row.run)
    found: dict[tuple[str, int, str], dict[str, Row]] = {}
    for row in rows:
        key = row.mask, row.tokens, row.direction
        if not row.ok and row.run == taken.get(key, last[key]):
            found.setdefault(key, {})[row.provider] = row
    return found


def ours(providers: dict[str, Row]) -> Row | None:
    """The row that stands for Keel: `keel` if it ran, else the first of its variants."""
    names = [name for name in providers if is_ours(name)]
    return providers[min(names, key=lambda name: (name != "keel", name))] if names else None


def best_peer(providers: dict[str, Row]) -> Row | None:
    peers = [row for name, row in providers.items() if name in PEERS]
    return max(peers, key=lambda row: row.tflops, default=None)


def ratio(providers: dict[str, Row]) -> float | None:
    """Keel's speed / that of the best peer; above 1 is faster. None without one of them."""
    mine, peer = ours(providers), best_peer(providers)
    return None if mine is None or peer is None else peer.ms / mine.ms


def describe(providers: dict[str, Row]) -> str:
    """One line for the terminal; rows without a figure show why."""
    empty = {name: row for name, row in providers.items() if not row.ok}
    first = next(iter(providers.values()))
    providers = {name: row for name, row in providers.items() if row.ok}
    mine = ours(providers)
    first = mine or next(iter(providers.values()), first)
    line = f"{first.tokens:6d} {first.mask:11s} {first.direction:8s} {first.timing:5s}"
    for name, row in providers.items():
        line += f" | {name} {_speed(row.tflops):>5}"
        if row is mine and row.roof_tflops:
            line += f" ({row.tflops / row.roof_tflops:4.0%} of roof)"
        elif mine is not None and not is_ours(name):
            line += f", {mine.provider} {row.ms / mine.ms:.3f}x"
    for name, row in empty.items():
        line += f" | {name} {row.word}"
    return line + (f" | {first.ms * 1e3:.0f} us" if first.ok else "")


def table(rows: Sequence[Row]) -> str:
    """Markdown of one shape in TFLOP/s, forward / backward where both were timed."""
    found, empty = latest(rows), failures(rows)
    keys = {*found, *empty}
    here = {name for each in (found, empty) for providers in each.values() for name in providers}
    variants = sorted((n for n in here if is_ours(n)), key=lambda name: (name != "keel", name))
    names = [*variants, *(n for n in LABELS if n in here and not is_ours(n))]
    titles = ["tokens", "mask", *(LABELS.get(n, n) for n in names), "of best peer", "of roof"]
    directions = [d for d in DIRECTIONS if any(key[2] == d for key in keys)]
    order = list(MASKS)
    lines = []
    for mask, tokens in sorted({k[:2] for k in keys}, key=lambda k: (k[1], order.index(k[0]))):
        cells: list[list[str]] = [[] for _ in range(len(names) + 2)]
        for direction in directions:
            key = mask, tokens, direction
            providers, without = found.get(key, {}), empty.get(key, {})
            mine = ours(providers)
            roof = mine.tflops / mine.roof_tflops if mine and mine.roof_tflops else None
            texts = [_figure(providers.get(n), without.get(n)) for n in names]
            texts += ["–" if x is None else f"{x:.2f}" for x in (ratio(providers), roof)]
            for cell, text in zip(cells, texts, strict=True):
                cell.append(text)
        shown = [cell[0] if _says_one_thing(cell) else " / ".join(cell) for cell in cells]
        lines.append([str(tokens), mask, *shown])
    kept = [n for n in range(len(titles)) if any(line[n] != "–" for line in lines)]
    lines = [titles, ["---"] * len(titles), *lines]
    return "\n".join(f"| {' | '.join(line[n] for n in kept)} |" for line in lines)


def _figure(row: Row | None, empty: Row | None) -> str:
    if row is not None:
        return _speed(row.tflops)
    return "–" if empty is None else empty.word


def _speed(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"


def _says_one_thing(cell: Sequence[str]) -> bool:
    return len(set(cell)) == 1 and not cell[0][0].isdigit()


def ratio_grid(rows: Sequence[Row]) -> str:
    """Keel's speed / the best peer's: a line for each mask, a column for each length.

    One block for each shape, timing and pass; in place of a ratio stands why there is none.
    """
    blocks = []
    for shape in sorted({Shape.of(row) for row in rows}):
        own = [row for row in rows if Shape.of(row) == shape]
        found, empty = latest(own), failures(own)
        keys = {*found, *empty}
        lengths = sorted({tokens for _, tokens, _ in keys})
        for direction in DIRECTIONS:
            kinds = [m for m in MASKS if any((m, n, direction) in keys for n in lengths)]
            if not kinds:
                continue
            lines = [["mask", *(_length(n) for n in lengths)]]
            for kind in kinds:
                cells = (
                    _ratio_text(found.get((kind, n, direction)), empty.get((kind, n, direction)))
                    for n in lengths
                )
                lines.append([kind, *cells])
            widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
            text = "\n".join(
                "  ".join(f"{x:>{w}}" if n else f"{x:{w}}" for n, (x, w) in enumerate(pairs))
                for pairs in (list(zip(line, widths, strict=True)) for line in lines)
            )
            blocks.append(f"{shape}, {direction}: Keel / best peer\n{text}")
    return "\n\n".join(blocks)


def _length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _ratio_text(found: dict[str, Row] | None, empty: dict[str, Row] | None) -> str:
    found, empty = found or {}, empty or {}
    value, mine = ratio(found), ours(found)
    if value is not None and mine is not None:
        backend = mine.provider.partition(":")[2]  # an older run of one backend alone
        return f"{value:.3f} {backend}".rstrip()
    ours_empty = next((row.word for name, row in empty.items() if is_ours(name)), None)
    return ours_empty or ("no peer" if found else "–")


def reasons(rows: Iterable[Row]) -> list[str]:
    """Each reason for a missing figure once, with where it came up."""
    places: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if not row.ok and ":" in row.status:
            places.setdefault((row.provider, row.status), []).append(row)
    lines = []
    for (provider, status), own in places.items():
        kinds = ", ".join(dict.fromkeys(row.mask for row in own))
        lines.append(f"{provider}: {status} ({kinds}; {len(own)} figures)")
    return lines


def tables(rows: Sequence[Row]) -> str:
    """A table for each shape, under its name."""
    shapes = sorted({Shape.of(row) for row in rows})
    parts = [(s, [row for row in rows if Shape.of(row) == s]) for s in shapes]
    return "\n\n".join(f"{shape}\n\n{table(own)}" for shape, own in parts)


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """A picture for each shape: TFLOP/s by length, a panel for each mask and direction."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    paths = []
    for shape in sorted({Shape.of(row) for row in rows}):
        found = latest(row for row in rows if Shape.of(row) == shape)
        kinds = [m for m in MASKS if any(key[0] == m for key in found)]
        directions = [d for d in DIRECTIONS if any(key[2] == d for key in found)]
        if not found:
            continue
        size = (2.9 * len(kinds) + 1, 3.1 * len(directions) + 0.6)
        figure, axes = plt.subplots(
            len(directions), len(kinds), figsize=size, squeeze=False, sharex=True
        )
        drawn = {}
        for line, direction in enumerate(directions):
            for column, kind in enumerate(kinds):
                axis = axes[line][column]
                here = {
                    tokens: providers
                    for (mask, tokens, way), providers in sorted(found.items())
                    if (mask, way) == (kind, direction)
                }
                drawn |= _draw_panel(axis, here)
                axis.set_title(f"{kind}, {direction}", fontsize=10)
                axis.set_xscale("log", base=2)
                axis.set_ylim(bottom=0)
                axis.grid(alpha=0.3)
            axes[line][0].set_ylabel("TFLOP/s")
        for axis in axes[-1]:
            axis.set_xlabel("tokens")
        figure.legend(drawn.values(), drawn.keys(), loc="lower center", ncols=len(drawn))
        row = next(iter(next(iter(found.values())).values()))
        figure.suptitle(f"{shape}, {row.dtype}, {row.gpu}, torch {row.torch}, Triton {row.triton}")
        figure.tight_layout(rect=(0, 0.06, 1, 1))
        folder.mkdir(parents=True, exist_ok=True)
        paths.append(folder / shape.file_name)
        figure.savefig(paths[-1], dpi=110)
        plt.close(figure)
    return paths


def _draw_panel(axis, by_tokens: dict[int, dict[str, Row]]) -> dict:
    """Lines of providers in fixed colours, and the roof; label -> handle."""
    drawn = {}
    others = {name for providers in by_tokens.values() for name in providers} - set(LABELS)
    names = [*LABELS, *sorted(others)]
    for n, name in enumerate(names):
        points = [(t, v[name].tflops) for t, v in by_tokens.items() if name in v]
        if points and (name in LABELS or is_ours(name)):
            label = LABELS.get(name, name)
            (drawn[label],) = axis.plot(*zip(*points, strict=True), f"C{n}.-", label=label)
    rows = [row for providers in by_tokens.values() if (row := ours(providers)) is not None]
    roof = [(row.tokens, row.roof_tflops) for row in rows if row.roof_tflops]
    if roof:
        (drawn["roofline"],) = axis.plot(*zip(*roof, strict=True), "k--", linewidth=0.8)
    return drawn
