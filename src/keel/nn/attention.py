"""Megatron's core attention, without a score matrix wherever nobody has to see one.

Shapes: sq, sk tokens of queries and keys; b samples; np query heads and ng key heads of this rank,
np a multiple of ng; hn channels of queries and keys, hv of values; t tokens of packed documents.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F

from keel import masks
from keel.attention import flex_flash_attn_func, traced_documents
from keel.checks import MAX_HEAD_DIM
from keel.masks import AttnMask
from keel.masks.inputs import remembered
from keel.nn.config import TransformerConfig, check_count, check_dropout, check_scale
from keel.nn.max_logits import KeepsMaxLogits
from keel.softmax.functional import scaled_masked_softmax
from keel.softmax.modules import AttnMaskType, UsageError, as_mask_type, hides_future

Window = tuple[int, int]


class DotProductAttention(KeepsMaxLogits, torch.nn.Module):
    """softmax(scale * q.k + bias) v, with Megatron's constructor and call.

    Each call takes one of two paths that give the same answers. *Flash* never makes the scores.
    *Probabilities* makes them, [b, np, sq, sk], for what needs them: dropout in training, an
    attention_mask, an attention_bias, `need_probs`, or a head of more than 256 channels.

    Masks compose: what the mask type, the window or the attention_mask hides is hidden, and a row
    that sees nothing is 0.

    Args:
        config: `TransformerConfig`.
        layer_number: counted from 1; says whether the layer has the window.
        attn_mask_type: `keel.softmax.AttnMaskType`, Megatron's own, or a name. Causal types hide
            the future with and without an attention_mask.
        attention_type: "self" or "cross".
        attention_dropout: in place of config.attention_dropout. Drawn from torch's default
            generator: where ranks share heads, they need seeds of their own.
        softmax_scale: in place of config.softmax_scale.
        k_channels, v_channels: hn and hv, where they are not the config's.
        cp_comm_type: for Megatron's sake; there is nothing to communicate on one rank.
        pg_collection: an object whose `tp` is the process group that shares the heads.
        need_probs: keep the probabilities of the last call in `last_probs`.

    Attributes:
        softmax_offset: (np,) logits that join each row's sum; None for softmax_type "vanilla".
        current_max_attn_logits: (np,) fp32 (fp64 for fp64 inputs), with config.qk_clip: each
            head's largest scale * q.k + bias that was seen, over all calls in training mode
            since `reset_max_logits`; None before the first.
        last_probs: [b, np, sq, sk], detached and before dropout, with need_probs.

    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    >>> attention = DotProductAttention(config, 1, "causal")
    >>> q, k, v = torch.randn(3, 6, 2, 4, 8)
    >>> tuple(attention(q, k, v).shape)
    (6, 2, 32)
    """

    softmax_offset: torch.Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        need_probs: bool = False,
    ) -> None:
        super().__init__()
        _refuse_context_parallel(config, pg_collection)
        if attention_type not in ("self", "cross"):
            raise UsageError(f"attention_type must be 'self' or 'cross', got {attention_type!r}")
        self.config, self.layer_number = config, layer_number
        self.attn_mask_type = as_mask_type(attn_mask_type)
        self.attention_type = attention_type
        self.cp_comm_type = cp_comm_type
        self.need_probs = need_probs
        self.num_heads, self.num_groups = _heads_of_this_rank(config, pg_collection)
        self.k_channels = config.qk_channels
        self.v_channels = config.v_channels
        if k_channels is not None:
            self.k_channels = check_count("k_channels", k_channels)
        if v_channels is not None:
            self.v_channels = check_count("v_channels", v_channels)
        self.attention_dropout = check_dropout(
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        if softmax_scale is None:
            softmax_scale = config.softmax_scale
        if softmax_scale is None:
            softmax_scale = 1 / math.sqrt(self.k_channels)
        self.softmax_scale = check_scale(softmax_scale)
        has_window = config.is_layer_window_attention(layer_number)
        self.window_size = config.window_size if has_window else None
        if self.window_size == (-1, -1):
            self.window_size = None
        self.last_probs: torch.Tensor | None = None
        self._add_softmax_offset()

    def _add_softmax_offset(self) -> None:
        kind = self.config.softmax_type
        zeros = torch.zeros(self.num_heads, dtype=self.config.params_dtype)
        if kind == "learnable":
            self.softmax_offset = torch.nn.Parameter(zeros)
        else:
            # Not in checkpoints: it is zero whoever loads it.
            self.register_buffer(
                "softmax_offset", zeros if kind == "off-by-one" else None, persistent=False
            )

    def reset_parameters(self) -> None:
        """Starts the softmax offsets at 0, after a module was made on the meta device."""
        if self.softmax_offset is not None:
            torch.nn.init.zeros_(self.softmax_offset)

    def extra_repr(self) -> str:
        return (
            f"layer {self.layer_number}, {self.attn_mask_type.name}, {self.num_heads} heads on "
            f"{self.num_groups}, scale={self.softmax_scale:.4g}, window={self.window_size}, "
            f"dropout={self.attention_dropout}, softmax_type={self.config.softmax_type!r}"
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
    ) -> torch.Tensor:
        """query [sq, b, np, hn], key [sk, b, ng, hn], value [sk, b, ng, hv] -> [sq, b, np * hv].

        Args:
            attention_mask: bool or uint8, nonzero hides; or floating point, added to the logits.
                Broadcastable to [b, np, sq, sk]; gets no gradient.
            attn_mask_type: in place of the constructor's, for this call.
            attention_bias: floating point, added to the logits. Broadcastable to
                [b, np, sq, sk]; gets a gradient.
            packed_seq_params: an object with cu_seqlens_q and cu_seqlens_kv, (n + 1,) int32/int64.
                Documents then see only themselves; query is [t, 1, np, hn] or [t, np, hn], key
                and value likewise, and the result [t, 1, np * hv] or [t, np * hv].
        """
        kind = self.attn_mask_type if attn_mask_type is None else as_mask_type(attn_mask_type)
        if kind is AttnMaskType.arbitrary and attention_mask is None and attention_bias is None:
            raise UsageError(
                "attn_mask_type arbitrary leaves it to the attention_mask what is seen, and there "
                "is none: pass one, or say no_mask or causal"
            )
        self._check_qkv(query, key, value, packed=packed_seq_params is not None)
        if packed_seq_params is not None:
            self._check_packed(query, attention_mask, attention_bias)
            return self._flash(
                *(query, key, value),
                _packed_mask(packed_seq_params, kind, self.window_size, len(query), len(key)),
            )
        sq, sk = query.shape[0], key.shape[0]
        causal = hides_future(kind, self.window_size, sq, sk)
        if self._makes_probabilities(attention_mask, attention_bias):
            return self._probabilities(query, key, value, attention_mask, attention_bias, causal)
        return self._flash(query, key, value, _band_mask(sq, sk, *_band(causal, self.window_size)))

    def _makes_probabilities(
        self, attention_mask: torch.Tensor | None, attention_bias: torch.Tensor | None
    ) -> bool:
        return (
            self.need_probs
            or attention_mask is not None
            or attention_bias is not None
            or self._drops
            or max(self.k_channels, self.v_channels) > MAX_HEAD_DIM
        )

    @property
    def _drops(self) -> bool:
        return self.training and self.attention_dropout > 0

    def _flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: AttnMask | torch.Tensor,
    ) -> torch.Tensor:
        """Attention of tokens that are the first dim; all that lies between them is heads.

        Samples of a batch share their mask, so b * np heads do for b samples of np heads, and no
        tensor has to be transposed: query head n * np + h meets key head n * ng + h // (np / ng).
        """
        q, k, v = (_padded(x.flatten(1, -2)) for x in (query, key, value))
        samples = q.shape[1] // self.num_heads
        sink = self.softmax_offset
        running = self._running_maximum(query)
        out, meta = flex_flash_attn_func(
            *(q, k, v, mask),
            softmax_scale=self.softmax_scale,
            sink=sink if sink is None or samples == 1 else sink.repeat(samples),
            return_max_logits=running is not None,
            max_logits_out=running if samples == 1 else None,
        )
        if running is not None and samples > 1:
            assert meta.max_logits is not None
            top = meta.max_logits.unflatten(0, (samples, self.num_heads)).amax(0)
            torch.maximum(running, top, out=running)
        return out[..., : self.v_channels].reshape(*query.shape[:-2], -1)

    def _probabilities(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attention_bias: torch.Tensor | None,
        causal: bool,
    ) -> torch.Tensor:
        """Attention by way of [b, np, sq, sk] scores."""
        with torch.autocast(query.device.type, enabled=False):  # as on the other path
            # What the layer's number takes from the scores, the softmax gives back in fp32.
            factor = self.layer_number if self.config.apply_query_key_layer_scaling else 1
            scores = _scores(query, key, self.softmax_scale / factor)
            if attention_bias is not None:
                _check_bias(attention_bias, scores)
                wide = _wide(scores.dtype)
                scores = scores.to(wide) * factor + attention_bias.to(wide)
                factor = 1
            probs = self._softmax(scores, attention_mask, float(factor), causal).to(value.dtype)
            if self.need_probs:
                self.last_probs = probs.detach()
            if self._drops:
                probs = F.dropout(probs, self.attention_dropout)
            return _weighted_sum(probs, value)

    def _softmax(
        self,
        scores: torch.Tensor,
        attention_mask: torch.Tensor | None,
        factor: float,
        causal: bool,
    ) -> torch.Tensor:
        running = self._running_maximum(scores)
        probs = scaled_masked_softmax(
            *(scores, attention_mask),
            scale=factor,
            causal=causal,
            window=self.window_size,
            sink=self.softmax_offset,
            return_max_logits=running is not None,
            backend="auto" if self.config.masked_softmax_fusion else "blocked",
        )
        if running is not None:
            probs, top = probs
            torch.maximum(running, top, out=running)
        return probs

    def _running_maximum(self, like: torch.Tensor) -> torch.Tensor | None:
        return self.running_maximum(self.num_heads, like) if self.config.qk_clip else None

    def _check_qkv(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, packed: bool
    ) -> None:
        tensors = (
            ("query", query, self.num_heads, self.k_channels),
            ("key", key, self.num_groups, self.k_channels),
            ("value", value, self.num_groups, self.v_channels),
        )
        for name, x, heads, channels in tensors:
            if not (x.ndim == 4 or (packed and x.ndim == 3)) or x.shape[-2:] != (heads, channels):
                head = f"{heads}, {channels}"
                dims = f"[t, 1, {head}] or [t, {head}]" if packed else f"[s, b, {head}]"
                raise ValueError(
                    f"{name} must be {dims} by config and constructor, got {tuple(x.shape)}"
                )
        if not query.shape[1:-2] == key.shape[1:-2] == value.shape[1:-2] or len(key) != len(value):
            raise ValueError(
                "query, key and value must agree in batch, key and value in tokens; got "
                f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
            )
        if not query.dtype == key.dtype == value.dtype:
            raise ValueError(
                "query, key and value must have one dtype, got "
                f"{query.dtype}, {key.dtype}, {value.dtype}"
            )

    def _check_packed(
        self,
        query: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attention_bias: torch.Tensor | None,
    ) -> None:
        if query.ndim == 4 and query.shape[1] != 1:
            raise ValueError(
                f"packed documents are a batch of 1, got query of shape {tuple(query.shape)}: put "
                "all samples behind each other and into cu_seqlens"
            )
        wishes = {
            "an attention_mask": attention_mask is not None,
            "an attention_bias": attention_bias is not None,
            f"attention_dropout={self.attention_dropout} in training": self._drops,
            "need_probs=True": self.need_probs,
        }
        for wish, given in wishes.items():
            if given:
                raise ValueError(
                    f"packed_seq_params and {wish} cannot go together: packed documents never "
                    "make probabilities; unpack them into a batch, or do without"
                )


def _refuse_context_parallel(config: TransformerConfig, pg_collection: Any) -> None:
    size = max(config.context_parallel_size, _group_size(pg_collection, "cp"))
    if size > 1:
        raise UsageError(
            f"context parallelism over {size} ranks is not supported yet: "
            "set context_parallel_size=1"
        )


def _heads_of_this_rank(config: TransformerConfig, pg_collection: Any) -> tuple[int, int]:
    """(np, ng)."""
    ranks = _group_size(pg_collection, "tp")
    assert config.num_query_groups is not None
    heads, groups = config.num_attention_heads, config.num_query_groups
    if heads % ranks or groups % ranks:
        raise ValueError(
            f"{heads} query heads and {groups} query groups cannot be shared evenly by the {ranks} "
            "ranks of pg_collection.tp"
        )
    return heads // ranks, groups // ranks


def _group_size(pg_collection: Any, name: str) -> int:
    group = getattr(pg_collection, name, None)
    return 1 if group is None else int(group.size())


def _band(causal: bool, window: Window | None) -> Window:
    left, right = window or (-1, -1)
    return left, 0 if causal else right


def _band_mask(sq: int, sk: int, left: int, right: int) -> AttnMask | torch.Tensor:
    if torch.compiler.is_compiling():  # sizes may be symbolic
        sample = torch.arange(2, device="cpu")
        return traced_documents(sample * sq, sample * sk, (left, right))
    return _remembered_band(sq, sk, left, right)


@functools.lru_cache(maxsize=64)
def _remembered_band(sq: int, sk: int, left: int, right: int) -> AttnMask:
    return masks.sliding_window(sq, sk, left=left, right=right)


def _packed_mask(
    packed: Any, kind: AttnMaskType, window: Window | None, tq: int, tk: int
) -> AttnMask:
    """Documents that see themselves. Bounds are read once: on a GPU that stalls the host."""
    layout = getattr(packed, "qkv_format", None)
    if layout not in (None, "thd"):
        raise ValueError(f"packed_seq_params.qkv_format must be 'thd' or None, got {layout!r}")
    cu_q, padded_q = _document_bounds(packed, "cu_seqlens_q")
    cu_k, padded_k = _document_bounds(packed, "cu_seqlens_kv")

    def build() -> AttnMask:
        if not torch.equal(cu_q, padded_q) or not torch.equal(cu_k, padded_k):
            raise ValueError(
                "packed_seq_params has bounds with padding that differ from those without: "
                "padding between documents is not supported, pack them without it"
            )
        band = _band(hides_future(kind, window, 1, 1), window)
        mask = masks.documents(cu_q, cu_k, window=band, tq=tq, tk=tk)
        for lengths in zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True):
            hides_future(kind, window, *lengths)  # refuses what it would refuse in a batch
        return mask

    bounds = (cu_q, padded_q, cu_k, padded_k)
    return remembered(bounds, ("nn.attention", kind, window, tq, tk), build)


def _document_bounds(packed: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(bounds, bounds with padding), the same tensor where nothing is padded."""
    cu = getattr(packed, name, None)
    if not isinstance(cu, torch.Tensor):
        raise ValueError(
            f"packed_seq_params.{name} must be an (n + 1,) int tensor of document bounds, "
            f"got {cu!r}"
        )
    padded = getattr(packed, f"{name}_padded", None)
    return cu, cu if padded is None else padded


def _check_bias(bias: torch.Tensor, scores: torch.Tensor) -> None:
    if not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
        found = bias.dtype if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise ValueError(
            f"attention_bias must be a floating point tensor, got {found}; what hides goes into "
            "attention_mask"
        )
    fits = bias.ndim <= 4 and all(
        n in (1, m) for n, m in zip(reversed(bias.shape), reversed(scores.shape), strict=False)
    )
    if not fits or bias.device != scores.device:
        raise ValueError(
            f"attention_bias must be broadcastable to (b, np, sq, sk) = {tuple(scores.shape)} on "
            f"{scores.device}, got {tuple(bias.shape)} on {bias.device}"
        )


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """[b, np, sq, sk] scale * q.k, scaled before it is rounded to the dtype of q.

    The rows of all query heads on one key head stand below each other, so that one product serves
    them without copies of the keys.
    """
    sq, b, heads, channels = query.shape
    sk, _, groups, _ = key.shape
    q = query.permute(1, 2, 0, 3).reshape(b * groups, heads // groups * sq, channels)
    k = key.permute(1, 2, 3, 0).reshape(b * groups, channels, sk)
    scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k, beta=0, alpha=scale)
    return scores.view(b, heads, sq, sk)


def _weighted_sum(probs: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[sq, b, np * hv] from [b, np, sq, sk] and [sk, b, ng, hv]; rows stand as in `_scores`."""
    b, heads, sq, sk = probs.shape
    _, _, groups, channels = value.shape
    v = value.permute(1, 2, 0, 3).reshape(b * groups, sk, channels)
    out = torch.bmm(probs.reshape(b * groups, heads // groups * sq, sk), v)
    return out.view(b, heads, sq, channels).permute(2, 0, 1, 3).reshape(sq, b, heads * channels)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Channels up to a multiple of 8, as the kernels want them; zeros add nothing to any sum."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What logits are summed in, and their maxima kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
