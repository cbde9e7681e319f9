"""A small GPT over packed documents: RMSNorm, rotary positions, SwiGLU, grouped queries.

Shapes: t tokens of this rank (all documents end to end), c channels, hq query heads on hk key
heads of d channels. There is no batch dim: the mask says which tokens belong together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from keel.attention import flex_flash_attn_func
from keel.distributed import AttnKey, MaxLogitsTracker, calc_attn, get_position_ids
from keel.masks import AttnMask
from keel.nn.config import check_count
from keel.nn.max_logits import KeepsMaxLogits


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a `GPT`.

    >>> GPTConfig(vocab_size=256, num_layers=2, hidden_size=64, num_heads=4).dim
    16
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int | None = None
    """Key heads; None: one for each query head."""
    head_dim: int | None = None
    """Channels of a head, a multiple of 8; None: hidden_size // num_heads."""
    mlp_size: int | None = None
    """Channels inside the MLP; None: 8/3 of hidden_size, up to a multiple of 8."""
    qkv_bias: bool = False
    """Queries, keys and values have biases, as in Qwen2."""
    rope_base: float = 10_000.0
    """Longest wavelength of the rotation over 2 pi, in tokens."""
    norm_eps: float = 1e-6
    recompute: bool = False
    """Compute layers again in the backward, instead of keeping what they made."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "hidden_size", "num_heads"):
            check_count(name, getattr(self, name))
        check_count("num_kv_heads", self.kv_heads)
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.kv_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}: "
                "set head_dim, the channels of a head"
            )
        if self.dim < 8 or self.dim % 8:
            raise ValueError(f"a head must have a multiple of 8 channels, got {self.dim}")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def inner(self) -> int:
        """Channels inside the MLP."""
        return -(-self.hidden_size // 3) * 8 if self.mlp_size is None else self.mlp_size


class GPT(nn.Module):
    """Token ids to logits of the next token.

    >>> from keel import masks
    >>> model = GPT(GPTConfig(vocab_size=256, num_layers=2, hidden_size=32, num_heads=4))
    >>> tuple(model(torch.arange(12), masks.documents([0, 5, 12], causal=True)).shape)
    (12, 256)
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, smaller where a layer writes to the residual stream."""
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth = 2 * self.config.num_layers if writes else 1
                fan_in = 1 if name.startswith("embedding") else weight.shape[1]
                nn.init.normal_(weight, std=(fan_in * depth) ** -0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
            else:
                nn.init.ones_(weight)

    def forward(self, tokens: torch.Tensor, layout: AttnMask | AttnKey) -> torch.Tensor:
        """tokens (t,) int64 -> logits (t, vocab).

        layout: the mask of all tokens; or a key, where they are spread over ranks and `tokens` are
        this rank's (`dispatch(all_tokens, key)`).
        """
        if tokens.ndim != 1:
            raise ValueError(
                f"tokens must be (t,), documents end to end, got {tuple(tokens.shape)}; the mask "
                "says where they end"
            )
        if isinstance(layout, AttnKey):
            positions = get_position_ids(layout, tokens.device)
        else:
            positions = torch.arange(len(tokens), device=tokens.device)
        turn = rotation(positions, self.config.dim, self.config.rope_base)
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.config.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, turn, layout, use_reentrant=False)
            else:
                x = layer(x, turn, layout)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Layer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: torch.Tensor, turn: torch.Tensor, layout: AttnMask | AttnKey
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turn, layout)
        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Attention(KeepsMaxLogits, nn.Module):
    """Causal or any other self-attention; keeps its max logits in training, of this rank alone."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.kv_heads
        self.head_dim = config.dim
        size, bias = config.hidden_size, config.qkv_bias
        self.q_proj = nn.Linear(size, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, size, bias=False)

    def forward(
        self, x: torch.Tensor, turn: torch.Tensor, layout: AttnMask | AttnKey
    ) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, turn), rotated(k, turn)
        running = self.running_maximum(q.shape[1], q)
        if isinstance(layout, AttnKey):
            # Ranks meet once per step, in the clip, not once per layer.
            tracker = None if running is None else MaxLogitsTracker()
            out, meta = calc_attn(q, k, v, layout, defer_max_logits=tracker)
            if running is not None and meta.max_logits is not None:
                torch.maximum(running, meta.max_logits, out=running)
        else:
            out, _ = flex_flash_attn_func(q, k, v, layout, max_logits_out=running)
        y: torch.Tensor = self.o_proj(out.flatten(1))
        return y


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.inner, bias=False)
        self.down_proj = nn.Linear(config.inner, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


def rotation(positions: torch.Tensor, dim: int, base: float) -> torch.Tensor:
    """(2, t, 1, dim / 2): cosines and sines of each position, in fp32."""
    places = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.to(torch.float32)[:, None] * base ** (-places / dim)
    return torch.stack([angles.cos(), angles.sin()])[:, :, None]


def rotated(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """(t, h, d) -> the same, channel n turned against channel n + d / 2."""
    cos, sin = turn.to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
