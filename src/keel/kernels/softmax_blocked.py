"""The fused softmax in plain torch: any device, fp64 capable, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK_ELEMENTS = 1 << 22
"""Scores worked on at a time, to bound memory."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    *,
    scale: float,
    softcap: float,
    band: tuple[int, int],
    uniform: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y in x's dtype, lse (b, h, sq), max_logits (h,)); arguments as in the Triton kernels."""
    b, h, sq, sk = x.shape
    wide = wide_dtype(x.dtype)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    lse = torch.full((b, h, sq), -torch.inf, dtype=wide, device=x.device)
    top = torch.full((h,), -torch.inf, dtype=wide, device=x.device)
    for rows in _blocks(x) if x.numel() else ():
        raw = x[:, :, rows].to(wide) * scale
        logits = softcap * torch.tanh(raw / softcap) if softcap else raw
        seen = _seen(rows, sk, band, x.device)
        if mask is not None:
            part = mask[:, :, rows]
            if mask.is_floating_point():
                raw, logits = raw + part, logits + part
            else:
                seen = seen & (part == 0)
        raw = raw.masked_fill(~seen, -torch.inf)
        logits = logits.masked_fill(~seen, -torch.inf)
        top = torch.maximum(top, raw.amax((0, 2, 3)))
        # Large logits lose their last bits in lse: probabilities come from differences instead.
        high = logits.amax(3)
        if sink is not None:
            high = torch.maximum(high, sink.to(wide).view(1, h, 1))
        shift = torch.where(high == -torch.inf, 0.0, high)
        weight = torch.exp(logits - shift[..., None])
        total = weight.sum(3)
        if sink is not None:
            total = total + torch.exp(sink.to(wide).view(1, h, 1) - shift)
        empty = total == 0
        prob = weight / torch.where(empty, 1.0, total)[..., None]
        row_lse = torch.where(empty, -torch.inf, shift + torch.log(total))
        if uniform and sink is None:
            prob = torch.where(empty[..., None], 1.0 / sk, prob)
        y[:, :, rows], lse[:, :, rows] = prob.to(x.dtype), row_lse
    return y, lse, top


def backward(
    dy: torch.Tensor,
    y: torch.Tensor,
    x: torch.Tensor | None,
    *,
    scale: float,
    softcap: float,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dot = rowsum(dy * y) (b, h, sq))."""
    wide = wide_dtype(y.dtype)
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    dot = torch.empty(y.shape[:3], dtype=wide, device=y.device)
    for rows in _blocks(y):
        prob, grad = y[:, :, rows].to(wide), dy[:, :, rows].to(wide)
        if lse is not None:  # rows that saw nothing: whatever their output, no input made it
            prob = torch.where((lse[:, :, rows] == -torch.inf)[..., None], 0.0, prob)
        grad = torch.where(prob == 0, 0.0, grad)  # where y is 0, dy may be anything
        row_dot = (grad * prob).sum(3)
        part = prob * (grad - row_dot[..., None]) * scale
        if softcap:
            assert x is not None
            bent = torch.tanh(x[:, :, rows].to(wide) * (scale / softcap))
            part = torch.where(prob == 0, 0.0, part * (1 - bent * bent))
        dx[:, :, rows], dot[:, :, rows] = part.to(dx.dtype), row_dot
    return dx, dot


def _blocks(x: torch.Tensor) -> Iterator[slice]:
    b, h, sq, sk = x.shape
    step = max(1, BLOCK_ELEMENTS // max(1, b * h * sk))
    for start in range(0, sq, step):
        yield slice(start, min(start + step, sq))


def _seen(rows: slice, sk: int, band: tuple[int, int], device: torch.device) -> torch.Tensor:
    """(rows, sk): the columns inside the band."""
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    distance = torch.arange(sk, device=device) - row
    return (distance >= band[0]) & (distance <= band[1])
