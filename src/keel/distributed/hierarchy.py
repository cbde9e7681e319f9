"""Rows over two kinds of links: between nodes once, then inside the node to all who want them.

Rank r = node * per_node + place. A row that ranks of another node want goes from its owner to the
rank with the owner's place there, once; that one passes it on. The way back adds up inside the
node first, so that one sum crosses. A rank's *pool* is its own rows, then what came from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from keel.distributed.comm import Cast, Reduce, queues
from keel.distributed.layout import Layout
from keel.distributed.plan import (
    Exchange,
    Plan,
    Segments,
    arrival_order,
    exchange_of,
    merged,
    rows_of,
)
from keel.masks.arrays import order_by, ragged_range

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Route:
    """The two exchanges of one rank in one stage."""

    between: Exchange
    """With the ranks of the same place on other nodes."""
    inside: Exchange
    """With the ranks of the same node, out of their pools."""
    num_local: int


@dataclass(frozen=True, slots=True)
class Links:
    """The groups of a mesh (nodes, ranks of a node) that this rank belongs to."""

    between: dist.ProcessGroup
    inside: dist.ProcessGroup
    per_node: int


@functools.lru_cache(maxsize=64)
def routes_of(plan: Plan, rank: int, per_node: int) -> list[Route | None]:
    """A rank's route in each stage; None where it uses its own keys."""
    stages = plan.stages_of(rank)
    return [
        None
        if stage.exchange is None
        else route_of(plan.segments.select(plan.segments.stage == n), plan.k_layout, rank, per_node)
        for n, stage in enumerate(stages)
    ]


def route_of(segments: Segments, layout: Layout, rank: int, per_node: int) -> Route:
    """How the rows of `segments`, which may be those of one stage, come to a rank."""
    crossing = _crossing(segments, layout, per_node)
    node, place = divmod(rank, per_node)
    same_place = crossing.dst % per_node == place
    lane = crossing.select(same_place)
    between = exchange_of(lane, layout, rank, peers=np.arange(place, layout.num_ranks, per_node))
    arrived = lane.select(lane.dst == rank)
    return Route(
        between,
        _inside(segments, arrived, layout, node, place, per_node),
        int(layout.rows[rank]),
    )


def _crossing(segments: Segments, layout: Layout, per_node: int) -> Segments:
    """What crosses between nodes, from each owner to its namesake there, by (dst, src, lo)."""
    outside = segments.select(segments.dst // per_node != segments.src // per_node)
    namesake = outside.dst // per_node * per_node + outside.src % per_node
    width = layout.total + 1
    lane = (namesake * layout.num_ranks + outside.src) * width
    lo, hi = merged(lane + outside.lo, lane + outside.hi)
    lane, lo, hi = lo // width, lo % width, hi - lo // width * width
    piece = np.searchsorted(layout.ends, lo, "right")
    # A union may join rows of neighbouring pieces of one owner; layouts have none.
    zero = np.zeros(len(lo), np.int64)
    return Segments(lane // layout.num_ranks, lane % layout.num_ranks, zero, lo, hi, piece)


def _inside(
    segments: Segments, arrived: Segments, layout: Layout, node: int, place: int, per_node: int
) -> Exchange:
    """From the pools of a node's ranks to its ranks; rows are ordered by source node, then lo."""
    mine = segments.select(segments.dst // per_node == node)
    sent = mine.select(mine.src % per_node == place)
    order = order_by(sent.dst, sent.src, sent.lo)
    sent = sent.select(order)
    rows = rows_of(layout, sent)
    # received from outside: by source, then lo, behind the rank's own rows
    lengths = arrived.hi - arrived.lo
    starts = np.cumsum(lengths) - lengths
    width = layout.total + 1
    at = np.searchsorted(arrived.src * width + arrived.lo, sent.src * width + sent.lo, "right") - 1
    foreign = sent.src // per_node != node
    if foreign.any():
        first = layout.rows[node * per_node + place] + starts[at] + sent.lo - arrived.lo[at]
        rows = np.where(foreign, first, rows)
    counts = sent.hi - sent.lo
    send_rows = ragged_range(rows, counts)
    send_counts = np.bincount(sent.dst % per_node, counts, per_node)
    coming = mine.select(mine.dst == node * per_node + place)
    lengths = coming.hi - coming.lo
    recv_counts = np.bincount(coming.src % per_node, lengths, per_node)
    # by place, then node: the order in which places send
    arrival = coming.src % per_node * layout.num_ranks + coming.src
    return Exchange(
        send_rows,
        send_counts.astype(int).tolist(),
        recv_counts.astype(int).tolist(),
        arrival_order(arrival, coming.lo, lengths),
    )


class RoutedCast:
    """`Cast` over two links.

    Where the backend queues, both steps are on the lane at once. Where it blocks the host, the
    second begins with `pass_on`, which waits for the first; `wait` does what is left.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        route: Route,
        links: Links,
        what: str,
        *,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self._tensors, self._route, self._links, self._what = tensors, route, links, what
        first = f"{what}, between nodes"
        self._outside = Cast(tensors, route.between, links.between, first, on_start=on_start)
        self._inside: Cast | None = None
        if queues(links.between, tensors[0].device):
            self.pass_on()

    def depart(self) -> None:
        """Neither step is deferred."""

    def pass_on(self) -> None:
        if self._inside is not None:
            return
        came = self._outside.landed()
        pools = [
            own.new_empty(len(own) + len(rows), *own.shape[1:])
            for own, rows in zip(self._tensors, came, strict=True)
        ]
        with self._outside.lane.behind_caller():
            for pool, own, rows in zip(pools, self._tensors, came, strict=True):
                torch.cat([own, rows], out=pool)
        what = f"{self._what}, inside the node"
        self._inside = Cast(pools, self._route.inside, self._links.inside, what)

    def wait(self) -> list[Tensor]:
        self.pass_on()
        assert self._inside is not None
        return self._inside.wait()


class RoutedReduce:
    """`Reduce` over two links: sums of a node cross once. Steps begin as in `RoutedCast`."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        route: Route,
        links: Links,
        what: str,
        *,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self._tensors, self._route, self._links, self._what = tensors, route, links, what
        first = f"{what}, inside the node"
        self._inside = Reduce(tensors, route.inside, links.inside, first, on_start=on_start)
        self._outside: Reduce | None = None
        if queues(links.inside, tensors[0].device):
            self.pass_on()

    def depart(self) -> None:
        """Neither step is deferred."""

    def pass_on(self) -> None:
        if self._outside is not None:
            return
        local, foreign = self._route.num_local, self._route.between.num_received
        pools = [x.new_zeros(local + foreign, *x.shape[1:]) for x in self._tensors]
        self._inside.add_on_lane(pools)
        self._own = [pool[:local] for pool in pools]
        what, parts = f"{self._what}, between nodes", [pool[local:] for pool in pools]
        self._outside = Reduce(parts, self._route.between, self._links.between, what)

    def add_to(self, targets: Sequence[Tensor]) -> None:
        self.pass_on()
        assert self._outside is not None
        self._outside.land()
        self._outside.hold_caller()
        for target, own in zip(targets, self._own, strict=True):
            target += own
        self._outside.add_to(targets)
