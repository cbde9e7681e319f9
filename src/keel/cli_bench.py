"""`keel bench`: every benchmark by one command, beside the peers that are here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from keel.bench import catalog
from keel.bench.catalog import MASKS, NAMES, PASSES, PEERS, Benchmark
from keel.bench.peers import Peer, fa3_folder, find_peers
from keel.bench.runner import FAILED, OK, SKIPPED, Outcome, run_benchmark, run_process
from keel.demo import DemoConfig, DemoResult, run_demo
from keel.terminal import make_console, print_json

OUT = Path("runs/bench")
PAGE = "results.md"


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Of {', '.join(NAMES)}.", show_default="all that can run here"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: minutes, and on CPUs too.")
    ] = False,
    masks: Annotated[str | None, typer.Option(help=f"Of attention: {','.join(MASKS)}.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Of attention: 1024,8192.")] = None,
    dims: Annotated[str | None, typer.Option(help="Head dims of attention: 64,192/128.")] = None,
    heads: Annotated[str | None, typer.Option(help="Of attention: 64:8,32:32.")] = None,
    passes: Annotated[str | None, typer.Option(help="Of attention: forward,backward.")] = None,
    peers: Annotated[
        str | None, typer.Option(help=f"Of attention: {','.join(PEERS)}, or none.")
    ] = None,
    fa3: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder with fa3_peer.py.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Of attention: ends within about this time.")
    ] = None,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for CSV files, pictures and the page.")
    ] = OUT,
    page: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="The page.", show_default=f"{PAGE} in that folder"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time Keel beside the libraries that are here: CSV files, pictures and a page of results.

    First attention is held against fp64: where that fails, nothing is timed. Every benchmark checks
    its own results as well.
    """
    chosen = _chosen(names or [], quick)
    options = _attention_options(masks, lengths, dims, heads, passes, peers, fa3, seconds)
    if options and all(x.name != "attention" for x in chosen):
        raise typer.BadParameter(f"{options[0]} is for attention, which is not to run")
    try:
        out.mkdir(parents=True, exist_ok=True)
        catalog.folder()
    except OSError as error:
        raise typer.BadParameter(str(error)) from None
    console = make_console()
    found = find_peers(fa3)
    if not as_json:
        console.print(_machine_line())
        console.print(_peer_table(found))
    gate = run_demo(DemoConfig(tokens=256))
    if not as_json:
        console.print(_gate_line(gate))
    outcomes: list[Outcome] = []
    if gate.ok:
        outcomes = _run_all(chosen, options, out, console, quick=quick, say=not as_json)
    text = _write_page(out, page or out / PAGE) if outcomes else None
    if as_json:
        print_json(
            {
                "machine": _machine(),
                "peers": [vars(peer) for peer in found],
                "gate": {"ok": gate.ok, "backend": gate.backend},
                "benchmarks": [outcome.as_dict() for outcome in outcomes],
                "out": str(out),
                "page": text,
            }
        )
    elif outcomes:
        console.print(_outcome_table(outcomes))
        console.print(f"results: {out}" + (f"; page: {text}" if text else ""), soft_wrap=True)
        if not quick and any(x.status == SKIPPED for x in outcomes):
            console.print("without a GPU, --quick runs more of them")
    bad = [x for x in outcomes if x.status not in (OK, SKIPPED)]
    if bad or not gate.ok:
        raise typer.Exit(1)


def _chosen(names: list[str], quick: bool) -> tuple[Benchmark, ...]:
    try:
        chosen = catalog.chosen(names)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    has_gpu = torch.cuda.is_available()
    able = [x for x in chosen if x.arguments(quick=quick, has_gpu=has_gpu) is not None]
    for benchmark in chosen if names else ():
        if benchmark not in able:
            small = benchmark.on_cpu is not None
            raise typer.BadParameter(
                f"{benchmark.name} needs a CUDA GPU, and torch finds none here"
                + ("; with --quick it runs on CPUs too" if small else "")
            )
    return chosen


def _attention_options(
    masks: str | None,
    lengths: str | None,
    dims: str | None,
    heads: str | None,
    passes: str | None,
    peers: str | None,
    fa3: Path | None,
    seconds: float | None,
) -> list[str]:
    """Arguments of attention.py, with names and numbers looked at before anything runs."""
    options: list[str] = []
    for option, given, known in (
        ("--masks", masks, MASKS),
        ("--passes", passes, PASSES),
        ("--peers", peers, (*PEERS, "none")),
    ):
        if given is not None:
            options += [option, *_known(option, given, known)]
    if lengths is not None:
        options += ["--lengths", *_numbers("--lengths", lengths, "64,128")]
    if dims is not None:
        options += ["--dims", *_numbers("--dims", dims, "64,192/128", together=2)]
    if heads is not None:
        options += ["--heads", *_heads(heads)]
    if fa3 is not None:
        if fa3_folder(fa3) is None:
            raise typer.BadParameter(f"--fa3 wants a folder with fa3_peer.py, and {fa3} has none")
        options += ["--fa3", str(fa3)]
    if seconds is not None:
        options += ["--seconds", f"{seconds:g}"]
    return options


def _known(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{option} has {name!r}: one of {', '.join(known)}")
    return names


def _numbers(option: str, text: str, example: str, together: int = 1) -> list[str]:
    """together: how many may stand for one, as 192/128."""
    numbers = text.split(",")
    for number in numbers:
        parts = number.split("/")
        if len(parts) > together or not all(x.isdigit() and int(x) > 0 for x in parts):
            raise typer.BadParameter(f"{option} wants numbers such as {example}, got {text!r}")
    return numbers


def _heads(text: str) -> list[str]:
    pairs = text.split(",")
    for pair in pairs:
        numbers = pair.split(":")
        right = len(numbers) == 2 and all(x.isdigit() and int(x) > 0 for x in numbers)
        if not right or int(numbers[0]) % int(numbers[1]):
            raise typer.BadParameter(
                f"--heads wants query:key heads such as 64:8, the first a multiple of the second, "
                f"got {pair!r}"
            )
    return pairs


def _run_all(
    chosen: tuple[Benchmark, ...],
    options: list[str],
    out: Path,
    console: Console,
    *,
    quick: bool,
    say: bool,
) -> list[Outcome]:
    """One after the other: they would disturb each other's times."""
    has_gpu = torch.cuda.is_available()
    outcomes = []
    columns = (TextColumn("{task.description:<12}"), BarColumn(24), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TextColumn("{task.fields[line]}", markup=False),
        console=console,
        transient=True,
        disable=not (say and console.is_terminal),
    ) as progress:
        task = progress.add_task("", total=len(chosen), line="")
        for benchmark in chosen:
            given = benchmark.arguments(quick=quick, has_gpu=has_gpu)
            if given is None:
                outcomes.append(Outcome(benchmark.name, SKIPPED))
                progress.advance(task)
                continue
            if benchmark.name == "attention":
                given = (*given, *options)
            progress.update(task, description=benchmark.name, line="")
            if say and not console.is_terminal:
                console.print(f"{benchmark.name}: {benchmark.about}", soft_wrap=True)
            outcomes.append(
                run_benchmark(
                    benchmark,
                    given,
                    out,
                    limit_s=benchmark.limit_s / (3 if quick else 1),
                    on_line=lambda line: progress.update(task, line=line[:60]),
                )
            )
            progress.advance(task)
    return outcomes


def _write_page(out: Path, page: Path) -> str | None:
    """The page's place, or None where it could not be made."""
    script = catalog.folder() / "results_page.py"
    command = [sys.executable, str(script), "--results", str(out), "--page", str(page)]
    code, _ = run_process(command, out / "page.log", limit_s=120, on_line=lambda line: None)
    return str(page) if code == 0 else None


def _machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "torch": torch.__version__, "threads": torch.get_num_threads()}


def _machine_line() -> str:
    machine = _machine()
    where = machine["gpu"] or f"no GPU, {machine['threads']} threads"
    return f"[bold]{where}[/bold], torch {machine['torch']}"


def _peer_table(peers: list[Peer]) -> Table:
    table = Table(title="Peers", title_justify="left", box=None, pad_edge=False)
    for column in ("", "found", "version, or why not", "timed in"):
        table.add_column(column)
    for peer in peers:
        word = "[green]yes[/green]" if peer.found else "no"
        table.add_row(peer.name, word, peer.version, peer.used_in)
    return table


def _gate_line(gate: DemoResult) -> str:
    if gate.ok:
        return f"attention is right against fp64 ({gate.backend} on {gate.device})\n"
    wrong = ", ".join(check.name for check in gate.checks if not check.ok)
    return f"[bold red]WRONG[/bold red]: {wrong} ({gate.backend}); nothing is timed"


def _outcome_table(outcomes: list[Outcome]) -> Table:
    table = Table(title="Benchmarks", title_justify="left", box=None, pad_edge=False)
    for column in ("", "status", "seconds", "rows", "CSV", ""):
        table.add_column(column, justify="right" if column in ("seconds", "rows") else "left")
    colours = {OK: "green", SKIPPED: "dim"}
    for x in outcomes:
        colour = colours.get(x.status, "bold red")
        table.add_row(
            x.name,
            f"[{colour}]{x.status}[/{colour}]",
            f"{x.seconds:.0f}" if x.status != SKIPPED else "",
            str(len(x.rows)) if x.rows else "",
            x.csv or "",
            f"{x.last_line[:60]} ({x.log})" if x.status == FAILED else "",
        )
    return table
