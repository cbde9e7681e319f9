"""Which rank holds which tokens.

The global token axis is cut into pieces; each belongs to one rank. A rank keeps its pieces in
ascending order, one behind the other: that is its *local* axis.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from keel.masks.arrays import Ints, ragged_range


class Layout:
    """Pieces of the token axis and their ranks; immutable, equal by value.

    >>> layout = Layout([0, 3, 5], [3, 5, 8], [0, 1, 0], num_ranks=2)
    >>> layout.rows.tolist(), layout.tokens_of(0).tolist()
    ([6, 2], [0, 1, 2, 5, 6, 7])
    """

    def __init__(
        self,
        starts: Sequence[int] | Ints,
        ends: Sequence[int] | Ints,
        ranks: Sequence[int] | Ints,
        num_ranks: int,
    ) -> None:
        first, last, owner = (np.asarray(x, np.int64).reshape(-1) for x in (starts, ends, ranks))
        there = last > first
        order = np.argsort(first[there], kind="stable")
        first, last, owner = (x[there][order] for x in (first, last, owner))
        if len(first) and (first[0] != 0 or (first[1:] != last[:-1]).any()):
            raise ValueError(
                "pieces of a layout must cover the tokens from 0 on, each once; got pieces "
                f"{list(zip(first.tolist(), last.tolist(), strict=True))[:8]}"
            )
        if num_ranks < 1:
            raise ValueError(f"a layout needs at least 1 rank, got num_ranks={num_ranks}")
        if len(owner) and not (owner.min() >= 0 and owner.max() < num_ranks):
            raise ValueError(f"ranks of a layout must be in 0..{num_ranks - 1}, got {owner[:8]}")
        joined = np.ones(len(first), bool)
        joined[1:] = owner[1:] != owner[:-1]
        self.starts: Ints = first[joined]
        self.ranks: Ints = owner[joined]
        self.total = int(last[-1]) if len(last) else 0
        self.ends: Ints = np.append(self.starts[1:], self.total)[: len(self.starts)]
        self.num_ranks = num_ranks
        for array in (self.starts, self.ends, self.ranks):
            array.flags.writeable = False

    @functools.cached_property
    def rows(self) -> Ints:
        """(num_ranks,) tokens of each rank."""
        count = np.bincount(self.ranks, self.ends - self.starts, self.num_ranks)
        return count.astype(np.int64)

    @functools.cached_property
    def local_starts(self) -> Ints:
        """(pieces,) where each piece begins on its rank's local axis."""
        order = np.argsort(self.ranks, kind="stable")
        lengths = (self.ends - self.starts)[order]
        behind = np.cumsum(lengths) - lengths
        first_of_rank = np.cumsum(self.rows) - self.rows
        starts = np.empty(len(order), np.int64)
        starts[order] = behind - first_of_rank[self.ranks[order]]
        return starts

    def tokens_of(self, rank: int) -> Ints:
        """(rows,) global numbers of a rank's tokens, in local order."""
        mine = self.ranks == rank
        lengths = (self.ends - self.starts)[mine]
        return ragged_range(self.starts[mine], lengths)

    @functools.cached_property
    def digest(self) -> bytes:
        """32 bytes that name the value of the layout, the same in every process."""
        sizes = np.array([self.total, self.num_ranks], np.int64)
        return hashlib.sha256(np.concatenate([sizes, self.starts, self.ranks]).tobytes()).digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Layout({len(self.starts)} pieces of {self.total} tokens on {self.num_ranks} ranks)"


def contiguous(total: int, num_ranks: int) -> Layout:
    """Each rank one piece, in order; lengths differ by at most one token."""
    bounds = np.arange(num_ranks + 1, dtype=np.int64) * total // num_ranks
    return Layout(bounds[:-1], bounds[1:], np.arange(num_ranks), num_ranks)


def zigzag(total: int, num_ranks: int) -> Layout:
    """Each rank a piece from the front and its mirror image from the back, as in ring attention."""
    bounds = np.arange(2 * num_ranks + 1, dtype=np.int64) * total // (2 * num_ranks)
    ranks = np.minimum(np.arange(2 * num_ranks), np.arange(2 * num_ranks)[::-1])
    return Layout(bounds[:-1], bounds[1:], ranks, num_ranks)
