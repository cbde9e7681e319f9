"""Moving rows between ranks: `Cast` brings wanted rows, `Reduce` returns what they gathered.

Both are one all-to-all that runs while the caller computes, on the lane of the device. What an
exchange casts, the same exchange reduces: each row that was sent comes back from every rank that
received it, and the copies are added in the order of the ranks, in fp32 or wider, so that results
repeat bit by bit.

NCCL queues: all of an exchange is on the lane before its constructor returns. Gloo moves bytes of
host memory and its waiting blocks the host, so rows are put into order when they are asked for;
CUDA tensors go through pinned memory. Gloo may read that only when the copy to it is done, and the
host has to wait for it; a *deferred* exchange does so in `depart`, when the caller has given the
device something to compute, and both copies run beside that.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from keel._versions import backend_of, profiler_range
from keel.distributed.failures import failure
from keel.distributed.lanes import Lane, lane_of
from keel.distributed.plan import Exchange

Tensor = torch.Tensor

logger = logging.getLogger("keel")

STAGING = "keel:all_to_all through host memory"
"""The range around copies that are communication; reports about overlap know its prefix.
Deferred exchanges have none: they are those of stages, which have ranges of their own."""


def queues(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether waiting for a collective of the group makes a stream wait, and not the host."""
    return device.type != "cpu" and backend_of(group, device) != "gloo"


class AllToAll:
    """Rows (n, columns) by destination -> `received`, by source; `start` and `finish` on a lane."""

    def __init__(
        self,
        rows: Tensor,
        send_counts: list[int],
        recv_counts: list[int],
        group: dist.ProcessGroup,
        what: str,
    ) -> None:
        self.received = rows.new_empty(sum(recv_counts), rows.shape[1])
        self._rows, self._counts = rows, (recv_counts, send_counts)
        self._group, self._what = group, what
        self._work: Any = None
        self._copied: Any = None
        self._deferred = False
        self._host = (self.received, rows)
        self._staged = _needs_staging(rows, group)
        if self._staged:
            _say_staged()
            self._host = (_pinned(self.received), _pinned(rows))

    @property
    def staged(self) -> bool:
        """Whether rows go through host memory."""
        return self._staged

    def start(
        self, lane: Lane, *, on_start: Callable[[], None] | None = None, deferred: bool = False
    ) -> None:
        """Begins. `on_start` queues what says so, right before the collective is queued."""
        self._deferred = deferred
        if self._staged:
            with self._range():
                self._host[1].copy_(self._rows, non_blocking=True)
            self._copied = lane.mark()
        if on_start is not None:
            on_start()
        if not deferred:
            self.depart()

    def _range(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._deferred else profiler_range(STAGING)

    def depart(self) -> None:
        """Hands the rows to the backend, once; where they are copied first, waits for the copy."""
        if self._work is not None:
            return
        received, sent = self._host
        if self._staged:
            self._copied.synchronize()
        if not queues(self._group, self._rows.device):  # gloo knows few dtypes
            received, sent = received.view(torch.uint8), sent.view(torch.uint8)
        self._work = dist.all_to_all_single(
            received, sent, *self._counts, group=self._group, async_op=True
        )

    def finish(self) -> None:
        self.depart()
        try:
            self._work.wait()
        except RuntimeError as error:
            raise failure(self._what, self._group, error) from error
        if self._staged:
            with self._range():
                self.received.copy_(self._host[0], non_blocking=True)


def _needs_staging(rows: Tensor, group: dist.ProcessGroup) -> bool:
    return rows.is_cuda and not queues(group, rows.device)  # gloo crashes on CUDA tensors


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


@functools.cache
def _say_staged() -> None:
    logger.warning(
        "keel moves CUDA tensors through host memory, since the group's backend is gloo: right, "
        "but slow; use NCCL where every rank has a GPU of its own"
    )


class Flight:
    """An exchange under way. It holds the buffers until the caller's stream waits for it."""

    _mark: Any = None

    def __init__(
        self,
        tensors: Sequence[Tensor],
        group: dist.ProcessGroup,
        counts: tuple[list[int], list[int]],
        what: str,
        *,
        on_start: Callable[[], None] | None = None,
        deferred: bool = False,
    ) -> None:
        """tensors: (rows, ...); counts: rows to and from each rank of the group.

        `deferred` lets an exchange through host memory begin in `depart`; others it leaves alone.
        """
        self.lane = lane_of(tensors[0].device)
        self.flat = [_flat(x) for x in tensors]
        self.widths = [x.shape[1] for x in self.flat]
        self._sent = self.flat[0].new_empty(sum(counts[0]), sum(self.widths))
        self._transfer = AllToAll(self._sent, *counts, group, what)
        self._landed = False
        self._deferred = deferred and self._transfer.staged
        if self._deferred:
            self._prepare()  # what comes back is then written beside what the caller queues
        with self.lane.behind_caller():
            self._pack(self._sent.split(self.widths, 1))
            self._transfer.start(self.lane, on_start=on_start, deferred=self._deferred)
        if self._deferred:
            self._mark = self.lane.mark()
        if queues(group, self._sent.device):
            self.land()

    def _pack(self, parts: Sequence[Tensor]) -> None:
        """Writes the rows to send, by destination, into columns of the buffer."""
        raise NotImplementedError

    def _unpack(self, parts: Sequence[Tensor]) -> None:
        """Takes received rows, by source."""

    def land(self) -> None:
        """Queues what is to be done with the rows; where the backend blocks, waits for them."""
        if self._landed:
            return
        self._landed = True
        if not self._deferred:
            self._prepare()
        lane = self.lane
        with lane.beside_caller() if self._deferred else lane.behind_caller():
            self._transfer.finish()
            self._unpack(self._transfer.received.split(self.widths, 1))
        self._mark = self.lane.mark()

    def _prepare(self) -> None:
        """Allocates, on the caller's stream, what `_unpack` needs."""

    def depart(self) -> None:
        """Begins what was deferred, on all ranks in the same order."""
        self._transfer.depart()

    def pass_on(self) -> None:
        """The same for exchanges in two steps: begins the second. Here there is none."""

    def hold_caller(self) -> None:
        """From here on the caller's stream may use the rows, and buffers may go."""
        if self._mark is not None:
            self.lane.hold_caller(self._mark)
            self._mark = None

    def _release(self) -> None:
        """Lets go what was needed on the way; only behind `hold_caller`."""
        del self.flat, self._sent, self._transfer

    def __del__(self) -> None:
        self.hold_caller()  # for one that nobody waited for, as after an error


class Cast(Flight):
    """Wanted rows of several tensors (rows, ...) on their way; they travel as one."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        exchange: Exchange,
        group: dist.ProcessGroup,
        what: str,
        **options: Any,
    ) -> None:
        self._shapes = [x.shape[1:] for x in tensors]
        self._index = exchange.tensors(tensors[0].device)
        counts = (exchange.send_counts, exchange.recv_counts)
        super().__init__(tensors, group, counts, what, **options)

    def _pack(self, parts: Sequence[Tensor]) -> None:
        _pick(self.flat, parts, self._index.send_rows)

    def _prepare(self) -> None:
        received, order = self._transfer.received, self._index.order
        self._parts = list(received.split(self.widths, 1))
        if order is not None:
            self._parts = [received.new_empty(len(received), width) for width in self.widths]

    def _unpack(self, parts: Sequence[Tensor]) -> None:
        if self._index.order is not None:
            _pick(parts, self._parts, self._index.order)

    def landed(self) -> list[Tensor]:
        """The tensors' rows in the wanted order, for what is queued on the lane."""
        self.land()
        return [x.unflatten(1, s) for x, s in zip(self._parts, self._shapes, strict=True)]

    def wait(self) -> list[Tensor]:
        """The tensors' rows in the wanted order."""
        rows = self.landed()
        self.hold_caller()
        self._release()
        return rows


class Reduce(Flight):
    """Rows (wanted rows, ...) on their way back to their owners, to be added there."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        exchange: Exchange,
        group: dist.ProcessGroup,
        what: str,
        **options: Any,
    ) -> None:
        self._exchange = exchange
        counts = (exchange.recv_counts, exchange.send_counts)
        super().__init__(tensors, group, counts, what, **options)

    def _pack(self, parts: Sequence[Tensor]) -> None:
        back = self._exchange.tensors(self._sent.device).arrival
        if back is None:
            torch.cat(self.flat, 1, out=self._sent)
        else:
            _pick(self.flat, parts, back)

    def add_to(self, targets: Sequence[Tensor]) -> None:
        """Adds what arrives to the owners' rows (rows, ...), in the order of the ranks."""
        self.land()
        self.hold_caller()
        self._add([_view(x) for x in targets])
        self._release()

    def add_on_lane(self, targets: Sequence[Tensor]) -> None:
        """The same, for what is queued on the lane."""
        self.land()
        with self.lane.behind_caller():
            self._add([_view(x) for x in targets])
        self._mark = self.lane.mark()

    def _add(self, targets: Sequence[Tensor]) -> None:
        parts = self._transfer.received.split(self.widths, 1)
        pair, sums = _pair(parts), _pair(targets)
        if pair is not None and sums is not None:
            from keel.kernels.rows import add_rows

            add_rows(pair, sums, *self._exchange.returning(parts[0].device))
            return
        counts = self._exchange.send_counts
        index = self._exchange.tensors(parts[0].device).send_rows
        # A rank asks for a row once, so no two additions of a part meet: the order is fixed.
        for part, target in zip(parts, targets, strict=True):
            for where, some in zip(index.split(counts), part.split(counts), strict=True):
                target.index_add_(0, where, some.to(target.dtype))


def _flat(x: Tensor) -> Tensor:
    """(rows, columns), a view where x allows one; rows may be none."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def _view(x: Tensor) -> Tensor:
    """(rows, columns) to write to; an error if x would have to be copied for that."""
    return x.view(len(x), math.prod(x.shape[1:]))


def _pair(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Keys and values for the kernels that move both at once; None: torch has to do."""
    if len(tensors) != 2 or not tensors[0].is_cuda:
        return None
    return tensors[0], tensors[1]


def _pick(sources: Sequence[Tensor], targets: Sequence[Tensor], index: Tensor) -> None:
    """targets[t][i] = sources[t][index[i]]."""
    pair, into = _pair(sources), _pair(targets)
    if pair is not None and into is not None:
        from keel.kernels.rows import copy_rows

        copy_rows(pair, into, index)
        return
    for source, target in zip(sources, targets, strict=True):
        torch.index_select(source, 0, index, out=target)
