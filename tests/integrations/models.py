"""Tiny models of transformers, and their losses and gradients on one kind of attention."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import keel.integrations.transformers
from keel.testing import compare

keel.integrations.transformers.register()
transformers.logging.set_verbosity_error()

VOCAB = 64
WINDOW = 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # logits of several units, so that every part of attention counts
}
HEADS = SIZES | {"head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA = HEADS | {"sliding_window": WINDOW, "query_pre_attn_scalar": 20}
MLA = SIZES | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,  # neither that of the keys nor a multiple of 8
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", HEADS | {"sliding_window": WINDOW}),
    "qwen3": ("Qwen3", HEADS),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss": ("GptOss", HEADS | EXPERTS | {"sliding_window": WINDOW}),
    "deepseek_v2": ("DeepseekV2", MLA | {"head_dim": 8}),
    "deepseek_v3": ("DeepseekV3", MLA),
    "llama4": (
        "Llama4Text",
        HEADS | EXPERTS | {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 48},
    ),
}


DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3": {},
    "gpt_oss": {"num_local_experts": 1, "num_experts_per_tok": 1},
    "deepseek_v2": {"first_k_dense_replace": 2},
    "deepseek_v3": {"first_k_dense_replace": 2},
}
"""Without a choice of experts: a rounding error may turn it over."""


def tiny(name: str, attention: str = "keel", **changes: Any) -> Any:
    """A model with random weights, the same for each kind of attention."""
    kind, sizes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(sizes | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter, x in model.named_parameters():
        if parameter.endswith("sinks"):
            torch.nn.init.normal_(x)
    model.set_attn_implementation(attention)
    return model.train()


def pair(name: str, **changes: Any) -> tuple[Any, Any]:
    """(eager, keel) with the same weights."""
    eager = tiny(name, "eager", **changes)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("keel")
    return eager, ours


def tokens(batch: int = 2, length: int = 20, seed: int = 1) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, length), generator=random)


def results(model: Any, ids: torch.Tensor, **inputs: Any) -> dict[str, torch.Tensor]:
    """Loss, logits where labels are wanted, and the gradients of all parameters."""
    model.zero_grad()
    labels = inputs.pop("labels", ids).to(model.device)
    ids = ids.to(model.device)
    output = model(input_ids=ids, labels=labels, **inputs)
    output.loss.backward()
    found = {"loss": output.loss.detach(), "logits": output.logits.detach()[labels != -100]}
    return found | {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}


def assert_close(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float = 1e-5
) -> None:
    """Each tensor within a share of its largest number."""
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        error, largest = float((got[name] - x).abs().max()), float(x.abs().max())
        assert error <= relative * max(largest, 1e-3), f"{name}: {error:.2e} of {largest:.2e}"


def results_of_batches(model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    """Of three batches: one alone has too few errors to judge by their largest."""
    parts = [results(model, tokens(seed=seed), **inputs) for seed in (1, 2, 3)]
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def assert_rounded_as(
    got: dict[str, torch.Tensor], low: dict[str, torch.Tensor], wide: dict[str, torch.Tensor]
) -> None:
    """The tolerance rule: errors against wide arithmetic are those of eager attention."""
    rows = [compare(n, got[n], low[n], x.double(), torch.bfloat16) for n, x in wide.items()]
    assert not [str(row) for row in rows if not row.ok]


def dense(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention that makes all logits, and notes the largest attended one of each head."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    logits = query @ key.mT * scaling
    if module.training:
        top = logits.detach().where(attention_mask == 0, -torch.inf).amax((0, 2, 3)).float()
        known = getattr(module, "current_max_attn_logits", None)
        module.current_max_attn_logits = top if known is None else torch.maximum(known, top)
    probs = (logits + attention_mask).softmax(-1, torch.float32).to(value.dtype)
    return (probs @ value).transpose(1, 2), None


AttentionInterface.register("dense", dense)
AttentionMaskInterface.register("dense", eager_mask)
