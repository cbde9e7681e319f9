"""Each head's largest logit without attention: the products q·k of a tile plan, and their maxima.

For models whose attention runs elsewhere. One program owns one (q tile, head) and walks the same
runs as the forward, without softmax and without values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from keel.kernels.flash_common import (
    HAS_PTX,
    SIZES,
    TileConfig,
    can_use_tma,
    compute_capability,
    device_plan,
    load_tile,
    padded,
    raise_max,
    section_heads,
    strides,
)
from keel.kernels.launch import Prepared, launch, rows_of_heads
from keel.masks import AttnMask

# fmt: off


@triton.jit
def _visit(
    top, total, q, lo, hi, kt, k_column, K, stride_kt, tk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):
    """Raises each row's maximum of q·k by one k tile; the sums are there to keep NaNs."""
    k = load_tile(K, kt * BN, k_column, stride_kt, tk, BN, D, BLOCK_D, MASKED, TMA)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    if MASKED:
        j = kt * BN + tl.arange(0, BN)
        keep = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
        total += tl.sum(tl.where(keep, s, 0.0), 1)
        s = tl.where(keep, s, float("-inf"))
    else:
        total += tl.sum(s, 1)
    return tl.maximum(top, tl.max(s, 1)), total


@triton.jit(do_not_specialize=SIZES)
def qk_max_kernel(
    Q, K, MAX_LOGITS, ORDER, PTR, SPLIT, RUNS, ROW_LO, ROW_HI,
    scale, tq, tk, num_tiles, section, group,
    stride_qt, stride_qh, stride_kt, stride_kh,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, PTX: tl.constexpr,
):
    work = tl.program_id(0)
    in_section = work % (num_tiles * section)
    head = (work // (num_tiles * section)) * section + in_section % section
    tile = tl.load(ORDER + in_section // section)
    first, split, last = tl.load(PTR + tile), tl.load(SPLIT + tile), tl.load(PTR + tile + 1)
    if TMA:
        k_column = (head // group) * D
    else:
        k_column = (head // group).to(tl.int64) * stride_kh
    q_column = head.to(tl.int64) * stride_qh
    q = load_tile(Q, tile * BM, q_column, stride_qt, tq, BM, D, BLOCK_D, True, False)
    seen_top = tl.load(MAX_LOGITS + head)
    i = tile * BM + tl.arange(0, BM)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for run in range(first, split):
        begin, end = tl.load(RUNS + run * 3), tl.load(RUNS + run * 3 + 1)
        rows = tl.load(RUNS + run * 3 + 2).to(tl.int64) * BM + tl.arange(0, BM)
        lo, hi = tl.load(ROW_LO + rows), tl.load(ROW_HI + rows)
        for kt in range(begin, end):
            top, total = _visit(top, total, q, lo, hi, kt, k_column, K, stride_kt, tk,
                                D, BLOCK_D, BN, True, PRECISION, TMA)
    for run in range(split, last):
        begin, end = tl.load(RUNS + run * 3), tl.load(RUNS + run * 3 + 1)
        for kt in range(begin, end):
            top, total = _visit(top, total, q, i, i, kt, k_column, K, stride_kt, tk,
                                D, BLOCK_D, BN, False, PRECISION, TMA)
    top = tl.where(total == total, top * scale, float("nan"))
    raise_max(MAX_LOGITS + head, seen_top, top, PTX)


# fmt: on


def choose_config(capability: tuple[int, int], block_d: int, dtype: torch.dtype) -> TileConfig:
    """Without values there is room for wide tiles of keys."""
    if dtype == torch.float32:
        return TileConfig(64 if block_d <= 128 else 32, 32, 4, 2)
    tma = capability >= (9, 0)
    if block_d <= 128:
        return TileConfig(128, 128 if tma else 64, 8, 3, tma)
    return TileConfig(64, 64, 4, 2, tma)


def max_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: AttnMask,
    scale: float,
    *,
    out: torch.Tensor,
    config: TileConfig | None = None,
) -> None:
    """Raises out (hq,) fp32 to the largest scale * q·k of each head; the scale is positive.

    q (tq, hq, d), k (tk, hk, d), last dims contiguous. A NaN among seen pairs makes its head NaN,
    as may an infinity.
    """
    launch(
        qk_max_kernel,
        (mask, scale, config),
        {"Q": q, "K": k, "MAX_LOGITS": out},
        lambda: _prepare(q, k, mask, scale, config),
    )


def _prepare(
    q: torch.Tensor, k: torch.Tensor, mask: AttnMask, scale: float, config: TileConfig | None
) -> Prepared | None:
    (tq, hq, d), (tk, hk, _) = q.shape, k.shape
    block_d = padded(d)
    if config is None:
        config = choose_config(compute_capability(q.device), block_d, q.dtype)
    plan, arrays = device_plan(mask, config.block_m, config.block_n, "q", q.device)
    if plan.num_q_tiles == 0 or tk == 0:
        return None
    tma = config.tma and can_use_tma(k)
    key_bytes = tk * d * k.element_size()
    arguments = {
        **arrays,
        **{"scale": scale, "tq": tq, "tk": tk, "num_tiles": plan.num_q_tiles, "group": hq // hk},
        "section": section_heads(hq, hk, key_bytes, plan.q.work, q.device),
        **strides(q=q, k=k),
        **{"D": d, "BLOCK_D": block_d, "BM": config.block_m, "BN": config.block_n},
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        **{"TMA": tma, "PTX": HAS_PTX},
    }
    return Prepared(
        (plan.num_q_tiles * hq,),
        arguments,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        streamed={"K": rows_of_heads(config.block_n)} if tma else {},
    )
