"""Figures of plans over ranks against dense masks, and their pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import attn_masks

from keel import masks
from keel.distributed import report
from keel.distributed.cost import CostModel, best_degree, estimate, other_schemes
from keel.distributed.keys import AttnKey, flex_key
from keel.distributed.layout import contiguous, zigzag
from keel.distributed.plan import Plan, make_plan
from keel.distributed.report import compare, draw_plan, rank_rows, rows_between, simulate, to_json

MODEL = CostModel(num_heads=8, num_kv_heads=2, head_dim=16, gb_per_s=0.5, tflops=0.1)
ROW = 2 * (16 + 16) * 2
"""Bytes of a row of keys and values of two heads in bf16."""
GRADIENT = 2 * (16 + 16) * 4

DOCUMENTS = masks.documents([0, 37, 50, 96], causal=True)


def moved(key: AttnKey | Plan) -> np.ndarray:
    """(ranks, ranks) rows from rank to rank, from the dense mask."""
    dense = key.mask.to_dense().numpy()
    rows = np.zeros((key.num_ranks, key.num_ranks), int)
    for to in range(key.num_ranks):
        seen = np.flatnonzero(dense[key.q_layout.tokens_of(to)].any(0))
        for origin in range(key.num_ranks):
            if origin != to:
                rows[origin, to] = np.isin(seen, key.k_layout.tokens_of(origin)).sum()
    return rows


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize("balance", report.BALANCES)
def test_rows_of_ranks(balance: Any, degree: int) -> None:
    key = flex_key(DOCUMENTS, num_ranks=4, balance=balance, degree=degree)
    dense, rows = DOCUMENTS.to_dense().numpy(), moved(key)
    found = rank_rows(key, MODEL)
    for rank, row in enumerate(found):
        tokens = key.q_layout.tokens_of(rank)
        assert (row.rank, row.tokens) == (rank, len(tokens))
        assert row.pieces == 1 + (np.diff(tokens) > 1).sum()
        assert row.area == dense[tokens].sum()
        assert row.area_of_mean == pytest.approx(row.area * 4 / dense.sum())
        there, back = rows[:, rank].sum(), rows[rank].sum()
        assert sum(row.forward.bytes_in) == there * ROW
        assert sum(row.forward.bytes_out) == back * ROW
        assert sum(row.backward.bytes_in) == there * ROW + back * GRADIENT
        assert sum(row.backward.bytes_out) == back * ROW + there * GRADIENT
        assert len(row.forward.bytes_in) == len(row.backward.bytes_out) == degree + 1
        size = -(-there // max(degree, 1))  # of each stage but the last
        assert row.remote_bytes == min(2 * size if degree > 1 else size, there) * ROW
    assert max(row.forward.ms for row in found) == estimate(key.forward_plan, MODEL).slowest


def test_expected_times_by_hand() -> None:
    key = flex_key(masks.full(8), num_ranks=2, balance="contiguous", degree=1)
    for row in rank_rows(key, MODEL):
        assert row.forward.bytes_in == row.forward.bytes_out == (0, 4 * ROW)
        assert row.backward.bytes_in == (0, 4 * (ROW + GRADIENT))
        half = 2 * 16 * 8 * 32 / 0.1e12 * 1e3  # ms for 16 pairs
        arrival = 4 * ROW / 0.5e9 * 1e3 + 0.02
        assert row.forward.ms == pytest.approx(arrival + half + 0.02)
        assert row.forward.exposed_ms == pytest.approx(arrival - half)


def test_both_directions_have_their_own_stages() -> None:
    key = flex_key(DOCUMENTS, num_ranks=4, balance="zigzag", degree=1, backward_degree=3)
    for row in rank_rows(key, MODEL):
        assert len(row.forward.bytes_in) == 2 and len(row.backward.bytes_in) == 4
    times = estimate(key.backward_plan, MODEL, backward=True)
    assert [row.backward.ms for row in rank_rows(key, MODEL)] == times.total.tolist()
    assert rank_rows(key.forward_plan, MODEL)[0].forward == rank_rows(key, MODEL)[0].forward


@given(mask=attn_masks(), num_ranks=st.integers(1, 5), degree=st.integers(0, 3))
def test_traffic_against_dense(mask: masks.AttnMask, num_ranks: int, degree: int) -> None:
    plan = make_plan(mask, zigzag(mask.tq, num_ranks), contiguous(mask.tk, num_ranks), degree)
    rows = rows_between(plan)
    assert rows.tolist() == moved(plan).tolist()
    found = rank_rows(plan, MODEL)
    assert [sum(x.forward.bytes_in) for x in found] == (rows.sum(0) * ROW).tolist()
    json.dumps(to_json(found), allow_nan=False)


@given(mask=attn_masks(), num_ranks=st.integers(1, 5), degree=st.integers(0, 3))
def test_any_mask_can_be_simulated(mask: masks.AttnMask, num_ranks: int, degree: int) -> None:
    simulation = simulate(mask, num_ranks, degree=degree, model=MODEL)
    found = json.loads(json.dumps(simulation.to_json(), allow_nan=False))
    assert len(found["ranks"]) == num_ranks and len(found["strategies"]) == 7
    assert found["mask"]["area"] == mask.area()
    for x in found["strategies"][:4]:
        assert x["degree"] == x["backward_degree"] == degree


def test_comparison_against_dense() -> None:
    dense = DOCUMENTS.to_dense().numpy()
    found = {x.name: x for x in compare(DOCUMENTS, 4, MODEL, degree=2)}
    assert list(found) == [*report.BALANCES, "ring", "all-gather", "ulysses"]
    for name in report.BALANCES:
        key = flex_key(DOCUMENTS, num_ranks=4, balance=name, degree=2)
        area = [int(dense[key.q_layout.tokens_of(rank)].sum()) for rank in range(4)]
        rows = moved(key)
        assert found[name].balance == pytest.approx(max(area) * 4 / sum(area))
        assert found[name].max_bytes == rows.sum(0).max() * ROW
        assert found[name].total_bytes == rows.sum() * ROW
        assert found[name].forward_ms == estimate(key.forward_plan, MODEL).slowest
        slowest = estimate(key.backward_plan, MODEL, backward=True).slowest
        assert found[name].backward_ms == slowest
    for name in ("ring", "all-gather"):
        assert found[name].max_bytes == 72 * ROW and found[name].total_bytes == 4 * 72 * ROW
        assert found[name].balance is None and found[name].forward_ms is None
    ulysses = next(x for x in other_schemes(DOCUMENTS, 4, MODEL) if x.name == "ulysses")
    assert found["ulysses"][:4] == ulysses and found["ulysses"].note == ""
    ulysses = compare(DOCUMENTS, 16, MODEL, degree=1)[-1]  # no figures that nobody can reach
    assert ulysses[:4] == ("ulysses", None, None, None)
    assert ulysses.note == f"cannot run: {MODEL.num_heads} heads"


@pytest.mark.parametrize("balance", report.BALANCES)
@pytest.mark.parametrize("gb_per_s", [0.01, 1.0, 100.0])
def test_degrees_are_those_of_a_key(balance: Any, gb_per_s: float) -> None:
    model = CostModel(num_heads=8, num_kv_heads=2, head_dim=16, gb_per_s=gb_per_s, latency_us=0.1)
    mask = masks.documents([0, 700, 2048], causal=True)
    key = flex_key(mask, num_ranks=4, balance=balance, cost=model)
    simulation = simulate(mask, 4, balance=balance, model=model)
    chosen = next(x for x in simulation.strategies if x.name == balance)
    assert (chosen.degree, chosen.backward_degree) == (key.degree, key.backward_degree)
    assert chosen.degree == best_degree(mask, key.q_layout, key.k_layout, model)
    assert simulation.forward_plan.degree == key.degree
    assert simulation.backward_plan.degree == key.backward_degree
    assert simulation.ranks == rank_rows(key, model)
    assert chosen.forward_ms == max(row.forward.ms for row in simulation.ranks)
    assert chosen.backward_ms == max(row.backward.ms for row in simulation.ranks)


def test_the_rates_decide_on_the_layout() -> None:
    mask = masks.documents([0, 350, 500, 1000], causal=True)
    free = CostModel(gb_per_s=1e9, latency_us=0.0)
    found = [simulate(mask, 4, model=x).forward_plan.q_layout for x in (free, CostModel())]
    assert found[0] == flex_key(mask, num_ranks=4, cost=free).q_layout != found[1]


def test_other_keys_than_queries() -> None:
    mask = masks.full(64, 40)
    simulation = simulate(mask, 4, balance="zigzag", degree=1, model=MODEL)
    assert simulation.forward_plan.q_layout == zigzag(64, 4)
    assert simulation.forward_plan.k_layout == zigzag(40, 4)
    assert [sum(row.forward.bytes_in) for row in simulation.ranks] == [30 * ROW] * 4
    solver = next(x for x in simulation.strategies if x.name == "solver")
    assert solver.note == "same as contiguous"


def test_nothing_attended() -> None:
    simulation = simulate(masks.AttnMask([], 64, 64), 2, model=MODEL)
    assert [row.area_of_mean for row in simulation.ranks] == [None, None]
    assert [row.remote_bytes for row in simulation.ranks] == [0, 0]
    json.dumps(simulation.to_json(), allow_nan=False)


def test_steps_are_told() -> None:
    steps: list[tuple[str, int, int]] = []
    simulate(DOCUMENTS, 2, degree=1, on_step=lambda *step: steps.append(step))
    assert steps == [(name, n, 5) for n, name in enumerate((*report.BALANCES, "rank by rank"))]


def test_too_large_to_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = masks.causal(4096)
    size = {}
    for make in (contiguous, zigzag):
        plan = make_plan(mask, make(4096, 16), make(4096, 16), 1)
        size[make] = len(plan.segments.lo) + len(plan.slices)
    assert size[contiguous] < 250 < size[zigzag]
    monkeypatch.setattr(report, "MAX_PLAN_SIZE", 250)
    simulation = simulate(mask, 16, balance="contiguous", degree=1)
    _, second, *_ = simulation.strategies
    assert second == report.Strategy("zigzag", None, None, None, note="too large to plan")
    assert to_json(second)["max_bytes"] is None
    with pytest.raises(ValueError, match="'zigzag' on 16 ranks is too large"):
        simulate(mask, 16, balance="zigzag", degree=1)
    monkeypatch.setattr(report, "MAX_PLAN_SIZE", 10)
    with pytest.raises(ValueError, match="too large"):
        simulate(mask, 16, balance="contiguous", degree=1)


@given(mask=attn_masks(), num_ranks=st.integers(1, 5), degree=st.integers(0, 3))
def test_size_is_not_underestimated(mask: masks.AttnMask, num_ranks: int, degree: int) -> None:
    layouts = zigzag(mask.tq, num_ranks), zigzag(mask.tk, num_ranks)
    plan = make_plan(mask, *layouts, degree)
    with pytest.MonkeyPatch.context() as patch:
        # Each stage may cut a segment of each rank in two.
        limit = len(plan.segments.lo) - num_ranks * degree + len(plan.slices) - 1
        patch.setattr(report, "MAX_PLAN_SIZE", limit)
        assert not report._fits(mask, *layouts, degree)


@pytest.mark.parametrize(
    ("mask", "num_ranks"),
    [
        (DOCUMENTS, 4),
        (masks.causal(50_000), 300),
        (masks.full(64, 40), 3),
        (masks.causal(3), 8),
        (masks.AttnMask([], 0, 0), 2),
    ],
)
def test_picture(mask: masks.AttnMask, num_ranks: int, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    plan = simulate(mask, num_ranks, balance="zigzag", degree=1).forward_plan
    draw_plan(plan, str(tmp_path / "plan.png"), title="zigzag")
    pixels = image.imread(tmp_path / "plan.png")
    assert pixels.shape[:2] == (768, 1536)
    if mask.area():
        for half in (pixels[:, :760], pixels[:, 760:]):
            assert len(np.unique((half[..., :3] * 255).astype(int) @ [1 << 16, 1 << 8, 1])) > 20


def test_picture_of_a_key_is_that_of_its_plan(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    key = flex_key(DOCUMENTS, num_ranks=4, degree=1)
    draw_plan(key, str(tmp_path / "key.png"))
    draw_plan(key.forward_plan, str(tmp_path / "plan.png"))
    assert (tmp_path / "key.png").read_bytes() == (tmp_path / "plan.png").read_bytes()


def test_what_the_picture_shows() -> None:
    layout = zigzag(96, 4)
    assert report._evenly(4, 32) == [0, 1, 2, 3]
    assert report._evenly(1001, 3) == [0, 500, 1000]
    share = report._held(layout, [0, 3])
    assert np.flatnonzero(share[0]).tolist() == layout.tokens_of(0).tolist()
    assert np.flatnonzero(share[1]).tolist() == layout.tokens_of(3).tolist()
    coarse = report._held(zigzag(1 << 20, 4), [0, 1, 2, 3])
    assert coarse.shape == (4, report.TOKEN_CELLS)
    assert coarse.sum(0) == pytest.approx(np.ones(report.TOKEN_CELLS))
    plan = make_plan(DOCUMENTS, zigzag(96, 4), zigzag(96, 4), 1)
    rows = rows_between(plan)
    halves = rows.reshape(2, 2, 2, 2).sum((1, 3))
    assert report._traffic(plan, 2).tolist() == halves.tolist()


def test_no_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    key = flex_key(DOCUMENTS, num_ranks=2, degree=1)
    with pytest.raises(ValueError, match="a picture needs matplotlib"):
        draw_plan(key, str(tmp_path / "plan.png"))
