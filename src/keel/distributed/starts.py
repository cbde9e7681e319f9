"""Attention that waits until the exchange launched before it holds its SMs."""

from __future__ import annotations

import torch

from keel.overlap.barrier import KernelBarrier

SETTLE_US = 5
"""From a mark before a collective of NCCL to its kernel, about."""


class Starts:
    """A barrier of one call and direction, made on the caller's stream; all its streams follow it.

    Of the exchanges that are launched between two computations only the first marks: the others are
    behind it on the lane, and a computation that waited for those would wait for its end.
    """

    def __init__(self, wanted: bool, device: torch.device) -> None:
        self._barrier = KernelBarrier(1 if wanted else 0, device=device, settle_us=SETTLE_US)
        self._marked = False

    def mark(self) -> None:
        """Queues the mark, on the lane, right before an exchange."""
        if not self._marked:
            self._barrier.mark()
            self._marked = True

    def hold(self) -> None:
        """Holds the caller's stream until the exchange runs that was marked last, if one was."""
        if self._marked:
            self._barrier.wait()
            self._marked = False
