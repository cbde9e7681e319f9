"""The same collective on several ranks: who came late, and how long the others waited.

A collective's kernel spins until all ranks have come, so a long one may mean a late rank rather
than a slow network. The shortest duration over ranks is close to the transfer itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keel.masks.arrays import Ints
from keel.overlap.classify import Kind
from keel.overlap.trace import Timeline

POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "coalesced")
"""One-sided names: the same name on two ranks is not the same transfer."""


@dataclass(frozen=True, kw_only=True)
class Skew:
    """One kind of collective over ranks, in milliseconds."""

    name: str
    count: int
    """How many of them were found on two ranks or more."""
    max_skew_ms: float
    """Between the first and the last rank to start, at worst."""
    mean_skew_ms: float
    straggler: int
    """The rank whose lateness adds up to most."""
    straggler_share: float
    """How often it was the last one."""
    waited_ms: float
    """All ranks' waiting for the last one, together."""
    shortest_ms: float
    """The sum of each one's shortest duration: about the transfers alone."""
    longest_ms: float


def skews(lines: Sequence[Timeline]) -> tuple[list[Skew], str]:
    """(skew of each kind of collective, the largest waiting first; what the clock is)."""
    found = [_instances(line) for line in lines]
    counts = [Counter(name for name, _, known in x if not known) for x in found]
    keys = [k for k in dict.fromkeys(k for x in found for k in x) if _shared(found, counts, k)]
    if len(lines) < 2 or not keys:
        return [], "one rank" if len(lines) < 2 else "no collective found on two ranks"
    hosts = {line.host for line in lines}
    if len(hosts) == 1 and None not in hosts:
        offset, clock = np.zeros(len(lines), np.int64), "the ranks' own: they share a host"
    else:
        offset = _offsets(found, keys)
        clock = "ranks aligned at the ends of their collectives"
    grouped: dict[str, list[tuple[Ints, Ints, Ints]]] = defaultdict(list)
    for key in keys:
        ranks = np.array([n for n, x in enumerate(found) if key in x])
        times = np.array([found[n][key] for n in ranks], np.int64) - offset[ranks, None]
        grouped[key[0]].append((ranks, times[:, 0], times[:, 1]))
    rows = [_skew(name, parts, lines) for name, parts in grouped.items()]
    return sorted(rows, key=lambda row: -row.waited_ms), clock


Key = tuple[str, int, bool]
"""(name, number, whether the number is torch's)."""


def _instances(line: Timeline) -> dict[Key, tuple[int, int]]:
    """Start and end of each collective by its name and number."""
    found: dict[Key, tuple[int, int]] = {}
    counts: dict[int, int] = defaultdict(int)
    for at in np.flatnonzero(line.kind == Kind.COMMUNICATION):
        label, number = int(line.label[at]), int(line.sequence[at])
        name = line.labels[label]
        if name.split(" (")[0].lower() in POINT_TO_POINT or name.startswith("Memcpy"):
            continue
        known = number >= 0
        if not known:
            number, counts[label] = counts[label], counts[label] + 1
        key = name, number, known
        start, end = int(line.start[at]), int(line.end[at])
        if key in found:  # several kernels of one collective
            start, end = min(start, found[key][0]), max(end, found[key][1])
        found[key] = start, end
    return found


def _shared(found: list[dict[Key, tuple[int, int]]], counts: list[Counter[str]], key: Key) -> bool:
    """Whether two ranks have it. Counted by us, it must be as often on all that have any."""
    if sum(key in x for x in found) < 2:
        return False
    name, _, known = key
    return known or len({count[name] for count in counts if name in count}) == 1


def _offsets(found: list[dict[Key, tuple[int, int]]], keys: list[Key]) -> Ints:
    """Clock of each rank less that of the first: collectives end together, so ends are compared."""
    offset = np.zeros(len(found), np.int64)
    for n, own in enumerate(found[1:], start=1):
        gaps = [own[key][1] - found[0][key][1] for key in keys if key in own and key in found[0]]
        if gaps:
            offset[n] = int(np.median(gaps))
    return offset


def _skew(name: str, parts: list[tuple[Ints, Ints, Ints]], lines: Sequence[Timeline]) -> Skew:
    spread = np.array([start.max() - start.min() for _, start, _ in parts])
    late = np.zeros(len(lines), np.int64)
    last = np.zeros(len(lines), np.int64)
    waited = 0
    for ranks, start, _ in parts:
        late[ranks] += start - start.min()
        last[ranks[start.argmax()]] += 1
        waited += int((start.max() - start).sum())
    straggler = int(late.argmax())
    return Skew(
        name=name,
        count=len(parts),
        max_skew_ms=float(spread.max()) / 1e6,
        mean_skew_ms=float(spread.mean()) / 1e6,
        straggler=lines[straggler].rank,
        straggler_share=float(last[straggler]) / len(parts),
        waited_ms=waited / 1e6,
        shortest_ms=sum(int((end - start).min()) for _, start, end in parts) / 1e6,
        longest_ms=sum(int((end - start).max()) for _, start, end in parts) / 1e6,
    )
