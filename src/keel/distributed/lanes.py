"""A lane for communication beside the stream that computes.

Gathering rows, moving them and putting them into order are queued on a stream of their own, of high
priority, so that a long kernel of the caller neither delays them nor is delayed by them.

All buffers belong to the caller's stream. They are allocated there; what the lane does starts
behind all that the caller had queued by then; and the caller's stream waits for the lane before
buffers are used or let go. So memory is reused in the order of one stream, and needs no
`record_stream`: that would free a block only when the device gets there, and a host that runs ahead
would meanwhile allocate the buffers of every stage.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

HIGH_PRIORITY = -1


class Lane:
    """The communication stream of a device; `streams` is its module, as torch.cuda."""

    def __init__(self, device: torch.device, streams: Any) -> None:
        self._device, self._streams = device, streams
        self._stream = streams.Stream(device=device, priority=HIGH_PRIORITY)

    @contextlib.contextmanager
    def behind_caller(self) -> Iterator[None]:
        """What is queued inside runs here, behind what the caller has queued so far."""
        self._stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._stream):
            yield

    @contextlib.contextmanager
    def beside_caller(self) -> Iterator[None]:
        """The same, behind what was queued here alone: for memory that the lane already has."""
        with self._streams.stream(self._stream):
            yield

    def mark(self) -> Any:
        """An event behind all that is queued here."""
        return self._stream.record_event()

    def hold_caller(self, mark: Any) -> None:
        """What the caller queues from now on waits for a mark; the host does not."""
        self._streams.current_stream(self._device).wait_event(mark)


class NoLane(Lane):
    """Of a device without streams, the CPU: everything happens at once, in order."""

    def __init__(self) -> None:
        pass

    @contextlib.contextmanager
    def behind_caller(self) -> Iterator[None]:
        yield

    beside_caller = behind_caller

    def mark(self) -> None:
        return None

    def hold_caller(self, mark: None) -> None:
        pass


@functools.cache
def lane_of(device: torch.device) -> Lane:
    """One lane per device, shared by all groups."""
    return NoLane() if device.type == "cpu" else Lane(device, torch.get_device_module(device))
