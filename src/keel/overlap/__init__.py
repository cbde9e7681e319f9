"""Overlap of compute and communication: what a trace really hid.

`analyze(["rank0.json.gz", ...])` reads any torch.profiler trace; `measure()` profiles a block.
"""

from keel.overlap.classify import Kind, Rules
from keel.overlap.in_process import measure
from keel.overlap.plot import plot_timelines
from keel.overlap.report import Comparison, RankReport, Report, analyze, compare
from keel.overlap.scan import TraceError
from keel.overlap.trace import Timeline, read_traces

__all__ = [
    "Comparison",
    "Kind",
    "RankReport",
    "Report",
    "Rules",
    "Timeline",
    "TraceError",
    "analyze",
    "compare",
    "measure",
    "plot_timelines",
    "read_traces",
]
