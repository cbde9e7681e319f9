"""`attn_implementation="keel"` for the models of Hugging Face transformers.

b samples of sq queries and sk keys, hq query heads on hk key heads.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from keel.attention import flex_flash_attn_func
from keel.masks import AttnMask
from keel.nn.max_logits import running_maximum

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"keel.integrations.transformers needs {missing.name}: "
        "pip install 'keel-attn[transformers]'",
        name=missing.name,
    ) from missing

from keel.integrations.transformers_masks import (
    ModelMask,
    Term,
    documents_of_bounds,
    documents_of_positions,
    make_mask,
    readers,
)

NAME = "keel"

HARMLESS = frozenset(
    {
        *("position_embeddings", "cache_position", "use_cache", "max_length_q", "max_length_k"),
        *("num_items_in_batch", "return_dict", "output_hidden_states", "output_router_logits"),
    }
)
"""What models hand down to their attention that does not change its result."""


def register(*, ignore: Collection[str] = ()) -> None:
    """Makes `attn_implementation="keel"` known to transformers.

    Attention then runs on Keel: causal, windowed, chunked, packed and padded masks as slices that
    are made once for each forward; grouped heads without copies; softcaps, sinks, scales, values
    of another dim than keys. In training mode each attention module keeps its max logits, so
    `QKClip.from_model` and `MuonClip` work. What cannot be honoured raises a ValueError: dropout,
    4-D masks, `output_attentions`, and arguments that are not known.

    Args:
        ignore: names of further arguments that models or callers pass down to attention, and that
            do not change its result.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> register()
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...     num_attention_heads=4, num_key_value_heads=2, attn_implementation="keel")
    >>> model = LlamaForCausalLM(config)
    >>> ids = torch.arange(12)[None]
    >>> model(input_ids=ids, labels=ids).loss.backward()
    >>> model.model.layers[0].self_attn.current_max_attn_logits.shape
    torch.Size([4])
    """
    if isinstance(ignore, str):
        raise TypeError(f"ignore takes a collection of names, got the string {ignore!r}")
    readers()  # raises now if this version of transformers says masks in another way
    attend = functools.partial(attention, harmless=HARMLESS.union(ignore))
    # Masks are read and made on the host, which torch.compile leaves to Python.
    AttentionInterface.register(NAME, torch.compiler.disable(attend))
    AttentionMaskInterface.register(NAME, torch.compiler.disable(make_mask))


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: ModelMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    deterministic: bool | None = None,
    *,
    harmless: frozenset[str] = HARMLESS,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface of transformers.

    query (b, hq, sq, d), key (b, hk, sk, d), value (b, hk, sk, dv) -> (b, sq, hq, dv).
    """
    _refuse(module, dropout, others, harmless)
    batch, heads, sq, dim = query.shape
    if attention_mask is None:
        attention_mask = _mask_of_module(module, query, key, is_causal, sliding_window)
    mask = _checked(attention_mask, query, key, sliding_window)
    attended = _within_documents(mask, position_ids, cu_seq_lens_q, cu_seq_lens_k, seq_idx)
    out, _ = flex_flash_attn_func(
        _tokens(query),
        _tokens(key),
        _tokens(value),
        attended,
        softmax_scale=dim**-0.5 if scaling is None else scaling,
        softcap=softcap or 0.0,
        sink=s_aux,
        max_logits_out=running_maximum(module, heads, _cast(query)),
        deterministic=bool(deterministic),
    )
    return out[..., : value.shape[3]].unflatten(0, (batch, sq)), None


def _refuse(
    module: torch.nn.Module, dropout: float, others: Mapping[str, Any], harmless: frozenset[str]
) -> None:
    """Raises for all that would be dropped."""
    if dropout:
        raise ValueError(
            f"attention dropout of {dropout} in {type(module).__name__} is not supported: set "
            "attention_dropout=0.0 in the model's config"
        )
    config = getattr(module, "config", None)
    if others.get("output_attentions") or getattr(config, "output_attentions", False):
        raise ValueError(
            "output_attentions: the probabilities are never made; to look at them, set "
            "attn_implementation='eager'"
        )
    unknown = {
        name: x
        for name, x in others.items()
        if name not in harmless and x is not None and x is not False
    }
    if unknown:
        got = ", ".join(f"{name} ({type(x).__name__})" for name, x in unknown.items())
        raise ValueError(
            f"{type(module).__name__} got {got}, which attn_implementation='keel' does not know: "
            "leave it out, take another attn_implementation, or, if it does not change the result "
            "of attention, name it in register(ignore=...)"
        )


def _mask_of_module(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    is_causal: bool | None,
    sliding_window: int | None,
) -> ModelMask:
    """For models that make no mask because all that they need is said by their modules."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        raise ValueError(
            f"{type(module).__name__} has no mask and does not say whether it is causal: pass "
            "is_causal"
        )
    (batch, _, sq, _), sk = query.shape, key.shape[2]
    if is_causal and sq != sk:
        raise ValueError(
            f"{type(module).__name__} is causal with {sq} queries on {sk} keys and without a mask, "
            "so nothing says where the queries stand: let the model make a mask"
        )
    if sliding_window is None:
        term = Term(hi=0) if is_causal else Term()
    elif is_causal:
        term = Term(lo=1 - sliding_window, hi=0)
    else:
        term = Term(lo=-sliding_window, hi=sliding_window)
    return ModelMask([term], batch, (0, sq), (0, sk))


def _checked(
    mask: Any, query: torch.Tensor, key: torch.Tensor, sliding_window: int | None
) -> ModelMask:
    if not isinstance(mask, ModelMask):
        shape = f" of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else ""
        raise ValueError(
            f"attention_mask is a {type(mask).__name__}{shape}: attn_implementation='keel' makes "
            "masks from (b, tokens) padding, position_ids and the model's config, and takes no "
            "others; for a mask of your own take attn_implementation='eager'"
        )
    got = (query.shape[0], 1, query.shape[2], key.shape[2])
    if mask.shape != got:
        raise ValueError(
            f"the mask is for (b, 1, sq, sk) = {mask.shape}, but queries and keys have {got}: the "
            "model or its cache changed them after the mask was made"
        )
    if sliding_window is not None and not mask.has_window(sliding_window):
        raise ValueError(
            f"the layer asks for a window of {sliding_window} tokens, but the model made a mask of "
            "another window or of none: only one of them can be meant"
        )
    return mask


def _within_documents(
    mask: ModelMask,
    position_ids: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None,
    cu_seq_lens_k: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
) -> AttnMask:
    """Packed documents see only themselves, whichever way the caller has said where they begin."""
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if cu_seq_lens_q is None or cu_seq_lens_k is None or not mask.is_square:
            raise ValueError(
                "packed documents are bounded by cu_seq_lens_q and cu_seq_lens_k together, in "
                "calls without a filled cache"
            )
        total = mask.batch * mask.queries[1]

        def bounds(cu_q: torch.Tensor, cu_k: torch.Tensor) -> Any:
            if cu_q is not cu_k and not torch.equal(cu_q, cu_k):
                raise ValueError(
                    "cu_seq_lens_q and cu_seq_lens_k differ, but queries and keys are the same "
                    "tokens"
                )
            return documents_of_bounds(mask.batch, cu_q, total)

        return mask.within((cu_seq_lens_q, cu_seq_lens_k), bounds)
    attended = mask.attended
    # transformers looks for documents only where there is neither a cache nor an attention_mask.
    if position_ids is not None and position_ids.ndim == 2 and mask.is_square:
        attended = mask.within(
            (position_ids,), lambda ids: documents_of_positions(ids, mask.padded_keys)
        )
    if seq_idx is not None and attended is mask.attended and not mask.is_packed:
        raise ValueError(
            "seq_idx says that documents are packed: pass cu_seq_lens_q and cu_seq_lens_k, or "
            "position_ids that start again, so that attention knows it too"
        )
    return attended


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """(b, h, s, d) -> (b * s, h, d), in the dtype of autocast and with d a multiple of 8.

    Zeros add nothing to any sum.
    """
    x = _cast(x).transpose(1, 2).flatten(0, 1)
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


def _cast(x: torch.Tensor) -> torch.Tensor:
    """Under autocast rotations and caches may widen tensors; products round them again."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x
