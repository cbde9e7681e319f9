"""Real kernels and Triton's real launcher on a CUDA driver that only notes what is launched.

Run as a program by tests/kernels/test_straight.py, with fake_libcuda.c as libcuda.so.1. Each launch
is made through Triton's Python and past it; both must hand the driver the same bytes, but for the
addresses of what a call allocates. Prints one JSON line per comparison.
"""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from compile_hopper_bwd import chain_of
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver

from keel import direct, flex_flash_attn_func, masks, ops, tile_parts
from keel.kernels import (
    flash_bwd,
    flash_common,
    flash_fwd,
    hopper_bwd_launch,
    hopper_dq_launch,
    hopper_launch,
    launch,
    steps,
)
from keel.meta import Scoring

CUDA = ctypes.CDLL("libcuda.so.1")
STREAM = 7
SIZES = {"i1": 1, "i32": 4, "i64": 8, "fp32": 4}


class Driver(driver.CudaDriver):
    """Triton's own, for an H200 that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device=None: STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def pretend() -> None:
    """CPU tensors count as those of the device."""
    triton.runtime.driver.set_active(Driver())
    ops._triton_problem = lambda device, dtype: None
    hopper_launch.machine_problem = lambda device: None
    torch.cuda.is_current_stream_capturing = lambda: False
    for module in (launch, direct, hopper_launch):
        module.launch_stream = lambda index: STREAM
    hopper = (hopper_launch, hopper_bwd_launch, hopper_dq_launch)
    for module in (flash_common, flash_fwd, flash_bwd, *hopper):
        if hasattr(module, "num_sms"):
            module.num_sms = lambda device: 132
        if hasattr(module, "compute_capability"):
            module.compute_capability = lambda device: (9, 0)


def check_chain(compiled: Any) -> None:
    """Who begins early waits, sums and dk and dv before anything else; nobody else does
    (`early_launches`)."""
    name, chain = compiled.metadata.name, chain_of(compiled.asm["ptx"])
    assert compiled.metadata.launch_pdl == ("wait" in chain), (name, chain)
    if "wait" in chain and name != "hopper_bwd_dq_kernel":
        assert chain[0] == "wait", (name, chain)


def note_sizes() -> None:
    """Tells the driver of each function's parameters once it is compiled."""
    find = launch.c_launcher

    def found(compiled: Any, grid: Any) -> Any:
        launcher = find(compiled, grid)
        assert launcher is not None, f"Triton {triton.__version__} has no launcher that we know"
        check_chain(compiled)
        sizes: list[int] = []
        for kind in compiled.src.signature.values():
            if kind.startswith("tensordesc"):
                rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
                sizes += [128, *[4] * rank, *[8] * rank]
            elif kind != "constexpr":
                sizes.append(8 if kind.startswith("*") else SIZES[kind])
        sizes += [8, 8]  # scratch
        CUDA.fake_set_sizes(
            ctypes.c_uint64(compiled.function), len(sizes), (ctypes.c_int * len(sizes))(*sizes)
        )
        return launcher

    launch.c_launcher = found


def launched() -> bytes:
    buffer = (ctypes.c_ubyte * (1 << 20))()
    count = CUDA.fake_take_record(buffer)
    return bytes(buffer[:count])


def took_launches() -> tuple[str, str]:
    buffers = [ctypes.create_string_buffer(64) for _ in range(2)]
    count = CUDA.fake_take_launches(*buffers)
    early, clusters = (buffer.raw[:count].decode() for buffer in buffers)
    return early, clusters


def compare(name: str, call: Callable[[], list[torch.Tensor]]) -> None:
    """`call` gives all that it allocates and hands out."""
    call()
    call()
    records, results, launches = [], [], []
    for hooked in (True, False):
        launch.has_launch_hooks = lambda hooked=hooked: hooked
        launched()
        took_launches()
        results.append(call())
        records.append(launched())
        launches.append(took_launches())
    ordinary, straight = records
    for x, y in zip(*results, strict=True):
        old, new = (t.data_ptr().to_bytes(8, "little") for t in (x, y))
        assert old in ordinary and new in straight, f"{name}: an address is not there"
        ordinary = ordinary.replace(old, new)
    same = ordinary == straight and launches[0] == launches[1]
    before = CUDA.fake_num_encoded()
    for _ in range(3):
        del results[:]
        results.append(call())
    encoded = CUDA.fake_num_encoded() - before
    line = {"call": name, "bytes": len(straight), "same": same, "encoded": encoded}
    line["early"], line["clusters"] = launches[-1]
    print(json.dumps(line | {"triton": triton.__version__}), flush=True)


def main() -> None:
    pretend()
    note_sizes()
    q, k, v = (torch.randn(640, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    # of the first, the Hopper forward cuts tiles into parts, if that is cheap; of the second, none
    tile_parts.MEET_TIME, tile_parts.WORTH_IT = 1.0, 1.05
    mask, blocks = masks.causal(640), masks.documents(range(0, 641, 128))
    sink = torch.zeros(8)
    kept: dict[int, Any] = {}
    between = hopper_launch.between_parts
    hopper_launch.between_parts = lambda numbers, *where: kept.setdefault(
        numbers, between(numbers, *where)
    )
    for backend in ("triton", "hopper"):

        def forward(mask: Any = mask, backend: str = backend, **options: Any) -> list[torch.Tensor]:
            out, meta = flex_flash_attn_func(q, k, v, mask, backend=backend, **options)
            return [x for x in (out, meta.lse, meta.max_logits) if x is not None]

        compare(f"{backend} forward", forward)
        compare(
            f"{backend} sink",
            lambda forward=forward: forward(blocks, sink=sink, softcap=3.0, return_max_logits=True),
        )
    short, seen = torch.randn(16, 64, 64, dtype=torch.bfloat16), masks.full(16, 8192)
    long = torch.randn(8192, 8, 64, dtype=torch.bfloat16)

    def packed() -> list[torch.Tensor]:
        out, meta = flex_flash_attn_func(short, long, long, seen, backend="hopper")
        return [out, meta.lse]

    assert hopper_launch._tiles_for(short, long, seen, Scoring(scale=1.0), None).pack == 8
    compare("hopper packed", packed)
    assert [bool(numbers) for numbers in kept] == [True, False, True]
    narrow = [x.requires_grad_() for x in (q, k, v)]
    wide = [
        torch.randn(640, heads, dim, dtype=torch.bfloat16, requires_grad=True)
        for heads, dim in ((8, 192), (2, 192), (2, 128))
    ]
    steps.torch = _Torch()
    for name, given, parts, options in (
        ("triton", narrow, 1, {}),
        ("hopper", narrow, 1, {}),
        ("hopper", narrow, 2, {"sm_margin": 4}),
        ("hopper", narrow, 2, {"deterministic": True}),
        ("hopper wide", wide, 1, {"softcap": 3.0}),
    ):
        hopper_bwd_launch._splits_for = lambda *args, parts=parts: parts
        direct._known.clear()
        out, _ = flex_flash_attn_func(*given, mask, backend=name.split()[0], **options)
        dout = torch.randn_like(out)
        compare(
            " ".join([name, "backward", *options]),
            lambda given=given, out=out, dout=dout: list(
                torch.autograd.grad(out, given, dout, retain_graph=True)
            ),
        )


class _Torch:
    """torch where what lies in fp32 between launches stays in place."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], Iterator[torch.Tensor]] = {}

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        if dtype != torch.float32:
            return torch.empty(shape, dtype=dtype, device=device)
        if shape not in self._places:
            number = 2 if len(shape) == 2 or shape[1] == 4 else 1  # two row vectors, dk and dv
            self._places[shape] = itertools.cycle([torch.empty(shape) for _ in range(number)])
        return next(self._places[shape])

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


if __name__ == "__main__":
    main()
