"""clip_qk on look-alikes of Megatron's modules: its rule, its errors, and what it gets wrong."""

from __future__ import annotations

import copy
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.test_clip_models import DIM, HEADS, KV, MLASelfAttention, SelfAttention, model_of

from keel.compat.megatron import clip_qk


class TransformerEngineCore(torch.nn.Module):
    """A core attention that is not ours: it only has the attribute."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.current_max_attn_logits = config, None


def report(model: torch.nn.Module, tops: list[float]) -> None:
    for layer in model["layers"]:  # type: ignore[index,union-attr]
        layer["self_attn"].core_attention.current_max_attn_logits = torch.tensor(tops)


def wrapped(*attention: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(model, as Megatron hands it out)."""
    model = model_of(*attention)
    return model, torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"module": model})})


def test_gqa_by_megatrons_rule() -> None:
    attention = [SelfAttention(qk_clip_threshold=10.0, qk_clip_alpha=0.25) for _ in range(3)]
    model, outer = wrapped(*attention)
    old = copy.deepcopy(model)
    report(model, [40.0, 5.0, 20.0, 160.0])
    top = clip_qk([outer])
    assert top.shape == () and top == 160.0
    gamma = torch.tensor([0.25, 0.25, 1 / 16, 1 / 16])  # the smallest of a group for all in it
    for new, was in zip(model["layers"], old["layers"], strict=True):  # type: ignore[arg-type,index]
        for key in ("weight", "bias"):
            x, y = (getattr(m["self_attn"].linear_qkv, key).detach() for m in (new, was))
            x, y = (z.view(KV, HEADS // KV + 2, DIM, -1) for z in (x, y))
            torch.testing.assert_close(x[:, :2], y[:, :2] * gamma.view(2, 2, 1, 1) ** 0.25)
            torch.testing.assert_close(x[:, 2], y[:, 2] * gamma[::2].view(2, 1, 1) ** 0.75)
            assert torch.equal(x[:, 3], y[:, 3])
        assert (new["self_attn"].core_attention.current_max_attn_logits == -torch.inf).all()


def test_mla_and_negative_maxima() -> None:
    """A negative maximum beside a clipped head is no NaN."""
    attention = MLASelfAttention()
    model = model_of(attention)
    old = copy.deepcopy(attention)
    report(model, [-5.0, 400.0, 1.0, 100.0])
    assert clip_qk(model) == 400.0
    q, was = (x.linear_q_up_proj.weight.view(HEADS, 24, 10) for x in (attention, old))
    assert torch.equal(q[[0, 2, 3]], was[[0, 2, 3]])
    assert torch.equal(q[1, :16], was[1, :16] * 0.5) and torch.equal(q[1, 16:], was[1, 16:] * 0.25)


def test_main_params_and_a_core_that_is_not_ours() -> None:
    attention = SelfAttention()
    attention.core_attention = TransformerEngineCore(attention.core_attention.config)
    attention.num_attention_heads_per_partition = HEADS
    attention.num_query_groups_per_partition = KV
    attention.hidden_size_per_attention_head = DIM
    attention.bfloat16()
    weight = attention.linear_qkv.weight
    weight.main_param = weight.detach().float()
    before = weight.main_param.clone()
    report(model := model_of(attention), [200.0] * HEADS)
    clip_qk(model)
    torch.testing.assert_close(weight.main_param[:DIM], before[:DIM] * 0.5**0.5)
    assert torch.equal(weight, weight.main_param.bfloat16())
    assert attention.core_attention.current_max_attn_logits is None  # as Megatron forgets
    with pytest.raises(ValueError, match=r"current_max_attn_logits is None in layers.0.self_attn"):
        clip_qk(model)


def test_log_max_only() -> None:
    attention = SelfAttention(qk_clip=False)
    model = model_of(attention)
    before = attention.linear_qkv.weight.clone()
    report(model, [1.0, 2.0, 3000.0, 4.0])
    assert clip_qk(model, log_max_only=True) == 3000.0
    assert torch.equal(attention.linear_qkv.weight, before)
    assert (attention.core_attention.current_max_attn_logits == -torch.inf).all()
    attention.q_layernorm = torch.nn.LayerNorm(DIM)  # can be measured, not clipped
    report(model, [1.0, 2.0, 30.0, 4.0])
    assert clip_qk(model, log_max_only=True) == 30.0
    report(model, [1.0, 2.0, 3000.0, 4.0])
    with pytest.raises(
        ValueError, match=r"qk_clip option needs to be enabled, .*layers.0.self_attn"
    ):
        clip_qk(model)


def test_errors_name_the_module() -> None:
    model = model_of(SelfAttention(), SelfAttention(qk_clip_threshold=3.0))
    report(model, [1.0] * HEADS)
    with pytest.raises(ValueError, match="layers differ in"):
        clip_qk(model)
    with pytest.raises(ValueError, match="no attention of the model keeps"):
        clip_qk(torch.nn.Linear(2, 2))
    normed = SelfAttention()
    normed.q_layernorm = normed.k_layernorm = torch.nn.LayerNorm(DIM)
    report(other := model_of(normed), [1.0] * HEADS)
    with pytest.raises(ValueError, match=r"layers.0.self_attn normalises queries and keys"):
        clip_qk(other)
    strange = SelfAttention()
    strange.linear_q = strange.linear_qkv
    del strange.linear_qkv
    report(other := model_of(strange), [1.0] * HEADS)
    with pytest.raises(ValueError, match=r"layers.0.self_attn \(SelfAttention\) has projections"):
        clip_qk(other)


def test_the_clip_is_kept_and_copies_do_without() -> None:
    attention = SelfAttention()
    model = model_of(attention)
    report(model, [200.0] * HEADS)
    clip_qk(model)
    kept = vars(model)["_keel_qk_clip"].clip
    report(model, [200.0] * HEADS)
    clip_qk(model)
    assert vars(model)["_keel_qk_clip"].clip is kept
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = attention.linear_qkv.weight.clone()
        report(other, [200.0] * HEADS)
        clip_qk(other)
        assert torch.equal(attention.linear_qkv.weight, before)
        assert not torch.equal(other["layers"][0]["self_attn"].linear_qkv.weight, before)


def test_megatrons_group_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def get(with_context_parallel: bool) -> Any:
        asked.append(with_context_parallel)
        return "local"

    state = SimpleNamespace(model_parallel_is_initialized=lambda: True, get_data_parallel_group=get)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)  # type: ignore[arg-type]
    report(model := model_of(SelfAttention()), [1.0] * HEADS)
    clip_qk(model)
    assert asked == [True]
