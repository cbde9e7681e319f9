"""Tensors along the token axis: from global to local, back, and shifted.

Each is differentiable, and its backward does what the chain rule says: rows that several ranks
used get the sum of what those ranks found.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from keel._versions import outside_of_graphs
from keel.distributed.agreement import check_agreement
from keel.distributed.comm import Cast, Reduce
from keel.distributed.keys import AttnKey
from keel.distributed.layout import Layout
from keel.distributed.plan import Exchange, Segments, exchange_of, overlaps


@outside_of_graphs
def dispatch(x: torch.Tensor, key: AttnKey, dim: int = 0, *, keys: bool = False) -> torch.Tensor:
    """This rank's tokens of a global tensor that every rank holds; no communication.

    The gradient of x is that of this rank's tokens, zero elsewhere: like that of any weight it
    must be summed over the ranks, if x needs one at all.

    Args:
        x: any shape; dim has the tokens of all ranks.
        keys: tokens of the keys, where those are not the queries.
    """
    layout = key.k_layout if keys else key.q_layout
    _check_tensor(x)
    if x.shape[dim] != layout.total:
        raise ValueError(
            f"x has {x.shape[dim]} tokens in dim {dim}, but the key is for {layout.total}"
        )
    rows = torch.from_numpy(layout.tokens_of(key.rank)).to(x.device)
    return x.index_select(dim, rows)


@outside_of_graphs
def undispatch(
    x: torch.Tensor, key: AttnKey, dim: int = 0, *, keys: bool = False, replicated: bool = True
) -> torch.Tensor:
    """The global tensor, on every rank, of which x holds this rank's tokens in dim.

    Args:
        replicated: what follows is computed alike on all ranks, so that each finds the whole
            gradient; the backward then takes this rank's rows of it. False: each rank finds a
            part, and the backward sums them.
    """
    layout = key.k_layout if keys else key.q_layout
    _check_local(x, layout, key, dim)
    mine = torch.from_numpy(layout.tokens_of(key.rank)).to(x.device) if replicated else None
    return _moved(x, key, dim, _of_all(layout, key.rank), mine, undispatch=replicated)


@outside_of_graphs
def roll(
    x: torch.Tensor, shift: int, key: AttnKey, dim: int = 0, *, keys: bool = False
) -> torch.Tensor:
    """torch.roll along the global token axis, of local tokens: token i gets that of i - shift.

    Only what crosses from one rank to another travels. For targets of multi-token prediction.
    """
    layout = key.k_layout if keys else key.q_layout
    _check_local(x, layout, key, dim)
    rolled = _moved(x, key, dim, _of_rolled(layout, key.rank, shift), roll=shift)
    taken = (layout.tokens_of(key.rank) - shift) % max(layout.total, 1)
    order = np.argsort(np.argsort(taken))  # they came in the order of the axis they were taken from
    return rolled.index_select(dim, torch.from_numpy(order).to(x.device))


def _check_tensor(x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")


def _check_local(x: torch.Tensor, layout: Layout, key: AttnKey, dim: int) -> None:
    _check_tensor(x)
    if key.group is None:
        raise ValueError("this key only plans: make it with a group to move data")
    if x.shape[dim] != layout.rows[key.rank]:
        raise ValueError(
            f"x has {x.shape[dim]} tokens in dim {dim}, but rank {key.rank} holds "
            f"{layout.rows[key.rank]}"
        )


def _moved(
    x: torch.Tensor,
    key: AttnKey,
    dim: int,
    exchange: Exchange,
    mine: torch.Tensor | None = None,
    **what: object,
) -> torch.Tensor:
    x = x.movedim(dim, 0)
    if mine is None:  # else the way back is no collective
        what["need_of_gradients"] = torch.is_grad_enabled() and x.requires_grad
    check_agreement(key, **what, dtype=x.dtype, other_dims=tuple(x.shape[1:]))
    moved: torch.Tensor = _Move.apply(x, exchange, key, mine)
    return moved.movedim(0, dim)


@functools.lru_cache(maxsize=8)
def _of_all(layout: Layout, rank: int) -> Exchange:
    """All tokens to all ranks."""
    everything = [(to, 0, layout.total) for to in range(layout.num_ranks)]
    return _exchange(everything, layout, rank)


@functools.lru_cache(maxsize=8)
def _of_rolled(layout: Layout, rank: int, shift: int) -> Exchange:
    """To each rank the tokens `shift` before its own, in the order of the axis."""
    wanted = []
    for start, end, to in zip(layout.starts, layout.ends, layout.ranks, strict=True):
        begin, length = int(start - shift) % layout.total, int(end - start)
        head = min(length, layout.total - begin)
        wanted += [(int(to), begin, begin + head), (int(to), 0, length - head)]
    return _exchange(wanted, layout, rank)


def _exchange(wanted: list[tuple[int, int, int]], layout: Layout, rank: int) -> Exchange:
    """To each rank `to` the tokens [lo, hi)."""
    dst, lo, hi = np.array(wanted, np.int64).reshape(-1, 3).T
    at, piece = overlaps(lo, hi, layout.starts, layout.ends)
    segments = Segments(
        dst[at],
        layout.ranks[piece],
        np.zeros(len(at), np.int64),
        np.maximum(lo[at], layout.starts[piece]),
        np.minimum(hi[at], layout.ends[piece]),
        piece,
    )
    return exchange_of(segments, layout, rank)


class _Move(torch.autograd.Function):
    """Rows by an exchange. `mine`, where the gradient is whole: which of its rows are ours."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        exchange: Exchange,
        key: AttnKey,
        mine: torch.Tensor | None,
    ) -> torch.Tensor:
        assert key.group is not None
        ctx.exchange, ctx.group, ctx.shape, ctx.mine = exchange, key.group, rows.shape, mine
        flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
        (moved,) = Cast([flat], exchange, key.group, f"moving rows on rank {key.rank}").wait()
        return moved.reshape(len(moved), *rows.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.mine is not None:
            return grad.index_select(0, ctx.mine), None, None, None
        wide = grad.dtype if grad.dtype == torch.float64 else torch.float32
        total = torch.zeros(ctx.shape, dtype=wide, device=grad.device)
        flat = grad.reshape(len(grad), math.prod(grad.shape[1:])).to(wide)
        home = Reduce([flat], ctx.exchange, ctx.group, "returning gradients of moved rows")
        home.add_to([total.view(len(total), flat.shape[1])])
        return total.to(grad.dtype), None, None, None
