"""Random problems for the fused softmax, and how results are judged."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from keel import reference
from keel.softmax import scaled_masked_softmax
from keel.softmax.functional import _band
from keel.testing import Comparison, compare


@dataclass
class SoftmaxCase:
    """One call: x (b, h, sq, sk), its gradient, and the arguments."""

    x: torch.Tensor
    dy: torch.Tensor
    sink: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        mask = self.options.get("mask")
        shown = None if mask is None else (mask.dtype, tuple(mask.shape))
        rest = {k: v for k, v in self.options.items() if k != "mask"}
        return f"x {tuple(self.x.shape)} {self.x.dtype}, mask {shown}, sink {self.sink}, {rest}"


def random_case(
    rng: random.Random,
    dtype: torch.dtype,
    limit: int = 40,
    rows: int | None = None,
    device: str = "cpu",
) -> SoftmaxCase:
    """Odd sizes, every broadcast of every kind of mask, bands, sinks, extreme logits, views."""
    torch.manual_seed(rng.randrange(1 << 30))
    b, h = rng.randint(1, 3), rng.randint(1, 3)
    sq, sk = rng.randint(1, rows or limit), rng.randint(1, limit)
    if rng.random() < 0.3:
        sk = -(-sk // 16) * 16
    x = torch.randn(b, h, sq, sk, dtype=torch.float64) * rng.choice([1.0, 4.0])
    scale = rng.choice([1.0, 0.3, -0.7, 0.0])
    extreme = rng.random()
    if extreme < 0.15:
        x = torch.where(torch.rand(x.shape) < 0.1, x.sign() * 1e4, x)
    elif extreme < 0.3:
        scale = 0.5  # a number times -inf has a sign only then
        x = x.masked_fill(torch.rand(b, h, sq, 1) < 0.2, -torch.inf)
        x = x.masked_fill(torch.rand(b, h, sq, sk) < 0.1, -torch.inf)
    options: dict[str, Any] = {
        "scale": scale,
        "softcap": rng.choice([0.0, 0.0, 0.0, 3.0]),
        "fully_masked": rng.choice(["zeros", "uniform"]),
        **_random_band(rng, sq, sk),
    }
    if rng.random() < 0.6:
        options["mask"] = _random_mask(rng, (b, h, sq, sk), dtype).to(device)
    sink = torch.randn(h).to(device, dtype) * 3 if rng.random() < 0.3 else None
    return SoftmaxCase(
        _view(rng, x.to(device, dtype)),
        _view(rng, torch.randn(x.shape).to(device, dtype)),
        sink,
        options,
    )


def _random_band(rng: random.Random, sq: int, sk: int) -> dict[str, Any]:
    while True:
        side = [rng.choice([None, -1, 0, rng.randint(0, sk)]) for _ in range(2)]
        band: dict[str, Any] = {
            "causal": rng.choice([False, False, True, "top-left", "bottom-right"]),
            "window": tuple(side) if rng.random() < 0.4 else None,
        }
        try:
            _band(band["causal"], band["window"], sq, sk)
        except ValueError:  # leaves nothing to see: refused
            continue
        return band


def _random_mask(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    dims = tuple(rng.choice([1, n]) for n in shape)
    while len(dims) > 1 and dims[0] == 1 and rng.random() < 0.5:
        dims = dims[1:]
    hidden = torch.rand(dims) < rng.choice([0.1, 0.5, 0.9])
    kind = rng.choice(["bool", "uint8", "added", "strided"])
    if kind == "added":
        values = torch.randn(dims).masked_fill(hidden, rng.choice([-1e4, -torch.inf, -2.0]))
        return values.to(dtype)
    if kind == "strided":
        wide = torch.rand(*dims[:-1], 2 * dims[-1]) < 0.5
        return wide[..., ::2]
    return hidden if kind == "bool" else hidden.to(torch.uint8) * rng.choice([1, 255])


def _view(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    """The same numbers in another layout."""
    kind = rng.choice(["plain", "heads last", "slice", "strided"])
    if kind == "heads last":
        return x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    if kind == "slice":
        wide = x.new_full((*x.shape[:3], x.shape[3] + 5), float("nan"))
        wide[..., 3:-2] = x
        return wide[..., 3:-2]
    if kind == "strided":
        wide = x.new_full((*x.shape[:3], 2 * x.shape[3]), float("nan"))
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


def run(case: SoftmaxCase, backend: str) -> dict[str, torch.Tensor]:
    """What Keel makes of a case: y, max_logits, dx, dsink."""
    x = case.x.detach().requires_grad_()
    sink = None if case.sink is None else case.sink.detach().requires_grad_()
    y, top = scaled_masked_softmax(
        x, sink=sink, return_max_logits=True, backend=backend, **case.options
    )
    leaves = [x] if sink is None else [x, sink]
    grads = torch.autograd.grad(y, leaves, case.dy)
    return {"y": y.detach(), "max_logits": top, "dx": grads[0]} | (
        {} if sink is None else {"dsink": grads[1]}
    )


def expected(case: SoftmaxCase, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the oracle makes of it, computed in `dtype`."""
    options = dict(case.options)
    uniform = options.pop("fully_masked") == "uniform"
    mask = options.pop("mask", None)
    band = _band(options.pop("causal"), options.pop("window"), *case.x.shape[2:])
    x = case.x.detach().to(dtype).requires_grad_()
    sink = None if case.sink is None else case.sink.detach().to(dtype).requires_grad_()
    y, top = reference.softmax(x, mask, sink, band=band, uniform=uniform, dtype=dtype, **options)
    leaves = [x] if sink is None else [x, sink]
    grads = torch.autograd.grad(y, leaves, case.dy.to(dtype))
    return {"y": y.detach(), "max_logits": top, "dx": grads[0]} | (
        {} if sink is None else {"dsink": grads[1]}
    )


def judge(case: SoftmaxCase, got: dict[str, torch.Tensor]) -> list[Comparison]:
    """Every result by the tolerance rule."""
    dtype = case.x.dtype
    exact, low = expected(case, torch.float64), expected(case, dtype)
    rows = case.x.shape[0] * case.x.shape[2]
    found = []
    for name, value in got.items():
        precision = value.dtype if name != "dsink" else dtype
        terms = {"dx": 1, "dsink": rows}.get(name, 0)
        found.append(compare(name, value, low[name], exact[name], precision, terms=terms))
    return found


def assert_right(case: SoftmaxCase, backend: str) -> None:
    wrong = [str(c) for c in judge(case, run(case, backend)) if not c.ok]
    assert not wrong, f"{case}: {wrong}"
