"""Where keys should live that are other tokens than the queries: with those who read them.

A key that a reader holds travels to one rank less, whichever reader that is. So each unit of keys
goes to the rank that would otherwise receive the most of its rows; of several, to the one that
computes the most with them, since own keys are computed on while others still travel.
"""

from __future__ import annotations

import numpy as np

from keel.distributed.layout import Layout, contiguous, zigzag
from keel.distributed.work import Floats, tiles_read
from keel.masks.arrays import Ints, order_by
from keel.masks.mask import AttnMask

MAX_CELLS = 1 << 23
"""Units of keys times ranks that are looked at; more make larger units."""


def near_readers(mask: AttnMask, q_layout: Layout, *, unit: int = 128) -> Layout:
    """A layout of the keys: equally many on all ranks to within one unit, near their readers.

    >>> from keel import masks
    >>> queries = Layout([0, 4], [4, 6], [1, 0], num_ranks=2)
    >>> keys = near_readers(masks.documents([0, 4, 6], [0, 8, 16]), queries, unit=4)
    >>> keys.tokens_of(1).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    num_ranks = q_layout.num_ranks
    unit = max(unit, -(-mask.tk * num_ranks // MAX_CELLS))
    count = -(-mask.tk // unit)
    rows, tiles = tiles_read(mask, q_layout, unit)
    score = rows + tiles / (tiles.max(initial=0.0) + 1)  # tiles only decide between equals
    owner = _assigned(score) if count else np.empty(0, np.int64)
    short = mask.tk % unit > 0
    plain = [x for x in _in_order(count, num_ranks) if _is_even(x, num_ranks, short)]
    owner = max((owner, *plain), key=lambda x: rows[x, np.arange(count)].sum())
    start = np.arange(count) * unit
    return Layout(start, np.minimum(start + unit, mask.tk), owner, num_ranks)


def _in_order(count: int, num_ranks: int) -> list[Ints]:
    """(units,) ranks of units that stay together: rarely better than `_assigned`, which looks at
    each unit by itself, but then by much."""
    found = []
    for layout in (contiguous(count, num_ranks), zigzag(count, num_ranks)):
        owner = np.empty(count, np.int64)
        for rank in range(num_ranks):
            owner[layout.tokens_of(rank)] = rank
        found.append(owner)
    return found


def _is_even(owner: Ints, num_ranks: int, last_is_short: bool) -> bool:
    """Whether tokens of ranks differ by one unit at most."""
    if len(owner) == 0:
        return False
    units = np.bincount(owner, minlength=num_ranks)
    most = units.max()
    return bool(most - units.min() <= 1 and (not last_is_short or units[owner[-1]] == most))


def _assigned(score: Floats) -> Ints:
    """(units,) ranks with high scores (ranks, units), equally many units to each rank.

    In rounds: every unit asks for its best rank that has room; a rank with too little room takes
    those that would lose the most elsewhere. Units that no rank with room reads ask last.
    """
    num_ranks, count = score.shape
    share, extra = divmod(count, num_ranks)
    # The last unit may be short: a rank with one unit more than others makes up for it.
    owner = np.full(count, -1, np.int64)
    demand = score.sum(1)
    wanted = score[:, -1] == score[:, -1].max()
    owner[-1] = last = int(np.where(wanted, demand, np.inf).argmin())
    demand[last] = np.inf
    room = np.full(num_ranks, share)
    room[np.argsort(-demand, kind="stable")[:extra]] += 1
    room[last] -= 1
    wishes = np.argsort(-score, axis=0, kind="stable").T  # (units, ranks), the best first
    wished = np.take_along_axis(score.T, wishes, 1)
    left, turn = np.arange(count - 1), np.zeros(count, np.int64)
    while len(left):
        full = room[wishes[left, turn[left]]] == 0
        while full.any():
            turn[left[full]] += 1
            full = room[wishes[left, turn[left]]] == 0
        read = wished[left, turn[left]] > 0
        asking = left[read] if read.any() else left  # nobody's keys take what room is left
        best = wishes[asking, turn[asking]]
        next_best = np.minimum(turn[asking] + 1, num_ranks - 1)
        regret = np.rint((wished[asking, turn[asking]] - wished[asking, next_best]) * 1024)
        order = order_by(best, (regret.max() - regret).astype(np.int64), asking)
        ranked = best[order]
        place = np.arange(len(asking)) - np.searchsorted(ranked, ranked)
        taken = order[place < room[ranked]]
        owner[asking[taken]] = best[taken]
        room -= np.bincount(best[taken], minlength=num_ranks)
        left = np.setdiff1d(left, asking[taken], assume_unique=True)
    return owner
