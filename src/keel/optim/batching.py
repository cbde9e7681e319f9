"""Matrices of one shape orthogonalised together, as few large batched products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from keel.optim import newton_schulz
from keel.optim.coefficients import Triple

BATCH_ELEMENTS = 1 << 28
"""Numbers in a batch; more gain nothing, and each costs memory for two or three more."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Of Newton-Schulz."""

    triples: tuple[Triple, ...]
    eps: float
    dtype: torch.dtype
    form: str
    normalize: str


def orthogonalize_all(stacks: Sequence[torch.Tensor], settings: Settings) -> list[torch.Tensor]:
    """Each (count, rows, columns) to the same in settings.dtype; (r, c) goes along with (c, r)."""
    results: list[list[torch.Tensor]] = [[] for _ in stacks]
    for shape in dict.fromkeys(_turned(x) for x in stacks):
        rows, columns = shape
        most = max(1, BATCH_ELEMENTS // (rows * columns))
        same = [i for i, x in enumerate(stacks) if _turned(x) == shape]
        for batch in _filled(same, [len(stacks[i]) for i in same], most):
            count = sum(stop - start for _, start, stop in batch)
            x = stacks[batch[0][0]].new_empty(count, rows, columns, dtype=settings.dtype)
            places = x.split([stop - start for _, start, stop in batch])
            for (i, start, stop), place in zip(batch, places, strict=True):
                newton_schulz.normalize_into(
                    stacks[i][start:stop], place, settings.eps, settings.normalize
                )
            y = newton_schulz.iterate(x, settings.triples, settings.form)
            parts = y.split([stop - start for _, start, stop in batch])
            for (i, _, _), part in zip(batch, parts, strict=True):
                turned = stacks[i].shape[-2] > stacks[i].shape[-1]
                results[i].append(part.mT if turned else part)
    return [r[0] if len(r) == 1 else torch.cat(r) for r in results]


def _turned(x: torch.Tensor) -> tuple[int, int]:
    return min(x.shape[-2:]), max(x.shape[-2:])


def _filled(indices: list[int], counts: list[int], most: int) -> list[list[tuple[int, int, int]]]:
    """Batches of at most `most` matrices: (stack, start, stop) of each part.

    >>> _filled([0, 2], [3, 2], 4)
    [[(0, 0, 3), (2, 0, 1)], [(2, 1, 2)]]
    """
    batches: list[list[tuple[int, int, int]]] = []
    room = 0
    for index, count in zip(indices, counts, strict=True):
        start = 0
        while start < count:
            if room == 0:
                batches.append([])
                room = most
            stop = min(count, start + room)
            batches[-1].append((index, start, stop))
            room -= stop - start
            start = stop
    return batches
