"""The Triton kernels on a real GPU, against the fp64 oracle by the tolerance rule."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from keel import flex_flash_attn_func, masks, warmup
from keel.masks import AttnMask, AttnMaskType, AttnSlice
from keel.testing import Case, assert_right, run_case

pytestmark = pytest.mark.gpu

DIMS = [(64, None), (128, None), (8, None), (40, None), (96, None), (192, 128), (256, None)]


def random_mask(rng: random.Random, limit: int) -> AttnMask:
    """Unions of all four types and bands: overlaps, empties, tails of 1..17 rows."""
    tq, tk = (rng.randrange(1, limit) // 16 * 16 + rng.randrange(1, 18) for _ in range(2))
    slices = []
    for _ in range(rng.randrange(0, 7)):
        q0, k0 = rng.randrange(tq), rng.randrange(tk)
        q, k = (q0, rng.randrange(q0, tq + 1)), (k0, rng.randrange(k0, tk + 1))
        if rng.random() < 0.7:
            slices.append(AttnSlice.of_type(q, k, rng.choice(list(AttnMaskType))))
        else:
            lo = rng.randrange(-tq, tk)
            slices.append(AttnSlice(*q, *k, lo=lo, hi=lo + rng.randrange(0, 200)))
    return AttnMask(slices, tq, tk)


def random_case(seed: int) -> tuple[Case, dict]:
    rng = random.Random(seed)
    mask = random_mask(rng, rng.choice([64, 300, 700]))
    d, dv = DIMS[seed % 3] if seed % 2 else rng.choice(DIMS)
    hk = rng.choice([1, 2])
    hq = hk * rng.randrange(1, 9)
    plain = seed % 3 != 0
    bias = tuple(rng.choice([1, n]) for n in (hq, mask.tq, mask.tk))
    case = Case(
        mask=mask,
        hq=hq,
        hk=hk,
        d=d,
        dv=dv,
        dtype=torch.bfloat16 if seed % 2 else torch.float16,
        device="cuda",
        seed=seed,
        scale=None if plain else rng.choice([None, 0.3, -0.2, 0.0]),
        softcap=0.0 if plain else rng.choice([0.0, 5.0]),
        sink=not plain and rng.random() < 0.5,
        bias_shape=bias if not plain and rng.random() < 0.4 else None,
        alibi=not plain and rng.random() < 0.4,
        with_dlse=rng.random() < 0.5,
    )
    return case, {"deterministic": rng.random() < 0.3, "sm_margin": rng.choice([0, 0, 0, 8])}


@pytest.mark.parametrize("batch", range(16))
def test_random_masks(batch):
    """16 x 20 masks, forward and every gradient, in bf16 and fp16."""
    for seed in range(batch * 20, batch * 20 + 20):
        case, options = random_case(seed)
        assert_right(case, backend="triton", **options)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_fp32(d):
    mask = masks.documents([0, 50, 51, 300], causal=True)
    case = Case(mask=mask, hq=4, hk=2, d=d, device="cuda", sink=True)
    assert_right(case, backend="triton")


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_wide_rows_use_large_tiles_and_stay_right(mask):
    tokens = 4096 + 77
    made = {
        "full": masks.full(300, tokens),
        "causal": masks.causal(300, tokens),
        "window": masks.sliding_window(300, tokens, left=3000, right=5, sink_tokens=9),
    }[mask]
    assert_right(
        Case(mask=made, hq=4, hk=1, d=128, dtype=torch.bfloat16, device="cuda"), backend="triton"
    )


def test_gradients_repeat_bitwise():
    mask = masks.documents([0, 300, 700, 1024], causal=True)
    case = Case(
        mask=mask,
        hq=8,
        hk=2,
        d=64,
        dtype=torch.bfloat16,
        device="cuda",
        sink=True,
        bias_shape=(1, 1024, 1),
    )
    first, second = (run_case(case, backend="triton", deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_sm_margin_changes_nothing():
    case = Case(mask=masks.causal(999), hq=8, hk=2, d=128, dtype=torch.bfloat16, device="cuda")
    plain = run_case(case, backend="triton")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for margin in (1, 32, sms - 1):
        held = run_case(case, backend="triton", sm_margin=margin)
        assert all(torch.equal(plain[name], held[name]) for name in plain)
    with pytest.raises(ValueError, match="sm_margin"):
        run_case(case, backend="triton", sm_margin=sms)


def test_ranges_on_the_device_and_garbage_in_them():
    q, k, v = torch.randn(3, 256, 4, 64, device="cuda", dtype=torch.bfloat16).unbind()
    ranges = torch.tensor([[0, 100], [100, 256]], device="cuda", dtype=torch.int32)
    types = torch.tensor([1, 0], device="cuda", dtype=torch.int32)
    got, _ = flex_flash_attn_func(q, k, v, ranges, ranges, types)
    expected, _ = flex_flash_attn_func(q, k, v, ranges.tolist(), ranges.tolist(), [1, 0])
    assert torch.equal(got, expected)
    random.seed(0)
    for _ in range(50):
        garbage = torch.randint(-(2**31), 2**31 - 1, (2, 2), device="cuda", dtype=torch.int32)
        with pytest.raises(ValueError, match="slice"):
            flex_flash_attn_func(q, k, v, garbage, ranges, types)
    ranges[1, 1] = 300  # written in place: noticed
    with pytest.raises(ValueError, match="slice 1"):
        flex_flash_attn_func(q, k, v, ranges, ranges, types)
    torch.cuda.synchronize()


def test_int64_addressing():
    """Rows beyond 2**31 elements: heads far apart in one large storage."""
    tokens, heads, dim = 600, 3, 64
    storage = torch.empty((1 << 31) + (1 << 22), device="cuda", dtype=torch.bfloat16)
    step = (1 << 30) + 8
    views = [
        storage.as_strided((tokens, heads, dim), (dim, step, 1), offset)
        for offset in (0, 1 << 20, 1 << 21)
    ]
    for view in views:
        view.copy_(torch.randn(tokens, heads, dim, device="cuda"))
    results = []
    for given in (views, [x.contiguous() for x in views]):
        leaves = [x.detach().requires_grad_() for x in given]
        out, _ = flex_flash_attn_func(*leaves, masks.causal(tokens), backend="triton")
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_cuda_graph_capture():
    q, k, v = torch.randn(3, 512, 4, 64, device="cuda", dtype=torch.bfloat16).unbind()
    mask = masks.documents([0, 100, 512], causal=True)
    eager, _ = flex_flash_attn_func(q, k, v, mask, return_max_logits=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, meta = flex_flash_attn_func(q, k, v, mask, return_max_logits=True)
    q.normal_()
    graph.replay()
    fresh, fresh_meta = flex_flash_attn_func(q, k, v, mask, return_max_logits=True)
    assert torch.equal(out, fresh) and not torch.equal(out, eager)
    assert torch.equal(meta.max_logits, fresh_meta.max_logits)


def test_graphs_keep_what_they_point_to(monkeypatch):
    """A captured launch reads its tile plan at every replay, long after the caches forgot it."""
    from keel.kernels import launch
    from keel.tiling import plan_tiles

    q, k, v = torch.randn(3, 900, 4, 64, device="cuda", dtype=torch.bfloat16).unbind()
    mask = masks.documents([0, 123, 900], causal=True)
    expected, _ = flex_flash_attn_func(q, k, v, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = flex_flash_attn_func(q, k, v, mask)
    monkeypatch.setattr(launch, "MAX_RECIPES", 1)
    flex_flash_attn_func(q, k, v, masks.causal(900))
    plan_tiles.cache_clear()
    gc.collect()
    torch.cuda.empty_cache()
    garbage = [torch.full((1 << 20,), 1 << 20, dtype=torch.int32, device="cuda") for _ in range(20)]
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected) and len(garbage) == 20


def test_pointers_that_are_not_aligned():
    """The same layout at another offset: a variant compiled for aligned pointers must not run."""
    tokens = 300
    storage = torch.randn(4, tokens * 2 * 64 + 8, device="cuda", dtype=torch.bfloat16)
    for offset in (0, 1, 4, 0):
        given = [
            storage[n, offset : offset + tokens * 2 * 64].view(tokens, 2, 64) for n in range(4)
        ]
        *leaves, dout = (x.detach().requires_grad_() for x in given)
        results = []
        for backend in ("triton", "reference"):
            out, _ = flex_flash_attn_func(*leaves, masks.causal(tokens), backend=backend)
            results.append([out, *torch.autograd.grad(out, leaves, dout)])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, atol=3e-2, rtol=3e-2)


def test_compiled_training_step():
    q, k, v = (
        torch.randn(384, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    ranges = torch.tensor([[0, 100], [100, 384]])
    types = torch.tensor([1, 1])

    def step(q, k, v):
        out, meta = flex_flash_attn_func(q, k, v, ranges, ranges, types, return_max_logits=True)
        return out.float().square().sum() + meta.lse.sum(), meta.max_logits

    eager, top = step(q, k, v)
    grads = torch.autograd.grad(eager, (q, k, v))
    loss, compiled_top = torch.compile(step, fullgraph=True)(q, k, v)
    compiled_grads = torch.autograd.grad(loss, (q, k, v))
    assert torch.equal(top, compiled_top)
    for a, b in zip(grads, compiled_grads, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_warmup_compiles_ahead():
    from keel.kernels import launch

    def train() -> None:
        q, k, v = (
            torch.randn(200, h, 80, device="cuda", dtype=torch.float16, requires_grad=True)
            for h in (8, 2, 2)
        )
        out, _ = flex_flash_attn_func(q, k, v, masks.causal(200), return_max_logits=True)
        out.sum().backward()

    before = len(launch._compiled)
    warmup(8, 2, 80, dtype=torch.float16)
    warm = len(launch._compiled)
    train()
    assert before < warm == len(launch._compiled)


@pytest.mark.parametrize("value", [-3.0, -0.0, 0.0, 2.0, float("nan")])
@pytest.mark.parametrize("start", [-float("inf"), -1.0, 1.0])
def test_max_logits_of_any_sign(value, start):
    """One logit differs from -5, somewhere in one of many tiles; against a running maximum."""
    tokens, heads = 1000, 3
    q = torch.ones(tokens, heads, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.full((tokens, heads, 64), -5 / 64, device="cuda", dtype=torch.bfloat16)
    k[617, 1] = value / 64
    running = torch.full((heads,), start, device="cuda")
    for mask in (masks.sliding_window(tokens, left=40, right=40), masks.full(tokens)):
        raised = running.clone()
        _, meta = flex_flash_attn_func(q, k, k, mask, softmax_scale=1.0, max_logits_out=raised)
        expected = torch.maximum(running, torch.tensor([-5.0, value, -5.0], device="cuda"))
        torch.testing.assert_close(raised, expected, equal_nan=True, rtol=0, atol=0)
        assert meta.max_logits is raised


def test_running_maximum_over_calls():
    tops, running = [], torch.full((8,), -float("inf"), device="cuda")
    for n in range(6):
        q, k, v = torch.randn(3, 700, 8, 64, device="cuda", dtype=torch.bfloat16).unbind()
        q = q * abs(n - 2) if n != 2 else -q  # rising and falling
        mask = masks.documents([0, 31 * n + 1, 300, 700], causal=True)
        flex_flash_attn_func(q, k, v, mask, max_logits_out=running)
        _, meta = flex_flash_attn_func(q, k, v, mask, return_max_logits=True)
        tops.append(meta.max_logits)
        assert torch.equal(running, torch.stack(tops).amax(0))


def test_block_mask_of_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask

    document = torch.arange(700, device="cuda") // 130

    def mask_mod(b, h, i, j):
        return (document[i] == document[j]) & (i >= j)

    mask = masks.from_block_mask(create_block_mask(mask_mod, None, None, 700, 700, "cuda"))
    dense = (document[:, None] == document) & torch.ones(700, 700, device="cuda").tril().bool()
    assert torch.equal(mask.to_dense(), dense.cpu())


@pytest.mark.parametrize("command", ["env", "demo"])
def test_commands_use_the_gpu(command, tmp_path, monkeypatch, capsys):
    from keel.cli import build_app

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        build_app()([command])
    text = capsys.readouterr().out
    assert stopped.value.code == 0, text
    assert "triton" in text and torch.cuda.get_device_name() in text, text


def test_maxima_of_many_calls_are_their_own():
    """Many calls on two streams, in and out of inference mode, kept side by side."""
    q, k, v = torch.randn(3, 200, 4, 64, device="cuda", dtype=torch.bfloat16).unbind()
    mask = masks.causal(200)
    tops = []
    side = torch.cuda.Stream()
    for n in range(150):
        with torch.cuda.stream(side if n % 3 == 0 else torch.cuda.current_stream()):
            side.wait_stream(torch.cuda.default_stream())
            with torch.inference_mode(n % 5 == 0):
                _, meta = flex_flash_attn_func(q * (150 - n), k, v, mask, return_max_logits=True)
            tops.append(meta.max_logits)
    torch.cuda.synchronize()
    expected = tops[-1]
    for n, top in enumerate(tops):
        # A later, smaller maximum that kept an earlier one would be far off.
        torch.testing.assert_close(top, expected * (150 - n), rtol=2e-2, atol=0)
