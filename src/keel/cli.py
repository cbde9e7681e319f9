"""The `keel` command: env, demo, plan. Presentation only; needs the extra `cli`."""

from __future__ import annotations

import importlib.util
import itertools
import json
import platform
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from keel import masks
from keel._version import __version__
from keel.demo import STEPS, DemoConfig, DemoResult, run_demo
from keel.masks import AttnMask
from keel.ops import explain_backend
from keel.tiling import plan_tiles

# Without the extra this file still imports: commands are built in `build_app`, and annotations
# are strings until then.
try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    missing = None
except ImportError as error:
    missing = error.name

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
MAX_PLAN_TOKENS = 1 << 26
"""Row sets take some tens of bytes per token: beyond this a plan outgrows a small machine."""


def main() -> None:
    """The console script."""
    if missing is not None:
        sys.exit(f"the keel command needs {missing}: pip install 'keel-attn[cli]'")
    build_app()()


def build_app() -> typer.Typer:
    """The commands, ready to be called."""
    app = typer.Typer(
        help="Attention for LLM training that reports what it saw.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
    )
    for command in (env, demo, plan):
        app.command()(command)
    return app


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what Keel sees here: versions, GPUs, and which backend it takes and why."""
    seen = environment()
    if as_json:
        _print_json(seen)
        return
    console = _console()
    table = Table(box=None, show_header=False, pad_edge=False)
    for name in ("keel", "python", "torch", "cuda", "triton", "numpy", "platform"):
        table.add_row(name, seen[name] or "-")
    for gpu in seen["gpus"]:
        table.add_row(
            gpu["device"],
            f"{gpu['name']}, compute capability {gpu['compute_capability']}, "
            f"{gpu['sms']} SMs, {gpu['memory_gib']} GiB",
        )
    if not seen["gpus"]:
        table.add_row("gpu", "none that torch can use")
    why = seen["backends"]["bf16"]["why"]
    table.add_row("triton runs", "yes" if seen["triton_runs"] else f"no: {why}")
    console.print(table)
    console.print(f"\n[bold]backend='auto' on {seen['device']}[/bold]")
    choices = Table(box=None, pad_edge=False)
    for column in ("dtype", "backend", "why"):
        choices.add_column(column)
    for dtype, choice in seen["backends"].items():
        choices.add_row(dtype, choice["backend"], choice["why"])
    console.print(choices)


def environment() -> dict[str, Any]:
    """What `keel env` reports, in JSON's types."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    choices = {name: explain_backend(device, dtype) for name, dtype in DTYPES.items()}
    return {
        "keel": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "triton": triton_version,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "gpus": [_gpu(n) for n in range(torch.cuda.device_count())],
        "device": str(device),
        "triton_runs": choices["bf16"][0] == "triton",
        "backends": {name: {"backend": b, "why": why} for name, (b, why) in choices.items()},
    }


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "device": f"cuda:{index}",
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def demo(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of all documents together.")] = 768,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key and value heads.")] = 2,
    head_dim: Annotated[int, typer.Option(min=8, help="Head dim, a multiple of 8.")] = 64,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for the picture of the mask.")
    ] = Path("keel-demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run packed documents forward and backward, and check every tensor against fp64."""
    try:
        config = DemoConfig(tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make {out}: {error.strerror}") from None
    console = _console()
    quiet = as_json or not console.is_terminal
    result = _run_with_progress(config, console, quiet=quiet)
    picture = None
    if importlib.util.find_spec("matplotlib") is not None:
        picture = out / "mask.png"
        result.mask.draw(str(picture), title=f"{len(result.lengths)} documents, causal")
    if as_json:
        _print_json({**result.as_dict(), "picture": str(picture) if picture else None})
    else:
        _show_demo(result, picture, console)
    if not result.ok:
        raise typer.Exit(1)


def _run_with_progress(config: DemoConfig, console: Console, *, quiet: bool) -> DemoResult:
    columns = (SpinnerColumn("line"), TextColumn("{task.description}"), BarColumn(24))
    with Progress(
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
    _print_art(console, result.mask)
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


def plan(
    documents: Annotated[str, typer.Option(help="Lengths of packed documents: 100,300,50.")],
    causal: Annotated[bool, typer.Option("--causal", help="See no later token.")] = False,
    window: Annotated[
        str, typer.Option(help="L,R: tokens seen to the left and right, -1 for all.")
    ] = "-1,-1",
    block: Annotated[str, typer.Option(help="Tile: queries x keys.")] = "128x64",
    draw: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also draw the mask into this PNG.")
    ] = None,
) -> None:
    """Show a mask of packed documents and the tiles that a kernel would visit for it."""
    lengths = _document_lengths(documents)
    left, right = _window(window)
    if causal and right > 0:
        raise typer.BadParameter(f"--causal sees nothing to the right, but --window has R={right}")
    block_m, block_n = _block(block)
    bounds = [0, *itertools.accumulate(lengths)]
    mask = masks.documents(bounds, causal=causal, window=(left, right))
    console = _console()
    area, pairs = mask.area(), mask.tq * mask.tk
    share = f" of {pairs} pairs ({area / pairs:.1%})" if pairs else ""
    console.print(f"area: {area}{share}")
    console.print(f"plan: {plan_tiles(mask, block_m, block_n).describe()}\n", soft_wrap=True)
    _print_art(console, mask)
    if draw is not None:
        try:
            mask.draw(str(draw))
        except OSError as error:
            raise typer.BadParameter(f"cannot write {draw}: {error.strerror}") from None
        except ValueError as error:  # matplotlib is missing
            raise typer.BadParameter(str(error)) from None
        console.print(f"picture: {draw}", markup=False, soft_wrap=True)


def _document_lengths(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise typer.BadParameter(f"--documents wants lengths such as 100,300,50, got {text!r}")
    lengths = [int(part) for part in text.split(",")]
    if sum(lengths) > MAX_PLAN_TOKENS:
        raise typer.BadParameter(
            f"--documents has {sum(lengths)} tokens, and this command plans up to {MAX_PLAN_TOKENS}"
        )
    return lengths


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


def _console() -> Console:
    # No highlighter: it would colour every number.
    return Console(highlight=False, emoji=False)


def _print_art(console: Console, mask: AttnMask) -> None:
    art = mask.draw(size=min(48, max(8, console.width - 12)))
    if not console.encoding.lower().startswith("utf"):
        art = art.translate(str.maketrans("█▒·", "#+."))
    console.print(art, markup=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))
