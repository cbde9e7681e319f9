"""What MagiAttention's `api.functools` has: masks from documents and windows, and padding.

Nothing here needs padding; who pads all the same gets masks in which it sees nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch.nn import functional

from keel.masks import AttnMaskType, AttnRange, AttnRanges

Tensor = torch.Tensor
Ranges = tuple[AttnRanges, AttnRanges, list[AttnMaskType]]


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Tokens missing to a multiple of cp_size * chunk_size. Nothing here needs them."""
    return -total_seqlen_q % (cp_size * chunk_size)


def squash_batch_dim(x: Tensor) -> Tensor:
    """(b, s, ...) -> (b * s, ...)."""
    return x.flatten(0, 1)


def infer_varlen_mask_from_batch(
    batch_size: int, seq_len: int, device: str = "cuda"
) -> tuple[Tensor, Tensor]:
    """(cu_seqlens_q, cu_seqlens_k), int32: batch_size documents of seq_len tokens each.

    >>> infer_varlen_mask_from_batch(2, 3, device="cpu")[0].tolist()
    [0, 3, 6]
    """
    bounds = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * seq_len
    return bounds, bounds


def pad_at_dim(
    x: Tensor, dim: int, pad_size: int, value: float = 0.0, side: str = "right"
) -> Tensor:
    """x with pad_size more entries of a value in dim, behind ("right") or before ("left")."""
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', got {side!r}")
    if pad_size < 0:
        raise ValueError(f"pad_size must not be negative, got {pad_size}")
    pad = [0] * (2 * x.ndim)
    # torch counts dims from the last one, two numbers each: before and behind
    pad[2 * (x.ndim - 1 - range(x.ndim)[dim]) + (side == "right")] = pad_size
    return functional.pad(x, pad, value=value)


def unpad_at_dim(x: Tensor, dim: int, pad_size: int) -> Tensor:
    """x without its last pad_size entries in dim."""
    if not 0 <= pad_size <= x.shape[dim]:
        raise ValueError(f"cannot take {pad_size} from dim {dim} of {tuple(x.shape)}")
    return x.narrow(dim, 0, x.shape[dim] - pad_size)


def apply_padding(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: Sequence[AttnMaskType],
    total_seqlen: int,
    pad_size: int,
) -> Ranges:
    """The ranges and types with pad_size queries behind total_seqlen, which see nothing.

    >>> apply_padding(AttnRanges([(0, 4)]), AttnRanges([(0, 4)]), [AttnMaskType.CAUSAL], 4, 2)[:2]
    (AttnRanges([(0, 4), (4, 6)]), AttnRanges([(0, 4), (0, 0)]))
    """
    return (
        AttnRanges([*q_ranges, (total_seqlen, total_seqlen + pad_size)]),
        AttnRanges([*k_ranges, (0, 0)]),
        [*attn_mask_type, AttnMaskType.FULL],
    )


def infer_attn_mask_from_sliding_window(
    q_range: AttnRange, k_range: AttnRange, window_size: tuple[int, int]
) -> Ranges:
    """Query i, at p = i + len(k) - len(q), sees keys [p - left, p + right]; nothing if p < 0.

    >>> infer_attn_mask_from_sliding_window(AttnRange(0, 6), AttnRange(0, 6), (2, 0))[:2]
    (AttnRanges([(0, 2), (2, 6)]), AttnRanges([(0, 2), (0, 6)]))
    """
    return _windows([(q_range, k_range)], window_size)


def infer_attn_mask_from_cu_seqlens(
    cu_seqlens_q: Tensor | list[int],
    cu_seqlens_k: Tensor | list[int],
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    global_window_size: int = 0,
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType], int, int]:
    """(q_ranges, k_ranges, types, total_seqlen_q, total_seqlen_k) of packed documents.

    With a window, the first global_window_size keys of a document stay visible from any distance,
    but never ahead of the window.
    """
    bounds = [torch.as_tensor(x).tolist() for x in (cu_seqlens_q, cu_seqlens_k)]
    q, k = (AttnRanges.from_cu_seqlens(x) for x in bounds)
    if len(q) != len(k):
        raise ValueError(f"cu_seqlens bound {len(q)} documents of queries and {len(k)} of keys")
    made: Ranges = q, k, [AttnMaskType.CAUSAL if causal else AttnMaskType.FULL] * len(q)
    if tuple(window_size) != (-1, -1):
        if causal:
            raise ValueError(f"causal and window {window_size}: say (left, 0) without causal")
        made = _windows(zip(q, k, strict=True), window_size, global_window_size)
    return *made, bounds[0][-1], bounds[1][-1]


def _windows(
    pairs: Iterable[tuple[AttnRange, AttnRange]], window: tuple[int, int], num_global: int = 0
) -> Ranges:
    """Each document's first keys up to the right side, then the window over its other keys.

    Rows are cut where a side of the window begins or ends to move, which makes the types.
    """
    left, right = window
    if min(left, right) < -1 or num_global < 0:
        raise ValueError(f"windows must be -1 or sizes, got {window} and {num_global} global keys")
    q_ranges, k_ranges, types = AttnRanges(), AttnRanges(), []
    for q, k in pairs:
        lowest, highest, diagonal = k.start - q.end, k.end - q.start, k.end - q.end
        lo = lowest if left == -1 else max(lowest, diagonal - left)
        hi = highest if right == -1 else min(highest, diagonal + right)
        split = min(k.start + num_global, k.end)
        for k0, k1, low in ((k.start, split, lowest), (split, k.end, lo)):
            first = max(q.start, q.end - len(k), k0 - hi)
            last = min(q.end, k1 - low)
            moves, stops = k0 - low, k1 - hi  # the left side from here on, the right until here
            cuts = sorted({first, last, *(row for row in (moves, stops) if first < row < last)})
            for a, b in pairwise(cuts if k0 < k1 and first < last else []):
                q_ranges.append((a, b))
                k_ranges.append((max(k0, a + low), min(k1, b + hi)))
                types.append(AttnMaskType((a < stops) + 2 * (a >= moves)))
    return q_ranges, k_ranges, types
