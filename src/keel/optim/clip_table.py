"""From the gammas of all heads to the factors of all rows, as tensor arithmetic.

A layer's heads have gammas; key heads and layers have the smallest gamma of their query heads.
Every factor is gamma ** a * smallest ** b, with exponents by role:

    rows            own keys (MHA, MLA)   q_only     compensated            group
    queries         g^alpha               g          g / s^(1 - alpha)      s^alpha
    keys            g^(1 - alpha)         1          s^(1 - alpha)          s^(1 - alpha)
    whole queries   g                     g          g                      g

with g the head's gamma and s the smallest of the heads that share its key head. In each column
but the last, the factors of a query head and its key head multiply to g; in the last, to s.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from keel.optim.clip_specs import Role, RowLayout

Gqa = Literal["q_only", "compensated", "group"]
MODES: tuple[Gqa, ...] = ("q_only", "compensated", "group")

Term = tuple[int, float]
"""A place among [1, gammas, minima], and its exponent."""


class ClipTable:
    """Collects factors layer by layer on the host; then makes them from gammas on the device."""

    def __init__(self, alpha: float, gqa: Gqa, num_heads: int) -> None:
        """num_heads: gammas of all layers together."""
        self.alpha, self.gqa, self.num_heads = alpha, gqa, num_heads
        self._entries: dict[tuple[Term, Term], int] = {((0, 0.0), (0, 0.0)): 0}
        self._minima: dict[tuple[int, ...], int] = {}

    def rows_of(
        self,
        layout: RowLayout,
        *,
        first_gamma: int,
        heads: range,
        kv_heads: range,
    ) -> np.ndarray:
        """(rows,) int: the factor of each row, -1 for rows of heads that are not among `heads`.

        heads, kv_heads: those of the layer that have gammas here, in the layout's numbers; the
        first of them has gamma number `first_gamma`.
        """
        places = [self._place(b.role, b.head, first_gamma, heads, kv_heads) for b in layout]
        return np.repeat(np.array(places), [b.rows for b in layout])

    def _place(self, role: Role, head: int, first_gamma: int, heads: range, kv_heads: range) -> int:
        if role is Role.REST:
            return 0
        group, alpha = len(heads) // len(kv_heads), self.alpha
        if role in (Role.LAYER_Q, Role.LAYER_K):
            everyone = self._minimum(range(first_gamma, first_gamma + len(heads)))
            return self._entry((0, 0.0), (everyone, alpha if role is Role.LAYER_Q else 1 - alpha))
        if head not in (kv_heads if role is Role.K else heads):
            return -1
        kv = head - kv_heads.start if role is Role.K else (head - heads.start) // group
        gamma = first_gamma + (kv * group if role is Role.K else head - heads.start)
        if role is Role.Q_WHOLE:
            return self._entry((gamma + 1, 1.0), (0, 0.0))
        if group == 1:
            return self._entry((gamma + 1, alpha if role is Role.Q else 1 - alpha), (0, 0.0))
        if self.gqa == "q_only":
            return 0 if role is Role.K else self._entry((gamma + 1, 1.0), (0, 0.0))
        first = first_gamma + kv * group
        smallest = self._minimum(range(first, first + group))
        if role is Role.K:
            return self._entry((0, 0.0), (smallest, 1 - alpha))
        if self.gqa == "compensated":
            return self._entry((gamma + 1, 1.0), (smallest, alpha - 1))
        return self._entry((0, 0.0), (smallest, alpha))

    def _minimum(self, gammas: range) -> int:
        places = tuple(n + 1 for n in gammas)
        return 1 + self.num_heads + self._minima.setdefault(places, len(self._minima))

    def _entry(self, one: Term, other: Term) -> int:
        return self._entries.setdefault((one, other), len(self._entries))

    def on(self, device: torch.device, dtype: torch.dtype) -> Factors:
        entries, minima = list(self._entries), list(self._minima)
        return Factors(self.num_heads, entries, minima, device, dtype)


class Factors:
    """A finished table on its device, and the gammas that it is read with."""

    def __init__(
        self,
        num_heads: int,
        entries: list[tuple[Term, Term]],
        minima: list[tuple[int, ...]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        aligned = torch.ones(4 + num_heads + len(minima), dtype=dtype, device=device)
        self._base = aligned[3:]  # so that gammas begin at 16 bytes, as launches like it
        self.gammas = self._base[1 : 1 + num_heads]
        """(heads,), to be written to: it stands among the numbers that `now` looks up."""
        self._smallest = self._base[1 + num_heads :]
        self._members = None
        if minima:  # rows of unequal length are filled up with place 0, which holds 1
            width = max(map(len, minima))
            filled = [[*members, *[0] * (width - len(members))] for members in minima]
            self._members = torch.tensor(filled, device=device)
        self.terms = [  # (places, powers) of all entries
            (
                torch.tensor([entry[n][0] for entry in entries], device=device),
                torch.tensor([entry[n][1] for entry in entries], dtype=dtype, device=device),
            )
            for n in range(2 if minima else 1)
        ]

    @property
    def of_one_gamma_each(self) -> bool:
        """Whether every factor is a power of one head's gamma, in single precision."""
        return self._members is None and self._base.dtype == torch.float32

    def now(self) -> torch.Tensor:
        """(entries,) from the gammas as they are."""
        if self._members is not None:
            torch.amin(self._base[self._members], 1, out=self._smallest)
        places, powers = self.terms[0]
        factors = self._base[places].pow(powers)
        for places, powers in self.terms[1:]:
            factors = factors * self._base[places].pow(powers)
        return factors
