"""Max logits to raise, already at -inf: filled many at a time, since a fill is a launch of its own.

Rows of one fill share memory, 8 KiB for 64 heads, and nothing else: each is a tensor with a
version counter of its own, and is handed out once.
"""

from __future__ import annotations

import torch

from keel._versions import capture_id

NUM_ROWS = 32
ALIGNMENT = 32
"""Numbers: a row begins at 128 bytes, where atomics of two rows do not meet."""

_ready: dict[tuple[int, torch.device, int], list[torch.Tensor]] = {}
"""By heads, device and stream: a fill is seen by what follows it on its stream."""

_in_capture: dict[tuple[int, int, int], tuple[int, list[torch.Tensor]]] = {}
"""By the same, with the number of the last capture there: its replays fill only its own rows."""


def fresh_maxima(num_heads: int, device: torch.device, stream: int | None) -> torch.Tensor:
    """(num_heads,) fp32 at -inf, that nobody else has.

    stream: from `launch_stream`; None during the capture of a graph, whose replays must fill anew:
    once for the next NUM_ROWS calls on the stream.
    """
    if stream is None:
        return _of_capture(num_heads, device)
    key = (num_heads, device, stream)
    try:
        return _ready[key].pop()
    except (KeyError, IndexError):
        rows = _filled(num_heads, device)
        first = rows.pop()
        _ready[key] = rows
        return first


def _of_capture(num_heads: int, device: torch.device) -> torch.Tensor:
    capture = capture_id(device.index)
    if capture is None:  # not known, or no capture at all
        return torch.full((num_heads,), -torch.inf, dtype=torch.float32, device=device)
    stream, number = capture
    key = (num_heads, device.index, stream)
    last, rows = _in_capture.get(key, (None, []))
    if last != number or not rows:
        rows = _filled(num_heads, device)
        _in_capture[key] = (number, rows)
    return rows.pop()


def _filled(num_heads: int, device: torch.device) -> list[torch.Tensor]:
    gap = -num_heads % ALIGNMENT
    sizes = [num_heads, gap] if gap else [num_heads]
    with torch.inference_mode(False), torch.no_grad():  # evaluation and training share them
        room = (NUM_ROWS * sum(sizes),)
        block = torch.full(room, -torch.inf, dtype=torch.float32, device=device)
        # "unsafe": pieces are no views, and know nothing of each other's versions
        pieces = block.unsafe_split_with_sizes(sizes * NUM_ROWS)
        return list(pieces[:: len(sizes)])
