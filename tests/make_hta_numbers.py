"""Ratios of HolisticTraceAnalysis for the traces of overlap_traces.py, into data/hta.json.

Not a test. HTA brings JupyterLab and pandas, so it is no dependency of the tests; run this in an
environment of its own, from the root of the repository, whenever a trace is changed:

    python -m venv hta && hta/bin/pip install HolisticTraceAnalysis
    hta/bin/python -m tests.make_hta_numbers
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from importlib.metadata import version
from pathlib import Path

from hta.analyzers import communication_analysis
from hta.trace_analysis import TraceAnalysis
from tests.overlap_traces import AGREE, HTA_IS_WRONG


def main() -> None:
    # HTA rounds its result to 0.01 %; the ratios are wanted as they are.
    communication_analysis.round = lambda value, digits: value
    traces = {}
    for build in (*AGREE, *HTA_IS_WRONG):
        text = build().text()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rank0.json"
            path.write_text(text, encoding="utf-8")
            frame = TraceAnalysis(trace_files={0: str(path)}).get_comm_comp_overlap(visualize=False)
        ratio = float(frame["comp_comm_overlap_pctg"][0]) / 100
        traces[build.__name__] = {
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "ratio": None if math.isnan(ratio) else ratio,
        }
    numbers = {"HolisticTraceAnalysis": version("HolisticTraceAnalysis"), "traces": traces}
    target = Path(__file__).parent / "data" / "hta.json"
    target.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    print(target.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
