"""What TMA does at places that the Hopper backward met: each case in its own process (Triton 3.6).

PYTHONPATH=src python gpu_probe_bwd.py

One line per case. Expected: numbers at a coordinate that is no multiple of 16 bytes trap, the rest
is fine. Whether places outside of a tensor altogether are fine decides if the kernel's guards
against them are needed.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from keel._versions import tma_add, tma_load, tma_store

CASES = {
    "numbers at 0": ("numbers", 0),
    "numbers at 4 (16 bytes)": ("numbers", 4),
    "numbers at 1 (4 bytes)": ("numbers", 1),
    "numbers at 2 (8 bytes)": ("numbers", 2),
    "numbers at 604": ("numbers", 604),
    "rows at 1": ("rows", 1),
    "rows over the end": ("rows", 90),
    "rows outside": ("rows", 150),
    "store over the end": ("store", 90),
    "store outside": ("store", 150),
    "add over the end": ("add", 90),
    "add outside": ("add", 150),
    "add at 1": ("add", 1),
}
ROWS = 100


@gluon.jit(do_not_specialize=["place"])
def numbers_kernel(X, OUT, place):
    stage = gl.allocate_shared_memory(gl.float32, [64], X.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, 1)
    fence_async_shared()
    mbarrier.expect(full, 256)
    tma_load(X, [place], full, stage)
    mbarrier.wait(full, 0)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(OUT + gl.arange(0, 64, layout), stage.load(layout))


@gluon.jit(do_not_specialize=["place"])
def rows_kernel(X, OUT, place):
    stage = gl.allocate_shared_memory(gl.float32, [64, 1, 32], X.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, 1)
    fence_async_shared()
    mbarrier.expect(full, 64 * 32 * 4)
    tma_load(X, [place, 1, 0], full, stage)
    mbarrier.wait(full, 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
    gl.store(OUT + row * 32 + column, stage.reshape([64, 32]).load(layout))


@gluon.jit(do_not_specialize=["place"])
def write_kernel(X, place, ADD: gl.constexpr):
    stage = gl.allocate_shared_memory(gl.float32, [64, 1, 32], X.layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    stage.reshape([64, 32]).store(gl.full([64, 32], 3.0, gl.float32, layout))
    fence_async_shared()
    if ADD:
        tma_add(X, [place, 1, 0], stage)
    else:
        tma_store(X, [place, 1, 0], stage)
    tma.store_wait(0)


def run(kind: str, place: int) -> None:
    if kind == "numbers":
        x = torch.arange(2125, device="cuda", dtype=torch.float32)
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
        out = torch.empty(64, device="cuda")
        numbers_kernel[(1,)](TensorDescriptor(x, [2125], [1], [64], layout), out, place)
        want = x[place : place + 64]
    else:
        x = torch.randn(ROWS + 100, 2, 32, device="cuda")  # what lies behind must stay
        before = x.clone()
        layout = gl.NVMMASharedLayout.get_default_for([64, 1, 32], gl.float32)
        described = TensorDescriptor(x, [ROWS, 2, 32], [64, 32, 1], [64, 1, 32], layout)
        there = max(0, min(64, ROWS - place))
        if kind == "rows":
            out = torch.empty(64, 32, device="cuda")
            rows_kernel[(1,)](described, out, place)
            want = torch.zeros(64, 32, device="cuda")
            want[:there] = x[place : place + there, 1]
        else:
            write_kernel[(1,)](described, place, kind == "add")
            out, want = x, before
            rows = slice(place, place + there)
            want[rows, 1] = want[rows, 1] + 3 if kind == "add" else 3.0
    torch.cuda.synchronize()
    print("right" if torch.equal(out, want) else "WRONG NUMBERS")


def one(name: str) -> str:
    command = [sys.executable, __file__, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    except subprocess.TimeoutExpired:
        return f"{name:26s} HANGS"
    if done.returncode == 0:
        return f"{name:26s} {done.stdout.strip()}"
    lines = [x for x in done.stderr.splitlines() if "rror" in x] or ["no word"]
    return f"{name:26s} DIES: {lines[0][:150]}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(*CASES[sys.argv[1]])
    else:
        with ThreadPoolExecutor(7) as pool:
            for line in pool.map(one, CASES):
                print(line, flush=True)
