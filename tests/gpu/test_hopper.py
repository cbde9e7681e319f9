"""The Hopper forward against the fp64 oracle: masks, head dims, layouts, streams, graphs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from tests.gpu.test_attention import random_mask

from keel import direct, flex_flash_attn_func, masks
from keel.kernels import hopper_launch, hopper_tiles, launch
from keel.masks import AttnMask, AttnSlice
from keel.masks.inputs import tensors_of_mask
from keel.meta import Scoring
from keel.ops import accumulate_
from keel.testing import Case, assert_right, run_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

VARIANTS = [  # (d, dv), dtype, sink, softcap: each is compiled once, then sees many masks
    ((128, None), torch.bfloat16, False, 0.0),
    ((128, None), torch.float16, True, 0.0),
    ((64, None), torch.bfloat16, True, 0.0),
    ((64, None), torch.float16, False, 5.0),
    ((96, None), torch.bfloat16, False, 0.0),
    ((40, None), torch.float16, False, 0.0),
    ((192, 128), torch.bfloat16, False, 0.0),
    ((256, None), torch.bfloat16, True, 0.0),
    ((128, 64), torch.bfloat16, False, 0.0),
    ((128, None), torch.bfloat16, True, 5.0),
    ((256, None), torch.bfloat16, True, 5.0),
    ((64, 128), torch.bfloat16, False, 0.0),
    ((192, None), torch.float16, True, 0.0),
    ((64, 256), torch.bfloat16, False, 0.0),
    ((160, None), torch.bfloat16, False, 0.0),
    ((80, None), torch.bfloat16, False, 0.0),
]


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_random_masks(variant):
    """16 x 32 masks, forward and every gradient."""
    (d, dv), dtype, sink, softcap = VARIANTS[variant]
    for seed in range(32):
        rng = random.Random(1000 * variant + seed)
        hk = rng.choice([1, 2, 3])
        case = Case(
            mask=random_mask(rng, rng.choice([64, 300, 700])),
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
        assert_right(case, backend="hopper", sm_margin=rng.choice([0, 0, 8, 131]))


def many_tiles(mask):
    tokens = 2048 + 77
    lengths = [1, 3, 600, 5, 128, 256, 700, 17, 100, 315]
    return {
        "full": masks.full(tokens),
        "causal": masks.causal(tokens),
        "window": masks.sliding_window(tokens, left=300, right=5, sink_tokens=9),
        "documents": masks.documents([sum(lengths[:n]) for n in range(11)], causal=True),
        "tiny": masks.documents(range(0, tokens, 12), causal=True),
    }[mask]


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "tiny"])
def test_many_tiles(mask):
    """Each block of threads works through many tiles, of one and of many blocks of keys."""
    case = Case(mask=many_tiles(mask), hq=24, hk=3, d=128, dtype=torch.bfloat16, device="cuda")
    assert_right(case, backend="hopper")
    first, second = (run_case(case, backend="hopper", sm_margin=n) for n in (0, 100))
    assert all(torch.equal(first[n], second[n]) for n in ("out", "lse", "max_logits"))


@pytest.mark.parametrize(
    ("d", "dv", "are_long"),
    [(192, None, False), (192, 128, False), (256, None, False), (256, None, True)],
)
def test_many_tiles_of_wide_heads(monkeypatch, d, dv, are_long):
    """Results go out by 64 columns of 16 rows, of which the last tile of a document has not all;
    or as they lie, as those of long tiles do."""
    asked = mock.Mock(return_value=are_long)
    monkeypatch.setattr(direct, "_known", direct.KnownCalls())
    monkeypatch.setattr(launch, "_recipes", {})
    monkeypatch.setattr(hopper_launch, "has_long_tiles", asked)
    for mask in ("full", "causal", "window", "documents", "tiny"):
        sizes = {"hq": 12, "hk": 3, "d": d, "dv": dv}
        case = Case(mask=many_tiles(mask), **sizes, dtype=torch.bfloat16, device="cuda")
        assert_right(case, backend="hopper")
        first, second = (run_case(case, backend="hopper", sm_margin=n) for n in (0, 125))
        assert all(torch.equal(first[n], second[n]) for n in ("out", "lse", "max_logits"))
    assert asked.called == (d == 256)


@pytest.mark.parametrize("d", [128, 256])
def test_tiles_that_begin_together(monkeypatch, d):
    """The same bits as without; also where most blocks of threads begin when others are done, as
    those of a launch beside another one."""
    monkeypatch.setattr(direct, "_known", direct.KnownCalls())
    monkeypatch.setattr(launch, "_recipes", {})
    plain, kinds = {}, ("full", "causal", "tiny")
    sizes = {"hq": 12, "hk": 3, "d": d, "dtype": torch.bfloat16, "device": "cuda"}
    for mask in kinds:
        plain[mask] = run_case(Case(mask=many_tiles(mask), **sizes), backend="hopper")
    asked = mock.Mock(return_value=True)
    monkeypatch.setattr(hopper_launch, "pays_to_pace", asked)
    monkeypatch.setattr(direct, "_known", direct.KnownCalls())
    monkeypatch.setattr(launch, "_recipes", {})
    for mask in kinds:
        case = Case(mask=many_tiles(mask), **sizes)
        assert_right(case, backend="hopper")
        for margin in (0, 125):
            found = run_case(case, backend="hopper", sm_margin=margin)
            assert all(torch.equal(found[n], plain[mask][n]) for n in ("out", "lse", "max_logits"))
    assert asked.called
    q, k, v = torch.randn(3, 4096, 16, d, device="cuda", dtype=torch.bfloat16).unbind()
    expected, _ = flex_flash_attn_func(q, k, v, masks.full(4096), backend="hopper")
    torch.cuda.synchronize()
    outs = []
    for stream in [torch.cuda.Stream() for _ in range(3)]:
        with torch.cuda.stream(stream):
            for _ in range(5):
                out, _ = flex_flash_attn_func(q, k, v, masks.full(4096), backend="hopper")
                outs.append(out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


@dataclass(frozen=True, kw_only=True)
class Rising(Case):
    """Scores that rise or fall with the key by up to `reach`, in each row by another slope."""

    reach: float = 0.0

    def tensors(self) -> dict[str, torch.Tensor]:
        made = super().tensors()
        made["q"][:, :, 1:] *= 0.2
        made["k"][:, :, 1:] *= 0.2
        rise = torch.linspace(-self.reach, self.reach, made["k"].shape[0], device=self.device)
        made["k"][:, :, 0] = rise[:, None]
        return made


@pytest.mark.parametrize("reach", [3.0, 30.0, 300.0])
@pytest.mark.parametrize(
    ("d", "dv", "dtype"),
    [
        (128, None, torch.bfloat16),
        (128, None, torch.float16),
        (64, 128, torch.bfloat16),
        (96, None, torch.bfloat16),
        (192, 128, torch.bfloat16),
        (256, None, torch.bfloat16),
    ],
)
def test_highest_scores_that_rise(d, dv, dtype, reach):
    """By less and by more than what sums are scaled anew for, in rows of one warp."""
    rng = random.Random(int(d + reach))
    made = [masks.full(1500), masks.causal(1500), many_tiles("documents"), many_tiles("window")]
    made += [random_mask(rng, 700) for _ in range(8)]
    for seed, mask in enumerate(made):
        sizes = {"hq": 6, "hk": rng.choice([3, 6]), "d": d, "dv": dv, "dtype": dtype}
        case = Rising(mask=mask, **sizes, device="cuda", seed=seed, scale=1.0, reach=reach)
        assert_right(case, backend="hopper", sm_margin=rng.choice([0, 0, 125]))


def run_paired(case: Case, paired: bool, **options) -> tuple[dict, list[bool]]:
    """Results, and of each forward that was prepared whether query heads went by twos."""
    made, prepare = [], hopper_launch._prepare

    def noted(*args):
        made.append(prepare(*args))
        return made[-1]

    with (
        mock.patch.object(direct, "_known", direct.KnownCalls()),
        mock.patch.object(launch, "_recipes", {}),
        mock.patch.object(hopper_tiles, "are_few", lambda *_: False),  # those are cut
        mock.patch.object(hopper_tiles, "may_pack", lambda group: False),
        mock.patch.object(hopper_launch, "_prepare", noted),
    ):
        if not paired:
            options |= {"sm_margin": 1}
        found = run_case(case, backend="hopper", **options)
    return found, [x.arguments["FORM"].paired for x in made if x is not None]


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_pairs_have_the_bits_of_heads_apart(variant):
    """16 x 12 masks, two to eight query heads of a key head."""
    (d, dv), dtype, sink, softcap = VARIANTS[variant]
    for seed in range(12):
        rng = random.Random(1000 * variant + seed)
        hk = rng.choice([1, 2, 3])
        sizes = {"hq": 2 * hk * rng.randrange(1, 5), "hk": hk, "d": d, "dv": dv, "seed": seed}
        case = Case(
            mask=random_mask(rng, rng.choice([64, 300, 700, 1500])), **sizes, dtype=dtype,
            device="cuda", sink=sink, softcap=softcap, scale=rng.choice([None, 0.3, -0.2, 0.0]),
        )  # fmt: skip
        (pairs, went), (apart, stayed) = (run_paired(case, paired) for paired in (True, False))
        assert all(went) and not any(stayed) and len(went) == len(stayed)
        assert all(torch.equal(pairs[n], apart[n]) for n in ("out", "lse", "max_logits")), seed


@pytest.mark.parametrize("d", [64, 128, 256])
def test_pairs_beside_each_other(d):
    """Of three streams, where some pairs begin when others are done; and again by a graph."""
    q = torch.randn(3000, 16, d, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 3000, 2, d, device="cuda", dtype=torch.bfloat16).unbind()
    lengths = [1, 3, 1100, 5, 128, 256, 1200, 17, 100, 190]
    made = masks.documents([sum(lengths[:n]) for n in range(11)], causal=True)
    for mask in (masks.full(3000), made):
        expected, _ = flex_flash_attn_func(q, k, v, mask, backend="hopper", sm_margin=1)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(3)]
        results = []
        for n in range(30):
            with torch.cuda.stream(streams[n % 3]):
                results.append(flex_flash_attn_func(q, k, v, mask, backend="hopper")[0])
        torch.cuda.synchronize()
        assert all(torch.equal(got, expected) for got in results)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [flex_flash_attn_func(q, k, v, mask, backend="hopper")[0] for _ in range(3)]
        for _ in range(3):
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            assert all(torch.equal(out, expected) for out in outs)


@pytest.fixture
def three_consumers(monkeypatch):
    """Tiles of 192 rows for head dims up to 64."""
    monkeypatch.setattr(direct, "_known", direct.KnownCalls())
    monkeypatch.setattr(launch, "_recipes", {})
    monkeypatch.setattr(hopper_tiles, "three_are_faster", lambda *_: True)
    monkeypatch.setattr(hopper_tiles, "are_few", lambda *_: False)


@pytest.mark.usefixtures("three_consumers")
@pytest.mark.parametrize(
    ("d", "dtype", "sink"),
    [(64, torch.bfloat16, False), (64, torch.bfloat16, True), (40, torch.float16, False)],
)
def test_three_consumers(d, dtype, sink):
    for seed in range(48):
        rng = random.Random(seed)
        hk = rng.choice([1, 2, 3])
        case = Case(
            mask=random_mask(rng, rng.choice([64, 192, 300, 700, 1500])),
            hq=hk * rng.randrange(1, 9),
            hk=hk,
            d=d,
            dtype=dtype,
            device="cuda",
            seed=seed,
            sink=sink,
            scale=rng.choice([None, None, 0.3, -0.2, 0.0]),
        )
        assert_right(case, backend="hopper", sm_margin=rng.choice([0, 0, 8, 131]))


@pytest.mark.usefixtures("three_consumers")
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "tiny"])
def test_many_tiles_of_192_rows(mask):
    case = Case(mask=many_tiles(mask), hq=24, hk=3, d=64, dtype=torch.bfloat16, device="cuda")
    assert_right(case, backend="hopper")
    first, second = (run_case(case, backend="hopper", sm_margin=n) for n in (0, 100))
    assert all(torch.equal(first[n], second[n]) for n in ("out", "lse", "max_logits"))


@pytest.mark.parametrize("option", ["turns", "halves", "skips"])
@pytest.mark.parametrize("d", [64, 128])
def test_options_of_forms(option, d, monkeypatch):
    """What is taken where it pays can be left out, too."""
    choose = hopper_launch.choose_form
    without = {option: False} | ({"skips": False} if option == "halves" else {})
    monkeypatch.setattr(direct, "_known", direct.KnownCalls())
    monkeypatch.setattr(launch, "_recipes", {})
    monkeypatch.setattr(hopper_launch, "choose_form", lambda *a, **b: choose(*a, **b, **without))
    rng = random.Random(7)
    made = [many_tiles(x) for x in ("full", "causal", "window", "documents", "tiny")]
    for mask in [*made, *(random_mask(rng, 700) for _ in range(12))]:
        case = Case(mask=mask, hq=12, hk=3, d=d, dtype=torch.bfloat16, device="cuda")
        assert_right(case, backend="hopper", sm_margin=rng.choice([0, 131]))


def test_graphs_have_counters_of_their_own():
    """More launches in graphs than there are spare counters, replayed side by side."""
    q, k, v = (torch.randn(300, 6, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = masks.documents([0, 30, 170, 300], causal=True)
    want, _ = flex_flash_attn_func(q, k, v, mask, backend="hopper")
    hopper_launch.work_counter(0, q.device)
    spares = hopper_launch._spare_counters[q.device.index]
    del spares[3:]
    graphs, outs = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs += [flex_flash_attn_func(q, k, v, mask, backend="hopper")[0] for _ in range(3)]
    assert not spares
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(10):
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in outs)


def test_layouts():
    """Heads first, a slice of fused projections, and pointers that TMA cannot take as they are."""
    tokens, heads, dim = 500, 4, 128
    mask = masks.documents([0, 77, 500], causal=True)
    plain = torch.randn(3, tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
    expected, _ = flex_flash_attn_func(*plain.unbind(), mask, backend="hopper")
    fused = plain.permute(1, 2, 0, 3).reshape(tokens, heads, 3, dim)
    heads_first = plain.transpose(1, 2).contiguous().transpose(1, 2)
    shifted = torch.empty(3 * tokens * heads * dim + 1, device="cuda", dtype=torch.bfloat16)[1:]
    shifted = shifted.view(3, tokens, heads, dim).copy_(plain)
    for given in (fused.unbind(2), heads_first.unbind(), shifted.unbind()):
        got, _ = flex_flash_attn_func(*given, mask, backend="hopper")
        assert torch.equal(got, expected)


@pytest.mark.parametrize("kv_heads", [6, 3])
@pytest.mark.parametrize(("d", "softcap"), [(128, 0.0), (256, 3.0)])
def test_accumulates_in_place(d, softcap, kv_heads, monkeypatch):
    """Three parts of the keys, one after the other, are the whole."""
    monkeypatch.setattr(direct, "_known", direct.KnownCalls())
    monkeypatch.setattr(launch, "_recipes", {})
    monkeypatch.setattr(hopper_tiles, "are_few", lambda *_: kv_heads == 6)
    tokens, heads = 700, 6
    q = torch.randn(tokens, heads, d, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, tokens, kv_heads, d, device="cuda", dtype=torch.bfloat16).unbind()
    scoring = Scoring(scale=0.1, softcap=softcap)
    out = torch.zeros(tokens, heads, d, device="cuda")
    lse = torch.full((tokens, heads), -float("inf"), device="cuda")
    top = torch.full((heads,), -float("inf"), device="cuda")
    for begin, end in ((0, 5), (5, 400), (400, 700)):
        mask = tensors_of_mask(masks.full(tokens, end - begin))
        accumulate_(
            *(out, lse, top, q, k[begin:end], v[begin:end], mask, scoring),
            sm_margin=0,
            backend="hopper",
        )
    want, meta = flex_flash_attn_func(
        *(q, k, v, masks.full(tokens)),
        **{"softmax_scale": 0.1, "softcap": softcap, "return_max_logits": True},
        backend="hopper",
    )
    torch.testing.assert_close(out, want.float(), atol=4e-3, rtol=1e-2)
    torch.testing.assert_close(lse, meta.lse, atol=1e-5, rtol=1e-6)
    assert torch.equal(top, meta.max_logits)


def test_two_streams_draw_their_own_work():
    q, k, v = torch.randn(3, 3000, 16, 128, device="cuda", dtype=torch.bfloat16).unbind()
    mask = masks.causal(3000)
    expected, _ = flex_flash_attn_func(q, k, v, mask, backend="hopper", sm_margin=66)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for n in range(12):
        with torch.cuda.stream(streams[n % 3]):
            results.append(flex_flash_attn_func(q, k, v, mask, backend="hopper", sm_margin=66)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(got, expected) for got in results)


def test_graph_beside_eager_calls():
    q, k, v = torch.randn(3, 2000, 16, 64, device="cuda", dtype=torch.bfloat16).unbind()
    mask = masks.documents([0, 900, 2000], causal=True)
    expected, _ = flex_flash_attn_func(q, k, v, mask, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = flex_flash_attn_func(q, k, v, mask, backend="hopper", sm_margin=66)
    side = torch.cuda.Stream()
    for _ in range(5):
        out.zero_()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.replay()
        eager, _ = flex_flash_attn_func(q, k, v, mask, backend="hopper", sm_margin=66)
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(out, expected) and torch.equal(eager, expected)


def test_what_it_cannot_do():
    q, k, v = torch.randn(3, 100, 2, 64, device="cuda", dtype=torch.bfloat16).unbind()
    bias = torch.zeros(2, 100, 100, device="cuda")
    with pytest.raises(ValueError, match=r"hopper.*bias"):
        flex_flash_attn_func(q, k, v, masks.causal(100), bias=bias, backend="hopper")
    with pytest.raises(ValueError, match=r"hopper.*float32"):
        flex_flash_attn_func(q.float(), k.float(), v.float(), masks.causal(100), backend="hopper")
    odd = torch.randn(3, 100, 2, 65, device="cuda", dtype=torch.bfloat16)[..., :64].unbind()
    with pytest.raises(ValueError, match=r"hopper.*strides"):
        flex_flash_attn_func(*odd, masks.causal(100), backend="hopper")


@pytest.mark.parametrize("value", [-2.0, 3.0, float("nan")])
@pytest.mark.parametrize(("d", "heads"), [(64, 64), (128, 3), (128, 64)])
def test_max_logits_of_each_part(d, heads, value):
    """One row differs from the rest, in each part of a tile, of few tiles and of many."""
    tokens = 1100
    k = torch.ones(tokens, heads, d, device="cuda", dtype=torch.bfloat16)
    for row in (5, 70, 134, 900, 1098):
        q = torch.full_like(k, -5 / d)
        q[row, 1] = value / d
        _, meta = flex_flash_attn_func(
            *(q, k, k, masks.full(tokens)),
            **{"softmax_scale": 1.0, "return_max_logits": True, "backend": "hopper"},
        )
        expected = torch.full((heads,), -5.0, device="cuda")
        expected[1] = value
        torch.testing.assert_close(
            meta.max_logits, expected, equal_nan=True, rtol=1e-6, atol=0, msg=f"row {row}"
        )


def test_nothing_to_see():
    """Rows without keys, keys without tokens."""
    q = torch.randn(200, 2, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(50, 2, 128, device="cuda", dtype=torch.bfloat16)
    mask = AttnMask([AttnSlice.of_type((130, 140), (0, 50), 0)], 200, 50)
    out, meta = flex_flash_attn_func(q, k, k, mask, return_max_logits=True, backend="hopper")
    seen = torch.zeros(200, dtype=torch.bool)
    seen[130:140] = True
    assert (out[~seen] == 0).all() and torch.isinf(meta.lse[~seen]).all()
    assert (out[seen] != 0).any() and torch.isfinite(meta.lse[seen]).all()
    none = k[:0]
    out, meta = flex_flash_attn_func(
        q, none, none, masks.full(200, 0), return_max_logits=True, backend="hopper"
    )
    assert (out == 0).all() and (meta.lse == -float("inf")).all()
    assert (meta.max_logits == -float("inf")).all()


@pytest.mark.parametrize("d", [128, 256])
def test_scores_below_all_numbers_are_capped(d):
    """Of a row that has no other: its keys count the same, and it is no row without keys."""
    tokens, softcap = 300, 5.0
    q = torch.full((tokens, 2, d), 1e20, device="cuda", dtype=torch.bfloat16)
    v = torch.randn_like(q)
    out, meta = flex_flash_attn_func(
        *(q, -q, v, masks.causal(tokens)),
        **{"softcap": softcap, "return_max_logits": True, "backend": "hopper"},
    )
    seen = torch.arange(1, tokens + 1, device="cuda")
    means = v.double().cumsum(0) / seen[:, None, None]
    torch.testing.assert_close(out.double(), means, rtol=2e-2, atol=2e-2)
    lse = (seen.log() - softcap)[:, None].expand(-1, 2)
    torch.testing.assert_close(meta.lse, lse, rtol=1e-4, atol=1e-4)
    assert (meta.max_logits == -float("inf")).all()
