"""Traces of every layout, and files that are none."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.overlap_traces import GEMM, NCCL, TraceBuilder, compute_only, many_streams, partial

from keel.overlap import Kind, Rules, Timeline, TraceError, analyze, read_traces, scan


def read(trace: TraceBuilder, folder: Path, **options: Any) -> Timeline:
    (line,) = read_traces([trace.write(folder / "trace.json")], **options)
    return line


def kinds(line: Timeline) -> list[tuple[str, int]]:
    return [(line.labels[n], int(kind)) for n, kind in zip(line.label, line.kind, strict=True)]


def table(line: Timeline) -> np.ndarray:
    return np.stack([line.start, line.end, line.kind, line.stream], axis=1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", Kind.COMMUNICATION),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", Kind.COMMUNICATION),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)", Kind.COMMUNICATION),
        ("void rcclGenericKernel<1>(ncclDevKernelArgsStorage)", Kind.COMMUNICATION),
        ("void nvshmemi_transfer_rma_kernel<>", Kind.COMMUNICATION),
        ("void deep_ep::intranode::dispatch<8, 768>(int4*)", Kind.COMMUNICATION),
        ("void one_shot_all_reduce_kernel<c10::BFloat16>()", Kind.COMMUNICATION),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>()", Kind.COMMUNICATION),
        ("void multimem_all_reduce_kernel<float>()", Kind.COMMUNICATION),
        ("flash_fwd_kernel", Kind.COMPUTE),
        ("copy_rows_kernel", Kind.COMPUTE),
        ("triton_poi_fused_all_gather_into_tensor_wait_tensor_3", Kind.COMPUTE),
        ("nvjet_gemm_with_all_reduce_epilogue", Kind.COMPUTE),
        ("softmax_warpAllReduce_kernel<float>", Kind.COMPUTE),
        ("Stream Wait Event", None),
        ("Context Sync", None),
    ],
)
def test_kernels_by_name(name: str, kind: Kind | None) -> None:
    assert Rules().kind("kernel", name, {}) is kind


@pytest.mark.parametrize(
    ("name", "args", "kind"),
    [
        ("Memcpy HtoD (Pinned -> Device)", {}, Kind.COPY),
        ("Memcpy DtoD (Device -> Device)", {}, Kind.COPY),
        ("Memcpy DtoD (Device -> Device)", {"inDevice": 0, "outDevice": 0}, Kind.COPY),
        ("Memcpy DtoD (Device -> Device)", {"inDevice": 0, "outDevice": 3}, Kind.COMMUNICATION),
        ("Memcpy PtoP (Device -> Device)", {}, Kind.COMMUNICATION),
    ],
)
def test_copies(name: str, args: dict[str, int], kind: Kind) -> None:
    assert Rules().kind("gpu_memcpy", name, args) is kind


def test_what_torch_says_of_a_collective_goes_before_its_name() -> None:
    args = {"Collective name": "all_gather", "In msg nelems": 8}
    assert Rules().kind("kernel", "kernel_17", args) is Kind.COMMUNICATION
    assert Rules().kind("kernel", "kernel_17", {}) is Kind.COMPUTE


def test_patterns_of_the_user_go_first() -> None:
    rules = Rules(communication=["ring_"], compute=["ncclLocal"], ignore=["spin"])
    assert rules.kind("kernel", "my_RING_kernel", {}) is Kind.COMMUNICATION
    assert rules.kind("kernel", "ncclLocalReduce", {}) is Kind.COMPUTE
    assert rules.kind("kernel", "spin_kernel", {"Collective name": "x"}) is None
    with pytest.raises(ValueError, match="does not compile"):
        Rules(communication=["("])
    with pytest.raises(TypeError, match="list of patterns"):
        Rules(compute="abc")


def test_waits_and_annotations_are_no_work(tmp_path: Path) -> None:
    trace = partial().add("Stream Wait Event", 40, 60, cat="cuda_sync")
    trace.add("keel stage 0", 0, 500, cat="gpu_user_annotation")
    line = read(trace, tmp_path)
    assert [name for name, _ in kinds(line)] == [GEMM, NCCL, NCCL, GEMM]
    assert line.ranges.names == ["keel stage 0"]
    assert (line.end.max() - line.start.min()) == 110_000


def test_copies_of_copy_engines_inside_a_collective(tmp_path: Path) -> None:
    """On the collective's stream and in its time; the same copy elsewhere is a copy."""
    copy = "Memcpy DtoD (Device -> Device)"
    trace = TraceBuilder().gemm(0, 100)
    trace.add("nccl:_all_gather_base", 10, 30, cat="gpu_user_annotation", stream=24)
    for start, stream in ((10, 24), (20, 9), (40, 24)):
        trace.add(copy, start, start + 5, cat="gpu_memcpy", stream=stream)
    trace.gemm(25, 26, stream=24)
    line = read(trace, tmp_path)
    expected = [Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY, Kind.COMPUTE, Kind.COPY]
    assert line.kind.tolist() == expected


@pytest.mark.parametrize("name", ["keel stage 1 forward", "keel:all_to_all through host memory"])
def test_copies_through_the_host_are_communication(name: str, tmp_path: Path) -> None:
    """Those of Keel's exchanges, on their stream; an operator's range says nothing about copies."""
    trace = TraceBuilder().gemm(0, 100)
    trace.add(name, 10, 30, cat="gpu_user_annotation", stream=24)
    trace.add("keel::attn_accumulate_", 40, 60, cat="gpu_user_annotation", stream=24)
    for copy, start in (("Memcpy DtoH (Device -> Pinned)", 10), ("Memcpy HtoD (x)", 40)):
        trace.add(copy, start, start + 5, cat="gpu_memcpy", stream=24)
    line = read(trace, tmp_path)
    assert line.kind.tolist() == [Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY]


def layouts() -> dict[str, str]:
    trace = many_streams().add("Memcpy PtoP", 1, 2, cat="gpu_memcpy", inDevice=0, outDevice=1)
    trace.nccl(6000, 6010, **{"Collective name": "all_gather", "Seq": 4})
    trace.add('odd "name" \\ with { and é', 6020, 6030)
    trace.operator(6040, 6050)
    whole = json.loads(trace.text())
    last_first = [dict(reversed(list(event.items()))) for event in whole["traceEvents"]]
    return {
        "kineto": trace.text(),
        "one line": json.dumps(whole),
        "compact": json.dumps(whole, separators=(",", ":"), ensure_ascii=False),
        "sorted keys": json.dumps(whole, sort_keys=True),
        "args before category": json.dumps({**whole, "traceEvents": last_first}),
        "events first": json.dumps({"traceEvents": whole["traceEvents"], "schemaVersion": 1}),
        "bare list": json.dumps(whole["traceEvents"]),
        "last event is on the CPU": trace.operator(1, 2).text(),
    }


@pytest.mark.parametrize("chunk", [257, 4096, scan.CHUNK])
def test_every_layout_reads_the_same(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "CHUNK", chunk)
    found = {}
    for name, text in layouts().items():
        path = tmp_path / "trace.json"
        path.write_text(text, encoding="utf-8")
        (found[name],) = read_traces([path])
    expected = found["kineto"]
    assert len(expected.start) == 403
    assert 'odd "name" \\ with { and é' in expected.labels
    for name, line in found.items():
        np.testing.assert_array_equal(table(line), table(expected), err_msg=name)
        assert kinds(line) == kinds(expected), name
        assert line.sequence.tolist() == expected.sequence.tolist(), name


def test_the_quick_way_is_taken_for_what_kineto_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("read one by one")

    monkeypatch.setattr(scan, "_one_by_one", refuse)
    assert len(read(many_streams(), tmp_path).start) == 400


def test_the_layout_is_that_of_this_torch(tmp_path: Path) -> None:
    """An exported trace of the CPU, with GPU events put in where the profiler would put them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        torch.ones(4).sum()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    with pytest.raises(TraceError, match="no GPU work"):
        read_traces([path])
    text = path.read_text(encoding="utf-8")
    gpu = ",\n".join(json.dumps(event, indent=4) for event in partial().events)
    head, bracket, rest = text.partition('"traceEvents": [')
    path.write_text(f"{head}{bracket}{gpu},{rest}", encoding="utf-8")
    (line,) = read_traces([path])
    assert [name for name, _ in kinds(line)] == [GEMM, NCCL, NCCL, GEMM]


def test_packed_files_whatever_they_are_called(tmp_path: Path) -> None:
    plain = read(partial(), tmp_path)
    for name in ("trace.json.gz", "trace.json"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(partial().text().encode()))
        (line,) = read_traces([path])
        np.testing.assert_array_equal(table(line), table(plain))


def test_ranks(tmp_path: Path) -> None:
    """From the trace, else from the name, else counted."""
    said = [TraceBuilder(rank=r).gemm(0, 1).write(tmp_path / f"{9 - r}.json") for r in (3, 1)]
    assert [(x.rank, Path(x.source).name) for x in read_traces(said)] == [
        (1, "8.json"),
        (3, "6.json"),
    ]
    named = [compute_only().write(tmp_path / f"step5_rank{r}.json") for r in (12, 2)]
    assert [line.rank for line in read_traces(named)] == [2, 12]
    same = [TraceBuilder(rank=0).gemm(0, 1).write(tmp_path / f"{x}.json") for x in "ab"]
    assert [line.rank for line in read_traces(same)] == [0, 1]
    two_gpus = TraceBuilder().gemm(0, 10).gemm(5, 20, device=1).nccl(6, 8, device=1)
    first, second = read_traces([two_gpus.write(tmp_path / "two.json")])
    assert (len(first.start), len(second.start)) == (1, 2)


def test_times_are_exact_nanoseconds(tmp_path: Path) -> None:
    start = 3_887_103_296_709.707
    line = read(TraceBuilder(base=1_790_857_026_000_000_000).gemm(start, start + 0.125), tmp_path)
    assert line.start.tolist() == [1_790_857_026_000_000_000 + 3_887_103_296_709_707]
    assert abs(int(line.end[0] - line.start[0]) - 125) <= 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello", "not a JSON trace"),
        (b'{"a": 1}', "no list of traceEvents"),
        (b'{"traceEvents": []}', "no GPU work"),
        (b'{"traceEvents": [', "cut off"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a" "ts": 1}]}', "malformed"),
        (b'{"traceEvents": [1, 2]}', "malformed"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a"}]}', "malformed"),
        (
            b'{"traceEvents": [{"ph":"X","cat":"kernel","name":"a","ts":"soon","dur":1}]}',
            "usable times",
        ),
        (gzip.compress(b"{" * 5000, mtime=0)[:-9], "cut off|not a whole gzip"),
        (b"\x1f\x8bnonsense that is not packed", "not a whole gzip"),
    ],
)
def test_files_that_are_no_traces(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as error:
        read_traces([path])
    assert str(path) in str(error.value)


@given(st.floats(0.2, 0.999))
def test_a_truncated_trace_is_never_reported(share: float) -> None:
    text = many_streams().text()
    end = text.rindex("]")  # what follows the events may be missing
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(text[: int(end * share)], encoding="utf-8")
        with pytest.raises(TraceError, match="cut off"):
            read_traces([path])


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read_traces([tmp_path / "none.json"])
    with pytest.raises(TraceError, match="no trace given"):
        read_traces([])
    with pytest.raises(TraceError, match=r"no \.json"):
        analyze([tmp_path])
    with pytest.raises(TraceError, match="is a folder"):
        read_traces([tmp_path])


def test_large_traces_take_little_time_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gigabyte in 30 s: so much of it in as much of the processor's time. A part in memory."""
    some = many_streams()
    for n in range(1200):
        some.operator(n, n + 1)
    events = ",\n".join(json.dumps(event, indent=2) for event in some.events)
    copies = 80
    path = tmp_path / "trace.json"
    path.write_text(f'{{"traceEvents": [{",".join([events] * copies)}]}}', encoding="utf-8")
    size = path.stat().st_size
    assert size > 2e7
    spent = []
    for _ in range(2):
        start = time.process_time()
        (line,) = read_traces([path])
        spent.append(time.process_time() - start)
    assert min(spent) < 30 * size / 1e9
    assert len(line.start) == 400 * copies
    monkeypatch.setattr(scan, "CHUNK", 1 << 18)
    tracemalloc.start()
    read_traces([path])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 2


def test_progress_reaches_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "CHUNK", 1000)
    paths = [many_streams(n).write(tmp_path / f"rank{n}.json") for n in range(2)]
    seen: list[tuple[int, int]] = []
    read_traces(paths, progress=lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in paths)
    assert len(seen) > 100
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
