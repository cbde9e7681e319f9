"""What a trace really hid: times of each rank, of each stage, and what follows from them.

Time that several kinds of work share counts once: compute claims it first, then communication,
then copies. So for every rank, exactly,

    compute + exposed communication + exposed copies + idle = span

where the span runs from the first GPU event to the end of the last one.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.masks.arrays import Ints
from keel.overlap import intervals
from keel.overlap.classify import Kind, Rules
from keel.overlap.collectives import Skew, skews
from keel.overlap.scan import Progress
from keel.overlap.trace import Timeline, expand, read_traces, within

SCHEMA = "keel.overlap/1"
STAGES = "^keel stage"
"""Ranges that are stages unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """Some communication, in milliseconds, and how much of it had compute beside it."""

    name: str
    count: int
    communication_ms: float
    hidden_ms: float
    exposed_ms: float
    compute_ms: float = 0.0
    """Compute in the same stage; of a collective, nothing."""

    @property
    def overlap_ratio(self) -> float | None:
        return _ratio(self.hidden_ms, self.communication_ms)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank, in milliseconds."""

    rank: int
    source: str
    gpu: str | None
    span_ms: float
    compute_ms: float
    communication_ms: float
    hidden_ms: float
    """Communication while the GPU also computes."""
    exposed_ms: float
    """Communication while it does not."""
    copies_ms: float
    """Copies in all; those that are communication are not among them."""
    exposed_copies_ms: float
    """Copies beside neither compute nor communication."""
    idle_ms: float
    collectives: list[Hidden] = field(default_factory=list)
    stages: list[Hidden] = field(default_factory=list)

    @property
    def overlap_ratio(self) -> float | None:
        """Hidden over all communication; None without any."""
        return _ratio(self.hidden_ms, self.communication_ms)

    @property
    def exposed_share(self) -> float:
        """Exposed communication over span."""
        return self.exposed_ms / self.span_ms if self.span_ms else 0.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """All ranks of a run."""

    ranks: list[RankReport]
    skews: list[Skew] = field(default_factory=list)
    clock: str = ""
    """How times of different ranks were compared."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Settings that decide about overlap, where the report was made in the process itself."""

    @property
    def worst(self) -> RankReport | None:
        """The rank with most exposed communication: the others wait for it sooner or later."""
        return max(self.ranks, key=lambda rank: (rank.exposed_ms, rank.span_ms), default=None)

    @property
    def overlap_ratio(self) -> float | None:
        """The lowest of all ranks; None without communication."""
        known = [x.overlap_ratio for x in self.ranks if x.overlap_ratio is not None]
        return min(known, default=None)

    @property
    def span_ms(self) -> float:
        """The longest of all ranks."""
        return max((rank.span_ms for rank in self.ranks), default=0.0)

    def verdicts(self) -> list[str]:
        """What the numbers mean, and what to do next."""
        from keel.overlap.verdict import verdicts

        return verdicts(self)

    def to_json(self) -> dict[str, Any]:
        """Everything, in JSON's types; the schema has a number that changes when it does."""
        worst = self.worst
        ranks = []
        for rank in self.ranks:
            row = asdict(rank) | {"overlap_ratio": rank.overlap_ratio}
            row["exposed_share"] = rank.exposed_share
            for kind in ("collectives", "stages"):
                for part, seen in zip(row[kind], getattr(rank, kind), strict=True):
                    part["overlap_ratio"] = seen.overlap_ratio
            ranks.append(row)
        return {
            "schema": SCHEMA,
            "overlap_ratio": self.overlap_ratio,
            "worst_rank": None if worst is None else worst.rank,
            "ranks": ranks,
            "skews": [asdict(skew) for skew in self.skews],
            "clock": self.clock,
            "environment": self.environment,
            "verdicts": self.verdicts(),
        }

    def __str__(self) -> str:
        rows = [
            f"rank {x.rank}: span {x.span_ms:.3f} ms, compute {x.compute_ms:.3f}, communication "
            f"{x.communication_ms:.3f} (hidden {x.hidden_ms:.3f}, exposed {x.exposed_ms:.3f}), "
            f"idle {x.idle_ms:.3f}, overlap {percent(x.overlap_ratio)}"
            for x in self.ranks
        ]
        return "\n".join(rows + self.verdicts())


def analyze(
    paths: Sequence[str | os.PathLike[str]],
    *,
    rules: Rules | None = None,
    stages: str = STAGES,
    progress: Progress | None = None,
) -> Report:
    """The report of trace files, or of folders of them: one file a rank."""
    return analyze_timelines(
        read_traces(expand(paths), rules=rules, progress=progress), stages=stages
    )


def analyze_timelines(lines: Iterable[Timeline], *, stages: str = STAGES) -> Report:
    """The report of timelines that are already read."""
    lines = list(lines)
    rows, clock = skews(lines)
    return Report(ranks=[_rank(line, stages) for line in lines], skews=rows, clock=clock)


def percent(ratio: float | None) -> str:
    """A ratio for people: 87.5 %, or n/a."""
    return "n/a" if ratio is None else f"{100 * ratio:.1f} %"


def _rank(line: Timeline, stages: str) -> RankReport:
    compute, communication, copies = (line.of(kind) for kind in Kind)
    start, end = int(line.start.min()), int(line.end.max())
    busy = intervals.unite(compute, communication)
    hidden = intervals.length(intervals.intersect(communication, compute))
    exposed = intervals.length(intervals.subtract(communication, compute))
    exposed_copies = intervals.length(intervals.subtract(copies, busy))
    idle = intervals.length(intervals.gaps(intervals.unite(busy, copies), start, end))
    parts = intervals.length(compute) + exposed + exposed_copies + idle
    if parts != end - start or hidden + exposed != intervals.length(communication):
        raise AssertionError(f"times of rank {line.rank} do not add up: {parts} != {end - start}")
    return RankReport(
        rank=line.rank,
        source=line.source,
        gpu=line.gpu,
        span_ms=(end - start) / 1e6,
        compute_ms=intervals.length(compute) / 1e6,
        communication_ms=intervals.length(communication) / 1e6,
        hidden_ms=hidden / 1e6,
        exposed_ms=exposed / 1e6,
        copies_ms=intervals.length(copies) / 1e6,
        exposed_copies_ms=exposed_copies / 1e6,
        idle_ms=idle / 1e6,
        collectives=_collectives(line, compute),
        stages=_stages(line, compute, stages),
    )


def _collectives(line: Timeline, compute: Ints) -> list[Hidden]:
    """Communication by name, the most exposed first."""
    mine = line.kind == Kind.COMMUNICATION
    rows = []
    for label in np.unique(line.label[mine]):
        chosen = mine & (line.label == label)
        rows.append(_hidden(line, compute, line.labels[label], chosen, int(chosen.sum())))
    return sorted(rows, key=lambda row: -row.exposed_ms)


def _stages(line: Timeline, compute: Ints, pattern: str) -> list[Hidden]:
    """Work launched inside ranges of a name, on whichever stream; in order of appearance."""
    ranges = line.ranges
    order = np.argsort(ranges.start, kind="stable")
    order = order[ranges.matching(pattern)[order]]
    found: dict[str, list[int]] = defaultdict(list)
    for at in order:
        found[ranges.names[at]].append(at)
    rows = []
    for name, places in found.items():
        own = np.zeros(len(ranges.names), bool)
        own[places] = True
        chosen = within(line.stream, line.start, ranges, own)
        streams = np.unique(ranges.stream[own], return_counts=True)[1]
        rows.append(_hidden(line, compute, name, chosen, int(streams.max())))
    return rows


def _hidden(
    line: Timeline, compute: Ints, name: str, chosen: NDArray[np.bool_], count: int
) -> Hidden:
    """Of some events: their communication, and how much of it any compute of the rank hid."""
    sent = chosen & (line.kind == Kind.COMMUNICATION)
    done = chosen & (line.kind == Kind.COMPUTE)
    communication = intervals.union(line.start[sent], line.end[sent])
    hidden = intervals.length(intervals.intersect(communication, compute))
    total = intervals.length(communication)
    return Hidden(
        name=name,
        count=count,
        communication_ms=total / 1e6,
        hidden_ms=hidden / 1e6,
        exposed_ms=(total - hidden) / 1e6,
        compute_ms=intervals.length(intervals.union(line.start[done], line.end[done])) / 1e6,
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run without overlap (A) and one with it (B): times of the slowest ranks."""

    serial_ms: float
    overlapped_ms: float
    bound_ms: float
    """The larger of A's compute and communication: no overlap can be faster."""
    speedup: float
    efficiency: float | None
    """How much of what overlap could save was saved; None where it could save nothing."""
    ratios: tuple[float | None, float | None]
    """Overlap ratios of A and of B."""

    def to_json(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        return {"schema": SCHEMA, **asdict(self), "ratios": list(self.ratios)}


def compare(serial: Report, overlapped: Report) -> Comparison:
    """Speed-up of B over A, and (t_A − t_B) / (t_A − max(compute_A, communication_A)).

    A ratio of overlap says nothing about speed: kernels that share a GPU slow each other down.
    """
    if not serial.ranks or not overlapped.ranks:
        raise ValueError("nothing to compare: one of the reports has no GPU work")
    if len(serial.ranks) != len(overlapped.ranks):
        raise ValueError(
            f"A has {len(serial.ranks)} ranks and B {len(overlapped.ranks)}: compare runs of the "
            "same ranks"
        )
    t, bound = serial.span_ms, 0.0
    for rank in serial.ranks:
        bound = max(bound, rank.compute_ms, rank.communication_ms)
    room = t - bound
    saved = t - overlapped.span_ms
    return Comparison(
        serial_ms=t,
        overlapped_ms=overlapped.span_ms,
        bound_ms=bound,
        speedup=t / overlapped.span_ms if overlapped.span_ms else float("inf"),
        efficiency=saved / room if room > 1e-3 * t else None,
        ratios=(serial.overlap_ratio, overlapped.overlap_ratio),
    )
