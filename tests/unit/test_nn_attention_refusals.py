"""DotProductAttention refuses what it cannot do, and says what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.nn_cases import (
    INF,
    PATHS,
    make,
    make_config,
    make_module,
    normal,
    pack,
    ranks,
)

from keel.nn import DotProductAttention


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"context_parallel_size": 2}, {}, "context parallelism over 2 ranks is not supported yet"),
        ({}, {"pg_collection": ranks(cp=4)}, "context parallelism over 4 ranks is not supported"),
        ({}, {"pg_collection": ranks(tp=3)}, "4 query heads and 4 query groups cannot be shared"),
        (
            {"num_query_groups": 1},
            {"pg_collection": ranks(tp=2)},
            "4 query heads and 1 query group",
        ),
        ({}, {"attn_mask_type": "triangular"}, "unknown attn_mask_type 'triangular': expected one"),
        ({}, {"attn_mask_type": None}, "unknown attn_mask_type None"),
        ({}, {"attention_type": "both"}, "attention_type must be 'self' or 'cross', got 'both'"),
        ({}, {"attention_dropout": 1.0}, "attention_dropout must be a probability"),
        ({}, {"softmax_scale": INF}, "softmax_scale must be a finite number"),
        ({}, {"k_channels": 0}, "k_channels must be a positive int, got 0"),
        ({}, {"v_channels": 1.5}, "v_channels must be a positive int, got 1.5"),
        ({}, {"layer_number": 0}, "layer_number must be an int, counted from 1; got 0"),
    ],
)
def test_refused_by_the_constructor(config: Any, arguments: Any, message: str) -> None:
    defaults = {"layer_number": 1, "attn_mask_type": "causal"}
    with pytest.raises(ValueError, match=message):
        DotProductAttention(make_config(**config), **(defaults | arguments))


SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "three dims": (
        {"query": normal(7, 4, 8)},
        r"query must be \[s, b, 4, 8\] by config and constructor, got \(7, 4, 8\)",
    ),
    "query heads": ({"query": normal(7, 2, 6, 8)}, r"query must be \[s, b, 4, 8\]"),
    "key heads": ({"key": normal(7, 2, 4, 8)}, r"key must be \[s, b, 2, 8\] .* got \(7, 2, 4, 8\)"),
    "channels": ({"query": normal(7, 2, 4, 16)}, r"query must be \[s, b, 4, 8\]"),
    "value channels": ({"value": normal(7, 2, 2, 16)}, r"value must be \[s, b, 2, 8\]"),
    "batch": ({"query": normal(7, 3, 4, 8)}, "query, key and value must agree in batch"),
    "tokens": ({"value": normal(5, 2, 2, 8)}, "key and value in tokens"),
    "dtype": ({"value": normal(7, 2, 2, 8).float()}, "must have one dtype, got torch.float64"),
    "mask shape": (
        {"attention_mask": torch.zeros(3, 1, 7, 7, dtype=torch.bool)},
        "cannot be broadcast",
    ),
    "mask dtype": ({"attention_mask": torch.zeros(7, 7, dtype=torch.int64)}, "mask must be bool"),
    "mask with gradient": (
        {"attention_mask": torch.zeros(7, 7, requires_grad=True)},
        "mask requires grad",
    ),
    "bias shape": (
        {"attention_bias": normal(3, 1, 7, 7)},
        r"attention_bias must be broadcastable to \(b, np, sq, sk\) = \(2, 4, 7, 7\) on cpu, got",
    ),
    "bias dims": (
        {"attention_bias": normal(1, 1, 1, 7, 7)},
        "attention_bias must be broadcastable",
    ),
    "bias dtype": (
        {"attention_bias": torch.zeros(7, 7, dtype=torch.bool)},
        "attention_bias must be a floating point tensor, got torch.bool; what hides goes into",
    ),
    "bias type": ({"attention_bias": 1.0}, "must be a floating point tensor, got float"),
    "mask type": ({"attn_mask_type": "diagonal"}, "unknown attn_mask_type 'diagonal'"),
    "arbitrary without mask": ({"attn_mask_type": "arbitrary"}, "and there is none: pass one, or"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", SHAPES)
def test_refused_by_the_call(name: str, path: str) -> None:
    changes, message = SHAPES[name]
    module = make_module(path, make_config(num_query_groups=2), 1, "causal")
    with pytest.raises(ValueError, match=message):
        module(**(make(groups=2) | changes))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["causal", "padding_causal"])
def test_causal_wants_a_square(path: str, kind: str) -> None:
    """ValueError and AssertionError alike; see "one query" and windows above for what passes."""
    module = make_module(path, make_config(), 1, kind)
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match=rf"{kind} needs sq == sk, got \(5, 9\); causal_bottom_"):
            module(**make(5, 9))


PACKED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dropout": ({"attention_dropout": 0.1}, {}, "attention_dropout=0.1 in training cannot go"),
    "probabilities": ({"need_probs": True}, {}, "need_probs=True cannot go together"),
    "mask": (
        {},
        {"attention_mask": torch.zeros(9, 9, dtype=torch.bool)},
        "packed_seq_params and an attention_mask cannot go together",
    ),
    "bias": ({}, {"attention_bias": normal(9, 9)}, "an attention_bias cannot go together"),
    "arbitrary": ({}, {"attn_mask_type": "arbitrary"}, "arbitrary leaves it to the attention_mask"),
    "batch": ({}, make(9), "packed documents are a batch of 1, got query of shape"),
    "mixed dims": ({}, {"query": normal(9, 4, 8)}, "query, key and value must agree in batch"),
    "dims": (
        {},
        {"query": normal(9, 32)},
        r"query must be \[t, 1, 4, 8\] or \[t, 4, 8\] by config",
    ),
    "no bounds": (
        {},
        {"packed_seq_params": SimpleNamespace(cu_seqlens_q=torch.tensor([0, 9]))},
        "packed_seq_params.cu_seqlens_kv must be an .* int tensor of document bounds, got None",
    ),
    "layout": (
        {},
        {"packed_seq_params": SimpleNamespace(**(vars(pack([9], [9])) | {"qkv_format": "sbhd"}))},
        "qkv_format must be 'thd' or None, got 'sbhd'",
    ),
    "padding": (
        {},
        {
            "packed_seq_params": SimpleNamespace(
                **vars(pack([3, 4], [3, 4])), cu_seqlens_kv_padded=torch.tensor([0, 4, 9])
            )
        },
        "padding between documents is not supported",
    ),
    "numbers of documents": (
        {},
        {"packed_seq_params": pack([3, 6], [9])},
        "must bound the same number of documents, got 2 and 1",
    ),
    "too many tokens": ({}, {"packed_seq_params": pack([10], [10])}, "less than the 10 tokens"),
    "not a square": (
        {},
        {"packed_seq_params": pack([3, 6], [4, 5])},
        r"padding_causal needs sq == sk, got \(3, 4\); causal_bottom_right",
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_refused_with_packed_documents(name: str) -> None:
    arguments, call, message = PACKED[name]
    module = DotProductAttention(make_config(), 1, "padding_causal", **arguments)
    defaults = make(9, batch=(1,)) | {"packed_seq_params": pack([3, 6], [3, 6])}
    with pytest.raises(ValueError, match=message):
        module(**(defaults | call))
