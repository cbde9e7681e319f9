"""What Megatron says about masks, as slices; and which rank holds which tokens in its order.

Nothing of Megatron is imported. sq, sk: tokens of a sample; t: tokens of packed documents, over all
ranks of a context-parallel group.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from keel import masks
from keel.distributed import Layout
from keel.distributed.layout import zigzag
from keel.masks import AttnMask, AttnSlice
from keel.masks.arrays import Ints
from keel.masks.inputs import remembered

Window = tuple[int, int]
"""Tokens to the left and to the right; -1: all of them."""

CAUSAL = frozenset({"causal", "padding_causal", "causal_bottom_right"})
PADDING = frozenset({"padding", "padding_causal"})


class Tokens(NamedTuple):
    """What attends to what, and on which ranks."""

    mask: AttnMask
    layout: Layout | None
    """None: all tokens are here."""


def band_of(kind: str, window: Window | None) -> Window:
    """The window of an `AttnMaskType`'s name; a causal type closes its right side."""
    if kind == "arbitrary":
        raise ValueError(
            "attn_mask_type arbitrary leaves it to the attention_mask what is seen, which is not "
            "supported: say causal or no_mask, or pack documents with packed_seq_params"
        )
    left, right = (-1, -1) if window is None else window
    return left, 0 if kind in CAUSAL else right


def batch_tokens(kind: str, window: Window | None, sq: int, sk: int, num_ranks: int) -> Tokens:
    """Samples of a batch, which all look alike; sq and sk tokens are those of this rank."""
    if kind in PADDING:
        raise ValueError(
            f"attn_mask_type {kind} needs an attention_mask that says what is padding, which is "
            "not supported: pack documents with packed_seq_params, or say causal or no_mask"
        )
    if kind == "causal" and sq != sk and sq > 1:
        raise ValueError(
            f"attn_mask_type causal needs as many queries as keys, got {sq} and {sk}: say "
            "causal_bottom_right, by which the last query sees all keys"
        )
    return _batch_tokens(band_of(kind, window), sq, sk, num_ranks)


@functools.lru_cache(maxsize=64)
def _batch_tokens(band: Window, sq: int, sk: int, num_ranks: int) -> Tokens:
    left, right = band
    if num_ranks == 1:
        return Tokens(masks.sliding_window(sq, sk, left=left, right=right), None)
    if sq != sk or sq % 2:
        raise ValueError(
            f"context parallelism over {num_ranks} ranks gives each the same two pieces of queries "
            f"and keys, got {sq} queries and {sk} keys: use it for self-attention over sequences "
            f"whose length is a multiple of {2 * num_ranks}"
        )
    total = sq * num_ranks
    mask = masks.sliding_window(total, total, left=left, right=right)
    return Tokens(mask, zigzag(total, num_ranks))


def packed_tokens(
    packed: Any, kind: str, window: Window | None, tq: int, tk: int, num_ranks: int
) -> Tokens:
    """Packed documents that see only themselves; tq and tk tokens are those of this rank.

    Bounds are those of all ranks, as Megatron passes them. Where documents are padded, each begins
    at its padded bound; padding sees nothing and nobody sees it.
    """
    band = band_of(kind, window)
    bounds = [
        _bounds(packed, name)
        for name in ("cu_seqlens_q", "cu_seqlens_q_padded", "cu_seqlens_kv", "cu_seqlens_kv_padded")
    ]
    given = [x for x in bounds if x is not None]

    def build() -> Tokens:
        q, q_padded, k, k_padded = (None if x is None else _ints(x) for x in bounds)
        assert q is not None and k is not None
        q_starts, k_starts = (
            q if q_padded is None else q_padded,
            k if k_padded is None else k_padded,
        )
        total_q, total_k = tq * num_ranks, tk * num_ranks
        _check_documents("cu_seqlens_q", q, q_starts, total_q)
        _check_documents("cu_seqlens_kv", k, k_starts, total_k)
        if len(q) != len(k):
            raise ValueError(
                "cu_seqlens_q and cu_seqlens_kv must bound the same number of documents, got "
                f"{len(q) - 1} and {len(k) - 1}"
            )
        mask = _documents(band, kind, q, q_starts, k, k_starts, (total_q, total_k))
        if num_ranks == 1:
            return Tokens(mask, None)
        if not np.array_equal(q_starts, k_starts) or total_q != total_k:
            raise ValueError(
                "context parallelism needs queries and keys to be the same tokens, got other "
                "bounds for cu_seqlens_q than for cu_seqlens_kv"
            )
        return Tokens(mask, _document_layout(q_starts, total_q, num_ranks))

    which = tuple(x is not None for x in bounds)
    return remembered(given, ("megatron", *which, kind, band, tq, tk, num_ranks), build)


def _documents(
    band: Window,
    kind: str,
    q: Ints,
    q_starts: Ints,
    k: Ints,
    k_starts: Ints,
    shape: tuple[int, int],
) -> AttnMask:
    left, right = band
    slices = []
    lengths = zip(np.diff(q).tolist(), np.diff(k).tolist(), strict=True)
    for n, (sq, sk) in enumerate(lengths):
        if kind in ("causal", "padding_causal") and sq != sk and sq > 1:
            raise ValueError(
                f"attn_mask_type {kind} needs as many queries as keys, got {sq} and {sk} in "
                f"document {n}: say causal_bottom_right, by which the last query sees all keys"
            )
        q0, k0 = int(q_starts[n]), int(k_starts[n])
        diagonal = k0 + sk - q0 - sq
        lo = None if left < 0 else diagonal - left
        hi = None if right < 0 else diagonal + right
        if sq and sk:
            slices.append(AttnSlice(q0, q0 + sq, k0, k0 + sk, lo, hi))
    return AttnMask(slices, *shape)


def _document_layout(starts: Ints, total: int, num_ranks: int) -> Layout:
    """Each document zigzag over the ranks, as Megatron cuts them."""
    lengths = np.diff(starts)
    parts = 2 * num_ranks
    uneven = np.flatnonzero(lengths % parts)
    if len(uneven) or starts[-1] != total:
        what = (
            f"document {uneven[0]} has {lengths[uneven[0]]}"
            if len(uneven)
            else f"they have {starts[-1]} of {total}"
        )
        raise ValueError(
            f"context parallelism over {num_ranks} ranks cuts each document into {parts} equal "
            f"pieces, so documents must be padded to multiples of {parts} tokens and be all there "
            f"is (cu_seqlens_q_padded), but {what} tokens"
        )
    pieces = starts[:-1, None] + np.arange(parts) * (lengths // parts)[:, None]
    ends = pieces + (lengths // parts)[:, None]
    ranks = np.minimum(np.arange(parts), np.arange(parts)[::-1])
    owner = np.broadcast_to(ranks, pieces.shape)
    return Layout(pieces.ravel(), ends.ravel(), owner.ravel(), num_ranks)


def _bounds(packed: Any, name: str) -> torch.Tensor | None:
    bounds = getattr(packed, name, None)
    if bounds is None and name.endswith("_padded"):
        return None
    if not isinstance(bounds, torch.Tensor) or bounds.ndim != 1 or bounds.is_floating_point():
        raise ValueError(
            f"packed_seq_params.{name} must be an (n + 1,) int tensor of document bounds, "
            f"got {bounds!r}"
        )
    return bounds


def _ints(bounds: torch.Tensor) -> Ints:
    array: Ints = bounds.detach().cpu().numpy().astype(np.int64)
    return array


def _check_documents(name: str, bounds: Ints, starts: Ints, total: int) -> None:
    for which, x in ((name, bounds), (f"{name}_padded", starts)):
        if not len(x) or x[0] != 0 or (np.diff(x) < 0).any():
            raise ValueError(
                f"packed_seq_params.{which} must begin with 0 and never decrease, got {x.tolist()}"
            )
    if len(starts) != len(bounds) or (np.diff(starts) < np.diff(bounds)).any():
        raise ValueError(
            f"packed_seq_params.{name}_padded must give each document at least the room of its "
            f"tokens, got {starts.tolist()} for {bounds.tolist()}"
        )
    if starts[-1] > total:
        raise ValueError(
            f"packed_seq_params.{name} bounds {starts[-1]} tokens, but there are {total}"
        )
