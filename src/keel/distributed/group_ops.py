"""`group_cast` and `group_reduce`: one exchange there and back, for who brings their own stages.

An exchange says which rows go to which rank; those of a plan's stages are
`plan.stages_of(rank)[n].exchange`. Rows go out with `group_cast`. What ranks computed for them
comes back with `group_reduce`: as sums, or as softmaxes over disjoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from keel.distributed.comm import Cast, Reduce
from keel.distributed.plan import Exchange
from keel.reference import merge

Tensor = torch.Tensor


def group_cast(tensors: Sequence[Tensor], exchange: Exchange, group: dist.ProcessGroup) -> Cast:
    """Starts to bring wanted rows of all tensors (rows, ...); `wait()` gives them."""
    _check(tensors, len(tensors[0]) if tensors else 0)
    return Cast(tensors, exchange, group, "a group cast")


def group_reduce(
    tensors: Sequence[Tensor],
    exchange: Exchange,
    group: dist.ProcessGroup,
    *,
    op: Literal["sum", "softmax"] = "sum",
) -> Reduce:
    """Starts to return rows that `group_cast` brought; `add_to(targets)` joins them there.

    Args:
        tensors: (received rows, ...), in the order in which the cast gave them.
        op: "sum" adds; "softmax" takes out (rows, h, dv) and lse (rows, h) as results over other
            keys than the targets', and makes of both the result over all. In the targets'
            precision, in the order of the ranks.
    """
    _check(tensors, exchange.num_received)
    if op == "sum":
        return Reduce(tensors, exchange, group, "a group reduce")
    if op != "softmax":
        raise ValueError(f"op must be 'sum' or 'softmax', got {op!r}")
    if len(tensors) != 2 or tensors[0].shape[:2] != tensors[1].shape or tensors[0].ndim != 3:
        raise ValueError(
            "op 'softmax' takes out (rows, h, dv) and lse (rows, h), got "
            f"{[tuple(x.shape) for x in tensors]}"
        )
    return Merge(tensors, exchange, group, "a group reduce")


class Merge(Reduce):
    """`Reduce` of (out, lse) by the algebra of softmaxes."""

    def _add(self, targets: Sequence[Tensor]) -> None:
        out, lse = targets
        heads, counts = lse.shape[1], self._exchange.send_counts
        index = self._exchange.tensors(out.device).send_rows
        arrived = [x.split(counts) for x in self._transfer.received.split(self.widths, 1)]
        for where, more_out, more_lse in zip(index.split(counts), *arrived, strict=True):
            here = out.index_select(0, where).unflatten(1, (heads, -1)), lse.index_select(0, where)
            more = more_out.unflatten(1, (heads, -1)).to(out.dtype), more_lse.to(lse.dtype)
            joined_out, joined_lse, _ = merge([(*here, None), (*more, None)])
            out.index_copy_(0, where, joined_out.flatten(1))
            lse.index_copy_(0, where, joined_lse)


def _check(tensors: Sequence[Tensor], rows: int) -> None:
    if not tensors:
        raise ValueError("there are no tensors to move")
    kinds = {(x.dtype, x.device, len(x)) for x in tensors}
    if len(kinds) > 1 or len(tensors[0]) != rows:
        raise ValueError(
            f"tensors that travel together must have one dtype, one device and {rows} rows, got "
            f"{[(x.dtype, str(x.device), tuple(x.shape)) for x in tensors]}"
        )
