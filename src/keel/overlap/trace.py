"""Kineto traces as timelines: the GPU work of one rank, classified, in arrays."""

from __future__ import annotations

import math
import os
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.masks.arrays import Ints
from keel.overlap import intervals
from keel.overlap.classify import COLLECTIVE_RANGE, Kind, Rules
from keel.overlap.scan import CATEGORIES, NoGpuWorkError, Progress, TraceError, scan


@dataclass(frozen=True, eq=False)
class Ranges:
    """Named ranges of a program (`record_function`) as the GPU ran them; one row a stream."""

    names: list[str]
    stream: Ints
    start: Ints
    end: Ints

    def matching(self, pattern: str) -> NDArray[np.bool_]:
        """Which of them have a name in which the pattern is found."""
        found = {name: re.search(pattern, name) is not None for name in set(self.names)}
        return np.array([found[name] for name in self.names], bool)


@dataclass(frozen=True, eq=False)
class Timeline:
    """GPU work of one rank in order of start; times in nanoseconds of the trace's clock."""

    rank: int
    source: str
    """The file it came from."""
    host: str | None
    gpu: str | None
    start: Ints
    end: Ints
    kind: Ints
    """`Kind` of each event."""
    stream: Ints
    label: Ints
    """Of each event, its place in `labels`."""
    labels: list[str]
    """Names of kernels; of collectives, what torch calls them, and their group."""
    sequence: Ints
    """Number of a collective in its group, where torch wrote one; -1."""
    ranges: Ranges

    def of(self, kind: Kind) -> Ints:
        """When the GPU did work of a kind, as a set of intervals."""
        chosen = self.kind == kind
        return intervals.union(self.start[chosen], self.end[chosen])


def read_traces(
    paths: Iterable[str | os.PathLike[str]],
    *,
    rules: Rules | None = None,
    progress: Progress | None = None,
) -> list[Timeline]:
    """Timelines of trace files (.json, .json.gz) of one or many ranks, in order of rank.

    Ranks are those that torch wrote into the traces; else those in the files' names (rank3, r3);
    else the files are counted. A file with several GPUs gives one timeline for each of them.
    """
    files = [Path(path) for path in paths]
    if not files:
        raise TraceError("no trace given: name one or more files that torch.profiler exported")
    sizes = [file.stat().st_size if file.is_file() else 0 for file in files]
    found: list[tuple[int | None, Timeline]] = []
    for n, file in enumerate(files):

        def advance(read: int, _: int, before: int = sum(sizes[:n])) -> None:
            if progress is not None:
                progress(before + read, sum(sizes))

        found += _read(file, rules or Rules(), advance)
    ranks = [rank for rank, _ in found]
    if None in ranks or len(set(ranks)) < len(ranks):
        ranks = list(range(len(found)))
    numbered = [
        Timeline(**{**vars(line), "rank": rank})
        for rank, (_, line) in zip(ranks, found, strict=True)
    ]
    return sorted(numbered, key=lambda line: line.rank)


@dataclass
class _Events:
    """Events of one GPU, as they come; times in microseconds, as Kineto counts them."""

    start: array[float] = field(default_factory=lambda: array("d"))
    duration: array[float] = field(default_factory=lambda: array("d"))
    kind: array[int] = field(default_factory=lambda: array("q"))
    stream: array[int] = field(default_factory=lambda: array("q"))
    label: array[int] = field(default_factory=lambda: array("q"))
    sequence: array[int] = field(default_factory=lambda: array("q"))
    labels: dict[str, int] = field(default_factory=dict)
    ranges: list[tuple[str, int, float, float]] = field(default_factory=list)

    def add(
        self, name: str, kind: Kind, start: float, duration: float, stream: int, sequence: int
    ) -> None:
        self.start.append(start)
        self.duration.append(duration)
        self.kind.append(kind)
        self.stream.append(stream)
        self.label.append(self.labels.setdefault(name, len(self.labels)))
        self.sequence.append(sequence)


def _read(path: Path, rules: Rules, progress: Progress) -> list[tuple[int | None, Timeline]]:
    header, events = scan(path, progress)
    devices: dict[int, _Events] = defaultdict(_Events)
    for event in events:
        if event is None:
            devices.clear()
        elif isinstance(event, tuple):
            name, start, duration, device, stream = event
            kind = rules.kind("kernel", name, {})
            if kind is not None:
                devices[device].add(name, kind, start, duration, stream, -1)
        else:
            try:
                _add(devices, event, rules)
            except (TypeError, ValueError) as error:
                raise TraceError(f"{path} has a GPU event without usable times: {error}") from None
    lines = {device: seen for device, seen in devices.items() if seen.start}
    if not lines:
        raise NoGpuWorkError(
            f"{path} has no GPU work: there is nothing to overlap. Profile on a GPU with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    rank, base = _rank(path, header), int(header.get("baseTimeNanoseconds", 0))
    names = {
        gpu.get("id"): gpu.get("name")
        for gpu in header.get("deviceProperties", [])
        if isinstance(gpu, dict)
    }
    return [
        (
            rank if len(lines) == 1 else None,
            _timeline(seen, base, str(path), header.get("host_name"), names.get(device)),
        )
        for device, seen in sorted(lines.items())
    ]


def _add(devices: dict[int, _Events], event: dict[str, Any], rules: Rules) -> None:
    args = event.get("args") or {}
    seen = devices[_number(args.get("device", event.get("pid")))]
    stream = _number(args.get("stream", event.get("tid")))
    start, duration = float(event["ts"]), max(float(event.get("dur", 0)), 0.0)
    if not math.isfinite(start + duration):
        raise ValueError(f"ts {start}, dur {duration}")
    category, name = CATEGORIES[event["cat"]], str(event["name"])
    if category == "gpu_user_annotation":
        seen.ranges.append((name, stream, start, duration))
        return
    kind = rules.kind(category, name, args)
    if kind is not None:
        if kind is Kind.COMMUNICATION:
            name = _collective(name, args)
        seen.add(name, kind, start, duration, stream, _number(args.get("Seq")))


def _collective(name: str, args: dict[str, Any]) -> str:
    """What torch calls a collective and its group, for people and to find it on other ranks."""
    called = args.get("Collective name")
    if not called:
        return name
    group = args.get("Process Group Description") or args.get("Process Group Name")
    members = args.get("Process Group Ranks")
    where = ", ".join(
        str(x) for x in (group, members) if x not in (None, "", "undefined", "default_pg")
    )
    return f"{called} ({where})" if where else str(called)


def _number(value: object) -> int:
    """Devices, streams and sequence numbers are integers; where they are not, -1."""
    return value if isinstance(value, int) else -1


def _rank(path: Path, header: dict[str, Any]) -> int | None:
    info = header.get("distributedInfo")
    if isinstance(info, dict) and isinstance(info.get("rank"), int):
        return int(info["rank"])
    named = re.findall(r"(?:^|[^a-z])r(?:ank)?[-_.]?(\d+)", path.name, re.IGNORECASE)
    return int(named[-1]) if named else None


def _timeline(seen: _Events, base: int, source: str, host: str | None, gpu: str | None) -> Timeline:
    columns = {
        name: np.array(getattr(seen, name), np.int64)
        for name in ("kind", "stream", "label", "sequence")
    }
    columns["start"], columns["end"] = _nanoseconds(seen.start, seen.duration, base)
    order = np.argsort(columns["start"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    bounds = _nanoseconds([x[2] for x in seen.ranges], [x[3] for x in seen.ranges], base)
    streams = np.array([x[1] for x in seen.ranges], np.int64)
    ranges = Ranges([x[0] for x in seen.ranges], streams, *bounds)
    collective = ranges.matching(COLLECTIVE_RANGE)
    if collective.any():
        inside = within(columns["stream"], columns["start"], ranges, collective)
        columns["kind"][inside & (columns["kind"] == Kind.COPY)] = Kind.COMMUNICATION
    return Timeline(
        rank=0,
        source=source,
        host=host,
        gpu=gpu,
        labels=list(seen.labels),
        ranges=ranges,
        **columns,
    )


def _nanoseconds(start: Sequence[float], duration: Sequence[float], base: int) -> tuple[Ints, Ints]:
    """(start, end) of microseconds with three decimals, on the clock of the machine."""
    first, length = (np.rint(np.array(x, float) * 1000).astype(np.int64) for x in (start, duration))
    return base + first, base + first + length


def within(
    stream: Ints, start: Ints, ranges: Ranges, chosen: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which events start inside one of the chosen ranges of their own stream."""
    inside = np.zeros(len(start), bool)
    for one in np.unique(ranges.stream[chosen]):
        mine = chosen & (ranges.stream == one)
        times = intervals.union(ranges.start[mine], ranges.end[mine])
        at = np.searchsorted(times[:, 0], start, side="right") - 1
        covers = (at >= 0) & (start < times[np.maximum(at, 0), 1]) if len(times) else False
        inside |= (stream == one) & covers
    return inside


def expand(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Files, and for a folder the traces in it."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(x for x in path.iterdir() if x.name.endswith((".json", ".json.gz")))
            if not inside:
                raise TraceError(f"the folder {path} has no .json or .json.gz file")
            files += inside
        else:
            files.append(path)
    return files
