"""Max logits over ranks: one MAX all-reduce per call, or one for many calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from keel._versions import backend_of
from keel.distributed.agreement import agree
from keel.distributed.failures import failure


class PendingMaximum:
    def __init__(
        self, work: Any, packed: torch.Tensor, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        self._work, self._packed, self._device, self._group = work, packed, device, group

    def wait(self) -> torch.Tensor:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise failure("taking the maximum of max logits", self._group, error) from error
        top, bad = self._packed.to(self._device).unbind()
        return torch.where(bad > 0, torch.nan, top)


def start_maximum(top: torch.Tensor, group: dist.ProcessGroup) -> PendingMaximum:
    """Starts the maximum of (n,) over the ranks of a group; a NaN anywhere stays NaN.

    Backends differ in what a maximum makes of NaN, so NaNs travel beside the numbers.
    """
    bad = top.isnan()
    packed = torch.stack([top.masked_fill(bad, -torch.inf), bad.to(top.dtype)])
    if backend_of(group, packed.device) in ("gloo", None):
        packed = packed.cpu()
    work = dist.all_reduce(packed, dist.ReduceOp.MAX, group=group, async_op=True)
    return PendingMaximum(work, packed, top.device, group)


class MaxLogitsTracker:
    """Keeps this rank's max logits of many calls, and reduces them together.

    >>> tracker = MaxLogitsTracker()
    >>> tracker.add(torch.tensor([1.0, -2.0])); tracker.add(torch.tensor([3.0]))
    >>> [x.tolist() for x in tracker.local()]
    [[1.0, -2.0], [3.0]]
    """

    def __init__(self) -> None:
        self._tops: list[torch.Tensor] = []

    def add(self, top: torch.Tensor) -> None:
        self._tops.append(top.detach())

    def local(self) -> list[torch.Tensor]:
        """(h,) of each call, in order, of this rank alone."""
        return list(self._tops)

    def reduce(self, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
        """(h,) of each call over all ranks, by one all-reduce; the tracker is empty afterwards.

        Every rank of the group must have made the same calls; an error says so where they did not.
        """
        if not self._tops:
            return []
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised, so there are no ranks to reduce over: "
                "local() has this process's maxima"
            )
        group = dist.group.WORLD if group is None else group
        assert group is not None
        heads = tuple(len(x) for x in self._tops)
        agree(group, {}, {"heads_of_max_logits": heads}, self)
        tops, self._tops = self._tops, []
        packed = start_maximum(torch.cat(tops), group).wait()
        return list(packed.split([len(x) for x in tops]))
