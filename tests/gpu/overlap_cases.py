"""What ranks run in tests of overlap on a GPU. Imported by their processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist

from keel import masks
from keel.distributed import CostModel, calc_attn, flex_key
from keel.overlap import OverlapConfig, barrier_misses, measure

FREE = CostModel(gb_per_s=1e9, latency_us=0.0)


@contextlib.contextmanager
def shared_gpu() -> Iterator[dict[str, str]]:
    """Variables with which processes run side by side on a GPU; without MPS they take turns."""
    with tempfile.TemporaryDirectory() as folder:
        where = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        control = ["nvidia-cuda-mps-control"]
        environment = os.environ | where
        subprocess.run([*control, "-d"], env=environment, check=True, timeout=30)
        try:
            yield where
        finally:
            subprocess.run(control, input=b"quit\n", env=environment, check=False, timeout=60)


def report_of_a_forward(rank: int, degree: int, variables: dict[str, str]) -> dict[str, object]:
    """Of one rank: long attention over few keys, so that it can hide what gloo does with them."""
    os.environ.update(variables)
    torch.cuda.set_device(0)
    torch.manual_seed(rank)
    rows = 32_768
    key = flex_key(masks.full(2 * rows), degree=degree, balance="contiguous", cost=FREE)
    q, k, v = (
        torch.randn(key.num_local, heads, 128, device="cuda", dtype=torch.bfloat16)
        for heads in (64, 4, 4)
    )
    before = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    # each process gets less than half of the SMs, so that some stay free for what is sent
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    overlap = OverlapConfig(forward_sm_margin=sms // 2 + 4)
    with torch.no_grad():
        for _ in range(2):
            calc_attn(q, k, v, key, overlap=overlap)
        torch.cuda.synchronize()
        with measure() as report:
            dist.barrier()  # starting a profiler takes one process longer than the other
            for _ in range(8):  # as in training, the host is ahead: its launches are not the point
                torch.mm(before, before)
            calc_attn(q, k, v, key, overlap=overlap)
    (mine,) = report.ranks
    return {
        "text": str(report),
        "ratio": mine.overlap_ratio,
        "communication": mine.communication_ms,
        "stages": {x.name: (x.communication_ms, x.overlap_ratio) for x in mine.stages},
    }


def barrier_beside_nccl(rank: int) -> tuple[list[bool], int, int]:
    """Whether results with a barrier are those without; misses; kernels of it, forward and back."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    group = dist.new_group([rank], backend="nccl")
    key = flex_key(masks.causal(4096), degree=2, group=group, cost=FREE)
    q, k, v = (
        torch.randn(4096, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    results = []
    for barrier in (False, True):
        out, meta = calc_attn(q, k, v, key, overlap=OverlapConfig(barrier=barrier))
        results.append((out, meta.lse, *torch.autograd.grad(out.float().sum(), (q, k, v))))
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    before = barrier_misses()
    with torch.profiler.profile(activities=activities) as profiler:
        out, _ = calc_attn(q, k, v, key, overlap=OverlapConfig(barrier=True))
        out.float().sum().backward()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    waits = sum("wait_kernel" in name for name in names)
    equal = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
    return equal, barrier_misses() - before, waits
