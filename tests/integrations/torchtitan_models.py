"""Tiny models of torchtitan, and their results."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common import attention as titan

DIM, VOCAB = 32, 64
BOUNDS = [0, 5, 6, 13, 24]
"""Documents of a sample."""


def llama(backend: str, *, keel: bool = True, fused: bool = True, seed: int = 0) -> Any:
    """4 heads on 2; backend sdpa: torchtitan's, causal, which knows of no documents."""
    rope = ComplexRoPE.Config(dim=8, max_seq_len=64, theta=1e4)
    layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=DIM,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=48,
        rope=rope,
        fuse_qkv=fused,
        attn_backend="flex" if backend == "sdpa" else backend,
    )
    config = llama3.Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM),
        norm=RMSNorm.Config(normalized_shape=DIM),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB),
        layers=layers,
    )
    if backend == "sdpa":
        for layer in config.layers:
            layer.attention.inner_attention = titan.ScaledDotProductAttention.Config()
    elif keel:
        override(config, backend)
    model = config.build()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in model.parameters():
            x.normal_(std=0.3, generator=random)
    return model


def override(config: Any, backend: str) -> None:
    """As --override.imports does it."""
    path = f"keel.integrations.torchtitan.keel_{backend}"
    assert len(apply_overrides(OverrideConfig(imports=[path]), config)) == 2


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L) tokens and positions: the second sample is one document."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (2, BOUNDS[-1]), generator=random)
    packed = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(BOUNDS)])
    return ids, torch.stack([packed, torch.arange(BOUNDS[-1])])


def run(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(ids, positions, model.get_attention_masks(positions))
    return found


def maxima(model: Any) -> list[torch.Tensor]:
    layers = model.layers.values()
    return [x.attention.inner_attention.current_max_attn_logits.clone() for x in layers]
