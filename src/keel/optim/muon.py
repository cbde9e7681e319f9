"""Muon: momentum, orthogonalised. Matrices by Newton-Schulz, all other parameters by AdamW."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from keel.optim.batching import Settings
from keel.optim.blocks import adjusted_lr, chunks_of
from keel.optim.coefficients import QUINTIC, Coefficients
from keel.optim.exchange import Result, Team, Updates, orthogonalize_sharded
from keel.optim.groups import REFUSED, Group, blocks_of, check_group, names_of, settings_of
from keel.optim.placement import as_dtensor, local, local_grad, spread_of, team_of
from keel.optim.sharding import Plan, Spread, bounds_of, make_plan, whole


@dataclass(frozen=True, slots=True)
class _Item:
    """A parameter that Muon trains."""

    param: torch.Tensor
    group: Group
    name: str
    team: Team
    spread: Spread
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parameters that are worked off together: one team, one dtype, one way to orthogonalise."""

    items: list[_Item]
    settings: Settings
    plan: Plan

    @property
    def team(self) -> Team:
        return self.items[0].team


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon, on whole and on sharded parameters, with AdamW for what is no matrix.

    Takes torch.optim.Muon's arguments with their meaning and makes the same steps. The last two
    dims of a parameter are its matrix; dims before them stack matrices (experts). DTensors are
    orthogonalised as the logical matrices that they are, whatever their shards: each matrix by one
    rank, chosen such that all ranks have equal work, also ranks that hold copies (HSDP).

    Args:
        params: parameters, named parameters, or groups of them as dicts; every argument below but
            `process_group` and those for AdamW can be given per group.
        lr, weight_decay, momentum, nesterov, eps, ns_steps, adjust_lr_fn: as in torch.optim.Muon.
        ns_coefficients: (a, b, c) for all steps; one triple for each; or the name of a set:
            "quintic", "quintic_tuned", "quintic_finished", "polar_express", "cans".
        ns_dtype, ns_form, ns_normalize: dtype, form and normalize of `orthogonalize`.
        num_heads: cuts the rows of each matrix into so many equal blocks, orthogonalised one by
            one, with the step of a matrix of that size.
        split_sizes: the same with blocks of these sizes, say of a fused [q|k|v].
        use_muon: False for groups that AdamW trains; `lr` and `weight_decay` are meant for both,
            `betas` (`adamw_betas`) and `eps` (`adamw_eps`) are AdamW's own there.
        process_group: ranks that hold the same plain tensors with the same gradients, as under
            DDP: the work is spread over them. DTensors bring their ranks along.

    A parameter without gradient is left alone; sharded ones only where no rank has a gradient.

    >>> weight, bias = torch.nn.Linear(4, 3).parameters()
    >>> optimizer = Muon([{"params": [weight]}, {"params": [bias], "use_muon": False}], lr=0.02)
    >>> weight.grad, bias.grad = torch.ones(3, 4), torch.ones(3)
    >>> optimizer.step()
    >>> sorted(optimizer.state[bias])
    ['exp_avg', 'exp_avg_sq', 'step']
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        ns_form: str = "auto",
        ns_normalize: str | None = None,
        num_heads: int | None = None,
        split_sizes: Sequence[int] | None = None,
        use_muon: bool = True,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "ns_form": ns_form,
            "ns_normalize": ns_normalize,
            "num_heads": num_heads,
            "split_sizes": split_sizes,
            "use_muon": use_muon,
            "betas": adamw_betas,
        }
        self._adamw_eps = adamw_eps
        self._process_group = process_group
        self._places: dict[torch.Tensor, tuple[Team, Spread]] = {}
        self._buckets: list[_Bucket] = []
        self._planned_for: object = None
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        group = dict(param_group)
        if not group.get("use_muon", self.defaults["use_muon"]):
            group.setdefault("eps", self._adamw_eps)
            for key in ("split_sizes", "num_heads"):
                group.setdefault(key, None)
        super().add_param_group(group)
        number = len(self.param_groups) - 1
        try:
            check_group(self.param_groups[number], number)
            self._find_places(self.param_groups[number], number)
        except BaseException:
            self.param_groups.pop()
            raise
        self._create_state(self.param_groups[number])

    def _find_places(self, group: Group, number: int) -> None:
        """Where shards are. Groups of ranks are made now: all ranks are here, later maybe not."""
        if not group["use_muon"]:
            return
        for param, name in zip(group["params"], names_of(group, number), strict=True):
            team = team_of(param, self._process_group, name)
            sharded = as_dtensor(param) is not None and len(team) > 1
            spread = spread_of(param, name) if sharded else whole(len(team))
            self._places[param] = (team, spread)

    def _create_state(self, group: Group) -> None:
        """At once, not at the first gradient: checkpoints of all ranks then hold the same."""
        for param in group["params"]:
            state = self.state[param]
            if group["use_muon"]:
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)
            elif "step" not in state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(param, requires_grad=False)
                state["exp_avg_sq"] = torch.zeros_like(param, requires_grad=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what loading a state ends with; one of torch.optim.Muon lacks our options."""
        super().__setstate__(state)
        self.__dict__.setdefault("_adamw_eps", 1e-8)
        self.__dict__.setdefault("_process_group", None)
        self.__dict__.setdefault("_places", {})
        self._buckets, self._planned_for = [], None
        for number, group in enumerate(self.param_groups):
            for key, value in self.defaults.items():
                if key not in REFUSED:  # torch adds "differentiable"; a resumed state stays equal
                    group.setdefault(key, value)
            check_group(group, number)
            if any(param not in self._places for param in group["params"]):
                self._find_places(group, number)
            self._create_state(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what `closure` returns, which is called first if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._plan()
        for bucket in self._buckets:
            _step_bucket(bucket, self.state)
        for number, group in enumerate(self.param_groups):
            if not group["use_muon"]:
                _step_adamw(group, number, self.state)
        return loss

    def _plan(self) -> None:
        """Buckets and their plans, anew where groups or their options have changed."""
        muon = [(n, g) for n, g in enumerate(self.param_groups) if g["use_muon"]]
        settings = [settings_of(group) for _, group in muon]
        cuts = [(g["num_heads"], g["split_sizes"] and tuple(g["split_sizes"])) for _, g in muon]
        trained = [[p.requires_grad for p in g["params"]] for _, g in muon]
        wanted = (settings, cuts, trained)
        if wanted == self._planned_for:
            return
        found: dict[Any, list[_Item]] = {}
        for (number, group), how in zip(muon, settings, strict=True):
            check_group(group, number)
            for param, name in zip(group["params"], names_of(group, number), strict=True):
                if not param.requires_grad:
                    continue
                team, spread = self._places[param]
                item = _Item(param, group, name, team, spread, blocks_of(group, param, name))
                key = (team, param.dtype, local(param).device, how)
                found.setdefault(key, []).append(item)
        self._buckets = [_bucket(items, key[-1]) for key, items in found.items()]
        self._planned_for = wanted


def _bucket(items: list[_Item], settings: Settings) -> _Bucket:
    """Matrices of one shape follow each other, so that they meet in one round."""
    items = sorted(items, key=lambda item: sorted((item.blocks[0], item.param.shape[-1])))
    team = items[0].team
    if len(team) > 1:
        _check_agreement(items, settings, team)
    chunks = []
    for number, item in enumerate(items):
        shape = item.param.shape
        bounds = bounds_of(shape, item.spread)
        chunks += chunks_of(number, shape, item.blocks, bounds=bounds, parts=len(team))
    shapes, spreads = [item.param.shape for item in items], [item.spread for item in items]
    return _Bucket(items, settings, make_plan(chunks, shapes, spreads, team.place))


def _check_agreement(items: list[_Item], settings: Settings, team: Team) -> None:
    """Ranks that mean different parameters would exchange wrong numbers, or wait forever."""
    what = repr([(tuple(i.param.shape), i.param.dtype, i.spread, i.blocks) for i in items])
    digest = hashlib.blake2b(f"{what}{settings}".encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "big")
    mine = torch.tensor([number], dtype=torch.int64, device=_wire(items[0].param, team))
    everyone = [torch.empty_like(mine) for _ in range(len(team))]
    dist.all_gather(everyone, mine, group=team.group)
    found = torch.cat(everyone).tolist()
    others = [rank for rank, other in enumerate(found) if other != found[0]]
    if others:
        raise ValueError(
            f"ranks disagree on the parameters of Muon: rank {others[0]} of the group has others "
            f"than rank 0, or other options (here: {len(items)} from {items[0].name} on); every "
            "rank must pass the same parameters in the same order"
        )


def _step_bucket(bucket: _Bucket, state: Any) -> None:
    items, team = bucket.items, bucket.team
    grads = {n: local_grad(item.param, item.name) for n, item in enumerate(items)}
    present = _presence(grads, _wire(items[0].param, team), team) if len(team) > 1 else None

    def updates_of(numbers: Sequence[int]) -> Updates:
        chosen = numbers if len(team) > 1 else [n for n in numbers if grads[n] is not None]
        return _updates([items[n] for n in chosen], chosen, grads, present, state)

    device, dtype = local(items[0].param).device, items[0].param.dtype
    rounds = orthogonalize_sharded(bucket.plan, team, bucket.settings, updates_of, device, dtype)
    lrs = {id(item.group): item.group["lr"] for item in items}
    lrs = {group: float(lr) for group, lr in lrs.items()}  # a tensor is read once
    for numbers, results in rounds:
        _apply(items, numbers, results, lrs, grads, present)


def _wire(param: torch.Tensor, team: Team) -> torch.device:
    """Where the group wants its tensors."""
    gloo = dist.get_backend(team.group) == "gloo"
    return torch.device("cpu") if gloo else local(param).device


def _presence(
    grads: dict[int, torch.Tensor | None], device: torch.device, team: Team
) -> torch.Tensor:
    """(parameters,): 1 where some rank has a gradient. On the device, so nobody waits for it."""
    found = torch.tensor([float(g is not None) for g in grads.values()])
    if device.type == "cuda":  # a copy from pinned memory does not wait
        found = found.pin_memory().to(device, non_blocking=True)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=team.group)
    return found


def _updates(
    items: list[_Item],
    numbers: Sequence[int],
    grads: dict[int, torch.Tensor | None],
    present: torch.Tensor | None,
    state: Any,
) -> Updates:
    """Moves the momentum and gives what is to be orthogonalised, shard by shard."""
    updates: Updates = {}
    by_group: dict[int, list[tuple[int, _Item]]] = {}
    for number, item in zip(numbers, items, strict=True):
        by_group.setdefault(id(item.group), []).append((number, item))
    for members in by_group.values():
        group = members[0][1].group
        momentum = group["momentum"]
        buffers = [local(state[item.param]["momentum_buffer"]) for _, item in members]
        here: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for (number, _), buffer in zip(members, buffers, strict=True):
            grad = grads[number]
            if grad is not None:
                here.append((number, grad.to(buffer.dtype), buffer))
                continue
            assert present is not None
            grad = torch.zeros_like(buffer)  # others may have one
            weight = ((1 - momentum) * present[number]).to(buffer.device, buffer.dtype)
            buffer.lerp_(grad, weight)
            updates[number] = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        if here:
            taken, gradients, moved = (list(x) for x in zip(*here, strict=True))
            torch._foreach_lerp_(moved, gradients, 1 - momentum)
            mixed = torch._foreach_lerp(gradients, moved, momentum) if group["nesterov"] else moved
            updates |= dict(zip(taken, mixed, strict=True))
    return updates


def _apply(
    items: list[_Item],
    numbers: Sequence[int],
    results: list[Result],
    lrs: dict[int, float],
    grads: dict[int, torch.Tensor | None],
    present: torch.Tensor | None,
) -> None:
    """Decays the shards of a round's parameters and takes the steps that came back for them."""
    decayed: dict[float, list[torch.Tensor]] = {}
    for number in numbers:
        group, shard = items[number].group, local(items[number].param)
        decay = lrs[id(group)] * group["weight_decay"]
        if grads[number] is not None:
            decayed.setdefault(1 - decay, []).append(shard)
        elif present is not None:
            shard.mul_((1 - decay * present[number]).to(shard.device))
    for factor, shards in decayed.items():
        torch._foreach_mul_(shards, factor)
    stepped: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for result in results:
        number, shape = result.chunk.param, (result.chunk.rows, result.chunk.columns)
        item = items[number]
        lr = adjusted_lr(lrs[id(item.group)], item.group["adjust_lr_fn"], *shape)
        target = local(item.param)[result.in_shard]
        if grads[number] is not None:
            targets, values = stepped.setdefault(lr, ([], []))
            targets.append(target)
            values.append(result.value)
        elif present is not None:
            target.add_(result.value * (-lr * present[number]).to(target.device))
    for lr, (targets, values) in stepped.items():
        torch._foreach_add_(targets, values, alpha=-lr)


def _step_adamw(group: Group, number: int, state: Any) -> None:
    params, grads, states = [], [], []
    for param, name in zip(group["params"], names_of(group, number), strict=True):
        grad = local_grad(param, name)
        if grad is None:
            continue
        state[param]["step"] += 1 if grad.numel() == 0 else 0  # torch's function sees no empty ones
        if grad.numel():
            params.append(local(param))
            grads.append(grad)
            states.append(state[param])
    beta1, beta2 = group["betas"]
    adamw(
        params,
        grads,
        [local(s["exp_avg"]) for s in states],
        [local(s["exp_avg_sq"]) for s in states],
        [],
        [s["step"] for s in states],
        foreach=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
