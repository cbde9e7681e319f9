"""The oracle: attention with a dense mask in plain torch, readable and differentiable.

Shapes: q (tq, hq, d), k (tk, hk, d), v (tk, hk, dv), out (tq, hq, dv), lse (tq, hq),
max_logits (hq,). Inside, scores are (hq, tq, tk).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keel.masks import AttnMask
from keel.meta import Scoring

Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""(out, lse, max_logits) over a part of the keys."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask | torch.Tensor,
    scoring: Scoring,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, max_logits) computed in `dtype` (default: fp32, or fp64 for fp64 inputs).

    >>> import torch
    >>> from keel import masks
    >>> q, k, v = torch.randn(3, 4, 2, 8)
    >>> out, lse, top = attention(q, k, v, masks.causal(4), Scoring(scale=1.0))
    >>> bool(torch.allclose(out[0], v[0])), out.shape, lse.shape, top.shape
    (True, torch.Size([4, 2, 8]), torch.Size([4, 2]), torch.Size([2]))
    """
    dtype = dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    out_dtype, group = q.dtype, q.shape[1] // k.shape[1]
    dense = (mask.to_dense() if isinstance(mask, AttnMask) else mask).to(q.device)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    logits = scores(q, k, scoring)
    seen = logits.detach().masked_fill(~dense, -torch.inf)
    if seen.numel():
        max_logits = seen.amax((1, 2))
    else:
        max_logits = seen.new_full((q.shape[1],), -torch.inf)
    if scoring.softcap:
        logits = scoring.softcap * torch.tanh(logits / scoring.softcap)
    logits = logits.masked_fill(~dense, -torch.inf)
    if scoring.sink is not None:
        column = scoring.sink.to(dtype)[:, None, None].expand(-1, q.shape[0], 1)
        logits = torch.cat([logits, column], 2)

    # Subtract a finite maximum, so that rows without keys stay exact zeros and get zero gradients.
    if logits.shape[2]:
        top = logits.detach().amax(2, keepdim=True)
    else:
        top = logits.new_full((q.shape[1], q.shape[0], 1), -torch.inf)
    top = torch.where(top == -torch.inf, 0.0, top)
    weight = torch.exp(logits - top)
    total = weight.sum(2, keepdim=True)
    empty = total == 0
    prob = weight / torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, torch.log(torch.where(empty, 1.0, total)) + top)
    out = torch.einsum("hqk,khd->qhd", prob[:, :, : k.shape[0]], v)
    return out.to(out_dtype), lse[:, :, 0].T, max_logits


def scores(q: torch.Tensor, k: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """(hq, tq, tk) logits before softcap; k has q's heads."""
    logits = torch.einsum("qhd,khd->hqk", q, k) * scoring.scale
    if scoring.bias is not None:
        logits = logits + scoring.bias.to(logits.dtype)
    if scoring.alibi_slopes is not None:
        tq, tk = q.shape[0], k.shape[0]
        position = torch.arange(tq, device=q.device)
        offset = scoring.alibi_offset
        position = position + ((tk - tq) if offset is None else offset.long())
        distance = (position[:, None] - torch.arange(tk, device=q.device)).abs()
        slopes = scoring.alibi_slopes.to(logits.dtype)
        logits = logits - slopes[:, None, None] * distance.to(logits.dtype)
    return logits


def merge(parts: Sequence[Partial]) -> Partial:
    """Joins results over disjoint sets of keys into the result over their union.

    >>> import torch
    >>> a = (torch.ones(1, 1, 1), torch.zeros(1, 1), None)
    >>> b = (torch.zeros(1, 1, 1), torch.zeros(1, 1), None)
    >>> merge([a, b])[0].item()
    0.5
    """
    if not parts:
        raise ValueError("merge needs at least one partial result")
    lse = torch.logsumexp(torch.stack([part[1] for part in parts]), 0)
    shift = torch.where(lse == -torch.inf, 0.0, lse)
    out = torch.zeros_like(parts[0][0])
    for part_out, part_lse, _ in parts:
        out = out + part_out * torch.exp(part_lse - shift)[..., None].to(part_out.dtype)
    tops = [part[2] for part in parts if part[2] is not None]
    if tops and len(tops) < len(parts):
        raise ValueError("some partial results carry max_logits and some do not")
    return out, lse, torch.stack(tops).amax(0) if tops else None


def softmax(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    band: tuple[int, int] | None = None,
    uniform: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities (b, h, sq, sk), max_logits (h,)) of dense scores, step by step in `dtype`.

    mask: integers hide where nonzero, floating point is added. Row i sees columns with
    band[0] <= j - i <= band[1]. Rows that see nothing become 0, or 1 / sk if `uniform`.
    """
    h, sq, sk = x.shape[1:]
    raw = x.to(dtype) * scale
    logits = softcap * torch.tanh(raw / softcap) if softcap else raw
    hidden = torch.zeros(1, 1, sq, sk, dtype=torch.bool, device=x.device)
    if band is not None:
        distance = torch.arange(sk, device=x.device) - torch.arange(sq, device=x.device)[:, None]
        hidden = hidden | (distance < band[0]) | (distance > band[1])
    if mask is not None and mask.is_floating_point():
        raw, logits = raw + mask.to(dtype), logits + mask.to(dtype)
    elif mask is not None:
        hidden = hidden | (mask != 0)
    raw, logits = raw.masked_fill(hidden, -torch.inf), logits.masked_fill(hidden, -torch.inf)
    top = raw.detach().amax((0, 2, 3)) if raw.numel() else raw.new_full((h,), -torch.inf)
    if sink is not None:
        column = sink.to(dtype).view(1, h, 1, 1).expand(*x.shape[:3], 1)
        return torch.softmax(torch.cat([logits, column], 3), 3)[..., :sk], top
    empty = (logits == -torch.inf).all(3, keepdim=True)
    prob = torch.softmax(logits.masked_fill(empty, 0.0), 3)
    return prob.masked_fill(empty, 1.0 / max(sk, 1) if uniform else 0.0), top
