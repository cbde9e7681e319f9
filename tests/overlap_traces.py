"""Small traces as Kineto writes them, built event by event; times in microseconds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

GEMM = "void cutlass::Kernel<Gemm, {lambda(int)#1}>(Params)"
NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
OLD_NCCL = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"


class TraceBuilder:
    """Events of one process on one GPU; `text()` lays them out as Kineto does."""

    def __init__(self, rank: int | None = None, host: str | None = None, base: int = 0) -> None:
        self.header: dict[str, Any] = {"schemaVersion": 1, "baseTimeNanoseconds": base}
        self.header["deviceProperties"] = [{"id": 0, "name": "NVIDIA H200"}]
        if rank is not None:
            self.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
        if host is not None:
            self.header["host_name"] = host
        self.events: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        start: float,
        end: float,
        *,
        cat: str = "kernel",
        stream: int = 7,
        device: int = 0,
        **args: Any,
    ) -> TraceBuilder:
        number = len(self.events) + 1
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": device,
                "tid": stream,
                "ts": start,
                "dur": end - start,
                "args": {
                    "External id": number,
                    **{"device": device, "context": 1, "stream": stream, "correlation": number},
                    **args,
                },
            }
        )
        return self

    def gemm(self, start: float, end: float, **options: Any) -> TraceBuilder:
        return self.add(GEMM, start, end, **options)

    def nccl(self, start: float, end: float, name: str = NCCL, **options: Any) -> TraceBuilder:
        return self.add(name, start, end, **{"stream": 24, **options})

    def operator(self, start: float, end: float) -> TraceBuilder:
        """Work of the CPU, which is no GPU time."""
        event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 99, "tid": 99}
        self.events.append({**event, "ts": start, "dur": end - start, "args": {"Ev Idx": 1}})
        return self

    def text(self) -> str:
        head = json.dumps(self.header, indent=2)[:-2]
        events = ",\n".join(json.dumps(event, indent=2) for event in self.events)
        return f'{head},\n  "traceEvents": [\n{events}\n  ],"traceName": "trace.json" }}'

    def write(self, path: Path) -> Path:
        path.write_text(self.text(), encoding="utf-8")
        return path


def compute_only() -> TraceBuilder:
    return TraceBuilder().operator(0, 5).gemm(10, 30).gemm(40, 90)


def serial() -> TraceBuilder:
    return TraceBuilder().operator(0, 5).gemm(10, 30).nccl(30, 70).gemm(75, 90)


def hidden() -> TraceBuilder:
    return TraceBuilder().operator(0, 5).gemm(10, 110).nccl(20, 60).nccl(70, 100)


def partial() -> TraceBuilder:
    """Hidden 20 + 10 of 70: kernels of 20..60 and 90..120 beside compute of 10..40 and 100..110."""
    return TraceBuilder().operator(0, 5).gemm(10, 40).nccl(20, 60).nccl(90, 120).gemm(100, 110)


def old_names() -> TraceBuilder:
    return TraceBuilder().operator(0, 5).gemm(10, 40).nccl(20, 60, OLD_NCCL).gemm(55, 58)


def many_streams(seed: int = 0) -> TraceBuilder:
    """Kernels that overlap each other in every way, on eight streams."""
    chance = random.Random(seed)
    trace = TraceBuilder().operator(0, 5)
    for n in range(400):
        start = chance.randrange(10, 5000)
        length = chance.randrange(0, 60)
        if n % 3:
            trace.gemm(start, start + length, stream=7 + n % 5)
        else:
            trace.nccl(start, start + length, stream=20 + n % 3)
    return trace


def copies() -> TraceBuilder:
    return (
        partial()
        .add("Memcpy HtoD (Pinned -> Device)", 30, 80, cat="gpu_memcpy", stream=9)
        .add("Memset (Device)", 121, 123, cat="gpu_memset", stream=9)
    )


def sync_events() -> TraceBuilder:
    """A stream that waits is not computing: overlap is that of `partial`."""
    return (
        partial()
        .add("Stream Wait Event", 40, 60, cat="cuda_sync")
        .add("Context Sync", 60, 100, cat="cuda_sync", stream=0)
    )


def symmetric_memory() -> TraceBuilder:
    """Communication without NCCL's names: half hidden."""
    return (
        TraceBuilder()
        .operator(0, 5)
        .gemm(10, 40)
        .nccl(30, 50, "void two_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(unsigned long)")
    )


def renamed() -> TraceBuilder:
    """NCCL's device functions without `Kernel` in their names: half hidden."""
    return TraceBuilder().operator(0, 5).gemm(10, 40).nccl(30, 50, "ncclDevFunc_SendRecv()")


AGREE = (compute_only, serial, hidden, partial, old_names, many_streams, copies)
"""Where HolisticTraceAnalysis is right."""
HTA_IS_WRONG = {sync_events: 3 / 7, symmetric_memory: 0.5, renamed: 0.5}
"""Where it is not, with the right ratios."""
