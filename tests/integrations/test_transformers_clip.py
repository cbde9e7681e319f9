"""Max logits, QK-Clip and MuonClip in models of transformers whose attention is Keel's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.models import tiny, tokens

from keel.optim import MuonClip, QKClip

PLAIN = ["llama", "mistral", "deepseek_v2", "deepseek_v3", "qwen3"]
"""Models without softcap and sinks, which the dense attention of these tests does not know."""


def attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def maxima(model: Any) -> torch.Tensor:
    return torch.stack([x.current_max_attn_logits for x in attentions(model)])


def forward(model: Any, ids: torch.Tensor, **inputs: Any) -> None:
    model(input_ids=ids, labels=ids, **inputs).loss.backward()


@pytest.mark.parametrize("name", PLAIN)
def test_maxima_are_those_of_all_logits(name: str) -> None:
    dense, ours = tiny(name, "dense"), tiny(name)
    for seed in (1, 2):  # two micro-batches: the larger of both stays
        ids = tokens(2, seed=seed)
        forward(dense, ids)
        forward(ours, ids)
    torch.testing.assert_close(maxima(ours), maxima(dense), rtol=1e-5, atol=1e-5)


def test_padding_does_not_count() -> None:
    ids = tokens(1, 20)
    mask = torch.ones_like(ids)
    mask[:, 12:] = 0
    padded, alone = tiny("llama"), tiny("llama")
    forward(padded, ids, attention_mask=mask)
    forward(alone, ids[:, :12])
    torch.testing.assert_close(maxima(padded), maxima(alone), rtol=1e-5, atol=1e-5)


def test_only_training_is_watched() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.eval()(input_ids=tokens())
    assert not any(hasattr(x, "current_max_attn_logits") for x in attentions(model))
    model.train()(input_ids=tokens())
    seen = maxima(model)
    model.eval()(input_ids=tokens(seed=5) * 0 + 3)
    assert torch.equal(maxima(model), seen) and seen.isfinite().all()
    assert not [key for key in model.state_dict() if "max_attn" in key]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_clips_what_passed_tau(name: str) -> None:
    """Weights do not move, so the first layer's logits are scaled by exactly gamma."""
    model, ids = tiny(name), tokens()
    clip = QKClip.from_model(model, tau=1.0)  # before any forward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip.attach(optimizer)
    forward(model, ids)
    before = maxima(model)[0].clone()
    optimizer.step()
    assert clip.metrics is not None and int(clip.metrics.clipped) > 0
    assert clip.metrics.names == tuple(f"model.layers.{n}.self_attn" for n in range(2))
    forward(model, ids)
    torch.testing.assert_close(maxima(model)[0], before.clamp(max=1.0), rtol=1e-4, atol=1e-5)


def test_says_that_nothing_was_reported() -> None:
    model = tiny("llama")
    clip = QKClip.from_model(model)
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn never reported"):
        clip.step()


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_refuses_norms_of_queries_and_keys(name: str) -> None:
    with pytest.raises(ValueError, match=r"normalises queries and keys \(q_norm, k_norm\)"):
        QKClip.from_model(tiny(name))
    with pytest.raises(ValueError, match=r"normalises queries and keys"):
        MuonClip(tiny(name), lr=1e-3)


def test_gains_of_norms() -> None:
    model, ids = tiny("qwen3"), tokens()
    clip = QKClip.from_model(model, tau=1.0, qk_norm="gains")
    forward(model, ids)
    before = maxima(model)[0].clone()
    assert before.max() > 1
    clip.step()
    forward(model, ids)
    torch.testing.assert_close(maxima(model)[0], before / before.max(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="doubling its gain does not double its result"):
        QKClip.from_model(tiny("gemma3"), qk_norm="gains")


def train(model: Any, steps: int, tau: float) -> tuple[list[float], list[int]]:
    """Losses and numbers of clipped heads; a token is the sum of the two before it."""
    for module in attentions(model):  # so that dense attention is known to report
        module.current_max_attn_logits = torch.full((4,), -torch.inf)
    # fp64: small products in fp32 are slow on some CPUs.
    optimizer = MuonClip(model, lr=0.01, tau=tau, ns_dtype=torch.float64)
    losses, clipped = [], []
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = torch.randint(8, (4, 16), generator=random)
        for n in range(2, 16):
            ids[:, n] = (ids[:, n - 1] + ids[:, n - 2]) % 8
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert optimizer.metrics is not None
        clipped.append(int(optimizer.metrics.clipped))
    return losses, clipped


def test_training_follows_dense_attention() -> None:
    """200 steps with MuonClip, and a tau at which it clips."""
    ours, dense = (tiny("llama", x, initializer_range=0.1) for x in ("keel", "dense"))
    got, clips = train(ours, 200, tau=2.0)
    expected, expected_clips = train(dense, 200, tau=2.0)
    assert sum(clips) > 100 and got[-1] < 0.5 * got[0]
    assert got == pytest.approx(expected, rel=5e-3)
    assert sum(clips) == pytest.approx(sum(expected_clips), rel=0.02)
    other, _ = train(tiny("llama", initializer_range=0.1), 100, tau=1e6)
    assert other != pytest.approx(expected[:100], rel=5e-3), "the clip makes no difference"
