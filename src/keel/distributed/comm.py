"""Moving rows between ranks: `cast` brings wanted rows, `reduce` returns what they gathered.

Both are one all-to-all that runs while the caller computes. What an exchange casts, the same
exchange reduces: each row that was sent comes back from every rank that received it, and the
copies are added in the order of the ranks, in fp32 or wider, so that results repeat bit by bit.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch
import torch.distributed as dist

from keel.distributed.plan import Exchange

logger = logging.getLogger("keel")


class Pending:
    """An all-to-all under way; `wait` gives its rows."""

    def __init__(self, work: Any, received: torch.Tensor, sent: torch.Tensor, what: str) -> None:
        self._work, self._received, self._sent, self._what = work, received, sent, what

    def rows(self, like: torch.Tensor) -> torch.Tensor:
        """The received rows, on the device and in the dtype of `like`."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._what} failed, probably because a rank of the group died, left or was too "
                f"late: {error}"
            ) from error
        del self._sent  # it had to live until now
        received = self._received.to(like.device, non_blocking=True)
        return received.view(like.dtype) if received.dtype != like.dtype else received


def start_all_to_all(
    rows: torch.Tensor,
    send_counts: list[int],
    recv_counts: list[int],
    group: dist.ProcessGroup,
    what: str,
) -> Pending:
    """Starts to move rows (n, columns), ordered by destination; they arrive ordered by source."""
    if dist.get_backend(group) == "gloo":  # knows few dtypes, and crashes on CUDA tensors
        if rows.is_cuda:
            _say_staged()
            rows = rows.cpu()
        rows = rows.view(torch.uint8)
    received = rows.new_empty(sum(recv_counts), rows.shape[1])
    work = dist.all_to_all_single(
        received, rows, recv_counts, send_counts, group=group, async_op=True
    )
    return Pending(work, received, rows, what)


@functools.cache
def _say_staged() -> None:
    logger.warning(
        "keel moves CUDA tensors through host memory, since the group's backend is gloo: right, "
        "but slow; use NCCL where every rank has a GPU of its own"
    )


def _flat(x: torch.Tensor) -> torch.Tensor:
    """(rows, columns), a view where x allows one; rows may be none."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def _pair(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values for the kernels that move both at once; None: torch has to do."""
    if len(tensors) != 2 or not tensors[0].is_cuda:
        return None
    return tensors[0], tensors[1]


class Cast:
    """Wanted rows of several tensors (rows, ...) on their way; they travel as one."""

    def __init__(
        self, tensors: list[torch.Tensor], exchange: Exchange, group: dist.ProcessGroup, what: str
    ) -> None:
        self._exchange = exchange
        self._shapes = [x.shape[1:] for x in tensors]
        self._like = tensors[0]
        rows = _picked([_flat(x) for x in tensors], exchange.tensors(self._like.device).send_rows)
        self._pending = start_all_to_all(
            rows, exchange.send_counts, exchange.recv_counts, group, what
        )

    def wait(self) -> list[torch.Tensor]:
        """The tensors' rows in the wanted order."""
        rows = self._pending.rows(self._like)
        widths = [math.prod(shape) for shape in self._shapes]
        parts = list(rows.split(widths, 1))
        order = self._exchange.tensors(self._like.device).order
        if order is not None:
            parts = _ordered(parts, order)
        return [x.unflatten(1, s) for x, s in zip(parts, self._shapes, strict=True)]


def _picked(tensors: list[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
    """(len(index), all columns): rows of each tensor, side by side."""
    pair = _pair(tensors)
    if pair is None:
        return torch.cat([x.index_select(0, index) for x in tensors], 1)
    from keel.kernels.rows import copy_rows

    first, second = pair
    rows = first.new_empty(len(index), first.shape[1] + second.shape[1])
    copy_rows(pair, (rows[:, : first.shape[1]], rows[:, first.shape[1] :]), index)
    return rows


def _ordered(parts: list[torch.Tensor], order: torch.Tensor) -> list[torch.Tensor]:
    pair = _pair(parts)
    if pair is None:
        return [x.index_select(0, order) for x in parts]
    from keel.kernels.rows import copy_rows

    found = (torch.empty_like(pair[0]), torch.empty_like(pair[1]))
    copy_rows(pair, found, order)
    return list(found)


class Reduce:
    """Rows (wanted rows, ...) on their way back to their owners, to be added there."""

    def __init__(
        self, tensors: list[torch.Tensor], exchange: Exchange, group: dist.ProcessGroup, what: str
    ) -> None:
        self._exchange = exchange
        self._like = tensors[0]
        order = exchange.tensors(self._like.device).order
        rows = torch.cat([_flat(x) for x in tensors], 1)
        if order is not None:
            rows = torch.empty_like(rows).index_copy_(0, order, rows)
        self._pending = start_all_to_all(
            rows, exchange.recv_counts, exchange.send_counts, group, what
        )

    def add_to(self, targets: list[torch.Tensor]) -> None:
        """Adds what arrives to the owners' rows (rows, ...), in the order of the ranks."""
        rows = self._pending.rows(self._like)
        flat = [_flat(x) for x in targets]
        parts = list(rows.split([x.shape[1] for x in flat], 1))
        pair, sums = _pair(parts), _pair(flat)
        if pair is not None and sums is not None:
            from keel.kernels.rows import add_rows

            add_rows(pair, sums, *self._exchange.returning(self._like.device))
            return
        counts = self._exchange.send_counts
        index = self._exchange.tensors(self._like.device).send_rows
        # A rank asks for a row once, so no two additions of a part meet: the order is fixed.
        for part, target in zip(parts, flat, strict=True):
            for where, some in zip(index.split(counts), part.split(counts), strict=True):
                target.index_add_(0, where, some.to(target.dtype))
