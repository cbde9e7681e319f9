"""Tiles of the Hopper forward that are cut along their keys, against the fp64 oracle.

As many parts as will do, on masks, head dims and options of all kinds; and the cuts that are chosen
where heads are few.
"""

from __future__ import annotations

import random

import pytest
import torch
from tests.gpu.test_attention import random_mask
from tests.gpu.test_hopper import VARIANTS, many_tiles

from keel import direct, flex_flash_attn_func, masks, tile_parts
from keel.kernels import hopper_launch, hopper_tiles, launch
from keel.kernels.flash_common import num_sms
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


CUT_VARIANTS = [
    *VARIANTS,
    ((256, None), torch.bfloat16, True, 5.0),  # the fewest registers are left
    ((192, None), torch.float16, False, 5.0),
]


@pytest.fixture
def cut_calls(monkeypatch):
    """Every tile in 1 to 8 parts, or as many as it has blocks. Counts launches with parts."""
    calls = []
    between = hopper_launch.between_parts

    def noted(numbers, *where):
        calls.extend([numbers] if numbers else [])
        return between(numbers, *where)

    def counts(records, *_, **__):
        return [1 + (5 * n + len(records.tiles)) % 8 for n in range(len(records.tiles))], 1.0

    monkeypatch.setattr(direct, "_known", direct.KnownCalls())
    monkeypatch.setattr(launch, "_recipes", {})
    monkeypatch.setattr(hopper_launch, "between_parts", noted)
    monkeypatch.setattr(tile_parts, "choose_cuts", counts)
    hopper_tiles.few_tiles.cache_clear()
    yield calls
    hopper_tiles.few_tiles.cache_clear()


def all_meetings_are_over() -> bool:
    torch.cuda.synchronize()
    rows = [*hopper_tiles._meetings.values(), *hopper_tiles._taken]
    return all(not row.any() for row in rows)


@pytest.mark.parametrize("variant", range(len(CUT_VARIANTS)))
def test_random_masks(variant, cut_calls):
    (d, dv), dtype, sink, softcap = CUT_VARIANTS[variant]
    for seed in range(96):
        if seed >= 24 and len(cut_calls) > 8:  # of some kinds few of the first are cut
            break
        rng = random.Random(5000 * variant + seed)
        hk = rng.choice([1, 2, 3])
        case = Case(
            mask=random_mask(rng, rng.choice([64, 300, 700, 1500])),
            hq=hk * rng.randrange(1, 5),
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
    assert len(cut_calls) > 8
    assert all_meetings_are_over()


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "tiny"])
def test_many_tiles(mask, cut_calls):
    """The same bits, whoever comes last; on 32 SMs, on one, and many times over."""
    case = Case(mask=many_tiles(mask), hq=12, hk=3, d=128, dtype=torch.bfloat16, device="cuda")
    assert_right(case, backend="hopper")
    results = [run_case(case, backend="hopper", sm_margin=n) for n in (0, 100, 131, *[0] * 10)]
    for other in results[1:]:
        assert all(torch.equal(results[0][n], other[n]) for n in ("out", "lse", "max_logits"))
    assert cut_calls or mask == "tiny"  # tiny documents have one block
    assert all_meetings_are_over()


@pytest.mark.parametrize(
    ("mask", "heads"),
    [
        (masks.full(512, 8192), 8),
        (masks.causal(4096), 1),
        (masks.full(100, 9000), 4),
        (masks.full(1, 5000), 2),
    ],
)
@pytest.mark.parametrize("d", [64, 128])
def test_chosen_cuts(mask, heads, d):
    sms = num_sms(torch.device("cuda"))
    blocks = hopper_launch.block_ns(d, d, False)
    assert hopper_tiles.few_tiles(mask, blocks, heads, sms, d == 128)[1] is not None
    case = Case(mask=mask, hq=heads, hk=1, d=d, dtype=torch.bfloat16, device="cuda")
    assert_right(case, backend="hopper")
    assert all_meetings_are_over()


def test_accumulates_in_place(cut_calls):
    """What was there is counted once, not once for each part."""
    tokens, heads = 700, 6
    q, k, v = torch.randn(3, tokens, heads, 128, device="cuda", dtype=torch.bfloat16).unbind()
    out = torch.zeros(tokens, heads, 128, device="cuda")
    lse = torch.full((tokens, heads), -float("inf"), device="cuda")
    top = torch.full((heads,), -float("inf"), device="cuda")
    for begin, end in ((0, 5), (5, 400), (400, 700)):
        accumulate_(
            *(out, lse, top, q, k[begin:end], v[begin:end]),
            *(tensors_of_mask(masks.full(tokens, end - begin)), Scoring(scale=0.1)),
            sm_margin=0,
            backend="hopper",
        )
    assert len(cut_calls) == 2
    want, meta = flex_flash_attn_func(
        q, k, v, masks.full(tokens), softmax_scale=0.1, return_max_logits=True, backend="triton"
    )
    torch.testing.assert_close(out, want.float(), atol=4e-3, rtol=1e-2)
    torch.testing.assert_close(lse, meta.lse, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(top, meta.max_logits, atol=1e-4, rtol=1e-6)


def test_streams_and_graphs_beside_each_other(cut_calls):
    q, k, v = torch.randn(3, 1500, 8, 128, device="cuda", dtype=torch.bfloat16).unbind()
    mask = masks.causal(1500)
    want, _ = flex_flash_attn_func(q, k, v, mask, backend="hopper")
    graphs, outs = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs += [
                flex_flash_attn_func(q, k, v, mask, backend="hopper", sm_margin=100)[0]
                for _ in range(3)
            ]
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(10):
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        eager = []
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if n < 2:
                    graphs[n].replay()
                else:
                    eager += [
                        flex_flash_attn_func(q, k, v, mask, backend="hopper", sm_margin=100)[0]
                        for _ in range(3)
                    ]
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in (*outs, *eager))
    assert cut_calls
    assert all_meetings_are_over()
