"""Reports about a real GPU and what its profiler writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keel.overlap import Rules, analyze, measure

pytestmark = pytest.mark.gpu


def test_copies_beside_products_and_after_them(tmp_path: Path) -> None:
    """Copies to the host stand in for communication: on a stream of their own they are hidden."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    host = torch.empty(8192, 8192, dtype=torch.bfloat16, pin_memory=True)
    side = torch.cuda.Stream()
    rules = Rules(communication=["Memcpy DtoH"])
    ratios = []
    for stream in (torch.cuda.current_stream(), side):
        for _ in range(2):  # the first time compiles and loads
            path = tmp_path / "trace.json"
            with measure(rules=rules, trace=path) as report:
                torch.cuda.synchronize()
                with torch.profiler.record_function("keel stage 0"):
                    for _ in range(20):
                        x @ x
                    with torch.cuda.stream(stream):
                        host.copy_(x, non_blocking=True)
        (rank,) = report.ranks
        assert rank.gpu == torch.cuda.get_device_name()
        assert rank.compute_ms > rank.communication_ms > 0
        assert [stage.name for stage in rank.stages] == ["keel stage 0"]
        assert analyze([path], rules=rules).overlap_ratio == report.overlap_ratio
        ratios.append(report.overlap_ratio)
    assert ratios[0] < 0.05
    assert ratios[1] > 0.9
