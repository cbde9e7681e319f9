"""Reports: numbers worked out by hand, brute force on a grid, and another tool's."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.overlap_traces import (
    AGREE,
    HTA_IS_WRONG,
    TraceBuilder,
    compute_only,
    copies,
    hidden,
    partial,
    serial,
)

import keel.overlap
from keel.overlap import Report, analyze, compare, measure

HTA = json.loads((Path(__file__).parents[1] / "data" / "hta.json").read_text(encoding="utf-8"))


def report_of(folder: Path, *traces: TraceBuilder, **options: Any) -> Report:
    folder.mkdir(exist_ok=True)
    paths = [trace.write(folder / f"rank{n}.json") for n, trace in enumerate(traces)]
    return analyze(paths, **options)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        # span, compute, communication, hidden, exposed, exposed copies, idle; microseconds
        (compute_only, (80, 70, 0, 0, 0, 0, 10)),
        (serial, (80, 35, 40, 0, 40, 0, 5)),
        (hidden, (100, 100, 70, 70, 0, 0, 0)),
        (partial, (110, 40, 70, 30, 40, 0, 30)),
        (copies, (113, 40, 70, 30, 40, 22, 11)),
    ],
)
def test_times(
    build: Callable[[], TraceBuilder], expected: tuple[int, ...], tmp_path: Path
) -> None:
    (x,) = report_of(tmp_path, build()).ranks
    got = (x.span_ms, x.compute_ms, x.communication_ms, x.hidden_ms, x.exposed_ms)
    got += (x.exposed_copies_ms, x.idle_ms)
    assert [time * 1000 for time in got] == pytest.approx(expected)
    assert (x.overlap_ratio is None) == (x.communication_ms == 0)


SPAN = 60
WORK = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, SPAN - 1), st.integers(1, 20)),
    min_size=1,
    max_size=25,
)


@given(WORK)
def test_times_against_a_grid(work: list[tuple[int, int, int]]) -> None:
    """Each microsecond belongs to whoever claims it first; their sum is the span."""
    trace = TraceBuilder()
    cells = np.zeros((3, SPAN + 20), bool)
    for n, (what, start, duration) in enumerate(work):
        end = start + duration
        if what < 2:
            trace.gemm(start, end, stream=n)
        elif what == 2:
            trace.nccl(start, end, stream=n)
        elif what == 3:
            trace.add("Memcpy PtoP (Device -> Device)", start, end, cat="gpu_memcpy", stream=n)
        else:
            trace.add("Memcpy DtoH (Device -> Pinned)", start, end, cat="gpu_memcpy", stream=n)
        cells[(0, 0, 1, 1, 2)[what], start:end] = True
    compute, communication, copied = cells
    with tempfile.TemporaryDirectory() as folder:
        (x,) = report_of(Path(folder), trace).ranks
    used = np.flatnonzero(cells.any(0))
    expected = {
        "span_ms": used[-1] - used[0] + 1,
        "compute_ms": compute.sum(),
        "communication_ms": communication.sum(),
        "hidden_ms": (communication & compute).sum(),
        "exposed_ms": (communication & ~compute).sum(),
        "copies_ms": copied.sum(),
        "exposed_copies_ms": (copied & ~compute & ~communication).sum(),
        "idle_ms": used[-1] - used[0] + 1 - len(used),
    }
    assert {name: round(getattr(x, name) * 1000) for name in expected} == expected


@pytest.mark.parametrize("build", AGREE)
def test_ratios_of_holistic_trace_analysis(
    build: Callable[[], TraceBuilder], tmp_path: Path
) -> None:
    theirs = _theirs(build)
    assert report_of(tmp_path, build()).overlap_ratio == (
        None if theirs is None else pytest.approx(theirs, abs=1e-6)
    )


@pytest.mark.parametrize(("build", "right"), HTA_IS_WRONG.items())
def test_right_where_it_is_wrong(
    build: Callable[[], TraceBuilder], right: float, tmp_path: Path
) -> None:
    """Waits that it takes for compute, communication that it takes for compute."""
    theirs = _theirs(build)
    assert theirs is None or abs(theirs - right) > 0.1
    assert report_of(tmp_path, build()).overlap_ratio == pytest.approx(right, abs=1e-6)


def _theirs(build: Callable[[], TraceBuilder]) -> float | None:
    seen = HTA["traces"][build.__name__]
    same = hashlib.sha256(build().text().encode()).hexdigest() == seen["sha256"]
    assert same, "the trace has changed: run tests/make_hta_numbers.py"
    return seen["ratio"]


def test_the_worst_rank_decides(tmp_path: Path) -> None:
    report = report_of(tmp_path, hidden(), partial(), serial())
    assert report.worst is not None
    assert [rank.overlap_ratio for rank in report.ranks] == pytest.approx([1, 3 / 7, 0])
    assert report.overlap_ratio == 0
    assert report.worst.exposed_ms == max(rank.exposed_ms for rank in report.ranks)


def collectives(rank: int, starts: list[float], end: list[float], **options: Any) -> TraceBuilder:
    trace = TraceBuilder(rank=rank, **options).gemm(0, 1000)
    for number, (a, b) in enumerate(zip(starts, end, strict=True)):
        args = {"Collective name": "all_reduce", "Process Group Name": "0", "Seq": number}
        trace.nccl(a, b, **args)
    return trace


def test_skew_on_one_host(tmp_path: Path) -> None:
    """Rank 1 comes 30 and 10 late, rank 0 once 5; ranks are matched by number."""
    ends = [150.0, 350.0, 550.0]
    first = collectives(0, [100, 300, 505], ends, host="a")
    second = collectives(1, [130, 310, 500], ends, host="a")
    (row,) = report_of(tmp_path, first, second).skews
    assert (row.name, row.count, row.straggler) == ("all_reduce (0)", 3, 1)
    assert row.max_skew_ms == pytest.approx(0.030)
    assert row.mean_skew_ms == pytest.approx(0.015)
    assert row.waited_ms == pytest.approx(0.045)
    assert row.straggler_share == pytest.approx(2 / 3)
    assert row.shortest_ms == pytest.approx((20 + 40 + 45) / 1000)


def test_skew_between_hosts_does_not_trust_clocks(tmp_path: Path) -> None:
    ends = [150.0, 350.0, 550.0]
    ahead = 7_000.0
    first = collectives(0, [100, 300, 500], ends, host="a")
    starts = [130 + ahead, 310 + ahead, 500 + ahead]
    second = collectives(1, starts, [x + ahead for x in ends], host="b")
    report = report_of(tmp_path, first, second)
    (row,) = report.skews
    assert "ends" in report.clock
    assert (row.straggler, row.max_skew_ms) == (1, pytest.approx(0.030))


def test_skew_without_numbers_counts_and_point_to_point_is_left_out(tmp_path: Path) -> None:
    def trace(delay: float) -> TraceBuilder:
        built = TraceBuilder(host="a").nccl(10 + delay, 30).nccl(50 + delay, 70)
        return built.nccl(80, 90 + delay, **{"Collective name": "send"})

    (row,) = report_of(tmp_path, trace(0), trace(4)).skews
    assert (row.count, row.straggler, row.max_skew_ms) == (2, 1, pytest.approx(0.004))
    different = report_of(tmp_path, trace(0), trace(4).nccl(200, 210))
    assert different.skews == []


def test_stages_with_nested_annotations(tmp_path: Path) -> None:
    """Work belongs to the ranges of its own stream, inner and outer."""

    def annotate(name: str, start: float, end: float, stream: int) -> None:
        trace.add(name, start, end, cat="gpu_user_annotation", stream=stream)

    trace = TraceBuilder().gemm(0, 100).gemm(120, 200).nccl(10, 60).nccl(90, 130).nccl(210, 220)
    annotate("step", 0, 220, 24)
    annotate("keel stage 1", 90, 130, 24)
    annotate("keel stage 0", 10, 60, 24)
    annotate("nccl:all_to_all", 10, 60, 24)
    annotate("keel stage 0", 0, 100, 7)
    (rank,) = report_of(tmp_path, trace).ranks
    rows = [(x.name, x.communication_ms, x.hidden_ms, x.compute_ms) for x in rank.stages]
    assert rows == [("keel stage 0", 0.05, 0.05, 0.1), ("keel stage 1", 0.04, 0.02, 0.0)]
    (rank,) = report_of(tmp_path, trace, stages="^step$").ranks
    assert [(x.name, x.communication_ms) for x in rank.stages] == [("step", 0.1)]


def test_collectives_by_name(tmp_path: Path) -> None:
    trace = TraceBuilder().gemm(0, 100).nccl(10, 60).nccl(90, 130, "ncclDevKernel_SendRecv()")
    (rank,) = report_of(tmp_path, trace).ranks
    first, second = rank.collectives
    assert (first.name, first.exposed_ms, first.count) == ("ncclDevKernel_SendRecv()", 0.03, 1)
    assert (second.exposed_ms, second.hidden_ms) == (0, 0.05)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (compute_only, ["no communication found"]),
        (hidden, ["hides 100.0 %", "good"]),
        (serial, ["cannot all be hidden"]),
        (partial, ["cannot all be hidden", "is idle 27.3 %"]),
        (lambda: TraceBuilder().gemm(0, 90).nccl(90, 120), ["compute would cover it", "sm_margin"]),
        (lambda: TraceBuilder().gemm(0, 990).nccl(980, 999), ["too little to matter"]),
        (copies, ["copies take 0.022 ms"]),
    ],
)
def test_verdicts(build: Callable[[], TraceBuilder], words: list[str], tmp_path: Path) -> None:
    text = "\n".join(report_of(tmp_path, build()).verdicts())
    assert all(word in text for word in words), text


def test_verdict_names_the_straggler(tmp_path: Path) -> None:
    first = collectives(0, [100], [500], host="a")
    report = report_of(tmp_path, first, collectives(1, [400], [500], host="a"))
    assert any("rank 1 comes late to all_reduce (0)" in line for line in report.verdicts())


def test_compare(tmp_path: Path) -> None:
    """100 of compute and 60 of communication: 160 one after the other, 100 at best, 115 here."""
    a = report_of(tmp_path / "a", TraceBuilder().gemm(0, 100).nccl(100, 160))
    b = report_of(tmp_path / "b", TraceBuilder().gemm(0, 110).nccl(50, 115))
    result = compare(a, b)
    assert result.speedup == pytest.approx(160 / 115)
    assert result.efficiency == pytest.approx(45 / 60)
    assert result.bound_ms == pytest.approx(0.1)
    assert result.ratios == (0, pytest.approx(60 / 65))
    only = report_of(tmp_path / "c", compute_only().gemm(30, 40))
    assert compare(only, only).efficiency is None
    with pytest.raises(ValueError, match="A has 1 ranks and B 2"):
        compare(a, report_of(tmp_path / "d", serial(), serial()))
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(a, Report(ranks=[]))


def test_measure_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with measure() as report, pytest.raises(RuntimeError, match="ready when the block"):
        report.ranks  # noqa: B018
    assert report.ranks == []
    assert report.overlap_ratio is None
    assert "nothing to measure" in str(report)


def test_measure_reads_what_the_profiler_exports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The profiler is a stand-in here; tests/gpu has the real one."""
    trace = [partial()]

    class Profiler:
        def __init__(self, activities: list[Any]) -> None:
            assert torch.profiler.ProfilerActivity.CUDA in activities

        def __enter__(self) -> Profiler:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def export_chrome_trace(self, path: str) -> None:
            trace[0].write(Path(path))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    kept = tmp_path / "kept.json"
    with keel.overlap.measure(trace=kept) as report:
        pass
    assert report.overlap_ratio == pytest.approx(3 / 7)
    assert any("CUDA_DEVICE_MAX_CONNECTIONS=1" in line for line in report.verdicts())
    assert analyze([kept]).overlap_ratio == report.overlap_ratio
    trace[0] = TraceBuilder().operator(0, 10)  # a block that did nothing on the GPU
    with keel.overlap.measure() as report:
        pass
    assert "nothing to measure" in str(report)
