"""What the benchmarks share: timing on the GPU, and results as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch


def time_calls(call: Callable[[], object], budget_ms: float = 20) -> float:
    """Milliseconds per call, over as many calls as fill the budget, after a third of it unmeasured.

    The lead-in matters: power and clocks must be those of this call, not of the one before it.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    count = max(3, int(budget_ms / max(start.elapsed_time(end), 1e-3)))
    for _ in range(count // 3):
        call()
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def write_csv(rows: Sequence[Any], path: Path) -> None:
    """One line per dataclass, numbers to four digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {k: f"{x:.4g}" if isinstance(x, float) else x for k, x in asdict(r).items()}
            for r in rows
        )
