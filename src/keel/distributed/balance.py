"""Which rank should hold which tokens: equal tokens, equal work, few rows to send.

Context parallelism keeps queries where they are and sends keys and values, so a layout decides
two costs: the rank with the most work sets the time of a step, and keys that a rank sees but does
not hold must travel. Causal documents pull the two apart, since the tokens at their end have the
most work *and* see the most keys.

`balanced` cuts the tokens into units and sorts them into two kinds. Units of more than average
work are *costly*, the others *cheap*; short documents stay whole, several to a part. Each rank
takes a run of the costliest units left and fills up with a run of the cheapest, in the proportion
that gives it the average work:

- a costly run comes from one document, whose keys then travel once for the whole run;
- the costliest go with the cheapest: that way the fewest ranks fetch nearly all of a long document;
- the cheap head of the same document comes first: its keys are fetched anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from keel.distributed.layout import Layout
from keel.distributed.work import Floats, rows_received, tile_work
from keel.masks.arrays import Ints, order_by
from keel.masks.mask import AttnMask

Bools = NDArray[np.bool_]

TOLERANCE = 1.02
"""Largest over mean work that counts as balanced: of layouts below it, the least traffic wins."""

LONGEST = (0.5, 1.0)
"""Lengths, in shares of a rank, up to which documents are tried whole."""


def balanced(
    mask: AttnMask,
    num_ranks: int,
    *,
    unit: int = 128,
    keys_of: Callable[[Layout], Layout] | None = None,
) -> Layout:
    """A layout of the queries with equal tokens, nearly equal work and little traffic.

    Ranks hold equally many tokens to within one unit, in pieces of whole units. `keys_of` says
    where keys would be, if they are other tokens than the queries (cross-attention).

    >>> from keel import masks
    >>> from keel.distributed.work import work_of_ranks
    >>> mask = masks.documents([0, 6144, 8192], causal=True)
    >>> layout = balanced(mask, 4)
    >>> layout.rows.tolist(), work_of_ranks(mask, layout).tolist()
    ([2048, 2048, 2048, 2048], [328.0, 328.0, 328.0, 328.0])
    """
    if keys_of is None and mask.tq != mask.tk:
        raise ValueError(
            f"a mask of {mask.shape} has other keys than queries: say with keys_of where they are"
        )
    if num_ranks < 1 or unit < 1:
        raise ValueError(f"num_ranks and unit must be positive, got {num_ranks} and {unit}")
    work = tile_work(mask, unit)
    owners = [_in_order(len(work), num_ranks)]
    if _imbalance(work, owners[0], num_ranks) > TOLERANCE:
        document = _documents(mask, len(work), unit, shared=keys_of is None)
        owners += _dealt(document, work, num_ranks)
    layouts = [_layout(owner, mask.tq, unit, num_ranks) for owner in owners]
    costs = [
        (
            max(_imbalance(work, owner, num_ranks), TOLERANCE),
            int(rows_received(mask, x, None if keys_of is None else keys_of(x)).sum()),
        )
        for owner, x in zip(owners, layouts, strict=True)
    ]
    return layouts[costs.index(min(costs))]


def _documents(mask: AttnMask, count: int, unit: int, shared: bool) -> Ints:
    """(count,) first unit of the document of each unit: no slice spans two documents.

    `shared`: queries and keys are the same tokens.
    """
    q0, q1, k0, k1 = mask.array[:, :4].T
    there = (q0 < q1) & (k0 < k1)
    start, end = (np.minimum(q0, k0), np.maximum(q1, k1)) if shared else (q0, q1)
    start, end = start[there], end[there]
    order = order_by(start)
    start, reach = start[order], np.maximum.accumulate(end[order])
    opens = start[np.append(True, start[1:] >= reach[:-1])[: len(start)]]
    # A unit that two documents share belongs to the first, of which it has the costly end.
    document = np.searchsorted(opens, np.arange(count) * unit, "right")
    return np.searchsorted(document, document)


def _dealt(document: Ints, work: Floats, num_ranks: int) -> list[Ints]:
    """Ranks of units, dealt with fewer and with more documents kept whole.

    Whole documents save traffic as long as ranks can still be balanced with them. How long they
    may be depends on all the others, so it is tried.
    """
    length = np.bincount(document, minlength=len(work))[document]
    share = -(-len(work) // num_ranks)
    owners = []
    for longest in LONGEST:
        part, costly = _parts(work, document, length <= longest * share, max(share // 2, 1))
        owners.append(_deal(work, part, costly, num_ranks))
        _even_out(owners[-1], work, num_ranks)
        _lodge_last(owners[-1], work)
    return owners


def _parts(work: Floats, document: Ints, short: Bools, group: int) -> tuple[Ints, Bools]:
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

    def __init__(self, units: Ints, part: Ints, key: Ints, place: Ints) -> None:
        order = order_by(part[units], *((x - x.min(initial=0))[units] for x in (key, place)))
        self.units = units[order]
        self.part, self.key = part[self.units], key[self.units]
        opens = np.append(True, self.part[1:] > self.part[:-1])[: len(order)]
        self.run = np.cumsum(opens) - 1
        self.next = np.flatnonzero(opens)
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

    def take(self, places: Ints) -> Ints:
        """The units of the first places of an offer, which are gone from now on."""
        self.next += np.bincount(self.run[places], minlength=len(self.next))
        return self.units[places]


def _deal(work: Floats, part: Ints, costly: Bools, num_ranks: int) -> Ints:
    """(units,) rank of each unit, dealt rank by rank."""
    owner = np.empty(len(work), np.int64)
    step = max(len(work) / num_ranks / 2, 1)  # smaller differences of work do not order units
    level = (work // step).astype(np.int64)
    place = _uphill(work, part)
    high = _Pool(np.flatnonzero(costly), part, -level, -place)
    low = _Pool(np.flatnonzero(~costly), part, level, place)
    units_left, work_left = len(work), float(work.sum())
    for rank in range(min(num_ranks, len(work))):
        count = -(-units_left // (num_ranks - rank))
        top = high.offer(count)
        bottom = low.offer(count, int(high.part[top[0]]) if len(top) else -1)
        above = np.append(0, work[high.units[top]].cumsum())
        below = np.append(0, work[low.units[bottom]].cumsum())
        # What the rank would have with m costly units, for every m that leaves it count units.
        m = np.arange(count - len(bottom), len(top) + 1)
        total = above[m] + below[count - m]
        best = int(np.abs(total - work_left * count / units_left).argmin())
        owner[high.take(top[: m[best]])] = rank
        owner[low.take(bottom[: count - m[best]])] = rank
        units_left -= count
        work_left -= float(total[best])
    return owner


def _even_out(owner: Ints, work: Floats, num_ranks: int) -> None:
    """Swaps single units of the most loaded rank with a lightly loaded one until all balance."""
    load = np.bincount(owner, work, num_ranks)
    for _ in range(num_ranks):
        most = int(load.argmax())
        if load[most] <= TOLERANCE * load.mean():
            return
        for other in np.argsort(load, kind="stable")[:4].tolist():
            if change := _swap(owner, work, most, other, (load[most] - load[other]) / 2):
                load[most] -= change
                load[other] += change
                break
        else:
            return


def _swap(owner: Ints, work: Floats, most: int, other: int, gap: float) -> float:
    """Swaps two units of two ranks whose work differs by about gap; the difference, 0 if none."""
    given, got = np.flatnonzero(owner == most), np.flatnonzero(owner == other)
    if len(got) == 0:
        return 0.0
    got = got[np.argsort(work[got], kind="stable")]
    near = np.minimum(np.searchsorted(work[got], work[given] - gap), len(got) - 1)
    change = work[given] - work[got[near]]
    best = int(np.abs(change - gap).argmin())
    if not 0 < change[best] < 2 * gap:  # would not help
        return 0.0
    owner[given[best]], owner[got[near[best]]] = other, most
    return float(change[best])


def _lodge_last(owner: Ints, work: Floats) -> None:
    """Swaps the last unit, which may be shorter, to a rank with the most units.

    Elsewhere a rank could lack one unit and the rest of a short one: more than one unit in all.
    """
    roomy = np.bincount(owner)[owner]
    if roomy[-1] < roomy.max():
        others = np.flatnonzero(roomy == roomy.max())
        other = others[np.argmin(np.abs(work[others] - work[-1]))]
        owner[-1], owner[other] = owner[other], owner[-1]


def _in_order(count: int, num_ranks: int) -> Ints:
    """(count,) ranks of units in ascending order; the last rank is one of those with the most."""
    return num_ranks - 1 - np.arange(count)[::-1] * num_ranks // max(count, 1)


def _imbalance(work: Floats, owner: Ints, num_ranks: int) -> float:
    """Largest over mean work of ranks."""
    total = work.sum()
    return float(np.bincount(owner, work, num_ranks).max() * num_ranks / total) if total else 1.0


def _layout(owner: Ints, total: int, unit: int, num_ranks: int) -> Layout:
    start = np.arange(len(owner)) * unit
    return Layout(start, np.minimum(start + unit, total), owner, num_ranks)
