"""Symmetric products in the interpreter, against fp64.

fp32 and fp16 only: `tl.dot` on bf16 is broken in the interpreter of Triton 3.6.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from keel.testing import poisoned_memory

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from keel.kernels.gram import GramConfig, choose_config, symmetric_product, tile_order

SQUARE = GramConfig(32, 32, 16, num_warps=4, num_stages=1, group=2)
CONFIGS = {
    "square": SQUARE,
    "wide": replace(SQUARE, block_n=64),
    "tall": replace(SQUARE, block_m=64),
    "tma": replace(SQUARE, tma=True),
    "wide tma": replace(SQUARE, block_n=64, tma=True),
}
ROUNDING = {torch.float32: 1e-6, torch.float16: 6e-4}


def commuting(batch: int, m: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two symmetric matrices with a symmetric product: both polynomials of a third, rounded."""
    g = torch.randn(batch, m, m, dtype=torch.float64)
    g = (g + g.mT) / m
    return g.to(dtype), (0.5 * torch.eye(m) - g + g @ g).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return (got.double() - want).abs().max() <= ROUNDING[got.dtype] * want.abs().max()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("batch", "m", "k"), [(1, 64, 48), (3, 72, 80), (2, 31, 17), (1, 1, 1)])
def test_gram_matrix(batch, m, k, dtype, config):
    torch.manual_seed(0)
    x = torch.randn(batch, m, k).to(dtype)
    with poisoned_memory():
        got = symmetric_product(x, x, config=config)
    assert close(got, x.double() @ x.double().mT)
    assert torch.equal(got, got.mT)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("m", [64, 99])
def test_polynomial_with_everything(m, dtype, config):
    torch.manual_seed(1)
    g, other = commuting(2, m, dtype)
    with poisoned_memory():
        got = symmetric_product(g, g, g, alpha=2.0315, beta=-4.775, diagonal=3.4445, config=config)
        product = symmetric_product(other, g, alpha=0.25, config=config)
    eye = torch.eye(m, dtype=torch.float64)
    g64 = g.double()
    assert close(got, 2.0315 * g64 @ g64 - 4.775 * g64 + 3.4445 * eye)
    assert torch.equal(got, got.mT) and torch.equal(product, product.mT)
    # rounding makes the factors commute only nearly; the lower half is what was computed
    assert close(product.tril(), (0.25 * other.double() @ g64).tril())


@pytest.mark.parametrize("tma", [False, True])
def test_strides(tma):
    """Rows apart, matrices apart, transposed, and a start that TMA cannot take."""
    torch.manual_seed(2)
    config = replace(SQUARE, tma=tma)
    store = torch.randn(2, 40, 3, 64)
    for x in (
        store[:, :, 1],
        store[:, ::2, 0, :50],
        store[:, :, 0, 1:],
        store[:, :, 2].mT,
        store[:1, :, 0].expand(3, -1, -1),
    ):
        assert close(symmetric_product(x, x, config=config), x.double() @ x.double().mT)
    x = store[0, :, 1]
    c = torch.randn(80, 80)[::2, ::2]
    c = c + c.mT
    want = x.double() @ x.double().mT + 3 * c.double()
    assert close(symmetric_product(x, x, c, beta=3, config=config), want)
    assert symmetric_product(x[:0], x[:0]).shape == (0, 0)
    assert not symmetric_product(x[:, :0], x[:, :0], config=config).any()


@pytest.mark.parametrize(("bm", "bn"), [(16, 16), (16, 32), (32, 16), (48, 16)])
@pytest.mark.parametrize("m", [1, 16, 33, 100, 257])
def test_tiles_cover_the_lower_triangle_once(m, bm, bn):
    covered = np.zeros((m + bm, m + bn), dtype=int)
    for row, column in tile_order(m, bm, bn, group=3):
        covered[row : row + bm, column : column + bn] += 1
        below = np.arange(row, min(row + bm, m))[:, None] >= np.arange(column, column + bn)
        assert below.any(), "a tile with nothing to do"
    assert (covered[:m, :m][np.tril_indices(m)] == 1).all()


def test_half_of_the_tiles():
    config = choose_config((9, 0), 4096, torch.bfloat16)
    tiles = tile_order(4096, config.block_m, config.block_n, config.group)
    assert len(tiles) * config.block_m * config.block_n < 0.54 * 4096**2


def test_wrong_shapes_are_named():
    x = torch.randn(2, 8, 4)
    with pytest.raises(ValueError, match=r"\(2, 8, 4\), \(2, 8, 3\)"):
        symmetric_product(x, x[..., :3])
    with pytest.raises(ValueError, match=r"c \(batch, m, m\)"):
        symmetric_product(x, x, x)
    with pytest.raises(TypeError, match=r"one dtype.*float32.*float16"):
        symmetric_product(x, x.half())
