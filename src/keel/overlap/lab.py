"""The lab: which levers make communication run beside attention, seen on the GPU at hand.

One attention kernel and one kernel shaped like communication are launched in the unlucky order,
attention first, under every lever. Both write down when and on which SM each block ran, so overlap
is observed. This file says what is run and reads what was seen; `lab_trial` runs it, in a process
of its own for each number of hardware queues, since CUDA reads that once.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

Grid = Literal["tiles", "persistent"]
Scenario = Literal["behind", "race", "chain"]
Row = dict[str, Any]
"""What was seen under a setting: the fields of `Setting`, `Bench` and `COLUMNS`."""

MARGINS = (0, 1, 2, 4, 8, 16, 24, 32)
CLUSTERS = (1, 2, 4)
CONNECTIONS = (8, 1, 32)
"""The first is CUDA's own number."""
ROW = "ROW "
"""What a line of a trial's output that is a row begins with."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What runs: sizes of attention (causal, bf16) and of communication."""

    tokens: int = 16_384
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    blocks: int = 16
    """Thread blocks of communication, one to an SM."""
    span_us: float = 500.0
    """How long each of them moves bytes: well below attention's time."""
    gb_per_s: float = 200.0
    repeats: int = 5


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One position of all levers."""

    scenario: Scenario = "behind"
    """behind: attention first, communication 100 us later. race: the host launches communication
    first, and both become ready at the same moment. chain: a kernel on a second stream, launched
    behind two that depend on each other."""
    connections: int = CONNECTIONS[0]
    """CUDA_DEVICE_MAX_CONNECTIONS"""
    grid: Grid = "persistent"
    """persistent: one block of attention on each SM, to its end. tiles: a block for each tile, as
    Keel launches without a margin."""
    sm_margin: int = 0
    cluster: int = 1
    priority: bool = False
    """Communication on a stream of high priority."""
    barrier: bool = False
    """Attention waits until all blocks of communication have started."""


COLUMNS = (
    *("overlap", "overlap_min", "overlap_max"),  # medians over repeats, and extremes
    *("attention_ms", "alone_ms", "library_ms", "base_ms", "slowdown"),
    *("comm_ms", "comm_alone_ms", "moved_gb_per_s", "started_us"),
    *("comm_sms", "shared_sms", "misses", "fits_beside"),
    *("gpu", "sms", "torch", "triton", "error"),
)
"""attention_ms beside communication, alone_ms the same grid without it, base_ms tiles without it;
slowdown = attention_ms / base_ms - 1. library_ms: a call of `flex_flash_attn_func` with that
margin, by CUDA's events, where the library has such a grid, to see that taking notes costs nothing.
comm_ms from the first block's begin to the last one's end; started_us: its begin after attention's.
shared_sms: blocks of communication that were on an SM together with attention. fits_beside: whether
registers and shared memory would allow that."""


def field_names() -> list[str]:
    """Columns of the CSV."""
    return [x.name for x in (*fields(Setting), *fields(Bench))] + list(COLUMNS)


def settings(
    connections: Sequence[int] = CONNECTIONS,
    margins: Sequence[int] = MARGINS,
    clusters: Sequence[int] = CLUSTERS,
) -> list[Setting]:
    """All positions of the levers, by number of connections.

    >>> len(settings(connections=[8], margins=[0, 4], clusters=[1]))
    17
    """
    found = []
    for number in connections:
        for barrier in (False, True):
            for priority in (False, True):
                levers: Row = {"connections": number, "priority": priority, "barrier": barrier}
                for cluster in clusters:
                    found.append(Setting(grid="tiles", cluster=cluster, **levers))
                    for margin in margins:
                        found.append(Setting(sm_margin=margin, cluster=cluster, **levers))
                if not barrier:
                    found.append(Setting(scenario="race", grid="tiles", **levers))
                    found.append(Setting(scenario="race", **levers))
        found.append(Setting(scenario="chain", connections=number))
    return found


def overlap_of(traffic: NDArray[np.int64], attention: NDArray[np.int64]) -> float:
    """Share of the blocks' time that lies between attention's begin and end.

    Both are (blocks, 4) records: begin, end, SM, chunks. Behind attention: 0; beside it: 1.

    >>> import numpy as np
    >>> overlap_of(np.array([[5, 15, 0, 0], [10, 20, 1, 0]]), np.array([[0, 10, 0, 0]]))
    0.25
    """
    begin, end = attention[:, 0].min(), attention[:, 1].max()
    inside = np.minimum(traffic[:, 1], end) - np.maximum(traffic[:, 0], begin)
    return float(np.maximum(inside, 0).sum() / (traffic[:, 1] - traffic[:, 0]).sum())


def shared_sms(traffic: NDArray[np.int64], attention: NDArray[np.int64]) -> int:
    """Blocks of traffic that were on an SM while a block of attention was on it, too."""
    same = traffic[:, None, 2] == attention[None, :, 2]
    until = np.minimum(traffic[:, None, 1], attention[None, :, 1])
    together = until > np.maximum(traffic[:, None, 0], attention[None, :, 0])
    return int((same & together).any(1).sum())


def run(
    bench: Bench,
    todo: Sequence[Setting],
    *,
    csv_path: Path | None = None,
    progress: Callable[[Row], None] | None = None,
    limit_s: float = 120.0,
) -> list[Row]:
    """Runs settings, a process for each number of connections; rows go to the CSV as they come.

    A setting that fails is a row with an error; so is a process that ends early or takes longer
    than `limit_s`.
    """
    rows: list[Row] = []
    with _writer(csv_path) as write:
        for number in dict.fromkeys(x.connections for x in todo):
            mine = [x for x in todo if x.connections == number]
            for row in _trials(bench, mine, number, limit_s):
                rows.append(row)
                write(row)
                if progress is not None:
                    progress(row)
    return rows


def _trials(
    bench: Bench, todo: Sequence[Setting], connections: int, limit_s: float
) -> Iterator[Row]:
    """Rows of one process, and for settings that it did not get to, rows that say why."""
    work = json.dumps({"bench": asdict(bench), "settings": [asdict(x) for x in todo]})
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    child = subprocess.Popen(
        [sys.executable, "-m", "keel.overlap.lab_trial", work],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    overtime = threading.Timer(limit_s, child.kill)
    overtime.start()
    done, said = 0, []
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(ROW):
                done += 1
                yield json.loads(line.removeprefix(ROW))
            else:
                said.append(line.rstrip())
        status = child.wait()
    finally:
        overtime.cancel()
        child.kill()
        child.wait()
    for setting in todo[done:]:
        why = f"its process ended with status {status}: " + " | ".join(said[-4:])
        yield {**asdict(setting), **asdict(bench), "error": why}


class _writer:
    """Appends rows to a CSV, each at once, so that a run that is stopped leaves what it saw."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> Callable[[Row], None]:
        if self._path is None:
            return lambda row: None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = file = self._path.open("w", newline="", encoding="utf-8")
        table = csv.DictWriter(file, field_names(), restval="")
        table.writeheader()

        def write(row: Row) -> None:
            table.writerow(row)
            file.flush()

        return write

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def read_csv(path: Path) -> list[Row]:
    """Rows of an earlier run, with their types."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: _typed(name, text) for name, text in row.items()} for row in csv.DictReader(file)
        ]


def _typed(name: str, text: str) -> Any:
    if name in ("priority", "barrier", "fits_beside"):
        return None if text == "" else text == "True"
    if name in ("scenario", "grid", "gpu", "torch", "triton", "error"):
        return text or None
    if text == "":
        return None
    return float(text) if "." in text or "e" in text else int(text)
