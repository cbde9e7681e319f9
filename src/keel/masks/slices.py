"""A slice: the pairs of a rectangle whose diagonal ``j - i`` lies inside a band.

The four public mask types are special cases of it. Slices are closed under cutting in q and k,
and their area has a closed form, so nothing here ever enumerates pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from keel.masks.ranges import AttnRange, RangeLike


class AttnMaskType(IntEnum):
    """How a (q_range, k_range) rectangle is masked; bit 0 = causal, bit 1 = inverse-causal."""

    FULL = 0
    """The whole rectangle."""
    CAUSAL = 1
    """Aligned bottom-right: the last query sees every key of the range."""
    INVCAUSAL = 2
    """Aligned top-left: the first query sees every key of the range."""
    BICAUSAL = 3
    """Both at once."""

    @classmethod
    def parse(cls, value: AttnMaskType | int | str) -> AttnMaskType:
        """Accepts a member, its code 0..3, or its name in any case (``"bi_causal"`` too)."""
        if isinstance(value, str):
            name = value.replace("_", "").replace("-", "").upper()
            if name in cls.__members__:
                return cls[name]
        elif not isinstance(value, bool) and int(value) == value and 0 <= value <= 3:
            return cls(int(value))
        raise ValueError(
            f"unknown mask type {value!r}: "
            "expected 0..3 or one of full, causal, invcausal, bicausal"
        )


@dataclass(frozen=True, slots=True)
class AttnSlice:
    """Pairs (i, j) with q0 <= i < q1, k0 <= j < k1 and lo <= j - i <= hi (None: unbounded).

    >>> AttnSlice.of_type((0, 2), (0, 5), "causal").area
    9
    >>> AttnSlice(0, 100, 0, 100, lo=-3, hi=0).cut_q(50, 60).area
    40
    """

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int | None = None
    hi: int | None = None

    @classmethod
    def of_type(
        cls, q_range: RangeLike, k_range: RangeLike, mask_type: AttnMaskType | int | str
    ) -> AttnSlice:
        """The slice that (q_range, k_range, mask_type) means."""
        q, k = AttnRange.of(q_range), AttnRange.of(k_range)
        kind = AttnMaskType.parse(mask_type)
        return cls(
            q.start,
            q.end,
            k.start,
            k.end,
            lo=k.start - q.start if kind & AttnMaskType.INVCAUSAL else None,
            hi=k.end - q.end if kind & AttnMaskType.CAUSAL else None,
        )

    @property
    def area(self) -> int:
        """Exact number of pairs."""
        num_q, num_k = self.q1 - self.q0, self.k1 - self.k0
        if num_q <= 0 or num_k <= 0:
            return 0
        below = 0 if self.lo is None else self._pairs_up_to(self.lo - 1)
        upto = num_q * num_k if self.hi is None else self._pairs_up_to(self.hi)
        return max(0, upto - below)

    def _pairs_up_to(self, diagonal: int) -> int:
        """Pairs of the rectangle with j - i <= diagonal: a sum of clamp(u, 0, num_k) over rows."""
        num_q, num_k = self.q1 - self.q0, self.k1 - self.k0
        first = self.q0 + diagonal - self.k0 + 1

        def clamp_sum(u: int) -> int:
            if u <= 0:
                return 0
            inside = min(u, num_k)
            return inside * (inside + 1) // 2 + (u - inside) * num_k

        return clamp_sum(first + num_q - 1) - clamp_sum(first - 1)

    def row(self, i: int) -> tuple[int, int]:
        """Keys [start, end) that row i sees; (0, 0) when none."""
        if not self.q0 <= i < self.q1:
            return 0, 0
        start = self.k0 if self.lo is None else max(self.k0, i + self.lo)
        end = self.k1 if self.hi is None else min(self.k1, i + self.hi + 1)
        return (start, end) if start < end else (0, 0)

    def cut_q(self, start: int, end: int) -> AttnSlice:
        """The part with queries in [start, end)."""
        q0 = max(self.q0, start)
        return AttnSlice(q0, max(q0, min(self.q1, end)), self.k0, self.k1, self.lo, self.hi)

    def cut_k(self, start: int, end: int) -> AttnSlice:
        """The part with keys in [start, end)."""
        k0 = max(self.k0, start)
        return AttnSlice(self.q0, self.q1, k0, max(k0, min(self.k1, end)), self.lo, self.hi)

    def shift(self, dq: int, dk: int) -> AttnSlice:
        """The same pairs in coordinates moved by (dq, dk)."""
        move = dk - dq
        return AttnSlice(
            self.q0 + dq,
            self.q1 + dq,
            self.k0 + dk,
            self.k1 + dk,
            None if self.lo is None else self.lo + move,
            None if self.hi is None else self.hi + move,
        )
