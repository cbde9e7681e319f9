"""Portable Triton forward: out, lse and per-head max logits in one pass over the tile plan.

One program owns one (q tile, head): no locks, no atomics but the order-free maximum, so the
result is deterministic. Partial runs come first, so the long unmasked run needs no mask code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from keel.kernels.flash_common import (
    HAS_PTX,
    LN2,
    LOG2E,
    SIZES,
    TileConfig,
    add_bias,
    can_use_tma,
    compute_capability,
    device_plan,
    fitted,
    grid_size,
    has_small_smem,
    keys_per_row,
    load_tile,
    padded,
    raise_max,
    score_arguments,
    score_tensors,
    section_heads,
    store_rows,
    strides,
    tanh,
    work_counter,
)
from keel.kernels.launch import Prepared, Recipe, launch, rows_of_heads
from keel.masks import AttnMask
from keel.meta import Scoring

# fmt: off
# Device code keeps its long argument lists in rows; the launcher below passes them by name.


@triton.jit
def _visit(
    acc, total, top2, raw_top, q, i, lo, hi, kt, position, slope, k_column, v_column,
    K, V, BIAS, stride_kt, stride_vt, stride_bi, stride_bj, scale, softcap, tq, tk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BN: tl.constexpr, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, WANT_MAX: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """One block of the online softmax: keys of k tile kt against the rows held in q."""
    j = kt * BN + tl.arange(0, BN)
    k = load_tile(K, kt * BN, k_column, stride_kt, tk, BN, D, BLOCK_D, MASKED, TMA)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    scale2 = scale * LOG2E
    if MASKED:
        keep = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
    if HAS_BIAS or HAS_ALIBI or HAS_SOFTCAP:
        s = add_bias(s * scale, i[:, None], j[None, :], position[:, None], slope,
                     BIAS, stride_bi, stride_bj, tq, tk, HAS_BIAS, HAS_ALIBI)
        if HAS_SOFTCAP:
            if WANT_MAX:
                raw = s
                if MASKED:
                    raw = tl.where(keep, s, float("-inf"))
                raw_top = tl.maximum(raw_top, tl.max(raw, 1))
            s = softcap * tanh(s / softcap)
        scale2 = LOG2E
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
    new_top2 = tl.maximum(top2, tl.max(s, 1) * scale2)
    shift = new_top2
    if MASKED or HAS_BIAS:  # a bias may be -inf on a whole row, too
        shift = tl.where(new_top2 == float("-inf"), 0.0, new_top2)
    p = tl.exp2(s * scale2 - shift[:, None])
    decay = tl.exp2(top2 - shift)
    total = total * decay + tl.sum(p, 1)
    acc = acc * decay[:, None]
    v = load_tile(V, kt * BN, v_column, stride_vt, tk, BN, DV, BLOCK_DV, MASKED, TMA)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, total, new_top2, raw_top


@triton.jit
def _tile(
    work, Q, K, V, OUT, LSE, MAX_LOGITS, SINK, BIAS, SLOPES, OFFSET,
    ORDER, PTR, SPLIT, RUNS, ROW_LO, ROW_HI,
    scale, softcap, tq, tk, num_tiles, section, num_heads, group,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    stride_bh, stride_bi, stride_bj,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_SINK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WANT_MAX: tl.constexpr,
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, PTX: tl.constexpr,
):
    # Heads in sections that share the L2; inside a section, longest tiles first.
    in_section = work % (num_tiles * section)
    head = (work // (num_tiles * section)) * section + in_section % section
    tile = tl.load(ORDER + in_section // section)
    first, split, last = tl.load(PTR + tile), tl.load(SPLIT + tile), tl.load(PTR + tile + 1)
    if TMA:
        k_column, v_column = (head // group) * D, (head // group) * DV
    else:
        k_column = (head // group).to(tl.int64) * stride_kh
        v_column = (head // group).to(tl.int64) * stride_vh
    if HAS_BIAS:
        BIAS += head.to(tl.int64) * stride_bh

    first_row = tile * BM
    i = first_row + tl.arange(0, BM)
    q_column = head.to(tl.int64) * stride_qh
    q = load_tile(Q, first_row, q_column, stride_qt, tq, BM, D, BLOCK_D, True, False)
    if WANT_MAX:
        seen_top = tl.load(MAX_LOGITS + head)
    position = i
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(SLOPES + head)
        if HAS_OFFSET:
            position = i + tl.load(OFFSET + i, mask=i < tq, other=0)
        else:
            position = i + (tk - tq)

    top2 = tl.full([BM], float("-inf"), tl.float32)
    raw_top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    for run in range(first, split):
        begin, end = tl.load(RUNS + run * 3), tl.load(RUNS + run * 3 + 1)
        rows = tl.load(RUNS + run * 3 + 2).to(tl.int64) * BM + tl.arange(0, BM)
        lo, hi = tl.load(ROW_LO + rows), tl.load(ROW_HI + rows)
        for kt in range(begin, end):
            acc, total, top2, raw_top = _visit(
                acc, total, top2, raw_top, q, i, lo, hi, kt, position, slope, k_column, v_column,
                K, V, BIAS, stride_kt, stride_vt, stride_bi, stride_bj, scale, softcap, tq, tk,
                D, DV, BLOCK_D, BLOCK_DV, BN, True, HAS_BIAS, HAS_ALIBI, HAS_SOFTCAP, WANT_MAX,
                PRECISION, TMA)
    for run in range(split, last):
        begin, end = tl.load(RUNS + run * 3), tl.load(RUNS + run * 3 + 1)
        for kt in range(begin, end):
            acc, total, top2, raw_top = _visit(
                acc, total, top2, raw_top, q, i, i, i, kt, position, slope, k_column, v_column,
                K, V, BIAS, stride_kt, stride_vt, stride_bi, stride_bj, scale, softcap, tq, tk,
                D, DV, BLOCK_D, BLOCK_DV, BN, False, HAS_BIAS, HAS_ALIBI, HAS_SOFTCAP, WANT_MAX,
                PRECISION, TMA)

    if WANT_MAX:
        row_top = top2 * LN2
        if HAS_SOFTCAP:
            row_top = raw_top
        # Maxima drop NaNs, sums keep them. Rows past the end see nothing: -inf.
        row_top = tl.where(total == total, row_top, float("nan"))
    if HAS_SINK:
        sink2 = tl.load(SINK + head).to(tl.float32) * LOG2E
        new_top2 = tl.maximum(top2, sink2)
        shift = tl.where(new_top2 == float("-inf"), 0.0, new_top2)
        decay = tl.exp2(top2 - shift)
        total = total * decay + tl.exp2(sink2 - shift)
        acc = acc * decay[:, None]
        top2 = new_top2
    empty = total == 0.0
    denominator = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (top2 + tl.log2(denominator)) * LN2)
    out = acc / denominator[:, None]

    OUT += head.to(tl.int64) * stride_oh
    lse_place = LSE + i.to(tl.int64) * num_heads + head
    if ACCUMULATE:
        old_lse = tl.load(lse_place, mask=i < tq, other=float("-inf"))
        old = load_tile(OUT, first_row, 0, stride_ot, tq, BM, DV, BLOCK_DV, True, False)
        high = tl.maximum(lse, old_lse)
        high = tl.where(high == float("-inf"), 0.0, high)
        new_part, old_part = tl.exp2((lse - high) * LOG2E), tl.exp2((old_lse - high) * LOG2E)
        both = new_part + old_part
        nothing = both == 0.0
        both = tl.where(nothing, 1.0, both)
        out = out * (new_part / both)[:, None] + old * (old_part / both)[:, None]
        lse = tl.where(nothing, float("-inf"), high + tl.log2(both) * LN2)
    tl.store(lse_place, lse, mask=i < tq)
    store_rows(OUT, out, i, stride_ot, tq, DV, BLOCK_DV)
    if WANT_MAX:  # last, when nothing waits for it any more
        raise_max(MAX_LOGITS + head, seen_top, row_top, PTX)


@triton.jit(do_not_specialize=SIZES)
def flash_fwd_kernel(
    Q, K, V, OUT, LSE, MAX_LOGITS, SINK, BIAS, SLOPES, OFFSET,
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
    if PERSISTENT:
        work = tl.atomic_add(COUNTER, 1, sem="relaxed")
        while work < num_work:
            _tile(
                work, Q, K, V, OUT, LSE, MAX_LOGITS, SINK, BIAS, SLOPES, OFFSET,
                ORDER, PTR, SPLIT, RUNS, ROW_LO, ROW_HI, scale, softcap, tq, tk,
                num_tiles, section, num_heads, group,
                stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
                stride_ot, stride_oh, stride_bh, stride_bi, stride_bj,
                D, DV, BLOCK_D, BLOCK_DV, BM, BN, HAS_SINK, HAS_BIAS, HAS_ALIBI,
                HAS_OFFSET, HAS_SOFTCAP, WANT_MAX, ACCUMULATE, PRECISION, TMA, PTX)
            work = tl.atomic_add(COUNTER, 1, sem="relaxed")
    else:
        _tile(
            tl.program_id(0), Q, K, V, OUT, LSE, MAX_LOGITS, SINK, BIAS, SLOPES, OFFSET,
            ORDER, PTR, SPLIT, RUNS, ROW_LO, ROW_HI, scale, softcap, tq, tk,
            num_tiles, section, num_heads, group,
            stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
            stride_ot, stride_oh, stride_bh, stride_bi, stride_bj,
            D, DV, BLOCK_D, BLOCK_DV, BM, BN, HAS_SINK, HAS_BIAS, HAS_ALIBI,
            HAS_OFFSET, HAS_SOFTCAP, WANT_MAX, ACCUMULATE, PRECISION, TMA, PTX)


# fmt: on


def choose_config(
    capability: tuple[int, int], block_d: int, dtype: torch.dtype, width: float
) -> TileConfig:
    """Tiles measured on sm_90, by padded head dim and keys per row: narrow rows want small ones."""
    if dtype == torch.float32:
        return TileConfig(64 if block_d <= 64 else 32, 32, 4, 1 if block_d > 128 else 2)
    tma, small_smem = capability >= (9, 0), has_small_smem(capability)
    narrow = width < 2048
    if block_d <= 64:
        return TileConfig(128 if narrow else 64, 64, 4, 3, tma)
    if block_d <= 128 and small_smem:
        return TileConfig(64, 32, 4, 3, tma)
    if block_d <= 128:
        if narrow:
            return TileConfig(64, 64, 4, 3, tma)
        return TileConfig(128, 128, 8, 3, tma) if tma else TileConfig(128, 64, 8, 3)
    if small_smem or not tma or width == 0:
        return TileConfig(64, 32, 4, 2, tma)
    return TileConfig(128, 64, 8, 2, tma)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask,
    scoring: Scoring,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    max_logits: torch.Tensor | None = None,
    accumulate: bool = False,
    sm_margin: int = 0,
    config: TileConfig | None = None,
) -> Recipe:
    """Fills out (tq, hq, dv) and lse (tq, hq) fp32, and raises max_logits (hq,) fp32 in place.

    With `accumulate`, out is fp32 and (out, lse) hold a partial result to merge into. The scale
    must be positive. Last dims are contiguous; lse is contiguous.
    """
    return launch(
        flash_fwd_kernel,
        (mask, scoring.scale, scoring.softcap, accumulate, sm_margin, config),
        {
            **{"Q": q, "K": k, "V": v, "OUT": out, "LSE": lse, "MAX_LOGITS": max_logits},
            **{"SINK": scoring.sink, **score_tensors(scoring)},
            "COUNTER": work_counter(sm_margin, q.device),
        },
        lambda: _prepare(q, k, v, mask, scoring, out, max_logits, accumulate, sm_margin, config),
    )


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask,
    scoring: Scoring,
    out: torch.Tensor,
    max_logits: torch.Tensor | None,
    accumulate: bool,
    sm_margin: int,
    config: TileConfig | None,
) -> Prepared | None:
    (tq, hq, d), (tk, hk, dv) = q.shape, v.shape
    block_d, block_dv = padded(d), padded(dv)
    if config is None:
        width = keys_per_row(mask, scoring)
        capability = compute_capability(q.device)
        config = choose_config(capability, max(block_d, block_dv), q.dtype, width)
        config = fitted(config, scoring.bias is not None)
    plan, arrays = device_plan(mask, config.block_m, config.block_n, "q", q.device)
    num_work = plan.num_q_tiles * hq
    if num_work == 0:
        return None
    tma = config.tma and tk > 0 and can_use_tma(k, v)
    kv_bytes = tk * (d + dv) * k.element_size()
    arguments = {
        **arrays,
        **{"tq": tq, "tk": tk, "num_tiles": plan.num_q_tiles, "num_work": num_work},
        **{"num_heads": hq, "group": hq // hk},
        "section": section_heads(hq, hk, kv_bytes, plan.q.work, q.device),
        **strides(q=q, k=k, v=v, o=out),
        **score_arguments(scoring, hq, tq, tk),
        **{"D": d, "DV": dv, "BLOCK_D": block_d, "BLOCK_DV": block_dv},
        **{"BM": config.block_m, "BN": config.block_n},
        "HAS_SINK": scoring.sink is not None,
        "WANT_MAX": max_logits is not None,
        "ACCUMULATE": accumulate,
        "PERSISTENT": sm_margin > 0,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "TMA": tma,
        "PTX": HAS_PTX,
    }
    return Prepared(
        (grid_size(num_work, sm_margin, q.device),),
        arguments,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        streamed=dict.fromkeys("KV", rows_of_heads(config.block_n)) if tma else {},
    )
