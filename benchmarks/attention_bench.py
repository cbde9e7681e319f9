"""One cell of the attention benchmark: every provider checked, then timed in turns."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import attention_report as report
import torch
from attention_masks import Problem
from attention_peers import Attend, Maker, Missing, is_loop, is_ours, why_not
from attention_report import Row
from exact import TOLERANCE, Exact, worst_error
from timing import Call, TimeBudget, Trial, capture, poison_free_memory, time_batch

EAGER_UNTIL_MS = 10.0
"""Of graph time: a longer call hides its host, and its eager time is its graph time."""
LEAST_ROUNDS = 3
"""Of a cell that is over its time."""
FLEX_CELLS = ((8192, 64, 8, 128),)
"""(tokens, hq, hk, d) where FlexAttention runs unless it is asked for: it compiles for each."""
AS_GRAPH = "as graph"
NOT_RUN = "not run"

Key = tuple[str, str, str]
"""Provider, pass, timing."""


@dataclass(frozen=True)
class Case:
    """A problem with heads."""

    problem: Problem
    hq: int
    hk: int
    d: int
    dv: int = 0
    """Of values, if not d."""

    def tensors(self, device: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
        """[q, k, v] and dout, all (tokens, heads, d or dv), fresh for every cell."""
        make = functools.partial(torch.randn, device=device, dtype=dtype)
        d, dv = self.d, self.dv or self.d
        shapes = ((self.hq, d), (self.hk, d), (self.hk, dv), (self.hq, dv))
        q, k, v, dout = (make(self.problem.tokens, *shape) for shape in shapes)
        return [q, k, v], dout

    def flops(self, direction: str) -> int:
        return self.problem.flops(direction, self.hq, self.d, self.dv)

    def __str__(self) -> str:
        p = self.problem
        values = f"/{self.dv}" if self.dv else ""
        return f"{p.name} {p.tokens}, {self.hq}:{self.hk} heads, d {self.d}{values}"


@dataclass
class Bench:
    """What stays the same over the cells of a run."""

    makers: Mapping[str, Maker | Missing]
    directions: Sequence[str]
    timings: Sequence[str]
    rounds: int
    sample_ms: float
    budget: TimeBudget
    gemm: float
    copy: float
    lead_ms: float = 0.0
    cell_s: float = 15.0
    """A cell whose rounds take longer makes fewer."""
    flex_cells: Sequence[tuple[int, int, int, int]] | None = FLEX_CELLS
    """None: all."""
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    about: dict[str, str] = field(default_factory=dict)
    """Columns that every row carries: gpu, versions, command, run."""
    failed: bool = False
    """A result of Keel was wrong, or raised."""

    def expected_s(self, case: Case) -> float:
        """Seconds of a cell: some 9 calls each at half the product rate, and its samples."""
        able = [n for n in self.makers if self.reason_against(n, case) is None]
        once = sum(case.flops(x) for x in self.directions) / (0.5e12 * self.gemm)
        samples = self.rounds * len(able) * len(self.directions) * len(self.timings)
        return (
            1.0
            + 9 * once * len(able)
            + min(self.cell_s, samples * (self.lead_ms + self.sample_ms) / 1e3)
        )

    def reason_against(self, name: str, case: Case) -> str | None:
        """What stands in the place of a figure, or None where there will be one."""
        make = self.makers[name]
        if isinstance(make, Missing):
            return f"missing: {make}"
        if reason := why_not(name, case.problem):
            return f"unsupported: {reason}"
        here = (case.problem.tokens, case.hq, case.hk, case.d)
        if name == "flex" and self.flex_cells is not None and here not in self.flex_cells:
            return f"{NOT_RUN}: compiles slowly, --peers flex asks for it"
        return None

    def measure(self, case: Case) -> list[Row]:
        """A row for each provider, pass and timing: a figure, or why there is none."""
        qkv, dout = case.tensors(self.device, self.dtype)
        wants_grads = "backward" in self.directions
        exact = Exact(case.problem, qkv, dout if wants_grads else None, key_head=case.hk - 1)
        cell = _Cell(self, case, qkv, dout, exact)
        for name in self.makers:
            if name == "fa3-loop" and not is_loop(case.problem):
                continue  # no provider of its own there
            if reason := self.reason_against(name, case):
                for key in self._keys(name):
                    cell.without[key] = reason
            else:
                cell.prepare(name)
        until = time.monotonic() + self.cell_s  # FlexAttention may have compiled for long
        take_turns(cell.trials, self.rounds, self.budget, until=until)
        rows = [self.row(case, *key, trial, cell) for key, trial in cell.trials.items()]
        return rows + [self.empty_row(case, *key, why) for key, why in cell.without.items()]

    def _keys(self, name: str) -> Iterator[Key]:
        for direction in self.directions:
            for timing in self.timings:
                yield name, direction, timing

    def row(
        self, case: Case, provider: str, direction: str, timing: str, trial: Trial, cell: _Cell
    ) -> Row:
        p, flops = case.problem, case.flops(direction)
        num_bytes = p.least_bytes(direction, case.hq, case.hk, case.d, case.dv)
        return Row(
            *(p.name, p.tokens, provider, direction, timing),
            ms=trial.ms,
            tflops=flops / trial.ms / 1e9,
            error=cell.errors[provider, direction],
            spread=trial.spread,
            roof_tflops=report.roofline(flops, num_bytes, self.gemm, self.copy),
            gemm_tflops=self.gemm,
            rounds=len(trial.samples),
            lead_ms=self.lead_ms,
            **self._shape(case),
        )

    def empty_row(self, case: Case, provider: str, direction: str, timing: str, status: str) -> Row:
        nan = float("nan")
        p = case.problem
        return Row(
            *(p.name, p.tokens, provider, direction, timing, nan, nan, nan),
            status=status,
            **self._shape(case),
        )

    def _shape(self, case: Case) -> dict:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = {"hq": case.hq, "hk": case.hk, "d": case.d, "dv": case.dv}
        return {**heads, "dtype": dtype, **self.about}


@dataclass
class _Cell:
    """Trials of one case while they are made, and what has none."""

    bench: Bench
    case: Case
    qkv: list[torch.Tensor]
    dout: torch.Tensor
    exact: Exact
    trials: dict[Key, Trial] = field(default_factory=dict)
    without: dict[Key, str] = field(default_factory=dict)
    errors: dict[tuple[str, str], float] = field(default_factory=dict)
    first: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Results of the first provider, for the heads that fp64 did not look at."""
    is_long: dict[str, bool] = field(default_factory=dict)
    """Pass -> whether its eager time is its graph time, as the first graph says, for all alike."""

    def prepare(self, name: str) -> None:
        """A checked trial for each pass and timing of one provider.

        A peer that cannot do this size, or not its backward, must not end the run.
        """
        make = self.bench.makers[name]
        assert not isinstance(make, Missing)
        attend: Attend | None = None
        for direction in self.bench.directions:
            try:
                attend = attend or make(self.case.problem)
                self._prepare_pass(name, direction, attend)
            except Exception as problem:
                for timing in self.bench.timings:
                    if (name, direction, timing) not in self.trials:
                        self._leave_out((name, direction, timing), problem)

    def _prepare_pass(self, name: str, direction: str, attend: Attend) -> None:
        bench = self.bench
        got = run_poisoned(direction, attend, self.qkv, self.dout)
        error = self.exact.error(direction, got)
        if direction in self.first:
            error = max(error, worst_error(got, self.first[direction]))
        if not error < TOLERANCE:
            raise ArithmeticError(f"relative error {error:.2g}")
        self.first.setdefault(direction, got)
        self.errors[name, direction] = error
        prepare = functools.partial(prepare_call, direction, attend, self.qkv, self.dout)
        if "graph" in bench.timings:
            try:
                trial = graph_trial(prepare, got, bench.sample_ms, bench.lead_ms)
                self.trials[name, direction, "graph"] = trial
                ms = trial.about_ms / trial.calls_inside
                self.is_long.setdefault(direction, ms > EAGER_UNTIL_MS)
            except Exception as problem:
                self._leave_out((name, direction, "graph"), problem)
        if "eager" in bench.timings and self.is_long.get(direction):
            self.without[name, direction, "eager"] = AS_GRAPH
        elif "eager" in bench.timings:
            trial = Trial(prepare(), budget_ms=bench.sample_ms, lead_ms=bench.lead_ms)
            self.trials[name, direction, "eager"] = trial

    def _leave_out(self, key: Key, problem: Exception) -> None:
        name, direction, timing = key
        self.without[key] = status_of(problem)
        self.bench.failed |= is_ours(name)
        print(f"{self.case}: {name} {direction} {timing}: {self.without[key]}", flush=True)


def status_of(problem: Exception) -> str:
    """One line for the CSV, with a short word in front for the tables."""
    text = str(problem).strip().splitlines()
    line = f"{type(problem).__name__}: {text[0][:160] if text else ''}"
    if isinstance(problem, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(problem, Missing):
        return f"missing: {problem}"
    if isinstance(problem, ArithmeticError):
        return f"wrong: {problem}"
    module = type(problem).__module__
    if module.startswith(("torch._inductor", "torch._dynamo", "triton.compiler")):
        return f"compile error: {line}"
    return f"failed: {line}"


def run_poisoned(
    direction: str, attend: Attend, qkv: list[torch.Tensor], dout: torch.Tensor
) -> list[torch.Tensor]:
    """[out] or [dq, dk, dv], computed on memory full of NaNs."""
    poison_free_memory(8 * sum(x.nbytes for x in qkv))
    return _listed(prepare_call(direction, attend, qkv, dout)())


def prepare_call(
    direction: str, attend: Attend, qkv: list[torch.Tensor], dout: torch.Tensor
) -> Call:
    """The call to time; for a backward the forward is made here, once."""
    if direction == "forward":
        return functools.partial(attend, *qkv)
    # Leaves of its own: autograd binds a leaf to the stream where it was first used, and one bound
    # to another stream than that of a capture would break it.
    leaves = [x.detach().requires_grad_() for x in qkv]
    return functools.partial(torch.autograd.grad, attend(*leaves), leaves, dout, retain_graph=True)


def graph_trial(
    prepare: Callable[[], Call], expected: list[torch.Tensor], sample_ms: float, lead_ms: float
) -> Trial:
    """A CUDA graph of the call; its replay has to give what the checked call gave."""
    replay, inside, result = capture(prepare)
    results = _listed(result)
    for x in results:
        x.fill_(float("nan"))
    about_ms = time_batch(replay, 1, lead=0)
    if not (error := worst_error(results, expected)) < TOLERANCE:
        raise ArithmeticError(f"relative error {error:.2g} behind the replay of its graph")
    return Trial(replay, inside, sample_ms, lead_ms, about_ms)


def _listed(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def take_turns(
    trials: dict[Key, Trial],
    rounds: int,
    budget: TimeBudget,
    *,
    until: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Samples every trial once a round; what is compared is timed side by side, in random order.

    Ends early when the run's time is over, but not before every trial has a sample; or, behind
    three rounds, when that of the cell is.
    """
    groups: dict[tuple[str, str], list[Trial]] = {}
    for (_, direction, timing), trial in trials.items():
        groups.setdefault((direction, timing), []).append(trial)
    for n in range(rounds):
        if (n and budget.is_over()) or (n >= LEAST_ROUNDS and clock() > until):
            return
        for group in groups.values():
            for trial in random.sample(group, len(group)):
                trial.sample()
