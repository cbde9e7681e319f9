"""Argument checks of the public calls: what came, what was expected, what to do."""

from __future__ import annotations

import math

import torch

from keel.meta import Scoring
from keel.ops import num_sms

MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q (tq, hq, d), k (tk, hk, d), v (tk, hk, dv) of one dtype and device, hq % hk == 0."""
    for name, x, shape in (("q", q, "tq, hq, d"), ("k", k, "tk, hk, d"), ("v", v, "tk, hk, dv")):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.ndim != 3:
            raise ValueError(
                f"{name} must have shape ({shape}), got {tuple(x.shape)}; "
                "flatten a batch into tokens and give each sample its own slice"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q, k and v must be bf16, fp16, fp32 or fp64, got {q.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}"
        )
    (_, hq, d), (tk, hk, dk), (tv, hv, dv) = q.shape, k.shape, v.shape
    if d != dk:
        raise ValueError(f"q and k must have one head_dim, got {d} and {dk}")
    if (tk, hk) != (tv, hv):
        raise ValueError(
            f"k and v must have the same tokens and heads, got {(tk, hk)} and {(tv, hv)}"
        )
    if hk == 0 or hq == 0 or hq % hk:
        raise ValueError(f"query heads must be a multiple of key heads, got hq={hq}, hk={hk}")
    for name, dim in (("q and k", d), ("v", dv)):
        if not 0 < dim <= MAX_HEAD_DIM or dim % 8:
            mend = "; pad the last dim with zeros" if 0 < dim < MAX_HEAD_DIM else ""
            raise ValueError(
                f"head_dim of {name} must be a multiple of 8 up to {MAX_HEAD_DIM}, got {dim}{mend}"
            )


def check_scoring(scoring: Scoring, q: torch.Tensor, tk: int) -> None:
    """Scale, softcap, sink, bias and ALiBi against the shapes of q."""
    tq, hq, _ = q.shape
    # Comparisons, not math.isfinite: they are False for NaN too, and a trace can follow them.
    if not abs(scoring.scale) < math.inf:
        raise ValueError(f"softmax_scale must be finite, got {scoring.scale}")
    if not 0 <= scoring.softcap < math.inf:
        raise ValueError(f"softcap must be 0 (off) or positive, got {scoring.softcap}")
    for name, given in (
        *(("sink", scoring.sink), ("bias", scoring.bias)),
        *(("alibi_slopes", scoring.alibi_slopes), ("alibi_offset", scoring.alibi_offset)),
    ):
        if given is not None and not isinstance(given, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(given).__name__}")
    for name, x, shape in (
        ("sink", scoring.sink, (hq,)),
        ("alibi_slopes", scoring.alibi_slopes, (hq,)),
        ("alibi_offset", scoring.alibi_offset, (tq,)),
    ):
        if x is None:
            continue
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {x.device}")
    if scoring.sink is not None and not scoring.sink.is_floating_point():
        raise ValueError(f"sink must be floating point, got {scoring.sink.dtype}")
    if scoring.alibi_slopes is not None and scoring.alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes have no gradient here: pass them detached, or use bias")
    bias = scoring.bias
    if bias is not None:
        fits = bias.ndim == 3 and all(
            b in (1, n) for b, n in zip(bias.shape, (hq, tq, tk), strict=True)
        )
        if not fits:
            raise ValueError(
                f"bias must be broadcastable to (hq, tq, tk) = {(hq, tq, tk)} with three dims, "
                f"got {tuple(bias.shape)}"
            )
        if not bias.is_floating_point():
            raise ValueError(
                f"bias must be floating point, got {bias.dtype}; a bool mask becomes slices with "
                "keel.masks.from_dense"
            )
        if bias.device != q.device:
            raise ValueError(f"bias must be on {q.device} like q, got {bias.device}")


def check_sm_margin(sm_margin: int, device: torch.device) -> None:
    """0 <= margin < SMs; where there are no SMs, any margin >= 0 is without effect."""
    if not isinstance(sm_margin, int) or isinstance(sm_margin, bool):
        raise TypeError(f"sm_margin must be an int, got {sm_margin!r}")
    limit = num_sms(device)
    if sm_margin < 0 or (limit is not None and sm_margin >= limit):
        most = "" if limit is None else f" and less than the {limit} SMs of {device}"
        raise ValueError(f"sm_margin must be at least 0{most}, got {sm_margin}")


def check_max_logits_out(buffer: torch.Tensor, q: torch.Tensor) -> None:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if tuple(buffer.shape) != (q.shape[1],) or buffer.dtype != wide or buffer.device != q.device:
        raise ValueError(
            f"max_logits_out must be {wide} of shape ({q.shape[1]},) on {q.device}, got "
            f"{buffer.dtype} {tuple(buffer.shape)} on {buffer.device}"
        )
    if buffer.requires_grad:
        raise ValueError("max_logits_out requires grad, but maxima have none: pass it detached")
