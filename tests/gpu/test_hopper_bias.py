"""The Hopper backward with bias and ALiBi, behind backend="auto": the forward is the portable one.

As in test_hopper_bwd.py, names of tests hold the head dims, so that processes can share the work.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.gpu.test_attention import random_mask
from tests.gpu.test_hopper_bwd import named

from keel import flex_flash_attn_func, masks, ops, reference
from keel.kernels import flash_bwd, hopper_bwd_launch
from keel.masks import AttnMask, AttnSlice
from keel.masks.inputs import tensors_of_mask
from keel.meta import Scoring
from keel.testing import Case, assert_right, compare, run_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

BF16, FP16 = torch.bfloat16, torch.float16
VARIANTS = [  # d, dv, dtype, softcap, what is added: sizes of a bias (h, q, k: all), or ALiBi
    (128, 128, BF16, 0.0, "hqk"),
    (128, 128, FP16, 1.5, "1qk"),
    (64, 64, BF16, 0.0, "h1k"),
    (64, 64, FP16, 0.7, "hqk"),
    (96, 96, BF16, 0.0, "11k"),
    (128, 64, BF16, 0.0, "alibi"),
    (64, 64, BF16, 0.0, "alibi"),
    (128, 128, FP16, 1.5, "alibi"),
    (40, 40, BF16, 0.7, "alibi"),
    (256, 256, BF16, 0.0, "hqk"),
    (256, 256, BF16, 1.5, "1qk"),
    (192, 128, BF16, 0.0, "h1k"),
    (96, 200, FP16, 0.9, "hqk"),
    (256, 256, FP16, 0.0, "alibi"),
    (192, 128, BF16, 1.5, "alibi"),
    (256, 64, BF16, 0.0, "1qk"),
]


@pytest.fixture(autouse=True)
def no_portable_backward(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the portable backward was called")

    monkeypatch.setattr(flash_bwd, "backward", refuse)


def term_of(term: str, hq: int, mask: AttnMask) -> dict[str, Any]:
    """Of a Case."""
    if term == "alibi":
        return {"alibi": True}
    sizes = dict(zip("hqk", (hq, *mask.shape), strict=True))
    return {"bias_shape": tuple(sizes.get(size, 1) for size in term)}


@pytest.mark.parametrize(
    ("d", "dv", "dtype", "softcap", "term", "number"),
    [named(*x, n, marks=f"-{x[4]}") for n, x in enumerate(VARIANTS)],
)
def test_random_masks(d, dv, dtype, softcap, term, number):
    """16 x 16 masks, also with rows and keys that see nothing; every gradient."""
    for seed in range(16):
        rng = random.Random(1000 * number + seed)
        hk = rng.choice([1, 2, 3])
        hq, mask = hk * rng.randrange(1, 5), random_mask(rng, rng.choice([64, 300, 700]))
        case = Case(
            mask=mask,
            hq=hq,
            hk=hk,
            d=d,
            dv=dv,
            dtype=dtype,
            device="cuda",
            seed=seed,
            sink=rng.random() < 0.3,
            softcap=softcap,
            scale=rng.choice([None, None, 0.3, -0.2, 0.0]),
            with_dlse=rng.random() < 0.3,
            **term_of(term, hq, mask),
        )
        assert_right(case, backend="auto", deterministic=rng.random() < 0.3)


@pytest.mark.parametrize(
    ("d", "dv", "term"),
    [
        *(named(128, 128, "hqk", marks="-hqk"), named(128, 128, "alibi", marks="-alibi")),
        *(named(64, 64, "1qk", marks="-1qk"), named(64, 64, "alibi", marks="-alibi")),
        *(named(256, 256, "hqk", marks="-hqk"), named(192, 128, "alibi", marks="-alibi")),
    ],
)
@pytest.mark.parametrize("mask", ["causal", "window", "tiny", "nothing much"])
def test_many_tiles(mask, d, dv, term):
    """More tiles than there are SMs, on all of these and on some."""
    tokens = 1100
    made = {
        "causal": masks.causal(tokens, tokens + 77),
        "window": masks.sliding_window(tokens, left=300, right=5, sink_tokens=9),
        "tiny": masks.documents(range(0, tokens + 1, 11), causal=True),
        "nothing much": AttnMask([AttnSlice.of_type((130, 140), (300, 350), 0)], tokens, tokens),
    }[mask]
    case = Case(
        mask=made, hq=16, hk=4, d=d, dv=dv, dtype=BF16, device="cuda", **term_of(term, 16, made)
    )  # fmt: skip
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    for margin in (0, 16, sms - 7):
        assert_right(case, backend="auto", sm_margin=margin)


@pytest.mark.parametrize(
    ("d", "dv", "softcap"),
    [
        *(named(64, 64, 0.0), named(128, 128, 0.0), named(128, 128, 1.0, marks="-softcap")),
        *(named(256, 256, 0.0), named(192, 128, 0.0)),
    ],
)
def test_repeatable(d, dv, softcap):
    """All gradients with a whole bias; with one that is broadcast, if that is asked for."""
    mask = masks.documents([0, 5, 700, 1301], causal=True)
    options = {"mask": mask, "hq": 8, "hk": 2, "d": d, "dv": dv, "dtype": BF16, "device": "cuda"}
    whole = Case(**options, softcap=softcap, **term_of("hqk", 8, mask))
    first = run_case(whole, backend="auto")
    for _ in range(5):
        again = run_case(whole, backend="auto")
        assert all(torch.equal(first[n], again[n]) for n in ("dq", "dk", "dv", "dbias"))
    for term in ("1qk", "h1k", "11k"):
        part = Case(**options, softcap=softcap, **term_of(term, 8, mask))
        assert_right(part, backend="auto", deterministic=True)
        asked = run_case(part, backend="auto", deterministic=True)
        for _ in range(3):
            again = run_case(part, backend="auto", deterministic=True)
            assert all(torch.equal(asked[n], again[n]) for n in ("dq", "dk", "dv", "dbias"))


@pytest.mark.parametrize(("d", "dv"), [named(64, 64), named(128, 128), named(256, 256)])
def test_rows_of_alibi_at_keys_of_their_own(d, dv):
    """As documents in one call have them."""
    bounds, hq, hk = [0, 5, 300, 333, 700], 8, 2
    mask = masks.documents(bounds, causal=True)
    made = Case(
        mask=mask, hq=hq, hk=hk, d=d, dv=dv, dtype=BF16, device="cuda", alibi=True
    ).tensors()  # fmt: skip
    offset = torch.randint(-50, 50, (mask.tq,), dtype=torch.int32, device="cuda")
    results = []
    for dtype in (torch.float64, BF16, None):
        wide = dtype == torch.float64
        q, k, v, dout = (
            made[n].double() if wide else made[n].clone() for n in ("q", "k", "v", "dout")
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        scoring = Scoring(
            scale=d**-0.5,
            alibi_slopes=made["alibi_slopes"].double() if wide else made["alibi_slopes"],
            alibi_offset=offset,
        )
        if dtype is None:
            out = ops.attention(
                *(q, k, v, tensors_of_mask(mask), scoring),
                **{"want_max": False, "max_logits_out": None, "deterministic": False},
                **{"sm_margin": 0, "backend": "auto"},
            )[0]
        else:
            out = reference.attention(q, k, v, mask, scoring, dtype=dtype)[0]
        results.append(torch.autograd.grad(out, leaves, dout))
    for name, ref64, low, got in zip(("dq", "dk", "dv"), *results, strict=True):
        comparison = compare(name, got, low, ref64, BF16)
        assert comparison.ok, str(comparison)


@pytest.mark.parametrize(("d", "dv"), [named(64, 64), named(128, 128), named(256, 256)])
@pytest.mark.parametrize("layout", ["cut", "far heads", "far rows", "expanded", "fp32"])
def test_layouts_of_a_bias(layout, d, dv):
    """It may lie anywhere; nothing beside it is read, and places need 64 bits."""
    tq, tk, hq = 301, 333, 4
    mask = AttnMask([AttnSlice(0, tq, 0, tk, hi=200), AttnSlice(7, 90, 290, tk)], tq, tk)
    made = Case(mask=mask, hq=hq, hk=2, d=d, dv=dv, dtype=BF16, device="cuda").tensors()
    plain = torch.randn(hq, tq, tk, device="cuda").bfloat16()
    if layout == "cut":
        room = torch.full((hq, tq + 1, tk + 3), torch.nan, device="cuda", dtype=BF16)
        other = room[:, :tq, 1 : tk + 1]
    elif layout == "far heads":
        far = (1 << 31) // 3 + 5
        other = torch.empty(hq * far, device="cuda", dtype=BF16).as_strided(
            (hq, tq, tk), (far, tk, 1)
        )
    elif layout == "far rows":
        plain = plain[:1]
        far = (1 << 31) // 290
        other = torch.empty(tq * far, device="cuda", dtype=BF16).as_strided(
            (1, tq, tk), (tk, far, 1)
        )
    elif layout == "expanded":
        plain, other = plain[:1, :1], plain[:1, :1].clone().expand(hq, tq, tk)
    elif d > 192:
        pytest.skip("a bias in fp32 is the portable backward's there")
    else:
        other = plain.float()
    if layout in ("cut", "far heads", "far rows"):
        other.copy_(plain)

    def gradients(bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [made[n].clone().requires_grad_() for n in ("q", "k", "v")]
        out, _ = flex_flash_attn_func(*leaves, mask, bias=bias, backend="auto")
        return torch.autograd.grad(out, leaves, made["dout"])

    for x, y in zip(gradients(plain), gradients(other), strict=True):
        torch.testing.assert_close(x, y, atol=2e-3, rtol=1e-2)
        assert not x.isnan().any()


@pytest.mark.parametrize(("d", "dv"), [named(64, 64), named(128, 128), named(256, 256)])
def test_pairs_that_a_bias_takes_out(d, dv):
    """-inf is as good as a mask; a row may lose all its keys."""
    tokens, hq = 400, 4
    made = Case(
        mask=masks.causal(tokens), hq=hq, hk=2, d=d, dv=dv, dtype=BF16, device="cuda"
    ).tensors()  # fmt: skip
    bias = torch.zeros(hq, tokens, tokens, device="cuda", dtype=BF16)
    bias[:, :, 100:150] = -torch.inf
    bias[:, 30] = -torch.inf
    bias.requires_grad_()
    leaves = [made[n].requires_grad_() for n in ("q", "k", "v")]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    seen[:, 100:150] = seen[30] = False
    out, _ = flex_flash_attn_func(*leaves, masks.causal(tokens), bias=bias, backend="auto")
    right_out, _ = flex_flash_attn_func(*leaves, masks.from_dense(seen), backend="auto")
    ours = torch.autograd.grad(out, [*leaves, bias], made["dout"])
    right = torch.autograd.grad(right_out, leaves, made["dout"])
    for x, y in zip(ours[:3], right, strict=True):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
    assert (ours[3][:, ~seen.cuda()] == 0).all() and not ours[3].isnan().any()


def test_the_portable_backward_serves_the_rest(monkeypatch):
    """And nobody else does where it is asked for by name."""
    monkeypatch.undo()

    def refuse(*args, **kwargs):
        raise AssertionError("the Hopper backward was called")

    monkeypatch.setattr(hopper_bwd_launch, "backward", refuse)
    mask = masks.causal(200)
    options = {"mask": mask, "hq": 4, "hk": 2, "dtype": BF16, "device": "cuda"}
    assert_right(Case(d=128, alibi=True, bias_shape=(4, 200, 200), **options), backend="auto")
    assert_right(Case(d=64, bias_shape=(4, 200, 1), **options), backend="auto")
    assert_right(Case(d=64, alibi=True, **options), backend="triton")


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize(("d", "dv"), [named(64, 64), named(128, 128), named(256, 128)])
@pytest.mark.parametrize("term", ["hqk", "alibi"])
def test_gradients_in_fp32(term, d, dv, softcap):
    """Other kernels make them: what is rounded otherwise, in full."""
    mask = masks.documents([0, 130, 1000], causal=True)
    case = Case(
        **{"mask": mask, "hq": 8, "hk": 2, "d": d, "dv": dv, "dtype": BF16, "device": "cuda"},
        **{"softcap": softcap, **term_of(term, 8, mask)},
    )
    made = case.tensors()
    given = {name: made[name] for name in ("bias", "alibi_slopes") if name in made}
    q, k, v, dout = (made[name] for name in ("q", "k", "v", "dout"))
    out, meta = flex_flash_attn_func(q, k, v, mask, softcap=softcap, backend="auto", **given)
    scoring = Scoring(scale=d**-0.5, softcap=softcap, **given)
    rounded, full = (
        ops.gradients(
            *(dout, None, q, k, v, out, meta.lse, mask, scoring),
            want_dbias=term != "alibi",
            deterministic=True,
            sm_margin=0,
            backend="auto",
            dtype=dtype,
        )[:3]
        for dtype in (BF16, torch.float32)
    )
    for x, y in zip(rounded, full, strict=True):
        assert y.dtype == torch.float32 and not torch.equal(y, y.bfloat16().float())
        assert torch.equal(x, y.bfloat16())
