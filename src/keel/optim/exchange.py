"""A plan carried out: shards to owners, whole matrices orthogonalised, results back to the shards.

Rounds overlap: the shards of the next one travel while this one is computed, and so do the results
of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from keel.distributed.comm import AllToAll
from keel.distributed.lanes import lane_of
from keel.optim.batching import Settings, orthogonalize_all
from keel.optim.blocks import Chunk, shape_of
from keel.optim.sharding import Piece, Plan, Round


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks that share parameters. Plans count them by place; the group has its own order."""

    group: dist.ProcessGroup | None = None
    group_ranks: tuple[int, ...] = (0,)
    """Rank in the group of each place."""
    place: int = 0

    def __len__(self) -> int:
        return len(self.group_ranks)


@dataclass(frozen=True, slots=True)
class Result:
    """What is ready of a parameter: a box of its local shard, and which chunk it came from."""

    chunk: Chunk
    in_shard: tuple[slice, ...]
    value: torch.Tensor


Updates = dict[int, torch.Tensor]
"""Local shards of what is to be orthogonalised, by number of the parameter."""


def orthogonalize_sharded(
    plan: Plan,
    team: Team,
    settings: Settings,
    updates_of: Callable[[Sequence[int]], Updates],
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[Sequence[int], list[Result]]]:
    """Yields, round by round, its parameters and the results for the local shards.

    `updates_of` gives the shards of a round's parameters, in `dtype`; one that it leaves out has
    none, which only a team of one can know.
    """
    works = [_Work(part, plan, team, settings, device, dtype) for part in plan.rounds]
    before: _Work | None = None
    for number, work in enumerate(works):
        if number == 0:
            work.give(updates_of(work.part.params))
        if number + 1 < len(works):
            following = works[number + 1]
            following.give(updates_of(following.part.params))
        work.compute()
        if before is not None:
            yield before.part.params, before.results()
        before = work
    if before is not None:
        yield before.part.params, before.results()


class _Work:
    """One round under way."""

    def __init__(
        self,
        part: Round,
        plan: Plan,
        team: Team,
        settings: Settings,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.part, self._chunks, self._team, self._settings = part, plan.chunks, team, settings
        self._device, self._dtype = device, dtype
        self._updates: Updates = {}
        self._coming: _Coming | None = None
        self._done: dict[int, torch.Tensor] = {}

    def give(self, updates: Updates) -> None:
        self._updates = updates
        if self.part.moves:
            out = [(p, updates[self._chunks[p.chunk].param][p.in_shard]) for p in self.part.give]
            self._coming = _Coming(
                out, self.part.take, self._team, self._dtype, self._device, "collecting matrices"
            )

    def compute(self) -> None:
        stacks = self._stacks()
        results = orthogonalize_all(list(stacks.values()), self._settings)
        self._updates = {}
        for index, result in zip(stacks, results, strict=True):
            self._done[index] = result.reshape(shape_of(self._chunks[index].box))
        if self.part.moves:
            self._coming = _Coming(
                [(p, self._done[p.chunk][p.in_chunk]) for p in self.part.give_back],
                self.part.take_back,
                self._team,
                self._settings.dtype,
                self._device,
                "returning orthogonalised matrices",
            )

    def results(self) -> list[Result]:
        ready = [
            (p, self._done[p.chunk][p.in_chunk]) for p in self.part.kept if p.chunk in self._done
        ]
        if self._coming is not None:
            ready += self._coming.pieces()
        self._done, self._coming = {}, None
        return [Result(self._chunks[p.chunk], p.in_shard, value) for p, value in ready]

    def _stacks(self) -> dict[int, torch.Tensor]:
        """Owned chunks as (count, rows, columns)."""
        came = [] if self._coming is None else self._coming.pieces()
        self._coming = None
        parts: dict[int, list[tuple[Piece, torch.Tensor]]] = {i: [] for i in self.part.owned}
        for piece in self.part.kept:
            update = self._updates.get(self._chunks[piece.chunk].param)
            if update is not None:
                parts[piece.chunk].append((piece, update[piece.in_shard]))
        for piece, value in came:
            parts[piece.chunk].append((piece, value))
        stacks = {}
        for index, found in parts.items():
            if not found:
                continue
            chunk = self._chunks[index]
            shape = shape_of(chunk.box)
            if len(found) == 1:
                box = found[0][1]
            else:
                box = torch.empty(shape, dtype=self._dtype, device=self._device)
                for piece, value in found:
                    box[piece.in_chunk] = value
            stacks[index] = box.reshape(-1, chunk.rows, chunk.columns)
        return stacks


class _Coming:
    """Pieces sent, and others awaited."""

    def __init__(
        self,
        out: list[tuple[Piece, torch.Tensor]],
        expected: list[Piece],
        team: Team,
        dtype: torch.dtype,
        device: torch.device,
        what: str,
    ) -> None:
        assert team.group is not None
        in_group = team.group_ranks
        out = sorted(out, key=lambda pair: in_group[pair[0].peer])  # stable: chunks stay in order
        self._expected = sorted(expected, key=lambda piece: in_group[piece.peer])
        self._shapes = [tuple(s.stop - s.start for s in p.in_chunk) for p in self._expected]
        sizes = [torch.Size(shape).numel() for shape in self._shapes]
        self._sizes = sizes
        send, receive = [0] * len(team), [0] * len(team)
        for piece, value in out:
            send[in_group[piece.peer]] += value.numel()
        for piece, size in zip(self._expected, sizes, strict=True):
            receive[in_group[piece.peer]] += size
        flat = [value.reshape(-1) for _, value in out]
        packed = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        self._lane = lane_of(device)
        self._transfer = AllToAll(packed[:, None], send, receive, team.group, what)
        with self._lane.behind_caller():
            self._transfer.start(self._lane)

    def pieces(self) -> list[tuple[Piece, torch.Tensor]]:
        with self._lane.behind_caller():
            self._transfer.finish()
        self._lane.hold_caller(self._lane.mark())
        parts = self._transfer.received.view(-1).split(self._sizes)
        return [
            (piece, part.view(shape))
            for piece, part, shape in zip(self._expected, parts, self._shapes, strict=True)
        ]
