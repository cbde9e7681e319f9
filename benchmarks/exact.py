"""Attention in fp64 at any length, for the heads that share one key head: what timed results are
checked against. A few hundred rows at a time, so that 64k tokens fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attention_masks import Problem

TOLERANCE = 0.02
"""Relative; right results in bf16 are at about 0.002 to 0.005."""
SCORES_AT_ONCE = 1 << 27
SEGMENTS = 16


class Exact:
    """out, dq (tokens, group, d), dk, dv (tokens, 1, d) and max_logits (group,) of one key head."""

    def __init__(
        self,
        problem: Problem,
        qkv: Sequence[torch.Tensor],
        dout: torch.Tensor | None,
        *,
        key_head: int,
        added: Callable[[slice, slice], torch.Tensor] | None = None,
    ) -> None:
        """added: from rows and keys to what these heads' logits have on top, (group, rows, keys)
        or broadcastable to it."""
        group = qkv[0].shape[1] // qkv[1].shape[1]
        self.q_heads = slice(key_head * group, (key_head + 1) * group)
        self.k_heads = slice(key_head, key_head + 1)
        q = qkv[0].detach()[:, self.q_heads].transpose(0, 1).double()
        k, v = (x.detach()[:, key_head].double() for x in qkv[1:])
        start, end = (torch.from_numpy(x).to(q.device) for x in problem.row_ranges())
        scale = q.shape[2] ** -0.5
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        out = q.new_zeros(*q.shape[:2], v.shape[1])
        top = q.new_full((group,), -torch.inf)
        step = max(1, SCORES_AT_ONCE // (group * problem.tokens))
        for first in range(0, problem.tokens, step):
            rows = slice(first, min(problem.tokens, first + step))
            keys = slice(int(start[rows].min()), int(end[rows].max()))
            place = torch.arange(keys.start, keys.stop, device=q.device)
            seen = (place >= start[rows, None]) & (place < end[rows, None])
            scores = q[:, rows] @ k[keys].T * scale
            if added is not None:
                scores += added(rows, keys)
            scores.masked_fill_(~seen, -torch.inf)
            top = torch.maximum(top, scores.amax((1, 2)))
            prob = scores.softmax(-1)
            out[:, rows] = prob @ v[keys]
            if dout is None:
                continue
            grad = dout[rows, self.q_heads].transpose(0, 1).double()
            delta = (grad * out[:, rows]).sum(-1, keepdim=True)
            dv[keys] += torch.einsum("gqk,gqd->kd", prob, grad)
            dscores = (grad @ v[keys].T).sub_(delta).mul_(prob).mul_(scale)
            dq[:, rows] = dscores @ k[keys]
            dk[keys] += torch.einsum("gqk,gqd->kd", dscores, q[:, rows])
        self.max_logits = top
        self.results = {"forward": [out.transpose(0, 1)]}
        if dout is not None:
            self.results["backward"] = [dq.transpose(0, 1), dk[:, None], dv[:, None]]

    def error(self, direction: str, got: Sequence[torch.Tensor]) -> float:
        """Of (out,) or (dq, dk, dv) of all heads."""
        heads = [self.q_heads, self.k_heads, self.k_heads]
        mine = [x[:, h] for x, h in zip(got, heads, strict=False)]
        return worst_error(mine, self.results[direction])


def worst_error(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Root mean square of the error / that of the value, worst of 16 stretches of rows.

    Stretches, since one wrong tile in a long sequence hardly moves the mean of all; the floor of
    1e-3 stands for gradients that cancel to nothing, as those of documents of one token. Infinite
    for NaN.
    """
    worst = 0.0
    for x, ref in zip(got, expected, strict=True):
        if x.shape != ref.shape:
            raise ValueError(f"a result has shape {tuple(x.shape)}, expected {tuple(ref.shape)}")
        for a, b in zip(x.detach().chunk(SEGMENTS), ref.detach().chunk(SEGMENTS), strict=True):
            a, b = a.double(), b.double()
            error = (a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-3)
            worst = max(worst, float("inf") if error.isnan() else float(error))
    return worst
