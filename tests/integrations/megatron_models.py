"""Tiny models of megatron-core on the CPU, which it was not made for."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says at length that Transformer Engine is not there
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import dot_product_attention as local_attention
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    from keel.integrations.megatron import KeelDotProductAttention, with_keel_attention

VOCAB = 64
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,  # neither that of the keys nor a multiple of 8
    "rope_type": "rope",
    "rotary_scaling_factor": 1.0,
}


@contextlib.contextmanager
def megatron_on_cpu(**sizes: int) -> Iterator[None]:
    """Its groups, and none of its assumptions that there is a GPU."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ones, tensor = torch.ones, torch.tensor

    def on_cpu(make: Any) -> Any:
        return lambda *x, device=None, pin_memory=None, **options: make(*x, **options)

    tracker = mock.Mock()
    tracker.fork = contextlib.nullcontext
    patches = [
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(torch, "ones", on_cpu(ones)),
        mock.patch.object(torch, "tensor", on_cpu(tensor)),
        mock.patch.object(torch.Tensor, "cuda", lambda x, *_, **__: x),
        mock.patch.object(multi_latent_attention, "HAVE_TE", False),
        mock.patch.object(megatron_random, "_get_cuda_rng_state", lambda **_: None),
        mock.patch.object(megatron_random, "_set_cuda_rng_state", lambda *_, **__: None),
        mock.patch.object(local_attention.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        parallel_state.initialize_model_parallel(**sizes)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            if alone:
                dist.destroy_process_group()


def config_of(mla: bool = False, **changes: Any) -> TransformerConfig:
    """Four heads of 8 channels, in fp64."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": torch.float64,
        "init_method_std": 0.3,  # logits of several units
        "normalization": "RMSNorm",
    }
    kind = MLATransformerConfig if mla else TransformerConfig
    return kind(**settings | (MLA if mla else {}) | changes)


def model_of(config: TransformerConfig, *, keel: bool = True) -> GPTModel:
    mla = isinstance(config, MLATransformerConfig)
    spec = get_gpt_layer_local_spec(multi_latent_attention=mla, normalization="RMSNorm")
    torch.manual_seed(0)
    return GPTModel(
        config,
        with_keel_attention(spec) if keel else spec,
        vocab_size=VOCAB,
        max_sequence_length=64,
        position_embedding_type="rope",
    ).double()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def losses(model: GPTModel, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """(b, s) of predicting each token by itself; the future must be hidden all the same."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    labels = ids.flip(1) if "labels" not in inputs else inputs.pop("labels")
    loss: torch.Tensor = model(ids, positions, None, labels=labels, **inputs)
    return loss


__all__ = [
    "AttnMaskType",
    "KeelDotProductAttention",
    "PackedSeqParams",
    "config_of",
    "local_attention",
    "losses",
    "megatron_on_cpu",
    "model_of",
    "parallel_state",
    "tokens",
    "with_keel_attention",
]
