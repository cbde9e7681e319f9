"""Query heads that share tiles of the Hopper forward, against the fp64 oracle.

Packed wherever they can be, on masks with short ranges of queries, whole tiles and cut ones; and
where packing is chosen.
"""

from __future__ import annotations

import random

import pytest
import torch
from tests.gpu.test_hopper_cuts import all_meetings_are_over

from keel import direct, flex_flash_attn_func, masks, tile_parts
from keel.kernels import hopper_launch, hopper_tiles, launch
from keel.masks import AttnMask, AttnMaskType, AttnSlice
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

VARIANTS = [  # (d, dv), dtype, sink, softcap, group: each is compiled once, then sees many masks
    ((128, None), torch.bfloat16, False, 0.0, 8),
    ((128, None), torch.float16, True, 0.0, 4),
    ((128, None), torch.bfloat16, False, 0.0, 2),
    ((128, None), torch.bfloat16, True, 5.0, 16),
    ((64, None), torch.bfloat16, True, 0.0, 8),
    ((64, None), torch.float16, False, 5.0, 2),
    ((64, None), torch.bfloat16, False, 0.0, 16),
    ((96, None), torch.bfloat16, False, 0.0, 4),
    ((40, None), torch.float16, False, 0.0, 32),
    ((128, 64), torch.bfloat16, False, 0.0, 64),
]


@pytest.fixture
def nothing_known(monkeypatch):
    monkeypatch.setattr(direct, "_known", direct.KnownCalls())
    monkeypatch.setattr(launch, "_recipes", {})
    hopper_tiles.few_tiles.cache_clear()
    yield
    hopper_tiles.few_tiles.cache_clear()


@pytest.fixture
def noted(monkeypatch, nothing_known):
    """(heads of a tile, whether some are cut) of every launch that was made ready."""
    seen = []
    choose = hopper_launch.tiles_for

    def noting(*args, **options):
        tiles = choose(*args, **options)
        seen.append((tiles.pack, tiles.cut is not None))
        return tiles

    monkeypatch.setattr(hopper_launch, "tiles_for", noting)
    return seen


@pytest.fixture(params=["whole", "cut"])
def packed(monkeypatch, noted, request):
    """Wherever it can be; tiles whole, or in 1 to 8 parts."""

    def counts(records, *_, **__):
        number = len(records.tiles)
        if request.param == "whole":
            return [1] * number, 1.0
        return [1 + (5 * n + number) % 8 for n in range(number)], 1.0

    for name in ("LEAST_SAVING", "LEAST_GAIN", "LONG_ROW"):
        monkeypatch.setattr(hopper_tiles, name, 0)
    monkeypatch.setattr(tile_parts, "choose_cuts", counts)
    return request.param


def short_ranges(rng: random.Random) -> AttnMask:
    """Unions of all four types and bands, of few queries each."""
    tq, tk = rng.choice([1, 3, 16, 17, 40, 64, 100, 129]), rng.randrange(1, 1500)
    slices = []
    for _ in range(rng.randrange(1, 6)):
        q0, k0 = rng.randrange(tq), rng.randrange(tk)
        q, k = (q0, min(tq, q0 + rng.randrange(1, 65))), (k0, rng.randrange(k0, tk + 1))
        if rng.random() < 0.7:
            slices.append(AttnSlice.of_type(q, k, rng.choice(list(AttnMaskType))))
        else:
            lo = rng.randrange(-tq, tk)
            slices.append(AttnSlice(*q, *k, lo=lo, hi=lo + rng.randrange(0, 400)))
    return AttnMask(slices, tq, tk)


def sequences(number: int, queries: int, keys: int) -> AttnMask:
    """So many, each with a few queries at the end of its keys."""
    return AttnMask(
        [
            AttnSlice.of_type(
                *((n * queries, (n + 1) * queries), (n * keys, (n + 1) * keys)),
                AttnMaskType.CAUSAL,
            )
            for n in range(number)
        ],
        *(number * queries, number * keys),
    )


@pytest.mark.parametrize(
    ("packed", "variant"),
    [*(("cut", n) for n in range(len(VARIANTS))), *(("whole", n) for n in (0, 3, 4, 8))],
    indirect=["packed"],
)
def test_random_masks(variant, packed, noted):
    (d, dv), dtype, sink, softcap, group = VARIANTS[variant]
    for seed in range(20):
        rng = random.Random(3000 * variant + seed)
        hk = rng.choice([1, 2, 3])
        case = Case(
            mask=short_ranges(rng),
            hq=hk * group,
            hk=hk,
            d=d,
            dv=dv,
            dtype=dtype,
            device="cuda",
            seed=seed,
            sink=sink,
            softcap=softcap,
            scale=rng.choice([None, None, 0.3, -0.2, 0.0]),
        )
        assert_right(case, backend="hopper", sm_margin=rng.choice([0, 0, 8, 131]))
    assert {pack for pack, _ in noted} == {group}
    assert any(cut for _, cut in noted) is (packed == "cut")
    assert all_meetings_are_over()


@pytest.mark.parametrize(
    "mask",
    [
        masks.full(1000, 1500),
        masks.causal(1100),
        masks.sliding_window(1100, left=300, right=5, sink_tokens=9),
        sequences(40, 9, 300),
    ],
    ids=["full", "causal", "window", "sequences"],
)
@pytest.mark.parametrize(
    ("packed", "d"), [("cut", 64), ("cut", 128), ("whole", 128)], indirect=["packed"]
)
def test_many_tiles(mask, d, packed, noted):
    """Each block of threads works through many; results leave by TMA where tiles have all rows."""
    case = Case(mask=mask, hq=24, hk=3, d=d, dtype=torch.bfloat16, device="cuda")
    assert_right(case, backend="hopper")
    results = [run_case(case, backend="hopper", sm_margin=n) for n in (0, 100, 131, *[0] * 5)]
    for other in results[1:]:
        assert all(torch.equal(results[0][n], other[n]) for n in ("out", "lse", "max_logits"))
    assert {pack for pack, _ in noted} == {8}
    assert all_meetings_are_over()


@pytest.mark.parametrize(
    ("mask", "heads"),
    [
        *((masks.full(tq, 4096), (64, 8)) for tq in (1, 16, 64)),
        (masks.full(16, 20_000), (32, 2)),
        (masks.full(5, 16_384), (64, 1)),
        (AttnMask([AttnSlice.of_type((0, 40), (0, 8232), AttnMaskType.CAUSAL)], 40, 8232), (32, 8)),
        (sequences(48, 1, 1500), (32, 8)),
        (sequences(20, 16, 2048), (16, 4)),
    ],
)
@pytest.mark.parametrize("d", [64, 128])
def test_where_it_is_chosen(mask, heads, d, noted):
    hq, hk = heads
    case = Case(mask=mask, hq=hq, hk=hk, d=d, dtype=torch.bfloat16, device="cuda", sink=d == 64)
    assert_right(case, backend="hopper")
    assert {pack for pack, _ in noted} == {hq // hk}
    assert all_meetings_are_over()


def test_training_shapes_are_not_packed(noted):
    for mask in (masks.causal(2000), masks.documents(range(0, 2049, 256)), masks.full(1024)):
        case = Case(mask=mask, hq=16, hk=2, d=64, dtype=torch.bfloat16, device="cuda")
        run_case(case, backend="hopper")
    assert noted and {pack for pack, _ in noted} == {1}


def test_accumulates_in_place(packed, noted):
    tokens, hq, hk = 50, 16, 2
    q = torch.randn(tokens, hq, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2000, hk, 128, device="cuda", dtype=torch.bfloat16).unbind()
    out = torch.zeros(tokens, hq, 128, device="cuda")
    lse = torch.full((tokens, hq), -float("inf"), device="cuda")
    top = torch.full((hq,), -float("inf"), device="cuda")
    for begin, end in ((0, 5), (5, 1200), (1200, 2000)):
        accumulate_(
            *(out, lse, top, q, k[begin:end], v[begin:end]),
            *(tensors_of_mask(masks.full(tokens, end - begin)), Scoring(scale=0.1)),
            sm_margin=0,
            backend="hopper",
        )
    assert {pack for pack, _ in noted} == {8}
    want, meta = flex_flash_attn_func(
        *(q, k, v, masks.full(tokens, 2000)),
        softmax_scale=0.1,
        return_max_logits=True,
        backend="triton",
    )
    torch.testing.assert_close(out, want.float(), atol=4e-3, rtol=1e-2)
    torch.testing.assert_close(lse, meta.lse, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(top, meta.max_logits, atol=1e-4, rtol=1e-6)


def test_max_logits_stay_with_their_heads(packed, noted):
    """Signs, sizes, a NaN and a head that was higher before, in all 32 heads."""
    tokens, heads = 33, 32
    q = torch.randn(tokens, heads, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 900, 2, 64, device="cuda", dtype=torch.bfloat16).unbind()
    k[..., 0], q[..., 0] = 30.0, 0.0
    q[:, 1::2, 0] = -8.0  # all logits of odd heads are far below 0
    q *= torch.arange(1, heads + 1, device="cuda")[:, None] / 16
    q[20, 6] = torch.nan
    before = torch.full((heads,), -torch.inf, device="cuda")
    before[4], before[5] = 1e4, -1.0
    tops = before.clone()
    mask = masks.full(tokens, 900)
    flex_flash_attn_func(q, k, v, mask, max_logits_out=tops, backend="hopper")
    assert {pack for pack, _ in noted} == {16}
    logits = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(16, 1)) / 8
    want = logits.amax((1, 2))
    assert (want[1::2] < -3).all() and want[0] > 0
    want = torch.where(want.isnan(), want, torch.maximum(want, before.double()))
    torch.testing.assert_close(tops.double(), want, atol=1e-4, rtol=1e-5, equal_nan=True)
    assert tops.isnan().nonzero().flatten().tolist() == [6]


def test_layouts(packed, noted):
    """Heads first, a slice of fused projections, and pointers that TMA cannot take as they are."""
    tokens, hq, hk, dim = 45, 16, 4, 128
    mask = AttnMask([AttnSlice(0, 20, 0, 300), AttnSlice(20, 45, 100, 700)], tokens, 700)
    q = torch.randn(tokens, hq, dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 700, hk, dim, device="cuda", dtype=torch.bfloat16).unbind()
    expected, _ = flex_flash_attn_func(q, k, v, mask, backend="hopper")
    fused = torch.randn(tokens, hq + 3, dim + 8, device="cuda", dtype=torch.bfloat16)
    fused[:, 2:-1, :dim] = q
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    shifted = torch.empty(q.numel() + 1, device="cuda", dtype=torch.bfloat16)[1:]
    shifted = shifted.view_as(q).copy_(q)
    for given in (fused[:, 2:-1, :dim], heads_first, shifted):
        got, _ = flex_flash_attn_func(given, k, v, mask, backend="hopper")
        assert torch.equal(got, expected)
    assert {pack for pack, _ in noted} == {4}


def test_graphs(noted):
    q = torch.randn(16, 64, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 8192, 8, 128, device="cuda", dtype=torch.bfloat16).unbind()
    mask = masks.full(16, 8192)
    want, _ = flex_flash_attn_func(q, k, v, mask, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [flex_flash_attn_func(q, k, v, mask, backend="hopper")[0] for _ in range(3)]
    for _ in range(10):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in outs)
    assert {pack for pack, _ in noted} == {8}
    assert all_meetings_are_over()
