"""Small records that attention calls take and return."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class AttnForwardMeta:
    """What the forward saw. Fields may be added; existing ones keep their meaning."""

    lse: torch.Tensor
    """(tq, hq) fp32 (fp64 for fp64 inputs): log-sum-exp of each row's logits, sink included,
    natural log; -inf for a row that sees nothing. Differentiable."""
    max_logits: torch.Tensor | None = None
    """(hq,) fp32: largest logit of each head over attended pairs, before softcap and without the
    sink; -inf for a head that sees nothing, NaN if a logit was NaN. None unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How a pair's score is made: ``s = scale * q.k + bias``, then softcap, then the sink."""

    scale: float
    softcap: float = 0.0
    """0: none; c > 0: s becomes c * tanh(s / c)."""
    sink: torch.Tensor | None = None
    """(hq,) logits that take part in every row's softmax without a value."""
    bias: torch.Tensor | None = None
    """Added to the logits; three dims, broadcastable to (hq, tq, tk)."""
    alibi_slopes: torch.Tensor | None = None
    """(hq,) fp32: adds -slope * |p - j| where row i sits at key position p."""
    alibi_offset: torch.Tensor | None = None
    """(tq,) int32: p = i + alibi_offset[i]; None means tk - tq for all rows."""
