"""Attention on one device: any mask, with lse and max logits; and FlashAttention's signatures."""

from __future__ import annotations

import functools
from types import NoneType
from typing import Any

import torch

from keel import masks
from keel._versions import constant_in_traces, runs_plainly
from keel.checks import check_max_logits_out, check_qkv, check_scoring, check_sm_margin
from keel.direct import DirectCall, call_key, known_call, recognise, remember, repeated
from keel.masks import AttnMask
from keel.masks.inputs import mask_of_tensors, remembered, tensors_of_mask
from keel.masks.intervals import UNBOUNDED
from keel.masks.mask import MAX_TOKENS, RangesLike, TypesLike
from keel.meta import AttnForwardMeta, Scoring
from keel.ops import attention, choose_attention_backend, in_a_row, settled_backend


def flex_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_ranges: RangesLike | AttnMask,
    k_ranges: RangesLike | None = None,
    attn_type_map: TypesLike = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    return_max_logits: bool = False,
    max_logits_out: torch.Tensor | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    backend: str = "auto",
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Attention over the union of (q_range, k_range, type) slices.

    Args:
        q: (tq, hq, d) bf16, fp16, fp32 or fp64 (fp64 on the blocked and reference backends).
        k: (tk, hk, d) with hq % hk == 0.
        v: (tk, hk, dv).
        q_ranges: (n, 2) int32/int64 tensor on any device, AttnRanges or list of pairs [start, end);
            or a ready `AttnMask` in place of ranges and types.
        k_ranges: (n, 2), likewise.
        attn_type_map: (n,) codes 0 full, 1 causal, 2 inverse-causal, 3 bi-causal; one type for
            all; None: all full.
        softmax_scale: default 1 / sqrt(d); may be negative.
        softcap: c > 0 bends logits to c * tanh(s / c).
        sink: (hq,) learnable logits that join every row's softmax without a value.
        bias: floating point, broadcastable to (hq, tq, tk), added to the logits before the
            softcap; gets a gradient if it requires one.
        alibi_slopes: (hq,) adds -slope * abs(i + tk - tq - j), before the softcap.
        return_max_logits: fill `meta.max_logits`.
        max_logits_out: (hq,) fp32 (fp64 for fp64 inputs) running maximum, raised in place;
            implies return_max_logits, and `meta.max_logits` is this buffer.
        deterministic: bitwise repeatable gradients. A broadcast bias has to pay for it, and so do
            Hopper GPUs, whose own backward adds dq up in any order: dq is made apart then.
        sm_margin: SMs left free for other kernels, 0 <= sm_margin < SMs.
        backend: "auto", "hopper", "triton", "blocked" or "reference"; an explicit one never falls
            back, but for backwards that "hopper" has not, which are the portable ones.

    Returns:
        out (tq, hq, dv) in q's dtype, and `AttnForwardMeta` with lse (tq, hq) and max_logits (hq,).

    >>> import torch
    >>> q, k, v = torch.randn(3, 6, 2, 8)
    >>> out, meta = flex_flash_attn_func(
    ...     q, k, v, [[0, 4], [4, 6]], [[0, 4], [4, 6]], [1, 0], return_max_logits=True)
    >>> bool(torch.allclose(out[0], v[0])), tuple(meta.lse.shape), tuple(meta.max_logits.shape)
    (True, (6, 2), (2,))
    """
    mask: AttnMask | list[torch.Tensor]
    if isinstance(q_ranges, AttnMask) and k_ranges is None and attn_type_map is None:
        mask = q_ranges
    else:
        check_qkv(q, k, v)
        mask = _mask_tensors(q_ranges, k_ranges, attn_type_map, q.shape[0], k.shape[0])
    # fmt: off
    return _attend(  # no stars here: they would take longer than the call
        q, k, v, mask, softmax_scale, softcap, sink, bias, alibi_slopes, None,
        return_max_logits, max_logits_out, deterministic, sm_margin, backend,
    )
    # fmt: on


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_max_logits: bool = False,
    backend: str = "auto",
) -> Any:
    """FlashAttention's batched call: q (b, sq, hq, d), k (b, sk, hk, d), v (b, sk, hk, dv).

    Returns out; or (out, lse (b, hq, sq), None) with `return_attn_probs`, as FlashAttention does
    without dropout; `return_max_logits` appends max_logits (hq,), the maximum over the batch.

    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 5, 4, 8)
    >>> out, top = flash_attn_func(q, k, v, causal=True, return_max_logits=True)
    >>> tuple(out.shape), tuple(top.shape)
    ((2, 5, 4, 8), (4,))
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape (b, s, h, d), got {tuple(x.shape)}")
    batch, sq, sk = q.shape[0], q.shape[1], k.shape[1]
    if k.shape[0] != batch or v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"q, k and v disagree: batches {batch}, {k.shape[0]}, {v.shape[0]}, "
            f"key lengths {sk}, {v.shape[1]}"
        )
    tokens = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    check_qkv(*tokens)
    _refuse(dropout_p, softcap, alibi_slopes)
    window = _window(causal, window_size)
    mask = _batch_mask(batch, sq, sk, window)
    offset = None
    if alibi_slopes is not None:
        sample = torch.arange(batch, device=q.device, dtype=torch.int32)
        offset = ((sample + 1) * (sk - sq)).repeat_interleave(sq)
    out, meta = _attend(
        *(*tokens, mask, softmax_scale, softcap, None, None, alibi_slopes, offset),
        *(return_max_logits, None, deterministic, 0, backend),
    )
    lse = meta.lse.unflatten(0, (batch, sq)).transpose(1, 2)
    return _flash_results(
        out.unflatten(0, (batch, sq)), lse, meta, return_attn_probs, return_max_logits
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
    *,
    return_max_logits: bool = False,
    backend: str = "auto",
) -> Any:
    """FlashAttention's packed call: q (tq, hq, d), documents by cu_seqlens (n + 1,) int32/int64.

    Returns as `flash_attn_func`, with lse (hq, tq). The lengths come from cu_seqlens; the two
    max_seqlen are accepted and not needed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 7, 2, 8)
    >>> cu = torch.tensor([0, 3, 7])
    >>> out = flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, causal=True)
    >>> bool(torch.allclose(out[3], v[3]))
    True
    """
    check_qkv(q, k, v)
    _refuse(dropout_p, softcap, alibi_slopes)
    if block_table is not None:
        raise ValueError("block_table (paged keys) serves inference and is not supported")
    window = _window(causal, window_size)
    tq, tk = q.shape[0], k.shape[0]
    mask = _documents_mask(cu_seqlens_q, cu_seqlens_k, window, tq, tk)
    offset = None
    if alibi_slopes is not None and len(cu_seqlens_q) > 1:
        row = torch.arange(tq, device=q.device, dtype=cu_seqlens_q.dtype)
        document = torch.searchsorted(cu_seqlens_q[1:].to(q.device).contiguous(), row, right=True)
        shift = (cu_seqlens_k[1:] - cu_seqlens_q[1:]).to(q.device, torch.int32)
        offset = shift[document.clamp(max=len(shift) - 1)]
    out, meta = _attend(
        *(q, k, v, mask, softmax_scale, softcap, None, None, alibi_slopes, offset),
        *(return_max_logits, None, deterministic, 0, backend),
    )
    return _flash_results(out, meta.lse.T, meta, return_attn_probs, return_max_logits)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask | list[torch.Tensor],
    softmax_scale: float | None,
    softcap: float,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    alibi_offset: torch.Tensor | None,
    return_max_logits: bool,
    max_logits_out: torch.Tensor | None,
    deterministic: bool,
    sm_margin: int,
    backend: str,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """The common way of all public calls: known ones at once, others checked.

    mask: tensors as operators take them, for q and k that have been checked; or one that is ready.
    """
    # what keys and kernels see is what counts, not the object that came
    return_max_logits, deterministic = bool(return_max_logits), bool(deterministic)
    numbers = (softmax_scale, softcap, return_max_logits, deterministic)
    options = (*numbers, backend, sm_margin, type(sm_margin))
    alone = sink is bias is alibi_slopes is alibi_offset is max_logits_out is None
    if alone and isinstance(mask, AttnMask):
        results = repeated(q, k, v, mask, options)
        if results is not None:
            out, lse, max_logits = results
            return out, AttnForwardMeta(lse, max_logits)
    others = (in_a_row(sink), bias, in_a_row(alibi_slopes), in_a_row(alibi_offset))
    tensors = (*others, max_logits_out)
    plain = runs_plainly(q, k, v, *[x for x in tensors if x is not None])
    key = None
    if plain:
        if not isinstance(mask, AttnMask):
            mask = mask_of_tensors(mask, q.shape[0], k.shape[0])
        key = call_key(q, k, v, mask, tensors, options)
        call = known_call(key)
        if call is not None:
            if alone:
                recognise(q, k, v, mask, options, call)
            out, lse, max_logits = call(q, k, v, *others, running=max_logits_out)
            return out, AttnForwardMeta(lse, max_logits)
    check_qkv(q, k, v)
    if isinstance(mask, AttnMask):
        _check_mask_shape(mask, q, k)
    scoring = Scoring(
        scale=q.shape[2] ** -0.5 if softmax_scale is None else float(softmax_scale),
        softcap=float(softcap),
        sink=others[0],
        bias=bias,
        alibi_slopes=others[2],
        alibi_offset=others[3],
    )
    check_scoring(scoring, q, k.shape[0])
    check_sm_margin(sm_margin, q.device)
    if max_logits_out is not None:
        check_max_logits_out(max_logits_out, q)
    given = (q, k, v)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in given)
    chosen = choose_attention_backend(backend, q, k, v, scoring)
    direct = plain and chosen != "reference"
    if direct and (max_logits_out is None or max_logits_out.is_contiguous()):
        assert isinstance(mask, AttnMask)
        call = DirectCall(
            *(q, v, mask, scoring),
            want_max=return_max_logits or max_logits_out is not None,
            deterministic=deterministic,
            sm_margin=sm_margin,
            backend=settled_backend(chosen, q, k, v, scoring),
            backward_backend=chosen,
        )
        out, lse, max_logits = call(q, k, v, *others, running=max_logits_out)
        is_simple = isinstance(softmax_scale, (float, int, NoneType)) and isinstance(
            softcap, (float, int)
        )  # a tensor would be known by its identity, whatever becomes of its value
        if is_simple and q is given[0] and k is given[1] and v is given[2]:
            remember(key, call)
        return out, AttnForwardMeta(lse, max_logits)
    out, lse, max_logits = attention(
        *(q, k, v, _operator_inputs(mask), scoring),
        want_max=return_max_logits,
        max_logits_out=max_logits_out,
        deterministic=deterministic,
        sm_margin=sm_margin,
        backend=chosen,
    )
    return out, AttnForwardMeta(lse, max_logits)


def _check_mask_shape(mask: AttnMask, q: torch.Tensor, k: torch.Tensor) -> None:
    if mask.shape != (q.shape[0], k.shape[0]):
        raise ValueError(
            f"the mask is for (tq, tk) = {mask.shape}, but q and k have "
            f"{(q.shape[0], k.shape[0])} tokens"
        )


def _operator_inputs(mask: AttnMask | list[torch.Tensor]) -> list[torch.Tensor]:
    if not isinstance(mask, AttnMask):
        return mask
    return [mask.tensor] if torch.compiler.is_compiling() else tensors_of_mask(mask)


def _mask_tensors(
    q_ranges: RangesLike | AttnMask,
    k_ranges: RangesLike | None,
    types: TypesLike,
    tq: int,
    tk: int,
) -> list[torch.Tensor]:
    """Ranges and types as operator inputs, validated now unless they are being traced."""
    if isinstance(q_ranges, AttnMask):
        raise ValueError("a ready AttnMask replaces k_ranges and attn_type_map: pass it alone")
    if k_ranges is None and torch.compiler.is_compiling() and isinstance(q_ranges, torch.Tensor):
        return [q_ranges]  # from traced_documents
    if k_ranges is None:
        raise ValueError("k_ranges is missing: pass q_ranges and k_ranges, or an AttnMask")
    all_tensors = isinstance(q_ranges, torch.Tensor) and isinstance(k_ranges, torch.Tensor)
    if all_tensors and (types is None or isinstance(types, torch.Tensor)):
        if types is None:
            types = _full_types(q_ranges)  # type: ignore[arg-type]
        tensors = [q_ranges, k_ranges, types]
        if not torch.compiler.is_compiling():
            mask_of_tensors(tensors, tq, tk)  # type: ignore[arg-type]
        return tensors  # type: ignore[return-value]
    if torch.compiler.is_compiling():  # token counts may be symbolic: the operator checks them
        return [_constant_slices(q_ranges, k_ranges, types)]
    return tensors_of_mask(AttnMask.from_ranges(q_ranges, k_ranges, types, tq, tk))


@constant_in_traces
def _constant_slices(q_ranges: RangesLike, k_ranges: RangesLike, types: TypesLike) -> torch.Tensor:
    """The slices of a mask from Python values, which a trace keeps as a constant."""
    return AttnMask.from_ranges(q_ranges, k_ranges, types, MAX_TOKENS, MAX_TOKENS).tensor


_no_types: dict[int, torch.Tensor] = {}


def _full_types(q_ranges: torch.Tensor) -> torch.Tensor:
    """(n,) zeros, the same object for each n, so that remembered masks are found again."""
    count = q_ranges.shape[0] if q_ranges.ndim else 0  # validation comes later
    if torch.compiler.is_compiling():
        return torch.zeros(count, dtype=torch.int32)
    if count not in _no_types:
        with torch.inference_mode(False):  # kept: must serve evaluation and training alike
            _no_types[count] = torch.zeros(count, dtype=torch.int32, device="cpu")
    return _no_types[count]


def _batch_mask(
    batch: int, sq: int, sk: int, window: tuple[int, int]
) -> AttnMask | list[torch.Tensor]:
    """A batch of equal samples, one after the other."""
    if torch.compiler.is_compiling():  # sizes may be symbolic
        sample = torch.arange(batch + 1, device="cpu")
        return [traced_documents(sample * sq, sample * sk, window)]
    return _batch_documents(batch, sq, sk, window)


@functools.lru_cache(maxsize=64)
def _batch_documents(batch: int, sq: int, sk: int, window: tuple[int, int]) -> AttnMask:
    bounds_q, bounds_k = ([n * length for n in range(batch + 1)] for length in (sq, sk))
    return masks.documents(bounds_q, bounds_k, window=window)


def _documents_mask(
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    window: tuple[int, int],
    tq: int,
    tk: int,
) -> AttnMask | list[torch.Tensor]:
    """Documents; in a trace as operator inputs."""
    if torch.compiler.is_compiling():
        return [traced_documents(cu_q, cu_k, window)]
    return remembered(
        (cu_q, cu_k),
        ("documents", window, tq, tk),
        lambda: masks.documents(cu_q, cu_k, window=window, tq=tq, tk=tk),
    )


def traced_documents(
    cu_q: torch.Tensor, cu_k: torch.Tensor, window: tuple[int, int]
) -> torch.Tensor:
    """The slices of documents computed by torch, for a trace that does not know the bounds."""
    q, k = cu_q.long(), cu_k.long()
    left, right = (UNBOUNDED if side < 0 else side for side in window)
    align = k[1:] - q[1:]
    lo = align - left if window[0] >= 0 else torch.full_like(align, -UNBOUNDED)
    hi = align + right if window[1] >= 0 else torch.full_like(align, UNBOUNDED)
    return torch.stack([q[:-1], q[1:], k[:-1], k[1:], lo, hi], 1)


def _refuse(dropout_p: float, softcap: float, alibi_slopes: torch.Tensor | None) -> None:
    if dropout_p:
        raise ValueError(
            f"dropout_p={dropout_p}: attention dropout is not supported; pass 0.0 (and in "
            "evaluation it must be 0.0 anyway)"
        )
    if softcap and alibi_slopes is not None:
        raise ValueError(
            "FlashAttention adds ALiBi after the softcap, Keel before it: to have Keel's order "
            "call flex_flash_attn_func, or pass only one of the two"
        )
    if alibi_slopes is not None and alibi_slopes.ndim != 1:
        raise ValueError(
            f"alibi_slopes must have shape (hq,), got {tuple(alibi_slopes.shape)}; for slopes "
            "that differ by sample call once per sample"
        )


def _window(causal: bool, window_size: tuple[int | None, int | None]) -> tuple[int, int]:
    """(left, right) with -1 for unbounded; causal means that nothing to the right is seen."""
    left, right = (-1 if side is None else int(side) for side in window_size)
    if left < -1 or right < -1:
        raise ValueError(f"window_size must be (left, right) with -1 for unbounded: {window_size}")
    return left, 0 if causal else right


def _flash_results(
    out: torch.Tensor,
    lse: torch.Tensor,
    meta: AttnForwardMeta,
    return_attn_probs: bool,
    return_max_logits: bool,
) -> Any:
    results: tuple[Any, ...] = (out, lse, None) if return_attn_probs else (out,)
    if return_max_logits:
        results += (meta.max_logits,)
    return results if len(results) > 1 else out


def warmup(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    backward: bool = True,
    return_max_logits: bool = True,
    **options: Any,
) -> None:
    """Compiles the kernels of one attention shape, so that the first training step does not.

    `options` are those of `flex_flash_attn_func` (softcap, sink, bias, ...): each combination is
    its own kernel. Results stay in Triton's cache on disk for later processes.

    >>> warmup(2, 1, 16, device="cpu", dtype=torch.float32)
    """
    where = torch.device(device)
    # Kernels choose tiles by how wide rows are, parts by how many tiles, and heads that share one
    # by how few rows: masks of each sort. Tiles of the last one have two blocks of keys, and are
    # never cut.
    short = masks.documents(range(0, 1025, 256))
    wide = (masks.full(64, 4096), masks.full(128, 4096))
    given = [masks.causal(64), *wide, masks.causal(1001), short]
    if backward and where.type == "cuda" and torch.cuda.get_device_capability(where) == (9, 0):
        from keel.kernels.hopper_bwd_launch import mask_of_turns

        long = mask_of_turns(num_heads, num_kv_heads, head_dim, head_dim_v or head_dim, where)
        given += [] if long is None else [long]
    for mask in given:
        q, k, v = (
            torch.randn(tokens, heads, dim, dtype=dtype, device=where, requires_grad=backward)
            for tokens, heads, dim in (
                (mask.tq, num_heads, head_dim),
                (mask.tk, num_kv_heads, head_dim),
                (mask.tk, num_kv_heads, head_dim_v or head_dim),
            )
        )
        out, _ = flex_flash_attn_func(q, k, v, mask, return_max_logits=return_max_logits, **options)
        if backward:
            out.sum().backward()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
