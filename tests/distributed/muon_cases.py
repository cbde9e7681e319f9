"""What ranks run in the tests of Muon. Imported by their processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from keel.optim import Muon, newton_schulz, sharding

SHAPES = {  # even, uneven, fewer rows than ranks, stacked (even and uneven), turned, a vector
    "square": (16, 16),
    "uneven": (10, 12),
    "few": (3, 8),
    "one": (1, 6),
    "experts": (4, 6, 10),
    "odd_experts": (3, 6, 4),
    "tall": (22, 6),
    "bias": (7,),
}
OPTIONS: dict[str, Any] = {"lr": 0.05, "ns_dtype": torch.float32}
STEPS = 4


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    bias = [(name, p) for name, p in named.items() if p.ndim == 1]
    heads = [(name, named[name]) for name in ("square",)]
    split = [(name, named[name]) for name in ("uneven",)]
    rest = [(n, p) for n, p in named.items() if p.ndim > 1 and n not in ("square", "uneven")]
    return [
        {"params": rest},
        {"params": heads, "num_heads": 4, "adjust_lr_fn": "match_rms_adamw"},
        {"params": split, "split_sizes": (6, 4), "ns_coefficients": "polar_express"},
        {"params": bias, "use_muon": False},
    ]


def gradient(name: str, step: int) -> torch.Tensor:
    torch.manual_seed(1000 * step + len(name) + sum(map(ord, name)))
    return torch.randn(SHAPES[name])


def shard(full: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's part of a full tensor, cut as the parameter is; what torch.chunk leaves out is
    empty. FSDP cuts what tensor parallelism left."""
    if not isinstance(param, DTensor):
        return full
    axes = list(zip(param.device_mesh.get_coordinate(), param.device_mesh.shape, strict=True))
    cuts = list(zip(param.placements, axes, strict=True))
    later = [cut for cut in cuts if type(cut[0]).__name__ == "_StridedShard"]
    for placement, (here, parts) in [cut for cut in cuts if cut not in later] + later:
        if not placement.is_replicate():
            pieces = full.chunk(parts, placement.dim)
            empty = full.narrow(placement.dim, 0, 0)
            full = pieces[here] if here < len(pieces) else empty
    return full


def give_gradient(param: torch.Tensor, full: torch.Tensor) -> None:
    grad = shard(full, param).clone()
    if isinstance(param, DTensor):
        grad = DTensor.from_local(
            grad, param.device_mesh, param.placements, shape=full.shape, stride=full.stride()
        )
    param.grad = grad


def train(model: torch.nn.Module, optimizer: Muon, steps: range) -> None:
    for step in steps:
        for name, param in model.named_parameters():
            give_gradient(param, gradient(name, step))
        optimizer.step()


def by_one_rank() -> dict[str, torch.Tensor]:
    model = Model()
    train(model, Muon(groups_of(model), **OPTIONS), range(STEPS))
    return {name: param.detach() for name, param in model.named_parameters()}


def errors(model: torch.nn.Module, want: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest distances of this rank's shards from the parameters of one rank."""
    found = {}
    for name, param in model.named_parameters():
        local = (param.to_local() if isinstance(param, DTensor) else param).detach()
        expected = shard(want[name], param)
        assert local.shape == expected.shape, name
        found[name] = float((local - expected).abs().max()) if local.numel() else 0.0
    return found


def fsdp(model: Model, num_ranks: int) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",)))


def hsdp(model: Model, num_ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("copies", "shards"))
    fully_shard(model, mesh=mesh)


def distributed(model: Model, mesh: DeviceMesh, placements: Callable[[int], list[Any]]) -> None:
    for name, param in list(model.named_parameters()):
        sharded = distribute_tensor(param.detach(), mesh, placements(param.ndim))
        setattr(model, name, torch.nn.Parameter(sharded))


def rows(model: Model, num_ranks: int) -> None:
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
    distributed(model, mesh, lambda ndim: [Shard(max(0, ndim - 2))])


def columns(model: Model, num_ranks: int) -> None:
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
    distributed(model, mesh, lambda ndim: [Shard(ndim - 1)])


def both_dims(model: Model, num_ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, num_ranks // 2))  # without names
    distributed(model, mesh, lambda ndim: [Shard(0), Shard(ndim - 1)])


def replicated(model: Model, num_ranks: int) -> None:
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
    distributed(model, mesh, lambda ndim: [Replicate()])


def fsdp_and_tp(model: Model, num_ranks: int) -> None:
    """Tensor parallelism first, over rows or columns by turns, then FSDP over the other dim."""
    mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("dp", "tp"))
    for number, (name, param) in enumerate(list(model.named_parameters())):
        dim = param.ndim - 1 if number % 2 else 0
        sharded = distribute_tensor(param.detach(), mesh["tp"], [Shard(dim)])
        setattr(model, name, torch.nn.Parameter(sharded))
    fully_shard(model, mesh=mesh["dp"])


def shuffled(model: Model, num_ranks: int) -> None:
    """A mesh whose ranks are not in the order of the group."""
    order = torch.arange(num_ranks).view(2, -1).T.contiguous()
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("a", "b"))
    distributed(model, mesh, lambda ndim: [Shard(0), Shard(ndim - 1)])


LAYOUTS: dict[str, Callable[[Model, int], None]] = {
    "fsdp": fsdp,
    "hsdp": hsdp,
    "rows": rows,
    "columns": columns,
    "both dims": both_dims,
    "replicated": replicated,
    "fsdp and tp": fsdp_and_tp,
    "shuffled": shuffled,
}


class Counted:
    """Counts matrices that this rank orthogonalises."""

    def __init__(self) -> None:
        self.count = 0
        self._whole = newton_schulz.iterate
        newton_schulz.iterate = self._count

    def _count(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        self.count += len(x)
        return self._whole(x, *args)

    def stop(self) -> int:
        newton_schulz.iterate = self._whole
        return self.count


Outcome = tuple[dict[str, float], int]
"""Distance from one rank for each parameter, and matrices that this rank orthogonalised."""


def check_layout(layout: str, want: dict[str, torch.Tensor]) -> Outcome:
    model = Model()
    if layout == "plain":
        optimizer = Muon(groups_of(model), process_group=dist.group.WORLD, **OPTIONS)
    else:
        LAYOUTS[layout](model, dist.get_world_size())
        optimizer = Muon(groups_of(model), **OPTIONS)
    counted = Counted()
    train(model, optimizer, range(STEPS))
    return errors(model, want), counted.stop()


def check_layouts(rank: int, layouts: list[str], folder: str | None = None) -> dict[str, Outcome]:
    """With a folder, also leaves checkpoints of each layout there, of an earlier step."""
    want = by_one_rank()
    if folder is not None:
        for layout in layouts:
            save(f"{folder}/{layout}", layout)
    found = {layout: check_layout(layout, want) for layout in layouts}
    sharding.make_plan.__defaults__ = (1,)  # every parameter is a round of its own
    return found | {"rounds": check_layout("fsdp", want)}


def check_partial_gradients(rank: int) -> dict[str, float]:
    """A replicated weight whose gradient is still to be summed over ranks."""
    from torch.distributed.tensor import Partial

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = Model()
    distributed(model, mesh, lambda ndim: [Replicate()])
    optimizer = Muon(groups_of(model), **OPTIONS)
    for step in range(STEPS):
        for name, param in model.named_parameters():
            part = gradient(name, step) * (0.75 if rank == 0 else 0.25)
            param.grad = DTensor.from_local(part, mesh, [Partial()])
        optimizer.step()
    return errors(model, by_one_rank())


def check_missing_gradients(rank: int) -> dict[str, float]:
    """No rank has one: left alone. Some rank has none: it counts as zeros."""
    model, alone = Model(), Model()
    fsdp(model, dist.get_world_size())
    ours, theirs = Muon(groups_of(model), **OPTIONS), Muon(groups_of(alone), **OPTIONS)
    train(model, ours, range(1))
    train(alone, theirs, range(1))
    for step in range(1, 4):
        named = dict(alone.named_parameters())
        for name, param in model.named_parameters():
            for target in (param, named[name]):
                give_gradient(target, gradient(name, step))
        for model_ in (model, alone):
            model_.experts.grad = None
        if rank == 0:  # its rows get zeros
            model.square.grad = None
        cut = -(-SHAPES["square"][0] // dist.get_world_size())
        alone.square.grad[:cut] = 0
        ours.step()
        theirs.step()
    return errors(model, {name: p.detach() for name, p in alone.named_parameters()})


def save(folder: str, layout: str) -> None:
    model = Model()
    LAYOUTS[layout](model, dist.get_world_size())
    optimizer = Muon(groups_of(model), **OPTIONS)
    train(model, optimizer, range(2))
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder)


def load_and_go_on(rank: int, moves: list[tuple[str, str]], folder: str) -> list[dict[str, float]]:
    """Into other shards on other ranks; then as if nothing had happened."""
    want = by_one_rank()
    return [_loaded(f"{folder}/{before}", after, want) for before, after in moves]


def _loaded(folder: str, layout: str, want: dict[str, torch.Tensor]) -> dict[str, float]:
    model = Model()
    LAYOUTS[layout](model, dist.get_world_size())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer = Muon(groups_of(model), **(OPTIONS | {"lr": 1e9}))
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, range(2, STEPS))
    return errors(model, want)


def odd_cases(rank: int) -> dict[str, Any]:
    return {
        "partial": check_partial_gradients(rank),
        "missing": check_missing_gradients(rank),
        "disagreement": message_of_disagreement(rank),
        "layout": message_of_partial(rank),
    }


def message_of_disagreement(rank: int) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    params = [
        torch.nn.Parameter(
            distribute_tensor(torch.ones(4, 4 + rank), mesh, [Replicate()], src_data_rank=None)
        )
    ]
    optimizer = Muon(params)
    params[0].grad = copy.deepcopy(params[0].detach())
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def message_of_partial(rank: int) -> str:
    from torch.distributed.tensor import Partial

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    param = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    try:
        Muon([("layer.weight", param)])
    except ValueError as error:
        return str(error)
    return ""
