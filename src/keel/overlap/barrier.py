"""A start signal: compute waits, on its stream, until communication holds its SMs.

Streams say what must end before something begins; nothing says that a kernel should *start* before
another one does. Attention that comes first takes every SM, and communication, launched earlier but
ready a moment later, runs behind it. With a barrier, communication marks that it has started and
attention is held until it has.
"""

from __future__ import annotations

import functools
import logging
import os

import torch

logger = logging.getLogger("keel")

TIMEOUT_US = 1000
MAX_SETTLE_US = 1000
"""As long as a GPU's thread sleeps at most."""


class KernelBarrier:
    """Holds a stream until `target` marks came from others, or a time bound has passed.

    `mark` queues a mark on the current stream: right before a collective of NCCL, which then takes
    its SMs a few microseconds later, so the signal is approximate; `settle_us` waits that much
    longer. Kernels of your own are exact: each of their `target` blocks first calls
    `keel.kernels.barrier.mark_started(flag)`.

    `wait` queues one small kernel on the current stream. It never hangs: if marks are missing after
    `timeout_us`, it lets go and counts a miss. Late marks are recognised as such, so they do not
    release the next wait. All state is on the device and used up by the wait, so a round can be
    repeated at once, and captured in a CUDA graph.

    One stream waits on a barrier. Streams that mark it must be behind the stream that made it, as
    any reader of a tensor must be. With a target of 0 nothing is allocated and nothing launched.

    >>> barrier = KernelBarrier(0)  # communication that needs no SMs
    >>> barrier.mark(), barrier.wait(), barrier.misses()
    (None, None, 0)
    """

    def __init__(
        self,
        target: int,
        *,
        device: torch.device | str | None = None,
        timeout_us: int = TIMEOUT_US,
        settle_us: int = 0,
    ) -> None:
        for name, value, least in (
            ("target", target, 0),
            ("timeout_us", timeout_us, 1),
            ("settle_us", settle_us, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if settle_us > MAX_SETTLE_US:
            raise ValueError(f"settle_us must be at most {MAX_SETTLE_US}, got {settle_us}")
        self.target, self.timeout_us, self.settle_us = target, timeout_us, settle_us
        self._warned = False
        self.flag: torch.Tensor | None = None
        """Where kernels mark; None with a target of 0."""
        if target:
            where = _device(device)
            from keel.kernels.barrier import STATE_SIZE

            self._all_misses = _miss_counter(where)
            self.flag = torch.zeros(STATE_SIZE, dtype=torch.int64, device=where)

    def mark(self) -> None:
        """Queues one mark on the current stream."""
        if self.flag is not None:
            from keel.kernels import barrier

            barrier.mark(self.flag)

    def wait(self) -> None:
        """Holds what the current stream is given from now on until the marks are in."""
        if self.flag is not None:
            from keel.kernels import barrier

            barrier.wait(
                *(self.flag, self._all_misses, self.target),
                bound_ns=1000 * self.timeout_us,
                settle_ns=1000 * self.settle_us,
            )

    def misses(self) -> int:
        """How many waits gave up so far; the host waits for the device. Warns of the first."""
        if self.flag is None:
            return 0
        missed = _number(self.flag[2])
        if missed and not self._warned:
            self._warned = True
            _warn(missed, f"within {self.timeout_us} us")
        return missed


def barrier_misses(device: torch.device | str | None = None) -> int:
    """Waits of all barriers of a device that gave up, those inside `calc_attn` too.

    The host waits for the device. `measure` looks at it, and says so where it grew.
    """
    if not _counters:
        return 0
    counter = _counters.get(_device(device))
    return 0 if counter is None else _number(counter)


def warn_of_new_misses(before: int) -> None:
    """Logs that waits of the current device gave up since there were `before`."""
    missed = barrier_misses() - before
    if missed > 0:
        _warn(missed, "in time")


def _warn(missed: int, when: str) -> None:
    logger.warning(
        "keel: %d waits for communication to start gave up: it had not started %s. It was launched "
        "late or not at all, or CUDA_DEVICE_MAX_CONNECTIONS=1 queued it behind the wait",
        missed,
        when,
    )


_counters: dict[torch.device, torch.Tensor] = {}


def _miss_counter(device: torch.device) -> torch.Tensor:
    """One number for all barriers of a device: it outlives those that calls make for themselves."""
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the first KernelBarrier of a device cannot be made during CUDA graph capture: "
                "make one, or run once what makes it, before"
            )
        _counters[device] = torch.zeros(1, dtype=torch.int64, device=device)
        if device.type == "cuda":  # whichever streams its waits will be on
            torch.cuda.synchronize(device)
    return _counters[device]


def _number(x: torch.Tensor) -> int:
    """When all streams are done, whichever the waits are on."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return int(x)


def _device(device: torch.device | str | None) -> torch.device:
    where = torch.device("cuda" if device is None else device)
    if where.type == "cpu" and _interpreted():
        return where
    if where.type != "cuda":
        raise ValueError(
            f"a KernelBarrier holds a stream of a CUDA device, got {where}: on a CPU things happen "
            "in the order of their calls; use target=0 for a barrier that does nothing"
        )
    return torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)


@functools.cache
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
