"""The Hopper backward behind backend="hopper", against the fp64 oracle."""

from __future__ import annotations

import random

import pytest
import torch
from tests.gpu.test_attention import random_mask

from keel import flex_flash_attn_func, masks
from keel.kernels import flash_bwd, hopper_bwd_launch
from keel.masks import AttnMask, AttnSlice
from keel.testing import Case, assert_right, run_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

VARIANTS = [  # (d, dv), dtype, sink, softcap
    ((128, None), torch.bfloat16, False, 0.0),
    ((128, None), torch.float16, True, 0.0),
    ((64, None), torch.bfloat16, True, 0.0),
    ((64, None), torch.float16, False, 0.0),
    ((96, None), torch.bfloat16, False, 0.0),
    ((40, None), torch.float16, False, 0.0),
    ((128, 64), torch.bfloat16, True, 0.0),
    ((64, 128), torch.bfloat16, False, 0.0),
    ((128, None), torch.bfloat16, True, 1.5),
    ((64, None), torch.float16, False, 0.7),
    ((256, None), torch.bfloat16, False, 0.0),
    ((256, None), torch.float16, True, 2.0),
    ((192, None), torch.bfloat16, True, 0.0),
    ((192, 128), torch.bfloat16, False, 0.0),
    ((192, 128), torch.float16, True, 1.5),
    ((136, 40), torch.float16, False, 0.0),
    ((64, 256), torch.bfloat16, False, 0.0),
]


@pytest.fixture
def no_portable_backward(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the portable backward was called")

    monkeypatch.setattr(flash_bwd, "backward", refuse)


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
@pytest.mark.parametrize("deterministic", [False, True])
def test_random_masks(variant, deterministic):
    """17 x 24 masks, every gradient, also with dq in a fixed order."""
    (d, dv), dtype, sink, softcap = VARIANTS[variant]
    for seed in range(24):
        rng = random.Random(1000 * variant + seed)
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
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "tiny"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_many_tiles(mask, d, deterministic):
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
    case = Case(mask=made, hq=24, hk=3, d=d, dtype=torch.bfloat16, device="cuda")
    assert_right(case, backend="hopper", deterministic=deterministic)


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", ["causal", "documents", "nothing much"])
def test_fewer_sms(mask, d):
    """Blocks of threads that stay, many turns each and one; dk and dv as without a margin."""
    tokens = 2048 + 77
    made = {
        "causal": masks.causal(tokens),
        "documents": masks.documents([0, 1, 4, 604, 609, 1500, tokens], causal=True),
        "nothing much": AttnMask([AttnSlice.of_type((130, 140), (300, 350), 0)], tokens, tokens),
    }[mask]
    case = Case(mask=made, hq=16, hk=4, d=d, dtype=torch.bfloat16, device="cuda")
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    for margin in (1, 16, sms - 7, sms - 1):
        for deterministic in (False, True):
            assert_right(case, backend="hopper", sm_margin=margin, deterministic=deterministic)
    few, all_of_them = (run_case(case, backend="hopper", sm_margin=n) for n in (sms - 5, 0))
    for name in ("dk", "dv"):  # parts may differ in number, and so in rounding
        torch.testing.assert_close(few[name], all_of_them[name], atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("bounds", [[0, 5, 700, 1301], [0, 4000]])
def test_repeatable(bounds, d):
    """dk and dv always, dq where it is asked for; both ways give the same but for rounding."""
    mask = masks.documents(bounds, causal=True)
    case = Case(mask=mask, hq=8, hk=2, d=d, dtype=torch.bfloat16, device="cuda")
    first, second = (run_case(case, backend="hopper") for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in ("dk", "dv"))
    asked = run_case(case, backend="hopper", deterministic=True)
    for _ in range(5):
        again = run_case(case, backend="hopper", deterministic=True)
        assert all(torch.equal(asked[n], again[n]) for n in ("dq", "dk", "dv"))
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(asked[name], first[name], atol=1e-2, rtol=1e-2)


@pytest.mark.usefixtures("no_portable_backward")
def test_layouts():
    """A slice of fused projections, and pointers that TMA cannot take as they are."""
    tokens, heads, dim = 500, 4, 128
    mask = masks.documents([0, 77, 500], causal=True)
    plain = torch.randn(3, tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
    dout = torch.randn(tokens, heads, dim, device="cuda", dtype=torch.bfloat16)

    def gradients(given, dout):
        given = [x.detach().requires_grad_() for x in given]
        out, _ = flex_flash_attn_func(*given, mask, backend="hopper")
        return torch.autograd.grad(out, given, dout)

    expected = gradients(plain.unbind(), dout)
    fused = plain.permute(1, 2, 0, 3).reshape(tokens, heads, 3, dim)
    shifted = torch.empty(4 * tokens * heads * dim + 1, device="cuda", dtype=torch.bfloat16)[1:]
    shifted = shifted.view(4, tokens, heads, dim)
    shifted[:3], shifted[3] = plain, dout
    heads_first = dout.transpose(0, 1).contiguous().transpose(0, 1)
    for given, given_dout in (
        (fused.unbind(2), dout),
        (shifted[:3].unbind(), shifted[3]),
        (plain.unbind(), heads_first),
    ):
        dq, dk, dv = gradients(given, given_dout)
        assert torch.equal(dk, expected[1]) and torch.equal(dv, expected[2])
        torch.testing.assert_close(dq, expected[0], atol=1e-3, rtol=1e-2)  # another order


@pytest.mark.usefixtures("no_portable_backward")
def test_graph():
    mask = masks.documents([0, 901, 2000], causal=True)
    q, k, v, dout = torch.randn(4, 2000, 8, 64, device="cuda", dtype=torch.bfloat16).unbind()
    given = [x.detach().requires_grad_() for x in (q, k, v)]

    def gradients():
        out, _ = flex_flash_attn_func(*given, mask, backend="hopper")
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
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_softcap_at_its_limits(d, deterministic):
    """Scores far beyond the cap, where its slope is 0, and far below, where it is 1."""
    for scale, softcap in ((30.0, 1.0), (1.0, 2.0), (0.1, 200.0)):
        case = Case(
            mask=masks.causal(777), hq=6, hk=2, d=d, dtype=torch.bfloat16, device="cuda",
            scale=scale, softcap=softcap,
        )  # fmt: skip
        assert_right(case, backend="hopper", deterministic=deterministic)


@pytest.mark.usefixtures("no_portable_backward")
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_wide_heads_many_times(softcap):
    """What one consumer hands to the other is never older than it should be: the same bits again
    and again, with all of the GPU at it."""
    mask = masks.documents([0, 5, 1700, 4096], causal=True)
    case = Case(mask=mask, hq=16, hk=4, d=256, dtype=torch.bfloat16, device="cuda", softcap=softcap)
    first = run_case(case, backend="hopper")
    for _ in range(50):
        again = run_case(case, backend="hopper")
        assert all(torch.equal(first[n], again[n]) for n in ("dq", "dk", "dv"))


def test_the_portable_backward_serves_the_rest(monkeypatch):
    """More tiles than a grid has room for."""

    def refuse(*args, **kwargs):
        raise AssertionError("the Hopper backward was called")

    monkeypatch.setattr(hopper_bwd_launch, "backward", refuse)
    monkeypatch.setattr(hopper_bwd_launch, "MAX_TILES", 4)
    case = Case(mask=masks.causal(300), hq=4, hk=2, d=128, dtype=torch.bfloat16, device="cuda")
    assert_right(case, backend="hopper")


@pytest.mark.usefixtures("no_portable_backward")
def test_keys_that_nobody_sees():
    q = torch.randn(200, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(500, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = AttnMask([AttnSlice.of_type((130, 140), (300, 350), 0)], 200, 500)
    out, _ = flex_flash_attn_func(q, k, k, mask, backend="hopper")
    dq, dk = torch.autograd.grad(out, [q, k], torch.randn_like(out))
    rows, keys = torch.zeros(200, dtype=torch.bool), torch.zeros(500, dtype=torch.bool)
    rows[130:140] = keys[300:350] = True
    assert (dq[~rows] == 0).all() and (dk[~keys] == 0).all()
    assert (dq[rows] != 0).any(2).all() and (dk[keys] != 0).any(2).all()
