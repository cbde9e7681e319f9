"""Portable Triton backward: dk and dv by k tile, dq (and the bias gradient) by q tile.

Both kernels recompute probabilities from lse, each owns what it writes, so gradients are
deterministic; the one exception, a bias that is broadcast, is added up with atomics unless
`deterministic` asks for a fixed order. Row vectors (lse in log2 units, delta) lie head-major.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from keel.kernels.flash_common import (
    HAS_PTX,
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
    score_arguments,
    score_tensors,
    section_heads,
    store_rows,
    strides,
    tanh,
    work_counter,
)
from keel.kernels.launch import Prepared, Recipe, Tensors, launch, rows_of_heads
from keel.kernels.steps import Steps
from keel.masks import AttnMask
from keel.meta import Scoring

TERM_ROWS = 16
"""Rows of a block of row terms: few, so that blocks which run at once read and write memory that
lies together. 64 rows, one head after the other, take up to 28 % longer."""

# fmt: off
# Device code keeps its long argument lists in rows; the launchers below pass them by name.


@triton.jit(do_not_specialize=["tq", "num_heads"])
def row_terms_kernel(
    OUT, DOUT, LSE, DLSE, LSE2, DELTA, DQ32, tq, num_heads,
    stride_ot, stride_oh, stride_dot, stride_doh, stride_dlt, stride_dlh,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    HAS_DLSE: tl.constexpr, NEXT_IS_EARLY: tl.constexpr,
):
    """delta = rowsum(dout * out) - dlse; lse in log2 units with +inf for rows that see nothing.

    With D > 0, rows of DQ32 (tq, heads, D) become zeros, for sums that begin there. All heads of
    some rows come first, and then the next rows, as they usually lie in memory.
    """
    if NEXT_IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) // num_heads * BM
    i = first + tl.arange(0, BM)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    out = load_tile(
        OUT, first, head * stride_oh, stride_ot, tq, BM, DV, BLOCK_DV, True, False)
    dout = load_tile(
        DOUT, first, head * stride_doh, stride_dot, tq, BM, DV, BLOCK_DV, True, False)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    row = i.to(tl.int64)
    if HAS_DLSE:
        delta -= tl.load(DLSE + row * stride_dlt + head * stride_dlh, mask=i < tq, other=0.0)
    lse = tl.load(LSE + row * num_heads + head, mask=i < tq, other=float("-inf"))
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    tl.store(DELTA + head * tq + row, delta, mask=i < tq)
    tl.store(LSE2 + head * tq + row, lse2, mask=i < tq)
    if D > 0:
        zeros = tl.zeros([BM, BLOCK_D], DQ32.dtype.element_ty)
        store_rows(DQ32 + head * D, zeros, i, num_heads * D, tq, D, BLOCK_D)


@triton.jit
def _probability(
    s, i, j, keep, lse2, position, slope, BIAS, stride_bi, stride_bj, scale, softcap, tq, tk,
    MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """(p, d capped / d raw) from raw products; all index tensors broadcast to the shape of s."""
    scale2 = scale * LOG2E
    bend = 1.0
    if HAS_BIAS or HAS_ALIBI or HAS_SOFTCAP:
        s = add_bias(s * scale, i, j, position, slope,
                     BIAS, stride_bi, stride_bj, tq, tk, HAS_BIAS, HAS_ALIBI)
        if HAS_SOFTCAP:
            t = tanh(s / softcap)
            s = softcap * t
            bend = 1.0 - t * t
        scale2 = LOG2E
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
    return tl.exp2(s * scale2 - lse2), bend


@triton.jit
def _visit_q(
    dk, dv, k, v, j, qt, index, slope, q_column, dout_column,
    Q, DOUT, LSE2, DELTA, BIAS, OFFSET, SET_BASE, ROW_LO, ROW_HI,
    stride_qt, stride_dot, stride_bi, stride_bj,
    scale, softcap, tq, tk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BM: tl.constexpr, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """One block of dk, dv; scores are transposed, (BN, BM), so that p and ds feed the products."""
    i = qt * BM + tl.arange(0, BM)
    q = load_tile(Q, qt * BM, q_column, stride_qt, tq, BM, D, BLOCK_D, MASKED, TMA)
    s = tl.dot(k, q.T, input_precision=PRECISION)
    # Row vectors lie along columns here, many registers each: they are read where they are used.
    keep = True
    if MASKED:
        rows = (tl.load(SET_BASE + qt) + index).to(tl.int64) * BM + tl.arange(0, BM)
        lo, hi = tl.load(ROW_LO + rows), tl.load(ROW_HI + rows)
        keep = (j[:, None] >= lo[None, :]) & (j[:, None] < hi[None, :])
        lse2 = tl.load(LSE2 + i, mask=i < tq, other=float("inf"))
    else:
        lse2 = tl.load(LSE2 + i)
    position = i
    if HAS_ALIBI:
        if HAS_OFFSET:
            position = i + tl.load(OFFSET + i, mask=i < tq, other=0)
        else:
            position = i + (tk - tq)
    p, bend = _probability(
        s, i[None, :], j[:, None], keep, lse2[None, :], position[None, :], slope,
        BIAS, stride_bi, stride_bj, scale, softcap, tq, tk,
        MASKED, HAS_BIAS, HAS_ALIBI, HAS_SOFTCAP)
    dout = load_tile(
        DOUT, qt * BM, dout_column, stride_dot, tq, BM, DV, BLOCK_DV, MASKED, TMA)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    dp = tl.dot(v, dout.T, input_precision=PRECISION)
    if MASKED:
        delta = tl.load(DELTA + i, mask=i < tq, other=0.0)
    else:
        delta = tl.load(DELTA + i)
    ds = p * (dp - delta[None, :])
    if HAS_SOFTCAP:
        ds *= bend
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _dkdv_tile(
    work, Q, K, V, DOUT, LSE2, DELTA, DK, DVAL, BIAS, SLOPES, OFFSET,
    ORDER, PTR, SPLIT, RUNS, SET_BASE, ROW_LO, ROW_HI,
    scale, softcap, tq, tk, num_tiles, section, group,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh,
    stride_dkt, stride_dkh, stride_dvt, stride_dvh, stride_bh, stride_bi, stride_bj,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):
    in_section = work % (num_tiles * section)
    kv_head = ((work // (num_tiles * section)) * section + in_section % section).to(tl.int64)
    tile = tl.load(ORDER + in_section // section)
    first, split, last = tl.load(PTR + tile), tl.load(SPLIT + tile), tl.load(PTR + tile + 1)
    j = tile * BN + tl.arange(0, BN)
    k = load_tile(
        K, tile * BN, kv_head * stride_kh, stride_kt, tk, BN, D, BLOCK_D, True, False)
    v = load_tile(
        V, tile * BN, kv_head * stride_vh, stride_vt, tk, BN, DV, BLOCK_DV, True, False)
    dk = tl.zeros([BN, BLOCK_D], tl.float32)
    dv = tl.zeros([BN, BLOCK_DV], tl.float32)
    # The query heads of the group are summed here, in order: no atomics, no second pass.
    for g in range(group):
        head = kv_head * group + g
        slope = 0.0
        if HAS_ALIBI:
            slope = tl.load(SLOPES + head)
        if TMA:
            q_column, dout_column = (head * D).to(tl.int32), (head * DV).to(tl.int32)
        else:
            q_column, dout_column = head * stride_qh, head * stride_doh
        lse2_head, delta_head = LSE2 + head * tq, DELTA + head * tq
        bias_head = BIAS
        if HAS_BIAS:
            bias_head = BIAS + head * stride_bh
        for run in range(first, split):
            begin, end = tl.load(RUNS + run * 3), tl.load(RUNS + run * 3 + 1)
            index = tl.load(RUNS + run * 3 + 2)
            for qt in range(begin, end):
                dk, dv = _visit_q(
                    dk, dv, k, v, j, qt, index, slope, q_column, dout_column,
                    Q, DOUT, lse2_head, delta_head, bias_head, OFFSET,
                    SET_BASE, ROW_LO, ROW_HI, stride_qt, stride_dot, stride_bi, stride_bj,
                    scale, softcap, tq, tk, D, DV, BLOCK_D, BLOCK_DV, BM, True,
                    HAS_BIAS, HAS_ALIBI, HAS_OFFSET, HAS_SOFTCAP, PRECISION, TMA)
        for run in range(split, last):
            begin, end = tl.load(RUNS + run * 3), tl.load(RUNS + run * 3 + 1)
            for qt in range(begin, end):
                dk, dv = _visit_q(
                    dk, dv, k, v, j, qt, 0, slope, q_column, dout_column,
                    Q, DOUT, lse2_head, delta_head, bias_head, OFFSET,
                    SET_BASE, ROW_LO, ROW_HI, stride_qt, stride_dot, stride_bi, stride_bj,
                    scale, softcap, tq, tk, D, DV, BLOCK_D, BLOCK_DV, BM, False,
                    HAS_BIAS, HAS_ALIBI, HAS_OFFSET, HAS_SOFTCAP, PRECISION, TMA)
    store_rows(DK + kv_head * stride_dkh, dk * scale, j, stride_dkt, tk, D, BLOCK_D)
    store_rows(DVAL + kv_head * stride_dvh, dv, j, stride_dvt, tk, DV, BLOCK_DV)


@triton.jit(do_not_specialize=SIZES)
def flash_bwd_dkdv_kernel(
    Q, K, V, DOUT, LSE2, DELTA, DK, DVAL, BIAS, SLOPES, OFFSET,
    ORDER, PTR, SPLIT, RUNS, SET_BASE, ROW_LO, ROW_HI, COUNTER,
    scale, softcap, tq, tk, num_tiles, section, group, num_work,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh,
    stride_dkt, stride_dkh, stride_dvt, stride_dvh, stride_bh, stride_bi, stride_bj,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PERSISTENT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    if PERSISTENT:
        work = tl.atomic_add(COUNTER, 1, sem="relaxed")
        while work < num_work:
            _dkdv_tile(
                work, Q, K, V, DOUT, LSE2, DELTA, DK, DVAL, BIAS, SLOPES, OFFSET,
                ORDER, PTR, SPLIT, RUNS, SET_BASE, ROW_LO, ROW_HI,
                scale, softcap, tq, tk, num_tiles, section, group,
                stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
                stride_dot, stride_doh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
                stride_bh, stride_bi, stride_bj, D, DV, BLOCK_D, BLOCK_DV, BM, BN,
                HAS_BIAS, HAS_ALIBI, HAS_OFFSET, HAS_SOFTCAP, PRECISION, TMA)
            work = tl.atomic_add(COUNTER, 1, sem="relaxed")
    else:
        _dkdv_tile(
            tl.program_id(0), Q, K, V, DOUT, LSE2, DELTA, DK, DVAL, BIAS, SLOPES, OFFSET,
            ORDER, PTR, SPLIT, RUNS, SET_BASE, ROW_LO, ROW_HI,
            scale, softcap, tq, tk, num_tiles, section, group,
            stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
            stride_dot, stride_doh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
            stride_bh, stride_bi, stride_bj, D, DV, BLOCK_D, BLOCK_DV, BM, BN,
            HAS_BIAS, HAS_ALIBI, HAS_OFFSET, HAS_SOFTCAP, PRECISION, TMA)


@triton.jit
def _visit_k(
    dq, q, dout, i, lse2, delta, lo, hi, kt, position, slope, k_column, v_column,
    K, V, BIAS, DBIAS, stride_kt, stride_vt, stride_bi, stride_bj, stride_dbi, stride_dbj,
    scale, softcap, tq, tk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BN: tl.constexpr, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, WANT_DBIAS: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """One block of dq."""
    j = kt * BN + tl.arange(0, BN)
    k = load_tile(K, kt * BN, k_column, stride_kt, tk, BN, D, BLOCK_D, MASKED, TMA)
    v = load_tile(V, kt * BN, v_column, stride_vt, tk, BN, DV, BLOCK_DV, MASKED, TMA)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    keep = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
    p, bend = _probability(
        s, i[:, None], j[None, :], keep, lse2[:, None], position[:, None], slope,
        BIAS, stride_bi, stride_bj, scale, softcap, tq, tk,
        MASKED, HAS_BIAS, HAS_ALIBI, HAS_SOFTCAP)
    dp = tl.dot(dout, v.T, input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    if HAS_SOFTCAP:
        ds *= bend
    if WANT_DBIAS:
        place = i.to(tl.int64)[:, None] * stride_dbi + j.to(tl.int64)[None, :] * stride_dbj
        inside = (i < tq)[:, None] & (j < tk)[None, :]
        if MASKED:
            inside = inside & keep
        tl.atomic_add(DBIAS + place, ds, mask=inside, sem="relaxed")
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def _dq_tile(
    work, Q, K, V, DOUT, LSE2, DELTA, DQ, BIAS, DBIAS, SLOPES, OFFSET,
    ORDER, PTR, SPLIT, RUNS, ROW_LO, ROW_HI,
    scale, softcap, tq, tk, num_tiles, section, group,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh,
    stride_dqt, stride_dqh, stride_bh, stride_bi, stride_bj, stride_dbh, stride_dbi, stride_dbj,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, WANT_DBIAS: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    in_section = work % (num_tiles * section)
    head = ((work // (num_tiles * section)) * section + in_section % section).to(tl.int64)
    tile = tl.load(ORDER + in_section // section)
    first, split, last = tl.load(PTR + tile), tl.load(SPLIT + tile), tl.load(PTR + tile + 1)
    if TMA:
        k_column, v_column = (head // group * D).to(tl.int32), (head // group * DV).to(tl.int32)
    else:
        k_column, v_column = (head // group) * stride_kh, (head // group) * stride_vh
    if HAS_BIAS:
        BIAS += head * stride_bh
    if WANT_DBIAS:
        DBIAS += head * stride_dbh
    i = tile * BM + tl.arange(0, BM)
    q = load_tile(Q, tile * BM, head * stride_qh, stride_qt, tq, BM, D, BLOCK_D, True, False)
    dout = load_tile(
        DOUT, tile * BM, head * stride_doh, stride_dot, tq, BM, DV, BLOCK_DV, True, False)
    lse2 = tl.load(LSE2 + head * tq + i, mask=i < tq, other=float("inf"))
    delta = tl.load(DELTA + head * tq + i, mask=i < tq, other=0.0)
    position = i
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(SLOPES + head)
        if HAS_OFFSET:
            position = i + tl.load(OFFSET + i, mask=i < tq, other=0)
        else:
            position = i + (tk - tq)
    dq = tl.zeros([BM, BLOCK_D], tl.float32)
    for run in range(first, split):
        begin, end = tl.load(RUNS + run * 3), tl.load(RUNS + run * 3 + 1)
        rows = tl.load(RUNS + run * 3 + 2).to(tl.int64) * BM + tl.arange(0, BM)
        lo, hi = tl.load(ROW_LO + rows), tl.load(ROW_HI + rows)
        for kt in range(begin, end):
            dq = _visit_k(
                dq, q, dout, i, lse2, delta, lo, hi, kt, position, slope, k_column, v_column,
                K, V, BIAS, DBIAS, stride_kt, stride_vt,
                stride_bi, stride_bj, stride_dbi, stride_dbj,
                scale, softcap, tq, tk, D, DV, BLOCK_D, BLOCK_DV, BN, True,
                HAS_BIAS, HAS_ALIBI, HAS_SOFTCAP, WANT_DBIAS, PRECISION, TMA)
    for run in range(split, last):
        begin, end = tl.load(RUNS + run * 3), tl.load(RUNS + run * 3 + 1)
        for kt in range(begin, end):
            dq = _visit_k(
                dq, q, dout, i, lse2, delta, i, i, kt, position, slope, k_column, v_column,
                K, V, BIAS, DBIAS, stride_kt, stride_vt,
                stride_bi, stride_bj, stride_dbi, stride_dbj,
                scale, softcap, tq, tk, D, DV, BLOCK_D, BLOCK_DV, BN, False,
                HAS_BIAS, HAS_ALIBI, HAS_SOFTCAP, WANT_DBIAS, PRECISION, TMA)
    store_rows(DQ + head * stride_dqh, dq * scale, i, stride_dqt, tq, D, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def flash_bwd_dq_kernel(
    Q, K, V, DOUT, LSE2, DELTA, DQ, BIAS, DBIAS, SLOPES, OFFSET,
    ORDER, PTR, SPLIT, RUNS, ROW_LO, ROW_HI, COUNTER,
    scale, softcap, tq, tk, num_tiles, section, group, num_work,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh,
    stride_dqt, stride_dqh, stride_bh, stride_bi, stride_bj, stride_dbh, stride_dbi, stride_dbj,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, WANT_DBIAS: tl.constexpr, PERSISTENT: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):
    if PERSISTENT:
        work = tl.atomic_add(COUNTER, 1, sem="relaxed")
        while work < num_work:
            _dq_tile(
                work, Q, K, V, DOUT, LSE2, DELTA, DQ, BIAS, DBIAS, SLOPES, OFFSET,
                ORDER, PTR, SPLIT, RUNS, ROW_LO, ROW_HI,
                scale, softcap, tq, tk, num_tiles, section, group,
                stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
                stride_dot, stride_doh, stride_dqt, stride_dqh,
                stride_bh, stride_bi, stride_bj, stride_dbh, stride_dbi, stride_dbj,
                D, DV, BLOCK_D, BLOCK_DV, BM, BN,
                HAS_BIAS, HAS_ALIBI, HAS_OFFSET, HAS_SOFTCAP, WANT_DBIAS, PRECISION, TMA)
            work = tl.atomic_add(COUNTER, 1, sem="relaxed")
    else:
        _dq_tile(
            tl.program_id(0), Q, K, V, DOUT, LSE2, DELTA, DQ, BIAS, DBIAS, SLOPES, OFFSET,
            ORDER, PTR, SPLIT, RUNS, ROW_LO, ROW_HI,
            scale, softcap, tq, tk, num_tiles, section, group,
            stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
            stride_dot, stride_doh, stride_dqt, stride_dqh,
            stride_bh, stride_bi, stride_bj, stride_dbh, stride_dbi, stride_dbj,
            D, DV, BLOCK_D, BLOCK_DV, BM, BN,
            HAS_BIAS, HAS_ALIBI, HAS_OFFSET, HAS_SOFTCAP, WANT_DBIAS, PRECISION, TMA)


# fmt: on


def choose_configs(
    capability: tuple[int, int], block_d: int, dtype: torch.dtype, width: float
) -> tuple[TileConfig, TileConfig]:
    """(tiles of dk/dv, tiles of dq), measured on sm_90 as in the forward."""
    tma, small_smem = capability >= (9, 0), has_small_smem(capability)
    if dtype == torch.float32:
        rows = 16 if small_smem and block_d > 128 else 32
        both = TileConfig(rows, rows, 4, 1)
        return both, both
    dkdv_narrow, dq_narrow = width < 768, width < 2048
    if block_d <= 64:
        return (
            TileConfig(32 if dkdv_narrow else 64, 64, 4, 3, tma),
            TileConfig(64, 64, 4, 2, tma) if dq_narrow else TileConfig(128, 64, 8, 3, tma),
        )
    if block_d <= 128 and small_smem:
        return TileConfig(32, 64, 4, 2, tma), TileConfig(64, 32, 4, 2, tma)
    if block_d <= 128:
        wide = tma and not dkdv_narrow  # without TMA's savings the large tile spills
        return (
            TileConfig(64, 64, 4, 2, tma) if wide else TileConfig(32, 64, 4, 3, tma),
            TileConfig(64, 64, 4, 2, tma) if dq_narrow else TileConfig(128, 64, 8, 3, tma),
        )
    if small_smem:
        return TileConfig(32, 32, 4, 1, tma), TileConfig(32, 32, 4, 1, tma)
    return TileConfig(32, 32, 4, 2, tma), TileConfig(128 if tma else 64, 32, 8, 2, tma)


def row_terms(
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    *,
    dq32: torch.Tensor | None = None,
    next_is_early: bool = False,
    steps: Steps | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(lse2, delta), both (hq, tq) fp32; the launch is added to `steps`.

    dq32: (tq, hq, d), contiguous, is filled with zeros on the way. next_is_early: what is launched
    next may begin early (`early_launches`).
    """
    tq, hq, dv = out.shape
    lse2 = torch.empty(hq, tq, dtype=torch.float32, device=out.device)
    delta = torch.empty_like(lse2)
    if tq == 0:
        return lse2, delta
    d = 0 if dq32 is None else dq32.shape[2]
    recipe = launch(
        row_terms_kernel,
        next_is_early,
        {
            **{"OUT": out, "DOUT": dout, "LSE": lse, "DLSE": dlse},
            **{"LSE2": lse2, "DELTA": delta, "DQ32": dq32},
        },
        lambda: Prepared(
            (triton.cdiv(tq, TERM_ROWS) * hq,),
            {
                **{"tq": tq, "num_heads": hq, **strides(o=out, do=dout)},
                "stride_dlt": 0 if dlse is None else dlse.stride(0),
                "stride_dlh": 0 if dlse is None else dlse.stride(1),
                **{"D": d, "BLOCK_D": padded(d), "DV": dv, "BLOCK_DV": padded(dv), "BM": TERM_ROWS},
                **{"HAS_DLSE": dlse is not None, "NEXT_IS_EARLY": next_is_early and HAS_PTX},
            },
        ),
    )
    if steps is not None:
        zeroed = {} if dq32 is None else {"DQ32": dq32}
        steps.add(recipe, LSE2=lse2, DELTA=delta, **zeroed)
    return lse2, delta


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse2: torch.Tensor,
    delta: torch.Tensor,
    mask: AttnMask,
    scoring: Scoring,
    *,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dbias: torch.Tensor | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    configs: tuple[TileConfig, TileConfig] | None = None,
    steps: Steps | None = None,
) -> None:
    """Fills dq, dk, dv, and adds to dbias (fp32, in the shape of the bias). The scale is > 0.

    The launches are added to `steps`.
    """
    (tq, hq, _), tk = q.shape, k.shape[0]
    given = _Given(dout, q, k, v, lse2, delta, mask, scoring, sm_margin, configs)
    if dbias is not None and deterministic and dbias.shape != (hq, tq, tk):
        _add_dbias_in_order(dbias, given)
        dbias = None
    launched = [_launch_dkdv(given, dk, dv), _launch_dq(given, dq, dbias)]
    if steps is not None:
        for recipe in launched:
            steps.add(recipe)
        if sm_margin:  # a counter is filled each time
            steps.clear()


@dataclass(frozen=True, slots=True)
class _Given:
    """What both backward kernels start from."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lse2: torch.Tensor
    delta: torch.Tensor
    mask: AttnMask
    scoring: Scoring
    sm_margin: int
    configs: tuple[TileConfig, TileConfig] | None

    @property
    def key(self) -> tuple[Any, ...]:
        """All that counts beside the layout of tensors."""
        return self.mask, self.scoring.scale, self.scoring.softcap, self.sm_margin, self.configs

    def tensors(self) -> Tensors:
        return {
            **{"Q": self.q, "K": self.k, "V": self.v, "DOUT": self.dout},
            **{"LSE2": self.lse2, "DELTA": self.delta, **score_tensors(self.scoring)},
            "COUNTER": work_counter(self.sm_margin, self.q.device),
        }

    def chosen_configs(self) -> tuple[TileConfig, TileConfig]:
        if self.configs is not None:
            return self.configs
        width = keys_per_row(self.mask, self.scoring)
        capability = compute_capability(self.q.device)
        block_d = max(padded(self.q.shape[2]), padded(self.v.shape[2]))
        dkdv, dq = choose_configs(capability, block_d, self.q.dtype, width)
        has_bias = self.scoring.bias is not None
        return fitted(dkdv, has_bias), fitted(dq, has_bias)

    def prepared(
        self,
        config: TileConfig,
        num_tiles: int,
        heads: int,
        streamed: tuple[str, str],
        block_rows: int,
        arguments: dict[str, Any],
    ) -> Prepared | None:
        """The launch of either kernel; `streamed` are the tensors that its inner loop reads."""
        (tq, hq, d), (tk, hk, dv) = self.q.shape, self.v.shape
        num_work = num_tiles * heads
        if num_work == 0:
            return None
        read = {"Q": self.q, "K": self.k, "V": self.v, "DOUT": self.dout}
        inner = [read[name] for name in streamed]
        tma = config.tma and inner[0].shape[0] > 0 and can_use_tma(*inner)
        return Prepared(
            (grid_size(num_work, self.sm_margin, self.q.device),),
            {
                **{"tq": tq, "tk": tk, "num_tiles": num_tiles, "num_work": num_work},
                "group": hq // hk,
                **strides(q=self.q, k=self.k, v=self.v, do=self.dout),
                **score_arguments(self.scoring, hq, tq, tk),
                **{"D": d, "DV": dv, "BLOCK_D": padded(d), "BLOCK_DV": padded(dv)},
                **{"BM": config.block_m, "BN": config.block_n, "TMA": tma},
                "PERSISTENT": self.sm_margin > 0,
                "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
                **arguments,
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            streamed=dict.fromkeys(streamed, rows_of_heads(block_rows)) if tma else {},
        )


def _launch_dkdv(given: _Given, dk: torch.Tensor, dv: torch.Tensor) -> Recipe:
    def prepare() -> Prepared | None:
        config, _ = given.chosen_configs()
        plan, arrays = device_plan(given.mask, config.block_m, config.block_n, "k", dk.device)
        (tq, hq, d), (_, hk, dim_v) = given.q.shape, given.v.shape
        row_bytes = tq * (hq // hk) * (d + dim_v) * dk.element_size()
        return given.prepared(
            *(config, plan.num_k_tiles, hk, ("Q", "DOUT"), config.block_m),
            {
                **arrays,
                "section": section_heads(hk, hk, row_bytes, plan.k.work, dk.device),
                **strides(dk=dk, dv=dv),
            },
        )

    tensors = {**given.tensors(), "DK": dk, "DVAL": dv}
    return launch(flash_bwd_dkdv_kernel, given.key, tensors, prepare)


def _launch_dq(given: _Given, dq: torch.Tensor, dbias: torch.Tensor | None) -> Recipe:
    def prepare() -> Prepared | None:
        _, config = given.chosen_configs()
        plan, arrays = device_plan(given.mask, config.block_m, config.block_n, "q", dq.device)
        (tq, hq, d), (tk, hk, dim_v) = given.q.shape, given.v.shape
        kv_bytes = tk * (d + dim_v) * dq.element_size()
        bias_strides = (0, 0, 0) if dbias is None else dbias.expand(hq, tq, tk).stride()
        return given.prepared(
            *(config, plan.num_q_tiles, hq, ("K", "V"), config.block_n),
            {
                **arrays,
                "section": section_heads(hq, hk, kv_bytes, plan.q.work, dq.device),
                **strides(dq=dq),
                **dict(zip(("stride_dbh", "stride_dbi", "stride_dbj"), bias_strides, strict=True)),
                "WANT_DBIAS": dbias is not None,
            },
        )

    tensors = {**given.tensors(), "DQ": dq, "DBIAS": dbias}
    return launch(flash_bwd_dq_kernel, given.key, tensors, prepare)


def _add_dbias_in_order(dbias: torch.Tensor, given: _Given) -> None:
    """A broadcast bias without atomics: one head at a time into (1, tq, tk), then a plain sum."""
    scoring, q, k, v = given.scoring, given.q, given.k, given.v
    assert scoring.bias is not None
    (tq, hq, _), (tk, hk, _) = q.shape, v.shape
    bias = scoring.bias.expand(hq, -1, -1)
    head_dbias = dbias.expand(hq, -1, -1)
    scratch = torch.empty_like(q[:, :1])
    for head in range(hq):
        one, kv = slice(head, head + 1), slice(head * hk // hq, head * hk // hq + 1)
        slopes = scoring.alibi_slopes
        part = replace(
            given,
            dout=given.dout[:, one],
            q=q[:, one],
            k=k[:, kv],
            v=v[:, kv],
            lse2=given.lse2[one],
            delta=given.delta[one],
            scoring=replace(
                scoring, bias=bias[one], alibi_slopes=None if slopes is None else slopes[one]
            ),
        )
        dlogits = torch.zeros(1, tq, tk, dtype=torch.float32, device=q.device)
        _launch_dq(part, scratch, dlogits)
        over = [dim for dim in (1, 2) if dbias.shape[dim] == 1]
        head_dbias[one].add_(dlogits.sum(over, keepdim=True) if over else dlogits)
