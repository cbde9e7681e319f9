"""Symmetric products: half of the tiles computed, the other half mirrored.

D = alpha · A·Bᵀ + beta · C + diagonal · I for (batch, m, k) A and B whose product is symmetric, as
X·Xᵀ is, and the product of two polynomials of one symmetric matrix. Sums are fp32. Tiles that
touch the lower triangle are computed; every number is written once, and once more mirrored, so D
is symmetric to the bit.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from keel._versions import fp_fusion

# fmt: off


@triton.jit
def symmetric_product_kernel(
    A, B, C, D, TILES,
    m, k, num_tiles, alpha, beta, diagonal,
    stride_ab, stride_a, stride_bb, stride_b, stride_cb, stride_c, stride_db, stride_d,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    HAS_C: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    batch = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    row0 = tl.load(TILES + 2 * tile)
    col0 = tl.load(TILES + 2 * tile + 1)
    rows = row0 + tl.arange(0, BM)
    cols = col0 + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if TMA:
        # all matrices as one tall one: what a tile reads below its own is not written
        first_a = (batch * m).to(tl.int32) + row0
        first_b = (batch * m).to(tl.int32) + col0
        for k0 in range(0, k, BK):
            a = A.load([first_a, k0])
            b = B.load([first_b, k0])
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    else:
        # rows past the end read the first ones again, which costs no mask
        a_ptr = A + batch * stride_ab + (rows % m).to(tl.int64)[:, None] * stride_a + inner[None, :]
        b_ptr = B + batch * stride_bb + (cols % m).to(tl.int64)[None, :] * stride_b + inner[:, None]
        for k0 in range(0, k, BK):
            if EVEN_K:
                a = tl.load(a_ptr)
                b = tl.load(b_ptr)
            else:
                a = tl.load(a_ptr, mask=inner[None, :] < k - k0, other=0.0)
                b = tl.load(b_ptr, mask=inner[:, None] < k - k0, other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            a_ptr += BK
            b_ptr += BK
    acc *= alpha
    i = rows[:, None]
    j = cols[None, :]
    inside = (i < m) & (j <= i)
    # a matrix rarely has 2³¹ numbers, and pointers of a tile in 64 bits fill the registers
    row = i.to(tl.int64) if WIDE else i
    column = j.to(tl.int64) if WIDE else j
    if HAS_C:
        c = tl.load(C + batch * stride_cb + (row * stride_c + column), mask=inside, other=0.0)
        acc += beta * c.to(tl.float32)
    acc = tl.where(i == j, acc + diagonal, acc)
    d = acc.to(D.dtype.element_ty)
    start = D + batch * stride_db
    tl.store(start + (row * stride_d + column), d, mask=inside)
    tl.store(start + (column * stride_d + row), d, mask=inside & (j < i))


# fmt: on


@dataclass(frozen=True, slots=True)
class GramConfig:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    """Rows of tiles that are worked off together, column by column, for the L2."""
    tma: bool = False


HOPPER = GramConfig(128, 128, 64, num_warps=8, num_stages=4, group=4, tma=True)
AMPERE = GramConfig(128, 128, 32, num_warps=8, num_stages=3)
SMALL = GramConfig(64, 64, 32, num_warps=4, num_stages=3)
FP32 = GramConfig(64, 64, 32, num_warps=4, num_stages=2)


def choose_config(capability: tuple[int, int], m: int, dtype: torch.dtype) -> GramConfig:
    """By architecture and size; the measurements behind it come with benchmarks/muon.py."""
    if dtype == torch.float32:
        return FP32
    if m < 512:
        return SMALL
    return HOPPER if capability[0] == 9 else AMPERE


def tile_order(m: int, block_m: int, block_n: int, group: int) -> np.ndarray:
    """(tiles, 2) int32: first row and column of each tile that touches the lower triangle.

    Rows of tiles go in groups, and a group goes column by column, so that tiles that run at the
    same time share rows and columns.

    >>> tile_order(4, 2, 2, 8).tolist()
    [[0, 0], [2, 0], [2, 2]]
    """
    order = []
    num_rows, num_columns = -(-m // block_m), -(-m // block_n)
    for first in range(0, num_rows, group):
        for column in range(num_columns):
            for row in range(first, min(first + group, num_rows)):
                last_row = min((row + 1) * block_m, m) - 1
                if column * block_n <= last_row:
                    order.append((row * block_m, column * block_n))
    return np.array(order, dtype=np.int32).reshape(-1, 2)


@functools.lru_cache(maxsize=256)
def _tiles_on(m: int, block_m: int, block_n: int, group: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(tile_order(m, block_m, block_n, group)).to(device)


def symmetric_product(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
    config: GramConfig | None = None,
) -> torch.Tensor:
    """alpha · A·Bᵀ + beta · C + diagonal · I, (batch, m, m), where A·Bᵀ and C are symmetric.

    a, b: (batch, m, k) or (m, k); c: (batch, m, m) or (m, m); all of one dtype. Strides are free;
    a last dim that is not contiguous is copied.
    """
    if a.ndim == 2:
        third = None if c is None else c[None]
        return symmetric_product(
            a[None], b[None], third, alpha=alpha, beta=beta, diagonal=diagonal, config=config
        )[0]
    if (
        a.ndim != 3
        or a.shape != b.shape
        or (c is not None and c.shape != (*a.shape[:2], a.shape[1]))
    ):
        raise ValueError(
            "symmetric_product takes a and b of one shape (batch, m, k) and c (batch, m, m), got "
            f"{tuple(a.shape)}, {tuple(b.shape)}, {None if c is None else tuple(c.shape)}"
        )
    if len({x.dtype for x in (a, b, c) if x is not None}) != 1:
        raise TypeError(f"symmetric_product takes tensors of one dtype, got {a.dtype}, {b.dtype}")
    a, b, c = _rows_contiguous(a), _rows_contiguous(b), None if c is None else _rows_contiguous(c)
    batch, m, k = a.shape
    d = a.new_empty(batch, m, m)
    if d.numel() == 0:
        return d
    if config is None:
        capability = torch.cuda.get_device_capability(a.device) if a.is_cuda else (9, 0)
        config = choose_config(capability, m, a.dtype)
    if config.tma and not (_streams(a) and _streams(b)):
        config = replace(config, tma=False)
    tiles = _tiles_on(m, config.block_m, config.block_n, config.group, a.device)
    with torch.cuda.device(a.device) if a.is_cuda else contextlib.nullcontext():
        symmetric_product_kernel[(batch * len(tiles),)](
            _passed(a, config.block_m, config),
            _passed(b, config.block_n, config),
            c,
            d,
            tiles,
            *(m, k, len(tiles), float(alpha), float(beta), float(diagonal)),
            *(a.stride(0), a.stride(1), b.stride(0), b.stride(1)),
            *((0, 0) if c is None else (c.stride(0), c.stride(1))),
            *(d.stride(0), d.stride(1)),
            enable_fp_fusion=fp_fusion(),
            BM=config.block_m,
            BN=config.block_n,
            BK=config.block_k,
            HAS_C=c is not None,
            EVEN_K=k % config.block_k == 0,
            TMA=config.tma,
            WIDE=m * max(m, 0 if c is None else c.stride(1)) >= 2**31,
            PRECISION="ieee",
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return d


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _streams(x: torch.Tensor) -> bool:
    """Whether TMA can read all matrices as one (batch · m, k): evenly spaced, 16 bytes aligned."""
    batch, m, k = x.shape
    size = x.element_size()
    return (
        k > 0
        and (batch == 1 or x.stride(0) == m * x.stride(1))
        and x.stride(1) * size % 16 == 0
        and x.data_ptr() % 16 == 0
        and batch * m < 2**31
    )


def _passed(x: torch.Tensor, rows: int, config: GramConfig) -> Any:
    if not config.tma:
        return x
    batch, m, k = x.shape
    return TensorDescriptor(x, [batch * m, k], [x.stride(1), 1], [rows, config.block_k])
