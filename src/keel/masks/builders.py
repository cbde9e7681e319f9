"""The usual masks, as slices: nothing here loops over documents or tokens in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from keel.masks.arrays import Ints, ragged_arange
from keel.masks.intervals import UNBOUNDED, row_intervals, slices_of_rows
from keel.masks.mask import AttnMask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

IntsLike = torch.Tensor | NDArray[Any] | Sequence[int]


def full(tq: int, tk: int | None = None) -> AttnMask:
    """Every query sees every key.

    >>> full(3, 5).area()
    15
    """
    return sliding_window(tq, tk, left=None, right=None)


def causal(tq: int, tk: int | None = None) -> AttnMask:
    """Causal, aligned bottom-right: the last query sees every key.

    >>> causal(2, 5).to_dense().int().tolist()
    [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    """
    return sliding_window(tq, tk, left=None, right=0)


def sliding_window(
    tq: int,
    tk: int | None = None,
    *,
    left: int | None,
    right: int | None = 0,
    sink_tokens: int = 0,
) -> AttnMask:
    """Query i, at position p = i + tk - tq, sees keys [p - left, p + right].

    None or -1 leaves a side unbounded. The first sink_tokens keys stay visible from any distance,
    but never ahead of p + right.

    >>> sliding_window(4, left=1, sink_tokens=1).to_dense().int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
    """
    tk = tq if tk is None else tk
    zero = np.zeros(1, np.int64)
    slices = _windows(zero, zero + tq, zero, zero + tk, (left, right), sink_tokens)
    return AttnMask(slices, tq, tk)


def documents(
    cu_seqlens_q: IntsLike,
    cu_seqlens_k: IntsLike | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (-1, -1),
    sink_tokens: int = 0,
    tq: int | None = None,
    tk: int | None = None,
) -> AttnMask:
    """Packed documents that see only themselves, each aligned bottom-right.

    window and sink_tokens are those of `sliding_window`, per document; causal sets its right side
    to 0. Tokens from the last cu_seqlens up to tq or tk are padding: they see nothing and nobody
    sees them.

    >>> documents([0, 2, 5], causal=True).area()
    9
    """
    q = _bounds(cu_seqlens_q, "cu_seqlens_q")
    k = q if cu_seqlens_k is None else _bounds(cu_seqlens_k, "cu_seqlens_k")
    if len(q) != len(k):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must bound the same number of documents, "
            f"got {len(q) - 1} and {len(k) - 1}"
        )
    tq = int(q[-1]) if tq is None else tq
    tk = (tq if cu_seqlens_k is None else int(k[-1])) if tk is None else tk
    for name, length, last in (("tq", tq, q[-1]), ("tk", tk, k[-1])):
        if length < last:
            raise ValueError(
                f"{name}={length} is less than the {last} tokens of the documents: "
                f"leave {name} out or count padding in"
            )
    if causal:
        window = (window[0], 0)
    return AttnMask(_windows(q[:-1], q[1:], k[:-1], k[1:], window, sink_tokens), tq, tk)


def prefix_lm(cu_seqlens: IntsLike, prefix_lengths: IntsLike | int) -> AttnMask:
    """Per document: the prefix sees itself in both directions, what follows is causal.

    >>> prefix_lm([0, 4], [2]).to_dense().int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    bounds = _bounds(cu_seqlens, "cu_seqlens")
    start, end = bounds[:-1], bounds[1:]
    if isinstance(prefix_lengths, int):
        prefix = np.full(len(start), prefix_lengths, np.int64)
    else:
        prefix = _ints(prefix_lengths, "prefix_lengths")
    if prefix.shape != start.shape:
        raise ValueError(
            f"prefix_lengths must have one entry for each of {len(start)} documents, "
            f"got {len(prefix)}"
        )
    bad = (prefix < 0) | (prefix > end - start)
    if bad.any():
        n = int(np.argmax(bad))
        raise ValueError(
            f"prefix_lengths[{n}] is {prefix[n]}: expected 0..{end[n] - start[n]}, "
            f"the length of document {n}"
        )
    split = start + prefix
    prefixes = _slices(start, end, start, split)
    rest = _slices(split, end, split, end, hi=0)
    return AttnMask(_drop_empty(np.concatenate([prefixes, rest])), int(bounds[-1]), int(bounds[-1]))


def block_causal(block_bounds: IntsLike | int, cu_seqlens: IntsLike | None = None) -> AttnMask:
    """Tokens of a block see their block and all earlier blocks of their document.

    block_bounds is a block size, counted from the start of each document (then cu_seqlens is
    needed), or the cumulative bounds of all blocks; a document bound always ends a block.

    >>> block_causal(2, [0, 4]).to_dense().int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """
    if isinstance(block_bounds, int):
        if block_bounds < 1:
            raise ValueError(f"a block size must be at least 1 token, got {block_bounds}")
        if cu_seqlens is None:
            raise ValueError(
                f"block size {block_bounds} alone does not say how many tokens there are: "
                "give cu_seqlens, for one document [0, total]"
            )
        docs = _bounds(cu_seqlens, "cu_seqlens")
        count = -(-np.diff(docs) // block_bounds)
        start = np.repeat(docs[:-1], count) + ragged_arange(count) * block_bounds
        bounds = np.append(start, docs[-1])
    else:
        bounds = _bounds(block_bounds, "block_bounds")
        docs = bounds[[0, -1]] if cu_seqlens is None else _bounds(cu_seqlens, "cu_seqlens")
        if docs[-1] != bounds[-1]:
            raise ValueError(
                "block_bounds and cu_seqlens must end with the same token, "
                f"got {bounds[-1]} and {docs[-1]}"
            )
        bounds = np.unique(np.concatenate([bounds, docs]))
    start, end = bounds[:-1], bounds[1:]
    first_key = docs[np.searchsorted(docs, start, side="right") - 1]
    return AttnMask(_slices(start, end, first_key, end), int(docs[-1]), int(docs[-1]))


def from_dense(mask: torch.Tensor) -> AttnMask:
    """The exact mask of a (tq, tk) bool tensor, in few slices where it has structure.

    >>> from_dense(torch.ones(6, 6, dtype=torch.bool).tril()).num_slices
    1
    """
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"mask must be a bool tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be bool with True where a query sees a key, got {mask.dtype}: "
            "compare it first, e.g. mask > 0 or bias == 0"
        )
    if mask.ndim != 2:
        raise ValueError(f"mask must have shape (tq, tk), got {tuple(mask.shape)}")
    row, lo, hi = _runs(mask.detach().cpu().numpy())
    return AttnMask(slices_of_rows(row, lo, hi), *mask.shape)


def from_block_mask(
    block_mask: BlockMask, *, batch: int | None = None, head: int | None = None
) -> AttnMask:
    """The exact mask of a flex_attention BlockMask for one batch entry and head.

    Full blocks become rectangles; mask_mod runs only in partial blocks. batch and head are needed
    where the BlockMask has more than one; mask_mod is asked about that entry, else about entry 0.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 500, 500, "cpu")
    >>> from_block_mask(block_mask)
    AttnMask(1 slices over 500 x 500, 50.1% attended)
    """
    where = _block_mask_entry(block_mask, batch, head)
    tq, tk = block_mask.seq_lengths
    size_q, size_k = block_mask.BLOCK_SIZE
    slices = np.zeros((0, 6), np.int64)
    if block_mask.full_kv_num_blocks is not None:
        assert block_mask.full_kv_indices is not None
        row, col = _blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, where)
        edges = (row * size_q, (row + 1) * size_q, col * size_k, (col + 1) * size_k)
        slices = _slices(*(np.minimum(x, t) for x, t in zip(edges, (tq, tq, tk, tk), strict=True)))
    row, col = _blocks(block_mask.kv_num_blocks, block_mask.kv_indices, where)
    inside = (row * size_q < tq) & (col * size_k < tk)
    partial = _evaluate_blocks(block_mask, row[inside], col[inside], batch or 0, head or 0)
    return AttnMask(_simplify(np.concatenate([_drop_empty(slices), *partial])), tq, tk)


_EXPAND_LIMIT = 1 << 22
"""Row intervals (about 0.5 GB of temporary arrays) up to which `_simplify` goes row by row."""


def _simplify(slices: Ints) -> Ints:
    """The same pairs in few disjoint slices; what has too many row intervals stays as it is."""
    intervals = row_intervals(slices)
    rows = (intervals.end - intervals.start) * np.diff(intervals.ptr)
    if rows.sum() > _EXPAND_LIMIT:
        return slices
    row, lo, hi = intervals.expand()
    order = np.lexsort((lo, row))
    return slices_of_rows(row[order], lo[order], hi[order])


def _block_mask_entry(
    block_mask: BlockMask, batch: int | None, head: int | None
) -> tuple[int, ...]:
    """Index of the asked entry in the leading dimensions of the block tensors."""
    dims = tuple(block_mask.kv_num_blocks.shape[:-1])  # indexing may have removed batch or both
    sizes = (1,) * (2 - len(dims)) + dims
    where = []
    for name, index, size in zip(("batch", "head"), (batch, head), sizes, strict=True):
        if index is None and size > 1:
            raise ValueError(
                f"this BlockMask holds {size} masks along {name}: choose one with {name}=n, "
                f"n in 0..{size - 1}, and call once for each that you need"
            )
        if index is not None and (index < 0 or 1 < size <= index):
            raise ValueError(f"{name}={index} is outside the {size} masks of this BlockMask")
        where.append(index if index is not None and size > 1 else 0)
    return tuple(where[2 - len(dims) :])


def _blocks(
    num_blocks: torch.Tensor, indices: torch.Tensor, where: tuple[int, ...]
) -> tuple[Ints, Ints]:
    """(row, column) of every block that one entry of the block tensors lists."""
    count = num_blocks[where].cpu().numpy().astype(np.int64)
    column = indices[where].cpu().numpy().astype(np.int64)
    listed = np.arange(column.shape[1]) < count[:, None]
    return np.nonzero(listed)[0], column[listed]


_PAIRS_AT_ONCE = 1 << 24


def _evaluate_blocks(
    block_mask: BlockMask, row: Ints, col: Ints, batch: int, head: int
) -> list[Ints]:
    """Slices of the given blocks where mask_mod says yes, a batch of blocks at a time."""
    from torch.nn.attention.flex_attention import create_mask

    (tq, tk), (size_q, size_k) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    device = block_mask.kv_indices.device
    b, h = torch.tensor(batch, device=device), torch.tensor(head, device=device)
    order = np.lexsort((col, row))
    row, col = row[order], col[order]
    step = max(1, _PAIRS_AT_ONCE // (size_q * size_k))
    slices = []
    for first in range(0, len(row), step):
        part = slice(first, first + step)
        q0, k0 = row[part] * size_q, col[part] * size_k
        q_start, k_start = (torch.from_numpy(x).to(device) for x in (q0, k0))

        # create_mask vmaps over its batch dimension, which here counts blocks. Positions behind
        # the end are clamped: mask_mod may index tensors with them.
        def mod(n: torch.Tensor, _: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            q_pos = (q_start[n] + q).clamp(max=tq - 1)  # noqa: B023
            k_pos = (k_start[n] + k).clamp(max=tk - 1)  # noqa: B023
            return block_mask.mask_mod(b, h, q_pos, k_pos)

        answer = create_mask(mod, len(q0), 1, size_q, size_k, device=str(device))[:, 0]
        seen = answer.bool().cpu().contiguous().numpy()  # vmap returns views when mod is constant
        seen &= (q0[:, None] + np.arange(size_q) < tq)[:, :, None]
        seen &= (k0[:, None] + np.arange(size_k) < tk)[:, None, :]
        line, lo, hi = _runs(seen.reshape(-1, size_k))
        block, line = np.divmod(line, size_q)
        line, lo, hi = q0[block] + line, k0[block] + lo, k0[block] + hi
        by_row = np.lexsort((lo, line))
        slices.append(slices_of_rows(line[by_row], lo[by_row], hi[by_row]))
    return slices


def _runs(mask: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
    """(row, lo, hi) of each run of True, sorted by row then lo."""
    padded = np.zeros((mask.shape[0], mask.shape[1] + 2), np.bool_)
    padded[:, 1:-1] = mask
    row, column = np.nonzero(padded[:, 1:] != padded[:, :-1])  # starts and ends alternate
    return row[0::2], column[0::2], column[1::2]


def _windows(
    q0: Ints,
    q1: Ints,
    k0: Ints,
    k1: Ints,
    window: tuple[int | None, int | None],
    sink_tokens: int,
) -> Ints:
    """One banded slice per document, aligned bottom-right, and one for its sink tokens."""
    left, right = (_side(x, n) for x, n in zip(window, ("left", "right"), strict=True))
    if sink_tokens < 0:
        raise ValueError(f"sink_tokens must not be negative, got {sink_tokens}")
    diagonal = k1 - q1
    lo = -UNBOUNDED if left is None else diagonal - left
    hi = UNBOUNDED if right is None else diagonal + right
    slices = _slices(q0, q1, k0, k1, lo, hi)
    if sink_tokens and left is not None:
        sinks = _slices(q0, q1, k0, np.minimum(k0 + sink_tokens, k1), hi=hi)
        slices = np.concatenate([slices, sinks])
    return _drop_empty(slices)


def _side(value: int | None, name: str) -> int | None:
    if value is None or value == -1:
        return None
    if int(value) != value or value < 0:
        raise ValueError(
            f"window {name} must be a number of tokens, or -1 or None for unbounded, got {value}"
        )
    return min(int(value), UNBOUNDED)


def _slices(
    q0: Ints, q1: Ints, k0: Ints, k1: Ints, lo: Ints | int = -UNBOUNDED, hi: Ints | int = UNBOUNDED
) -> Ints:
    """(n, 6) from columns."""
    return np.stack(np.broadcast_arrays(q0, q1, k0, k1, lo, hi), 1).astype(np.int64)


def _drop_empty(slices: Ints) -> Ints:
    return slices[(slices[:, 0] != slices[:, 1]) & (slices[:, 2] != slices[:, 3])]


def _ints(values: IntsLike, name: str) -> Ints:
    """1-D int64 array from a tensor on any device, an array or a list."""
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.array(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(array.shape)}")
    return array.astype(np.int64)


def _bounds(values: IntsLike, name: str) -> Ints:
    """Cumulative bounds: 0 = b[0] <= b[1] <= ..."""
    bounds = _ints(values, name)
    if len(bounds) == 0 or bounds[0] != 0:
        raise ValueError(f"{name} must start with 0, got {bounds[:4].tolist()}")
    drops = np.diff(bounds) < 0
    if drops.any():
        n = int(np.argmax(drops))
        raise ValueError(
            f"{name} must not decrease, got {bounds[n]} then {bounds[n + 1]} at {n + 1}: "
            "give cumulative lengths, not lengths"
        )
    return bounds
