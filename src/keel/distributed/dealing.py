"""Units of queries dealt out to ranks, one rank after the other: the two rules of the solver.

Both give a rank some *costly* units and fill up with *cheap* ones, so that it has its share of
tokens and of work. `deal` pairs the costliest with the cheapest. `deal_in_room` also looks at how
many keys a rank sees: where documents are long and all of their units see all of it, a rank with a
few units of one more document fetches one more document.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keel.distributed.work import Floats
from keel.masks.arrays import Ints, order_by

Bools = NDArray[np.bool_]


def parts_of(work: Floats, document: Ints, short: Bools, group: int) -> tuple[Ints, Bools]:
    """(part, costly) of each unit.

    Short documents that begin in the same `group` units are one part, costly or cheap as a whole.
    Any other document is a part with costly units and cheap ones.
    """
    label = np.where(short, document // group * group * 2, document * 2 + 1)
    part = np.searchsorted(np.unique(label), label)
    mean = np.bincount(part, work) / np.bincount(part)
    return part, np.where(short, mean[part], work) > work.mean()


def _uphill(work: Floats, part: Ints) -> Ints:
    """(units,) numbers that rise along a part where its work does, and fall where it falls."""
    place = np.arange(len(work))
    middle = np.bincount(part, place) / np.bincount(part)
    falls = np.bincount(part, work * (place - middle[part])) < 0
    return np.where(falls[part], -place, place)


class _Pool:
    """Units of one kind, in one run per part; a run gives its units away from its lowest key on."""

    def __init__(self, units: Ints, part: Ints, key: Ints, place: Ints, work: Floats) -> None:
        order = order_by(part[units], *((x - x.min(initial=0))[units] for x in (key, place)))
        self.units = units[order]
        self.part, self.key, self.work = part[self.units], key[self.units], work[self.units]
        opens = np.append(True, self.part[1:] > self.part[:-1])[: len(order)]
        self.run = np.cumsum(opens) - 1
        self.begin = np.flatnonzero(opens)
        self.next = self.begin.copy()
        self.end = np.append(self.next[1:], len(order))[: len(self.next)]

    def offer(self, count: int, beside: int = -1) -> Ints:
        """Places of up to count units, from the runs of the lowest keys.

        The part `beside` comes first where its key is at most one above the lowest.
        """
        runs = np.flatnonzero(self.next < self.end)
        first = self.next[runs]
        key = self.key[first] - np.where(self.part[first] == beside, 1.5, 0.0)
        found = [np.empty(0, np.int64)]
        while count > 0 and len(key) and key[best := int(key.argmin())] < np.inf:
            key[best] = np.inf
            found.append(np.arange(first[best], min(self.end[runs[best]], first[best] + count)))
            count -= len(found[-1])
        return np.concatenate(found)

    def stretches(self, runs: list[int], count: int) -> Ints:
        """Places of up to count units, from these runs in this order."""
        found = [np.empty(0, np.int64)]
        for run in runs:
            found.append(np.arange(self.next[run], min(self.end[run], self.next[run] + count)))
            count -= len(found[-1])
        return np.concatenate(found)

    def take(self, places: Ints) -> Ints:
        """The units of the first places of an offer, which are gone from now on."""
        self.next += np.bincount(self.run[places], minlength=len(self.next))
        return self.units[places]


def _pools(work: Floats, part: Ints, costly: Bools, num_ranks: int) -> tuple[_Pool, _Pool]:
    """Costly units, the costliest first, and cheap ones, the cheapest first."""
    step = max(len(work) / num_ranks / 2, 1)  # smaller differences of work do not order units
    level = (work // step).astype(np.int64)
    place = _uphill(work, part)
    high = _Pool(np.flatnonzero(costly), part, -level, -place, work)
    return high, _Pool(np.flatnonzero(~costly), part, level, place, work)


def _nearest(high: _Pool, low: _Pool, top: Ints, bottom: Ints, count: int, aim: float) -> Ints:
    """(costly units, cheap units) of what is offered: count in all, with work nearest to aim."""
    above, below = np.append(0, high.work[top].cumsum()), np.append(0, low.work[bottom].cumsum())
    m = np.arange(max(count - len(bottom), 0), min(len(top), count) + 1)
    best = m[np.abs(above[m] + below[count - m] - aim).argmin()]
    return np.array([best, count - best])


def deal(work: Floats, part: Ints, costly: Bools, num_ranks: int) -> Ints:
    """(units,) rank of each unit: the costliest with the cheapest, those of the same part first."""
    owner = np.empty(len(work), np.int64)
    high, low = _pools(work, part, costly, num_ranks)
    units_left, work_left = len(work), float(work.sum())
    for rank in range(min(num_ranks, len(work))):
        count = -(-units_left // (num_ranks - rank))
        top = high.offer(count)
        bottom = low.offer(count, int(high.part[top[0]]) if len(top) else -1)
        m, n = _nearest(high, low, top, bottom, count, work_left * count / units_left)
        mine = np.append(high.take(top[:m]), low.take(bottom[:n]))
        owner[mine] = rank
        units_left -= count
        work_left -= float(work[mine].sum())
    return owner


def deal_in_room(
    work: Floats,
    part: Ints,
    costly: Bools,
    num_ranks: int,
    *,
    seen: tuple[Ints, Ints],
    room: int,
    most_work: float,
) -> Ints:
    """(units,) rank of each unit, so that a rank sees `room` keys or not many more.

    seen: first and last + 1 of the keys that each unit sees of its own part; most_work: of a rank.
    Costly units of a rank come from one part, from a second only if that leaves it in its room;
    `_chosen` says where cheap ones come from. A rank may end up with less work than others, if that
    spares it a document.
    """
    owner = np.empty(len(work), np.int64)
    high, low = _pools(work, part, costly, num_ranks)
    units_left, work_left = len(work), float(work.sum())
    for rank in range(min(num_ranks, len(work))):
        count = -(-units_left // (num_ranks - rank))
        aim = min(work_left * count / units_left, most_work)
        top, first, keys_first, keys_all = _costly(high, count, seen, room)
        above = np.append(0, high.work[top].cumsum())
        runs = np.flatnonzero(low.next < low.end)
        # With cheap units of one run alone: how many of them would make the rank's work right.
        guess = low.work[low.next[runs]][:, None] * (count - np.arange(len(above)))
        wanted = count - np.abs(above + guess - aim).argmin(1)
        room_left = room - (keys_all if count - wanted.min(initial=count) > first else keys_first)
        keys = _keys(low, runs, int(wanted.max(initial=1)), seen)
        if len(top):
            keys[low.part[low.next[runs]] == high.part[top[0]]] = 0  # they are fetched anyway
        left = low.end[runs] - low.next[runs]
        begun = low.next[runs] > low.begin[runs]
        chosen = _chosen(keys, left, wanted, begun, room_left)
        bottom = low.stretches(runs[chosen].tolist(), count)
        if len(top) + len(bottom) < count:  # nothing fits: as if there were no room to keep
            top, bottom = high.offer(count), low.offer(count)
        m, n = _nearest(high, low, top, bottom, count, aim)
        mine = np.append(high.take(top[:m]), low.take(bottom[:n]))
        owner[mine] = rank
        units_left -= count
        work_left -= float(work[mine].sum())
    return owner


def _costly(
    high: _Pool, count: int, seen: tuple[Ints, Ints], room: int
) -> tuple[Ints, int, int, int]:
    """Up to count costly units of one part, or of two that fit the room together.

    Their places, how many come from the first part, and the keys that these and all of them see.
    """
    runs = np.flatnonzero(high.next < high.end)
    runs = runs[np.argsort(high.key[high.next[runs]], kind="stable")][:2]
    first = min(count, int((high.end[runs[:1]] - high.next[runs[:1]]).sum()))
    keys = _keys(high, runs, count, seen)
    if first == count or keys.sum() > room:
        runs, keys = runs[:1], keys[:1]
    return high.stretches(runs.tolist(), count), first, int(keys[:1].sum()), int(keys.sum())


def _keys(pool: _Pool, runs: Ints, count: int, seen: tuple[Ints, Ints]) -> Ints:
    """(runs,) keys between the first and the last that the next count units of each run see."""
    first, last = pool.next[runs], np.minimum(pool.end[runs], pool.next[runs] + count) - 1
    ends = np.stack([pool.units[first], pool.units[last]])
    return np.maximum(seen[1][ends].max(0) - seen[0][ends].min(0), 0)


def _chosen(keys: Ints, left: Ints, wanted: Ints, begun: Bools, room: int) -> list[int]:
    """Runs that a rank takes cheap units from, in this order.

    A run that was begun and has not enough left goes first, with the shortest that makes up for it.
    Otherwise the longest that fits: short ones are kept to fill such gaps.
    """
    enough, fits = left >= wanted, keys <= room
    rests = np.flatnonzero(begun & ~enough & fits)
    for rest in rests[np.argsort(-keys[rests], kind="stable")].tolist():
        others = (left >= wanted - left[rest]) & (keys <= room - keys[rest])
        others[rest] = False
        if others.any():
            return [rest, int(np.where(others, keys, np.inf).argmin())]
    if (enough & fits).any():
        return [int(np.where(enough & fits, keys, -1).argmax())]
    several: list[int] = []
    for run in np.argsort(-keys, kind="stable").tolist():
        if keys[several].sum() + keys[run] <= room:
            several.append(run)
            if left[several].sum() >= wanted[run]:
                return several
    if enough.any():  # more than the room, but no more than must be
        return [int(np.where(enough, keys, np.inf).argmin())]
    by_price: list[int] = np.argsort(keys / left, kind="stable").tolist()
    return by_price
