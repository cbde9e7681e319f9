"""One benchmark as a process of its own, with its output in a log and its rows read back."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import keel
from keel.bench.catalog import Benchmark, folder

OK, FAILED, TIMED_OUT, SKIPPED = "ok", "failed", "timed out", "needs a GPU"


@dataclass(frozen=True)
class Outcome:
    """How a benchmark ended."""

    name: str
    status: str
    seconds: float = 0.0
    command: str = ""
    csv: str | None = None
    log: str | None = None
    last_line: str = ""
    """Of the output of one that did not end well."""
    rows: list[dict[str, str]] = field(default_factory=list)
    """Those that this run wrote."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_benchmark(
    benchmark: Benchmark,
    arguments: Sequence[str],
    out: Path,
    *,
    limit_s: float,
    on_line: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Starts it, passes its lines on and waits; ends it, with all it started, beyond the limit."""
    out.mkdir(parents=True, exist_ok=True)
    log, table = out / f"{benchmark.name}.log", out / benchmark.csv
    before = _rows(table)
    start = time.monotonic()
    script = folder() / f"{benchmark.name}.py"
    command = [sys.executable, "-u", str(script), *arguments, "--out", str(out)]
    code, last = run_process(command, log, limit_s=limit_s, on_line=on_line)
    status = OK if code == 0 else TIMED_OUT if code is None else FAILED
    after = _rows(table)
    kept = after[: len(before)] == before and len(after) >= len(before)
    return Outcome(
        benchmark.name,
        status,
        round(time.monotonic() - start, 1),
        " ".join([f"benchmarks/{script.name}", *arguments]),
        table.name if after else None,
        log.name,
        "" if status == OK else last,
        after[len(before) :] if kept else after,  # some add rows, others write the file anew
    )


def run_process(
    command: Sequence[str], log: Path, *, limit_s: float, on_line: Callable[[str], None]
) -> tuple[int | None, str]:
    """(exit status, or None beyond the limit; last line that says something)."""
    places = [str(Path(keel.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        _end_group(process)

    timer = threading.Timer(limit_s, end)
    timer.start()
    last = ""
    try:
        assert process.stdout is not None
        with open(log, "w", encoding="utf-8") as file:
            for line in process.stdout:
                file.write(line)
                if line.strip():
                    last = line.strip()
                    on_line(last)
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            _end_group(process)
            process.wait()
    return (None if late.is_set() else code), last


def _end_group(process: subprocess.Popen[str]) -> None:
    """The process and all that it started: compilers outlive their parent else."""
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except ProcessLookupError:
        pass


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
