"""The Hopper backward behind backend="hopper", against the fp64 oracle.

Compilers take most of the time: 10 s and more for a form, four forms and more for head dims. Names
of tests hold the dims, so that processes can share the work and no form is compiled twice: -k "d256
and margin", -k "d256 and not margin", -k "d192x128 and softcap" and so on.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.gpu.test_attention import random_mask

from keel import flex_flash_attn_func, key_order, masks, ops
from keel.kernels import flash_bwd, hopper_bwd_launch
from keel.masks import AttnMask, AttnSlice
from keel.meta import Scoring
from keel.testing import Case, assert_right, run_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

BF16, FP16 = torch.bfloat16, torch.float16
VARIANTS = [  # d, dv, dtype, sink, softcap
    (128, 128, BF16, False, 0.0),
    (128, 128, FP16, True, 0.0),
    (64, 64, BF16, True, 0.0),
    (64, 64, FP16, False, 0.0),
    (96, 96, BF16, False, 0.0),
    (40, 40, FP16, False, 0.0),
    (128, 64, BF16, True, 0.0),
    (64, 128, BF16, False, 0.0),
    (128, 128, BF16, True, 1.5),
    (64, 64, FP16, False, 0.7),
    # Wide ones. Of blocks of 256 columns heads have all, most, or so few that 192 are multiplied.
    (256, 256, BF16, False, 0.0),
    (224, 256, FP16, True, 2.0),
    (192, 192, BF16, True, 0.0),
    (192, 128, BF16, False, 0.0),
    (192, 128, FP16, True, 1.5),
    (160, 40, FP16, False, 0.0),
    (96, 200, BF16, False, 0.0),
]


def named(d: int, dv: int, *rest: Any, marks: str = "") -> Any:
    """Head dims and other values of a test, by a name that says what is compiled for them."""
    return pytest.param(d, dv, *rest, id=(f"d{d}" if d == dv else f"d{d}x{dv}") + marks)


def named_ways(d: int, dv: int, *rest: Any, marks: str = "") -> list[Any]:
    """The same, with dq as it is fastest and in a fixed order. Wide heads have one way."""
    fast = named(d, dv, *rest, False, marks=marks)
    return [fast, named(d, dv, *rest, True, marks=marks + "-apart")][: 1 if max(d, dv) > 128 else 2]


def marks_of(dtype: torch.dtype, softcap: float) -> str:
    return ("-fp16" if dtype == FP16 else "") + ("-softcap" if softcap else "")


@pytest.fixture
def no_portable_backward(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the portable backward was called")

    monkeypatch.setattr(flash_bwd, "backward", refuse)


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(
    ("d", "dv", "dtype", "sink", "softcap", "number", "deterministic"),
    [
        way
        for number, values in enumerate(VARIANTS)
        for way in named_ways(*values, number, marks=marks_of(values[2], values[4]))
    ],
)
def test_random_masks(d, dv, dtype, sink, softcap, number, deterministic):
    """17 x 24 masks, every gradient, also with dq in a fixed order."""
    for seed in range(24):
        rng = random.Random(1000 * number + seed)
        hk = rng.choice([1, 2, 3])
        case = Case(
            mask=random_mask(rng, rng.choice([64, 300, 700, 1100])),
            hq=hk * rng.randrange(1, 9),
            hk=hk,
            d=d,
            dv=dv,
            dtype=dtype,
            device="cuda",
            seed=seed,
            sink=sink,
            softcap=softcap,
            scale=rng.choice([None, None, 0.3, -0.2, 0.0]),
            with_dlse=rng.random() < 0.3,
        )
        assert_right(case, backend="hopper", deterministic=deterministic)


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(
    ("d", "dv", "deterministic"),
    [*named_ways(64, 64), *named_ways(128, 128), *named_ways(256, 256), *named_ways(192, 128)],
)
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "tiny"])
def test_many_tiles(mask, d, dv, deterministic):
    """Tiles that begin at odd keys and blocks at odd rows, more of them than there are SMs."""
    tokens = 2048 + 77
    lengths = [1, 3, 600, 5, 128, 256, 700, 17, 100, 315]
    made = {
        "full": masks.full(tokens),
        "causal": masks.causal(tokens),
        "window": masks.sliding_window(tokens, left=300, right=5, sink_tokens=9),
        "documents": masks.documents([sum(lengths[:n]) for n in range(11)], causal=True),
        "tiny": masks.documents(range(0, tokens, 12), causal=True),
    }[mask]
    case = Case(mask=made, hq=24, hk=3, d=d, dv=dv, dtype=BF16, device="cuda")
    assert_right(case, backend="hopper", deterministic=deterministic)


@pytest.fixture
def heads_in_turns(monkeypatch):
    """Wherever it is possible, and each tile in any direction; a list of the orders."""
    made, in_order, rng = [], key_order.in_order, np.random.default_rng(0)

    def noted(*args, **more):
        order = in_order(*args, **more)
        order[:, key_order.STRIDE] *= rng.choice([-1, 1], len(order)).astype(np.int32)
        made.append(order)
        return order

    monkeypatch.setattr(hopper_bwd_launch, "fastest_way", lambda *_, in_order: "together")
    monkeypatch.setattr(hopper_bwd_launch, "_splits_for", lambda *_: 1)
    monkeypatch.setattr(key_order, "in_order", noted)
    return made


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(
    ("d", "dv", "dtype", "softcap"),
    [
        named(128, 128, BF16, 0.0, marks="-together"),
        named(128, 96, FP16, 0.0, marks="-together"),
        named(128, 128, BF16, 1.5, marks="-together-softcap"),
        named(64, 64, BF16, 0.0, marks="-together"),
    ],
)
def test_heads_in_turns(d, dv, dtype, softcap, heads_in_turns):
    """Random masks, causal ones and documents, with blocks of threads that stay and without; dk and
    dv get the same bits again."""
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    lengths = [1, 3, 600, 5, 128, 256, 700, 17, 100, 315]
    given = [random_mask(random.Random(seed), 64 + 37 * seed) for seed in range(32)]
    given += [
        masks.causal(2125),
        masks.documents([sum(lengths[:n]) for n in range(11)], causal=True),
    ]
    for seed, mask in enumerate(given):
        rng = random.Random(seed)
        hk = rng.choice([1, 2, 3])
        case = Case(
            mask=mask, hq=hk * rng.randrange(1, 9), hk=hk, d=d, dv=dv, dtype=dtype, device="cuda",
            seed=seed, softcap=softcap, scale=rng.choice([None, 0.3, -0.2]),
        )  # fmt: skip
        for margin in (0, rng.choice([1, 100, sms - 3])):
            assert_right(case, backend="hopper", sm_margin=margin)
            first, again = (run_case(case, backend="hopper", sm_margin=margin) for _ in range(2))
            assert torch.equal(first["dk"], again["dk"]) and torch.equal(first["dv"], again["dv"])
    assert len(heads_in_turns) >= 2 * sum(mask.area() > 0 for mask in given)
    strides = np.concatenate(heads_in_turns)[:, key_order.STRIDE]
    assert (strides > 0).any() and (strides < 0).any()


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(("d", "dv"), [named(128, 128, marks="-together")])
def test_heads_in_turns_by_choice(d, dv, monkeypatch):
    """Of a mask for which they are chosen, against dq apart, whose blocks are added in another
    order."""
    in_order, asked = key_order.in_order, []
    monkeypatch.setattr(
        key_order, "in_order", lambda *x, **more: asked.append(x) or in_order(*x, **more)
    )
    mask = masks.documents([0, 1500, 4000, 4096], causal=True)
    q, k, v, dout = (
        torch.randn(4096, heads, dim, device="cuda", dtype=BF16)
        for heads, dim in ((64, d), (8, d), (8, dv), (64, dv))
    )
    given = [x.requires_grad_() for x in (q, k, v)]
    fast, on_fewer_sms, fixed = (
        torch.autograd.grad(
            flex_flash_attn_func(*given, mask, backend="hopper", **options)[0], given, dout
        )
        for options in ({}, {"sm_margin": 8}, {"deterministic": True})
    )
    assert len(asked) == 2
    for grads in (fast, on_fewer_sms):
        for x, y in zip(grads, fixed, strict=True):
            torch.testing.assert_close(x, y, rtol=2**-6, atol=2e-3)


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(
    ("d", "dv", "softcap"),
    [
        *(named(64, 64, 0.0), named(128, 128, 0.0), named(256, 256, 0.0)),
        named(192, 128, 1.5, marks="-softcap"),
    ],
)
@pytest.mark.parametrize("mask", ["causal", "documents", "nothing much"])
def test_margin_of_sms(mask, d, dv, softcap):
    """Blocks of threads that stay, many turns each and one; dk and dv as without a margin."""
    tokens = 2048 + 77
    made = {
        "causal": masks.causal(tokens),
        "documents": masks.documents([0, 1, 4, 604, 609, 1500, tokens], causal=True),
        "nothing much": AttnMask([AttnSlice.of_type((130, 140), (300, 350), 0)], tokens, tokens),
    }[mask]
    case = Case(
        mask=made, hq=16, hk=4, d=d, dv=dv, dtype=BF16, device="cuda", softcap=softcap
    )  # fmt: skip
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    for margin in (1, 16, sms - 7, sms - 1):
        for deterministic in (False, True) if max(d, dv) <= 128 else (False,):
            assert_right(case, backend="hopper", sm_margin=margin, deterministic=deterministic)
    few, all_of_them = (run_case(case, backend="hopper", sm_margin=n) for n in (sms - 5, 0))
    for name in ("dk", "dv"):  # parts may differ in number, and so in rounding
        torch.testing.assert_close(few[name], all_of_them[name], atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(("d", "dv"), [named(64, 64), named(128, 128), named(256, 256)])
@pytest.mark.parametrize("bounds", [[0, 5, 700, 1301], [0, 4000]])
def test_repeatable(bounds, d, dv):
    """dk and dv always, dq where it is asked for; both ways give the same but for rounding."""
    mask = masks.documents(bounds, causal=True)
    case = Case(mask=mask, hq=8, hk=2, d=d, dv=dv, dtype=BF16, device="cuda")
    first, second = (run_case(case, backend="hopper") for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in ("dk", "dv"))
    asked = run_case(case, backend="hopper", deterministic=True)
    for _ in range(5):
        again = run_case(case, backend="hopper", deterministic=True)
        assert all(torch.equal(asked[n], again[n]) for n in ("dq", "dk", "dv"))
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(asked[name], first[name], atol=1e-2, rtol=1e-2)


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(("d", "dv"), [named(128, 128), named(256, 256), named(192, 128)])
def test_layouts(d, dv):
    """A slice of fused projections, and pointers that TMA cannot take as they are."""
    tokens, heads = 500, 4
    mask = masks.documents([0, 77, 500], causal=True)
    fused = torch.randn(tokens, heads, 2 * d + dv, device="cuda", dtype=BF16)
    dout = torch.randn(tokens, heads, dv, device="cuda", dtype=BF16)

    def gradients(given, dout):
        given = [x.detach().requires_grad_() for x in given]
        out, _ = flex_flash_attn_func(*given, mask, backend="hopper", return_max_logits=True)
        return torch.autograd.grad(out, given, dout)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.numel() + 1, device="cuda", dtype=BF16)[1:].view(x.shape).copy_(x)

    parts = fused.split([d, d, dv], 2)
    plain = [x.contiguous() for x in parts]
    expected = gradients(plain, dout)
    heads_first = dout.transpose(0, 1).contiguous().transpose(0, 1)
    for given, given_dout in (
        (parts, dout),
        ([shifted(x) for x in plain], shifted(dout)),
        (plain, heads_first),
    ):
        dq, dk, dv_ = gradients(given, given_dout)
        assert torch.equal(dk, expected[1]) and torch.equal(dv_, expected[2])
        torch.testing.assert_close(dq, expected[0], atol=1e-3, rtol=1e-2)  # another order


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(("d", "dv"), [named(64, 64), named(256, 256)])
def test_graph(d, dv):
    mask = masks.documents([0, 901, 2000], causal=True)
    q, k, v, dout = torch.randn(4, 2000, 8, d, device="cuda", dtype=BF16).unbind()
    given = [x.detach().requires_grad_() for x in (q, k, v)]

    def gradients():
        out, _ = flex_flash_attn_func(*given, mask, backend="hopper", return_max_logits=True)
        return torch.autograd.grad(out, given, dout)

    expected = gradients()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients()
    for _ in range(3):
        for x in got:
            x.zero_()
        graph.replay()
        assert torch.equal(got[1], expected[1]) and torch.equal(got[2], expected[2])
        torch.testing.assert_close(got[0], expected[0], atol=1e-3, rtol=1e-2)


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(
    ("d", "dv", "deterministic"),
    [
        *named_ways(64, 64, marks="-softcap"),
        *named_ways(128, 128, marks="-softcap"),
        *named_ways(256, 256, marks="-softcap"),
    ],
)
def test_limits_of_caps(d, dv, deterministic):
    """Scores far beyond the cap, where its slope is 0, and far below, where it is 1."""
    for scale, softcap in ((30.0, 1.0), (1.0, 2.0), (0.1, 50.0)):
        case = Case(
            mask=masks.causal(777), hq=6, hk=2, d=d, dv=dv, dtype=BF16, device="cuda",
            scale=scale, softcap=softcap,
        )  # fmt: skip
        assert_right(case, backend="hopper", deterministic=deterministic)


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(
    ("d", "dv", "softcap"), [named(256, 256, 0.0), named(256, 256, 3.0, marks="-softcap")]
)
def test_many_times(d, dv, softcap):
    """What one consumer hands to the other is never older than it should be: the same bits again
    and again, with all of the GPU at it."""
    mask = masks.documents([0, 5, 1700, 4096], causal=True)
    q, k, v = (
        torch.randn(4096, heads, dim, device="cuda", dtype=BF16, requires_grad=True)
        for heads, dim in ((16, d), (4, d), (4, dv))
    )
    dout = torch.randn(4096, 16, dv, device="cuda", dtype=BF16)
    out, _ = flex_flash_attn_func(
        q, k, v, mask, softcap=softcap, backend="hopper", return_max_logits=True
    )
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for _ in range(200):
        again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(
    ("d", "dv", "deterministic"),
    [*named_ways(64, 64), *named_ways(128, 128), *named_ways(256, 256), *named_ways(192, 128)],
)
@pytest.mark.parametrize(
    ("rows", "tokens", "keys"),
    [(256, 256, 1024), (32768, 32768, 1024), (64, 32768, 1024), (32768, 32768, 64)],
)
def test_launches_wait_for_each_other(rows, tokens, keys, d, dv, deterministic):
    """Two problems in turns, in the same memory: who reads too early finds numbers of the other.
    With a margin of SMs no launch begins early.

    With few rows, SMs are free for whoever begins early. Of many, row terms take long, longest for
    those that are all that is read. With few keys, dq has far less to do than dk and dv.
    """
    mask = AttnMask([AttnSlice(tokens - rows, tokens, 0, keys)], tokens, keys)

    def problem(size):
        shapes = ((tokens, 8, d), (keys, 2, d), (keys, 2, dv))
        given = [torch.randn(shape, device="cuda").mul_(size).to(BF16) for shape in shapes]
        for x in given:
            x.requires_grad_()
        dout = torch.randn(tokens, 8, dv, device="cuda", dtype=BF16)
        options = {"backend": "hopper", "deterministic": deterministic, "return_max_logits": True}
        out, calm = (
            flex_flash_attn_func(*given, mask, sm_margin=margin, **options)[0] for margin in (0, 4)
        )
        return (out, given, dout), torch.autograd.grad(calm, given, dout)

    problems = [problem(size) for size in (1.0, 3.0)]
    for _ in range(30):
        for (out, given, dout), expected in problems:
            torch.cuda._sleep(200_000)  # all launches wait in a row, none for the host
            found = torch.autograd.grad(out, given, dout, retain_graph=True)
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, atol=2e-3 * y.abs().max().item(), rtol=2e-2)


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(("d", "dv"), [named(128, 128), named(256, 256), named(192, 128)])
def test_gradients_in_fp32(d, dv):
    """As calc_attn adds them up: what is rounded otherwise, in full."""
    mask = masks.documents([0, 130, 1000], causal=True)
    made = Case(mask=mask, hq=8, hk=2, d=d, dv=dv, dtype=BF16, device="cuda").tensors()
    q, k, v, dout = (made[name] for name in ("q", "k", "v", "dout"))
    out, meta = flex_flash_attn_func(q, k, v, mask, backend="hopper", return_max_logits=True)
    rounded, full = (
        ops.gradients(
            *(dout, None, q, k, v, out, meta.lse, mask, Scoring(scale=d**-0.5)),
            want_dbias=False,
            deterministic=True,
            sm_margin=0,
            backend="hopper",
            dtype=dtype,
        )[:3]
        for dtype in (BF16, torch.float32)
    )
    for x, y in zip(rounded, full, strict=True):
        assert y.dtype == torch.float32 and not torch.equal(y, y.bfloat16().float())
        assert torch.equal(x, y.bfloat16())


def test_the_portable_backward_serves_the_rest(monkeypatch):
    """More tiles than a grid has room for."""

    def refuse(*args, **kwargs):
        raise AssertionError("the Hopper backward was called")

    monkeypatch.setattr(hopper_bwd_launch, "backward", refuse)
    monkeypatch.setattr(hopper_bwd_launch, "MAX_TILES", 4)
    case = Case(mask=masks.causal(300), hq=4, hk=2, d=128, dtype=BF16, device="cuda")
    assert_right(case, backend="hopper")


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(("d", "dv"), [named(128, 128), named(256, 256)])
def test_keys_that_nobody_sees(d, dv):
    q = torch.randn(200, 2, d, device="cuda", dtype=BF16, requires_grad=True)
    k = torch.randn(500, 2, d, device="cuda", dtype=BF16, requires_grad=True)
    mask = AttnMask([AttnSlice.of_type((130, 140), (300, 350), 0)], 200, 500)
    out, _ = flex_flash_attn_func(q, k, k, mask, backend="hopper", return_max_logits=True)
    dq, dk = torch.autograd.grad(out, [q, k], torch.randn_like(out))
    rows, keys = torch.zeros(200, dtype=torch.bool), torch.zeros(500, dtype=torch.bool)
    rows[130:140] = keys[300:350] = True
    assert (dq[~rows] == 0).all() and (dk[~keys] == 0).all()
    assert (dq[rows] != 0).any(2).all() and (dk[keys] != 0).any(2).all()


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize(("d", "dv"), [named(128, 128), named(256, 256), named(192, 128)])
def test_logits_far_below_zero(d, dv):
    """Rows and keys behind the end have logit 0, infinitely likely beside these."""
    mask = masks.documents([0, 77, 333])
    made = Case(mask=mask, hq=4, hk=2, d=d, dv=dv, dtype=BF16, device="cuda").tensors()
    q, k, v, dout = (made[name] for name in ("q", "k", "v", "dout"))
    q, k = q * 0.1 + 2, k * 0.1 - 2
    for deterministic in (False, True):
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        out, _ = flex_flash_attn_func(
            *given, mask, softmax_scale=0.3, backend="hopper", deterministic=deterministic,
            return_max_logits=True,
        )  # fmt: skip
        ours = torch.autograd.grad(out, given, dout)
        exact = [x.double().detach().requires_grad_() for x in (q, k, v)]
        right_out, _ = flex_flash_attn_func(*exact, mask, softmax_scale=0.3, backend="reference")
        right = torch.autograd.grad(right_out, exact, dout.double())
        for x, y in zip(ours, right, strict=True):
            torch.testing.assert_close(x.double(), y, atol=0.05, rtol=0.02)
