"""Overlap of compute and communication: how to set it, and what a trace really hid.

`analyze(["rank0.json.gz", ...])` reads any torch.profiler trace; `measure()` profiles a block.
"""

from keel.overlap.barrier import KernelBarrier, barrier_misses
from keel.overlap.classify import Kind, Rules
from keel.overlap.control import Lever, OverlapConfig, advise, levers
from keel.overlap.in_process import measure
from keel.overlap.plot import plot_timelines
from keel.overlap.report import Comparison, RankReport, Report, analyze, compare
from keel.overlap.scan import TraceError
from keel.overlap.trace import Timeline, read_traces

__all__ = [
    "Comparison",
    "KernelBarrier",
    "Kind",
    "Lever",
    "OverlapConfig",
    "RankReport",
    "Report",
    "Rules",
    "Timeline",
    "TraceError",
    "advise",
    "analyze",
    "barrier_misses",
    "compare",
    "levers",
    "measure",
    "plot_timelines",
    "read_traces",
]
