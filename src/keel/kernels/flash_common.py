"""What the portable Triton kernels share: score arithmetic, atomic maximum, plans on a device.

Names in kernels: i over rows (queries), j over columns (keys); `2` marks log2 units; capitals are
compile-time constants and pointers.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from keel.kernels.launch import INTERPRETED, Tensors
from keel.masks import AttnMask
from keel.meta import Scoring
from keel.tiling import TilePlan, TileWork, draw_row_sets, plan_tiles

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

HAS_PTX = not INTERPRETED and torch.version.hip is None

RAISE_MAX = tl.constexpr("""{
    .reg .pred higher, any_higher, first, negative, positive;
    .reg .b32 bits, flip, lane;
    setp.gtu.f32 higher, $2, $3;
    vote.sync.any.pred any_higher, higher, 0xffffffff;
    @!any_higher bra DONE;
    mov.b32 bits, $2;
    shr.s32 flip, bits, 31;
    and.b32 flip, flip, 0x7fffffff;
    xor.b32 bits, bits, flip;
    redux.sync.max.s32 bits, bits, 0xffffffff;
    shr.s32 flip, bits, 31;
    and.b32 flip, flip, 0x7fffffff;
    xor.b32 bits, bits, flip;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    setp.lt.and.s32 negative, bits, 0, first;
    setp.ge.and.s32 positive, bits, 0, first;
    @positive red.relaxed.gpu.global.max.s32 [$1], bits;
    @negative red.relaxed.gpu.global.min.u32 [$1], bits;
    DONE:
    mov.b32 $0, 0;
}""")
"""PTX of `raise_max`: $1 is raised to the warp's highest $2 unless all are at most $3."""

SIZES = ["tq", "tk", "num_tiles", "section", "num_heads", "group", "num_work"]
"""Kernel arguments that change with the data: one compiled variant serves all their values."""


@triton.jit
def tanh(x):
    # exp overflows to inf for large x, which gives the right limit 1.
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))


# fmt: off
@triton.jit
def load_tile(
    SOURCE, first, column, stride, limit,
    N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows first..first+N of one head, (N, BLOCK_D); zeros beyond `limit` rows and D columns.

    SOURCE is a pointer, or with TMA a descriptor of (tokens, heads * D); `column` is the offset
    of the head in either.
    """
    if TMA:
        return SOURCE.load([first, column])
    else:
        row = first + tl.arange(0, N)
        d = tl.arange(0, BLOCK_D)
        pointers = SOURCE + column + row.to(tl.int64)[:, None] * stride + d[None, :]
        if MASKED and D != BLOCK_D:
            return tl.load(pointers, mask=(row < limit)[:, None] & (d < D)[None, :], other=0.0)
        elif MASKED:
            return tl.load(pointers, mask=(row < limit)[:, None], other=0.0)
        elif D != BLOCK_D:
            return tl.load(pointers, mask=(d < D)[None, :], other=0.0)
        else:
            return tl.load(pointers)
# fmt: on


@triton.jit
def store_rows(BASE, value, row, stride, limit, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    pointers = BASE + row.to(tl.int64)[:, None] * stride + d[None, :]
    keep = (row < limit)[:, None] & (d < D)[None, :]
    tl.store(pointers, value.to(BASE.dtype.element_ty), mask=keep)


@triton.jit
def add_bias(
    s,
    i,
    j,
    position,
    slope,
    BIAS,
    stride_bi,
    stride_bj,
    tq,
    tk,
    HAS_BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Adds bias and ALiBi to scaled scores; i, j and position broadcast to the shape of s."""
    if HAS_BIAS:
        place = i.to(tl.int64) * stride_bi + j.to(tl.int64) * stride_bj
        s += tl.load(BIAS + place, mask=(i < tq) & (j < tk), other=0.0).to(tl.float32)
    if HAS_ALIBI:
        s -= slope * tl.abs(position - j).to(tl.float32)
    return s


@triton.jit
def raise_max(POINTER, seen, value, PTX: tl.constexpr):
    """Raises one float to the maximum of a tile's; exact, order-free, and a NaN stays for good.

    The bits of non-negative floats order like integers, those of negative ones the other way, as
    unsigned integers. `seen` is what POINTER held when the program started. It only grows, so a
    warp whose values are all lower is done, and nearly all are: on NVIDIA this takes a compare
    and a vote, where `tl.max` and `tl.atomic_max` would bring the warps together with barriers
    that short tiles feel.
    """
    value = value + 0.0  # -0.0 would order below negative numbers
    if PTX:
        place = POINTER + tl.zeros_like(value).to(tl.int32)
        tl.inline_asm_elementwise(
            RAISE_MAX,
            "=r,l,f,f",
            [place.to(tl.int64, bitcast=True), value, seen + tl.zeros_like(value)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        bits = value.to(tl.int32, bitcast=True)
        top = tl.max(bits ^ ((bits >> 31) & 0x7FFFFFFF), 0)  # in the order of floats, NaN on top
        bits = top ^ ((top >> 31) & 0x7FFFFFFF)
        signed = POINTER.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_max(signed, bits, mask=top >= 0, sem="relaxed")
        unsigned = POINTER.to(tl.pointer_type(tl.uint32), bitcast=True)
        tl.atomic_min(unsigned, bits.to(tl.uint32, bitcast=True), mask=top < 0, sem="relaxed")


def score_tensors(scoring: Scoring) -> Tensors:
    """Kernel pointers of the score."""
    return {
        "BIAS": scoring.bias,
        "SLOPES": scoring.alibi_slopes,
        "OFFSET": scoring.alibi_offset,
    }


def score_arguments(scoring: Scoring, hq: int, tq: int, tk: int) -> dict[str, Any]:
    """The other kernel arguments of the score: numbers and compile-time flags."""
    bias = scoring.bias
    strides = (0, 0, 0) if bias is None else bias.expand(hq, tq, tk).stride()
    return {
        **{"scale": scoring.scale, "softcap": scoring.softcap},
        **dict(zip(("stride_bh", "stride_bi", "stride_bj"), strides, strict=True)),
        "HAS_BIAS": bias is not None,
        "HAS_ALIBI": scoring.alibi_slopes is not None,
        "HAS_OFFSET": scoring.alibi_offset is not None,
        "HAS_SOFTCAP": scoring.softcap > 0,
    }


def strides(**tensors: torch.Tensor) -> dict[str, int]:
    """stride_<name>t and stride_<name>h of (tokens, heads, dim) tensors."""
    found = {}
    for name, x in tensors.items():
        found[f"stride_{name}t"], found[f"stride_{name}h"] = x.stride(0), x.stride(1)
    return found


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Shape of one kernel's tiles, how many warps and stages work on them, and how they load."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    """Stream tiles with the tensor memory accelerator where shapes and strides allow."""


def padded(dim: int) -> int:
    """Block width for a head dim: tensor cores want powers of two from 16 on."""
    return max(16, triton.next_power_of_2(dim))


def can_use_tma(*tensors: torch.Tensor) -> bool:
    """Whether (tokens, heads, dim) tensors are matrices (tokens, heads * dim) in TMA's terms."""
    return all(
        x.stride(1) == x.shape[2] == padded(x.shape[2])
        and x.stride(0) * x.element_size() % 16 == 0
        and x.stride(0) >= x.shape[1] * x.shape[2]
        and x.data_ptr() % 16 == 0
        for x in tensors
    )


_device_plans: weakref.WeakKeyDictionary[TilePlan, dict[Any, dict[str, torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)


def device_plan(
    mask: AttnMask,
    block_m: int,
    block_n: int,
    side: Literal["q", "k"],
    device: torch.device,
) -> tuple[TilePlan, dict[str, torch.Tensor]]:
    """The plan, and the arrays of one side as kernel arguments, copied to the device once."""
    plan = plan_tiles(mask, block_m, block_n)
    on_devices = _device_plans.setdefault(plan, {})
    if (device, side) not in on_devices:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "this mask was never used on this device, and its tile plan cannot be copied "
                "there during CUDA graph capture: call the attention once before capturing"
            )
        buffer, places = plan.pack(side)
        packed = torch.from_numpy(buffer).to(device)
        arrays = {
            name.upper(): packed[offset : offset + max(length, 1)]
            for name, (offset, length) in places.items()
        }
        offset, length = places["ramps"]
        ramps = packed[offset : offset + length].view(-1, plan.ramps.shape[1])
        lo, hi = draw_row_sets(ramps, plan.num_row_sets, plan.block_m)
        if device.type == "cuda":  # other streams will read it without asking
            torch.cuda.current_stream(device).synchronize()
        del arrays["RAMPS"]
        if side == "q":  # its runs name row sets themselves
            del arrays["SET_BASE"]
        on_devices[device, side] = {**arrays, "ROW_LO": lo, "ROW_HI": hi}
    return plan, on_devices[device, side]


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors; the interpreter counts as a GPU with 4."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have; the interpreter counts as an sm_90."""
    if device.type != "cuda":
        return 232_448
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


@functools.cache
def l2_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 22
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def has_small_smem(capability: tuple[int, int]) -> bool:
    """Architectures with about 100 KiB of shared memory per SM."""
    return capability in ((8, 6), (8, 9), (12, 0), (12, 1))


def keys_per_row(mask: AttnMask, scoring: Scoring) -> float:
    """Keys that a query sees on average: what tile sizes are chosen by.

    Bias, ALiBi and softcap need registers and shared memory of their own, which only the small
    tiles of narrow rows leave free.
    """
    plain = scoring.bias is None and scoring.alibi_slopes is None and scoring.softcap == 0
    return mask.area() / max(mask.tq, 1) if plain else 0.0


def fitted(config: TileConfig, has_bias: bool) -> TileConfig:
    """A stage less where tiles of a bias are buffered beside keys and values."""
    return replace(config, num_stages=max(1, config.num_stages - 1)) if has_bias else config


def section_heads(
    num_heads: int,
    num_kv_heads: int,
    head_bytes: int,
    tile_work: TileWork,
    device: torch.device,
) -> int:
    """Query heads worked on together, longest tiles first.

    As many as keep what they stream (head_bytes for each key head) in half the L2. But where
    tiles differ and there are few of them per SM, all heads: a long tile of the last section
    would otherwise start late and finish alone.
    """
    group = num_heads // num_kv_heads
    programs = 2 * num_sms(device)  # about two fit on an SM
    if not tile_work.is_even and tile_work.longest * programs > 0.2 * tile_work.total * num_heads:
        return num_heads
    fitting = max(1, (l2_bytes(device) // 2) // max(head_bytes, 1))
    best = max(n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and n <= fitting)
    return best * group


def work_counter(
    sm_margin: int, device: torch.device, stream: int | None = None
) -> torch.Tensor | None:
    """What a persistent grid draws work from; None without a margin.

    The hardware starts programs in order, so without a margin the longest-first list needs no
    counter. With one, programs draw items and no more run than SMs are allowed.
    """
    return torch.zeros(1, dtype=torch.int32, device=device) if sm_margin else None


def grid_size(num_work: int, sm_margin: int, device: torch.device) -> int:
    """One program per work item; with a margin, a persistent grid on fewer SMs."""
    return min(num_work, num_sms(device) - sm_margin) if sm_margin else num_work
