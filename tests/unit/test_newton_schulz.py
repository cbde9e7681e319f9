"""Newton-Schulz against exact singular values, in fp64 and in narrow dtypes."""

from __future__ import annotations

import pytest
import torch

from keel.optim import newton_schulz, orthogonalize
from keel.optim.batching import Settings, orthogonalize_all
from keel.optim.coefficients import NAMES, QUINTIC, resolve_coefficients

SHAPES = [(24, 24), (16, 40), (40, 16), (1, 7), (7, 1), (3, 65)]


def polynomial(values: torch.Tensor, name: str, steps: int) -> torch.Tensor:
    """What the steps make of singular values."""
    for a, b, c in resolve_coefficients(name, steps):
        values = a * values + b * values**3 + c * values**5
    return values


def with_values(m: int, n: int, values: torch.Tensor) -> torch.Tensor:
    """An (m, n) matrix in fp64 with these singular values, turned at random."""
    k = min(m, n)
    u = torch.linalg.qr(torch.randn(m, k, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(n, k, dtype=torch.float64))[0]
    return (u * values.double()) @ v.mT


@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_singular_values_become_those_of_the_polynomial(m, n, name, form):
    torch.manual_seed(m + n)
    x = torch.randn(m, n, dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    want = (u * polynomial(s / s.norm(), name, 5)) @ v
    got = orthogonalize(x, coefficients=name, dtype=torch.float64, form=form)
    assert (got - want).abs().max() < 1e-11


BOUNDS = {  # of |p(σ) - 1| for σ in [0.02, 1], after this many steps
    "quintic": (5, 0.33),
    "quintic_tuned": (5, 0.15),
    "quintic_finished": (9, 0.01),
    "polar_express": (8, 1e-6),
    "cans": (5, 0.17),
}


@pytest.mark.parametrize("name", NAMES)
def test_distance_from_the_polar_factor(name):
    """No more than the polynomial is from 1 anywhere: the table above says how much that is."""
    steps, bound = BOUNDS[name]
    grid = torch.linspace(0.02, 1, 20_001, dtype=torch.float64)
    assert (polynomial(grid, name, steps) - 1).abs().max() < bound
    torch.manual_seed(3)
    for m, n in ((24, 24), (16, 40), (40, 16)):
        x = with_values(m, n, torch.logspace(0, -1, min(m, n)))
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        assert s.min() / s.norm() > 0.02
        got = orthogonalize(x, coefficients=name, steps=steps, dtype=torch.float64)
        assert torch.linalg.matrix_norm(got - u @ v, 2) < bound


SPECTRA = {
    "flat": torch.ones(32),
    "ten": torch.logspace(0, -1, 32),
    "thousand": torch.logspace(0, -3, 32),
    "million": torch.logspace(0, -6, 32),
    "half": torch.tensor([1.0] * 16 + [0.0] * 16),
    "one": torch.tensor([1.0] + [0.0] * 31),
    "spike": torch.tensor([1.0] + [1e-3] * 31),
}


@pytest.mark.parametrize("name", ["quintic", "polar_express", "cans"])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_gram_form_is_no_worse_than_the_plain_one(spectrum, name):
    """In bf16 both lose small singular values; the gram form must not lose more, nor explode."""
    torch.manual_seed(4)
    x = with_values(32, 80, SPECTRA[spectrum])
    exact = orthogonalize(x, coefficients=name, dtype=torch.float64)
    errors = {}
    for form in ("plain", "gram"):
        y = orthogonalize(x.float(), coefficients=name, form=form, normalize="fp32")
        assert y.dtype == torch.bfloat16
        errors[form] = torch.linalg.matrix_norm(y.double() - exact, 2)
    assert errors["gram"] < 1.2 * errors["plain"] + 0.02


def test_gram_matrices_stay_off_the_floor_of_fp16(monkeypatch):
    """Their diagonals are 1 / m on average, and other numbers far smaller: scaled to about 1."""
    seen = []
    whole = newton_schulz.gram_of

    def gram_of(x):
        gram = whole(x)
        seen.append((gram.dtype, float(gram.float().diagonal(dim1=-2, dim2=-1).mean())))
        return gram

    monkeypatch.setattr(newton_schulz, "gram_of", gram_of)
    torch.manual_seed(11)
    orthogonalize(torch.randn(200, 300), form="gram", steps=2)
    ((dtype, mean),) = seen
    assert dtype == torch.float16 and 0.25 < mean < 2


@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize("spectrum", ["flat", "ten", "thousand", "half"])
def test_fp32_is_near_fp64(spectrum, form):
    torch.manual_seed(5)
    x = with_values(32, 80, SPECTRA[spectrum])
    exact = orthogonalize(x, dtype=torch.float64)
    got = orthogonalize(x.float(), dtype=torch.float32, form=form)
    assert (got.double() - exact).abs().max() < 2e-5


@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize("steps", [1, 2, 3, 6, 9])
def test_any_number_of_steps(steps, form):
    torch.manual_seed(6)
    x = torch.randn(12, 20, dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    want = (u * polynomial(s / s.norm(), "polar_express", steps)) @ v
    got = orthogonalize(
        x, coefficients="polar_express", steps=steps, dtype=torch.float64, form=form
    )
    assert (got - want).abs().max() < 1e-10


def test_batches_are_the_single_matrices():
    torch.manual_seed(7)
    x = torch.randn(2, 3, 10, 6) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    y = orthogonalize(x, dtype=torch.float32)
    assert y.shape == x.shape
    for i in range(2):
        for j in range(3):
            one = orthogonalize(x[i, j], dtype=torch.float32)
            assert torch.allclose(y[i, j], one, atol=1e-6)


def test_scale_does_not_matter_and_zeros_stay():
    torch.manual_seed(8)
    x = torch.randn(8, 12)
    y = orthogonalize(x, coefficients="polar_express", dtype=torch.float32)
    for scale in (1e-5, 1e10):
        other = orthogonalize(x * scale, coefficients="polar_express", dtype=torch.float32)
        assert torch.allclose(other, y, atol=1e-5)
    assert not orthogonalize(torch.zeros(4, 6)).any()
    assert orthogonalize(torch.zeros(3, 0, 6)).shape == (3, 0, 6)


def test_inputs_stay_as_they_are():
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(6, 9).to(dtype)
        before = x.clone()
        for normalize in ("fp32", "torch"):
            orthogonalize(x, dtype=dtype, normalize=normalize)
            assert torch.equal(x, before)


def test_normalization_rounds_once_or_as_torch_does():
    torch.manual_seed(9)
    x = torch.randn(64, 64)
    exact = x / x.norm()
    once = orthogonalize(x, steps=0, normalize="fp32")
    assert torch.equal(once, exact.bfloat16())
    short = x.bfloat16()
    torchs = orthogonalize(x, steps=0, normalize="torch")
    assert torch.equal(torchs, short / short.norm())
    assert not torch.equal(once, torchs)
    assert torch.equal(orthogonalize(x, steps=0), torchs)  # (a, b, c), as torch is called
    assert torch.equal(orthogonalize(x, coefficients="quintic", steps=0), once)


def test_stacks_of_one_shape_go_together(monkeypatch):
    """Turned ones too, in batches of bounded size, each back at its place."""
    torch.manual_seed(10)
    shapes = [(2, 6, 4), (1, 4, 6), (3, 5, 5), (4, 4, 6)]
    stacks = [torch.randn(shape) for shape in shapes]
    settings = Settings((QUINTIC,) * 5, 1e-7, torch.float32, "plain", "fp32")
    sizes = []
    whole = newton_schulz.iterate
    monkeypatch.setattr("keel.optim.batching.BATCH_ELEMENTS", 24 * 5)
    monkeypatch.setattr(
        newton_schulz, "iterate", lambda x, *a: sizes.append(tuple(x.shape)) or whole(x, *a)
    )
    results = orthogonalize_all(stacks, settings)
    assert sizes == [(5, 4, 6), (2, 4, 6), (3, 5, 5)]
    for stack, result in zip(stacks, results, strict=True):
        assert result.shape == stack.shape
        for x, y in zip(stack, result, strict=True):
            want = orthogonalize(x, dtype=torch.float32, normalize="fp32")
            assert torch.allclose(y, want, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coefficients": "simple"}, "'simple' is not known; the sets are quintic, "),
        ({"coefficients": (1.0, 2.0)}, "triples"),
        ({"coefficients": [(1.0, 2.0, 3.0)] * 4}, "for 4 steps, but ns_steps is 5"),
        ({"coefficients": (1.0, float("nan"), 3.0)}, "finite"),
        ({"steps": 100}, "from 0 to 99, got 100"),
        ({"steps": 2.5}, "whole number"),
        ({"dtype": torch.int32}, "ns_dtype must be one of"),
        ({"form": "fast"}, "ns_form must be one of auto, plain, gram, got 'fast'"),
        ({"normalize": "bf16"}, "ns_normalize must be None or one of fp32, torch"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        orthogonalize(torch.randn(4, 4), **options)


def test_bad_tensors():
    for x in (torch.randn(4), torch.ones(3, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"matrices \(\.\.\., m, n\), got"):
            orthogonalize(x)
