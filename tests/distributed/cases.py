"""What ranks run in the tests of context parallelism. Imported by their processes."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from keel import flex_flash_attn_func, masks
from keel.distributed import (
    AttnKey,
    CostModel,
    Layout,
    MaxLogitsTracker,
    calc_attn,
    dispatch,
    flex_key,
    group_cast,
    group_reduce,
    make_plan,
    roll,
    undispatch,
    varlen_key,
)
from keel.distributed import attention as cp_attention
from keel.distributed.comm import Cast
from keel.masks import AttnMask, AttnSlice
from keel.testing import Case, judge, run_case


def band(tq: int, tk: int, lo: int | None, hi: int | None) -> AttnMask:
    return AttnMask([AttnSlice(0, tq, 0, tk, lo=lo, hi=hi)], tq, tk)


def every_mask() -> dict[str, Case]:
    """Types, documents of one and three tokens, odd lengths, overlaps, cross-attention."""
    n = 93
    ranges = [[0, 50], [30, 93], [30, 60], [70, 93]], [[0, 40], [20, 93], [0, 93], [5, 9]]
    found: dict[str, AttnMask] = {
        "full": masks.full(n),
        "causal": masks.causal(n),
        "inverse causal": band(n, n, 0, None),
        "bicausal": band(n, n, 0, 0),
        "window": masks.sliding_window(n, left=7),
        "wide window": masks.sliding_window(n, left=40, right=3),
        "window and sinks": masks.sliding_window(n, left=5, sink_tokens=2),
        "tiny documents": masks.documents([0, 1, 4, 5, 8, 60, 61, n], causal=True),
        "full documents": masks.documents([0, 20, 41, n]),
        "window in documents": masks.documents([0, 20, 41, n], window=(4, 0)),
        "documents and padding": masks.documents([0, 20, 41], causal=True, tq=n, tk=n),
        "one long document": masks.documents([0, 3, n], causal=True),
        "prefix": masks.prefix_lm([0, n], [31]),
        "block causal": masks.block_causal(16, [0, n]),
        "overlapping": AttnMask.from_ranges(*ranges, [0, 1, 2, 3], n, n),
        "nothing": AttnMask([], n, n),
        "one row": AttnMask([AttnSlice(50, 51, 0, n)], n, n),
        "one key": AttnMask([AttnSlice(0, n, 17, 18)], n, n),
        "one token": masks.causal(1),
        "few tokens": masks.causal(5),
        "more keys": masks.causal(40, 93),
        "more queries": band(93, 40, None, 5),
        "cross documents": masks.documents([0, 10, 50], [0, 31, 71]),
    }
    torch.manual_seed(0)
    for number in range(8):
        dense = torch.rand(64, 64) > (0.5 if number % 2 else 0.97)
        dense = dense.repeat_interleave(2, 1)[:, :64] if number % 3 else dense
        found[f"random {number}"] = masks.from_dense(dense)
    for number in range(9):
        bounds = sorted({0, 80, *torch.randint(1, 80, (number,)).tolist()})
        found[f"random documents {number}"] = masks.documents(bounds, causal=number % 2 == 0)
    cases = {}
    for number, (name, mask) in enumerate(found.items()):
        (hq, hk), (d, dv) = ((2, 1), (3, 3), (4, 2))[number % 3], ((8, 8), (16, 8))[number % 2]
        cases[name] = Case(
            mask=mask,
            hq=hq,
            hk=hk,
            d=d,
            dv=dv,
            dtype=torch.float64,
            seed=number,
            sink=number % 3 == 0,
            softcap=5.0 if number % 4 == 1 else 0.0,
        )
    return cases


FREE = CostModel(gb_per_s=1e9, latency_us=0.0)
"""Links that cost nothing: else the solver would leave few tokens in order."""
BALANCES = ("contiguous", "zigzag", "solver", "traffic", "one rank", "scattered")
DEGREES = (0, 1, 2, 3, 4)


def layout_of(balance: str, total: int, num_ranks: int) -> Any:
    """A name that keys know; or a layout: all on the last rank, or pieces anywhere."""
    if balance == "one rank":
        return Layout([0], [total], [num_ranks - 1], num_ranks)
    if balance == "scattered":
        random = np.random.default_rng(total)
        bounds = np.unique(np.append(random.integers(0, total + 1, 9), [0, total]))
        ranks = random.integers(0, num_ranks, len(bounds) - 1)
        return Layout(bounds[:-1], bounds[1:], ranks, num_ranks)
    return balance


def key_of(case: Case, **options: Any) -> AttnKey:
    num_ranks = dist.get_world_size()
    balance, k_balance = (options.pop(n, "solver") for n in ("balance", "k_balance"))
    options = {"cost": FREE, **options}
    options["balance"] = layout_of(balance, case.mask.tq, num_ranks)
    if case.mask.tq != case.mask.tk:
        options["k_balance"] = layout_of(k_balance, case.mask.tk, num_ranks)
    return flex_key(case.mask, **options)


def scheduled(number: int, turn: int) -> dict[str, Any]:
    """Options of a key for mask `number`; 30 masks in a row meet every degree on every balance."""
    degree = DEGREES[(number + turn) % 5]
    options: dict[str, Any] = {
        "degree": degree,
        "balance": BALANCES[(number // 5 + 2 * turn) % 6],
        "k_balance": BALANCES[(number + 3 * turn) % 6],
        "backward_degree": DEGREES[(number // 3 + turn) % 5],
    }
    if number % 4 == turn % 4:
        options |= {"backward_degree": degree, "keep_remote_keys": True}
    return options


def spread(case: Case, backend: str = "blocked", **options: Any) -> dict[str, torch.Tensor]:
    """What `run_case` gives, computed by all ranks and put together on each of them."""
    key = key_of(case, **options)
    made = case.tensors()
    of_keys = ("k", "v")
    local = {n: dispatch(made[n], key) for n in ("q", "dout", "dlse")}
    local |= {n: dispatch(made[n], key, keys=True) for n in of_keys}
    leaves = {n: local[n].requires_grad_() for n in ("q", "k", "v")}
    if case.sink:
        leaves["sink"] = made["sink"].requires_grad_()
    out, meta = calc_attn(
        *(leaves["q"], leaves["k"], leaves["v"], key),
        sink=leaves.get("sink"),
        softcap=case.softcap,
        return_max_logits=True,
        backend=backend,
    )
    finite = torch.where(meta.lse == -torch.inf, 0.0, meta.lse)
    loss = (out * local["dout"]).sum() + (finite * local["dlse"]).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    assert meta.max_logits is not None
    results = {"max_logits": meta.max_logits}
    for name, x in (("out", out), ("lse", meta.lse)):
        results[name] = undispatch(x.detach(), key)
    for name, grad in zip(leaves, grads, strict=True):
        if name == "sink":
            total = grad.cpu()
            dist.all_reduce(total)
            results["dsink"] = total.to(grad.device)
        else:
            results[f"d{name}"] = undispatch(grad, key, keys=name in of_keys)
    return results


def largest_difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    worst = 0.0
    for name, x in got.items():
        assert x.shape == want[name].shape and x.dtype == want[name].dtype
        difference = torch.where(x == want[name], 0.0, (x - want[name]).abs())
        worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
        if difference.isnan().any():
            worst = float("inf")
    return worst


def check_every_mask(rank: int, turn: int, **options: Any) -> dict[str, tuple[int, str, float]]:
    """(degree, balance, largest difference) of every mask, by the schedule."""
    found = {}
    for number, (name, case) in enumerate(every_mask().items()):
        chosen = scheduled(number, turn)
        got = spread(case, **{**chosen, **options})
        worst = largest_difference(got, run_case(case, backend="blocked"))
        found[name] = (chosen["degree"], chosen["balance"], worst)
    return found


def check_nodes(
    rank: int, turn: int, nodes: int, per_node: int
) -> dict[str, tuple[int, str, float]]:
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("node", "place"))
    return check_every_mask(rank, turn, group=mesh)


def check_by_the_rule(
    rank: int,
    dtype: torch.dtype,
    turn: int,
    device: str = "cpu",
    backend: str = "blocked",
) -> list[str]:
    """What breaks the tolerance rule, over all masks, by the schedule."""
    broken = []
    for number, (name, case) in enumerate(every_mask().items()):
        rounded = replace(case, dtype=dtype, device=device)
        found = judge(rounded, spread(rounded, backend, **scheduled(number, turn)))
        broken += [f"{name} {comparison}" for comparison in found if not comparison.ok]
    return broken


def check_long_documents(rank: int) -> float:
    """11,021 tokens, in documents, over 7 ranks."""
    bounds = [0, 1, 4, 900, 901, 2500, 2503, 6000, 9999, 11_021]
    case = Case(mask=masks.documents(bounds, causal=True), hq=1, d=8, dtype=torch.float64)
    got = spread(case, balance="contiguous", degree=2)
    return largest_difference(got, run_case(case, backend="blocked"))


def check_movement(rank: int, balance: str) -> None:
    """dispatch, undispatch and roll, with gradients, in any dim."""
    total = 37
    key = varlen_key([0, 10, total], causal=True, balance=balance)
    x = torch.arange(3 * total * 2, dtype=torch.float64).view(3, total, 2)
    here = dispatch(x, key, dim=1).requires_grad_()
    assert torch.equal(here[0, :, 0].long() // 2, key.position_ids())
    back = undispatch(here, key, dim=1)
    assert torch.equal(back, x)
    weights = torch.rand(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    (grad,) = torch.autograd.grad((back * weights).sum(), here)
    assert torch.equal(grad, dispatch(weights, key, dim=1))
    partial = undispatch(here, key, dim=1, replicated=False)
    (grad,) = torch.autograd.grad((partial * weights * (rank + 1)).sum(), here)
    factor = sum(range(1, dist.get_world_size() + 1))
    torch.testing.assert_close(grad, dispatch(weights, key, dim=1) * factor)
    for shift in (0, 1, -1, 5, -36, 37, 50):
        rolled = roll(here, shift, key, dim=1)
        assert torch.equal(rolled, dispatch(x.roll(shift, 1), key, dim=1)), shift
        (grad,) = torch.autograd.grad((rolled * dispatch(weights, key, dim=1)).sum(), here)
        assert torch.equal(grad, dispatch(weights.roll(-shift, 1), key, dim=1)), shift


def check_tracker(rank: int) -> None:
    """Deferred maxima of two layers, one of them with a NaN on one rank only."""
    key = flex_key(masks.causal(24), balance="contiguous")
    tracker = MaxLogitsTracker()
    tops = []
    for layer in range(2):
        random = torch.Generator().manual_seed(layer)
        q, k, v = torch.randn(3, 24, 2, 8, generator=random, dtype=torch.float64).unbind()
        if layer:
            q[1, 1] = torch.nan  # a token of rank 0
        local = [dispatch(t, key) for t in (q, k, v)]
        _, meta = calc_attn(*local, key, defer_max_logits=tracker)
        _, direct = calc_attn(*local, key, return_max_logits=True)
        tops.append(direct.max_logits)
        torch.testing.assert_close(meta.max_logits, tracker.local()[layer], equal_nan=True)
    reduced = tracker.reduce()
    assert tracker.local() == [] and len(reduced) == 2
    for got, want in zip(reduced, tops, strict=True):
        torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)
    assert tops[1].isnan().tolist() == [False, True]


DELAY, WORK = 0.08, 0.16
"""Seconds that a journey and the computation of a stage take at least."""


class Timeline:
    """When things happen on this rank: (what, number of its kind) -> seconds."""

    def __init__(self) -> None:
        self.at: dict[tuple[str, int], float] = {}
        self._count: dict[str, int] = {}

    def note(self, what: str, number: int | None = None) -> int:
        number = self._count.get(what, 0) if number is None else number
        self._count[what] = number + 1
        self.at[what, number] = time.monotonic()
        return number


class SlowWork:
    """A collective that takes at least DELAY from its start on."""

    def __init__(self, work: Any, timeline: Timeline, where: str) -> None:
        self._work, self._timeline, self._where = work, timeline, where
        self._number = timeline.note(f"{where} starts")
        self._begun = time.monotonic()

    def wait(self) -> None:
        self._timeline.note(f"{self._where} wanted", self._number)
        time.sleep(max(0.0, self._begun + DELAY - time.monotonic()))
        self._work.wait()
        self._timeline.note(f"{self._where} there", self._number)


def watch(timeline: Timeline, links: dict[Any, str]) -> None:
    """Slows down all-to-alls and attention in this process, and notes when they happen."""
    all_to_all, forward = dist.all_to_all_single, cp_attention.accumulate_
    backward = cp_attention.partial_gradients

    def slow(*args: Any, group: Any, **options: Any) -> SlowWork:
        return SlowWork(all_to_all(*args, group=group, **options), timeline, links[group])

    def timed(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            number = timeline.note("computing")
            time.sleep(WORK)
            found = real(*args, **options)
            timeline.note("computed", number)
            return found

        return call

    dist.all_to_all_single = slow
    cp_attention.accumulate_ = timed(forward)
    cp_attention.partial_gradients = timed(backward)


def check_overlap(rank: int, nodes: int) -> list[dict[tuple[str, int], float]]:
    """Timelines of a forward and of a backward, with three stages of remote keys."""
    mesh, links = None, {dist.group.WORLD: "all"}
    if nodes > 1:
        mesh = init_device_mesh("cpu", (nodes, 4 // nodes), mesh_dim_names=("node", "place"))
        links = {mesh.get_group(0): "between", mesh.get_group(1): "inside"}
    key = flex_key(masks.full(64), group=mesh, degree=3, balance="contiguous")
    x = torch.randn(16, 1, 8, dtype=torch.float64, requires_grad=True)
    calc_attn(x, x, x, key)  # agreement, connections
    dist.barrier()
    timelines = [Timeline(), Timeline()]
    watch(timelines[0], links)
    out, _ = calc_attn(x, x, x, key)
    dist.barrier()
    watch(timelines[1], links)
    out.sum().backward()
    return [timeline.at for timeline in timelines]


def number_alive(buffers: list[StorageWeakRef], allowed: int) -> int:
    """How many live; gloo's threads may hold one for a moment longer than its users do."""
    until = time.monotonic() + 0.5
    while (alive := sum(not x.expired() for x in buffers)) > allowed and time.monotonic() < until:
        time.sleep(0.01)
    return alive


def most_stages_alive(rank: int) -> list[int]:
    """Most buffers for keys of others that live at the same time, forward and backward."""
    buffers: list[StorageWeakRef] = []
    most = [0, 0]
    real, way = Cast.__init__, 0

    def begin(self: Cast, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        assert self._index.order is None  # else rows have a second buffer
        buffers.append(StorageWeakRef(self._transfer.received.untyped_storage()))
        most[way] = max(most[way], number_alive(buffers, allowed=2))

    Cast.__init__ = begin  # type: ignore[method-assign]
    key = flex_key(masks.full(64), degree=4, balance="contiguous")
    x = torch.randn(key.num_local, 1, 8, requires_grad=True)
    out, _ = calc_attn(x, x, x, key)
    way = 1
    out.sum().backward()
    assert len(buffers) == 8 and number_alive(buffers, allowed=0) == 0
    return most


def check_two_calls_at_once(rank: int) -> None:
    """Two calls with one key, whose backwards run in the other order."""
    case = every_mask()["causal"]
    key = key_of(case, degree=2)
    calls = []
    for seed in range(2):
        made = replace(case, seed=seed).tensors()
        leaves = [dispatch(made[n], key).requires_grad_() for n in ("q", "k", "v")]
        calls.append((made, leaves, calc_attn(*leaves, key)[0]))
    for made, leaves, out in reversed(calls):
        grads = torch.autograd.grad(out, leaves, dispatch(made["dout"], key))
        full = [made[n].clone().requires_grad_() for n in ("q", "k", "v")]
        want, _ = flex_flash_attn_func(*full, case.mask, backend="blocked")
        wants = torch.autograd.grad(want, full, made["dout"])
        for got, ref in zip(grads, wants, strict=True):
            torch.testing.assert_close(got, dispatch(ref, key), atol=1e-10, rtol=0)


def message_of_disagreement(rank: int, what: str) -> str:
    """Rank 1 differs in one thing."""
    odd = rank == 1
    mask = masks.causal(41 if odd and what == "mask" else 40)
    options: dict[str, Any] = {"balance": "contiguous"}
    if what == "degree" and odd:
        options["degree"] = 3
    if what == "layout" and odd:
        options["balance"] = "zigzag"
    if what == "keep_remote_keys" and odd:
        options["keep_remote_keys"] = True
    key = flex_key(mask, **options)
    heads = 2 if odd and what == "heads" else 1
    dtype = torch.float64 if odd and what == "dtype" else torch.float32
    x = torch.zeros(key.num_local, heads, 8, dtype=dtype)
    call: dict[str, Any] = {}
    if what == "return_max_logits":
        call["return_max_logits"] = odd
    if what == "defer_max_logits":
        call = {"defer_max_logits": MaxLogitsTracker()} if odd else {"return_max_logits": True}
    if what == "sink" and odd:
        call["sink"] = torch.zeros(1)
    if what == "softmax_scale" and odd:
        call["softmax_scale"] = 0.5
    if what == "gradients":
        x.requires_grad_(odd)
    try:
        if what == "tracker":
            tracker = MaxLogitsTracker()
            for _ in range(2 if odd else 1):
                tracker.add(torch.zeros(3))
            tracker.reduce()
        elif what == "shift":
            roll(x, 2 if odd else 1, key)
        elif what == "call" and odd:
            undispatch(x, key)
        else:
            calc_attn(x, x, x, key, **call)
    except ValueError as error:
        return str(error)
    return "no error"


def message_of_an_old_key(rank: int) -> str:
    """Rank 1 goes back to a key that all have used."""
    os.environ["KEEL_CHECK_AGREEMENT"] = "always"
    old, new = (flex_key(mask, balance="zigzag") for mask in (masks.full(40), masks.causal(40)))
    x = torch.zeros(20, 1, 8)
    for key in (old, new):
        calc_attn(x, x, x, key)
    try:
        calc_attn(x, x, x, old if rank else new)
    except ValueError as error:
        return str(error)
    return "no error"


def message_of_a_late_change(rank: int) -> str:
    """Rank 1 alone asks for max logits, where all have agreed on a call without."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    key = flex_key(masks.full(40), balance="contiguous", group=group)
    x = torch.randn(key.num_local, 1, 8)
    calc_attn(x, x, x, key)
    try:
        calc_attn(x, x, x, key, return_max_logits=rank == 1)
        calc_attn(x, x, x, key)
    except RuntimeError as error:
        return str(error)
    return "no error"


def die_on_rank_one(rank: int, when: str) -> str:
    """What the others hear when rank 1 leaves before a forward, a backward, ..., or hangs."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    key = flex_key(masks.full(40), balance="contiguous", group=group)
    x = torch.randn(key.num_local, 1, 8, requires_grad=True)
    out, meta = calc_attn(x, x, x, key, return_max_logits=True)
    assert meta.max_logits is not None
    if rank == 1:
        time.sleep(6.0 if when == "hang" else 0.0)
        return "left"
    try:
        if when in ("forward", "hang"):
            calc_attn(x, x, x, key, return_max_logits=True)
        elif when == "backward":
            out.sum().backward()
        elif when == "agreement":
            calc_attn(x, x, x, key, softcap=1.0)
        else:
            tracker = MaxLogitsTracker()
            tracker.add(meta.max_logits)
            os.environ["KEEL_CHECK_AGREEMENT"] = "never"
            tracker.reduce(group)
    except RuntimeError as error:
        return str(error)
    return "no error"


def check_group_operations(rank: int) -> None:
    """Attention the other way round: queries travel, keys stay, results come back and are merged.

    Queries go to who holds keys that they see; sums of what was brought come back as well.
    """
    seen = masks.documents([0, 9, 30, 41], causal=True)
    by_query = masks.from_dense(seen.to_dense().T)  # keys ask for the queries that see them
    layout = key_of(Case(mask=seen), balance="scattered").q_layout
    plan = make_plan(by_query, layout, layout, 1)
    own, others = plan.stages_of(rank)
    assert others.exchange is not None
    made = Case(mask=seen, hq=2, hk=2, d=8, dtype=torch.float64).tensors()
    key = flex_key(seen, balance=layout, degree=1)
    q, k, v = (dispatch(made[n], key) for n in ("q", "k", "v"))
    numbers = key.position_ids().double()[:, None]

    def partial(q: torch.Tensor, mask: AttnMask) -> tuple[torch.Tensor, torch.Tensor]:
        out, meta = flex_flash_attn_func(q, k, v, mask, backend="blocked")
        return out, meta.lse

    there = group_cast([q, numbers.expand(-1, 3)], others.exchange, dist.group.WORLD)
    out, lse = partial(q, masks.from_dense(own.mask.to_dense().T))
    more_q, more_numbers = there.wait()
    found = partial(more_q, masks.from_dense(others.mask.to_dense().T))
    back = group_reduce(found, others.exchange, dist.group.WORLD, op="softmax")
    counted = group_reduce([more_numbers + 0.5], others.exchange, dist.group.WORLD)
    back.add_to([out, lse])
    totals = numbers.repeat(1, 3)
    counted.add_to([totals])
    want, meta = flex_flash_attn_func(*(made[n] for n in ("q", "k", "v")), seen, backend="blocked")
    torch.testing.assert_close(out, dispatch(want, key), atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, dispatch(meta.lse, key), atol=1e-12, rtol=0)
    readers = torch.zeros(41, dtype=torch.float64)
    for other in range(layout.num_ranks):
        seen_there = seen.to_dense()[:, torch.from_numpy(layout.tokens_of(other))].any(1)
        seen_there[torch.from_numpy(layout.tokens_of(other))] = False
        readers += seen_there
    expected = numbers + dispatch(readers, key)[:, None] * (numbers + 0.5)
    torch.testing.assert_close(totals, expected.expand(-1, 3))


def message_of_a_stranger(rank: int) -> str:
    """Rank 2 is not in the group."""
    group = dist.new_group([0, 1])
    try:
        flex_key(masks.causal(40), group=group)
    except ValueError as error:
        return str(error)
    return "no error"


def same_bits_twice(rank: int) -> bool:
    mask = masks.documents([0, 100, 257], causal=True)
    case = Case(mask=mask, hq=4, hk=2, d=8, dtype=torch.float32)
    first, second = (spread(case, degree=2) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)
