"""What attention has to know about a transformer, in Megatron's names and checked when made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The fields of Megatron's TransformerConfig that bear on attention.

    Frozen: `dataclasses.replace` makes a changed copy, which is checked again.

    >>> config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    >>> config.kv_channels, config.num_query_groups
    (16, 4)
    """

    num_layers: int
    """Layers of the whole model."""
    hidden_size: int
    """Channels of the residual stream."""
    num_attention_heads: int
    """Query heads, over all ranks."""
    num_query_groups: int | None = None
    """Key heads, over all ranks; None: as many as query heads."""
    kv_channels: int | None = None
    """Channels of a head; None: hidden_size // num_attention_heads."""

    attention_dropout: float = 0.0
    """Probability that a weight is dropped in training. Megatron's default is 0.1."""
    softmax_scale: float | None = None
    """What q.k is multiplied with; None: 1 / sqrt(channels of a key)."""
    softmax_type: str = "vanilla"
    """Each row's sum of exponentials: "vanilla"; "off-by-one", with 1 added; "learnable", with
    exp of one logit per head added."""
    masked_softmax_fusion: bool = True
    """Where probabilities are needed, make them in one kernel; False: in plain torch."""
    attention_softmax_in_fp32: bool = True
    """For Megatron's sake: here no softmax is computed in less."""
    apply_query_key_layer_scaling: bool = False
    """Keep stored scores small by the layer's number, and undo that inside the softmax."""

    window_size: tuple[int, int] | None = None
    """(left, right): keys seen on either side of a query's own position, -1 for all of them."""
    window_attn_skip_freq: int | Sequence[int] | None = None
    """Layers that have the window. None: all; N: all but each N-th; a list: where it holds 1."""

    qk_clip: bool = False
    """Keep track of each head's largest logit."""
    qk_clip_alpha: float = 0.5
    """The queries' share of a clip; the keys have the rest."""
    qk_clip_threshold: float = 100.0
    """The largest logit that is left alone."""

    fp16: bool = False
    """The model computes in fp16; attention itself goes by the dtype of its tensors."""
    bf16: bool = False
    """The model computes in bf16; attention itself goes by the dtype of its tensors."""
    params_dtype: torch.dtype = torch.float32
    """Dtype of parameters."""
    context_parallel_size: int = 1
    """Ranks that share one sequence."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "context_parallel_size"):
            check_count(name, getattr(self, name))
        self._resolve()
        check_count("num_query_groups", self._groups, "or None for one per query head")
        check_count("kv_channels", self.kv_channels, "or None for hidden_size / heads")
        if self.num_attention_heads % self._groups:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_query_groups={self._groups}: each key head serves as many query heads"
            )
        _check_numbers(self)
        _check_flags(self)
        _check_window(self)

    def _resolve(self) -> None:
        """What None stands for, and what one field demands of another."""
        if self.num_query_groups is None:
            self._set(num_query_groups=self.num_attention_heads)
        if self.kv_channels is None:
            self._set(kv_channels=self._default_kv_channels())
        if self.apply_query_key_layer_scaling:
            self._set(attention_softmax_in_fp32=True)
        for name in ("window_size", "window_attn_skip_freq"):  # the caller may reuse its list
            if isinstance(getattr(self, name), list):
                self._set(**{name: tuple(getattr(self, name))})

    def _default_kv_channels(self) -> int:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of "
                f"num_attention_heads={self.num_attention_heads}: set kv_channels, the channels "
                "of a head"
            )
        return self.hidden_size // self.num_attention_heads

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def _groups(self) -> int:
        assert self.num_query_groups is not None
        return self.num_query_groups

    @property
    def qk_channels(self) -> int:
        """Channels of a query and of a key."""
        assert self.kv_channels is not None
        return self.kv_channels

    @property
    def v_channels(self) -> int:
        """Channels of a value."""
        assert self.kv_channels is not None
        return self.kv_channels

    def is_layer_window_attention(self, layer_number: int) -> bool:
        """Whether a layer, counted from 1, has the window.

        >>> config = TransformerConfig(
        ...     num_layers=4, hidden_size=64, num_attention_heads=4, window_size=(127, 0),
        ...     window_attn_skip_freq=2)
        >>> [config.is_layer_window_attention(n) for n in (1, 2, 3, 4)]
        [True, False, True, False]
        """
        if not _is_int(layer_number) or layer_number < 1:
            raise ValueError(f"layer_number must be an int, counted from 1; got {layer_number!r}")
        freq = self.window_attn_skip_freq
        if self.window_size is None:
            return False
        if freq is None:
            return True
        if isinstance(freq, int):
            return layer_number % freq != 0
        if layer_number > len(freq):
            raise ValueError(
                f"layer_number {layer_number} is beyond the {len(freq)} layers that "
                "window_attn_skip_freq lists: give it an entry, or a number N as frequency"
            )
        return bool(freq[layer_number - 1])


@dataclass(frozen=True, kw_only=True)
class MLATransformerConfig(TransformerConfig):
    """Multi-latent attention: queries and keys of qk_head_dim + qk_pos_emb_head_dim channels.

    A kv_channels of its own is kept, but does not size anything.

    >>> config = MLATransformerConfig(num_layers=2, hidden_size=7168, num_attention_heads=128)
    >>> config.qk_channels, config.v_channels
    (192, 128)
    """

    q_lora_rank: int | None = 512
    """Rank of the queries' latent; None: queries are projected directly."""
    kv_lora_rank: int = 512
    """Rank of the latent that keys and values share."""
    qk_head_dim: int = 128
    """Channels of a query or key without position."""
    qk_pos_emb_head_dim: int = 64
    """Channels of a query or key that are rotated; 0: none."""
    v_head_dim: int = 128
    """Channels of a value."""

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_head_dim", "v_head_dim"):
            check_count(name, getattr(self, name))
        if self.q_lora_rank is not None:
            check_count("q_lora_rank", self.q_lora_rank, "or None for a direct projection")
        rotated = self.qk_pos_emb_head_dim
        if not _is_int(rotated) or rotated < 0:
            raise ValueError(f"qk_pos_emb_head_dim must be an int of at least 0, got {rotated!r}")
        super().__post_init__()
        if self._groups != self.num_attention_heads:
            raise ValueError(
                f"num_query_groups={self._groups} but num_attention_heads="
                f"{self.num_attention_heads}: in multi-latent attention each head has keys of its "
                "own; leave num_query_groups out"
            )

    def _default_kv_channels(self) -> int:
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def qk_channels(self) -> int:
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def v_channels(self) -> int:
        return self.v_head_dim


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_count(name: str, value: Any, otherwise: str = "") -> int:
    """The value, if it is a positive int."""
    if not _is_int(value) or value < 1:
        raise ValueError(
            f"{name} must be a positive int{otherwise and ' ' + otherwise}, got {value!r}"
        )
    return int(value)


def check_dropout(value: Any) -> float:
    """The value, if it is the probability of a dropout."""
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"attention_dropout must be a probability in [0, 1), got {value!r}; 0.0 turns it off"
        )
    return float(value)


def check_scale(value: Any) -> float:
    """The value, if scores can be multiplied with it."""
    if not isinstance(value, int | float) or not abs(value) < math.inf:
        raise ValueError(
            f"softmax_scale must be a finite number, or None for 1 / sqrt(channels), got {value!r}"
        )
    return float(value)


def _check_numbers(config: TransformerConfig) -> None:
    check_dropout(config.attention_dropout)
    if config.softmax_scale is not None:
        check_scale(config.softmax_scale)
    threshold, alpha = config.qk_clip_threshold, config.qk_clip_alpha
    if not isinstance(threshold, int | float) or not 0 < threshold < math.inf:
        raise ValueError(
            f"qk_clip_threshold must be a positive, finite logit, got {threshold!r}; to clip "
            "nothing set qk_clip=False"
        )
    if not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise ValueError(
            f"qk_clip_alpha must be in [0, 1], got {alpha!r}: queries are scaled by "
            "gamma ** alpha, keys by gamma ** (1 - alpha)"
        )


def _check_flags(config: TransformerConfig) -> None:
    for name in (
        *("masked_softmax_fusion", "attention_softmax_in_fp32", "apply_query_key_layer_scaling"),
        *("qk_clip", "fp16", "bf16"),
    ):
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name} must be True or False, got {getattr(config, name)!r}")
    if config.fp16 and config.bf16:
        raise ValueError("fp16 and bf16 are both set: a model computes in one of them, drop one")
    dtype = config.params_dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"params_dtype must be a floating point torch.dtype, got {dtype!r}")
    if config.softmax_type not in SOFTMAX_TYPES:
        known = ", ".join(map(repr, SOFTMAX_TYPES))
        raise ValueError(f"softmax_type must be one of {known}, got {config.softmax_type!r}")


def _check_window(config: TransformerConfig) -> None:
    window, freq = config.window_size, config.window_attn_skip_freq
    if window is not None and not (
        isinstance(window, tuple)
        and len(window) == 2
        and all(_is_int(side) and side >= -1 for side in window)
    ):
        raise ValueError(
            "window_size must be (left, right), each a number of tokens or -1 for all of them, "
            f"got {window!r}; None for no window"
        )
    if freq is None:
        return
    if window is None:
        raise ValueError(
            f"window_attn_skip_freq={freq!r} chooses layers for a window, but window_size is None: "
            "set window_size, or leave the frequency out"
        )
    if _is_int(freq):
        if freq < 1:  # type: ignore[operator]
            raise ValueError(
                f"window_attn_skip_freq must be at least 1, got {freq}: each N-th layer is without "
                "window; None gives all layers the window"
            )
    elif not isinstance(freq, tuple) or any(entry not in (0, 1) for entry in freq):
        raise ValueError(
            "window_attn_skip_freq must be None, an int, or a list of 0 and 1 (1: has the "
            f"window), got {freq!r}"
        )
    elif len(freq) != config.num_layers:
        raise ValueError(
            f"window_attn_skip_freq lists {len(freq)} layers, but num_layers={config.num_layers}: "
            "give each layer one entry"
        )
