"""`keel overlap report` and `keel overlap compare`. Presentation only; needs the extra `cli`."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from keel.overlap import control
from keel.overlap.classify import Rules
from keel.overlap.lab_command import lab
from keel.overlap.plot import plot_timelines
from keel.overlap.report import (
    STAGES,
    Comparison,
    Hidden,
    RankReport,
    Report,
    analyze_timelines,
    percent,
)
from keel.overlap.report import compare as compare_reports
from keel.overlap.trace import Timeline, expand, read_traces

try:
    import typer
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table
except ImportError:  # the keel command says what is missing
    pass

MAX_ROWS = 12
"""Of collectives and of ranks in a table; JSON has them all."""


def build_app() -> typer.Typer:
    """The commands of `keel overlap`."""
    app = typer.Typer(help="Whether communication hides behind compute.", no_args_is_help=True)
    for command in (report, compare, advise, lab):
        app.command()(command)
    return app


def advise(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the settings that decide whether communication overlaps, and what they mean."""
    if as_json:
        _print_json({"levers": [asdict(lever) for lever in control.levers()]})
        return
    control.advise()


def report(
    traces: Annotated[
        list[Path],
        typer.Argument(help="Traces of torch.profiler (.json, .json.gz), one a rank; or folders."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also draw the timelines: a PNG.")
    ] = None,
    min_overlap: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Exit with 1 where a rank's overlap is below this."),
    ] = None,
    communication: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of kernels or copies that are communication; repeatable."),
    ] = None,
    compute: Annotated[
        list[str] | None, typer.Option(help="Pattern of kernels that are compute; repeatable.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Pattern of events to leave out; repeatable.")
    ] = None,
    stages: Annotated[
        str, typer.Option(help="Pattern of the names of record_function ranges that are stages.")
    ] = STAGES,
) -> None:
    """Say what GPU time went where, what communication is exposed, and what to do about it."""
    with _bad_parameters():
        try:
            re.compile(stages)
        except re.error as error:
            raise ValueError(f"--stages {stages!r} does not compile: {error}") from None
        rules = Rules(communication=communication or (), compute=compute or (), ignore=ignore or ())
        lines = _read(traces, rules)
        result = analyze_timelines(lines, stages=stages)
        if plot is not None:
            _draw(lines, plot)
    if as_json:
        _print_json(result.to_json())
    else:
        _print(result)
    if min_overlap is not None and not _passes(result, min_overlap):
        raise typer.Exit(1)


def compare(
    a: Annotated[Path, typer.Argument(help="The run without overlap: a trace, or a folder.")],
    b: Annotated[Path, typer.Argument(help="The run with overlap.")],
    communication: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of kernels or copies that are communication; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how much faster B is than A, and how much of what overlap can save it saves."""
    with _bad_parameters():
        rules = Rules(communication=communication or ())
        reports = [analyze_timelines(_read([path], rules)) for path in (a, b)]
        result = compare_reports(*reports)
    if as_json:
        _print_json(result.to_json())
    else:
        _print_comparison(result)


@contextlib.contextmanager
def _bad_parameters() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _read(traces: list[Path], rules: Rules) -> list[Timeline]:
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not _is_tty()
    ) as bar:
        task = bar.add_task("reading", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return read_traces(expand(traces), rules=rules, progress=advance)


def _is_tty() -> bool:
    return sys.stderr.isatty()


def _draw(lines: list[Timeline], path: Path) -> None:
    try:
        plot_timelines(lines, path)
    except ModuleNotFoundError:
        raise ValueError("--plot needs matplotlib: pip install 'keel-attn[viz]'") from None
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None


def _passes(result: Report, least: float) -> bool:
    ratio = result.overlap_ratio
    if ratio is None:
        print(f"overlap n/a: no communication to hold to {percent(least)}", file=sys.stderr)
    elif ratio < least:
        print(f"overlap {percent(ratio)} is below {percent(least)}", file=sys.stderr)
    return ratio is not None and ratio >= least


def _print(result: Report) -> None:
    console = Console(highlight=False, emoji=False)
    console.print(_rank_table(result))
    worst = result.worst
    if worst is not None:
        if worst.collectives:
            title = f"Communication of rank {worst.rank} (ms), the most exposed first"
            console.print(_part_table(title, "name", worst.collectives[:MAX_ROWS]))
        if worst.stages:
            console.print(_part_table(f"Stages of rank {worst.rank} (ms)", "stage", worst.stages))
    if result.skews:
        table = _table(
            f"Start of collectives over ranks (ms; clock: {result.clock})",
            *("name", "count", "mean skew", "max skew", "straggler", "waited", "shortest"),
        )
        for x in result.skews[:MAX_ROWS]:
            table.add_row(
                *(_short(x.name), str(x.count), _ms(x.mean_skew_ms), _ms(x.max_skew_ms)),
                *(f"rank {x.straggler}", _ms(x.waited_ms), _ms(x.shortest_ms)),
            )
        console.print(table)
    for line in result.verdicts():
        arrow = "→" if _unicode(console) else "->"
        console.print(f"{arrow} {line}", markup=False, soft_wrap=True)


def _rank_table(result: Report) -> Table:
    table = _table(
        "GPU time (ms); compute + exposed + copies + idle = span",
        *("rank", "span", "compute", "comm.", "hidden", "exposed", "copies", "idle", "overlap"),
    )

    def add(rank: RankReport, style: str | None) -> None:
        times = [rank.span_ms, rank.compute_ms, rank.communication_ms, rank.hidden_ms]
        times += [rank.exposed_ms, rank.exposed_copies_ms, rank.idle_ms]
        table.add_row(
            str(rank.rank), *(_ms(x) for x in times), percent(rank.overlap_ratio), style=style
        )

    worst = result.worst
    shown = result.ranks
    if len(shown) > MAX_ROWS:
        shown = sorted(shown, key=lambda rank: -rank.exposed_ms)[:MAX_ROWS]
        table.caption = f"the {MAX_ROWS} most exposed of {len(result.ranks)} ranks"
    for rank in shown:
        add(rank, "bold" if rank is worst and len(shown) > 1 else None)
    return table


def _part_table(title: str, first: str, rows: list[Hidden]) -> Table:
    columns = ("count", "comm.", "hidden", "exposed", "overlap")
    stages = any(row.compute_ms for row in rows)
    table = _table(title, first, *columns, *(("compute",) if stages else ()))
    for x in rows:
        cells = [_short(x.name), str(x.count), _ms(x.communication_ms), _ms(x.hidden_ms)]
        cells += [_ms(x.exposed_ms), percent(x.overlap_ratio)]
        table.add_row(*cells, *([_ms(x.compute_ms)] if stages else []))
    return table


def _print_comparison(result: Comparison) -> None:
    console = Console(highlight=False, emoji=False)
    before, after = (percent(x) for x in result.ratios)
    rows: list[tuple[str, str]] = [
        ("A, without overlap", f"{_ms(result.serial_ms)} ms, overlap {before}"),
        ("B, with overlap", f"{_ms(result.overlapped_ms)} ms, overlap {after}"),
        ("bound", f"{_ms(result.bound_ms)} ms: max(compute, communication) of A"),
        ("speed-up", f"{result.speedup:.3f}x"),
        ("overlap efficiency", _efficiency(result)),
    ]
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)


def _efficiency(result: Comparison) -> str:
    if result.efficiency is None:
        return "n/a: A has nothing that overlap could save"
    return f"{percent(result.efficiency)} of what overlap could save"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n else "left", no_wrap=True)
    return table


def _ms(value: float) -> str:
    return f"{value:.3f}"


def _short(name: str, limit: int = 32) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))
