"""The softmax kernels in the interpreter: every way through a row, against the oracle."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.softmax_cases import SoftmaxCase, assert_right, random_case

from keel.kernels import launch, softmax
from keel.kernels.softmax import RowConfig, choose_config
from keel.softmax import scaled_masked_softmax
from keel.testing import poisoned_memory

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's

CONFIGS = [
    None,
    RowConfig(1, 64, 4, True),
    RowConfig(4, 128, 4, True),
    RowConfig(2, 256, 1, True, packed=True),
    RowConfig(1, 16, 4, False),
    RowConfig(2, 32, 4, False),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_against_the_oracle(config, seed, dtype):
    case = random_case(random.Random(seed), dtype, rows=6)
    with pytest.MonkeyPatch.context() as patch:
        if config is not None:
            patch.setattr(softmax, "choose_config", lambda *_: config)
        launch._recipes.clear()
        assert_right(case, "triton")
    launch._recipes.clear()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("banded", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_every_length_has_a_config(direction, banded, masked):
    for sk in [*range(1, 300), *(n + d for n in (2**p for p in range(9, 19)) for d in (-1, 0, 1))]:
        config = choose_config(sk, direction, banded, masked)
        assert config.rows >= 1 and config.num_warps in (1, 2, 4, 8, 16, 32)
        if config.one_pass:
            assert config.width >= sk
        else:
            assert sk > 8192
        assert config.width & (config.width - 1) == 0 and config.rows & (config.rows - 1) == 0


def test_a_long_row_in_two_passes():
    case = random_case(random.Random(3), torch.float32)
    case.x, case.dy = torch.randn(2, 1, 1, 2, 33_000).unbind()
    case.sink, case.options = None, {"causal": True, "window": None, "fully_masked": "zeros"}
    assert_right(case, "triton")


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize(
    "band",
    [
        {"causal": "top-left", "window": None},
        {"causal": False, "window": (20, 3)},
        {"causal": False, "window": (500, 0)},
        {"causal": True, "window": (150, None)},
    ],
    ids=str,
)
def test_short_spans_in_long_rows(band, uniform):
    """Code for a part of the width, and zeros on both sides of it, all written."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 1, 2, 6, 1000).unbind()
    mask = torch.zeros(6, 1, dtype=torch.bool)
    mask[2] = True
    options = {**band, "mask": mask, "fully_masked": "uniform" if uniform else "zeros"}
    constants = softmax._shape_constants(
        choose_config(1000, "forward", True, True), 0, 3, 6, 1000, 0
    )
    assert constants["CLASSES"] == 4
    with poisoned_memory():
        assert_right(SoftmaxCase(x, dy, None, options), "triton")


def test_a_very_low_sink_leaves_zeros():
    x = torch.randn(1, 1, 3, 20)
    y = scaled_masked_softmax(
        x, torch.arange(3)[:, None] == 1, sink=torch.tensor([-300.0]), backend="triton"
    )
    assert y[0, 0].sum(1).tolist() == pytest.approx([1.0, 0.0, 1.0])


@pytest.mark.parametrize("backend", ["triton", "blocked"])
def test_what_is_hidden_may_have_any_gradient(backend):
    x = torch.randn(1, 1, 3, 20, requires_grad=True)
    hidden = torch.arange(20) > 11
    y = scaled_masked_softmax(x, hidden, backend=backend)
    dy = torch.randn_like(y).masked_fill(hidden, float("inf"))
    (dx,) = torch.autograd.grad(y, x, dy)
    assert dx.isfinite().all() and (dx[..., hidden] == 0).all() and (dx[..., ~hidden] != 0).any()
