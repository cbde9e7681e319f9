"""TransformerConfig: what None stands for, which layers have a window, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from keel.nn import MLATransformerConfig, TransformerConfig

SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8}


def test_what_none_stands_for() -> None:
    config = TransformerConfig(**SIZES)
    assert (config.num_query_groups, config.kv_channels) == (8, 8)
    assert (config.qk_channels, config.v_channels) == (8, 8)
    assert config.softmax_scale is None  # attention knows the channels of its keys
    given = TransformerConfig(**SIZES, num_query_groups=2, kv_channels=24)
    assert (given.num_query_groups, given.kv_channels, given.v_channels) == (2, 24, 24)


def test_defaults() -> None:
    config = TransformerConfig(**SIZES)
    assert config.attention_dropout == 0.0
    assert config.softmax_type == "vanilla"
    assert config.masked_softmax_fusion and config.attention_softmax_in_fp32
    assert not config.apply_query_key_layer_scaling and not config.qk_clip
    assert (config.qk_clip_alpha, config.qk_clip_threshold) == (0.5, 100.0)
    assert config.params_dtype == torch.float32
    assert config.context_parallel_size == 1


def test_layer_scaling_demands_a_softmax_in_fp32() -> None:
    config = TransformerConfig(
        **SIZES, attention_softmax_in_fp32=False, apply_query_key_layer_scaling=True
    )
    assert config.attention_softmax_in_fp32
    assert not TransformerConfig(**SIZES, attention_softmax_in_fp32=False).attention_softmax_in_fp32


def test_a_config_cannot_be_bent_later() -> None:
    freq = [1, 0, 1, 0]
    config = TransformerConfig(**SIZES, window_size=[3, 0], window_attn_skip_freq=freq)  # type: ignore[arg-type]
    assert config.window_size == (3, 0)
    freq[1] = 1
    assert not config.is_layer_window_attention(2)
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.qk_clip = True  # type: ignore[misc]
    assert dataclasses.replace(config, qk_clip=True).qk_clip
    with pytest.raises(ValueError, match="attention_dropout"):
        dataclasses.replace(config, attention_dropout=2.0)


@pytest.mark.parametrize(
    ("freq", "expected"),
    [
        (None, [True, True, True, True]),
        (1, [False, False, False, False]),
        (2, [True, False, True, False]),
        (3, [True, True, False, True]),
        ([1, 0, 0, 1], [True, False, False, True]),
        ((False, True, False, False), [False, True, False, False]),
    ],
)
def test_layers_with_a_window(freq: Any, expected: list[bool]) -> None:
    config = TransformerConfig(**SIZES, window_size=(5, 0), window_attn_skip_freq=freq)
    assert [config.is_layer_window_attention(n) for n in (1, 2, 3, 4)] == expected


def test_without_window_no_layer_has_one() -> None:
    assert not TransformerConfig(**SIZES).is_layer_window_attention(1)


def test_layers_beyond_the_list() -> None:
    config = TransformerConfig(**SIZES, window_size=(5, 0), window_attn_skip_freq=[1, 1, 0, 0])
    with pytest.raises(ValueError, match="layer_number 5 is beyond the 4 layers"):
        config.is_layer_window_attention(5)


@pytest.mark.parametrize("number", [0, -1, 1.0, True, None])
def test_layers_are_counted_from_one(number: Any) -> None:
    with pytest.raises(ValueError, match="counted from 1; got"):
        TransformerConfig(**SIZES).is_layer_window_attention(number)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive int, got 0"),
        ({"hidden_size": -8}, "hidden_size must be a positive int, got -8"),
        ({"hidden_size": 64.0}, "hidden_size must be a positive int, got 64.0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive int, got 0"),
        ({"num_attention_heads": True}, "num_attention_heads must be a positive int, got True"),
        ({"context_parallel_size": 0}, "context_parallel_size must be a positive int, got 0"),
        ({"num_query_groups": 0}, "num_query_groups must be a positive int or None for one per"),
        (
            {"num_query_groups": 3},
            "num_attention_heads=8 must be a multiple of num_query_groups=3",
        ),
        ({"num_query_groups": 16}, "num_attention_heads=8 must be a multiple of"),
        ({"kv_channels": 0}, "kv_channels must be a positive int or None for"),
        ({"hidden_size": 60}, "hidden_size=60 is not a multiple of num_attention_heads=8: set"),
        (
            {"attention_dropout": 1.0},
            r"attention_dropout must be a probability in \[0, 1\), got 1",
        ),
        ({"attention_dropout": -0.1}, "attention_dropout must be a probability"),
        ({"attention_dropout": float("nan")}, "attention_dropout must be a probability"),
        ({"attention_dropout": "0.1"}, "attention_dropout must be a probability .* got '0.1'"),
        ({"softmax_scale": float("inf")}, "softmax_scale must be a finite number, .* got inf"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be a finite number"),
        ({"softmax_scale": "1"}, "softmax_scale must be a finite number"),
        ({"softmax_type": "offbyone"}, "must be one of 'vanilla', 'off-by-one', 'learnable', got"),
        ({"masked_softmax_fusion": None}, "masked_softmax_fusion must be True or False, got None"),
        ({"qk_clip": 1}, "qk_clip must be True or False, got 1"),
        ({"qk_clip_threshold": 0.0}, "qk_clip_threshold must be a positive, finite logit, got 0"),
        ({"qk_clip_threshold": -5}, "qk_clip_threshold must be a positive"),
        ({"qk_clip_threshold": float("inf")}, "qk_clip_threshold must be a positive"),
        ({"qk_clip_threshold": float("nan")}, "qk_clip_threshold must be a positive"),
        ({"qk_clip_alpha": 1.5}, r"qk_clip_alpha must be in \[0, 1\], got 1.5"),
        ({"qk_clip_alpha": -0.5}, r"qk_clip_alpha must be in \[0, 1\], got -0.5"),
        ({"qk_clip_alpha": None}, r"qk_clip_alpha must be in \[0, 1\], got None"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16 are both set"),
        ({"params_dtype": torch.int8}, "params_dtype must be a floating point torch.dtype, got"),
        (
            {"params_dtype": "bf16"},
            "params_dtype must be a floating point torch.dtype, got 'bf16'",
        ),
        ({"window_size": 5}, r"window_size must be \(left, right\), .* got 5; None for no window"),
        ({"window_size": (5,)}, r"window_size must be \(left, right\)"),
        ({"window_size": (5, -2)}, r"window_size must be .* got \(5, -2\)"),
        ({"window_size": (5, None)}, r"window_size must be .* got \(5, None\)"),
        ({"window_size": (5.0, 0)}, r"window_size must be \(left, right\)"),
        ({"window_attn_skip_freq": 2}, "window_attn_skip_freq=2 .* but window_size is None"),
        ({"window_size": (5, 0), "window_attn_skip_freq": 0}, "must be at least 1, got 0"),
        (
            {"window_size": (5, 0), "window_attn_skip_freq": "2"},
            "None, an int, or a list of 0 and 1",
        ),
        (
            {"window_size": (5, 0), "window_attn_skip_freq": True},
            "None, an int, or a list of 0 and",
        ),
        ({"window_size": (5, 0), "window_attn_skip_freq": [1, 2, 0, 0]}, "a list of 0 and 1"),
        (
            {"window_size": (5, 0), "window_attn_skip_freq": [1, 0]},
            "lists 2 layers, but num_layers=4",
        ),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**SIZES, **fields})


def test_fields_are_keywords() -> None:
    with pytest.raises(TypeError):
        TransformerConfig(4, 64, 8)  # type: ignore[misc]


@pytest.mark.parametrize("window", [(0, 0), (-1, 0), (5, -1), (-1, -1)])
def test_windows_that_are_fine(window: tuple[int, int]) -> None:
    assert TransformerConfig(**SIZES, window_size=window).window_size == window


def test_mla_channels() -> None:
    config = MLATransformerConfig(**SIZES, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=32)
    assert (config.qk_channels, config.v_channels, config.kv_channels) == (24, 32, 24)
    assert (config.q_lora_rank, config.kv_lora_rank) == (512, 512)
    odd = MLATransformerConfig(num_layers=1, hidden_size=60, num_attention_heads=8)
    assert (odd.qk_channels, odd.v_channels) == (192, 128)
    assert MLATransformerConfig(**SIZES, kv_channels=128).qk_channels == 192
    assert MLATransformerConfig(**SIZES, q_lora_rank=None).q_lora_rank is None
    assert MLATransformerConfig(**SIZES, qk_pos_emb_head_dim=0).qk_channels == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"q_lora_rank": 0}, "q_lora_rank must be a positive int or None for a direct projection"),
        ({"kv_lora_rank": None}, "kv_lora_rank must be a positive int, got None"),
        ({"qk_head_dim": 0}, "qk_head_dim must be a positive int, got 0"),
        ({"qk_pos_emb_head_dim": -8}, "qk_pos_emb_head_dim must be an int of at least 0, got -8"),
        ({"v_head_dim": 1.5}, "v_head_dim must be a positive int, got 1.5"),
        ({"num_query_groups": 4}, "num_query_groups=4 but num_attention_heads=8: in multi-latent"),
        ({"attention_dropout": 1.0}, "attention_dropout must be a probability"),
    ],
)
def test_refused_by_mla(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MLATransformerConfig(**{**SIZES, **fields})
