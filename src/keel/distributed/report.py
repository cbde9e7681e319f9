"""What a plan would cost, rank by rank and beside other ways to spread the same mask.

Everything here is computed on the host for ranks that need not be there: no GPU, no group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keel.distributed.cost import (
    MAX_AUTO_DEGREE,
    CostModel,
    estimate,
    first_of_the_best,
    other_schemes,
    scheme_of,
)
from keel.distributed.keys import AttnKey, Balance, Degree, flex_key
from keel.distributed.layout import Layout
from keel.distributed.plan import Plan, fresh_plan, fresh_plans, merged, overlaps
from keel.masks import AttnMask
from keel.masks.arrays import Ints

OnStep = Callable[[str, int, int], None]
"""Hears what comes next, the steps done and the steps in all."""

BALANCES: tuple[Balance, ...] = ("contiguous", "zigzag", "solver", "traffic")

MAX_PLAN_SIZE = 1 << 25
"""Segments and slices of one plan, at about 200 bytes each while it is made."""

DRAWN_RANKS = 32
TOKEN_CELLS = 1024
RANK_CELLS = 256


class Pass(NamedTuple):
    """One direction of one rank; bytes are those of each stage, the rank's own keys first."""

    bytes_in: tuple[int, ...]
    """Keys and values from other ranks; backward: and gradients of those that they fetched."""
    bytes_out: tuple[int, ...]
    ms: float
    exposed_ms: float
    """Of these, waiting for keys."""


class RankRow(NamedTuple):
    """What one rank holds, computes and moves."""

    rank: int
    tokens: int
    """Queries."""
    pieces: int
    area: int
    area_of_mean: float | None
    """Area over the mean of all ranks; None where nothing is attended."""
    remote_bytes: int
    """Memory for remote keys and values: two stages are alive at once, here the largest two."""
    forward: Pass
    backward: Pass


class Strategy(NamedTuple):
    """One way to spread a mask; None where a figure is not known."""

    name: str
    balance: float | None
    """Largest over mean work of a rank."""
    max_bytes: int | None
    """Received by the rank that receives the most, forward."""
    total_bytes: int | None
    degree: int | None = None
    backward_degree: int | None = None
    forward_ms: float | None = None
    """Of the slowest rank."""
    backward_ms: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """A mask over ranks: the plan of one strategy in full, and all strategies side by side."""

    balance: Balance
    model: CostModel
    forward_plan: Plan
    backward_plan: Plan
    ranks: list[RankRow]
    strategies: list[Strategy]

    def to_json(self) -> dict[str, Any]:
        """Dicts, lists, strings and finite numbers, or None."""
        plan = self.forward_plan
        return {
            "mask": {
                "tq": plan.mask.tq,
                "tk": plan.mask.tk,
                "num_slices": plan.mask.num_slices,
                "area": plan.mask.area(),
            },
            "num_ranks": plan.num_ranks,
            "balance": self.balance,
            "degree": plan.degree,
            "backward_degree": self.backward_plan.degree,
            "cost_model": to_json(self.model),
            "ranks": to_json(self.ranks),
            "strategies": to_json(self.strategies),
        }


def to_json(value: Any) -> Any:
    """Named tuples and dataclasses as dicts, tuples as lists, and None for what is not finite.

    >>> to_json([Strategy("ring", float("nan"), 8, 16)])[0]["balance"] is None
    True
    """
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: to_json(x) for name, x in value._asdict().items()}
    if dataclasses.is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_json(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def simulate(
    mask: AttnMask,
    num_ranks: int,
    *,
    balance: Balance = "solver",
    degree: Degree = "auto",
    model: CostModel | None = None,
    on_step: OnStep | None = None,
) -> Simulation:
    """Plans a mask with every strategy, and with the one named `balance` rank by rank.

    Where queries and keys are different tokens, both are laid out in the same way. Raises
    ValueError where the plan would be too large.

    >>> from keel import masks
    >>> simulation = simulate(masks.causal(1024), 4, balance="zigzag", degree=1)
    >>> [row.area_of_mean for row in simulation.ranks]
    [1.0, 1.0, 1.0, 1.0]
    """
    model = CostModel() if model is None else model
    strategies = compare(mask, num_ranks, model, degree=degree, on_step=on_step)
    chosen = next(x for x in strategies if x.name == balance)
    if chosen.degree is None or chosen.backward_degree is None:
        raise ValueError(
            f"the plan of this mask with balance {balance!r} on {num_ranks} ranks is too large "
            "to make here: take fewer ranks or another balance"
        )
    layouts = _layouts(mask, num_ranks, balance, model)
    forward = backward = fresh_plan(mask, *layouts, chosen.degree)
    if chosen.backward_degree != chosen.degree:
        backward = fresh_plan(mask, *layouts, chosen.backward_degree)
    return Simulation(
        balance=balance,
        model=model,
        forward_plan=forward,
        backward_plan=backward,
        ranks=_rows(forward, backward, model),
        strategies=strategies,
    )


def compare(
    mask: AttnMask,
    num_ranks: int,
    model: CostModel | None = None,
    *,
    degree: Degree = "auto",
    on_step: OnStep | None = None,
) -> list[Strategy]:
    """Contiguous, zigzag, solver and least traffic from real plans, then ring, all-gather, Ulysses.

    >>> from keel import masks
    >>> [s.name for s in compare(masks.causal(1024), 4)]
    ['contiguous', 'zigzag', 'solver', 'traffic', 'ring', 'all-gather', 'ulysses']
    """
    model = CostModel() if model is None else model
    degrees = _degrees(degree)
    seen: dict[tuple[Layout, Layout], Strategy] = {}
    strategies = []
    for n, name in enumerate(BALANCES):
        if on_step is not None:
            on_step(name, n, len(BALANCES) + 1)
        layouts = _layouts(mask, num_ranks, name, model)
        if layouts in seen:
            same = seen[layouts]
            strategies.append(same._replace(name=name, note=f"same as {same.name}"))
            continue
        if _fits(mask, *layouts, max(degrees)):
            seen[layouts] = _assess(name, mask, layouts, degrees, model)
        else:
            seen[layouts] = Strategy(name, None, None, None, note="too large to plan")
        strategies.append(seen[layouts])
    if on_step is not None:
        on_step("rank by rank", len(BALANCES), len(BALANCES) + 1)
    return strategies + _others(mask, num_ranks, model)


def rank_rows(key: AttnKey | Plan, model: CostModel | None = None) -> list[RankRow]:
    """What each rank holds, computes and moves; a plan is taken for both directions.

    The backward is that of a key that fetches its keys again (keep_remote_keys=False).

    >>> from keel import masks
    >>> key = flex_key(masks.causal(8), num_ranks=2, balance="contiguous", degree=1)
    >>> [(row.tokens, row.area) for row in rank_rows(key)]
    [(4, 10), (4, 26)]
    """
    if isinstance(key, Plan):
        forward = backward = key
    else:
        forward, backward = key.forward_plan, key.backward_plan
    return _rows(forward, backward, CostModel() if model is None else model)


def rows_between(plan: Plan) -> Ints:
    """(ranks, ranks) key rows that each rank (first axis) sends to each other (second axis)."""
    return _traffic(plan, plan.num_ranks)


def draw_plan(key: AttnKey | Plan, path: str, *, title: str | None = None) -> None:
    """A picture of a plan's forward, as PNG: who holds which tokens, who sends how much to whom.

    Needs matplotlib. Of many ranks it shows the tokens of some, evenly spaced.
    """
    try:
        # Not pyplot: it would choose a backend and keep figures for the whole process.
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install keel-attn[viz]") from None
    plan = key if isinstance(key, Plan) else key.forward_plan
    layouts = {"token": plan.q_layout}
    if plan.q_layout != plan.k_layout:
        layouts = {"query": plan.q_layout, "key": plan.k_layout}
    figure = Figure(figsize=(12.8, 6.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(layouts), 2)
    for line, (name, layout) in enumerate(layouts.items()):
        axes = figure.add_subplot(grid[line, 0])
        shown = _evenly(layout.num_ranks, DRAWN_RANKS)
        share = _held(layout, shown)
        image = np.ones((*share.shape, 4))
        image[..., :3] = colormaps["turbo"](np.linspace(0.05, 0.95, len(shown)))[:, None, :3]
        image[..., 3] = share
        axes.imshow(
            image,
            extent=(0, max(layout.total, 1), len(shown) - 0.5, -0.5),
            aspect="auto",
            interpolation="nearest",
        )
        axes.set_facecolor("#f4f1ea")
        axes.set_yticks(range(len(shown)), [str(rank) for rank in shown], fontsize=7)
        axes.set_xlabel(name)
        axes.set_ylabel("rank")
        some = "" if len(shown) == layout.num_ranks else f" ({len(shown)} of {layout.num_ranks})"
        axes.set_title(
            f"who holds which {name}s{some}: {layout.total} in {len(layout.starts)} pieces",
            fontsize=10,
        )
    axes = figure.add_subplot(grid[:, 1])
    rows = _traffic(plan, min(plan.num_ranks, RANK_CELLS))
    end = plan.num_ranks - 0.5
    picture = axes.imshow(
        rows, extent=(-0.5, end, end, -0.5), cmap="viridis", interpolation="nearest"
    )
    per = "" if len(rows) == plan.num_ranks else f", {plan.num_ranks / len(rows):.3g} ranks a cell"
    figure.colorbar(picture, ax=axes, label=f"rows{per}", shrink=0.8)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_title(f"key rows sent, forward: {int(rows.sum())}", fontsize=10)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path, format="png")


def _degrees(degree: Degree) -> tuple[int, ...]:
    return tuple(range(1, MAX_AUTO_DEGREE + 1)) if degree == "auto" else (degree,)


def _layouts(
    mask: AttnMask, num_ranks: int, balance: Balance, model: CostModel
) -> tuple[Layout, Layout]:
    key = flex_key(
        mask,
        num_ranks=num_ranks,
        balance=balance,
        k_balance=None if mask.tq == mask.tk else balance,
        degree=1,  # any but "auto", which would make plans
        cost=model,
    )
    return key.q_layout, key.k_layout


def _fits(mask: AttnMask, q_layout: Layout, k_layout: Layout, degree: int) -> bool:
    """Whether a plan has at most MAX_PLAN_SIZE segments and slices, found without making it."""
    q0, q1, k0, k1, lo, hi = mask.array.T
    if _num_met(q0, q1, q_layout).sum() > MAX_PLAN_SIZE:
        return False
    at, piece = overlaps(q0, q1, q_layout.starts, q_layout.ends)
    first = np.maximum(k0[at], np.maximum(q0[at], q_layout.starts[piece]) + lo[at])
    last = np.minimum(k1[at], np.minimum(q1[at], q_layout.ends[piece]) + hi[at])
    rank, there = q_layout.ranks[piece], first < last
    rank, first, last = rank[there], first[there], last[there]
    # Keys arrive in order, so slices are cut only at stages and where a rank's own keys lie.
    own = np.bincount(k_layout.ranks, minlength=k_layout.num_ranks)[rank]
    num_slices = np.minimum(_num_met(first, last, k_layout), 2 * own + 1) + degree
    width = k_layout.total + 1
    first, last = merged(rank * width + first, rank * width + last)
    offset = first // width * width
    num_segments = _num_met(first - offset, last - offset, k_layout)
    return int(num_slices.sum() + num_segments.sum()) <= MAX_PLAN_SIZE


def _num_met(lo: Ints, hi: Ints, layout: Layout) -> Ints:
    """(n,) pieces of a layout that each interval [lo, hi) meets."""
    first = np.searchsorted(layout.ends, lo, "right")
    met = np.maximum(np.searchsorted(layout.starts, hi, "left") - first, 0)
    return np.where(lo < hi, met, 0)


def _assess(
    name: str,
    mask: AttnMask,
    layouts: tuple[Layout, Layout],
    degrees: tuple[int, ...],
    model: CostModel,
) -> Strategy:
    """The figures of a strategy with the degrees that `best_degree` would choose of these."""
    slowest: dict[bool, list[float]] = {False: [], True: []}
    for plan in fresh_plans(mask, *layouts, degrees):  # one at a time: they are large
        for backward, times in slowest.items():
            times.append(estimate(plan, model, backward=backward).slowest)
        scheme = scheme_of(name, plan, model)  # the same for every degree
        del plan
    there, back = (first_of_the_best(times) for times in slowest.values())
    return Strategy(
        *(*scheme, degrees[there], degrees[back], slowest[False][there], slowest[True][back])
    )


def _others(mask: AttnMask, num_ranks: int, model: CostModel) -> list[Strategy]:
    strategies = []
    for scheme in other_schemes(mask, num_ranks, model):
        known = scheme.balance if math.isfinite(scheme.balance) else None
        note = "" if scheme.name == "ulysses" else "all keys to all"
        strategy = Strategy(*scheme, note=note)._replace(balance=known)
        if scheme.name == "ulysses" and num_ranks > model.num_heads:  # it does not split heads
            strategy = Strategy(
                scheme.name, None, None, None, note=f"cannot run: {model.num_heads} heads"
            )
        strategies.append(strategy)
    return strategies


def _rows(forward: Plan, backward: Plan, model: CostModel) -> list[RankRow]:
    layout, area = forward.q_layout, forward.areas.sum(1)
    mean = float(area.mean())
    pieces = np.bincount(layout.ranks, minlength=layout.num_ranks)
    remote = np.sort(forward.rows_received, axis=1)[:, -2:].sum(1) * model.row_bytes
    passes = zip(_passes(forward, model, False), _passes(backward, model, True), strict=True)
    return [
        RankRow(
            *(rank, int(layout.rows[rank]), int(pieces[rank]), int(area[rank])),
            *(int(area[rank]) / mean if mean else None, int(remote[rank]), *both),
        )
        for rank, both in enumerate(passes)
    ]


def _passes(plan: Plan, model: CostModel, backward: bool) -> list[Pass]:
    taken, given = plan.rows_received * model.row_bytes, plan.rows_sent * model.row_bytes
    if backward:  # gradients, in fp32, go the other way
        gradient = model.num_kv_heads * model.dims * 4
        taken = taken + plan.rows_sent * gradient
        given = given + plan.rows_received * gradient
    times = estimate(plan, model, backward=backward)
    return [
        Pass(tuple(coming), tuple(going), ms, exposed)
        for coming, going, ms, exposed in zip(
            *(taken.tolist(), given.tolist(), times.total.tolist(), times.exposed.tolist()),
            strict=True,
        )
    ]


def _traffic(plan: Plan, cells: int) -> Ints:
    """(cells, cells) rows from ranks to other ranks, neighbouring ranks added up."""
    s = plan.segments
    away = s.src != s.dst
    src, dst = (rank[away] * cells // plan.num_ranks for rank in (s.src, s.dst))
    rows = np.bincount(src * cells + dst, (s.hi - s.lo)[away], cells * cells)
    return rows.astype(np.int64).reshape(cells, cells)


def _evenly(count: int, most: int) -> list[int]:
    """Up to `most` of the numbers 0..count-1, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def _held(layout: Layout, ranks: list[int]) -> NDArray[np.float64]:
    """(ranks, cells) the share of each cell of the token axis that a rank holds."""
    cells = min(layout.total, TOKEN_CELLS)
    share = np.zeros((len(ranks), max(cells, 1)))
    edges = np.arange(cells + 1) * layout.total // max(cells, 1)
    line = np.full(layout.num_ranks, -1)
    line[ranks] = np.arange(len(ranks))
    shown = line[layout.ranks] >= 0
    start, end, line = layout.starts[shown], layout.ends[shown], line[layout.ranks[shown]]
    at, cell = overlaps(start, end, edges[:-1], edges[1:])
    length = np.minimum(end[at], edges[cell + 1]) - np.maximum(start[at], edges[cell])
    np.add.at(share, (line[at], cell), length / np.diff(edges)[cell])
    return share
