"""`keel plan`: a mask and its tiles, or its plan over ranks."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from keel import masks
from keel.masks import AttnMask
from keel.terminal import make_console, print_art, print_json
from keel.tiling import plan_tiles

if TYPE_CHECKING:  # commands without ranks do not need torch.distributed
    from keel.distributed.cost import CostModel
    from keel.distributed.keys import Balance, Degree
    from keel.distributed.report import RankRow, Simulation, Strategy

MAX_PLAN_TOKENS = 1 << 26
"""Row sets take some tens of bytes per token: beyond this a plan outgrows a small machine."""
MAX_RANK_TOKENS = 1 << 24
MAX_PLAN_SLICES = 1 << 20
"""Of a mask that a few characters or a file ask for."""
MAX_RANK_ROWS = 32
END_ROWS = 8
"""Of more ranks than that, the table shows this many first and last ones."""


def plan(
    documents: Annotated[
        str | None,
        typer.Option(help="Lengths of packed documents: 100,300,50; with --ranks also 1000x1049."),
    ] = None,
    mask_file: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Instead of --documents: JSON with q_ranges, k_ranges, attn_type_map, "
            "total_seqlen_q and, where it differs, total_seqlen_k.",
        ),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="See no later token.")] = False,
    window: Annotated[
        str | None,
        typer.Option(
            help="L,R: tokens seen to the left and right, -1 for all.", show_default="-1,-1"
        ),
    ] = None,
    block: Annotated[
        str | None, typer.Option(help="Tile: queries x keys.", show_default="128x64")
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Also draw the mask, or with --ranks the plan: a PNG."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Plan context parallelism over ranks.")
    ] = None,
    balance: Annotated[
        str | None,
        typer.Option(
            help="Who holds what: contiguous, zigzag, solver, traffic.", show_default="solver"
        ),
    ] = None,
    degree: Annotated[
        str | None,
        typer.Option(help="Stages of remote keys: auto or 0..64.", show_default="auto"),
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Query heads : key heads.", show_default="64:8")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Head dim.", show_default="128")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a mask and the tiles that a kernel visits for it, or its plan over ranks."""
    for_ranks = {
        "--balance": balance is not None,
        "--degree": degree is not None,
        "--heads": heads is not None,
        "--head-dim": head_dim is not None,
    }
    if ranks is None:
        if given := [name for name, there in for_ranks.items() if there]:
            raise typer.BadParameter(f"{given[0]} is for a plan over ranks: give --ranks too")
        mask = _plan_mask(documents, mask_file, causal, window, max_tokens=MAX_PLAN_TOKENS)
        _show_tiles(mask, _block("128x64" if block is None else block), draw, as_json=as_json)
        return
    if block is not None:
        raise typer.BadParameter("--block is for the tiles of a mask: leave it out with --ranks")
    options = _rank_options(balance, degree, heads, head_dim)
    mask = _plan_mask(
        *(documents, mask_file, causal, window), max_tokens=MAX_RANK_TOKENS, repeats=True
    )
    _plan_ranks(mask, ranks, options, draw, as_json=as_json)


def _show_tiles(
    mask: AttnMask, block: tuple[int, int], draw: Path | None, *, as_json: bool
) -> None:
    tiles = plan_tiles(mask, *block)
    if draw is not None:
        _draw(draw, lambda path: mask.draw(path))
    if as_json:
        print_json(
            {
                "mask": {
                    "tq": mask.tq,
                    "tk": mask.tk,
                    "num_slices": mask.num_slices,
                    "area": mask.area(),
                },
                "tiles": {
                    "block": list(block),
                    "full": tiles.num_full,
                    "partial": tiles.num_partial,
                    "all": tiles.num_q_tiles * tiles.num_k_tiles,
                    "runs": len(tiles.q.runs),
                    "row_sets": tiles.num_row_sets,
                },
                "picture": str(draw) if draw else None,
            }
        )
        return
    console = make_console()
    _print_area(console, mask)
    console.print(f"plan: {tiles.describe()}\n", soft_wrap=True)
    print_art(console, mask)
    if draw is not None:
        console.print(f"picture: {draw}", markup=False, soft_wrap=True)


def _draw(path: Path, draw: Callable[[str], object]) -> None:
    try:
        draw(str(path))
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from None
    except ValueError as error:  # matplotlib is missing
        raise typer.BadParameter(str(error)) from None


def _print_area(console: Console, mask: AttnMask) -> None:
    area, pairs = mask.area(), mask.tq * mask.tk
    share = f" of {pairs} pairs ({area / pairs:.1%})" if pairs else ""
    console.print(f"area: {area}{share}")


def _plan_mask(
    documents: str | None,
    mask_file: Path | None,
    causal: bool,
    window: str | None,
    *,
    max_tokens: int,
    repeats: bool = False,
) -> AttnMask:
    if mask_file is not None:
        if documents is not None:
            raise typer.BadParameter("--documents and --mask-file both give a mask: give one")
        if causal or window is not None:
            option = "--causal" if causal else "--window"
            raise typer.BadParameter(f"{option} is for --documents: a mask file has its own types")
        return _mask_of_file(mask_file, max_tokens)
    if documents is None:
        raise typer.BadParameter("Missing option '--documents' or '--mask-file'")
    lengths = _document_lengths(documents, max_tokens, repeats)
    left, right = _window("-1,-1" if window is None else window)
    if causal and right > 0:
        raise typer.BadParameter(f"--causal sees nothing to the right, but --window has R={right}")
    bounds = [0, *itertools.accumulate(lengths)]
    return masks.documents(bounds, causal=causal, window=(left, right))


def _mask_of_file(path: Path, max_tokens: int) -> AttnMask:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not JSON, or not text
        raise typer.BadParameter(f"{path} is not JSON: {error}") from None
    required = ("q_ranges", "k_ranges", "attn_type_map", "total_seqlen_q")
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path} must hold an object with {', '.join(required)}")
    if lacks := [name for name in required if name not in content]:
        raise typer.BadParameter(f"{path} lacks {', '.join(lacks)}")
    if strange := sorted(content.keys() - {*required, "total_seqlen_k"}):
        raise typer.BadParameter(f"{path} has {strange[0]!r}, which is no part of a mask")
    for name in required[:3]:
        if not isinstance(content[name], list):
            raise typer.BadParameter(f"{name} of {path} must be a list")
        if len(content[name]) > MAX_PLAN_SLICES:
            raise typer.BadParameter(
                f"{name} of {path} has {len(content[name])} entries, and this command plans up to "
                f"{MAX_PLAN_SLICES}"
            )
    total = content["total_seqlen_q"]
    totals = {"total_seqlen_q": total, "total_seqlen_k": content.get("total_seqlen_k")}
    if totals["total_seqlen_k"] is None:
        totals["total_seqlen_k"] = total
    for name, value in totals.items():
        if type(value) is not int or not 0 <= value <= max_tokens:
            raise typer.BadParameter(f"{name} of {path} must be in 0..{max_tokens}, got {value!r}")
    try:
        return AttnMask.from_ranges(*(content[name] for name in required[:3]), *totals.values())
    except (TypeError, ValueError, OverflowError) as error:
        words = str(error)  # which may quote the whole list
        words = words if len(words) <= 300 else f"{words[:300]} ..."
        raise typer.BadParameter(f"{path}: {words}") from None


def _document_lengths(text: str, max_tokens: int, repeats: bool) -> list[int]:
    entry = r"(?:\d+x)?\d+" if repeats else r"\d+"
    if not re.fullmatch(rf"{entry}(,{entry})*", text):
        example = "100,300,50 or 1000x1049,500" if repeats else "100,300,50"
        raise typer.BadParameter(f"--documents wants lengths such as {example}, got {text!r}")
    parts = [part.rpartition("x")[::2] for part in text.split(",")]
    runs = [(int(count or 1), int(length)) for count, length in parts]
    tokens = sum(count * length for count, length in runs)
    if tokens > max_tokens:
        raise typer.BadParameter(
            f"--documents has {tokens} tokens, and this command plans up to {max_tokens}"
        )
    if repeats and (total := sum(count for count, _ in runs)) > MAX_PLAN_SLICES:
        raise typer.BadParameter(
            f"--documents has {total} documents, and this command plans up to {MAX_PLAN_SLICES}"
        )
    return [length for count, length in runs for _ in range(count)]


class _RankOptions(NamedTuple):
    balance: Balance
    degree: Degree
    model: CostModel


def _rank_options(
    balance: str | None, degree: str | None, heads: str | None, head_dim: int | None
) -> _RankOptions:
    from keel.distributed.cost import CostModel
    from keel.distributed.plan import MAX_DEGREE
    from keel.distributed.report import BALANCES

    balance = "solver" if balance is None else balance
    chosen = next((name for name in BALANCES if name == balance), None)
    if chosen is None:
        raise typer.BadParameter(f"--balance wants {', '.join(BALANCES)}, got {balance!r}")
    degree = "auto" if degree is None else degree
    if degree != "auto" and not (re.fullmatch(r"\d{1,3}", degree) and int(degree) <= MAX_DEGREE):
        raise typer.BadParameter(f"--degree wants auto or 0..{MAX_DEGREE}, got {degree!r}")
    heads = "64:8" if heads is None else heads
    match = re.fullmatch(r"([1-9]\d{0,4}):([1-9]\d{0,4})", heads)
    if match is None:
        raise typer.BadParameter(f"--heads wants query : key heads such as 64:8, got {heads!r}")
    num_heads, num_kv_heads = int(match[1]), int(match[2])
    if num_heads % num_kv_heads:
        raise typer.BadParameter(
            f"--heads wants a multiple of key heads, got {num_heads} query heads on {num_kv_heads}"
        )
    model = CostModel(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128 if head_dim is None else head_dim,
    )
    return _RankOptions(chosen, "auto" if degree == "auto" else int(degree), model)


def _plan_ranks(
    mask: AttnMask, num_ranks: int, options: _RankOptions, draw: Path | None, *, as_json: bool
) -> None:
    from keel.distributed.report import draw_plan, simulate

    console = make_console()
    quiet = as_json or not console.is_terminal
    columns = (SpinnerColumn("line"), TextColumn("{task.description}"), BarColumn(24))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=quiet
    ) as progress:
        task = progress.add_task("planning", total=None)
        try:
            simulation = simulate(
                mask,
                num_ranks,
                balance=options.balance,
                degree=options.degree,
                model=options.model,
                on_step=lambda name, done, total: progress.update(
                    task, description=name, completed=done, total=total
                ),
            )
        except ValueError as error:  # too large
            raise typer.BadParameter(str(error)) from None
        if draw is not None:
            progress.update(task, description="picture")
            title = f"{options.balance} on {num_ranks} ranks"
            _draw(draw, lambda path: draw_plan(simulation.forward_plan, path, title=title))
    if as_json:
        print_json({**simulation.to_json(), "picture": str(draw) if draw else None})
    else:
        _show_ranks(simulation, draw, console)


def _show_ranks(simulation: Simulation, draw: Path | None, console: Console) -> None:
    forward, backward = simulation.forward_plan, simulation.backward_plan
    model, mask = simulation.model, forward.mask
    _print_area(console, mask)
    if int(forward.areas.sum()) != mask.area():
        console.print("slices overlap: below, pairs that they share count for each of them")
    console.print(
        f"{simulation.balance} on {forward.num_ranks} ranks; stages of remote keys: "
        f"{forward.degree} forward, {backward.degree} backward; "
        f"{model.num_heads}:{model.num_kv_heads} heads of dim {model.head_dim}, "
        f"{model.tflops:g} TFLOP/s, {model.gb_per_s:g} GB/s\n",
        soft_wrap=True,
    )
    console.print(_rank_table(simulation.ranks))
    console.print()
    console.print(_stage_table(simulation))
    console.print()
    console.print(_strategy_table(simulation.strategies, simulation.balance))
    if draw is not None:
        console.print(f"\npicture: {draw}", markup=False, soft_wrap=True)


def _rank_table(rows: list[RankRow]) -> Table:
    figures = np.array(
        [
            (
                *(x.tokens, x.pieces, x.area, np.nan if x.area_of_mean is None else x.area_of_mean),
                *(sum(x.forward.bytes_in), sum(x.forward.bytes_out), x.remote_bytes),
                *(x.forward.ms, x.forward.exposed_ms, x.backward.ms, x.backward.exposed_ms),
            )
            for x in rows
        ]
    )
    unit, scale = _byte_unit(float(figures[:, 4:7].max()))
    figures[:, 4:7] /= scale
    title = f"Ranks (forward bytes in and out, buffer for remote keys: {unit})"
    names = ("rank", "tokens", "pieces", "area", "/ mean", "in", "out", "buffer")
    times = ("fwd\nms", "wait\nms", "bwd\nms", "wait\nms")
    table = _table(title, *names, *times)
    formats = (_count, _count, _si, "{:.3f}".format, *([_figure] * 7))

    def add(name: str, values: NDArray[np.float64]) -> None:
        cells = (
            "-" if np.isnan(value) else show(value)
            for show, value in zip(formats, values.tolist(), strict=True)
        )
        table.add_row(name, *cells)

    collapsed = len(rows) > MAX_RANK_ROWS
    for n, (row, values) in enumerate(zip(rows, figures, strict=True)):
        if not collapsed or n < END_ROWS or n >= len(rows) - END_ROWS:
            add(str(row.rank), values)
        elif n == END_ROWS:
            table.add_row("...")
    if collapsed:
        table.add_section()
        for name, values in (
            ("min", figures.min(0)),
            ("mean", figures.mean(0)),
            ("max", figures.max(0)),
        ):
            add(name, values)
    return table


def _stage_table(simulation: Simulation) -> Table:
    passes = (
        ("forward", simulation.forward_plan, [x.forward for x in simulation.ranks]),
        ("backward", simulation.backward_plan, [x.backward for x in simulation.ranks]),
    )
    coming, going = (
        [np.array([getattr(x, name) for x in rows]) for _, _, rows in passes]
        for name in ("bytes_in", "bytes_out")
    )
    unit, scale = _byte_unit(float(max(x.max() for x in (*coming, *going))))
    table = _table(
        f"Stages (over all ranks; bytes in and out: {unit})",
        *("stage", "keys", "area\nmean", "area\nmax", "in\nmean", "in\nmax", "out\nmax"),
    )
    for (name, plan, _), taken, given in zip(passes, coming, going, strict=True):
        for stage in range(plan.num_stages):
            keys = "all" if plan.degree == 0 else "remote" if stage else "own"
            areas = plan.areas[:, stage]
            moved = (taken[:, stage].mean(), taken[:, stage].max(), given[:, stage].max())
            table.add_row(
                *(f"{name} {stage}", keys, _si(float(areas.mean())), _si(float(areas.max()))),
                *(_figure(float(x) / scale) for x in moved),
            )
    return table


def _strategy_table(strategies: list[Strategy], balance: str) -> Table:
    table = _table(
        "Strategies (received in the forward; time of the slowest rank)",
        *("strategy", "balance", "max in", "total in", "stages", "fwd\nms", "bwd\nms"),
    )
    table.add_column("", justify="left")

    def known(value: float | None, show: Callable[[float], str]) -> str:
        return "-" if value is None else show(value)

    for x in strategies:
        stages = "-" if x.degree is None else f"{x.degree} / {x.backward_degree}"
        table.add_row(
            x.name,
            known(x.balance, "{:.3f}".format),
            *(known(size, _size) for size in (x.max_bytes, x.total_bytes)),
            stages,
            *(known(ms, _figure) for ms in (x.forward_ms, x.backward_ms)),
            x.note,
            style="bold" if x.name == balance else None,
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n else "left", no_wrap=True)
    return table


def _count(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() else f"{value:.1f}"


def _figure(value: float) -> str:
    """About four digits."""
    digits = 0 if value >= 1000 or value == 0 else 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:.{digits}f}"


def _si(value: float) -> str:
    """A count in at most six characters: 1234, 56.7k, 137G.

    >>> _si(1234.0), _si(56_700.0), _si(137_438_953_472.0)
    ('1234', '56.7k', '137G')
    """
    if value < 10_000:
        return _count(value)
    power = min(int(np.log10(value) / 3), 6)
    value /= 1000**power
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}{'kMGTPE'[power - 1]}"


def _size(value: float) -> str:
    unit, scale = _byte_unit(value)
    return f"{_figure(value / scale)} {unit}"


def _byte_unit(largest: float) -> tuple[str, int]:
    """The unit in which the largest of some sizes has a few digits, and its bytes."""
    power = next((n for n in range(5) if largest < 10_000 << 10 * n), 5)
    return ("B", "KiB", "MiB", "GiB", "TiB", "PiB")[power], 1 << 10 * power


def _window(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(-1|\d+),(-1|\d+)", text)
    if match is None:
        raise typer.BadParameter(f"--window wants L,R such as 128,0 or -1,0, got {text!r}")
    return int(match[1]), int(match[2])


def _block(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if match is None:
        raise typer.BadParameter(f"--block wants queries x keys such as 128x64, got {text!r}")
    return int(match[1]), int(match[2])
