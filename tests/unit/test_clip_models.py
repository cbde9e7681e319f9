"""Models by structure: look-alikes of what libraries build, found, clipped, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from keel import masks
from keel.nn import GPT, DotProductAttention, GPTConfig, MLATransformerConfig, TransformerConfig
from keel.optim import (
    QKClip,
    grouped_rows,
    interleaved_rows,
    key_rows,
    mla_key_rows,
    mla_query_rows,
    query_rows,
    stacked_rows,
)
from keel.optim.clip_models import find_layers

HIDDEN, HEADS, KV, DIM = 32, 4, 2, 16


class HuggingFaceAttention(nn.Module):
    """Llama, Mistral, Qwen2: heads in the config, head_dim on the module."""

    def __init__(self, bias: bool = False, norm: Any = None, gain: int = DIM) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=KV)
        self.head_dim = DIM
        self.q_proj = nn.Linear(HIDDEN, HEADS * DIM, bias=bias)
        self.k_proj = nn.Linear(HIDDEN, KV * DIM, bias=bias)
        self.v_proj = nn.Linear(HIDDEN, KV * DIM, bias=bias)
        self.o_proj = nn.Linear(HEADS * DIM, HIDDEN, bias=False)
        if norm is not None:
            self.q_norm, self.k_norm = norm(gain), norm(gain if gain == DIM else KV * DIM)


class DeepseekV3Attention(nn.Module):
    def __init__(self, direct: bool = False) -> None:
        super().__init__()
        self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim = HEADS, 16, 8
        self.qk_head_dim, self.v_head_dim = 24, 12
        if direct:
            self.q_proj = nn.Linear(HIDDEN, HEADS * 24, bias=False)
        else:
            self.q_a_proj = nn.Linear(HIDDEN, 10, bias=False)
            self.q_a_layernorm = nn.RMSNorm(10)
            self.q_b_proj = nn.Linear(10, HEADS * 24, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(HIDDEN, 10 + 8, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(10)
        self.kv_b_proj = nn.Linear(10, HEADS * 28, bias=False)
        self.o_proj = nn.Linear(HEADS * 12, HIDDEN, bias=False)


class Phi3Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=KV)
        self.head_dim = DIM
        self.qkv_proj = nn.Linear(HIDDEN, (HEADS + 2 * KV) * DIM, bias=False)


class GQAttention(nn.Module):
    """torchtitan's: projections are in a module of their own."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, KV, DIM
        self.q_norm = self.k_norm = None
        self.qkv_linear = nn.Module()
        if fused:
            self.qkv_linear.wqkv = nn.Linear(HIDDEN, (HEADS + 2 * KV) * DIM, bias=False)
        else:
            self.qkv_linear.wq = nn.Linear(HIDDEN, HEADS * DIM, bias=False)
            self.qkv_linear.wk = nn.Linear(HIDDEN, KV * DIM, bias=False)
            self.qkv_linear.wv = nn.Linear(HIDDEN, KV * DIM, bias=False)


class GPTNeoXAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS)
        self.head_size = DIM
        self.query_key_value = nn.Linear(HIDDEN, 3 * HEADS * DIM)


class SelfAttention(nn.Module):
    """Megatron's."""

    def __init__(self, gate: bool = False, **options: Any) -> None:
        super().__init__()
        sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
        heads = {"num_query_groups": KV, "kv_channels": DIM}
        config = TransformerConfig(**(sizes | heads | {"qk_clip": True} | options))
        self.core_attention = DotProductAttention(config, 1, "causal")
        self.config = SimpleNamespace(attention_output_gate=gate)
        rows = (HEADS * (2 if gate else 1) + 2 * KV) * DIM
        self.linear_qkv = nn.Linear(HIDDEN, rows)


class MLASelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = MLATransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            qk_head_dim=16,
            qk_pos_emb_head_dim=8,
            v_head_dim=8,
            qk_clip=True,
        )
        self.core_attention = DotProductAttention(self.config, 1, "causal")
        self.linear_q_up_proj = nn.Linear(10, HEADS * 24, bias=False)
        self.q_layernorm = nn.RMSNorm(10)  # of the latent: no qk-norm
        self.linear_kv_up_proj = nn.Linear(10, HEADS * 24, bias=False)


def model_of(*attention: nn.Module) -> nn.Module:
    layers = [nn.ModuleDict({"self_attn": x, "mlp": nn.Linear(HIDDEN, HIDDEN)}) for x in attention]
    return nn.ModuleDict({"embed": nn.Embedding(9, HIDDEN), "layers": nn.ModuleList(layers)})


@pytest.mark.parametrize(
    ("attention", "layouts"),
    [
        (
            HuggingFaceAttention(bias=True),
            {"q_proj": query_rows(HEADS, DIM), "k_proj": key_rows(KV, DIM)},
        ),
        (
            DeepseekV3Attention(),
            {"q_b_proj": mla_query_rows(4, 16, 8), "kv_b_proj": mla_key_rows(4, 16, 12)},
        ),
        (
            DeepseekV3Attention(direct=True),
            {"q_proj": mla_query_rows(4, 16, 8), "kv_b_proj": mla_key_rows(4, 16, 12)},
        ),
        (Phi3Attention(), {"qkv_proj": stacked_rows(HEADS, KV, DIM)}),
        (GQAttention(), {"qkv_linear.wqkv": grouped_rows(HEADS, KV, DIM)}),
        (
            GQAttention(fused=False),
            {"qkv_linear.wq": query_rows(HEADS, DIM), "qkv_linear.wk": key_rows(KV, DIM)},
        ),
        (GPTNeoXAttention(), {"query_key_value": interleaved_rows(HEADS, DIM)}),
        (SelfAttention(), {"linear_qkv": grouped_rows(HEADS, KV, DIM)}),
        (SelfAttention(gate=True), {"linear_qkv": grouped_rows(HEADS, KV, DIM, gate=True)}),
        (
            MLASelfAttention(),
            {
                "linear_q_up_proj": mla_query_rows(4, 16, 8),
                "linear_kv_up_proj": mla_key_rows(4, 16, 8),
            },
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_known_attention(attention: nn.Module, layouts: dict[str, Any]) -> None:
    one, two = find_layers(model_of(attention, attention.__class__()))
    assert (one.name, two.name) == ("layers.0.self_attn", "layers.1.self_attn")
    assert {part.name.removeprefix(f"{one.name}."): part.layout for part in one.rows} == layouts
    for part in one.rows:
        assert part.of is attention.get_submodule(part.name.removeprefix(f"{one.name}."))
    assert one.source is getattr(attention, "core_attention", None)


def test_a_model_that_is_one_attention() -> None:
    """What is inside of it is not looked at, though its core attention reports logits, too."""
    attention = SelfAttention()
    (only,) = find_layers(attention)
    assert only.name == "the model" and only.source is attention.core_attention


def test_our_own_gpt_reports_itself() -> None:
    model = GPT(GPTConfig(vocab_size=9, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2))
    layers = find_layers(model)
    assert [x.name for x in layers] == ["layers.0.attention", "layers.1.attention"]
    assert [x.source for x in layers] == [layer.attention for layer in model.layers]
    assert (layers[0].num_heads, layers[0].num_kv_heads) == (4, 2)


@pytest.mark.parametrize("attention", [HuggingFaceAttention, DeepseekV3Attention])
def test_foreign_attention_is_clipped_by_what_is_observed(attention: Any) -> None:
    model = model_of(attention())
    clip = QKClip.from_model(model, tau=1.0)
    spec = clip.layers[0]
    first = spec.rows[0].of
    assert isinstance(first, nn.Linear)
    old, rows = first.weight.detach().clone(), spec.rows[0].layout[0].rows
    clip.observe("layers.0.self_attn", torch.tensor([4.0, 0.5, 1.0, 0.1]))
    clip.step()
    factor = 0.5 if attention is DeepseekV3Attention else 0.25
    assert torch.equal(first.weight[:rows], old[:rows] * factor)
    if attention is DeepseekV3Attention:  # rotated queries take the whole clip
        assert torch.equal(first.weight[16:24], old[16:24] * 0.25)
    assert torch.equal(first.weight[24:], old[24:]) or attention is HuggingFaceAttention


def test_users_of_our_core_attention_that_are_not_known_are_refused() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = SelfAttention().core_attention
            self.project = nn.Linear(HIDDEN, HIDDEN)

    with pytest.raises(ValueError, match=r"layers.0.self_attn.inside \(DotProductAttention\)"):
        find_layers(model_of(Mixer()))


class GPT2Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(HIDDEN, 3 * HIDDEN)


def test_unknown_attention_is_refused_or_left_out() -> None:
    model = model_of(GPT2Attention(), HuggingFaceAttention())
    with pytest.raises(ValueError, match=r"layers.0.self_attn \(GPT2Attention\) .* \(c_attn\)"):
        find_layers(model)
    (only,) = find_layers(model, skip=["layers.0"])
    assert only.name == "layers.1.self_attn"
    with pytest.raises(ValueError, match="no attention that learns was found in Linear"):
        find_layers(nn.Linear(3, 3))
    with pytest.raises(TypeError, match="sequence of names"):
        find_layers(model, skip="layers.0")

    class BertAttention(nn.Module):  # only wraps another one
        def __init__(self) -> None:
            super().__init__()
            self.self, self.output = GPT2Attention(), nn.Linear(HIDDEN, HIDDEN)

    with pytest.raises(ValueError, match=r"layers.0.self_attn.self \(GPT2Attention\)"):
        find_layers(model_of(BertAttention()))


def test_skipping_one_layer_keeps_those_whose_names_begin_alike() -> None:
    model = model_of(*(HuggingFaceAttention() for _ in range(12)))
    names = [x.name for x in find_layers(model, skip=["layers.1"])]
    assert len(names) == 11 and "layers.10.self_attn" in names


def test_frozen_attention_is_left_out() -> None:
    model = model_of(HuggingFaceAttention(bias=True), HuggingFaceAttention())
    frozen = model["layers"][0]["self_attn"]  # type: ignore[index]
    frozen.requires_grad_(False)
    assert [x.name for x in find_layers(model)] == ["layers.1.self_attn"]
    frozen.q_proj.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.bias, .* is frozen, but not"):
        find_layers(model)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no attention that learns"):
        find_layers(model)


def test_a_fused_projection_of_unknown_order_is_refused() -> None:
    class FalconAttention(GPTNeoXAttention):
        pass

    with pytest.raises(ValueError, match=r"layers.0.self_attn.query_key_value .*per head or per"):
        find_layers(model_of(FalconAttention()))


def test_shapes_that_match_no_layout_are_named() -> None:
    wrong = HuggingFaceAttention()
    wrong.k_proj = nn.Linear(HIDDEN, 3 * DIM)
    with pytest.raises(
        ValueError, match=r"layers.0.self_attn.k_proj.weight .* has shape \(48, 32\)"
    ):
        find_layers(model_of(wrong))
    wrong = HuggingFaceAttention()
    wrong.config.num_key_value_heads = 3
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3 key heads"):
        find_layers(model_of(wrong))
    silent = HuggingFaceAttention()
    del silent.config.num_attention_heads
    with pytest.raises(ValueError, match=r"layers.0.self_attn does not say its num_heads"):
        find_layers(model_of(silent))


def test_adapters_are_refused() -> None:
    adapted = HuggingFaceAttention()
    adapted.q_proj.lora_A = nn.Linear(HIDDEN, 2)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj is adapted"):
        find_layers(model_of(adapted))


class OnePlusRMSNorm(nn.Module):
    """Gemma's: the gain is 1 + weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:]) * (1 + self.weight)


def test_qk_norm_is_refused_or_its_gains_are_clipped() -> None:
    attention = HuggingFaceAttention(norm=nn.RMSNorm)
    model = model_of(attention)
    with pytest.raises(ValueError, match=r"layers.0.self_attn normalises .* \(q_norm, k_norm\)"):
        QKClip.from_model(model)
    clip = QKClip.from_model(model, qk_norm="gains", tau=1.0, alpha=0.25)
    kept = attention.q_proj.weight.detach().clone()
    torch.manual_seed(0)
    x = torch.randn(10, HIDDEN)

    def tops() -> torch.Tensor:
        q = attention.q_norm(attention.q_proj(x).view(10, HEADS, DIM))
        k = attention.k_norm(attention.k_proj(x).view(10, KV, DIM)).repeat_interleave(2, 1)
        return torch.einsum("ihd,jhd->hij", q, k).amax((1, 2)).detach()

    before = tops()
    clip.observe("layers.0.self_attn", before)
    clip.step()
    torch.testing.assert_close(tops(), before / before.max())  # a gain is shared by all heads
    assert torch.equal(attention.q_proj.weight, kept)
    torch.testing.assert_close(attention.q_norm.weight[0], before.max() ** -0.25)
    with pytest.raises(ValueError, match="qk_norm must be"):
        QKClip.from_model(model, qk_norm="ignore")  # type: ignore[arg-type]


def test_a_gain_for_each_head_is_clipped_by_head() -> None:
    attention = HuggingFaceAttention(norm=nn.RMSNorm, gain=HEADS * DIM)  # as in OLMo 2
    clip = QKClip.from_model(model_of(attention), qk_norm="gains", tau=1.0)
    clip.observe("layers.0.self_attn", torch.tensor([2.0, 1.0, 4.0, 0.5]))
    clip.step()
    assert attention.q_norm.weight[::DIM].tolist() == [0.5, 1.0, 0.25, 1.0]
    assert (attention.k_norm.weight == 1).all()


def test_gains_that_are_no_factors_are_refused() -> None:
    model = model_of(HuggingFaceAttention(norm=OnePlusRMSNorm))
    with pytest.raises(ValueError, match=r"q_norm \(OnePlusRMSNorm\): doubling its gain does not"):
        QKClip.from_model(model, qk_norm="gains")
    bare = model_of(HuggingFaceAttention(norm=lambda n: nn.RMSNorm(n, elementwise_affine=False)))
    with pytest.raises(ValueError, match=r"q_norm \(RMSNorm\) has no gain"):
        QKClip.from_model(bare, qk_norm="gains")
    flagged = HuggingFaceAttention()
    flagged.config.use_qk_norm = True
    with pytest.raises(ValueError, match=r"normalises queries and keys \(use_qk_norm\)"):
        QKClip.from_model(model_of(flagged))
    with pytest.raises(ValueError, match="there is nothing to scale"):
        QKClip.from_model(model_of(flagged), qk_norm="gains")


def test_core_attention_in_a_whole_layer() -> None:
    """Our DotProductAttention behind Megatron's fused projection: recomputed logits are tau."""
    torch.manual_seed(0)
    attention = SelfAttention()
    x = torch.randn(12, 2, HIDDEN)

    def run() -> torch.Tensor:
        grouped = attention.linear_qkv(x).view(12, 2, KV, HEADS // KV + 2, DIM)
        q, k, v = grouped[..., :2, :].flatten(2, 3), grouped[..., 2, :], grouped[..., 3, :]
        attention.core_attention(q, k, v)
        top = attention.core_attention.current_max_attn_logits
        assert top is not None
        return top.clone()

    clip = QKClip.from_model(model_of(attention), tau=0.1)
    before = run()
    assert (before > 0.1).all()
    clip.step()
    torch.testing.assert_close(run(), torch.full((HEADS,), 0.1))


def test_core_attention_without_qk_clip_says_so() -> None:
    attention = SelfAttention(qk_clip=False)
    clip = QKClip.from_model(model_of(attention))
    with pytest.raises(
        ValueError, match=r"layers.0.self_attn never .* its config has qk_clip=False"
    ):
        clip.step()


def test_a_model_in_training_with_masks() -> None:
    """End to end: logits stay at tau though the weights are pushed up at each step."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=16, num_layers=2, hidden_size=32, num_heads=4))
    clip = QKClip.from_model(model, tau=2.0)
    ids = torch.randint(16, (20,))
    for _ in range(12):
        model(ids, masks.causal(20))
        clip.step()
        with torch.no_grad():
            for layer in model.layers:
                layer.attention.q_proj.weight *= 1.5
    model(ids, masks.causal(20))
    for layer in model.layers:
        top = layer.attention.current_max_attn_logits
        assert (top <= 2.0 * 1.5 * 1.01).all() and top.max() > 2.0
