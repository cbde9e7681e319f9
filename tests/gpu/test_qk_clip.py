"""QK-Clip on a real GPU: no host sync, weights and masters by the kernel, maxima by the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from keel import masks, reference
from keel.meta import Scoring
from keel.nn import GPT, GPTConfig
from keel.optim import (
    ClippedRows,
    LayerSpec,
    QKClip,
    clip_program,
    key_rows,
    max_logits,
    query_rows,
)
from keel.optim.replay import Replay

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_sync() -> Iterator[Any]:
    """Turns a host sync into an error, once it is called."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("gqa", ["q_only", "compensated", "group"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_never_waits_for_the_device(gqa: Any, dtype: torch.dtype, no_sync: Any) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "num_layers": 4, "hidden_size": 128, "num_heads": 8}
    model = GPT(GPTConfig(**sizes, num_kv_heads=2, qkv_bias=True)).cuda().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    clip = QKClip.from_model(model, tau=0.5, gqa=gqa)
    clip.attach(optimizer)
    ids = torch.randint(64, (256,), device="cuda")
    mask = masks.documents([0, 100, 256], causal=True)
    for step in range(4):
        model(ids, mask).float().square().mean().backward()
        torch.cuda.synchronize()
        if step:  # the first one builds tables
            no_sync()
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
        assert clip.metrics is not None and int(clip.metrics.clipped) > 0


def test_recorded_steps_do_what_launched_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gammas and counts, bit by bit; tau changes on the way, and one step is skipped."""

    def train(record: bool) -> list[torch.Tensor]:
        with monkeypatch.context() as patch:
            if not record:
                patch.setattr(Replay, "run", lambda self, key, work: work())
            narrow, _, spec = attention(torch.bfloat16, master=False)
            clip = QKClip([spec], tau=10.0)
            numbers = torch.Generator("cuda").manual_seed(5)
            seen = []
            for step in range(8):
                clip.tau = 10.0 if step < 5 else 7.0
                clip.observe("only", torch.rand(8, device="cuda", generator=numbers) * 30)
                metrics = clip.step(found_inf=torch.full((1,), float(step == 3), device="cuda"))
                assert metrics is not None
                seen += [metrics.gamma, metrics.max_logits, *(x.detach().clone() for x in narrow)]
            return [*seen, *clip.state_dict()["layers"]["only"].values()]

    recorded, launched = train(True), train(False)
    assert all(torch.equal(a, b) for a, b in zip(recorded, launched, strict=True))
    assert int((recorded[0] < 1).sum()) > 0 and (recorded[12] == 1).all()


def attention(dtype: torch.dtype, master: bool) -> tuple[Any, Any, LayerSpec]:
    torch.manual_seed(0)
    wide = [torch.randn(h * 64, 96, device="cuda") for h in (8, 8)]
    narrow = [nn.Parameter(x.to(dtype)) for x in wide]
    if master:
        for x, y in zip(narrow, wide, strict=True):
            x.main_param = y  # type: ignore[attr-defined]
    rows = (
        ClippedRows(narrow[0], query_rows(8, 64), "q"),
        ClippedRows(narrow[1], key_rows(8, 64), "k"),
    )
    spec = LayerSpec(name="only", num_heads=8, num_kv_heads=8, rows=rows)
    return narrow, wide if master else None, spec


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_as_by_plain_torch(dtype: torch.dtype, master: bool) -> None:
    narrow, wide, spec = attention(dtype, master)
    old = [x.detach().clone() for x in (wide or narrow)]
    clip = QKClip([spec], tau=10.0)
    clip.observe("only", torch.tensor([1, 20, 30, 5, 70, 1e9, -3, 11.0], device="cuda"))
    metrics = clip.step()
    assert metrics is not None and int(metrics.clipped) == 5
    scale = metrics.gamma.sqrt().repeat_interleave(64)[:, None]
    for n, before in enumerate(old):
        want = before.float() * scale
        if wide is not None:
            torch.testing.assert_close(wide[n], want, rtol=1e-6, atol=0)
            assert torch.equal(narrow[n], wide[n].to(dtype))
        else:
            torch.testing.assert_close(narrow[n].float(), want.to(dtype).float())
        kept = (metrics.gamma == 1).repeat_interleave(64)
        assert torch.equal((wide or narrow)[n][kept], before[kept])


@pytest.mark.parametrize("alpha", [0.5, 0.3])
def test_one_launch_does_what_torch_does(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gammas, counts and largest logits bit by bit, and weights to rounding."""
    nan, inf = float("nan"), float("inf")
    numbers = torch.Generator("cuda").manual_seed(3)
    tops = [torch.rand(8, device="cuda", generator=numbers) * 30 for _ in range(4)]
    tops[1][:4] = torch.tensor([nan, inf, -inf, 0.0], device="cuda")
    for top in tops:
        top[7] = 3.0  # never clipped

    def steps(in_one_launch: bool) -> list[torch.Tensor]:
        narrow, _, spec = attention(torch.float32, False)
        clip = QKClip([spec], tau=10.0, alpha=alpha)
        monkeypatch.setattr(clip_program, "can_use_triton", lambda device: in_one_launch)
        seen = []
        for n, top in enumerate(tops):
            clip.observe("only", top)
            metrics = clip.step(found_inf=torch.full((1,), float(n == 2), device="cuda"))
            assert metrics is not None and clip._program is not None
            assert clip._program.in_one_launch is in_one_launch
            seen += [metrics.gamma, metrics.max_logits]
        return [*(x.detach() for x in narrow), *seen, *clip.state_dict()["layers"]["only"].values()]

    one, many = steps(True), steps(False)
    for a, b in zip(one[:2], many[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=0)
    for a, b in zip(one[2:], many[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert int(one[-2].sum()) > 8
    untouched = torch.stack([x == 1 for x in one[2:10:2]]).all(0).repeat_interleave(64)
    fresh = attention(torch.float32, False)[0]
    assert int(untouched.sum()) and all(
        torch.equal(x[untouched], y[untouched]) for x, y in zip(one[:2], fresh, strict=True)
    )


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_max_logits_by_the_kernel(dtype: torch.dtype, d: int) -> None:
    torch.manual_seed(0)
    for mask in (
        masks.causal(517),
        masks.full(300, 700),
        masks.documents([0, 40, 300, 1000], causal=True),
        masks.sliding_window(900, left=130),
    ):
        q = torch.randn(mask.tq, 8, d, device="cuda", dtype=dtype)
        k = torch.randn(mask.tk, 2, d, device="cuda", dtype=dtype)
        got = max_logits(q, k, mask)
        want = reference.attention(
            *(q.double(), k.double(), k.double(), mask),
            Scoring(scale=d**-0.5),
            dtype=torch.float64,
        )[2]
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_a_captured_step() -> None:
    """Everything but the first step may live in a CUDA graph."""
    narrow, _, spec = attention(torch.float32, False)
    clip = QKClip([spec], tau=10.0)
    top = torch.full((8,), 20.0, device="cuda")
    clip.observe("only", top)
    clip.step()
    before = narrow[0].detach().clone()
    clip.observe("only", top)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clip.step()
    assert torch.equal(narrow[0], before)  # capturing runs nothing
    graph.replay()
    torch.testing.assert_close(narrow[0].detach(), before * 0.5**0.5)
