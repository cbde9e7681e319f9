"""The real Triton kernels, run by Triton's interpreter on the CPU, against the oracle.

fp32 and fp16 only: `tl.dot` on bf16 is broken in the interpreter of Triton 3.6.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.strategies import attn_masks

from keel import flex_flash_attn_func, masks, ops
from keel.masks import AttnMask
from keel.masks.inputs import tensors_of_mask
from keel.meta import Scoring
from keel.testing import Case, assert_right, judge, run_case

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from keel.kernels import flash_bwd, flash_fwd
from keel.kernels.flash_common import TileConfig


@pytest.fixture(autouse=True, params=[False, True], ids=["pointers", "tma"])
def small_tiles(request):
    """Tiles so small that a few dozen tokens span several, of unequal sides."""
    tma = request.param
    forward = TileConfig(16, 32, 4, 1, tma)
    backward = TileConfig(16, 32, 4, 1, tma), TileConfig(32, 16, 4, 1, tma)
    with (
        mock.patch.object(flash_fwd, "choose_config", lambda *_: forward),
        mock.patch.object(flash_bwd, "choose_configs", lambda *_: backward),
    ):
        yield


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mask = draw(attn_masks(max_tokens=49, max_slices=5))
    hk = draw(st.sampled_from([1, 2]))
    hq = hk * draw(st.sampled_from([1, 2, 4]))
    bias = tuple(draw(st.sampled_from([1, n])) for n in (hq, mask.tq, mask.tk))
    return Case(
        mask=mask,
        hq=hq,
        hk=hk,
        d=draw(st.sampled_from([8, 16, 40, 64])),
        dv=draw(st.sampled_from([None, 16, 24])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),
        seed=draw(st.integers(0, 1000)),
        scale=draw(st.sampled_from([None, None, 0.7, -0.4, 0.0])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        sink=draw(st.booleans()),
        bias_shape=bias if draw(st.integers(0, 3)) == 0 else None,
        alibi=draw(st.integers(0, 3)) == 0,
        with_dlse=draw(st.booleans()),
    )


@settings(
    max_examples=35,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases(), deterministic=st.booleans(), sm_margin=st.sampled_from([0, 0, 1]))
def test_random_problems(case, deterministic, sm_margin):
    assert_right(case, backend="triton", deterministic=deterministic, sm_margin=sm_margin)


def test_several_row_sets_in_one_tile():
    # Two far intervals per row, in tiles that also hold rows with one and with none.
    slices = [[0, 20], [10, 40], [10, 40]], [[0, 7], [25, 33], [60, 64]]
    mask = AttnMask.from_ranges(*slices, None, 45, 64)
    assert_right(Case(mask=mask, hq=4, hk=2, d=16), backend="triton")


def test_bias_of_minus_infinity_hides_whole_rows():
    q, k, v = torch.randn(3, 40, 2, 16).unbind()
    bias = torch.zeros(1, 40, 40)
    bias[:, 3] = -torch.inf
    results = []
    for backend in ("triton", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, meta = flex_flash_attn_func(
            *leaves, masks.full(40), bias=bias, return_max_logits=True, backend=backend
        )
        out.sum().backward()
        results.append([out, meta.lse, meta.max_logits, *(x.grad for x in leaves)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_accumulation_over_parts_of_the_keys():
    mask = masks.documents([0, 13, 50], causal=True)
    case = Case(mask=mask, hq=4, hk=2, d=16, with_dlse=False)
    made = case.tensors()
    out, lse = torch.zeros(50, 4, 16), torch.full((50, 4), -torch.inf)
    top = torch.full((4,), -torch.inf)
    for start, end in ((0, 5), (5, 30), (30, 30), (30, 50)):
        part = mask.cut(k=(start, end))
        ops.accumulate_(
            *(out, lse, top, made["q"], made["k"][start:end], made["v"][start:end]),
            tensors_of_mask(part),
            Scoring(scale=16**-0.5),
            sm_margin=0,
            backend="triton",
        )
    got = run_case(case, backend="triton") | {"out": out, "lse": lse, "max_logits": top}
    assert all(c.ok for c in judge(case, got))


@pytest.mark.parametrize("value", [-3.0, -0.0, 0.0, 2.0, float("nan")])
def test_max_logits_of_any_sign(value):
    """One logit per head, against a running maximum of either sign."""
    q, k = torch.full((1, 1, 8), 1.0), torch.full((1, 1, 8), value / 8)
    for start in (-torch.inf, -1.0, 1.0):
        running = torch.tensor([start])
        flex_flash_attn_func(
            *(q, k, k, masks.full(1)),
            softmax_scale=1.0,
            max_logits_out=running,
            backend="triton",
        )
        assert torch.equal(running.isnan(), torch.tensor([value != value])), (
            "a NaN must stay, and come from nowhere else"
        )
        if value == value:
            assert running.item() == max(start, value)


def test_autograd_sees_that_the_kernel_wrote_to_the_running_maximum():
    q, k, v = torch.randn(3, 8, 1, 8).unbind()
    running = torch.zeros(1)
    before = running._version
    flex_flash_attn_func(q, k, v, masks.causal(8), max_logits_out=running, backend="triton")
    assert running._version > before


def test_max_logits_keeps_a_nan_of_another_tile():
    q, k, v = torch.randn(3, 64, 1, 8).unbind()
    q[40, 0, 0] = float("nan")
    _, meta = flex_flash_attn_func(
        q, k, v, masks.causal(64), return_max_logits=True, backend="triton"
    )
    assert meta.max_logits.isnan().all()


def test_strides_and_offsets():
    """Views of every sort: heads first, sliced heads, a strided last dim."""
    mask = masks.causal(37)
    storage = torch.randn(3, 4, 80, 32)
    heads_first = storage[0, :, 40:77, :16].transpose(0, 1)
    sliced = storage[1, :2, 3:40, 8:24].transpose(0, 1)
    strided = storage[2, :2, :37, ::2].transpose(0, 1)
    expected, _ = flex_flash_attn_func(heads_first, sliced, strided, mask, backend="reference")
    got, _ = flex_flash_attn_func(heads_first, sliced, strided, mask, backend="triton")
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
