"""The order in which streams work on an exchange, on streams that only keep the books."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from keel import masks
from keel.distributed import (
    CostModel,
    attention,
    calc_attn,
    comm,
    flex_key,
    hierarchy,
    lanes,
    starts,
)
from keel.distributed.comm import Cast, Reduce
from keel.distributed.hierarchy import Links, RoutedCast, RoutedReduce, route_of
from keel.distributed.layout import contiguous
from keel.distributed.plan import Exchange, make_plan
from keel.overlap import OverlapConfig

CPU = torch.device("cpu")


@dataclass
class Event:
    """What is done when it has passed: names of operations."""

    behind: set[str]

    def synchronize(self) -> None:
        STREAMS.host |= self.behind


@dataclass
class Stream:
    """A queue. `done` has all operations that are done before the next one here begins."""

    device: Any = None
    priority: int = 0
    done: set[str] = field(default_factory=set)

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def record_event(self) -> Event:
        return Event(set(self.done))

    def wait_event(self, event: Event) -> None:
        self.done |= event.behind


class Streams:
    """Stands for torch.cuda."""

    def __init__(self) -> None:
        self.caller = Stream()
        self.current = self.caller
        self.host: set[str] = set()
        self.before: dict[str, set[str]] = {}
        """What was done for certain when an operation began."""
        self.made: list[Stream] = []

    def Stream(self, device: Any, priority: int) -> Stream:
        self.made.append(Stream(device, priority))
        return self.made[-1]

    def current_stream(self, device: Any) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def operate(self, name: str) -> None:
        """Queues an operation on the current stream."""
        while name in self.before:
            name += "'"
        self.before[name] = self.current.done | self.host
        self.current.done.add(name)


STREAMS = Streams()


@pytest.fixture(params=["queues", "blocks", "staged"])
def backend(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A group of one; its all-to-alls and row movements are queued on streams of the books."""
    global STREAMS
    STREAMS = Streams()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    lane = lanes.Lane(CPU, STREAMS)
    monkeypatch.setattr(comm, "lane_of", lambda device: lane)
    for module in (comm, hierarchy):
        monkeypatch.setattr(module, "queues", lambda group, device: request.param == "queues")
    if request.param == "staged":
        monkeypatch.setattr(comm, "_needs_staging", lambda rows, group: True)
        monkeypatch.setattr(comm, "_pinned", torch.empty_like)
    logged(monkeypatch, comm, "_pick", "rows")
    logged(monkeypatch, comm.Reduce, "_add", "add")
    real = dist.all_to_all_single

    copied: dict[int, set[str]] = {}
    start = comm.AllToAll.start

    def start_and_note(transfer: Any, *args: Any, **options: Any) -> None:
        copied[transfer._host[1].data_ptr()] = set(STREAMS.made[0].done)
        start(transfer, *args, **options)

    monkeypatch.setattr(comm.AllToAll, "start", start_and_note)

    def all_to_all(received: torch.Tensor, sent: torch.Tensor, *counts: Any, **options: Any) -> Any:
        if request.param == "staged" and sent.numel():  # the host reads rows: they must be there
            assert copied[sent.data_ptr()] <= STREAMS.host
        STREAMS.operate("move")
        if request.param == "queues":
            return real(received.view(torch.uint8), sent.view(torch.uint8), *counts, **options)
        return real(received, sent, *counts, **options)

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    yield request.param
    dist.destroy_process_group()


def logged(patch: pytest.MonkeyPatch, owner: Any, name: str, operation: str) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        STREAMS.operate(operation)
        return real(*args, **options)

    patch.setattr(owner, name, call)


def exchange() -> Exchange:
    """Rows 3, 1, 2 that arrive in this order and are wanted as 1, 2, 3."""
    rows = torch.tensor([3, 1, 2]).numpy()
    return Exchange(rows, [3], [3], torch.tensor([1, 2, 0]).numpy())


def test_a_cast_between_what_the_caller_did_and_does(backend):
    keys = torch.arange(10.0).view(5, 2)
    STREAMS.operate("keys made")
    flight = Cast([keys], exchange(), dist.group.WORLD, "a cast")
    STREAMS.operate("computed meanwhile")
    assert "keys made" in STREAMS.before["rows"] and "rows" in STREAMS.before["move"]
    assert not STREAMS.before["computed meanwhile"] & {"move", "rows'"}  # it does not wait
    assert ("rows'" in STREAMS.before) == (backend == "queues")  # nothing is left to begin
    (rows,) = flight.wait()
    STREAMS.operate("used")
    assert torch.equal(rows, keys[[1, 2, 3]])
    assert "move" in STREAMS.before["rows'"] and "rows'" in STREAMS.before["used"]
    lane = STREAMS.made[0]
    assert lane.priority < 0 and "rows" in lane.done


def test_a_reduce_between_what_the_caller_did_and_does(backend):
    gradients = torch.tensor([[1.0], [2.0], [3.0]])
    totals = torch.full((5, 1), 10.0)
    STREAMS.operate("gradients made")
    flight = Reduce([gradients], exchange(), dist.group.WORLD, "a reduce")
    STREAMS.operate("computed meanwhile")
    assert "gradients made" in STREAMS.before["rows"] and "rows" in STREAMS.before["move"]
    assert not STREAMS.before["computed meanwhile"] & {"move"}
    flight.add_to([totals])
    assert {"move", "computed meanwhile"} <= STREAMS.before["add"]
    assert totals.flatten().tolist() == [10, 11, 12, 13, 10]


@pytest.mark.parametrize("kind", [Cast, Reduce])
def test_buffers_live_until_the_caller_waits(backend, kind):
    """Also the rows that were passed in, which nobody else may hold."""
    source = torch.ones(5 if kind is Cast else 3, 2)
    storage = StorageWeakRef(source.untyped_storage())
    flight = kind([source], exchange(), dist.group.WORLD, "a journey")
    sent = StorageWeakRef(flight._sent.untyped_storage())
    del source
    assert not storage.expired() and not sent.expired()
    flight.wait() if kind is Cast else flight.add_to([torch.zeros(5, 2)])
    assert storage.expired()  # gloo may hold the other for a moment


def test_the_caller_waits_for_one_that_is_dropped(backend):
    flight = Cast([torch.ones(5, 2)], exchange(), dist.group.WORLD, "a cast")
    del flight
    STREAMS.operate("next")
    if backend == "queues":  # else nothing is under way on the lane
        assert {"rows", "move", "rows'"} <= STREAMS.before["next"]


def test_the_caller_waits_for_a_deferred_one_that_is_dropped(backend):
    flight = Cast([torch.ones(5, 2)], exchange(), dist.group.WORLD, "a cast", deferred=True)
    del flight
    STREAMS.operate("next")
    if backend != "blocks":
        assert "rows" in STREAMS.before["next"]


@pytest.mark.parametrize("kind", [Cast, Reduce])
def test_a_deferred_exchange_runs_beside_what_comes_after_it(backend, kind):
    """Where rows go through the host: it waits for the copy only when there is work to do."""
    rows = torch.arange(10.0).view(5, 2) if kind is Cast else torch.ones(3, 2)
    STREAMS.operate("made")
    flight = kind([rows], exchange(), dist.group.WORLD, "a journey", deferred=True)
    assert ("move" in STREAMS.before) == (backend != "staged")
    assert backend != "staged" or "rows" not in STREAMS.host
    STREAMS.operate("computed meanwhile")
    assert not STREAMS.before["computed meanwhile"] & {"rows", "move"}
    flight.depart()
    flight.depart()  # once
    assert [x for x in STREAMS.before if x.startswith("move")] == ["move"]
    assert {"made", "rows"} <= STREAMS.before["move"]
    if backend == "staged":
        assert "rows" in STREAMS.host and "computed meanwhile" not in STREAMS.host
    if kind is Cast:
        (got,) = flight.wait()
        assert torch.equal(got, rows[[1, 2, 3]])
        seen = "computed meanwhile" in STREAMS.before["rows'"]
        assert seen == (backend == "blocks")  # neither copy nor rows wait for the caller's work
    else:
        total = torch.zeros(5, 2)
        flight.add_to([total])
        assert total[:, 0].tolist() == [0, 1, 1, 1, 0]
    STREAMS.operate("used")
    assert "move" in STREAMS.before["used"]


@pytest.mark.parametrize("kind", [Cast, Reduce])
def test_a_start_is_marked_on_the_lane_before_the_move(backend, kind):
    rows = torch.ones(5 if kind is Cast else 3, 2)
    flight = kind(
        *([rows], exchange(), dist.group.WORLD, "a journey"),
        on_start=lambda: STREAMS.operate("mark"),
    )
    assert "rows" in STREAMS.before["mark"] and "move" not in STREAMS.before["mark"]
    assert backend == "staged" or "mark" in STREAMS.before["move"]
    assert "mark" in STREAMS.made[0].done and "mark" not in STREAMS.caller.done
    flight.wait() if kind is Cast else flight.add_to([torch.zeros(5, 2)])


@pytest.mark.parametrize("kind", [RoutedCast, RoutedReduce])
def test_both_steps_over_nodes(backend, kind):
    """Where the backend queues, both are under way at once; else `pass_on` begins the second."""
    layout = contiguous(4, 1)
    plan = make_plan(masks.full(4), layout, layout, 0)
    route = route_of(plan.segments, layout, 0, 1)
    links = Links(dist.group.WORLD, dist.group.WORLD, 1)
    keys = torch.arange(8.0).view(4, 2)
    STREAMS.operate("made")
    flight = kind([keys], route, links, "a journey")
    STREAMS.operate("computed meanwhile")
    assert ("move'" in STREAMS.before) == (backend == "queues")
    assert not STREAMS.before["computed meanwhile"] & {"move", "move'"}
    for _ in range(2):  # the second does nothing
        flight.pass_on()
    assert [x for x in STREAMS.before if "move" in x] == ["move", "move'"]
    between = "rows" if kind is RoutedCast else "add"
    assert {"made", "move", between} <= STREAMS.before["move'"]
    if kind is RoutedCast:
        assert torch.equal(flight.wait()[0], keys)
    else:
        total = torch.ones(4, 2)
        flight.add_to([total])
        assert torch.equal(total, keys + 1)
    STREAMS.operate("used")
    assert "move'" in STREAMS.before["used"]


def test_attention_by_way_of_the_lane(backend):
    torch.manual_seed(0)
    mask = masks.documents([0, 11, 30], causal=True)
    free = CostModel(gb_per_s=1e9, latency_us=0.0)
    q, k, v, dout = torch.randn(4, 30, 2, 8, dtype=torch.float64).requires_grad_().unbind()
    found = []
    for degree in (0, 3):
        out, _ = calc_attn(q, k, v, flex_key(mask, degree=degree, cost=free))
        found.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
    assert sum(x.startswith("move") for x in STREAMS.before) == 3 * (1 + 3)
    torch.testing.assert_close(*found, atol=1e-12, rtol=0)


class LoggedBarrier:
    """Stands for `KernelBarrier`."""

    def __init__(self, target: int, **_: Any) -> None:
        self.target = target

    def mark(self) -> None:
        if self.target:
            STREAMS.operate("mark")

    def wait(self) -> None:
        if self.target:
            STREAMS.operate("hold")


@pytest.mark.parametrize("barrier", [False, True])
def test_attention_waits_for_the_start_of_exchanges(backend, barrier, monkeypatch):
    """One mark before, and one wait for it, around each stage that has an exchange beside it."""
    monkeypatch.setattr(starts, "KernelBarrier", LoggedBarrier)
    monkeypatch.setattr(attention, "queues", lambda group, device: backend == "queues")
    logged(monkeypatch, attention, "accumulate_", "attention")
    logged(monkeypatch, attention, "partial_gradients", "attention")
    free = CostModel(gb_per_s=1e9, latency_us=0.0)
    key = flex_key(masks.causal(30), degree=3, cost=free)
    q, k, v = torch.randn(3, 30, 2, 8, dtype=torch.float64).requires_grad_().unbind()
    out, _ = calc_attn(q, k, v, key, overlap=OverlapConfig(barrier=barrier))
    out.sum().backward()
    order = [x.rstrip("'") for x in STREAMS.before]
    shown = [x for x in order if x in ("mark", "hold", "attention", "move")]
    if not barrier or backend != "queues":
        assert "mark" not in shown and "hold" not in shown
        return
    half = shown.index("attention") + 1
    assert shown[:half] == ["mark", "move", "hold", "attention"]
    # All keys are here, so only own ones are computed with: later marks find no attention to hold.
    assert shown[half:].count("attention") == shown[half:].count("hold") == 1
    assert shown[half:].count("mark") == 3 and shown.count("move") == 9
    assert "mark" in STREAMS.made[0].done and {"hold", "attention"} <= STREAMS.caller.done


def test_a_profiler_sees_stages_in_both_directions(backend, monkeypatch):
    key = flex_key(masks.causal(30), degree=2, cost=CostModel(gb_per_s=1e9, latency_us=0.0))
    q, k, v = torch.randn(3, 30, 2, 8, dtype=torch.float64).requires_grad_().unbind()

    def both_directions() -> None:
        out, _ = calc_attn(q, k, v, key)
        out.sum().backward()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        both_directions()
    seen = {event.name for event in profiler.events() if event.name.startswith("keel stage")}
    stages = {f"keel stage {n} {way}" for n in range(3) for way in ("forward", "backward")}
    assert seen == stages

    def refuse(name: str) -> None:
        raise AssertionError("a range costs time")

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    both_directions()  # nobody profiles
