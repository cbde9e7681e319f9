"""Megatron's names: fused and plain paths agree, and do what the originals drop or refuse."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.compat import megatron
from keel.softmax import (
    AttnMaskType,
    FusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
    SoftmaxOne,
)

INF = float("inf")


def fill(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What Megatron masks with: in place."""
    return scores.masked_fill_(mask, -10000.0)


def module(**changes: Any) -> FusedScaleMaskSoftmax:
    arguments: dict[str, Any] = {
        "input_in_fp16": False,
        "input_in_bf16": False,
        "attn_mask_type": AttnMaskType.padding,
        "scaled_masked_softmax_fusion": True,
        "mask_func": fill,
        "softmax_in_fp32": True,
        "scale": None,
    }
    return FusedScaleMaskSoftmax(**(arguments | changes))


@settings(max_examples=150)
@given(
    kind=st.sampled_from(list(AttnMaskType)),
    sq=st.integers(1, 12),
    sk=st.integers(1, 12),
    window=st.none() | st.tuples(st.integers(-1, 5), st.integers(-1, 5)),
    with_mask=st.booleans(),
    with_offset=st.booleans(),
    scale=st.sampled_from([None, 0.5, 3.0]),
    uniform=st.booleans(),
)
def test_fused_and_plain_agree(
    kind: AttnMaskType,
    sq: int,
    sk: int,
    window: tuple[int, int] | None,
    with_mask: bool,
    with_offset: bool,
    scale: float | None,
    uniform: bool,
) -> None:
    torch.manual_seed(sq * 12 + sk)
    x = torch.randn(2, 3, sq, sk, dtype=torch.float64)
    mask = torch.rand(2, 1, sq, sk) > 0.5 if with_mask else None
    offset = torch.randn(3, dtype=torch.float64) if with_offset else None
    softmax = module(
        attn_mask_type=kind,
        window_size=window,
        scale=scale,
        fully_masked="uniform" if uniform else "zeros",
    )
    results = []
    for path in (softmax.forward_fused_softmax, softmax.forward_torch_softmax):
        leaf = x.clone().requires_grad_()
        try:
            y = path(leaf, mask, offset)
        except AssertionError as error:  # both paths refuse the same
            results.append([str(error)])
            continue
        results.append([y, *torch.autograd.grad(y, leaf, torch.arange(float(sk)).expand_as(y))])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        if isinstance(a, str):
            assert a == b
        else:
            torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("shape", [(3, 5, 16, 16), (1, 1, 4, 214), (2, 3, 7, 33), (1, 2, 1, 9)])
def test_every_shape_is_fused(shape: tuple[int, ...]) -> None:
    softmax = module(attn_mask_type=AttnMaskType.no_mask)
    assert softmax.is_kernel_available(None, *shape)
    x = torch.randn(shape)
    torch.testing.assert_close(softmax(x, None), torch.softmax(x, -1))


def test_a_window_keeps_the_callers_mask() -> None:
    mask = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    mask[..., 3] = True
    for fusion in (True, False):
        softmax = module(
            attn_mask_type=AttnMaskType.causal,
            window_size=(2, 0),
            scaled_masked_softmax_fusion=fusion,
        )
        seen = softmax(torch.zeros(1, 1, 6, 6), mask)[0, 0] > 0
        i, j = torch.arange(6)[:, None], torch.arange(6)
        assert torch.equal(seen, (j <= i) & (j >= i - 2) & (j != 3))


@pytest.mark.parametrize("fusion", [True, False])
def test_a_window_that_is_open_to_the_right_stays_causal(fusion: bool) -> None:
    softmax = module(
        attn_mask_type=AttnMaskType.causal,
        window_size=(2, -1),
        scaled_masked_softmax_fusion=fusion,
    )
    seen = softmax(torch.zeros(1, 1, 6, 6), None)[0, 0] > 0
    i, j = torch.arange(6)[:, None], torch.arange(6)
    assert torch.equal(seen, (j <= i) & (j >= i - 2))


def test_causal_keeps_the_callers_mask() -> None:
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 0] = True
    y = module(attn_mask_type=AttnMaskType.causal)(torch.zeros(1, 1, 4, 4), mask)
    assert y[0, 0, 3].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert y[0, 0, 1].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("fusion", [True, False])
def test_the_callers_scores_are_not_written_to(fusion: bool) -> None:
    x = torch.randn(1, 2, 4, 4)
    kept = x.clone()
    softmax = module(scaled_masked_softmax_fusion=fusion)
    softmax(x, torch.rand(1, 1, 4, 4) > 0.5)
    assert torch.equal(x, kept)


def test_a_mask_function_that_does_more_is_honoured() -> None:
    def halve(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, scores / 2, scores)

    softmax = module(mask_func=halve)
    x, mask = torch.randn(1, 1, 3, 4), torch.rand(1, 1, 3, 4) > 0.5
    assert not softmax.is_kernel_available(mask, 1, 1, 3, 4)
    assert softmax.is_kernel_available(None, 1, 1, 3, 4)
    torch.testing.assert_close(softmax(x, mask), torch.softmax(halve(x, mask), -1))


def test_dtypes() -> None:
    x = torch.randn(1, 1, 4, 4)
    for name, dtype in (("input_in_fp16", torch.float16), ("input_in_bf16", torch.bfloat16)):
        for fusion in (True, False):
            softmax = module(**{name: True}, scaled_masked_softmax_fusion=fusion)
            assert softmax(x.to(dtype), None).dtype == dtype
            assert softmax(x, None).dtype == dtype


def test_megatrons_own_enum_works() -> None:
    import enum

    theirs = enum.Enum("AttnMaskType", {"padding": 1, "causal": 2})
    y = module(attn_mask_type=theirs.causal)(torch.zeros(1, 1, 2, 2), None)
    assert y.tolist() == [[[[1.0, 0.0], [0.5, 0.5]]]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_in_fp16": True, "input_in_bf16": True}, "cannot both be set"),
        ({"scale": 2.0, "softmax_in_fp32": False}, "softmax should be in fp32 when scaled"),
        ({"attn_mask_type": "diagonal"}, "unknown attn_mask_type 'diagonal'"),
    ],
)
@pytest.mark.parametrize("kind", [ValueError, AssertionError])
def test_bad_constructions(changes: dict[str, Any], message: str, kind: type) -> None:
    with pytest.raises(kind, match=message):
        module(**changes)


@pytest.mark.parametrize("fusion", [True, False])
def test_bad_calls(fusion: bool) -> None:
    softmax = module(attn_mask_type=AttnMaskType.causal, scaled_masked_softmax_fusion=fusion)
    with pytest.raises(AssertionError, match=r"needs sq == sk, got \(4, 16\)"):
        softmax(torch.zeros(1, 1, 4, 16), None)
    with pytest.raises(AssertionError, match=r"scores must be \(b, np, sq, sk\)"):
        softmax(torch.zeros(1, 4, 4), None)
    assert softmax(torch.zeros(1, 1, 1, 16), None).shape == (1, 1, 1, 16)  # decoding


def test_scaled_classes() -> None:
    x = torch.randn(4, 6, 6, requires_grad=True)
    triangle = torch.ones(6, 6).triu(1).bool()
    want = torch.softmax((x * 0.5).masked_fill(triangle, -INF), -1)
    torch.testing.assert_close(ScaledUpperTriangMaskedSoftmax.apply(x, 0.5), want)
    torch.testing.assert_close(ScaledSoftmax.apply(x[None], 2.0), torch.softmax(x[None] * 2, -1))
    torch.testing.assert_close(ScaledSoftmax.apply(x[None], None), torch.softmax(x[None], -1))
    masked = ScaledMaskedSoftmax.apply(x[None], triangle[None, None].to(torch.uint8), 0.5)
    torch.testing.assert_close(masked, want[None])
    with pytest.raises(ValueError, match="causal scores must be square"):
        ScaledUpperTriangMaskedSoftmax.apply(torch.zeros(1, 2, 3), 1.0)


def test_softmax_one() -> None:
    x = torch.randn(2, 3, 4, 5)
    off_by_one = torch.exp(x) / (1 + torch.exp(x).sum(-1, keepdim=True))
    torch.testing.assert_close(SoftmaxOne()(x), off_by_one)
    torch.testing.assert_close(SoftmaxOne(-1, torch.zeros(3))(x), off_by_one)
    torch.testing.assert_close(SoftmaxOne(-1, 0.0)(x), torch.softmax(x, -1))
    torch.testing.assert_close(SoftmaxOne(2)(x), SoftmaxOne()(x.transpose(2, 3)).transpose(2, 3))
    assert SoftmaxOne()(x * 1e10).isfinite().all()
    sink = torch.nn.Parameter(torch.randn(3))
    SoftmaxOne(-1, sink)(x).sum().backward()
    assert sink.grad is not None and (sink.grad < 0).all()  # more sink, less for everyone
    with pytest.raises(ValueError, match="denominator_offset must be at least 0"):
        SoftmaxOne(-1, -1.0)


@pytest.mark.parametrize(
    ("sk", "rows"), [(17, 8), (128, 8), (129, 4), (4096, 4), (16, 16), (8, 32)]
)
def test_batch_per_block(sk: int, rows: int) -> None:
    assert FusedScaleMaskSoftmax.get_batch_per_block(64, sk, 2, 4) == rows


@pytest.fixture
def installed() -> Iterator[None]:
    assert set(megatron.install()) == set(megatron.MODULES)
    yield
    megatron.uninstall()
    assert not set(megatron.MODULES) & set(sys.modules)


class TheirMaskedSoftmax(torch.autograd.Function):
    """Written after Megatron's published wrapper: it knows nothing of Keel."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        import scaled_masked_softmax_cuda

        scale_t = torch.tensor([scale])
        result = scaled_masked_softmax_cuda.forward(inputs, mask, scale_t[0])
        ctx.save_for_backward(result, scale_t)
        return result

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        import scaled_masked_softmax_cuda

        result, scale_t = ctx.saved_tensors
        return scaled_masked_softmax_cuda.backward(grads, result, scale_t[0]), None, None


def test_an_unmodified_wrapper_runs(installed: None) -> None:
    import scaled_masked_softmax_cuda

    assert scaled_masked_softmax_cuda.get_batch_per_block(64, 64, 2, 4) == 8
    x = torch.randn(2, 3, 8, 8)
    mask = torch.rand(2, 1, 8, 8) > 0.4
    mask[0, 0, 0] = True
    results = []
    for call in (TheirMaskedSoftmax.apply, ScaledMaskedSoftmax.apply):
        leaf = x.clone().requires_grad_()
        y = call(leaf, mask, 0.7)
        (grad,) = torch.autograd.grad(y, leaf, torch.cos(x))
        results.append((y, grad))
    torch.testing.assert_close(results[0], results[1])
    assert (results[0][0][0, :, 0] == 0).all()


def test_causal_and_plain_modules(installed: None) -> None:
    import generic_scaled_masked_softmax_cuda
    import scaled_softmax_cuda
    import scaled_upper_triang_masked_softmax_cuda as causal_cuda

    x, dy = torch.randn(2, 6, 9, 9).unbind()
    y = causal_cuda.forward(x, torch.tensor(0.3))
    leaf = x.clone().requires_grad_()
    want = torch.softmax((leaf * 0.3).masked_fill(torch.ones(9, 9).triu(1).bool(), -INF), -1)
    kept = dy.clone()
    torch.testing.assert_close(y, want)
    (grad,) = torch.autograd.grad(want, leaf, dy)
    torch.testing.assert_close(causal_cuda.backward(dy, y, 0.3), grad)
    assert torch.equal(dy, kept), "gradients are not written to"
    plain = scaled_softmax_cuda.forward(x[None], 2.0)
    torch.testing.assert_close(plain, torch.softmax(x[None] * 2, -1))
    masked = generic_scaled_masked_softmax_cuda.forward(x[None], torch.zeros(9, 9) > 0, 2.0)
    assert torch.equal(masked, plain)
    with pytest.raises(ValueError, match=r"must be \(n, s, s\)"):
        causal_cuda.forward(x[None], 1.0)
    with pytest.raises(ValueError, match="must have one shape"):
        causal_cuda.backward(dy[:1], y, 1.0)


def test_install_leaves_a_real_extension_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(sys)("scaled_softmax_cuda")
    monkeypatch.setitem(sys.modules, "scaled_softmax_cuda", real)
    assert "scaled_softmax_cuda" not in megatron.install()
    assert sys.modules["scaled_softmax_cuda"] is real
    assert "scaled_softmax_cuda" in megatron.install(replace=True)
    megatron.uninstall()
