"""A report about a block of the running program."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from keel.overlap.barrier import barrier_misses, warn_of_new_misses
from keel.overlap.classify import Rules
from keel.overlap.report import STAGES, Report, analyze_timelines
from keel.overlap.scan import NoGpuWorkError
from keel.overlap.trace import read_traces

SETTINGS = ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_HIGH_PRIORITY", "NCCL_CGA_CLUSTER_SIZE")


class Measurement:
    """What `measure` gives: empty inside the block, after it everything a `Report` has."""

    def __init__(self) -> None:
        self._report: Report | None = None

    @property
    def report(self) -> Report:
        if self._report is None:
            raise RuntimeError("the report is ready when the block of keel.overlap.measure() ends")
        return self._report

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.report, name)

    def __str__(self) -> str:
        return str(self.report)


@contextlib.contextmanager
def measure(
    *,
    rules: Rules | None = None,
    stages: str = STAGES,
    trace: str | os.PathLike[str] | None = None,
) -> Iterator[Measurement]:
    """Profile a block and report its overlap; on each rank about that rank.

    Warm up first: compiling and autotuning would be measured too. `trace` keeps the trace
    (.json, .json.gz), for `keel overlap report` over those of all ranks, and for Perfetto. Without
    a GPU the block runs as it is, and the report says that there is nothing to measure. Waits of a
    `KernelBarrier` that gave up inside the block are logged.

    >>> from keel.overlap import measure
    >>> with measure() as report:
    ...     pass
    >>> print(report)  # doctest: +ELLIPSIS
    nothing to measure: ...
    """
    measurement = Measurement()
    environment = {name: os.environ.get(name) for name in SETTINGS}
    nothing = Report(ranks=[], environment=environment)
    if not torch.cuda.is_available():
        yield measurement
        measurement._report = nothing
        return
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    missed = barrier_misses()
    with torch.profiler.profile(activities=activities) as profiler:
        yield measurement
        torch.cuda.synchronize()
    warn_of_new_misses(missed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json" if trace is None else Path(trace)
        profiler.export_chrome_trace(str(path))
        try:
            found = analyze_timelines(read_traces([path], rules=rules), stages=stages)
        except NoGpuWorkError:
            found = nothing
    measurement._report = Report(**{**vars(found), "environment": environment})
