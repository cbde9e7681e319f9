"""`calc_attn`: attention of tokens that are spread over ranks.

Every rank computes the rows of its own queries: first against its own keys, then stage by stage
against those that arrive, while the next stage travels. Results are merged in fp32 as they come.
The backward walks the same way, and sends each stage's gradients of keys and values home while
the next one is computed. At most two stages of remote keys are alive at once; over nodes, on a
backend whose waiting blocks the host, and what crosses to a node of a third.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from keel._versions import backend_of, in_backward, outside_of_graphs, profiler_range
from keel.checks import check_qkv, check_scoring, check_sm_margin
from keel.distributed.agreement import check_agreement
from keel.distributed.comm import Cast, Reduce, queues
from keel.distributed.hierarchy import Route, RoutedCast, RoutedReduce, routes_of
from keel.distributed.keys import AttnKey
from keel.distributed.maxima import MaxLogitsTracker, start_maximum
from keel.distributed.plan import Exchange, Plan, Stage
from keel.distributed.starts import Starts
from keel.masks.inputs import tensors_of_mask
from keel.meta import AttnForwardMeta, Scoring
from keel.ops import accumulate_, choose_attention_backend, partial_gradients
from keel.overlap.control import OverlapConfig, warn_once

Tensor = torch.Tensor


@outside_of_graphs
def calc_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: AttnKey,
    *,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
    defer_max_logits: MaxLogitsTracker | None = None,
    sm_margin: int | None = None,
    overlap: OverlapConfig | None = None,
    backend: str = "auto",
) -> tuple[Tensor, AttnForwardMeta]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        q: (local queries, hq, d), in the order of `key.position_ids()`.
        k, v: (local keys, hk, d), (local keys, hk, dv).
        key: from `flex_key` or `varlen_key`; the same on all ranks of its group.
        sink: (hq,) logits, the same on all ranks. Its gradient is that of the local rows, like the
            gradient of any weight: sum it over the ranks with the others.
        softmax_scale: d ** -0.5 if None.
        return_max_logits: also `meta.max_logits` (hq,), the maximum over all ranks; one MAX
            all-reduce, under way while the result is finished.
        defer_max_logits: a tracker that takes this rank's maxima; many calls then share one
            all-reduce, when it is asked for them. A forward that is recomputed for a backward
            (activation checkpointing) does not count again.
        sm_margin: SMs that attention leaves to communication, in both directions.
        overlap: the same, by direction, and more; an `OverlapConfig()` takes what environment
            variables say, and so does a call without both arguments.
        backend: as in `flex_flash_attn_func`.

    Returns:
        (out (local queries, hq, dv), meta with lse (local queries, hq) and max_logits).
    """
    if key.group is None:
        raise ValueError(
            "this key only plans (it was made with num_ranks): pass a group to its maker"
        )
    for name, x, rows in (("q", q, key.num_local), ("k", k, key.num_local_keys)):
        if isinstance(x, Tensor) and x.ndim and x.shape[0] != rows:
            raise ValueError(
                f"{name} has {x.shape[0]} tokens, but the key gives rank {key.rank} {rows}: "
                "dispatch(x, key) selects them"
            )
    check_qkv(q, k, v)
    if not q.is_cuda and backend_of(key.group, q.device) is None:
        raise ValueError(
            f"the key's group has no backend for tensors on {q.device}, where q is: move it to a "
            "GPU if the group talks NCCL, or make the key with a gloo group"
        )
    scale = q.shape[2] ** -0.5 if softmax_scale is None else float(softmax_scale)
    scoring = Scoring(scale=scale, softcap=float(softcap), sink=sink)
    check_scoring(scoring, q, k.shape[0])
    if sm_margin is not None and overlap is not None:
        raise ValueError("give sm_margin or overlap, not both: each says how many SMs stay free")
    margins = (overlap or OverlapConfig()).margins() if sm_margin is None else (sm_margin,) * 2
    for margin in margins:
        check_sm_margin(margin, q.device)
    if q.is_cuda and key.num_ranks > 1:
        warn_once()
    chosen = choose_attention_backend(backend, q, k, v, scoring)
    if chosen == "reference":
        raise ValueError("backend 'reference' has no stages: use 'blocked', which is exact in fp64")
    training = torch.is_grad_enabled() and any(
        x.requires_grad for x in (q, k, v, sink) if x is not None
    )
    maxima = "none"
    if return_max_logits or defer_max_logits is not None:
        maxima = "returned" if defer_max_logits is None else "deferred"
    check_agreement(
        key,
        softmax_scale=scale,
        softcap=scoring.softcap,
        sink=sink is not None,
        max_logits=maxima,
        dtype=q.dtype,
        heads_and_dims=(*q.shape[1:], *k.shape[1:], v.shape[2]),
        need_of_gradients=training,
    )
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    barrier = overlap is not None and overlap.barrier
    call = _Call(
        *(key, scoring.scale, scoring.softcap, *margins),
        backend=chosen,
        want_max=maxima != "none",
        reduce_max=maxima == "returned",
        keep_keys=key.keep_remote_keys and training,
        barrier=barrier and queues(key.group, q.device),
        device=q.device,
    )
    out, lse, top = _CalcAttn.apply(q, k, v, sink, call)
    if defer_max_logits is not None and not in_backward():
        defer_max_logits.add(top)
    return out, AttnForwardMeta(lse=lse, max_logits=top if call.want_max else None)


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call needs beside its tensors. It holds no state: calls may overlap."""

    key: AttnKey
    scale: float
    softcap: float
    forward_margin: int
    backward_margin: int
    backend: str
    want_max: bool
    reduce_max: bool
    keep_keys: bool
    barrier: bool
    """Whether attention waits until exchanges have begun."""
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup:
        assert self.key.group is not None
        return self.key.group

    def scoring(self, sink: Tensor | None = None) -> Scoring:
        return Scoring(scale=self.scale, softcap=self.softcap, sink=sink)

    @property
    def depth(self) -> int:
        """How many exchanges are under way at once.

        One, except where they have two steps and the host must wait to begin the second: then
        one in each step, so that both travel while something is computed.
        """
        return 1 if self.key.links is None or queues(self.group, self.device) else 2

    def cast(
        self, plan: Plan, stage: int, rows: list[Tensor], starts: Starts, what: str
    ) -> Cast | RoutedCast:
        exchange, route = self._ways(plan, stage)
        if route is not None and self.key.links is not None:
            return RoutedCast(rows, route, self.key.links, what, on_start=starts.mark)
        return Cast(rows, exchange, self.group, what, on_start=starts.mark, deferred=True)

    def reduce(
        self, plan: Plan, stage: int, rows: list[Tensor], starts: Starts, what: str
    ) -> Reduce | RoutedReduce:
        exchange, route = self._ways(plan, stage)
        if route is not None and self.key.links is not None:
            return RoutedReduce(rows, route, self.key.links, what, on_start=starts.mark)
        return Reduce(rows, exchange, self.group, what, on_start=starts.mark, deferred=True)

    def _ways(self, plan: Plan, stage: int) -> tuple[Exchange, Route | None]:
        exchange = plan.stages_of(self.key.rank)[stage].exchange
        assert exchange is not None
        if self.key.links is None:
            return exchange, None
        return exchange, routes_of(plan, self.key.rank, self.key.links.per_node)[stage]

    def stages(
        self,
        plan: Plan,
        k: Tensor,
        v: Tensor,
        starts: Starts,
        direction: str,
        kept: list[Tensor] | None = None,
    ) -> Iterator[tuple[int, Stage, Tensor, Tensor]]:
        """(number, stage, k, v) as they arrive; the next one travels while the caller computes.

        The caller must let k and v go before it asks for more, or three stages would be alive.
        `kept` holds keys and values of earlier fetches, which are then not fetched again.
        """
        stages = plan.stages_of(self.key.rank)
        first = 0 if stages[0].exchange is not None else 1
        if kept:
            for n, stage in enumerate(stages):
                own = (k, v) if n < first else kept[2 * (n - first) : 2 * (n - first) + 2]
                yield n, stage, *own
            return
        coming: deque[Cast | RoutedCast] = deque()

        def fetch(n: int) -> None:
            if n < len(stages):
                what = f"fetching keys for stage {n} of {len(stages) - 1} on rank {self.key.rank}"
                with stage_range(n, direction):
                    coming.append(self.cast(plan, n, [k, v], starts, what))

        for n in range(first, first + self.depth):
            fetch(n)
        for n, stage in enumerate(stages):
            if n < first:
                yield n, stage, k, v
                for under_way in coming:
                    under_way.depart()
                continue
            with stage_range(n, direction):
                arrived = coming.popleft().wait()
            for under_way in coming:
                under_way.pass_on()
            fetch(n + self.depth)
            yield n, stage, arrived[0], arrived[1]
            for under_way in coming:
                under_way.depart()
            del arrived  # before the next one is waited for, and the one behind it begins


def stage_range(n: int, direction: str) -> contextlib.AbstractContextManager[Any]:
    """What profilers file a stage under, exchange and attention: as `keel stage 1 forward`."""
    return profiler_range(f"keel stage {n} {direction}")


class _CalcAttn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        (rows, heads, _), dim = q.shape, v.shape[2]
        out = torch.zeros(rows, heads, dim, dtype=wide, device=q.device)
        lse = torch.full((rows, heads), -torch.inf, dtype=wide, device=q.device)
        top = torch.full((heads,), -torch.inf, dtype=wide, device=q.device)
        kept: list[Tensor] = []
        starts, plan = Starts(call.barrier, q.device), call.key.forward_plan
        for n, stage, stage_k, stage_v in call.stages(plan, k, v, starts, "forward"):
            scoring = call.scoring(sink if n == 0 else None)  # it joins each row once
            if rows and (stage.mask.num_slices or scoring.sink is not None):
                starts.hold()
                with stage_range(n, "forward"):
                    accumulate_(
                        *(out, lse, top if call.want_max else None, q, stage_k, stage_v),
                        *(tensors_of_mask(stage.mask), scoring),
                        sm_margin=call.forward_margin,
                        backend=call.backend,
                    )
            if call.keep_keys and stage.exchange is not None:
                kept += [stage_k, stage_v]
            del stage_k, stage_v
        maximum = start_maximum(top, call.group) if call.want_max and call.reduce_max else None
        out = out.to(q.dtype)
        if maximum is not None:
            top = maximum.wait()
        ctx.save_for_backward(q, k, v, sink, out, lse, *kept)
        ctx.call = call
        ctx.mark_non_differentiable(top)
        ctx.set_materialize_grads(False)
        return out, lse, top

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse, *kept = ctx.saved_tensors
        call: _Call = ctx.call
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
        dsink = None if sink is None else torch.zeros_like(sink)
        returning: deque[Reduce | RoutedReduce] = deque()
        starts, plan = Starts(call.barrier, q.device), call.key.backward_plan
        for n, stage, stage_k, stage_v in call.stages(plan, k, v, starts, "backward", kept):
            part_sink = sink if n == 0 else None
            parts = [torch.zeros_like(x, dtype=lse.dtype) for x in (stage_k, stage_v)]
            if len(q) and (stage.mask.num_slices or part_sink is not None):
                starts.hold()
                with stage_range(n, "backward"):
                    part_q, *parts, part_dsink = partial_gradients(
                        *(dout, dlse, q, stage_k, stage_v, out, lse, stage.mask),
                        call.scoring(part_sink),
                        deterministic=True,
                        sm_margin=call.backward_margin,
                        backend=call.backend,
                    )
                dq += part_q
                dsink = part_dsink if part_sink is not None else dsink
            del stage_k, stage_v
            for under_way in returning:
                under_way.depart()
            if stage.exchange is None:
                dk += parts[0]
                dv += parts[1]
                continue
            if len(returning) == call.depth:
                returning.popleft().add_to([dk, dv])
            for under_way in returning:
                under_way.pass_on()
            what = f"returning gradients of stage {n} on rank {call.key.rank}"
            with stage_range(n, "backward"):
                returning.append(call.reduce(plan, n, parts, starts, what))
        for under_way in returning:
            under_way.pass_on()
        for under_way in returning:
            under_way.add_to([dk, dv])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None
