"""Who orthogonalises what, and which pieces travel there and back. Planned, not done: pure Python.

Ranks hold boxes of a parameter; a matrix is needed whole, on one rank, its *owner*. Owners are
chosen once, such that all ranks have about equal work and matrices that lie on one rank stay there
where balance allows. Where several ranks hold the same (replicas), an owner takes the pieces of the
ranks at its own place among them, and gives results to all. Every rank makes the same plan.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from keel.optim.blocks import Box, Chunk, intersection, slices_in

SLACK = 1.05
"""How far over the mean work a rank may go for matrices that it holds anyway."""

ROUND_ELEMENTS = 1 << 27
"""Numbers that an owner takes on at a time; the next ones travel while it computes."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a tensor lies over a mesh: for each mesh dim the tensor dim it shards, or None."""

    mesh: tuple[int, ...]
    dims: tuple[int | None, ...]
    order: tuple[int, ...]
    """Mesh dims that shard, in the order in which they cut."""

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Row-major, as ranks of a mesh are counted."""
        place = []
        for size in reversed(self.mesh):
            rank, here = divmod(rank, size)
            place.append(here)
        return tuple(reversed(place))

    def replica(self, rank: int) -> tuple[int, ...]:
        """Which of the copies this rank holds a part of."""
        place = self.coordinate(rank)
        return tuple(c for c, dim in zip(place, self.dims, strict=True) if dim is None)

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """What a rank holds: each cut in equal parts, rounded up, the last ones smaller or empty.

        >>> Spread((2,), (0,), (0,)).box((5, 4), 1)
        ((3, 5), (0, 4))
        """
        place = self.coordinate(rank)
        box = [(0, d) for d in shape]
        for axis in self.order:
            dim = self.dims[axis]
            assert dim is not None
            start, stop = box[dim]
            part = -(-(stop - start) // self.mesh[axis])
            begin = min(start + part * place[axis], stop)
            box[dim] = (begin, min(begin + part, stop))
        return tuple(box)


def whole(num_ranks: int = 1) -> Spread:
    """Every rank holds everything."""
    return Spread((num_ranks,), (None,), ())


@dataclass(frozen=True, slots=True)
class Piece:
    """What a shard and a chunk share, and the rank at its other end."""

    peer: int
    chunk: int
    in_chunk: tuple[slice, ...]
    in_shard: tuple[slice, ...]


@dataclass(slots=True)
class Round:
    """One rank's part of what is worked off together. Pieces are in order of peer, then chunk."""

    moves: bool = False
    """Whether any rank sends anything: all of them know."""
    params: list[int] = field(default_factory=list)
    owned: list[int] = field(default_factory=list)
    """Chunks that this rank orthogonalises."""
    give: list[Piece] = field(default_factory=list)
    """Of this rank's shards, to owners."""
    take: list[Piece] = field(default_factory=list)
    """Of other ranks' shards, into owned chunks."""
    kept: list[Piece] = field(default_factory=list)
    """Of this rank's shards, into chunks that it owns itself; results go the same way back."""
    give_back: list[Piece] = field(default_factory=list)
    take_back: list[Piece] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    chunks: list[Chunk]
    owners: list[int]
    rounds: list[Round]


def bounds_of(shape: Sequence[int], spread: Spread) -> list[set[int]]:
    """For each dim, where shards end."""
    bounds: list[set[int]] = [set() for _ in shape]
    for rank in range(spread.num_ranks):
        for found, (start, stop) in zip(bounds, spread.box(shape, rank), strict=True):
            found |= {start, stop}
    return bounds


def choose_owners(
    chunks: Sequence[Chunk], holders: Sequence[Sequence[int]], num_ranks: int
) -> list[int]:
    """A rank for each chunk: the largest first, to a holder of all of it or the least busy rank.

    >>> square = Chunk(0, ((0, 8), (0, 8)), 8, 8)
    >>> choose_owners([square] * 4, [[]] * 4, 2)
    [0, 1, 0, 1]
    """
    busy = [0] * num_ranks
    mean = sum(c.flops for c in chunks) / num_ranks
    owners = [0] * len(chunks)
    for index in sorted(range(len(chunks)), key=lambda i: (-chunks[i].flops, i)):
        work = chunks[index].flops
        fitting = [r for r in holders[index] if busy[r] + work <= max(SLACK * mean, work)]
        owners[index] = min(fitting or range(num_ranks), key=lambda r: (busy[r], r))
        busy[owners[index]] += work
    return owners


def make_plan(
    chunks: list[Chunk],
    shapes: Sequence[Sequence[int]],
    spreads: Sequence[Spread],
    rank: int,
    round_elements: int = ROUND_ELEMENTS,
) -> Plan:
    """The part of one rank. Chunks are in order of their parameters; shapes and spreads are those
    of the parameters, all over the same ranks."""
    num_ranks = spreads[0].num_ranks if spreads else 1
    held = functools.cache(_boxes)
    touching = [_touching(c, held(tuple(shapes[c.param]), spreads[c.param])) for c in chunks]
    holders = [
        [r for r, box in t.items() if box == c.box] for c, t in zip(chunks, touching, strict=True)
    ]
    owners = choose_owners(chunks, holders, num_ranks)
    rounds: list[Round] = []
    filled = [round_elements] * num_ranks
    for param, group in itertools.groupby(range(len(chunks)), key=lambda i: chunks[i].param):
        indices = list(group)
        if max(filled[owners[i]] for i in indices) >= round_elements:
            rounds.append(Round())
            filled = [0] * num_ranks
        rounds[-1].params.append(param)
        boxes = held(tuple(shapes[param]), spreads[param])
        for i in indices:
            filled[owners[i]] += chunks[i].numel
            _add_chunk(
                rounds[-1], i, chunks[i], owners[i], touching[i], boxes, spreads[param], rank
            )
    for part in rounds:
        for moved in (part.give, part.take, part.give_back, part.take_back):
            moved.sort(key=lambda p: (p.peer, p.chunk))
    return Plan(chunks, owners, rounds)


def _boxes(shape: tuple[int, ...], spread: Spread) -> list[Box]:
    return [spread.box(shape, rank) for rank in range(spread.num_ranks)]


def _touching(chunk: Chunk, boxes: list[Box]) -> dict[int, Box]:
    """The ranks that hold some of a chunk, and what of it."""
    found = {rank: intersection(chunk.box, box) for rank, box in enumerate(boxes)}
    return {rank: box for rank, box in found.items() if box is not None}


def _add_chunk(
    part: Round,
    index: int,
    chunk: Chunk,
    owner: int,
    touching: dict[int, Box],
    boxes: list[Box],
    spread: Spread,
    rank: int,
) -> None:
    part.moves |= any(holder != owner for holder in touching)
    if owner == rank:
        part.owned.append(index)
    for holder, shared in touching.items():
        if rank not in (owner, holder):
            continue
        peer = owner if holder == rank else holder
        piece = Piece(peer, index, slices_in(shared, chunk.box), slices_in(shared, boxes[holder]))
        sends = spread.replica(holder) == spread.replica(owner)
        if holder == owner:
            part.kept.append(piece)
        elif holder == rank:
            part.take_back.append(piece)
            part.give += [piece] if sends else []
        else:
            part.give_back.append(piece)
            part.take += [piece] if sends else []
