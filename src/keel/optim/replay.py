"""Many small launches as one: recorded in a CUDA graph, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Replay:
    """Runs the same work over and over; from the third time on with a single launch.

    The first time it runs as it is, so that kernels are compiled and tables copied; the second time
    it is recorded. Under a caller's own recording it always runs as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._key: Hashable = None
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Does what `work()` does, which leaves its results in tensors that stay where they are.

        key: all that work depends on but the contents of tensors: addresses, numbers, flags.
        """
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            work()
            return
        if key != self._key:
            self._key, self._calls, self._graph = key, 0, None
        self._calls += 1
        if self._calls == 1:
            work()
            return
        with torch.cuda.device(self._device):
            if self._graph is None:
                self._record(work)
            assert self._graph is not None
            self._graph.replay()

    def _record(self, work: Callable[[], None]) -> None:
        """Records on a stream beside the caller's; other threads may go on allocating."""
        graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        beside = torch.cuda.Stream()
        beside.wait_stream(caller)
        with torch.cuda.stream(beside):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        caller.wait_stream(beside)
        self._graph = graph
