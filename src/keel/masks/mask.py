"""A mask: the union of its slices over tq queries and tk keys."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from keel.masks.arrays import Ints
from keel.masks.intervals import UNBOUNDED, RowIntervals, row_intervals
from keel.masks.ranges import AttnRange, AttnRanges
from keel.masks.slices import AttnMaskType, AttnSlice

MAX_TOKENS = 2**31 - 1

RangesLike = torch.Tensor | AttnRanges | Sequence[Any]
TypesLike = torch.Tensor | Sequence[Any] | AttnMaskType | int | str | None


class AttnMask:
    """Immutable union of slices; equal by value, hashable, cheap to pass around.

    A pair that several slices cover attends once. Empty slices are legal.

    >>> mask = AttnMask([AttnSlice(0, 4, 0, 4, hi=0)], tq=4, tk=4)
    >>> mask.area(), mask.to_dense()[1].tolist()
    (10, [True, True, False, False])
    """

    def __init__(self, slices: Iterable[AttnSlice] | Ints, tq: int, tk: int) -> None:
        for name, value in (("tq", tq), ("tk", tk)):
            if not 0 <= value <= MAX_TOKENS:
                raise ValueError(f"{name} must be in 0..{MAX_TOKENS}, got {value}")
        array = slices if isinstance(slices, np.ndarray) else _as_array(slices)
        if array.ndim != 2 or array.shape[1] != 6 or array.dtype.kind not in "iu":
            raise ValueError(
                "slices must be AttnSlice objects or an integer array of shape (n, 6), "
                f"got {array.dtype} of shape {array.shape}"
            )
        self._slices = np.array(array, np.int64, order="C")  # a copy: the caller may reuse its own
        np.clip(self._slices[:, 4:], -UNBOUNDED, UNBOUNDED, out=self._slices[:, 4:])
        self.tq, self.tk = int(tq), int(tk)
        _check_bounds(self._slices, self.tq, self.tk)
        with torch.inference_mode(False):  # a mask made while evaluating serves training too
            self.tensor = torch.from_numpy(self._slices.copy())
        """(num_slices, 6) int64 on the CPU: what operators take. Do not write to it."""
        self._slices.flags.writeable = False
        content = hashlib.sha256(f"{self.tq},{self.tk};".encode())
        content.update(self._slices.data)
        self.digest = content.digest()
        """32 bytes that name the value of the mask, the same in every process."""

    @classmethod
    def from_ranges(
        cls,
        q_ranges: RangesLike,
        k_ranges: RangesLike,
        attn_type_map: TypesLike,
        tq: int,
        tk: int,
    ) -> AttnMask:
        """The mask of N (q_range, k_range, type) triplets; one type may serve for all."""
        q, k = _ranges_array(q_ranges, "q_ranges"), _ranges_array(k_ranges, "k_ranges")
        if len(q) != len(k):
            raise ValueError(
                f"q_ranges and k_ranges must have the same length, got {len(q)} and {len(k)}"
            )
        kind = _types_array(attn_type_map, len(q))
        # Bounds first: a band computed from a reversed range would hide the real mistake.
        band = np.full((len(q), 2), (-UNBOUNDED, UNBOUNDED), np.int64)
        _check_bounds(np.concatenate([q, k, band], 1), tq, tk)
        band[:, 0] = np.where(kind & AttnMaskType.INVCAUSAL, k[:, 0] - q[:, 0], -UNBOUNDED)
        band[:, 1] = np.where(kind & AttnMaskType.CAUSAL, k[:, 1] - q[:, 1], UNBOUNDED)
        return cls(np.concatenate([q, k, band], 1), tq, tk)

    @property
    def array(self) -> Ints:
        """Read-only (num_slices, 6) int64: q0, q1, k0, k1, lo, hi (unbounded: +-2**40)."""
        return self._slices

    @property
    def num_slices(self) -> int:
        return len(self._slices)

    @property
    def shape(self) -> tuple[int, int]:
        return self.tq, self.tk

    def __iter__(self) -> Iterator[AttnSlice]:
        for q0, q1, k0, k1, lo, hi in self._slices.tolist():
            band = (None if lo <= -UNBOUNDED else lo, None if hi >= UNBOUNDED else hi)
            yield AttnSlice(q0, q1, k0, k1, *band)

    def __len__(self) -> int:
        return len(self._slices)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return AttnMask, (self._slices, self.tq, self.tk)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, AttnMask):
            return NotImplemented
        return self.digest == other.digest

    def __or__(self, other: AttnMask) -> AttnMask:
        """The union of two masks of one shape."""
        if not isinstance(other, AttnMask):
            return NotImplemented
        if self.shape != other.shape:
            raise ValueError(f"cannot unite masks of shapes {self.shape} and {other.shape}")
        return AttnMask(np.concatenate([self._slices, other._slices]), self.tq, self.tk)

    def __repr__(self) -> str:
        pairs = self.tq * self.tk
        part = f"{self.area() / pairs:.1%}" if pairs else "nothing"
        return f"AttnMask({self.num_slices} slices over {self.tq} x {self.tk}, {part} attended)"

    def row_intervals(self) -> RowIntervals:
        """What each row sees, as disjoint key intervals (see `RowIntervals`)."""
        return self._intervals

    @functools.cached_property
    def _intervals(self) -> RowIntervals:
        return row_intervals(self._slices)

    def area(self) -> int:
        """Exact number of attended pairs; pairs covered twice count once."""
        return self._area

    @functools.cached_property
    def _area(self) -> int:
        return self._intervals.area()

    def cut(self, q: tuple[int, int] | None = None, k: tuple[int, int] | None = None) -> AttnMask:
        """The part of the mask in queries [q0, q1) and keys [k0, k1), in local coordinates."""
        (q0, q1), (k0, k1) = q or (0, self.tq), k or (0, self.tk)
        if not (0 <= q0 <= q1 <= self.tq and 0 <= k0 <= k1 <= self.tk):
            raise ValueError(f"cut q=[{q0}, {q1}) k=[{k0}, {k1}) leaves the mask {self.shape}")
        part = self._slices.copy()
        part[:, 0:2] = np.clip(part[:, 0:2], q0, q1) - q0
        part[:, 2:4] = np.clip(part[:, 2:4], k0, k1) - k0
        bounded = np.abs(part[:, 4:6]) < UNBOUNDED
        part[:, 4:6] = np.where(bounded, part[:, 4:6] + q0 - k0, part[:, 4:6])
        keep = (part[:, 0] < part[:, 1]) & (part[:, 2] < part[:, 3])
        return AttnMask(part[keep], q1 - q0, k1 - k0)

    def to_dense(self) -> torch.Tensor:
        """(tq, tk) bool on the CPU: for tests, pictures and small problems."""
        row, lo, hi = self._intervals.expand()
        edges = np.zeros((self.tq, self.tk + 1), np.int32)
        np.add.at(edges, (row, lo), 1)
        np.add.at(edges, (row, hi), -1)
        return torch.from_numpy(np.cumsum(edges, axis=1)[:, : self.tk] > 0)

    def draw(self, path: str | None = None, *, size: int = 48, title: str | None = None) -> str:
        """Text art of the mask; with a path, also a picture there (needs matplotlib)."""
        from keel.masks.draw import draw

        return draw(self, path, size=size, title=title)


def _as_array(slices: Iterable[AttnSlice]) -> Ints:
    rows = [
        (
            *(s.q0, s.q1, s.k0, s.k1),
            -UNBOUNDED if s.lo is None else s.lo,
            UNBOUNDED if s.hi is None else s.hi,
        )
        for s in slices
    ]
    return np.array(rows, np.int64).reshape(-1, 6)


def _check_bounds(slices: Ints, tq: int, tk: int) -> None:
    """Every range must be ordered and inside its axis; names the first slice that is not."""
    for name, start, end, limit in (
        ("q_range", slices[:, 0], slices[:, 1], tq),
        ("k_range", slices[:, 2], slices[:, 3], tk),
    ):
        bad = (start < 0) | (end < start) | (end > limit)
        if bad.any():
            n = int(np.argmax(bad))
            a, b = int(start[n]), int(end[n])
            if a < 0:
                why = "starts below 0"
            elif b < a:
                why = "is reversed"
            else:
                why = f"ends after the last of {limit} tokens"
            raise ValueError(f"slice {n}: {name} [{a}, {b}) {why}")


def _ranges_array(ranges: RangesLike, name: str) -> Ints:
    """(n, 2) int64 from a tensor (CPU or CUDA, int32/int64), AttnRanges or a list of pairs."""
    if isinstance(ranges, AttnRanges):
        return np.array(ranges.to_list(), np.int64).reshape(-1, 2)
    if isinstance(ranges, torch.Tensor):
        if ranges.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {ranges.dtype}")
        array = ranges.detach().cpu().numpy().astype(np.int64)
    else:
        try:
            pairs = [(r.start, r.end) if isinstance(r, AttnRange) else tuple(r) for r in ranges]
            array = np.asarray(pairs)
        except (TypeError, ValueError):
            raise ValueError(
                f"{name} must be a list of pairs (start, end), got {ranges!r}"
            ) from None
        if array.size == 0:
            return np.zeros((0, 2), np.int64)
        if array.dtype.kind not in "iu":
            raise ValueError(f"{name} must hold integers, got {array.dtype}")
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"{name} must have shape (n, 2), got {tuple(array.shape)}")
    return array.astype(np.int64)


def _types_array(types: TypesLike, count: int) -> Ints:
    if types is None:
        return np.zeros(count, np.int64)
    if isinstance(types, (int, str)):
        return np.full(count, int(AttnMaskType.parse(types)), np.int64)
    if isinstance(types, torch.Tensor):
        if types.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"attn_type_map must be int32 or int64, got {types.dtype}")
        array = types.detach().cpu().numpy().astype(np.int64)
    else:
        array = np.array([int(AttnMaskType.parse(t)) for t in types], np.int64)
    if array.shape != (count,):
        raise ValueError(
            f"attn_type_map must have shape ({count},), one type per range, "
            f"got {tuple(array.shape)}"
        )
    bad = (array < 0) | (array > 3)
    if bad.any():
        n = int(np.argmax(bad))
        raise ValueError(
            f"attn_type_map[{n}] is {int(array[n])}: expected 0 (full), 1 (causal), "
            "2 (inverse-causal) or 3 (bi-causal)"
        )
    return array
