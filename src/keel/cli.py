"""The `keel` command: env and warmup here; plan, bench, demo and overlap in files of their own.

Needs the extra `cli`.
"""

from __future__ import annotations

import platform
import sys
import time
from typing import Annotated, Any

import numpy as np
import torch

from keel._version import __version__
from keel.attention import warmup as compile_kernels
from keel.ops import explain_attention_backend
from keel.overlap import commands as overlap

# Without the extra this file still imports: commands are built in `build_app`, and annotations
# are strings until then.
try:
    import typer
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table

    from keel.terminal import make_console, print_json

    missing = None
except ImportError as error:
    missing = error.name

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def main() -> None:
    """The console script."""
    if missing is not None:
        sys.exit(f"the keel command needs {missing}: pip install 'keel-attn[cli]'")
    build_app()()


def build_app() -> typer.Typer:
    """The commands, ready to be called."""
    from keel.cli_bench import bench  # without the extra these cannot be imported
    from keel.cli_demo import build_demo
    from keel.cli_plan import plan

    app = typer.Typer(
        help="Attention for LLM training that reports what it saw.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
    )
    for command in (env, plan, warmup, bench):
        app.command()(command)
    app.add_typer(build_demo(), name="demo")
    app.add_typer(overlap.build_app(), name="overlap")
    return app


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what Keel sees here: versions, GPUs, and which backend it takes and why."""
    seen = environment()
    if as_json:
        print_json(seen)
        return
    console = make_console()
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
    choices = {name: explain_attention_backend(device, dtype) for name, dtype in DTYPES.items()}
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
        "triton_runs": choices["bf16"][0] in ("triton", "hopper"),
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


def warmup(
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")],
    head_dim: Annotated[int, typer.Option(min=1, help="Head dim.")],
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key and value heads.", show_default="as many")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = "bf16",
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1 or cpu.", show_default="cuda, else cpu")
    ] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="No backward.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile the kernels of one attention shape ahead of a training run.

    They stay in Triton's cache on disk, so the first step of the run finds them there.
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype wants one of {', '.join(DTYPES)}, got {dtype!r}")
    where = _device(device)
    console = make_console()
    quiet = as_json or not console.is_terminal
    backend, why = explain_attention_backend(where, DTYPES[dtype])
    start = time.monotonic()
    with Progress(
        *(SpinnerColumn("line"), TextColumn("compiling"), TimeElapsedColumn()),
        console=console,
        transient=True,
        disable=quiet,
    ) as progress:
        progress.add_task("", total=None)
        try:
            compile_kernels(
                heads,
                heads if kv_heads is None else kv_heads,
                head_dim,
                dtype=DTYPES[dtype],
                device=where,
                backward=not forward_only,
            )
        except (TypeError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None
    seconds = round(time.monotonic() - start, 2)
    if as_json:
        print_json(
            {
                "device": str(where),
                "backend": backend,
                "why": why,
                "heads": heads,
                "kv_heads": heads if kv_heads is None else kv_heads,
                "head_dim": head_dim,
                "dtype": dtype,
                "backward": not forward_only,
                "seconds": seconds,
            }
        )
        return
    console.print(f"{backend} on {where}, {dtype}: ready in {seconds:.1f} s")
    if where.type != "cuda":
        console.print(f"nothing was compiled: {why}", markup=False, soft_wrap=True)


def _device(text: str | None) -> torch.device:
    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(text)
    except RuntimeError:
        raise typer.BadParameter(f"--device wants cuda, cuda:1 or cpu, got {text!r}") from None
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(f"--device {text}: torch finds no such GPU here")
    return where
