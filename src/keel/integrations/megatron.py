"""Core attention for the layer specs of megatron-core.

sq, sk tokens of queries and keys on this rank; b samples; np query heads and ng key heads of this
rank, np a multiple of ng; hn channels of queries and keys, hv of values; t tokens of packed
documents.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F

from keel.attention import flex_flash_attn_func
from keel.bounded import make_room
from keel.distributed import AttnKey, CostModel, MaxLogitsTracker, calc_attn, flex_key

try:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.utils import (
        is_layer_window_attention,
        make_sharded_tensors_for_checkpoint,
    )
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"keel.integrations.megatron needs {missing.name}: pip install 'keel-attn[megatron]'",
        name=missing.name,
    ) from missing

from keel.integrations.megatron_masks import Tokens, batch_tokens, packed_tokens

MAX_KEYS = 16
REPLACED = ("DotProductAttention", "TEDotProductAttention", "KeelDotProductAttention")


def with_keel_attention(spec: Any) -> Any:
    """A copy of a layer spec, or of a block's, in which every core attention is Keel's.

    Takes what `get_gpt_layer_local_spec`, `get_gpt_layer_with_transformer_engine_spec`,
    `get_gpt_decoder_block_spec` and their kind return: a ModuleSpec, or submodules.

    Raises:
        ValueError: if there is no core attention in it, or one that is not dot-product attention.
    """
    copy, replaced = _replaced(spec)
    if not replaced:
        raise ValueError(
            f"there is no core_attention in this {type(spec).__name__}: pass the spec of a "
            "transformer layer or of a block of them"
        )
    return copy


def _replaced(spec: Any) -> tuple[Any, int]:
    """(copy, how many core attentions were replaced)."""
    if isinstance(spec, list | tuple):
        parts = [_replaced(x) for x in spec]
        return type(spec)(x for x, _ in parts), sum(n for _, n in parts)
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec, 0
    changes, count = {}, 0
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name == "core_attention" and value is not None:
            _check_replaceable(value)
            changes[field.name], n = KeelDotProductAttention, 1
        else:
            changes[field.name], n = _replaced(value)
        count += n
    return (dataclasses.replace(spec, **changes) if count else spec), count


def _check_replaceable(core: Any) -> None:
    module = core.module if isinstance(core, ModuleSpec) else core
    name = module[-1] if isinstance(module, tuple) else getattr(module, "__name__", repr(module))
    if name not in REPLACED or getattr(core, "params", None):
        raise ValueError(
            f"the spec's core_attention is {name}, with arguments or a meaning of its own: only "
            f"plain {' and '.join(REPLACED[:2])} can be replaced"
        )


class KeelDotProductAttention(MegatronModule):
    """Megatron's `core_attention`: softmax(scale * q.k) v without a score matrix.

    Constructor and call are those of `TEDotProductAttention`. Masks are causal,
    causal_bottom_right or none, windows by the config, or documents by `PackedSeqParams` (thd, with
    padding between them or without). Context parallelism takes Megatron's own order of tokens and
    exchanges keys by itself, so `cp_comm_type` says nothing. Query-key layer scaling changes
    nothing, since logits are never rounded.

    What cannot be honoured is refused: dropout, attention in fp8, attention_mask, attention_bias.

    Attributes:
        softmax_offset: (np,) logits that join each row's sum; None for softmax_type "vanilla".
        current_max_attn_logits: (np,) fp32 (fp64 for fp64 inputs), with config.qk_clip or
            config.log_max_attention_logit: each head's largest logit on this rank over all calls
            in training mode since it was last None. At least 0: Megatron's clip_qk takes a power of
            threshold / maximum, which is NaN for a negative one.
    """

    softmax_offset: torch.Tensor | None

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        _refuse_config(config, attention_dropout, num_splits)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.layer_number, self.attention_type = layer_number, attention_type
        self.attn_mask_type = attn_mask_type
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.num_heads, self.num_groups = _heads_of_this_rank(config, self.tp_group.size())
        self.k_channels = config.kv_channels if k_channels is None else k_channels
        self.v_channels = config.kv_channels if v_channels is None else v_channels
        self.softmax_scale = (
            1 / math.sqrt(self.k_channels) if softmax_scale is None else softmax_scale
        )
        has_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window_size = tuple(config.window_size) if has_window else None
        self.current_max_attn_logits: torch.Tensor | None = None
        self._keys: dict[Any, AttnKey] = {}
        self._add_softmax_offset()

    def _add_softmax_offset(self) -> None:
        config = self.config
        if config.softmax_type == "vanilla":
            self.register_buffer("softmax_offset", None)
            return
        on_gpu = torch.cuda.is_available() and not config.use_cpu_initialization
        device = torch.cuda.current_device() if on_gpu else "cpu"
        zeros = torch.zeros(self.num_heads, dtype=config.params_dtype, device=device)
        if config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", zeros, persistent=False)
        elif config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(zeros)
            if config.perform_initialization:
                config.init_method(self.softmax_offset)
        else:
            raise ValueError(
                "softmax_type must be vanilla, off-by-one or learnable, "
                f"got {config.softmax_type!r}"
            )

    def extra_repr(self) -> str:
        return (
            f"layer {self.layer_number}, {self.num_heads} heads on {self.num_groups}, "
            f"scale={self.softmax_scale:.4g}, window={self.window_size}, "
            f"softmax_type={self.config.softmax_type!r}"
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        """query [sq, b, np, hn], key [sk, b, ng, hn], value [sk, b, ng, hv] -> [sq, b, np * hv].

        Packed: query [t, np, hn] or [t, 1, np, hn], and so on -> [t, np * hv] or [t, 1, np * hv].
        """
        _refuse_arguments(attention_mask, attention_bias, num_splits)
        kind = (self.attn_mask_type if attn_mask_type is None else attn_mask_type).name
        packed = _is_packed(packed_seq_params)
        self._check_qkv(query, key, value, packed)
        group = self._group_of(packed_seq_params)
        ranks = 1 if group is None else group.size()
        sizes = len(query), len(key), ranks
        if packed:
            tokens = packed_tokens(packed_seq_params, kind, self.window_size, *sizes)
        else:
            tokens = batch_tokens(kind, self.window_size, *sizes)
        # Samples of a batch share their mask, so b * np heads do for b samples of np heads, and
        # nothing is transposed: query head n * np + h meets key head n * ng + h // (np / ng).
        q, k, v = (_padded(x.flatten(1, -2)) for x in (query, key, value))
        out, top = self._attend(q, k, v, tokens, group)
        if top is not None:
            self._raise_maximum(top.view(-1, self.num_heads).amax(0))
        return out[..., : self.v_channels].reshape(*query.shape[:-2], -1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: Tokens, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sink = self.softmax_offset
        if sink is not None:
            sink = sink.repeat(q.shape[1] // self.num_heads)
        wanted = self.training and (self.config.qk_clip or self.config.log_max_attention_logit)
        if tokens.layout is None:
            out, meta = flex_flash_attn_func(
                *(q, k, v, tokens.mask),
                softmax_scale=self.softmax_scale,
                sink=sink,
                return_max_logits=wanted,
                deterministic=self.config.deterministic_mode,
            )
            return out, meta.max_logits
        tracker = MaxLogitsTracker()  # clip_qk takes the maximum over ranks, for all layers
        out, _ = calc_attn(
            *(q, k, v, self._key(tokens, group)),
            softmax_scale=self.softmax_scale,
            sink=sink,
            defer_max_logits=tracker if wanted else None,
        )
        local = tracker.local()
        return out, local[0] if local else None

    def _key(self, tokens: Tokens, group: Any) -> AttnKey:
        wish = (tokens.mask, tokens.layout, group)
        if wish not in self._keys:
            make_room(self._keys, MAX_KEYS)
            assert tokens.layout is not None
            cost = CostModel(
                num_heads=self.num_heads,
                num_kv_heads=self.num_groups,
                head_dim=self.k_channels,
                value_dim=self.v_channels,
            )
            self._keys[wish] = flex_key(tokens.mask, group=group, balance=tokens.layout, cost=cost)
        return self._keys[wish]

    def _raise_maximum(self, top: torch.Tensor) -> None:
        running = self.current_max_attn_logits
        if running is None or running.dtype != top.dtype or running.device != top.device:
            running = torch.zeros_like(top) if running is None else running.to(top)
            self.current_max_attn_logits = running
        torch.maximum(running, top, out=running)  # in place: a captured graph goes on writing to it

    def _group_of(self, packed: Any) -> Any:
        """The ranks that share a call's tokens; None: this one alone has them."""
        dynamic, size = (getattr(packed, x, None) for x in ("cp_group", "local_cp_size"))
        if dynamic is not None:
            return dynamic if dynamic.size() > 1 else None
        if size is None:
            return self.cp_group
        if size != 1:
            raise ValueError(
                f"packed_seq_params.local_cp_size is {size} without a cp_group: pass the group"
            )
        return None

    def _check_qkv(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: bool
    ) -> None:
        tensors = (
            ("query", query, self.num_heads, self.k_channels),
            ("key", key, self.num_groups, self.k_channels),
            ("value", value, self.num_groups, self.v_channels),
        )
        for name, x, heads, channels in tensors:
            fits = x.ndim == 4 if not packed else x.ndim == 3 or (x.ndim == 4 and x.shape[1] == 1)
            if not fits or x.shape[-2:] != (heads, channels):
                head = f"{heads}, {channels}"
                dims = f"[t, {head}] or [t, 1, {head}]" if packed else f"[s, b, {head}]"
                raise ValueError(
                    f"{name} must be {dims} by config and constructor, got {tuple(x.shape)}"
                )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Learnable softmax offsets, which tensor-parallel ranks share by heads."""
        learns = self.config.softmax_type == "learnable"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True) if learns else {},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


def _refuse_config(config: Any, dropout: float | None, num_splits: int | None) -> None:
    dropout = config.attention_dropout if dropout is None else dropout
    if dropout:
        raise ValueError(
            f"attention dropout of {dropout} is not supported: set attention_dropout=0.0 "
            "(--attention-dropout 0)"
        )
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention", "batch_invariant_mode"):
        if getattr(config, name, False):
            raise NotImplementedError(
                f"{name} is not supported: set it to False, or keep Transformer Engine's "
                "attention; fp8 for linear layers alone may stay"
            )
    _refuse_splits(num_splits)


def _refuse_splits(num_splits: int | None) -> None:
    if num_splits not in (None, 1):
        raise NotImplementedError(
            f"num_splits={num_splits} is a way of FlashAttention to share keys among blocks, which "
            "is not supported: leave it out"
        )


def _refuse_arguments(
    attention_mask: torch.Tensor | None,
    attention_bias: torch.Tensor | None,
    num_splits: int | None,
) -> None:
    _refuse_splits(num_splits)
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} is not supported: pass None "
            "and say by attn_mask_type, window_size and packed_seq_params what is seen; Megatron's "
            "training makes none with --no-create-attention-mask-in-dataloader"
        )
    if attention_bias is not None:
        raise NotImplementedError(
            "attention_bias is not supported: leave it out, or take keel.nn.DotProductAttention, "
            "which makes the scores"
        )


def _is_packed(packed: Any) -> bool:
    layout = getattr(packed, "qkv_format", None)
    if layout not in (None, "thd", "sbhd"):
        raise ValueError(
            f"packed_seq_params.qkv_format must be 'thd' for packed documents, got {layout!r}"
        )
    if layout == "sbhd" and packed.cu_seqlens_q is not None:
        raise ValueError(
            "packed_seq_params bounds documents by cu_seqlens_q, but says qkv_format='sbhd': pass "
            "'thd', with all documents behind each other"
        )
    return packed is not None and layout != "sbhd"


def _heads_of_this_rank(config: Any, ranks: int) -> tuple[int, int]:
    """(np, ng)."""
    heads, groups = config.num_attention_heads, config.num_query_groups
    if heads % ranks or groups % ranks:
        raise ValueError(
            f"{heads} query heads and {groups} query groups cannot be shared evenly by {ranks} "
            "tensor-parallel ranks"
        )
    return heads // ranks, groups // ranks


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Channels up to a multiple of 8, as the kernels want them; zeros add nothing to any sum."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x
