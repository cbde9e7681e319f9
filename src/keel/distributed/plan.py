"""Who needs whose keys, in which stage, and what each rank computes then.

A plan follows from the mask, the layouts and the number of stages alone: pure numpy, no
communication, the same on every rank, all ranks at once. Every rank keeps its queries; keys and
values travel. Rank r needs exactly the key rows that its queries see. What it does not own it
receives in `degree` stages of about equal size, in the order of the global axis, so that keys that
are neighbours there stay neighbours in the buffer, and slices are cut only where rows are missing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from keel.distributed.layout import Layout
from keel.masks import AttnMask
from keel.masks.arrays import Ints, order_by, ragged_range
from keel.masks.intervals import UNBOUNDED

MAX_DEGREE = 64


class Segments(NamedTuple):
    """Key rows [lo, hi) that rank dst takes from rank src in a stage, by (dst, lo)."""

    dst: Ints
    src: Ints
    stage: Ints
    lo: Ints
    hi: Ints
    piece: Ints
    """The piece of the key layout that holds them."""

    def select(self, keep: np.ndarray) -> Segments:
        return Segments(*(column[keep] for column in self))


class ExchangeTensors(NamedTuple):
    """An exchange on a device, int64."""

    send_rows: torch.Tensor
    order: torch.Tensor | None
    arrival: torch.Tensor | None
    """The other way round: which of the wanted rows each received one is."""


class ReturnTensors(NamedTuple):
    """The way back on a device, int64: copies of rows[n] come to places[bounds[n]:bounds[n + 1]],
    in the order of the ranks."""

    rows: torch.Tensor
    bounds: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, eq=False)
class Exchange:
    """Rows that one rank sends and receives in one collective."""

    send_rows: Ints
    """Local rows, those for rank 0 first."""
    send_counts: list[int]
    recv_counts: list[int]
    order: Ints | None
    """Where each wanted row stands among the received ones; None: they are in order."""

    _on_devices: dict[torch.device, ExchangeTensors] = field(default_factory=dict)
    _returning: dict[torch.device, ReturnTensors] = field(default_factory=dict)

    @property
    def num_received(self) -> int:
        return sum(self.recv_counts)

    def tensors(self, device: torch.device) -> ExchangeTensors:
        """Copied to a device once."""
        if device not in self._on_devices:
            order = arrival = None
            with torch.inference_mode(False):  # kept: must serve evaluation and training alike
                send_rows = torch.from_numpy(self.send_rows).to(device)
                if self.order is not None:
                    order = torch.from_numpy(self.order).to(device)
                    arrival = torch.empty_like(order)
                    arrival[order] = torch.arange(len(order), device=device)
                self._on_devices[device] = ExchangeTensors(send_rows, order, arrival)
        return self._on_devices[device]

    def returning(self, device: torch.device) -> ReturnTensors:
        """For the kernel that adds what comes back; copied to a device once."""
        if device not in self._returning:
            rows, count = np.unique(self.send_rows, return_counts=True)
            places = np.argsort(self.send_rows, kind="stable")  # of one row: by rank
            bounds = np.append(0, np.cumsum(count))
            with torch.inference_mode(False):
                self._returning[device] = ReturnTensors(
                    *(torch.from_numpy(x).to(device) for x in (rows, bounds, places))
                )
        return self._returning[device]


@dataclass(frozen=True, eq=False, slots=True)
class Stage:
    """One kernel call of one rank: its queries against some keys."""

    mask: AttnMask
    exchange: Exchange | None
    """How the keys come; None: they are the rank's own."""


@dataclass(frozen=True, eq=False)
class Plan:
    """All ranks' stages of one mask on its layouts. `stages_of` has what a rank executes."""

    mask: AttnMask
    q_layout: Layout
    k_layout: Layout
    degree: int
    """Stages of remote keys; 0: own and remote keys in one blocking fetch and one kernel call."""
    segments: Segments
    slices: Ints
    """(n, 8): rank, stage, and six columns of a slice in local coordinates; by rank and stage."""

    @property
    def num_ranks(self) -> int:
        return self.q_layout.num_ranks

    @property
    def num_stages(self) -> int:
        """Kernel calls of each rank: own keys first, then the remote stages; one for degree 0."""
        return self.degree + 1

    @functools.cached_property
    def rows_received(self) -> Ints:
        """(ranks, stages) key rows that arrive from other ranks."""
        remote = self.segments.src != self.segments.dst
        return self._rows(self.segments.dst, remote)

    @functools.cached_property
    def rows_sent(self) -> Ints:
        """(ranks, stages) key rows that go to other ranks, counted once for each of them."""
        remote = self.segments.src != self.segments.dst
        return self._rows(self.segments.src, remote)

    def _rows(self, rank: Ints, keep: np.ndarray) -> Ints:
        s, count = self.segments, self.num_ranks * self.num_stages
        place = (rank * self.num_stages + s.stage)[keep]
        rows = np.bincount(place, (s.hi - s.lo)[keep], count)
        return rows.astype(np.int64).reshape(self.num_ranks, self.num_stages)

    @functools.cached_property
    def areas(self) -> Ints:
        """(ranks, stages) attended pairs; those that slices share are counted for each slice."""
        place = self.slices[:, 0] * self.num_stages + self.slices[:, 1]
        count = self.num_ranks * self.num_stages
        # bincount sums doubles, which hold pairs exactly up to 2**53
        areas = np.bincount(place, slice_areas(self.slices[:, 2:]), count)
        return areas.astype(np.int64).reshape(self.num_ranks, self.num_stages)

    def stages_of(self, rank: int) -> list[Stage]:
        """What a rank executes, in order; worked out at the first call."""
        if rank not in self._stages:
            self._stages[rank] = [self._stage(rank, n) for n in range(self.num_stages)]
        return self._stages[rank]

    @functools.cached_property
    def _stages(self) -> dict[int, list[Stage]]:
        return {}

    def _stage(self, rank: int, stage: int) -> Stage:
        mine = self.slices[(self.slices[:, 0] == rank) & (self.slices[:, 1] == stage), 2:]
        queries = int(self.q_layout.rows[rank])
        if stage == 0 and self.degree > 0:
            return Stage(AttnMask(mine, queries, int(self.k_layout.rows[rank])), None)
        moving = exchange_of(
            self.segments.select(self.segments.stage == stage), self.k_layout, rank
        )
        return Stage(AttnMask(mine, queries, moving.num_received), moving)


@functools.lru_cache(maxsize=64)
def make_plan(mask: AttnMask, q_layout: Layout, k_layout: Layout, degree: int) -> Plan:
    """The plan of a mask (tq, tk) whose queries and keys are laid out over the same ranks."""
    return fresh_plan(mask, q_layout, k_layout, degree)


def fresh_plan(mask: AttnMask, q_layout: Layout, k_layout: Layout, degree: int) -> Plan:
    """`make_plan` that remembers nothing: plans of thousands of ranks are large."""
    return next(fresh_plans(mask, q_layout, k_layout, (degree,)))


def fresh_plans(
    mask: AttnMask, q_layout: Layout, k_layout: Layout, degrees: Iterable[int]
) -> Iterator[Plan]:
    """`fresh_plan` for several degrees, one after the other; they share what does not differ."""
    if (q_layout.total, k_layout.total) != mask.shape:
        raise ValueError(
            f"the mask is for (tq, tk) = {mask.shape}, but the layouts have "
            f"{(q_layout.total, k_layout.total)} tokens"
        )
    if q_layout.num_ranks != k_layout.num_ranks:
        raise ValueError(
            f"queries are laid out over {q_layout.num_ranks} ranks, keys over {k_layout.num_ranks}"
        )
    seen = _seen_by_pieces(mask.array, q_layout)
    whole = _segments(seen, k_layout)
    nothing_moves = bool((whole.src == whole.dst).all())
    at_home: Ints | None = None  # all slices, where nothing moves: the same for degrees above 0
    for degree in degrees:
        if not 0 <= degree <= MAX_DEGREE:
            raise ValueError(f"degree must be in 0..{MAX_DEGREE}, got {degree}")
        segments = _staged(whole, k_layout.num_ranks, degree) if degree else whole
        slices = at_home if degree else None
        if slices is None:
            slices = _local_slices(seen, q_layout, k_layout, segments, degree)
        if degree and nothing_moves:
            at_home = slices
        yield Plan(mask, q_layout, k_layout, degree, segments, slices)


class _Seen(NamedTuple):
    """A slice cut to a piece of queries: rows [a, b) see keys [ka, kb) within the band."""

    rank: Ints
    piece: Ints
    a: Ints
    b: Ints
    ka: Ints
    kb: Ints
    lo: Ints
    hi: Ints


def overlaps(lo: Ints, hi: Ints, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """(interval, piece) of every interval [lo, hi) and every piece that it meets.

    Pieces are disjoint and ascending; intervals are any.
    """
    first = np.searchsorted(ends, lo, "right")
    count = np.maximum(np.searchsorted(starts, hi, "left") - first, 0)
    count[hi <= lo] = 0
    interval = np.repeat(np.arange(len(lo)), count)
    return interval, ragged_range(first, count)


def _seen_by_pieces(slices: Ints, layout: Layout) -> _Seen:
    q0, q1, k0, k1, lo, hi = slices[slices[:, 4] <= slices[:, 5]].T
    at, piece = overlaps(q0, q1, layout.starts, layout.ends)
    a = np.maximum(q0[at], layout.starts[piece])
    b = np.minimum(q1[at], layout.ends[piece])
    # Neighbouring rows see neighbouring intervals: what a run of rows sees has no holes.
    ka = np.maximum(k0[at], a + lo[at])
    kb = np.minimum(k1[at], b + hi[at])
    seen = _Seen(layout.ranks[piece], piece, a, b, ka, kb, lo[at], hi[at])
    return _Seen(*(column[ka < kb] for column in seen))


def _segments(seen: _Seen, k_layout: Layout) -> Segments:
    """What each rank needs of whom, all in stage 0."""
    width = k_layout.total + 1  # one axis for all ranks, with a gap between them
    lo, hi = merged(seen.rank * width + seen.ka, seen.rank * width + seen.kb)
    rank = lo // width
    lo, hi = lo - rank * width, hi - rank * width
    at, piece = overlaps(lo, hi, k_layout.starts, k_layout.ends)
    lo = np.maximum(lo[at], k_layout.starts[piece])
    hi = np.minimum(hi[at], k_layout.ends[piece])
    dst, src = rank[at], k_layout.ranks[piece]
    return Segments(dst, src, np.zeros(len(dst), np.int64), lo, hi, piece)


def merged(lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """The union of intervals [lo, hi), ascending and with gaps between them."""
    order = order_by(lo)
    lo, reach = lo[order], np.maximum.accumulate(hi[order])
    new = np.ones(len(lo), bool)
    new[1:] = lo[1:] > reach[:-1]
    last = np.append(new[1:], True)[: len(lo)]
    return lo[new], reach[last]


def _staged(segments: Segments, num_ranks: int, degree: int) -> Segments:
    """Remote segments spread over stages 1..degree, equal rows for each, cut where they must be."""
    rows = np.where(segments.src == segments.dst, 0, segments.hi - segments.lo)
    total = np.bincount(segments.dst, rows, num_ranks).astype(np.int64)
    behind = np.cumsum(rows) - rows
    start_of_rank = np.cumsum(total) - total
    before = behind - start_of_rank[segments.dst]
    size = np.maximum(-(-total // degree), 1)[segments.dst]
    first, last = before // size, np.maximum(before + rows - 1, before) // size
    parts = last - first + 1
    at = np.repeat(np.arange(len(rows)), parts)
    stage = ragged_range(first, parts)
    cut = segments.select(at)
    own = cut.src == cut.dst
    lo = np.where(own, cut.lo, np.maximum(cut.lo, cut.lo + stage * size[at] - before[at]))
    hi = np.where(own, cut.hi, np.minimum(cut.hi, cut.lo + (stage + 1) * size[at] - before[at]))
    return cut._replace(stage=np.where(own, 0, stage + 1), lo=lo, hi=hi)


def _local_slices(
    seen: _Seen, q_layout: Layout, k_layout: Layout, segments: Segments, degree: int
) -> Ints:
    rank, stage, lo, hi, shift = _runs(segments, k_layout, degree)
    width = k_layout.total + 1
    at, run = overlaps(
        *(seen.rank * width + seen.ka, seen.rank * width + seen.kb),
        *(rank * width + lo, rank * width + hi),
    )
    k0, k1 = np.maximum(seen.ka[at], lo[run]), np.minimum(seen.kb[at], hi[run])
    band_lo, band_hi = seen.lo[at], seen.hi[at]
    q0, q1 = np.maximum(seen.a[at], k0 - band_hi), np.minimum(seen.b[at], k1 - band_lo)
    keep = (q0 < q1) & (k0 < k1)
    if not keep.all():
        at, run, q0, q1, k0, k1 = (x[keep] for x in (at, run, q0, q1, k0, k1))
        band_lo, band_hi = band_lo[keep], band_hi[keep]
    shift_q = (q_layout.local_starts - q_layout.starts)[seen.piece[at]]
    shift_k = shift[run]
    rank, stage = seen.rank[at], stage[run]
    columns = [
        *(rank, stage, q0 + shift_q, q1 + shift_q, k0 + shift_k, k1 + shift_k),
        *(_moved(band, shift_k - shift_q) for band in (band_lo, band_hi)),
    ]
    place = rank * (MAX_DEGREE + 1) + stage
    if (place[1:] < place[:-1]).any():
        order = order_by(place)
        columns = [x[order] for x in columns]
    return np.stack(columns).T  # columns are read one at a time


def _moved(band: Ints, shift: Ints) -> Ints:
    return np.where(np.abs(band) >= UNBOUNDED, band, band + shift)


def _runs(segments: Segments, k_layout: Layout, degree: int) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """(rank, stage, lo, hi, shift) by (rank, lo): global keys [lo, hi) stand at lo + shift."""
    rank, stage, lo, hi = segments.dst, segments.stage, segments.lo, segments.hi
    order = order_by(rank, stage, lo)
    rows = (hi - lo)[order]
    behind = np.cumsum(rows) - rows
    group = rank[order] * (MAX_DEGREE + 1) + stage[order]
    first = np.ones(len(order), bool)
    first[1:] = group[1:] != group[:-1]
    position = np.empty(len(order), np.int64)
    position[order] = behind - behind[first][np.cumsum(first) - 1] if len(order) else behind
    own = (stage == 0) & (degree > 0)
    place = (k_layout.local_starts - k_layout.starts)[segments.piece] + lo
    shift = np.where(own, place, position) - lo
    new = np.ones(len(lo), bool)
    new[1:] = (
        (rank[1:] != rank[:-1])
        | (stage[1:] != stage[:-1])
        | (lo[1:] != hi[:-1])
        | (shift[1:] != shift[:-1])
    )
    last = np.append(new[1:], True)[: len(lo)]
    return rank[new], stage[new], lo[new], hi[last], shift[new]


def rows_of(layout: Layout, segments: Segments) -> Ints:
    """The first row of each segment on its owner's local axis."""
    return (layout.local_starts - layout.starts)[segments.piece] + segments.lo


def exchange_of(
    segments: Segments, layout: Layout, rank: int, peers: Ints | None = None
) -> Exchange:
    """A rank's part in moving rows of `layout` as segments say; wanted in the order of lo.

    `peers` are the ranks that take part, where they are not all; then rows are wanted in the order
    in which they arrive: by source, then lo.
    """
    everyone = np.arange(layout.num_ranks) if peers is None else peers
    out = segments.select(segments.src == rank)
    out = out.select(order_by(out.dst, out.lo))
    lengths = out.hi - out.lo
    rows = ragged_range(rows_of(layout, out), lengths)
    sent = np.bincount(out.dst, lengths, layout.num_ranks)[everyone]
    coming = segments.select(segments.dst == rank)
    lengths = coming.hi - coming.lo
    received = np.bincount(coming.src, lengths, layout.num_ranks)[everyone]
    order = None if peers is not None else arrival_order(coming.src, coming.lo, lengths)
    return Exchange(rows, sent.astype(int).tolist(), received.astype(int).tolist(), order)


def arrival_order(src: Ints, lo: Ints, lengths: Ints) -> Ints | None:
    """Where rows stand that arrive by (src, lo) and are wanted by lo; None: just so."""
    by_source, by_key = order_by(src, lo), order_by(lo)
    starts = np.empty(len(lengths), np.int64)
    starts[by_source] = np.cumsum(lengths[by_source]) - lengths[by_source]
    wanted = ragged_range(starts[by_key], lengths[by_key])
    in_order = not len(wanted) or (wanted[0] == 0 and bool((np.diff(wanted) == 1).all()))
    return None if in_order else wanted


def slice_areas(slices: Ints) -> Ints:
    """Pairs of each slice (n, 6)."""
    q0, q1, k0, k1, lo, hi = slices.T
    num_q, num_k = np.maximum(q1 - q0, 0), np.maximum(k1 - k0, 0)

    def up_to(diagonal: Ints) -> Ints:
        """Pairs with j - i <= diagonal: a sum of clamp(u, 0, num_k) over rows."""
        first = np.clip(q0 + diagonal - k0 + 1, -num_q, num_k + num_q)

        def clamp_sum(u: Ints) -> Ints:
            u = np.maximum(u, 0)
            inside = np.minimum(u, num_k)
            return inside * (inside + 1) // 2 + (u - inside) * num_k

        return clamp_sum(first + num_q - 1) - clamp_sum(first - 1)

    return np.maximum(up_to(hi) - up_to(lo - 1), 0)
