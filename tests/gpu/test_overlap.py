"""Overlap on a real GPU: reports about it, the barrier, the lab."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

import pytest
import torch
from tests.gpu import overlap_cases

from keel.overlap import KernelBarrier, Rules, analyze, barrier_misses, measure
from keel.overlap.lab import Bench, Setting, read_csv, run
from keel.testing import run_ranks

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
from keel.kernels.lab import Traffic  # noqa: E402


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


def held_by(barrier: KernelBarrier, blocks: int, *, marks: bool) -> tuple[torch.Tensor, ...]:
    """Records of a compute block behind a wait, and of communication launched 300 us later."""
    device = torch.device("cuda", torch.cuda.current_device())
    compute = Traffic(1, span_us=20, gb_per_s=10, device=device)
    flag = barrier.flag if marks else None
    traffic = Traffic(blocks, span_us=500, gb_per_s=100, device=device, flag=flag)
    for kernel in (compute, traffic):  # compiles
        kernel()
    torch.cuda.synchronize()
    barrier.flag[0] = 0
    torch.cuda.synchronize()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        barrier.wait()
        compute()
    time.sleep(3e-4)
    with torch.cuda.stream(other):
        traffic()
    torch.cuda.synchronize()
    return compute.record.cpu(), traffic.record.cpu()


def test_compute_waits_until_all_blocks_have_started() -> None:
    barrier = KernelBarrier(8, timeout_us=500_000)
    barrier.wait()  # compiles; nobody marks
    torch.cuda.synchronize()
    barrier.flag[:3] = 0
    for _ in range(5):
        compute, traffic = held_by(barrier, 8, marks=True)
        assert compute[0, 0] >= traffic[:, 0].max()  # the last of the starts
        assert compute[0, 0] < traffic[:, 1].min()  # and not the first of the ends
    assert barrier.misses() == 0
    assert barrier.flag.tolist()[:2] == [0, 0]
    free, late = held_by(KernelBarrier(8, timeout_us=1), 8, marks=False)
    assert free[0, 0] < late[:, 0].min()  # else nothing was shown


def test_communication_that_never_starts_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    barrier = KernelBarrier(1, timeout_us=20_000)
    before = barrier_misses()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    barrier.wait()  # compiles, and is missed
    for event in events:
        event.record()
        barrier.wait()
    torch.cuda.synchronize()
    assert 19 < events[0].elapsed_time(events[1]) < 60  # milliseconds
    with caplog.at_level(logging.WARNING, "keel"):
        assert barrier.misses() == 3
    assert "gave up" in caplog.text and barrier_misses() == before + 3
    barrier.flag[:2] = 0
    barrier.wait()
    barrier.mark()  # late
    barrier.wait()  # is not released by it
    assert barrier.misses() == 5
    for _ in range(3):
        barrier.mark()
        barrier.wait()
    assert barrier.misses() == 5


def test_a_barrier_in_a_cuda_graph_is_used_again_and_again() -> None:
    barrier = KernelBarrier(2, timeout_us=200_000)
    side, main = torch.cuda.Stream(), torch.cuda.Stream()

    def a_round() -> None:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            barrier.mark()
            barrier.mark()
        with torch.cuda.stream(main):
            barrier.wait()
        main.wait_stream(side)

    torch.cuda.synchronize()  # neither stream is behind the one that made the barrier
    with torch.cuda.stream(main):
        a_round()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main):
        a_round()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert barrier.misses() == 0 and barrier.flag.tolist()[:2] == [0, 0]
    lonely = torch.cuda.CUDAGraph()
    with torch.cuda.graph(lonely, stream=main):
        barrier.wait()
    for _ in range(2):
        lonely.replay()
    torch.cuda.synchronize()
    assert barrier.misses() == 2
    graph.replay()  # pays a debt, and is given up; then all is as before
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert barrier.misses() == 3 and barrier.flag.tolist()[:2] == [0, 0]


def test_the_first_barrier_of_a_device_is_not_made_in_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keel.overlap.barrier._counters", {})
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="cannot be made during CUDA graph capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        KernelBarrier(1)


def test_the_lab_sees_what_levers_do(tmp_path: Path) -> None:
    bench = Bench(tokens=16_384, heads=16, kv_heads=4, span_us=200, repeats=3)
    todo = [
        Setting(),
        Setting(grid="tiles"),
        Setting(sm_margin=16),
        Setting(barrier=True),
        Setting(grid="tiles", barrier=True),
        Setting(scenario="chain"),
    ]
    rows = run(bench, todo, csv_path=tmp_path / "lab.csv")
    assert not [row["error"] for row in rows if row.get("error")]
    assert not [row for row in rows if row.get("shared_sms")], rows
    overlaps = [row["overlap"] for row in rows]
    assert max(overlaps[:2]) < 0.2 and min(overlaps[2:]) > 0.9, overlaps
    assert all(row["misses"] == 0 for row in rows[:5])
    assert [row["overlap"] for row in read_csv(tmp_path / "lab.csv")] == overlaps


def test_traffic_comes_in_clusters_of_neighbours() -> None:
    """Blocks of a cluster start together, each on an SM of its own, and each of them marks."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    device = torch.device("cuda", torch.cuda.current_device())
    for cluster in (1, 2, 4):
        barrier = KernelBarrier(8, timeout_us=100)
        options = {"span_us": 300, "gb_per_s": 50, "device": device, "cluster": cluster}
        traffic = Traffic(8, flag=barrier.flag, **options)
        for _ in range(2):
            traffic()
        torch.cuda.synchronize()
        record = traffic.record.cpu()
        assert int(barrier.flag[0]) == 16
        assert (record[:, 1] - record[:, 0] >= 290_000).all() and len(
            set(record[:, 2].tolist())
        ) == 8
        starts = record[:, 0].view(-1, cluster)
        assert (starts.amax(1) - starts.amin(1) < 20_000).all()
        assert 0.5 < traffic.bytes_moved() / 3e-4 / 50e9 < 1.5  # of the rate it was given


def test_a_stage_hides_its_exchange_and_one_fetch_does_not() -> None:
    """Two processes share the GPU; keys go through pinned memory and gloo."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("without MPS the processes take turns on the GPU, and hide nothing")
    with overlap_cases.shared_gpu() as variables:
        hidden, exposed = (
            run_ranks(overlap_cases.report_of_a_forward, 2, degree, variables, timeout=200)
            for degree in (1, 0)
        )
    for mine in hidden:
        assert mine["communication"] > 0.2, mine["text"]
        assert mine["ratio"] > 0.8, mine["text"]
        assert {"keel stage 0 forward", "keel stage 1 forward"} <= set(mine["stages"])
        sent, ratio = mine["stages"]["keel stage 1 forward"]
        assert sent == pytest.approx(mine["communication"], rel=0.05) and ratio > 0.8
    for mine in exposed:
        assert mine["communication"] > 0.2 and mine["ratio"] < 0.1, mine["text"]


def test_attention_waits_for_nccl() -> None:
    """A group of one, which sends nothing, but queues as a larger one does."""
    ((equal, missed, waits),) = run_ranks(overlap_cases.barrier_beside_nccl, 1)
    assert all(equal) and missed == 0 and waits == 2
