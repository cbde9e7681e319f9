"""Who orthogonalises what: each number of each matrix once there, and once back to its holders."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.optim.blocks import Chunk, chunks_of, intersection, row_blocks, shape_of
from keel.optim.sharding import Spread, bounds_of, choose_owners, make_plan, whole


@st.composite
def problems(draw):
    """(shapes, blocks, spreads) of a few parameters over one set of ranks."""
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (2, 1, 2)]))
    shapes, blocks, spreads = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        heads, rows = draw(st.integers(1, 4)), draw(st.integers(1, 5))
        lead = draw(st.sampled_from([(), (1,), (3,), (4,), (2, 2)]))
        shape = (*lead, heads * rows, draw(st.integers(1, 7)))
        sizes = draw(st.sampled_from([(shape[-2],), (rows,) * heads]))
        if heads > 2:
            sizes = draw(st.sampled_from([sizes, (rows, rows, (heads - 2) * rows)]))
        dims = tuple(draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh)
        order = draw(st.permutations([a for a, dim in enumerate(dims) if dim is not None]))
        shapes.append(shape)
        blocks.append(sizes)
        spreads.append(Spread(mesh, dims, tuple(order)))
    return shapes, blocks, spreads


def chunks_for(shapes, blocks, spreads):
    found = []
    for number, (shape, sizes, spread) in enumerate(zip(shapes, blocks, spreads, strict=True)):
        bounds = bounds_of(shape, spread)
        found += chunks_of(number, shape, sizes, bounds=bounds, parts=spread.num_ranks)
    return found


@given(problems(), st.sampled_from([1, 20, 1 << 30]))
def test_everything_travels_once(problem, round_elements):
    """The exchange, played with numbers: owners see whole matrices, holders get all of theirs."""
    shapes, blocks, spreads = problem
    ranks = range(spreads[0].num_ranks)
    chunks = chunks_for(shapes, blocks, spreads)
    plans = [make_plan(chunks, shapes, spreads, r, round_elements) for r in ranks]
    full = [torch.arange(torch.Size(s).numel(), dtype=torch.float32).view(s) + 1 for s in shapes]

    def box(x, bounds):
        return x[tuple(slice(s, e) for s, e in bounds)]

    shards = [
        [box(x, s.box(x.shape, r)) for x, s in zip(full, spreads, strict=True)] for r in ranks
    ]
    results = [[torch.zeros_like(x) for x in mine] for mine in shards]
    assert len({len(plan.rounds) for plan in plans}) == 1
    worked = []
    for number in range(len(plans[0].rounds)):
        parts = [plan.rounds[number] for plan in plans]
        assert len({part.moves for part in parts}) == 1
        moved = any(part.give or part.take or part.give_back or part.take_back for part in parts)
        assert moved == parts[0].moves
        assert len({tuple(part.params) for part in parts}) == 1
        wires = {pair: [] for pair in itertools.product(ranks, ranks)}
        for r, part in enumerate(parts):
            for p in part.give:
                wires[r, p.peer].append(shards[r][chunks[p.chunk].param][p.in_shard])
        done = {}
        for r, part in enumerate(parts):
            held = {i: torch.zeros(shape_of(chunks[i].box)) for i in part.owned}
            for p in part.kept:
                held[p.chunk][p.in_chunk] += shards[r][chunks[p.chunk].param][p.in_shard]
            for p in part.take:
                held[p.chunk][p.in_chunk] += wires[p.peer, r].pop(0)
            for i, x in held.items():
                assert torch.equal(x, box(full[chunks[i].param], chunks[i].box))
                worked.append(i)
            done |= {(r, i): -x for i, x in held.items()}
        assert not any(wires.values())
        for r, part in enumerate(parts):
            for p in part.give_back:
                wires[r, p.peer].append(done[r, p.chunk][p.in_chunk])
            for p in part.kept:
                results[r][chunks[p.chunk].param][p.in_shard] += done[r, p.chunk][p.in_chunk]
        for r, part in enumerate(parts):
            for p in part.take_back:
                results[r][chunks[p.chunk].param][p.in_shard] += wires[p.peer, r].pop(0)
        assert not any(wires.values())
    assert sorted(worked) == list(range(len(chunks)))
    for mine, results_of_rank in zip(shards, results, strict=True):
        for x, y in zip(mine, results_of_rank, strict=True):
            assert torch.equal(y, -x)


@given(problems())
def test_chunks_hold_whole_matrices_and_cover_all(problem):
    shapes, blocks, spreads = problem
    chunks = chunks_for(shapes, blocks, spreads)
    for number, (shape, sizes) in enumerate(zip(shapes, blocks, strict=True)):
        mine = [c for c in chunks if c.param == number]
        covered = torch.zeros(shape)
        starts = {0, *itertools.accumulate(sizes)}
        for chunk in mine:
            covered[tuple(slice(s, e) for s, e in chunk.box)] += 1
            rows = chunk.box[-2]
            assert rows[0] in starts and (rows[1] - rows[0]) % chunk.rows == 0
            assert chunk.rows in sizes and chunk.box[-1] == (0, shape[-1])
        assert (covered == 1).all()
        lead = torch.Size(shape[:-2]).numel()
        assert sum(c.count for c in mine) == lead * len(sizes)


def test_work_is_even_over_ranks_and_replicas():
    """A model on 2 replicas of 4 shards: eight ranks share the work."""
    shapes = [(64, 64)] * 16 + [(64, 172)] * 12
    spreads = [Spread((2, 4), (None, 0), (1,))] * len(shapes)
    chunks = chunks_for(shapes, [(64,)] * len(shapes), spreads)
    owners = make_plan(chunks, shapes, spreads, 0).owners
    work = [sum(c.flops for c, o in zip(chunks, owners, strict=True) if o == r) for r in range(8)]
    assert max(work) < 1.2 * sum(work) / 8


def test_whole_matrices_stay_where_they_are():
    """Experts sharded one by one, heads that end where shards end: nothing moves."""
    for shape, blocks, spread in (
        ((8, 6, 4), (6,), Spread((4,), (0,), (0,))),
        ((32, 6), (4,) * 8, Spread((4,), (0,), (0,))),
        ((6, 6, 4), (3, 3), Spread((2, 3), (0, 0), (1, 0))),
    ):
        chunks = chunks_for([shape], [blocks], [spread])
        plan = make_plan(chunks, [shape], [spread], 0)
        assert not any(part.moves for part in plan.rounds)
        assert set(plan.owners) == set(range(spread.num_ranks))


def test_copies_come_from_the_owners_own_replica():
    spread = Spread((2, 2), (None, 0), (1,))  # ranks 0, 1 and 2, 3 hold the same
    shapes = [(8, 8)] * 4
    chunks = chunks_for(shapes, [(8,)] * 4, [spread] * 4)
    for rank in range(4):
        plan = make_plan(chunks, shapes, [spread] * 4, rank)
        assert sorted(plan.owners) == [0, 1, 2, 3]
        (part,) = plan.rounds
        assert {p.peer for p in part.take} == {rank ^ 1}
        assert {p.peer for p in part.give_back} == {0, 1, 2, 3} - {rank}


def test_boxes_as_torch_cuts_them():
    assert [Spread((4,), (0,), (0,)).box((5, 2), r)[0] for r in range(4)] == [
        (0, 2),
        (2, 4),
        (4, 5),
        (5, 5),
    ]
    tensor_parallel_first = Spread((2, 2), (0, 0), (1, 0))
    assert [tensor_parallel_first.box((10, 6), r)[0] for r in range(4)] == [
        (0, 3),
        (5, 8),
        (3, 5),
        (8, 10),
    ]
    assert whole(3).box((4, 5), 2) == ((0, 4), (0, 5))


def test_the_busiest_rank_gets_nothing_more():
    big, small = Chunk(0, ((0, 64), (0, 64)), 64, 64), Chunk(1, ((0, 8), (0, 8)), 8, 8)
    owners = choose_owners([small, big, small], [[0], [0], [0]], 2)
    assert owners == [1, 0, 1]  # all of them lie on rank 0


def test_blocks_and_boxes():
    assert row_blocks((2, 12, 5), (4, 8), None, "w") == (4, 8)
    assert row_blocks((12, 5), None, None, "w") == (12,)
    assert intersection(((0, 4), (2, 6)), ((1, 9), (5, 7))) == ((1, 4), (5, 6))
    assert intersection(((0, 4),), ((4, 5),)) is None
    assert chunks_of(0, (0, 4), (0,)) == []
    with pytest.raises(ValueError, match=r"w of shape \(12, 5\) has 12 rows, which 0 heads"):
        row_blocks((12, 5), None, 0, "w")
