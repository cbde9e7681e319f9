"""The softmax kernels in the interpreter: every way through a row, against the oracle."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.softmax_cases import SoftmaxCase, assert_right, random_case

from keel.kernels import launch, softmax_bwd, softmax_fwd
from keel.kernels.softmax_common import RowConfig, shape_constants
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
    RowConfig(1, 64, 4, True, stages=3),
    RowConfig(1, 16, 4, True, parts=5),
    RowConfig(2, 32, 4, True, parts=3, packed=True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_against_the_oracle(config, seed, dtype):
    # a whole block of rows and part of another one: the interpreter is slow
    case = random_case(random.Random(seed), dtype, rows=6 if config is None else config.rows + 2)
    with pytest.MonkeyPatch.context() as patch:
        if config is not None:
            if config.parts > 1:
                config = replace(config, parts=-(-(case.x.shape[-1] + 7) // config.width))
            patch.setattr(softmax_fwd, "choose_config", lambda *_: config)
            patch.setattr(softmax_bwd, "choose_config", lambda *_: config)
        launch._recipes.clear()
        assert_right(case, "triton")
    launch._recipes.clear()


@pytest.mark.parametrize("banded", [False, True])
@pytest.mark.parametrize("mask_bytes", [0, 1, 4])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_length_has_a_config(banded, mask_bytes, itemsize):
    for sk in [*range(1, 300), *(n + d for n in (2**p for p in range(9, 19)) for d in (-1, 0, 1))]:
        for shared, unit in ((101_376, 8), (232_448, 8), (232_448, 1)):
            forward = softmax_fwd.choose_config(sk, banded, mask_bytes, itemsize, unit, shared)
            backward = softmax_bwd.choose_config(sk, banded, unit)
            skewed = (
                softmax_fwd.choose_skewed(sk, banded, mask_bytes),
                softmax_bwd.choose_skewed(sk),
            )
            assert all(not c.one_pass or c.parts * c.width >= sk + 7 for c in skewed)
            for config in (forward, backward, *skewed):
                assert config.rows >= 1 and config.num_warps in (1, 2, 4, 8, 16, 32)
                assert config.width * config.parts >= sk if config.one_pass else sk > 4096
                assert config.width.bit_count() == config.rows.bit_count() == 1
            buffered = max(0, forward.stages - 1) * forward.parts * forward.width
            assert buffered * (itemsize + mask_bytes) < shared


@pytest.mark.parametrize("turn", [0, 1, 3, 4, 16])
def test_heads_that_take_turns(monkeypatch, turn):
    """Some turns end with the rows, some are padded; a mask for each head has none."""
    torch.manual_seed(turn)
    monkeypatch.setattr(softmax_fwd, "rows_of_a_turn", lambda mask: turn)
    monkeypatch.setattr(softmax_fwd, "choose_config", lambda *_: RowConfig(1, 64, 4, True))
    launch._recipes.clear()
    x, dy = torch.randn(2, 2, 3, 12, 64).unbind()
    for causal in (False, True):
        options = {"causal": causal, "window": None, "fully_masked": "zeros"}
        mask = torch.rand(2, 1, 12, 64) > 0.5
        with poisoned_memory():
            assert_right(SoftmaxCase(x, dy, None, {**options, "mask": mask}), "triton")
    launch._recipes.clear()


@pytest.mark.parametrize("turn", [0, 64])
@pytest.mark.parametrize(("sq", "sk"), [(13, 64), (16, 64), (13, 61), (5, 130)])
def test_nothing_is_written_behind_the_rows(monkeypatch, sq, sk, turn):
    """Where a row fills its width, only the number of rows says where a program must stop; and the
    last vector of odd rows is not all theirs.
    """
    monkeypatch.setattr(softmax_fwd, "rows_of_a_turn", lambda mask: turn)
    launch._recipes.clear()
    x, dy = torch.randn(2, 1, 2, sq, sk).unbind()
    size = x.numel()
    y, dx = (torch.full((size + 2048,), 7.0) for _ in range(2))
    options = {"scale": 0.5, "softcap": 0.0, "band": (-(1 << 40), 1 << 40)}
    fitting = y[:size].view(x.shape)
    softmax_fwd.forward(x, None, None, **options, uniform=False, y=fitting)
    softmax_bwd.backward(dy, fitting, None, **options, dx=dx[:size].view(x.shape))
    launch._recipes.clear()
    assert (y[size:] == 7).all() and (dx[size:] == 7).all()
    torch.testing.assert_close(fitting, torch.softmax(x * 0.5, -1))


@pytest.mark.parametrize("sk", [13, 37, 91])
@pytest.mark.parametrize("causal", [False, True])
def test_odd_rows_do_not_touch_their_neighbours(sk, causal):
    """Rows that share a vector with a row of NaNs and infinities, in either direction."""
    torch.manual_seed(sk)
    x, dy = torch.randn(1, 2, 9, sk), torch.randn(1, 2, 9, sk)  # both begin with a vector
    mask = torch.rand(1, 1, 9, sk) > 0.6
    for hidden in (None, mask):
        options = {"mask": hidden, "causal": "top-left" if causal else False}
        clean = x.clone().requires_grad_()
        scaled_masked_softmax(clean, backend="triton", **options).backward(dy)
        bad = x.clone()
        bad[:, :, 4] = torch.nan
        bad.requires_grad_()
        bad_dy = dy.clone()
        bad_dy[:, :, 4] = torch.inf
        y = scaled_masked_softmax(bad, backend="triton", **options)
        y.backward(bad_dy)
        rest = torch.arange(9) != 4
        want = scaled_masked_softmax(x, backend="triton", **options)
        assert torch.equal(y.detach()[:, :, rest], want[:, :, rest])
        assert torch.equal(bad.grad[:, :, rest], clean.grad[:, :, rest])
        assert y[:, :, 4].isnan().any()


@pytest.mark.parametrize("sink", [None, 0.3])
def test_rows_that_see_nothing_in_full_tiles(sink):
    """16 rows of 64 columns are a tile without a column to spare; 3 rows of it are hidden."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 1, 2, 16, 64).unbind()
    hidden = (torch.arange(16) % 6 == 0)[:, None].expand(16, 64).clone()
    options = {"causal": False, "window": None, "fully_masked": "uniform", "mask": hidden}
    sinks = None if sink is None else torch.full((2,), sink)
    assert_right(SoftmaxCase(x, dy, sinks, options), "triton")


def test_only_shared_masks_make_heads_take_turns():
    mask = torch.zeros(1, 1, 4096, 4096, dtype=torch.uint8)
    assert softmax_fwd.rows_of_a_turn(None) == 0
    assert softmax_fwd.rows_of_a_turn(mask.expand(2, 8, -1, -1)) == 2048
    assert softmax_fwd.rows_of_a_turn(mask[:, :, :2048].expand(2, 8, -1, -1)) == 0  # one turn
    assert softmax_fwd.rows_of_a_turn(mask) == 0  # one head
    assert softmax_fwd.rows_of_a_turn(mask[:, :, :1].expand(2, 8, 4096, -1)) == 0  # one row
    assert softmax_fwd.rows_of_a_turn(torch.zeros(1, 2, 64, 64, dtype=torch.uint8)) == 0


@pytest.mark.parametrize("sk", [24, 40, 37, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_at_multiples_of_eight_and_others(sk, causal):
    """Whole vectors where every row allows them; also rows of a wider tensor."""
    torch.manual_seed(sk)
    for padding in (0, 3, 8):
        x, dy = torch.randn(2, 2, 2, 9, sk + padding)[..., :sk].unbind()
        options = {"causal": causal, "window": None, "fully_masked": "zeros"}
        options["mask"] = torch.rand(2, 1, 9, sk + padding)[..., :sk] > 0.7
        with poisoned_memory():
            assert_right(SoftmaxCase(x, dy, None, options), "triton")


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
    config = softmax_fwd.choose_config(1000, True, 1, 4, 8, 232_448)
    constants = shape_constants(config, (0, 3), 6, 1000, 8)
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
