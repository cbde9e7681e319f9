"""`keel demo`: the attention of packed documents, and a training run with and without QK-Clip."""

from __future__ import annotations

import importlib.util
import itertools
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from keel.demo import STEPS, DemoConfig, DemoResult, run_demo
from keel.terminal import make_console, print_art, print_json
from keel.training import RUNS, Comparison, Progress, RunFailed, TrainConfig, compare_runs
from keel.training import train as train_both
from keel.training.comparison import LAST
from keel.training.picture import TITLES, draw

OUT = Path("runs/demo")
INTERRUPTED = 130
"""What shells say of a command that ctrl-c ended."""


def build_demo() -> typer.Typer:
    """`keel demo`, `keel demo attention` and `keel demo train`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.callback(invoke_without_command=True)(demo)
    app.command()(attention)
    app.command()(train)
    return app


def demo(
    context: typer.Context,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder.", show_default=str(OUT))
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Train from the start.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check attention here, then train a small GPT with Muon and with MuonClip."""
    if context.invoked_subcommand is not None:
        if out is not None or fresh or as_json:
            name = context.invoked_subcommand
            raise typer.BadParameter(
                f"options of {name} come behind its name: keel demo {name} ..."
            )
        return
    folder = OUT if out is None else out
    if as_json:
        _demo_as_json(folder, fresh)
        return
    attention(out=folder)
    print()
    train(out=folder, fresh=fresh)


def _demo_as_json(out: Path, fresh: bool) -> None:
    """Both parts in one object; training is left out where attention is wrong."""
    _make_folder(out)
    console = make_console()
    checked = _run_with_progress(DemoConfig(), console, quiet=True)
    found: dict[str, Any] = {"ok": checked.ok, "attention": checked.as_dict(), "training": None}
    if checked.ok:
        comparison = _train_with_bars(
            TrainConfig(), out, console, save_every=10, fresh=fresh, quiet=True
        )
        found |= {"ok": comparison.ok, "training": comparison.as_dict()}
    print_json(found)
    if not found["ok"]:
        raise typer.Exit(1)


def attention(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of all documents together.")] = 768,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key and value heads.")] = 2,
    head_dim: Annotated[int, typer.Option(min=8, help="Head dim, a multiple of 8.")] = 64,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for the picture of the mask.")
    ] = OUT,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run packed documents forward and backward, and check every tensor against fp64."""
    try:
        config = DemoConfig(tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _make_folder(out)
    console = make_console()
    quiet = as_json or not console.is_terminal
    result = _run_with_progress(config, console, quiet=quiet)
    picture = None
    if importlib.util.find_spec("matplotlib") is not None:
        picture = out / "mask.png"
        result.mask.draw(str(picture), title=f"{len(result.lengths)} documents, causal")
    if as_json:
        print_json({**result.as_dict(), "picture": str(picture) if picture else None})
    else:
        _show_demo(result, picture, console)
    if not result.ok:
        raise typer.Exit(1)


def _run_with_progress(config: DemoConfig, console: Console, *, quiet: bool) -> DemoResult:
    columns = (SpinnerColumn("line"), TextColumn("{task.description}"), BarColumn(24))
    with bars.Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=quiet
    ) as progress:
        task = progress.add_task("", total=len(STEPS))
        done = itertools.count()
        return run_demo(
            config, lambda name: progress.update(task, description=name, completed=next(done))
        )


def _show_demo(result: DemoResult, picture: Path | None, console: Console) -> None:
    config = result.config
    lengths = ", ".join(map(str, result.lengths))
    console.print(f"[bold]Documents of {lengths} tokens, causal[/bold]")
    print_art(console, result.mask)
    if picture is None:
        console.print("no picture: it needs matplotlib, pip install 'keel-attn[viz]'", markup=False)
    else:
        console.print(f"picture: {picture}", markup=False, soft_wrap=True)
    console.print(
        f"\n{config.heads} query heads on {config.kv_heads} key heads of dim {config.head_dim}, "
        f"{result.dtype} on {result.device}"
    )
    console.print(f"backend {result.backend}: {result.why}", markup=False, soft_wrap=True)
    console.print(
        f"forward {result.forward_ms:.2f} ms, backward {result.backward_ms:.2f} ms (median)\n"
    )
    console.print(_error_table(result))
    console.print()
    console.print(_logit_table(result.max_logits))
    wrong = [check.name for check in result.checks if not check.ok]
    if wrong:
        console.print(f"\n[bold red]WRONG[/bold red]: {', '.join(wrong)}")
    else:
        console.print("\n[bold green]all tensors are right[/bold green]")


def _error_table(result: DemoResult) -> Table:
    table = Table(title="Largest error against the fp64 oracle", title_justify="left")
    table.add_column("tensor")
    for column in ("error", "allowed", "plain torch"):
        table.add_column(column, justify="right")
    table.add_column("ok")
    for check in result.checks:
        table.add_row(
            check.name,
            *(f"{x:.2e}" for x in (check.error, check.limit, check.error_low)),
            "[green]yes[/green]" if check.ok else "[bold red]NO[/bold red]",
        )
    return table


def _logit_table(max_logits: list[float]) -> Table:
    table = Table(title="Largest logit of each head", title_justify="left")
    table.add_column("head", justify="right")
    table.add_column("max logit", justify="right")
    table.add_column("")
    top = max(max_logits)
    for head, logit in enumerate(max_logits):
        # A bar wants a positive length; NaN, which is never greater, gets none.
        length = logit if logit > 0 else 0.0
        bar = ProgressBar(total=max(top, 1e-9), completed=length, width=32)
        table.add_row(str(head), f"{logit:.3f}", bar)
    return table


def train(
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = TrainConfig.steps,
    tokens: Annotated[int, typer.Option(min=1, help="Bytes of a step.")] = TrainConfig.tokens,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = TrainConfig.num_layers,
    hidden_size: Annotated[int, typer.Option(min=1, help="Channels.")] = TrainConfig.hidden_size,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = TrainConfig.num_heads,
    lr: Annotated[float, typer.Option(help="Muon's learning rate.")] = TrainConfig.lr,
    aux_lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = TrainConfig.aux_lr,
    tau: Annotated[float, typer.Option(help="QK-Clip's threshold.")] = TrainConfig.tau,
    warmup: Annotated[int, typer.Option(help="Steps of rising rates.")] = TrainConfig.warmup,
    cooldown: Annotated[int, typer.Option(help="Steps of falling rates.")] = TrainConfig.cooldown,
    seed: Annotated[int, typer.Option(help="Of weights and text.")] = TrainConfig.seed,
    ranks: Annotated[
        int, typer.Option(min=1, help="Context-parallel ranks.")
    ] = TrainConfig.num_ranks,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 10,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over, instead of going on from checkpoints.")
    ] = False,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for checkpoints, table and picture.")
    ] = OUT,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a small GPT on Python's standard library with Muon and with MuonClip.

    Both start from the same weights and read the same text, at a rate where Muon's logits explode.
    A run that was stopped, however it was, goes on where it was saved last, to the same bits.
    """
    try:
        config = TrainConfig(
            steps=steps,
            tokens=tokens,
            num_layers=layers,
            hidden_size=hidden_size,
            num_heads=heads,
            lr=lr,
            aux_lr=aux_lr,
            tau=tau,
            warmup=warmup,
            cooldown=cooldown,
            seed=seed,
            num_ranks=ranks,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _make_folder(out)
    console = make_console()
    start = time.monotonic()
    comparison = _train_with_bars(
        config, out, console, save_every=save_every, fresh=fresh, quiet=as_json
    )
    seconds = time.monotonic() - start
    picture = None
    if importlib.util.find_spec("matplotlib") is not None:
        picture = out / "training.png"
        draw(comparison, picture)
    with open(out / "training.txt", "w", encoding="utf-8") as file:
        _show_training(comparison, make_console(file=file, width=100))
    if as_json:
        print_json({**comparison.as_dict(), "picture": str(picture) if picture else None})
    else:
        _show_training(comparison, console)
        if picture is None:
            console.print("no picture: it needs matplotlib, pip install 'keel-attn[viz]'")
        else:
            console.print(f"picture: {picture}", markup=False, soft_wrap=True)
        console.print(f"{seconds:.0f} s; a second run shows this again, --fresh trains again")
    if not comparison.ok:
        raise typer.Exit(1)


def _train_with_bars(
    config: TrainConfig, out: Path, console: Console, *, save_every: int, fresh: bool, quiet: bool
) -> Comparison:
    if not quiet:
        console.print(
            f"[bold]Training[/bold] {config.num_layers} layers of {config.hidden_size} channels "
            f"on {config.num_ranks} ranks: {config.steps} steps of {config.tokens} bytes, "
            f"learning rate {config.lr:g}, tau {config.tau:g}"
        )
    columns = (
        SpinnerColumn("line"),
        TextColumn("{task.description:<8}"),
        BarColumn(32),
        TextColumn("{task.completed}/{task.total} {task.fields[seen]}"),
        bars.TimeRemainingColumn(elapsed_when_finished=True),
    )
    with bars.Progress(
        *columns, console=console, disable=quiet or not console.is_terminal
    ) as progress:
        tasks = {
            name: progress.add_task(TITLES[name], total=config.steps, seen="", start=False)
            for name in RUNS
        }
        begun: set[str] = set()

        def on_step(done: Progress) -> None:
            if done.run not in begun:
                progress.start_task(tasks[done.run])
                begun.add(done.run)
            seen = f"loss {done.loss:.3f}, largest logit {done.max_logit:.1f}"
            progress.update(tasks[done.run], completed=done.step, seen=seen)

        try:
            results = train_both(config, out, on_step, save_every=save_every, fresh=fresh)
        except ValueError as error:
            progress.stop()
            raise typer.BadParameter(str(error)) from None
        except RunFailed as error:
            progress.stop()
            console.print(f"[bold red]{error}[/bold red]", soft_wrap=True)
            console.print("the same command goes on from the last checkpoint")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            progress.stop()
            console.print("stopped; the same command goes on from the last checkpoint")
            raise typer.Exit(INTERRUPTED) from None
        for name in RUNS:  # one that was finished before has made no step now
            progress.start_task(tasks[name])
            progress.update(tasks[name], completed=config.steps)
    return compare_runs(config, results)


def _show_training(comparison: Comparison, console: Console) -> None:
    tau = comparison.config.tau
    table = Table(title=f"Largest logits of each layer, tau {tau:g}", title_justify="left")
    table.add_column("")
    for run in comparison.runs:
        table.add_column(TITLES[run.name], justify="right")
    seen = [run.by_layer.max(0) for run in comparison.runs]
    for layer in range(comparison.config.num_layers):
        table.add_row(f"layer {layer}", *(f"{x[layer]:.1f}" for x in seen))
    left = ["", f"{comparison.muon_clip.left.max() / tau:.2f} tau"]
    table.add_row("all layers", *(f"{x.max() / tau:.2f} tau" for x in seen), end_section=True)
    table.add_row("left by the clip, on the same tokens", *left, end_section=True)
    table.add_row(f"loss, last {LAST} steps", *(f"{r.final_loss:.3f}" for r in comparison.runs))
    table.add_row("heads past tau, all steps", *(str(run.clips) for run in comparison.runs))
    table.add_row("digest of all state", *(run.digest for run in comparison.runs))
    console.print(table)
    for check in comparison.checks:
        word = "[green]PASS[/green]" if check.ok else "[bold red]FAIL[/bold red]"
        console.print(f"{word}  {check.name}: {check.text}", soft_wrap=True)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make {out}: {error.strerror}") from None
