"""Symmetric products and Muon on a real GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from keel.optim import Muon, newton_schulz, orthogonalize
from keel.testing import poisoned_memory

pytestmark = pytest.mark.gpu

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 64 * 2**-23}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("batch", "m", "k"), [(1, 1024, 2752), (3, 512, 512), (2, 1000, 1001), (5, 100, 70), (1, 1, 3)]
)
def test_gram_matrix(batch, m, k, dtype):
    from keel.kernels.gram import symmetric_product

    torch.manual_seed(0)
    x = torch.randn(batch, m, k, device="cuda").to(dtype)
    with poisoned_memory():
        got = symmetric_product(x, x)
    assert error(got, x.double() @ x.double().mT) < ROUNDING[dtype]
    assert torch.equal(got, got.mT)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("batch", "m"), [(1, 2048), (2, 600), (3, 77)])
def test_polynomial(batch, m, dtype):
    from keel.kernels.gram import symmetric_product

    torch.manual_seed(1)
    g = torch.randn(batch, m, m, device="cuda") / m**0.5
    g = (g + g.mT).to(dtype)
    with poisoned_memory():
        got = symmetric_product(g, g, g, alpha=2.0315, beta=-4.775, diagonal=3.4445)
    exact = g.double()
    eye = torch.eye(m, dtype=torch.float64, device="cuda")
    want = 2.0315 * exact @ exact - 4.775 * exact + 3.4445 * eye
    assert error(got, want) < ROUNDING[dtype]
    assert torch.equal(got, got.mT)


def test_strides_and_tall_batches():
    """Rows apart; and so many matrices that offsets pass 2³¹."""
    from keel.kernels.gram import symmetric_product

    torch.manual_seed(2)
    store = torch.randn(2, 640, 3, 1024, device="cuda", dtype=torch.bfloat16)
    for x in (store[:, :, 1], store[:, ::2, 0, 1:], store[:, :, 2, :640].mT):
        got = symmetric_product(x, x)
        assert error(got, x.double() @ x.double().mT) < ROUNDING[torch.bfloat16]
    many = torch.zeros(2200, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    many[-1] = store[0, :, 0, :].repeat(2, 1)[:1024]
    got = symmetric_product(many, many)
    assert error(got[-1], many[-1].double() @ many[-1].double().mT) < ROUNDING[torch.bfloat16]
    assert not got[-2].any()


@pytest.mark.parametrize("spectrum", ["random", "decade", "million", "rank one"])
@pytest.mark.parametrize("coefficients", ["quintic", "polar_express"])
@pytest.mark.parametrize("shape", [(2048, 2048), (1024, 2752), (2752, 1024), (96, 400)])
def test_forms_against_fp64(shape, coefficients, spectrum):
    """Both forms no farther from the exact steps than plain bf16 products by cuBLAS are."""
    torch.manual_seed(3)
    k = min(shape)
    x = torch.randn(shape, device="cuda", dtype=torch.float64)
    if spectrum != "random":
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        values = {
            "decade": torch.logspace(0, -1, k),
            "million": torch.logspace(0, -6, k),
            "rank one": torch.cat([torch.ones(1), torch.zeros(k - 1)]),
        }[spectrum]
        x = (u * values.to(u)) @ v
    exact = orthogonalize(x, coefficients=coefficients, dtype=torch.float64)

    def distance(y: torch.Tensor) -> float:
        return float((y.double() - exact).norm() / exact.norm())

    with mock.patch.object(newton_schulz, "HALVES_FROM", 1 << 60):
        low = distance(orthogonalize(x.float(), coefficients=coefficients, form="plain"))
    for form in ("plain", "gram", "auto"):
        with mock.patch.object(newton_schulz, "HALVES_FROM", 0):
            got = distance(orthogonalize(x.float(), coefficients=coefficients, form=form))
        assert got < 1.5 * low + 0.01, f"{form}: {got}, plain torch: {low}"


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("halves_from", [0, newton_schulz.HALVES_FROM])
def test_steps_of_torch(nesterov, halves_from, monkeypatch):
    """fp32 parameters: steps differ from torch's by what bf16 rounding explains."""
    monkeypatch.setattr(newton_schulz, "HALVES_FROM", halves_from)
    shapes = [(1024, 1024), (1024, 2752), (2752, 1024), (64, 128)]
    torch.manual_seed(4)
    ours = [torch.nn.Parameter(torch.randn(s, device="cuda")) for s in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 0.02, "nesterov": nesterov}
    keels, torchs = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for step in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        before = [p.detach().clone() for p in theirs]
        for a, b in zip(ours, theirs, strict=True):
            a.data.copy_(b)  # step by step: each from the same place
        keels.step()
        torchs.step()
        for a, b, start in zip(ours, theirs, before, strict=True):
            assert (a - b).norm() < 0.03 * (b - start).norm(), f"step {step}, {tuple(a.shape)}"


def test_fp32_newton_schulz_is_exact():
    torch.manual_seed(5)
    x = torch.randn(3, 300, 500, device="cuda")
    want = orthogonalize(x.double(), dtype=torch.float64)
    for form in ("plain", "gram"):
        got = orthogonalize(x, dtype=torch.float32, form=form)
        assert (got.double() - want).abs().max() < 1e-4


def test_no_step_waits_for_the_gpu():
    params = [torch.nn.Parameter(torch.randn(1024, 2048, device="cuda")) for _ in range(2)]
    vector = torch.nn.Parameter(torch.randn(64, device="cuda"))
    optimizer = Muon([{"params": params}, {"params": [vector], "use_muon": False}])
    for p in (*params, vector):
        p.grad = torch.randn_like(p)
    optimizer.step()  # compiles, and copies lists of tiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
