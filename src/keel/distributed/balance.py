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

A step waits for the rank that receives the most, so units are swapped afterwards to help that one
(`relief`), at equal work. Where all of a document is seen by each of its tokens, a few units of one
document more cost a rank as much as many; there units are dealt a second time, by what ranks see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from keel.distributed.dealing import Bools, deal, deal_in_room, parts_of
from keel.distributed.layout import Layout
from keel.distributed.relief import REACH, Relief, views_of
from keel.distributed.work import Floats, keys_seen, least_seen, rows_received, tile_work
from keel.masks.arrays import Ints, order_by
from keel.masks.mask import AttnMask

TOLERANCE = 1.02
"""Largest over mean work that counts as balanced: of layouts below it, the least traffic wins."""

LONGEST = (0.5, 1.0)
"""Lengths, in shares of a rank, up to which documents are tried whole."""

MAX_UNITS = 1 << 15
MAX_CELLS = 1 << 18
"""Units, and ranks times documents, beyond which the busiest rank is not looked after."""


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
    opens = _openings(mask, shared=keys_of is None)

    def judged(owner: Ints) -> _Candidate:
        layout = _layout(owner, mask.tq, unit, num_ranks)
        rows = rows_received(mask, layout, None if keys_of is None else keys_of(layout))
        balance = max(_imbalance(work, owner, num_ranks), TOLERANCE)
        return _Candidate(balance, float(rows.max(initial=0) + rows.mean()), owner, layout, rows)

    best = judged(_in_order(len(work), num_ranks))
    if _imbalance(work, best.owner, num_ranks) > TOLERANCE:
        # A unit that two documents share belongs to the first, of which it has the costly end.
        home = np.searchsorted(opens, np.arange(len(work)) * unit, "right") - 1
        owners = _dealt(np.searchsorted(home, home), work, num_ranks)
        best = min([best, *map(judged, owners)], key=_Candidate.cost)
        if keys_of is None:
            better = _relieved(mask, work, unit, opens, home, best, num_ranks)
            best = min([best, *map(judged, better)], key=_Candidate.cost)
    return best.layout


class _Candidate(NamedTuple):
    """Ranks of units, and what they cost: of layouts that balance, the least traffic wins."""

    balance: float
    traffic: float
    """Rows of the rank that receives the most, and the mean of all."""
    owner: Ints
    layout: Layout
    rows: Ints

    def cost(self) -> tuple[float, float]:
        return self.balance, self.traffic


def _openings(mask: AttnMask, shared: bool) -> Ints:
    """(documents,) first token of each, 0 first: no slice spans two documents.

    `shared`: queries and keys are the same tokens.
    """
    q0, q1, k0, k1 = mask.array[:, :4].T
    there = (q0 < q1) & (k0 < k1)
    start, end = (np.minimum(q0, k0), np.maximum(q1, k1)) if shared else (q0, q1)
    start, end = start[there], end[there]
    order = order_by(start)
    start, reach = start[order], np.maximum.accumulate(end[order])
    opens = start[np.append(True, start[1:] >= reach[:-1])[: len(start)]]
    return opens if len(opens) and opens[0] == 0 else np.append(0, opens)


def _dealt(document: Ints, work: Floats, num_ranks: int) -> list[Ints]:
    """Ranks of units, dealt with fewer and with more documents kept whole.

    Whole documents save traffic as long as ranks can still be balanced with them. How long they
    may be depends on all the others, so it is tried.
    """
    owners = []
    for longest in LONGEST:
        owners.append(deal(work, *_parts(document, work, num_ranks, longest), num_ranks))
        _even_out(owners[-1], work, num_ranks)
        _lodge_last(owners[-1], work)
    return owners


def _parts(document: Ints, work: Floats, num_ranks: int, longest: float) -> tuple[Ints, Bools]:
    length = np.bincount(document, minlength=len(work))[document]
    share = -(-len(work) // num_ranks)
    return parts_of(work, document, length <= longest * share, max(share // 2, 1))


def _relieved(
    mask: AttnMask,
    work: Floats,
    unit: int,
    opens: Ints,
    home: Ints,
    best: _Candidate,
    num_ranks: int,
) -> list[Ints]:
    """Ranks of units with fewer keys for the busiest rank, where that is possible.

    From what was found so far, and from units dealt anew with an eye on what ranks see.
    """
    if len(work) > MAX_UNITS or num_ranks * len(opens) > MAX_CELLS:
        return []
    share = -(-len(work) // num_ranks)
    tokens = share * unit
    most_work = TOLERANCE * float(work.sum()) / num_ranks
    seen = keys_seen(mask, unit)
    views = views_of(seen, opens, mask.tk, unit)
    span = views.hi - views.lo
    # A rank sees the longest document, and the others see more than their own on average.
    enough = max(int(span.max(initial=0)) + tokens // 2, int(best.rows.mean()) + tokens * 3 // 2)
    busiest = int(best.rows.max()) + tokens
    relief = Relief(best.owner, work, views, num_ranks, most_work)
    if busiest <= enough or relief.keys.max() > 1.1 * busiest:  # little to gain; or with holes
        return []
    reach = max(tokens // REACH, unit)
    relief.run(enough, reach)
    found = [relief]
    longest = np.zeros(len(opens), np.int64)
    np.maximum.at(longest, views.document, span)
    units: Floats = np.bincount(home, minlength=len(opens)).astype(np.float64)
    total: Floats = np.bincount(home, work, len(opens)).astype(np.float64)
    room = least_seen(units, total, longest, most_work / len(work) * num_ranks)
    whole = span.sum() > 0.9 * longest[views.document].sum()  # else the room is not known
    if whole and room < relief.keys.max():
        own = seen[0], np.minimum(seen[1], np.append(opens[1:], mask.tk)[home])
        parts = _parts(np.searchsorted(home, home), work, num_ranks, LONGEST[0])
        owner = deal_in_room(
            *(work, *parts, num_ranks), seen=own, room=max(room, tokens), most_work=most_work
        )
        _even_out(owner, work, num_ranks)
        found.append(Relief(owner, work, views, num_ranks, most_work))
        found[-1].run(enough, reach)
    owners = [x.owner.copy() for x in found]
    for owner in owners:
        _lodge_last(owner, work)
    return owners


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
