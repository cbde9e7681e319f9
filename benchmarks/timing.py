"""What the benchmarks share: timing, on the GPU where there is one, a limit on their own time, and
results as CSV; and arguments of the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], object]

LEAD_MS = {"cuda": 200.0, "cpu": 0.0}
"""Calls in front of a settled sample, unmeasured, for so long: at its power limit a GPU takes that
long to find the clocks of these calls. Before it has, what ran before decides: backward behind
FlexAttention, 10 % too fast for one library and 10 % too slow for another."""
SAMPLE_MS = {"cuda": 100.0, "cpu": 20.0}


def heads(text: str) -> tuple[int, int]:
    """'64:8' -> (64, 8)."""
    try:
        hq, hk = map(int, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"heads are given as 64:8, got {text!r}") from None
    if hk < 1 or hq < 1 or hq % hk:
        raise argparse.ArgumentTypeError(
            f"query heads must be a multiple of key heads, got {hq}:{hk}"
        )
    return hq, hk


def dims(text: str) -> tuple[int, ...]:
    """'128' -> (128,), of queries, keys and values; '192/128' -> (192, 128), of values the last."""
    try:
        found = tuple(map(int, text.split("/")))
    except ValueError:
        found = ()
    if not 1 <= len(found) <= 2 or min(found) < 1:
        raise argparse.ArgumentTypeError(f"head dims are given as 128 or 192/128, got {text!r}")
    return found if len(set(found)) == len(found) else found[:1]


def milliseconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"milliseconds are 0 or more, got {text!r}")
    return found


def settled(parser: argparse.ArgumentParser, device: str) -> None:
    """Adds how long samples are, and what runs before each: see `LEAD_MS`."""
    sample, lead = SAMPLE_MS[device], LEAD_MS[device]
    parser.add_argument(
        "--sample-ms", type=milliseconds, default=sample, help=f"of a sample; here {sample:g}"
    )
    parser.add_argument(
        "--lead-ms",
        type=milliseconds,
        default=lead,
        help=f"of the same calls before each, unmeasured; here {lead:g}",
    )


def hopper_needed(parser: argparse.ArgumentParser) -> None:
    """Ends a program for which this machine has no GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("a Hopper GPU (sm_90) is needed, and there is none here")


def time_calls(call: Call, budget_ms: float = 20) -> float:
    """Milliseconds per call, over as many calls as fill the budget, after a third of it unmeasured.

    The lead-in matters: power and clocks must be those of this call, not of the one before it.
    """
    call()
    count = max(3, int(budget_ms / max(time_batch(call, 1, lead=0), 1e-3)))
    return time_batch(call, count, lead=count // 3)


def time_batch(call: Call, count: int, *, lead: int) -> float:
    """Milliseconds per call over `count` calls, behind `lead` unmeasured ones."""
    if not torch.cuda.is_available():
        return _time_on_host(call, count, lead)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(lead):
        call()
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def _time_on_host(call: Call, count: int, lead: int) -> float:
    for _ in range(lead):
        call()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count * 1e3


@dataclass
class Trial:
    """One thing to time, in turns with others: `sample` adds one measurement.

    A call may stand for several (`calls_inside`: those of a CUDA graph).
    """

    call: Call
    calls_inside: int = 1
    budget_ms: float = 20.0
    """Length of a sample, behind a third of it unmeasured, or longer (`lead_ms`)."""
    lead_ms: float = 0.0
    about_ms: float = 0.0
    """Of one call, where that is known; else the first sample finds out."""
    samples: list[float] = field(default_factory=list)
    count: int = 0

    def sample(self) -> float:
        if not self.count:
            if not self.about_ms:
                self.call()
                self.about_ms = time_batch(self.call, 1, lead=1)
            self.count = max(1, int(self.budget_ms / max(self.about_ms, 1e-3)))
        # A call of 50 ms is its own lead-in, where no longer one is asked for
        lead = 0 if self.about_ms > 50 else max(1, self.count // 3)
        lead = max(lead, math.ceil(self.lead_ms / max(self.about_ms, 1e-3)))
        ms = time_batch(self.call, self.count, lead=lead) / self.calls_inside
        self.samples.append(ms)
        return ms

    @property
    def ms(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Distance of the quartiles / median; 0 with less than three samples."""
        if len(self.samples) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.ms


def capture(prepare: Callable[[], Call], *, least_ms: float = 2.0) -> tuple[Call, int, Any]:
    """(replay, calls inside, result of the last call) of a CUDA graph: kernel time, no host.

    So many calls go into one graph that a replay takes `least_ms`, 40 at most. `prepare` makes the
    call on the stream of the capture, since a backward runs on the stream of its forward.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call = prepare()
        call()
        once = max(time_batch(call, 1, lead=0), 1e-3)
    count = min(40, max(1, round(least_ms / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(count):
            result = call()

    def replay(_kept: Call = call) -> None:
        """The call stays: a graph knows addresses, not what a backward saved there."""
        graph.replay()

    return replay, count, result


def poison_free_memory(num_bytes: int) -> None:
    """Leaves so many bytes of NaNs as the only cached memory: an output nobody wrote shows.

    Those of bf16 are NaNs in fp16, fp32 and fp64 too, and this reaches what C++ allocates.
    """
    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.full((num_bytes // 2,), float("nan"), device="cuda", dtype=torch.bfloat16)


def gemm_rate() -> float:
    """TFLOP/s of a large product of random matrices, once the chip is warm.

    8192^3 in bf16 on a GPU, 1024^3 in fp32 elsewhere.
    """
    on_gpu = torch.cuda.is_available()
    size = 8192 if on_gpu else 1024
    kind = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {}
    a, b = (torch.randn(size, size, **kind) for _ in range(2))
    time_calls(lambda: a @ b, 400)  # power and clocks settle: a cool chip is up to 15 % faster
    return 2 * size**3 / statistics.median(time_calls(lambda: a @ b, 40) for _ in range(5)) / 1e9


def copy_rate() -> float:
    """TB/s of a large copy, read and write counted."""
    on_gpu = torch.cuda.is_available()
    kind = {"device": "cuda"} if on_gpu else {}
    a = torch.randn(1 << (28 if on_gpu else 24), dtype=torch.bfloat16, **kind)
    b = torch.empty_like(a)
    times = [time_calls(lambda: b.copy_(a), 20) for _ in range(3)]
    return 2 * a.numel() * a.element_size() / statistics.median(times) / 1e9


def machine() -> tuple[str, str]:
    """(name of the GPU, or that there is none; version of Triton) for the CSV."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = ""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return name or f"CPU ({platform.machine()})", version


class TimeBudget:
    """Says when to stop, so that a run ends by itself and not by being killed."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._start = clock()
        self._pieces: deque[float] = deque(maxlen=8)

    @property
    def spent(self) -> float:
        return self._clock() - self._start

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """Around each piece of work."""
        start = self._clock()
        yield
        self._pieces.append(self._clock() - start)

    def has_room(self, expected: float | None = None) -> bool:
        """Whether a piece of `expected` seconds fits, or one as the longest of the last eight."""
        if expected is None:
            expected = max(self._pieces, default=0.0)
        return self.seconds is None or self.spent + expected <= self.seconds

    def is_over(self) -> bool:
        return self.seconds is not None and self.spent > self.seconds


def write_csv(rows: Sequence[Any], path: Path) -> None:
    """One line per dataclass, numbers to four digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(_line, rows))


def append_csv(rows: Sequence[Any], path: Path) -> None:
    """The same at the end of a file, which is made if it is not there.

    A run that is stopped keeps what it had. A file with other columns is left alone and refused.
    """
    if not rows:
        return
    columns = list(asdict(rows[0]))
    if not path.exists() or path.stat().st_size == 0:
        write_csv(rows, path)
        return
    with open(path, newline="") as file:
        found = next(csv.reader(file))
    if found != columns:
        raise ValueError(
            f"{path} has the columns {', '.join(found)}; rows have {', '.join(columns)}: "
            "write to another folder with --out"
        )
    with open(path, "a", newline="") as file:
        csv.DictWriter(file, columns, lineterminator="\n").writerows(map(_line, rows))


def _line(row: Any) -> dict[str, Any]:
    return {k: f"{x:.4g}" if isinstance(x, float) else x for k, x in asdict(row).items()}
