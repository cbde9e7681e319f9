"""What a plan costs: milliseconds from TFLOP/s, GB/s and latency; and other schemes beside it.

The model walks through the stages as `calc_attn` does: a fetch starts when the one before it has
arrived, and runs beside the computation. All ranks take part in a fetch, so it lasts as long as
the rank that moves the most. What compute cannot hide is *exposed*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keel.distributed.layout import Layout
from keel.distributed.plan import Plan, make_plan
from keel.distributed.work import rows_received, work_of_ranks
from keel.masks import AttnMask

Floats = NDArray[np.floating[Any]]

MAX_AUTO_DEGREE = 4
"""More stages than this never paid: each adds a latency and a merge of the results."""

MAX_PLANNED_RANKS = 256
"""Beyond it layouts are compared without plans, which grow large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The model's heads and the machine's rates; defaults are those of H100 and H200 nodes."""

    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None
    """None: as head_dim."""
    itemsize: int = 2
    """Bytes of an element of keys and values; gradients travel as fp32."""
    tflops: float = 500.0
    backward_tflops: float = 400.0
    gb_per_s: float = 45.0
    """Each way and rank: a 400 Gb/s adapter at 0.9."""
    latency_us: float = 20.0
    """Of one all-to-all, and of starting a stage."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "itemsize"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("tflops", "backward_tflops", "gb_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def dims(self) -> int:
        return self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)

    @property
    def row_bytes(self) -> int:
        """Of one row of keys and values."""
        return self.num_kv_heads * self.dims * self.itemsize

    def compute_ms(self, area: Any, backward: bool = False) -> Floats:
        flops = 2.0 * np.asarray(area) * self.num_heads * self.dims
        return flops * 2.5 / self.backward_tflops / 1e9 if backward else flops / self.tflops / 1e9

    def transfer_ms(self, rows: Any, backward: bool = False) -> Floats:
        """Of fetching rows; backward: of fetching them and returning their gradients."""
        rows = np.asarray(rows)
        size = self.row_bytes * (1 + 4 / self.itemsize if backward else 1)
        return rows * size / self.gb_per_s / 1e6 + np.where(rows > 0, self.latency_us / 1e3, 0.0)


class Estimate(NamedTuple):
    """Milliseconds of each rank (ranks,)."""

    total: Floats
    compute: Floats
    exposed: Floats
    """Waiting for keys."""

    @property
    def slowest(self) -> float:
        return float(self.total.max(initial=0.0))


def estimate(plan: Plan, model: CostModel, *, backward: bool = False) -> Estimate:
    """How long each rank computes, waits and takes."""
    compute = model.compute_ms(plan.areas, backward)
    moved = np.maximum(plan.rows_received, plan.rows_sent)
    transfer = model.transfer_ms(moved.max(0, initial=0), backward)
    first = 0 if plan.degree == 0 else 1
    exposed: Floats = np.zeros(plan.num_ranks)
    now = compute[:, :first].sum(1)
    arrival = float(transfer[first]) if plan.num_stages > first else 0.0
    for stage in range(first, plan.num_stages):
        exposed = exposed + np.maximum(arrival - now, 0.0)
        begun = np.maximum(now, arrival)
        now = begun + compute[:, stage] + model.latency_us / 1e3
        if stage + 1 < plan.num_stages:  # everyone must be there before it can start
            arrival = float(begun.max()) + float(transfer[stage + 1])
    return Estimate(now, compute.sum(1), exposed)


def best_degree(
    mask: AttnMask, q_layout: Layout, k_layout: Layout, model: CostModel, *, backward: bool = False
) -> int:
    """The number of stages that the model finds fastest; few where it makes no difference."""
    times = [
        estimate(make_plan(mask, q_layout, k_layout, degree), model, backward=backward).slowest
        for degree in range(1, MAX_AUTO_DEGREE + 1)
    ]
    return 1 + first_of_the_best(times)


def expected_ms(mask: AttnMask, q_layout: Layout, k_layout: Layout, model: CostModel) -> float:
    """Of attention on layouts, both directions, with few stages or many."""
    if q_layout.num_ranks > MAX_PLANNED_RANKS:
        return _rough_ms(mask, q_layout, k_layout, model)
    plans = [make_plan(mask, q_layout, k_layout, degree) for degree in (1, MAX_AUTO_DEGREE)]
    return sum(
        min(estimate(plan, model, backward=back).slowest for plan in plans)
        for back in (False, True)
    )


def _rough_ms(mask: AttnMask, q_layout: Layout, k_layout: Layout, model: CostModel) -> float:
    """The shorter of work and traffic is taken to be hidden."""
    unit = 128
    area = work_of_ranks(mask, q_layout, unit).max(initial=0.0) * unit * unit
    rows = rows_received(mask, q_layout, k_layout).max(initial=0)
    return sum(
        max(float(model.compute_ms(area, back)), float(model.transfer_ms(rows, back)))
        for back in (False, True)
    )


def first_of_the_best(times: list[float]) -> int:
    """The first place that is as good as any to within 1 %."""
    return next(n for n, ms in enumerate(times) if ms <= 1.01 * min(times))


class Scheme(NamedTuple):
    """One way to spread a mask."""

    name: str
    balance: float
    """Largest over mean work of a rank."""
    max_bytes: int
    """Received by the rank that receives the most, forward."""
    total_bytes: int


def other_schemes(mask: AttnMask, num_ranks: int, model: CostModel) -> list[Scheme]:
    """What ring, all-gather and Ulysses move for as many tokens, whatever the mask.

    Ring attention and all-gather bring every key to every rank. Ulysses moves queries, keys,
    values and results between heads and tokens; where ranks outnumber key heads, those are
    copied. Work is balanced by heads there, and by zigzag in a ring of a causal mask.
    """
    rows = mask.tk - mask.tk // num_ranks
    everything = rows * model.row_bytes
    tokens = mask.tq / num_ranks
    away = (num_ranks - 1) / num_ranks
    copies = max(1, num_ranks // model.num_kv_heads)
    heads = model.num_heads * model.dims + model.num_kv_heads * copies * model.dims
    ulysses = int(tokens * away * heads * model.itemsize)
    return [
        Scheme("ring", float("nan"), everything, everything * num_ranks),
        Scheme("all-gather", float("nan"), everything, everything * num_ranks),
        Scheme("ulysses", 1.0, ulysses, ulysses * num_ranks),
    ]


def scheme_of(name: str, plan: Plan, model: CostModel) -> Scheme:
    area, rows = plan.areas.sum(1), plan.rows_received.sum(1)
    balance = float(area.max(initial=0) / area.mean()) if area.any() else 1.0
    most = int(rows.max(initial=0)) * model.row_bytes
    return Scheme(name, balance, most, int(rows.sum()) * model.row_bytes)
