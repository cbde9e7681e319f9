"""Which matrices a parameter holds, and how large a step each of them takes.

The last two dims of a parameter are a matrix, or several on top of each other: blocks of rows that
are orthogonalised on their own. Dims before them stack such matrices. A *chunk* is a box of the
parameter that holds matrices of one shape; it is worked off as a whole, on one rank.

Shapes here are global: those of the logical parameter, wherever its shards are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dim."""

ADJUST_LR = (None, "original", "match_rms_adamw")


def intersection(a: Box, b: Box) -> Box | None:
    """None where they share nothing."""
    shared = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return shared if all(s < e for s, e in shared) else None


def slices_in(box: Box, outer: Box) -> tuple[slice, ...]:
    """What selects `box` from a tensor that holds `outer`."""
    return tuple(slice(s - t, e - t) for (s, e), (t, _) in zip(box, outer, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(e - s for s, e in box)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of parameter number `param` that holds `count` matrices (rows, columns)."""

    param: int
    box: Box
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return math.prod(shape_of(self.box))

    @property
    def count(self) -> int:
        return self.numel // (self.rows * self.columns)

    @property
    def flops(self) -> int:
        """Of one step in the plain form, for all its matrices."""
        m, n = sorted((self.rows, self.columns))
        return self.count * (4 * m * m * n + 2 * m**3)


def row_blocks(
    shape: Sequence[int], split_sizes: Sequence[int] | None, num_heads: int | None, name: str
) -> tuple[int, ...]:
    """Rows of the blocks of one matrix (shape[-2], shape[-1]), from the top.

    >>> row_blocks((96, 64), None, 3, "q_proj")
    (32, 32, 32)
    """
    rows = shape[-2]
    if split_sizes is not None and num_heads is not None:
        raise ValueError(
            f"{name}: split_sizes and num_heads both cut rows into blocks; give one of them"
        )
    if num_heads is not None:
        if num_heads < 1 or rows % num_heads:
            raise ValueError(
                f"{name} of shape {tuple(shape)} has {rows} rows, which {num_heads} heads do not "
                "divide; check num_heads of its group"
            )
        return (rows // num_heads,) * num_heads
    if split_sizes is not None:
        sizes = tuple(split_sizes)
        if not sizes or min(sizes) < 1 or sum(sizes) != rows:
            raise ValueError(
                f"{name} of shape {tuple(shape)} has {rows} rows, but the split_sizes of its group "
                f"are {sizes}, together {sum(sizes)}; they must be positive and add up to the rows"
            )
        return sizes
    return (rows,)


def chunks_of(
    param: int,
    shape: Sequence[int],
    blocks: Sequence[int],
    *,
    bounds: Iterable[Iterable[int]] = (),
    parts: int = 1,
) -> list[Chunk]:
    """The parameter cut into chunks, for `parts` ranks to share.

    Cuts lie between matrices: along the first dim of a stack, else between blocks of rows. Where
    `bounds` (for each dim, the rows at which shards end) fall between matrices they are taken, so
    that matrices which lie on one rank may stay there.
    """
    if math.prod(shape) == 0:
        return []
    bounds = [set(b) for b in bounds] or [set() for _ in shape]
    chunks, top = [], 0
    for size, run in itertools.groupby(blocks):
        count = len(list(run))
        box = [(0, d) for d in shape]
        box[-2] = (top, top + count * size)
        axis, unit = (0, 1) if len(shape) > 2 else (len(shape) - 2, size)
        start, stop = box[axis]
        cuts = {c for c in bounds[axis] if start < c < stop and (c - start) % unit == 0}
        intervals = list(itertools.pairwise([start, *sorted(cuts), stop]))
        for begin, end in intervals:
            units = (end - begin) // unit
            pieces = min(units, -(-parts // len(intervals)))
            edges = [begin + unit * (units * i // pieces) for i in range(pieces + 1)]
            for s, e in itertools.pairwise(edges):
                box[axis] = (s, e)
                chunks.append(Chunk(param, tuple(box), size, shape[-1]))
        top += count * size
    return chunks


def adjusted_lr(lr: float, how: str | None, rows: int, columns: int) -> float:
    """The step of a (rows, columns) matrix whose singular values are about 1."""
    if how == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1, rows / columns))
