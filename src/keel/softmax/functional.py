"""`scaled_masked_softmax`: probabilities from scores, for paths that need them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from keel.masks.intervals import UNBOUNDED
from keel.ops import choose_backend, explain_backend
from keel.softmax.ops import softmax

Causal = bool | Literal["top-left", "bottom-right"]
Window = tuple[int | None, int | None]
FullyMasked = Literal["zeros", "uniform"]


def scaled_masked_softmax(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | torch.Tensor = 1.0,
    causal: Causal = False,
    window: Window | None = None,
    sink: torch.Tensor | float | None = None,
    softcap: float = 0.0,
    fully_masked: FullyMasked = "zeros",
    return_max_logits: bool = False,
    backend: str = "auto",
) -> Any:
    """softmax(softcap(scale * x) + mask) over the last dim, in one kernel.

    Whatever hides a column hides it: mask, causal and window compose, none replaces another.

    Args:
        x: (b, h, sq, sk), (h, sq, sk) or (sq, sk); bf16, fp16, fp32, fp64 (on the CPU path).
        mask: bool or uint8, nonzero hides; or floating point, added to the logits. Broadcastable
            to x in every dim. It gets no gradient.
        scale: a number, or a tensor with one element; kept in fp32.
        causal: False; True or "bottom-right": row i sees j <= i + sk - sq; "top-left": j <= i.
        window: (left, right): row i sees i + sk - sq - left <= j <= i + sk - sq + right; None or
            -1 leaves a side open.
        sink: (h,) logits, or one number, that join each row's sum without a column of their own;
            0.0 is softmax off by one. A tensor gets a gradient.
        softcap: c > 0 bends scale * x to c * tanh(scale * x / c).
        fully_masked: what a row that sees nothing becomes: "zeros", or "uniform" 1 / sk as
            torch.softmax makes of equal large negative numbers (only without a sink).
        return_max_logits: also return (h,) fp32, the largest scale * x + mask of each head that
            was seen, before the softcap; -inf where nothing was.
        backend: "auto", "triton" or "blocked"; see `explain`.

    Returns:
        probabilities in the shape and dtype of x; or (probabilities, max_logits).

    >>> import torch
    >>> scaled_masked_softmax(torch.zeros(2, 2), causal=True).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    x4 = _as_four_dims(x)
    sq, sk = x4.shape[2:]
    factor = _number(scale, "scale")
    if not math.isfinite(factor):
        raise ValueError(f"scale must be finite, got {factor}")
    cap = _number(softcap, "softcap")
    if not (math.isfinite(cap) and cap >= 0):
        raise ValueError(f"softcap must be 0 (none) or positive and finite, got {softcap}")
    if fully_masked not in ("zeros", "uniform"):
        raise ValueError(f"fully_masked must be 'zeros' or 'uniform', got {fully_masked!r}")
    y, top = softmax(
        x4 if x4.stride(3) == 1 or sk <= 1 else x4.contiguous(),
        _checked_mask(mask, x, x4),
        _checked_sink(sink, x4),
        scale=factor,
        softcap=cap,
        band=_band(causal, window, sq, sk),
        uniform=fully_masked == "uniform",
        want_max=return_max_logits,
        backend=_softmax_backend(backend, x),
    )
    y = y.view(x.shape)
    return (y, top) if return_max_logits else y


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which path runs, why, and what it costs in memory traffic."""

    backend: str
    why: str
    bytes_forward: int
    bytes_backward: int

    def __str__(self) -> str:
        return (
            f"backend {self.backend!r} ({self.why}); at least {self.bytes_forward / 1e6:.1f} MB "
            f"forward, {self.bytes_backward / 1e6:.1f} MB backward"
        )


def explain(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: Causal = False,
    window: Window | None = None,
    softcap: float = 0.0,
    backend: str = "auto",
) -> Explanation:
    """Says which path `scaled_masked_softmax` takes for these arguments, without running it.

    Bytes count what must move: columns inside the band are read, all are written. Rows of more than
    8,192 columns may be read twice.
    """
    x4 = _as_four_dims(x)
    b, h, sq, sk = x4.shape
    chosen = _softmax_backend(backend, x)
    why = explain_backend(x.device, x.dtype)[1] if backend == "auto" else "asked for"
    lo, hi = _band(causal, window, sq, sk)
    seen = sum(max(0, min(sk, i + hi + 1) - max(0, i + lo)) for i in range(sq)) * b * h
    size, written = x.element_size(), x4.numel()
    extra = 0 if mask is None else mask.numel() * mask.element_size()
    return Explanation(
        chosen,
        why,
        (seen + written) * size + extra,
        ((3 if softcap else 2) * seen + written) * size,
    )


def _softmax_backend(backend: str, x: torch.Tensor) -> str:
    if backend not in ("auto", "triton", "blocked"):
        raise ValueError(
            f"unknown backend {backend!r}: the softmax has 'auto', 'triton' and 'blocked'"
        )
    return choose_backend(backend, x.device, x.dtype)


def _as_four_dims(x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise ValueError(f"x must be floating point, got {x.dtype}")
    if not 2 <= x.ndim <= 4:
        raise ValueError(
            f"x must be (b, h, sq, sk), (h, sq, sk) or (sq, sk), got shape {tuple(x.shape)}"
        )
    return x[(None,) * (4 - x.ndim)]


def _number(value: float | torch.Tensor, name: str) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")
    return float(value)


def _checked_mask(
    mask: torch.Tensor | None, x: torch.Tensor, x4: torch.Tensor
) -> torch.Tensor | None:
    """The mask as four dims of x's sizes, broadcast ones with stride 0."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"mask must be a tensor or None, got {type(mask).__name__}")
    if mask.device != x.device:
        raise ValueError(f"mask must be on {x.device} like x, got {mask.device}")
    if mask.requires_grad:
        raise ValueError(
            "mask requires grad, but masks get none here: add a learnable bias to x, or detach it"
        )
    if mask.dtype not in (torch.bool, torch.uint8) and not mask.is_floating_point():
        raise ValueError(
            "mask must be bool or uint8 (nonzero hides) or floating point (added), "
            f"got {mask.dtype}"
        )
    fits = mask.ndim <= x.ndim and all(
        m in (1, n) for m, n in zip(reversed(mask.shape), reversed(x.shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} cannot be broadcast to x of shape "
            f"{tuple(x.shape)}: each dim, counted from the last, must be 1 or equal"
        )
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    return mask.expand(x4.shape)


def _checked_sink(sink: torch.Tensor | float | None, x4: torch.Tensor) -> torch.Tensor | None:
    heads = x4.shape[1]
    if sink is None:
        return None
    if not isinstance(sink, torch.Tensor):
        return torch.full((heads,), float(sink), dtype=torch.float32, device=x4.device)
    if tuple(sink.shape) != (heads,) or not sink.is_floating_point() or sink.device != x4.device:
        raise ValueError(
            f"sink must be floating point of shape ({heads},), one logit per head, on {x4.device}; "
            f"got {sink.dtype} {tuple(sink.shape)} on {sink.device}"
        )
    return sink.contiguous()


def _band(causal: Causal, window: Window | None, sq: int, sk: int) -> tuple[int, int]:
    """(lo, hi): row i sees columns with lo <= j - i <= hi."""
    lo, hi = -UNBOUNDED, UNBOUNDED
    if causal not in (False, True, "top-left", "bottom-right"):
        raise ValueError(f"causal must be a bool, 'top-left' or 'bottom-right', got {causal!r}")
    if causal:
        hi = 0 if causal == "top-left" else sk - sq
    if window is not None:
        try:
            left, right = (-1 if side is None else int(side) for side in window)
        except (TypeError, ValueError):
            raise ValueError(f"window must be (left, right), got {window!r}") from None
        if left < -1 or right < -1:
            raise ValueError(
                "window must be (left, right), each at least 0, or -1 / None for open; "
                f"got {window}"
            )
        lo = lo if left < 0 else max(lo, sk - sq - left)
        hi = hi if right < 0 else min(hi, sk - sq + right)
    if sq and sk and lo > hi:
        raise ValueError(
            f"causal={causal!r} and window={window} leave nothing to see at (sq, sk) = {(sq, sk)}"
        )
    return lo, hi
