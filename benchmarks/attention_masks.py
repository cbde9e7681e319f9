"""The masks of the attention benchmarks, and what they cost at least.

| name | mask |
|---|---|
| full, causal | plain |
| swa | causal window: row i sees keys [i - 1024, i] |
| vfull, vcausal | packed documents, lengths lognormal with median tokens/24 |
| tiny | packed causal documents of 32 to 128 tokens, 1,000 of them in 64k |
| blockcausal | those of vfull in blocks of tokens/32: a block sees itself and what came before it |
| video | packed videos of equal chunks: a chunk sees itself and the 4 before it, as Magi-1's do |

In all of them a row sees one range of keys, so `row_ranges` says everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keel import masks
from keel.masks import AttnMask

WINDOW = 1024
TINY = (32, 128)
"""Tokens of a tiny document."""
TINY_MEAN = 65536 / 1000
"""So that 64k tokens are 1,000 of them."""
VIDEO_CHUNKS_SEEN = 5
VIDEOS = ((8, 1 / 20), (9, 1 / 32), (16, 1 / 50))
"""(chunks, tokens of a chunk / all tokens) of each video, in turn until the tokens are used up:
videos of one batch differ in length and resolution."""
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Problem:
    """One mask at one length, in the words of each peer."""

    name: str
    tokens: int
    mask: AttnMask
    causal: bool = False
    window: int = -1
    """Keys to the left that a causal window shows; -1: all."""
    bounds: tuple[int, ...] | None = None
    """cu_seqlens where documents say it all."""

    @property
    def rectangles(self) -> list[tuple[int, int, int, int]] | None:
        """(q0, q1, k0, k1) of every slice where none is cut by a band, else None."""
        if any(s.lo is not None or s.hi is not None for s in self.mask):
            return None
        return [(s.q0, s.q1, s.k0, s.k1) for s in self.mask]

    def row_ranges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Keys [start[i], end[i]) of every row i."""
        start, end = np.zeros((2, self.tokens), np.int64)
        for q0, q1, k0, k1, lo, hi in self.mask.array.tolist():
            rows = np.arange(q0, q1)
            if end[q0:q1].any():
                raise ValueError(f"{self.name}: a row with two slices has no single range of keys")
            start[q0:q1] = np.maximum(k0, rows + lo)
            end[q0:q1] = np.minimum(k1, rows + hi + 1)
        return start, end

    def flops(self, direction: str, hq: int, d: int, dv: int = 0) -> int:
        """4 * area * hq * d forward, 2.5 times as many backward; dv: of values, if not d."""
        keys, values = {"forward": (1, 1), "backward": (3, 2)}[direction]
        return 2 * (keys * d + values * (dv or d)) * self.mask.area() * hq

    def least_bytes(self, direction: str, hq: int, hk: int, d: int, dv: int = 0) -> int:
        """Of tensors of 16 bits that must move once, and the lse.

        Forward: q, k, v, out. Backward: q, k, v, out, dout, dq, dk, dv.
        """
        each_side = {"forward": 1, "backward": 2}[direction]
        return self.tokens * (each_side * (hq + hk) * (d + (dv or d)) * 2 + hq * 4)


def document_bounds(tokens: int, seed: int = 0) -> list[int]:
    """Lengths lognormal with median tokens/24 and sigma 1.2, clipped to [16, tokens/4]."""
    rng, bounds = np.random.default_rng(seed), [0]
    while bounds[-1] < tokens:
        length = int(np.clip(rng.lognormal(np.log(tokens / 24), 1.2), 16, tokens / 4))
        bounds.append(min(tokens, bounds[-1] + length))
    return bounds


def tiny_bounds(tokens: int, seed: int = 0) -> list[int]:
    """Documents of 32 to 128 tokens, 65.5 on average; less than 64 tokens are one document."""
    least, most = TINY
    count = min(round(tokens / TINY_MEAN), tokens // least)
    if count < 2:
        return [0, tokens]
    spare = tokens - count * least  # cut at random; what is too long for one goes to the shortest
    cuts = np.sort(np.random.default_rng(seed).integers(0, spare + 1, count - 1))
    extra = np.minimum(np.diff(cuts, prepend=0, append=spare), most - least)
    while rest := spare - int(extra.sum()):
        extra[np.argsort(extra, kind="stable")[: min(rest, count // 2)]] += 1
    return [0, *np.cumsum(extra + least).tolist()]


def video_mask(tokens: int) -> AttnMask:
    """Chunks of packed videos, one slice each: a chunk sees itself and the 4 before it."""
    rows, keys, first = [], [], 0
    for chunks, part in itertools.cycle(VIDEOS):
        length = max(1, int(tokens * part))
        edges = [min(tokens, first + n * length) for n in range(chunks + 1)]
        for n in range(chunks):
            if edges[n] < tokens:
                rows.append([edges[n], edges[n + 1]])
                keys.append([edges[max(0, n + 1 - VIDEO_CHUNKS_SEEN)], edges[n + 1]])
        first = edges[-1]
        if first == tokens:
            return AttnMask.from_ranges(rows, keys, 0, tokens, tokens)


def _documents(name: str, tokens: int, bounds: list[int], causal: bool) -> Problem:
    mask = masks.documents(bounds, causal=causal)
    return Problem(name, tokens, mask, causal, bounds=tuple(bounds))


def _block_causal(tokens: int) -> AttnMask:
    return masks.block_causal(max(1, tokens // 32), document_bounds(tokens))


MASKS: dict[str, Callable[[int], Problem]] = {
    "full": lambda t: Problem("full", t, masks.full(t)),
    "causal": lambda t: Problem("causal", t, masks.causal(t), causal=True),
    "vfull": lambda t: _documents("vfull", t, document_bounds(t), False),
    "vcausal": lambda t: _documents("vcausal", t, document_bounds(t), True),
    "swa": lambda t: Problem(
        "swa", t, masks.sliding_window(t, left=WINDOW, right=0), True, window=WINDOW
    ),
    "blockcausal": lambda t: Problem("blockcausal", t, _block_causal(t)),
    "tiny": lambda t: _documents("tiny", t, tiny_bounds(t), True),
    "video": lambda t: Problem("video", t, video_mask(t)),
}
PLAIN = ("full", "causal", "swa")
