"""Kernels that say where and when they ran, for `keel overlap lab`.

Every block writes its first and last moment on the GPU's clock and the number of its SM, so that it
is seen, not inferred, what ran beside what. NVIDIA only: the clock is read in PTX.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from keel._versions import fp_fusion
from keel.kernels import flash_fwd
from keel.kernels.flash_common import SIZES, num_sms, work_counter
from keel.kernels.flash_fwd import flash_fwd_kernel
from keel.kernels.launch import Prepared, Tensors
from keel.masks import AttnMask
from keel.meta import Scoring

RECORD_SIZE = 4
"""int64 numbers of a block: begin and end in nanoseconds, SM, chunks moved."""
TRAFFIC_WARPS = 16
CHUNK = 32_768
"""Words that a block has in its registers at a time: 64 for each of 512 threads, so that an SM has
room for one block, as with collectives."""


# fmt: off
@triton.jit
def record_begin(RECORD):
    """Thread 0 of each block, also of each block of a cluster, writes the time and its SM."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread, block, sm;
        .reg .b64 place, now, wide;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        mov.u32 block, %ctaid.x;
        mad.wide.u32 place, block, 32, $1;
        mov.u64 now, %globaltimer;
        mov.u32 sm, %smid;
        cvt.u64.u32 wide, sm;
        @first st.global.b64 [place], now;
        @first st.global.b64 [place + 16], wide;
        mov.b32 $0, 0;
        }""",
        "=r,l", [RECORD.to(tl.int64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def record_end(RECORD, chunks):
    tl.debug_barrier()  # all warps are done
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread, block;
        .reg .b64 place, now, wide;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        mov.u32 block, %ctaid.x;
        mad.wide.u32 place, block, 32, $1;
        mov.u64 now, %globaltimer;
        cvt.u64.u32 wide, $2;
        @first st.global.b64 [place + 8], now;
        @first st.global.b64 [place + 24], wide;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [RECORD.to(tl.int64, bitcast=True), chunks],
        dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def mark_block(FLAG):
    """`mark_started`, once for each block of a cluster as well."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first red.release.gpu.global.add.u64 [$1], 1;
        mov.b32 $0, 0;
        }""",
        "=r,l", [FLAG.to(tl.int64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def sleep_until(moment):
    """The time, when it is at least `moment`."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred reached;
        AGAIN:
        mov.u64 $0, %globaltimer;
        setp.ge.s64 reached, $0, $1;
        @reached bra DONE;
        nanosleep.u32 100;
        bra AGAIN;
        DONE:
        }""",
        "=&l,l", [moment], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["span_ns", "period_ns", "num_chunks"])
def traffic_kernel(
    FROM, TO, RECORD, FLAG, span_ns, period_ns, num_chunks,
    CHUNK: tl.constexpr, MARKS: tl.constexpr,
):
    """Communication as a GPU sees it: blocks that move a chunk each `period_ns`, for a set time.

    Loops end when each thread likes: nothing inside brings threads together.
    """
    if MARKS:
        mark_block(FLAG)
    record_begin(RECORD)
    begin = sleep_until(tl.zeros([], tl.int64))
    now = begin
    place = tl.program_id(0)
    chunks = tl.zeros([], tl.int32)
    while now - begin < span_ns:
        at = (place % num_chunks).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        tl.store(TO + at, tl.load(FROM + at))
        place += tl.num_programs(0)
        chunks += 1
        now = sleep_until(begin + chunks.to(tl.int64) * period_ns)
    record_end(RECORD, chunks)


@triton.jit(do_not_specialize=SIZES)
def observed_fwd_kernel(
    RECORD, Q, K, V, OUT, LSE, MAX_LOGITS, SINK, BIAS, SLOPES, OFFSET,
    ORDER, PTR, SPLIT, RUNS, ROW_LO, ROW_HI, COUNTER,
    scale, softcap, tq, tk, num_tiles, section, num_heads, group, num_work,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    stride_bh, stride_bi, stride_bj,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_SINK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WANT_MAX: tl.constexpr,
    ACCUMULATE: tl.constexpr, PERSISTENT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, PTX: tl.constexpr,
):
    """Keel's forward, with a note before and behind it."""
    record_begin(RECORD)
    flash_fwd_kernel(
        Q, K, V, OUT, LSE, MAX_LOGITS, SINK, BIAS, SLOPES, OFFSET,
        ORDER, PTR, SPLIT, RUNS, ROW_LO, ROW_HI, COUNTER,
        scale, softcap, tq, tk, num_tiles, section, num_heads, group, num_work,
        stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
        stride_bh, stride_bi, stride_bj,
        D, DV, BLOCK_D, BLOCK_DV, BM, BN, HAS_SINK, HAS_BIAS, HAS_ALIBI,
        HAS_OFFSET, HAS_SOFTCAP, WANT_MAX, ACCUMULATE, PERSISTENT, PRECISION, TMA, PTX)
    record_end(RECORD, 0)


# fmt: on


class ObservedAttention:
    """Keel's forward, prepared once; a call launches it on the current stream."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: AttnMask,
        *,
        persistent: bool,
        sm_margin: int = 0,
    ) -> None:
        """q, k, v: (tokens, heads, dim). Persistent: one block an SM but the margin's, to the end.

        The library itself is persistent with a margin, and has a block for each tile without one.
        """
        if sm_margin and not persistent:
            raise ValueError("only a persistent grid can leave SMs free")
        self.out = q.new_empty(*q.shape[:2], v.shape[2])
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        scoring = Scoring(scale=q.shape[2] ** -0.5)
        prepared = flash_fwd._prepare(
            *(q, k, v, mask, scoring, self.out, None), False, sm_margin, None
        )
        assert prepared is not None, "there is nothing to attend to"
        grid = (num_sms(q.device) - sm_margin,) if persistent else prepared.grid
        self._prepared = replace(
            prepared, grid=grid, arguments={**prepared.arguments, "PERSISTENT": persistent}
        )
        self.record = new_record(grid[0], q.device)
        absent: Tensors = dict.fromkeys(("MAX_LOGITS", "SINK", "BIAS", "SLOPES", "OFFSET"))
        self._tensors: Tensors = {"RECORD": self.record, "Q": q, "K": k, "V": v, **absent}
        self._tensors |= {"OUT": self.out, "LSE": lse}
        self._tensors["COUNTER"] = work_counter(1 if persistent else 0, q.device)

    def __call__(self) -> Any:
        counter = self._tensors["COUNTER"]
        if counter is not None:
            counter.zero_()
        return _start(observed_fwd_kernel, self._prepared, self._tensors)


class Traffic:
    """Blocks that move bytes for a set time; a call launches them on the current stream."""

    def __init__(
        self,
        blocks: int,
        *,
        span_us: float,
        gb_per_s: float,
        device: torch.device,
        cluster: int = 1,
        flag: torch.Tensor | None = None,
        megabytes: int = 64,
    ) -> None:
        """`gb_per_s`: of all blocks together, each byte read once and written once."""
        if blocks % cluster:
            raise ValueError(f"{blocks} blocks are no whole clusters of {cluster}")
        words = CHUNK * cluster
        num_chunks = max(1, megabytes * 2**20 // (4 * words))
        self.record = new_record(blocks, device)
        self._chunk_bytes = 4 * CHUNK
        arguments = {
            "span_ns": round(1000 * span_us),
            "period_ns": round(self._chunk_bytes * blocks / gb_per_s),
            "num_chunks": num_chunks,
            **{"CHUNK": words, "MARKS": flag is not None},
        }
        self._prepared = Prepared((blocks // cluster,), arguments, num_warps=TRAFFIC_WARPS)
        data = torch.zeros(2, num_chunks * words, dtype=torch.int32, device=device)
        self._tensors: Tensors = {"FROM": data[0], "TO": data[1], "RECORD": self.record}
        self._tensors["FLAG"] = flag
        self._cluster = cluster

    def __call__(self) -> Any:
        return _start(traffic_kernel, self._prepared, self._tensors, num_ctas=self._cluster)

    def bytes_moved(self) -> int:
        """By the last call; the host waits."""
        return int(self.record[:, 3].sum()) * self._chunk_bytes


def new_record(blocks: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(blocks, RECORD_SIZE, dtype=torch.int64, device=device)


def _start(kernel: Any, prepared: Prepared, tensors: Tensors, **options: Any) -> Any:
    """Launches, and gives the compiled kernel, which knows its registers and shared memory."""
    arguments: dict[str, Any] = {**prepared.arguments}
    for name, x in tensors.items():
        describe = prepared.streamed.get(name)
        arguments[name] = x if describe is None or x is None else describe(x)
    return kernel[prepared.grid](
        *(arguments[name] for name in kernel.arg_names),
        num_warps=prepared.num_warps,
        num_stages=prepared.num_stages,
        enable_fp_fusion=fp_fusion(),
        **options,
    )
