"""`keel overlap lab`. Presentation only; needs the extra `cli`."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch

from keel.overlap.lab import CLUSTERS, CONNECTIONS, MARGINS, Bench, Row, Setting, run, settings
from keel.overlap.lab_plot import plot_lab
from keel.overlap.lab_verdict import verdicts

try:
    import typer
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError:  # the keel command says what is missing
    pass

MAX_ERRORS = 5
"""Of different ones that are printed; the CSV has them all."""


def lab(
    out: Annotated[Path, typer.Option(help="Where overlap_lab.csv and overlap_lab.png go.")] = Path(
        "overlap_lab"
    ),
    tokens: Annotated[int, typer.Option(min=1024, help="Of causal attention.")] = Bench.tokens,
    heads: Annotated[int, typer.Option(min=1, help="Query heads; a quarter are key heads.")] = 32,
    blocks: Annotated[
        int, typer.Option(min=4, help="Thread blocks of communication, one an SM; times 4.")
    ] = Bench.blocks,
    span_us: Annotated[
        float, typer.Option("--us", min=10, help="How long communication takes alone, in us.")
    ] = Bench.span_us,
    rate: Annotated[
        float, typer.Option(min=1, help="GB/s that communication moves.")
    ] = Bench.gb_per_s,
    repeats: Annotated[int, typer.Option(min=1, help="Launches of each setting.")] = Bench.repeats,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few margins, no clusters, CUDA's own connections.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try all levers of overlap on this GPU, with kernels that say where and when they ran."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("the lab needs a CUDA GPU, and torch finds none here")
    if blocks % 4:
        raise typer.BadParameter(f"--blocks must be a multiple of 4, for clusters, got {blocks}")
    bench = Bench(
        tokens=tokens,
        heads=heads,
        kv_heads=max(1, heads // 4),
        blocks=blocks,
        span_us=span_us,
        gb_per_s=rate,
        repeats=repeats,
    )
    if heads % bench.kv_heads:
        raise typer.BadParameter(f"--heads must be a multiple of 4, or less than 4, got {heads}")
    clusters: Sequence[int] = CLUSTERS if torch.cuda.get_device_capability() >= (9, 0) else (1,)
    todo = settings(CONNECTIONS, MARGINS, clusters)
    if quick:
        todo = settings(CONNECTIONS[:1], (0, 4, 8, 16), (1,))
    began = time.perf_counter()
    rows = _run(bench, todo, out / "overlap_lab.csv")
    if not as_json:
        show(rows)
    try:
        plot_lab(rows, out / "overlap_lab.png")
    except ModuleNotFoundError:
        print("no picture: it needs matplotlib: pip install 'keel-attn[viz]'", file=sys.stderr)
    except ValueError as error:
        print(f"no picture: {error}", file=sys.stderr)
    seconds = time.perf_counter() - began
    if as_json:
        found = {
            "rows": [{name: _finite(x) for name, x in row.items()} for row in rows],
            "verdicts": verdicts(rows),
            "seconds": round(seconds, 1),
            "out": str(out),
        }
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        console = Console(highlight=False)
        console.print(f"{len(rows)} settings in {seconds:.0f} s; all of them: {out}")
    if any(row.get("error") for row in rows):
        raise typer.Exit(1)


def _finite(value: object) -> object:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _run(bench: Bench, todo: Sequence[Setting], path: Path) -> list[Row]:
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=len(todo))

        def advance(row: Row) -> None:
            bar.update(task, advance=1, description=f"{row['connections']} connections")

        return run(bench, todo, csv_path=path, progress=advance)


def show(rows: Sequence[Row]) -> None:
    """Prints overlap by lever and margin, what attention loses, errors, and what follows."""
    console = Console(highlight=False, emoji=False)
    behind = [row for row in rows if row["scenario"] == "behind"]
    columns = sorted({(row["grid"] == "persistent", int(row["sm_margin"])) for row in behind})
    table = Table(
        title="Communication beside attention (%), launched behind it, by SM margin",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("connections, cluster, levers", no_wrap=True)
    for persistent, margin in columns:
        table.add_column(str(margin) if persistent else "tiles", justify="right", no_wrap=True)
    lines: dict[str, dict[tuple[bool, int], Row]] = {}
    for row in behind:
        place = row["grid"] == "persistent", int(row["sm_margin"])
        lines.setdefault(_levers(row), {})[place] = row
    for name, line in lines.items():
        table.add_row(name, *(_cell(line.get(place), "overlap") for place in columns))
    if lines:
        name, line = next(iter(lines.items()))
        slower = [_cell(line.get(place), "slowdown") for place in columns]
        table.add_row(f"attention slower: {name}", *slower, style="dim")
    console.print(table)
    failed = dict.fromkeys(str(row["error"]) for row in rows if row.get("error"))
    for error in list(failed)[:MAX_ERRORS]:
        console.print(f"! {error}", markup=False, soft_wrap=True)
    for text in verdicts(rows):
        console.print(f"- {text}", markup=False, soft_wrap=True)


def _levers(row: Row) -> str:
    on = [name for name in ("priority", "barrier") if row[name]]
    return ", ".join([str(row["connections"]), str(row["cluster"]), *on])


def _cell(row: Row | None, name: str) -> str:
    if row is None:
        return ""
    return "error" if row.get("error") or row.get(name) is None else f"{100 * row[name]:.1f}"
