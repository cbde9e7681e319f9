"""The oracle itself: against torch's own attention, finite differences, and its definitions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import attn_masks

from keel import masks, reference
from keel.masks import AttnMask, AttnSlice
from keel.meta import Scoring

INF = float("inf")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def qkv(mask: AttnMask, hq: int, hk: int, d: int, dv: int) -> list[torch.Tensor]:
    shapes = ((mask.tq, hq, d), (mask.tk, hk, d), (mask.tk, hk, dv))
    return [normal(*shape, seed=n) for n, shape in enumerate(shapes)]


@settings(max_examples=100)
@given(
    attn_masks(max_tokens=24),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(8, 8), (8, 16), (24, 8)]),
    st.sampled_from([0.3, 1.0, -0.7]),
)
def test_equals_torch(
    mask: AttnMask, hk: int, group: int, dims: tuple[int, int], scale: float
) -> None:
    q, k, v = qkv(mask, hk * group, hk, *dims)
    dense = mask.to_dense()
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    want = F.scaled_dot_product_attention(
        *heads_first, attn_mask=dense, scale=scale, enable_gqa=True
    )
    out, lse, _ = reference.attention(q, k, v, mask, Scoring(scale=scale))
    seeing = dense.any(1)  # torch answers NaN for the others
    torch.testing.assert_close(
        out[seeing], want[0].transpose(0, 1)[seeing], atol=1e-12, rtol=0, check_stride=False
    )
    logits = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(group, 1)) * scale
    want_lse = torch.logsumexp(logits.masked_fill(~dense[:, None], -INF), 2)
    torch.testing.assert_close(lse, want_lse, atol=1e-12, rtol=0)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("bias_shape", [None, (2, 4, 5), (1, 4, 1)])
def test_gradients(softcap: float, sink: bool, bias_shape: tuple[int, int, int] | None) -> None:
    mask = AttnMask([AttnSlice(0, 3, 0, 5, hi=1)], 4, 5)  # row 3 sees nothing
    inputs = [x.requires_grad_() for x in qkv(mask, hq=2, hk=1, d=2, dv=3)]
    inputs.append(normal(2, seed=3).requires_grad_(sink))
    inputs.append(normal(*(bias_shape or (1, 1, 1)), seed=4).requires_grad_(bias_shape is not None))

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scoring = Scoring(
            scale=0.7,
            softcap=softcap,
            sink=s if sink else None,
            bias=b if bias_shape else None,
            alibi_slopes=torch.tensor([0.1, 0.3], dtype=torch.float64),
        )
        out, lse, _ = reference.attention(q, k, v, mask, scoring)
        return out, torch.where(lse == -INF, 0.0, lse)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("mask", [AttnMask([AttnSlice(1, 3, 0, 4)], 5, 6), AttnMask([], 5, 6)])
def test_rows_that_see_nothing(mask: AttnMask, softcap: float) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(mask, hq=2, hk=1, d=8, dv=8))
    bias = normal(2, 5, 6).requires_grad_()
    out, lse, _ = reference.attention(q, k, v, mask, Scoring(scale=1.0, softcap=softcap, bias=bias))
    (out.sum() + torch.where(lse == -INF, 0.0, lse).sum()).backward()
    rows, keys = ~mask.to_dense().any(1), ~mask.to_dense().any(0)
    assert torch.all(out[rows] == 0) and torch.all(lse[rows] == -INF)
    assert torch.all(lse[~rows].isfinite())
    for grad, nothing in ((q.grad, rows), (k.grad, keys), (v.grad, keys)):
        assert grad is not None and torch.all(grad[nothing] == 0)
        assert torch.all(grad.isfinite())
    assert bias.grad is not None and torch.all(bias.grad[:, ~mask.to_dense()] == 0)


def test_gradient_of_an_empty_lse_is_not_nan() -> None:
    mask = AttnMask([AttnSlice(1, 2, 0, 3)], 2, 3)
    q, k, v = (x.requires_grad_() for x in qkv(mask, hq=1, hk=1, d=8, dv=8))
    out, lse, _ = reference.attention(q, k, v, mask, Scoring(scale=1.0))
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
    for x in (q, k, v):
        assert x.grad is not None and torch.all(x.grad.isfinite())
    assert q.grad is not None and torch.all(q.grad[0] == 0)


def test_a_sink_alone() -> None:
    sink = normal(3).requires_grad_()
    for mask in (AttnMask([], 2, 4), AttnMask([], 2, 0)):
        q, k, v = qkv(mask, hq=3, hk=3, d=8, dv=8)
        out, lse, top = reference.attention(q, k, v, mask, Scoring(scale=1.0, sink=sink))
        assert torch.equal(lse, sink.expand(2, 3)) and torch.all(out == 0)
        assert torch.all(top == -INF)
        (grad,) = torch.autograd.grad(lse.sum(), sink)
        assert torch.equal(grad, torch.full_like(sink, 2.0))


def test_a_sink_takes_its_share() -> None:
    mask = masks.full(1, 1)
    q, k, v = qkv(mask, hq=1, hk=1, d=8, dv=8)
    score = (q * k).sum()
    out, lse, _ = reference.attention(q, k, v, mask, Scoring(scale=1.0, sink=score.view(1)))
    torch.testing.assert_close(out, v / 2)
    torch.testing.assert_close(lse.squeeze(), score + torch.tensor(2.0).double().log())


def test_max_logits_definition() -> None:
    """Over attended pairs, after scale, bias and ALiBi, before the softcap, without the sink."""
    mask = AttnMask([AttnSlice(0, 4, 0, 6, hi=1)], 5, 6)
    q, k, v = (x.requires_grad_() for x in qkv(mask, hq=4, hk=2, d=8, dv=8))
    dense, bias, slopes = mask.to_dense(), normal(4, 5, 6, seed=5), normal(4, seed=6).abs()
    plain = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)).detach()
    i, j = torch.arange(5)[:, None], torch.arange(6)
    alibi = -slopes[:, None, None] * (i + 1 - j).abs()
    offset = torch.tensor([3, -2, 0, 7, 1], dtype=torch.int32)
    moved = -slopes[:, None, None] * (i + offset[:, None] - j).abs()
    sink = torch.full((4,), 1e3, dtype=torch.float64)
    for scoring, want in (
        (Scoring(scale=0.5), 0.5 * plain),
        (Scoring(scale=-0.5), -0.5 * plain),
        (Scoring(scale=0.0), 0 * plain),
        (Scoring(scale=0.5, softcap=0.1), 0.5 * plain),
        (Scoring(scale=0.5, sink=sink), 0.5 * plain),
        (Scoring(scale=0.5, bias=bias), 0.5 * plain + bias),
        (Scoring(scale=-0.5, bias=bias, softcap=0.1, sink=sink), -0.5 * plain + bias),
        (Scoring(scale=0.5, alibi_slopes=slopes), 0.5 * plain + alibi),
        (Scoring(scale=0.5, alibi_slopes=slopes, alibi_offset=offset), 0.5 * plain + moved),
    ):
        _, _, top = reference.attention(q, k, v, mask, scoring)
        torch.testing.assert_close(top, want[:, dense].amax(1), atol=1e-12, rtol=0)
        assert not top.requires_grad


def test_max_logits_of_nothing_and_of_nan() -> None:
    for mask in (AttnMask([], 3, 4), AttnMask([], 0, 4), AttnMask([], 3, 0), AttnMask([], 0, 0)):
        _, _, top = reference.attention(*qkv(mask, 2, 1, 8, 8), mask, Scoring(scale=1.0))
        assert top.tolist() == [-INF, -INF]
    mask = masks.causal(4)
    q, k, v = qkv(mask, hq=2, hk=2, d=8, dv=8)
    q[2, 1, 0] = float("nan")
    _, _, top = reference.attention(q, k, v, mask, Scoring(scale=1.0))
    assert top.isnan().tolist() == [False, True]
    q, k, v = qkv(mask, hq=2, hk=2, d=8, dv=8)
    k[3, 1, 0] = float("nan")  # only row 3 sees it
    _, _, top = reference.attention(q[:3], k, v, mask.cut(q=(0, 3)), Scoring(scale=1.0))
    assert not top.isnan().any(), "an unattended NaN is not a logit"


def test_working_precision() -> None:
    mask = masks.causal(8)
    q, k, v = (x.bfloat16() for x in qkv(mask, 2, 1, 8, 8))
    out, lse, top = reference.attention(q, k, v, mask, Scoring(scale=1.0))
    assert (out.dtype, lse.dtype, top.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    wide = reference.attention(q, k, v, mask, Scoring(scale=1.0), dtype=torch.float64)
    assert [x.dtype for x in wide] == [torch.bfloat16, torch.float64, torch.float64]
    torch.testing.assert_close(lse.double(), wide[1], atol=1e-5, rtol=1e-5)


@settings(max_examples=200)
@given(st.data(), attn_masks(max_tokens=24), st.booleans(), st.booleans())
def test_merge_of_key_parts_is_the_whole(
    data: st.DataObject, mask: AttnMask, sink: bool, alibi: bool
) -> None:
    q, k, v = qkv(mask, hq=4, hk=2, d=8, dv=16)
    logit = normal(4, seed=7) if sink else None
    slopes = normal(4, seed=8).abs() if alibi else None
    bias = normal(4, mask.tq, mask.tk, seed=9)
    whole = reference.attention(
        q, k, v, mask, Scoring(scale=0.4, softcap=3.0, sink=logit, bias=bias, alibi_slopes=slopes)
    )
    inner = data.draw(st.lists(st.integers(0, mask.tk), max_size=4))
    parts = []
    for n, (a, b) in enumerate(pairwise([0, *sorted(inner), mask.tk])):
        scoring = Scoring(
            scale=0.4,
            softcap=3.0,
            sink=logit if n == 0 else None,  # it takes part once
            bias=bias[:, :, a:b],
            alibi_slopes=slopes,
            alibi_offset=torch.full((mask.tq,), mask.tk - mask.tq - a, dtype=torch.int32),
        )
        part = mask.cut(k=(a, b))
        parts.append(reference.attention(q, k[a:b], v[a:b], part, scoring))
    for got, want in zip(reference.merge(parts), whole, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_merge_of_empty_parts() -> None:
    nothing = (torch.zeros(2, 1, 8), torch.full((2, 1), -INF), torch.full((1,), -INF))
    out, lse, top = reference.merge([nothing, nothing, nothing])
    assert torch.all(out == 0) and torch.all(lse == -INF) and top is not None and top == -INF
    part = (torch.randn(2, 1, 8), torch.tensor([[0.5], [-INF]]), torch.tensor([0.25]))
    part[0][1] = 0
    for parts in ([nothing, part], [part, nothing], [part]):
        for got, want in zip(reference.merge(parts), part, strict=True):
            assert torch.equal(got, want)  # type: ignore[arg-type]


def test_merge_refuses() -> None:
    part = (torch.zeros(1, 1, 8), torch.zeros(1, 1), None)
    assert reference.merge([part, part])[2] is None
    with pytest.raises(ValueError, match="at least one"):
        reference.merge([])
    with pytest.raises(ValueError, match="some partial results carry max_logits"):
        reference.merge([part, (part[0], part[1], torch.zeros(1))])
