"""Relief for the busiest rank: units swapped so that it sees fewer keys, at equal tokens and work.

The rank that sees the most keys comes first. Of one document after the other it tries to give away
all its units, or those that reach furthest, for as many units that bring it no new keys:

- to several ranks that see the same keys anyway, as far as their work allows (`_spread`);
- or to one rank, which may come to see more, but less than the busiest did (`_exchange`); in return
  the busiest may take units of one other document, if that is shorter.

What a rank sees of a document is taken for one stretch, from its first key to its last. That is so
for documents that are causal, full or causal by blocks; for others the solver does without relief.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keel.distributed.work import Floats
from keel.masks.arrays import Ints, order_by, ragged_range

Bools = NDArray[np.bool_]

NOTHING = 1 << 60
"""First key of a rank that sees nothing of a document."""

REACH = 4
"""Units reach furthest if none does by more than a rank's tokens divided by this."""

MAX_TRIES = 128
"""Of giving units away, in all; an exchange counts for two. One takes about 0.3 ms."""

MAX_DOCUMENTS = 8
"""Of the busiest rank, those of which it sees most; of others, to exchange for, the shortest."""


@dataclass(frozen=True, eq=False)
class Views:
    """What units see, document by document: a unit on the border of two has two entries."""

    unit: Ints
    """(entries,) ascending."""
    document: Ints
    lo: Ints
    hi: Ints
    kind: Ints
    """(units,) the document of a unit that sees one alone; others are of a kind of their own."""
    num_documents: int


def views_of(seen: tuple[Ints, Ints], opens: Ints, total: int, unit: int) -> Views:
    """seen: first and last + 1 key of each unit; opens: first token of each document, 0 first."""
    first, last = seen
    ends = np.append(opens[1:], total)
    begin = np.searchsorted(opens, first, "right") - 1
    count = np.where(first < last, np.searchsorted(opens, last, "left") - begin, 0)
    units = np.repeat(np.arange(len(first)), count)
    document = ragged_range(begin, count)
    home = np.searchsorted(opens, np.arange(len(first)) * unit, "right") - 1
    own = len(opens) + np.arange(len(first))
    return Views(
        *(units, document),
        np.maximum(first[units], opens[document]),
        np.minimum(last[units], ends[document]),
        np.where(count == 1, begin, np.where(count == 0, home, own)),
        len(opens),
    )


class Seen(NamedTuple):
    """First and last + 1 of the keys that are seen, (..., documents)."""

    lo: Ints
    hi: Ints

    @property
    def keys(self) -> Ints:
        """(...,) of all documents."""
        return np.maximum(self.hi - self.lo, 0).sum(-1)


class _Chance(NamedTuple):
    """Units without which the busiest rank would see fewer keys."""

    rank: int
    limit: int
    """Keys that it sees with them."""
    units: Ints
    seen: Seen
    """Without them."""
    keys: int


class Relief:
    """Ranks of units while they are swapped; `owner` is the result."""

    def __init__(
        self, owner: Ints, work: Floats, views: Views, num_ranks: int, most_work: float
    ) -> None:
        self.owner, self.work, self.views = owner, work, views
        self.num_ranks, self.most_work = num_ranks, most_work
        self._tries_left = MAX_TRIES
        self._marks = np.zeros(len(work), bool)
        self._entries = np.searchsorted(views.unit, np.arange(len(work) + 1))
        self._look()

    def _look(self) -> None:
        v, shape = self.views, (self.num_ranks, self.views.num_documents)
        self.seen = _seen(self.owner[v.unit] * shape[1] + v.document, v.lo, v.hi, shape)
        self.keys = self.seen.keys
        self.load = np.bincount(self.owner, self.work, self.num_ranks)

    def run(self, enough: int, reach: int) -> None:
        """Swaps until no rank sees more than enough keys, or the busiest cannot be helped."""
        while self.keys.max() > enough and self._relieve(int(self.keys.argmax()), reach):
            pass

    def _relieve(self, rank: int, reach: int) -> bool:
        chances = self._chances(rank, reach)
        for last_resort in (False, True):
            if any(self._clear(chance, last_resort) for chance in chances):
                return True
        return False

    def _clear(self, chance: _Chance, exchange: bool) -> bool:
        """Gives all units of a chance away, or none: by exchange, or spread where that works."""
        if self._tries_left <= 0:
            return False
        before, kinds = self.owner, self.views.kind[chance.units]
        inside = self._inside(chance.seen)
        groups = [chance.units[kinds == kind] for kind in np.unique(kinds)]
        for units in groups:
            if (not exchange or len(groups) > 1) and self._spread(chance, units, inside):
                continue
            if (exchange or len(units) == 1) and self._exchange(chance, units, inside):
                continue
            break
        else:
            if self.keys[chance.rank] < chance.limit:
                return True
        if self.owner is not before:
            self.owner = before
            self._look()
        return False

    def _chances(self, rank: int, reach: int) -> list[_Chance]:
        """Units of a document that could go: all, or those that reach furthest, either way."""
        v, limit, found = self.views, int(self.keys[rank]), []
        mine = np.flatnonzero(self.owner[v.unit] == rank)
        span = self.seen.hi[rank] - self.seen.lo[rank]
        for document in np.argsort(-span, kind="stable")[:MAX_DOCUMENTS].tolist():
            here = mine[v.document[mine] == document]
            far = here[v.hi[here] > self.seen.hi[rank, document] - reach]
            near = here[v.lo[here] < self.seen.lo[rank, document] + reach]
            for entries in {len(x): x for x in (near, far, here)}.values():
                units = v.unit[entries]
                self._marks[units] = True
                seen = self._seen_by(mine[~self._marks[v.unit[mine]]])
                self._marks[units] = False
                if seen.keys < limit:
                    found.append(_Chance(rank, limit, units, seen, int(seen.keys)))
        return sorted(found, key=lambda x: (x.keys - limit) / len(x.units))  # most for a unit first

    def _seen_by(self, entries: Ints) -> Seen:
        v = self.views
        return _seen(v.document[entries], v.lo[entries], v.hi[entries], (v.num_documents,))

    def _inside(self, seen: Seen) -> Bools:
        """(units,) whether all that a unit sees is seen already."""
        v = self.views
        new = (v.lo < seen.lo[v.document]) | (v.hi > seen.hi[v.document])
        inside = np.ones(len(self.work), bool)
        inside[v.unit[new]] = False
        return inside

    def _grown(self, units: Ints) -> Ints:
        """(ranks,) keys that each rank would see with these units."""
        first, last = self._entries[units], self._entries[units + 1]
        seen = self._seen_by(ragged_range(first, last - first))
        there = np.flatnonzero(seen.hi > seen.lo)
        lo, hi = self.seen.lo[:, there], self.seen.hi[:, there]
        now = Seen(lo, hi).keys
        return (
            self.keys
            - now
            + Seen(np.minimum(lo, seen.lo[there]), np.maximum(hi, seen.hi[there])).keys
        )

    def _spread(self, chance: _Chance, units: Ints, inside: Bools) -> bool:
        """Gives units to ranks that see no more for it, for units that the rank sees anyway."""
        self._tries_left -= 1
        willing = self._grown(units) <= self.keys
        willing[chance.rank] = False
        found = np.flatnonzero(willing[self.owner] & inside)
        if len(found) < len(units):
            return False
        more = self.work[units].mean() - self.work[found]  # work that the other rank gains
        room = max(self.most_work - self.load[chance.rank], 0.0)
        found, more = found[ok := more >= -room / len(units)], more[ok]
        other = self.owner[found]
        order = order_by(other, np.rint((more - more.min(initial=0.0)) * 16).astype(np.int64))
        found, more, other = found[order], more[order], other[order]
        total = np.append(0.0, np.maximum(more, 0.0).cumsum())
        total = total[1:] - total[np.searchsorted(other, other)]
        found, more = found[ok := total <= self.most_work - self.load[other]], more[ok]
        if len(found) < len(units):
            return False
        return self._swap(chance.rank, units, found[np.argsort(more, kind="stable")[: len(units)]])

    def _exchange(self, chance: _Chance, units: Ints, inside: Bools) -> bool:
        """Gives units to one rank, for units seen anyway or for some of one other document."""
        self._tries_left -= 2
        rank, count, work = chance.rank, len(units), float(self.work[units].sum())
        keys = self._grown(units)
        willing = keys < chance.limit
        willing[rank] = False
        if not willing.any():
            return False
        lo, hi = self.seen.lo.min(0), self.seen.hi.max(0)
        now = np.maximum(chance.seen.hi - chance.seen.lo, 0)
        more = np.maximum(hi, chance.seen.hi) - np.minimum(lo, chance.seen.lo) - now
        more = np.where(more > 0, more, NOTHING)
        shortest = np.argsort(more, kind="stable")[:MAX_DOCUMENTS]
        new = np.zeros(len(more), bool)
        new[shortest] = chance.keys + more[shortest] < chance.limit
        kind = np.minimum(self.views.kind, len(new))
        useful = np.flatnonzero(willing[self.owner] & (inside | np.append(new, False)[kind]))
        distance = np.rint(np.abs(self.work[useful] - work / count) * 16).astype(np.int64)
        useful = useful[order_by(self.owner[useful], distance)]
        inside, kind = inside[useful], kind[useful]
        best, taken = np.inf, None
        for document in (-1, *np.flatnonzero(new).tolist()):
            own = chance.keys + (int(more[document]) if document >= 0 else 0)
            found = useful[inside | (kind == document)]
            if len(found) < count:
                continue
            other = self.owner[found]
            found = found[np.arange(len(found)) - np.searchsorted(other, other) < count]
            other = self.owner[found]
            got = np.bincount(other, self.work[found], self.num_ranks)
            fair = (
                (np.bincount(other, minlength=self.num_ranks) == count)
                & (self.load + work - got <= self.most_work)
                & (self.load[rank] - work + got <= self.most_work)
                & (keys + own <= self.keys + chance.limit)  # all ranks together see no more
            )
            cost = np.where(fair, np.maximum(keys, own) + 1e-3 * (keys + own), np.inf)
            if cost.min() < best:
                best, taken = float(cost.min()), found[other == cost.argmin()]
        return taken is not None and self._swap(rank, units, taken)

    def _swap(self, rank: int, units: Ints, others: Ints) -> bool:
        owner = self.owner.copy()
        owner[units], owner[others] = self.owner[others], rank
        load = np.bincount(owner, self.work, self.num_ranks)
        if load.max() > max(self.most_work, float(self.load.max())):
            return False
        self.owner = owner
        self._look()
        return True


def _seen(cell: Ints, lo: Ints, hi: Ints, shape: tuple[int, ...]) -> Seen:
    """What entries of cells see together."""
    size = int(np.prod(shape))
    first, last = np.full(size, NOTHING), np.zeros(size, np.int64)
    np.minimum.at(first, cell, lo)
    np.maximum.at(last, cell, hi)
    return Seen(first.reshape(shape), last.reshape(shape))
