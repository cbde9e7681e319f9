"""Rows scaled by the kernel in Triton's interpreter, bit for bit as by plain torch.

fp16 stands for bf16 here: the interpreter cuts off where it should round to bf16.
"""

from __future__ import annotations

import os
from unittest import mock

import numpy as np
import pytest
import torch

from keel.optim.row_scaling import RowScaler, ScaledTensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from keel.kernels import row_scale

CPU = torch.device("cpu")
FACTORS = torch.tensor([1.0, 0.5, 1.0, 0.3, 1.7])


@pytest.fixture(autouse=True)
def small_blocks():
    with mock.patch.multiple(row_scale, BLOCK=16, SPLITS=2):
        yield


def tensors(dtype: torch.dtype, masters: bool = False) -> list[ScaledTensor]:
    """Matrices, a bias, a stack of three dims, runs of unequal length, one that is not aligned."""
    random = torch.Generator().manual_seed(0)
    shapes = [(12, 7), (12,), (6, 3, 5), (9, 33), (0, 4), (8, 4)]
    entries = [
        [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 0, 4],
        [4, 3, 2, 1, 0, 0, 1, 1, 1, 4, 4, 4],
        [3, 3, 3, 3, 3, 3],
        [1, 2, 3, 4, 1, 2, 3, 4, 1],
        [],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    found = []
    for shape, places in zip(shapes, entries, strict=True):
        wide = torch.randn(shape, generator=random)
        x = wide.to(dtype)
        if shape == (9, 33):
            x = torch.cat([x.flatten(), x.flatten()])[1:].as_strided(shape, (33, 1))
        found.append(ScaledTensor(x, np.array(places, dtype=np.int64), wide if masters else None))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_as_in_torch(dtype):
    one, two = tensors(dtype), tensors(dtype)
    RowScaler(one, CPU, "torch").scale(FACTORS)
    RowScaler(two, CPU, "triton").scale(FACTORS)
    for a, b, old in zip(one, two, tensors(dtype), strict=True):
        scale = FACTORS[torch.from_numpy(a.entries)].view(-1, *[1] * (old.tensor.ndim - 1))
        assert torch.equal(a.tensor, (old.tensor * scale).to(dtype))
        assert torch.equal(a.tensor, b.tensor)


def test_aligned_rows_are_known_as_such():
    seen = []
    real = row_scale.scale_runs
    with mock.patch.object(
        row_scale,
        "scale_runs",
        lambda f, runs, **kw: (seen.append(runs.aligned), real(f, runs, **kw)),
    ):
        for x in (torch.ones(4, 16), torch.ones(4, 17), torch.ones(65)[1:].view(4, 16)):
            RowScaler([ScaledTensor(x, np.array([1, 1, 3, 4]))], CPU, "triton").scale(FACTORS)
            torch.testing.assert_close(x[:, -1], FACTORS[[1, 1, 3, 4]])
    assert seen == [True, False, False]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_masters_are_scaled_and_rounded_where_the_factor_is_not_one(backend):
    parts, old = tensors(torch.float16, masters=True), tensors(torch.float16, masters=True)
    for part, before in zip(parts, old, strict=True):  # out of step with its master
        part.tensor.add_(1)
        before.tensor.add_(1)
    RowScaler(parts, CPU, backend).scale(FACTORS)
    for part, before in zip(parts, old, strict=True):
        scale = FACTORS[torch.from_numpy(part.entries)].view(-1, *[1] * (part.tensor.ndim - 1))
        assert torch.equal(part.master, before.master * scale)
        want = torch.where(scale != 1, part.master.half(), before.tensor)
        assert torch.equal(part.tensor, want)


def test_only_runs_with_a_factor_are_written():
    """A NaN times 1 may change its bits; rows of factor 1 are not even read."""
    x = torch.full((4, 40), float("nan")).view(torch.int32).bitwise_or(5).view(torch.float32)
    bits = x.view(torch.int32).clone()
    RowScaler([ScaledTensor(x, np.array([1, 1, 2, 2]))], CPU, "triton").scale(torch.ones(3))
    assert torch.equal(x.view(torch.int32), bits)


def test_what_is_not_dense_goes_to_torch():
    base = torch.ones(6, 8)
    view = base[:, ::2]
    part = ScaledTensor(view, np.array([1, 1, 0, 0, 3, 3]))
    RowScaler([part], CPU, "triton").scale(FACTORS)
    assert view[:, 0].tolist() == pytest.approx([0.5, 0.5, 1, 1, 0.3, 0.3])
    assert (base[:, 1::2] == 1).all()
