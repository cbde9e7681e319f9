"""The fused softmax on the CPU: against the oracle, its promises, its errors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.softmax_cases import assert_right, random_case, run

from keel.softmax import explain, scaled_masked_softmax

INF = float("inf")


@settings(max_examples=450)
@given(st.integers(0, 1 << 30))
def test_against_the_oracle_in_fp64(seed: int) -> None:
    assert_right(random_case(random.Random(seed), torch.float64), "blocked")


@settings(max_examples=60)
@given(st.integers(0, 1 << 30), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_against_the_oracle_in_low_precision(seed: int, dtype: torch.dtype) -> None:
    assert_right(random_case(random.Random(seed), dtype), "blocked")


@pytest.mark.parametrize("shape", [(1, 1, 1, 5000), (1, 2, 3, 4999), (2, 1, 1237, 33)])
def test_long_rows_and_many_of_them(shape: tuple[int, ...]) -> None:
    case = random_case(random.Random(0), torch.float64)
    case.x, case.dy = torch.randn(2, *shape, dtype=torch.float64).unbind()
    case.sink, case.options = None, {"scale": 0.5, "causal": True, "window": None}
    case.options["fully_masked"] = "zeros"
    assert_right(case, "blocked")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "scale": 0.3},
        {"causal": "top-left"},
        {"window": (2, 1)},
        {"softcap": 2.0, "mask": torch.rand(2, 1, 5, 7) > 0.5},
        {"mask": torch.randn(1, 3, 1, 7, dtype=torch.float64), "fully_masked": "uniform"},
        {"mask": torch.ones(5, 7, dtype=torch.bool).triu(1), "fully_masked": "uniform"},
    ],
)
@pytest.mark.parametrize("with_sink", [False, True])
def test_gradcheck(options: dict[str, Any], with_sink: bool) -> None:
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(3, dtype=torch.float64, requires_grad=True) if with_sink else None
    assert torch.autograd.gradcheck(
        lambda x, sink: scaled_masked_softmax(x, sink=sink, **options), (x, sink)
    )


@settings(max_examples=60)
@given(st.integers(0, 1 << 30))
def test_rows_sum_to_one_or_zero_and_repeat(seed: int) -> None:
    case = random_case(random.Random(seed), torch.float64)
    case.sink = None
    first, second = run(case, "blocked"), run(case, "blocked")
    for name, value in first.items():
        assert torch.equal(value, second[name])
    sums = first["y"].sum(-1)
    assert ((sums - 1).abs() < 1e-12).logical_or(sums == 0).all()


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (2, 3, 5, 7)])
def test_fewer_dims(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    mask = torch.arange(7) % 3 == 1
    want = torch.softmax((x * 0.5).masked_fill(mask, -INF), -1)
    got, top = scaled_masked_softmax(x, mask, scale=torch.tensor(0.5), return_max_logits=True)
    torch.testing.assert_close(got, want)
    assert top.shape == ((3,) if len(shape) > 2 else (1,))


def test_nothing_replaces_anything() -> None:
    """Mask, causality and window together hide what each of them hides."""
    x = torch.zeros(1, 1, 6, 6)
    mask = torch.zeros(1, 1, 1, 6, dtype=torch.bool)
    mask[..., 2] = True
    seen = scaled_masked_softmax(x, mask, causal=True, window=(2, 3)) > 0
    i, j = torch.arange(6)[:, None], torch.arange(6)
    assert torch.equal(seen[0, 0], (j <= i) & (j >= i - 2) & (j != 2))


@pytest.mark.parametrize(
    ("causal", "last_seen"),
    [(True, [1, 2, 3]), ("bottom-right", [1, 2, 3]), ("top-left", [0, 1, 2])],
)
def test_corners_of_causality(causal: Any, last_seen: list[int]) -> None:
    y = scaled_masked_softmax(torch.zeros(3, 4), causal=causal)
    assert [int(row.nonzero().max()) for row in y] == last_seen


def test_open_windows_hide_nothing() -> None:
    x = torch.randn(2, 2, 5, 8)
    for window in ((-1, -1), (None, None), (100, 100)):
        torch.testing.assert_close(scaled_masked_softmax(x, window=window), torch.softmax(x, -1))
    causal = scaled_masked_softmax(x, causal=True)
    assert torch.equal(scaled_masked_softmax(x, window=(-1, 0)), causal)


def test_sink_is_a_logit_and_a_number_serves_all_heads() -> None:
    x = torch.randn(2, 3, 4, 5)
    want = torch.softmax(torch.cat([x, torch.zeros(2, 3, 4, 1)], -1), -1)[..., :-1]
    torch.testing.assert_close(scaled_masked_softmax(x, sink=0.0), want)
    torch.testing.assert_close(scaled_masked_softmax(x, sink=torch.zeros(3)), want)


def test_rows_that_see_nothing() -> None:
    x = torch.randn(1, 1, 2, 4, requires_grad=True)
    mask = torch.tensor([[True] * 4, [False] * 4])
    zeros = scaled_masked_softmax(x, mask)
    uniform = scaled_masked_softmax(x, mask, fully_masked="uniform")
    assert zeros[0, 0, 0].tolist() == [0.0] * 4 and uniform[0, 0, 0].tolist() == [0.25] * 4
    assert torch.equal(zeros[0, 0, 1], uniform[0, 0, 1])
    for y in (zeros, uniform):
        (grad,) = torch.autograd.grad(y, x, torch.randn_like(y))
        assert (grad[0, 0, 0] == 0).all() and (grad[0, 0, 1] != 0).any()


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(1, 1, 3, 4)
    x[0, 0, 1, 2] = float("nan")
    y, top = scaled_masked_softmax(x, return_max_logits=True)
    assert y[0, 0].isnan().any(1).tolist() == [False, True, False] and top.isnan().all()
    # ... and a hidden one touches nothing.
    hidden = scaled_masked_softmax(x, torch.arange(4) == 2)
    assert hidden.isfinite().all()


def test_arguments_stay_as_they_are() -> None:
    x, mask = torch.randn(1, 2, 4, 6, requires_grad=True), torch.rand(4, 6) > 0.5
    kept = x.detach().clone(), mask.clone()
    y = scaled_masked_softmax(x, mask, scale=2.0)
    dy = torch.randn_like(y)
    dy_kept, y_kept = dy.clone(), y.detach().clone()
    y.backward(dy)
    assert torch.equal(x, kept[0]) and torch.equal(mask, kept[1])
    assert torch.equal(dy, dy_kept) and torch.equal(y, y_kept)


def test_empty() -> None:
    for shape in ((0, 2, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)):
        x = torch.randn(shape, requires_grad=True)
        y, top = scaled_masked_softmax(x, causal=True, return_max_logits=True)
        assert y.shape == shape and (top == -INF).all()
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == shape


BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(3)}, r"x must be .* got shape \(3,\)"),
    ({"x": torch.zeros(1, 1, 1, 2, 2)}, "x must be"),
    ({"x": torch.zeros(2, 2, dtype=torch.int32)}, "x must be floating point, got torch.int32"),
    ({"mask": torch.zeros(3, 4)[:, :3] > 0}, r"mask of shape \(3, 3\) cannot be broadcast to x"),
    ({"mask": torch.zeros(1, 1, 1, 3, 4) > 0}, "cannot be broadcast"),
    ({"mask": torch.zeros(3, 4, dtype=torch.int64)}, "mask must be bool or uint8 .* torch.int64"),
    ({"mask": torch.zeros(3, 4, requires_grad=True)}, "masks get none here"),
    ({"mask": torch.zeros(3, 4, device="meta") > 0}, "mask must be on cpu like x, got meta"),
    ({"causal": "left"}, "causal must be a bool, 'top-left' or 'bottom-right', got 'left'"),
    ({"window": (-2, 0)}, r"window must be \(left, right\), each at least 0"),
    ({"window": 5}, r"window must be \(left, right\), got 5"),
    ({"window": (0, 0), "causal": "top-left"}, "leave nothing to see"),
    ({"sink": torch.zeros(3)}, r"sink must be floating point of shape \(2,\)"),
    ({"sink": torch.zeros(2, dtype=torch.int32)}, "sink must be floating point"),
    ({"scale": float("nan")}, "scale must be finite"),
    ({"scale": torch.ones(2)}, "scale must be one number"),
    ({"softcap": -1.0}, "softcap must be 0"),
    ({"fully_masked": "one"}, "fully_masked must be 'zeros' or 'uniform', got 'one'"),
    ({"backend": "reference"}, "unknown backend 'reference'"),
    ({"backend": "triton"}, "backend 'triton' cannot run here"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"x": torch.zeros(1, 2, 3, 4)}
    with pytest.raises(ValueError, match=message):
        scaled_masked_softmax(**(good | change))


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        scaled_masked_softmax([[1.0]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mask must be a tensor or None, got bool"):
        scaled_masked_softmax(torch.zeros(2, 2), True)  # type: ignore[arg-type]


def test_explain() -> None:
    x = torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16)
    plain, causal = explain(x), explain(x, torch.zeros(8, 8, dtype=torch.bool), causal=True)
    assert plain.backend == "blocked" and "CPU" in plain.why
    assert plain.bytes_forward == 4 * x.numel() and plain.bytes_backward == 6 * x.numel()
    assert causal.bytes_forward == 2 * (2 * 3 * 36 + x.numel()) + 64
    assert "backend 'blocked'" in str(plain)


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(scaled_masked_softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        grad.sum().backward()


@pytest.mark.parametrize("with_sink", [False, True])
def test_compile_as_one_graph(with_sink: bool) -> None:
    def step(x: torch.Tensor, mask: torch.Tensor, sink: torch.Tensor) -> Any:
        y, top = scaled_masked_softmax(
            *(x, mask),
            causal=True,
            scale=0.5,
            sink=sink if with_sink else None,
            return_max_logits=True,
        )
        return (y * torch.arange(12.0)).sum(), top

    given = torch.randn(2, 3, 12, 12), torch.rand(2, 1, 1, 12) > 0.5, torch.randn(3)
    results = []
    torch.compiler.reset()
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        x, mask, sink = given[0].clone().requires_grad_(), given[1], given[2].clone()
        sink.requires_grad_(with_sink)
        loss, top = call(x, mask, sink)
        loss.backward()
        results.append([loss.detach(), top, x.grad, sink.grad])
    torch.compiler.reset()
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_opcheck() -> None:
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    sink = torch.randn(3, requires_grad=True)
    mask = (torch.rand(2, 1, 1, 5) > 0.5).view(torch.uint8).expand(2, 3, 4, 5)
    arguments = (x, mask, sink, 0.5, 2.0, -(1 << 40), 1, False, True, "blocked")
    torch.library.opcheck(torch.ops.keel.softmax_fwd, arguments)
    y, lse, _ = torch.ops.keel.softmax_fwd(*arguments)
    torch.library.opcheck(
        torch.ops.keel.softmax_bwd,
        (
            torch.randn_like(y),
            y.detach(),
            x.detach(),
            lse,
            0.5,
            2.0,
            -(1 << 40),
            1,
            True,
            "blocked",
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_autocast_changes_nothing() -> None:
    x = torch.randn(2, 2, 4, 5)
    want = scaled_masked_softmax(x, causal=True, scale=0.3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scaled_masked_softmax(x, causal=True, scale=0.3), want)
