"""What DTensors say about where their shards are, in the terms of the plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from keel._versions import flat_group
from keel.optim.blocks import shape_of
from keel.optim.exchange import Team
from keel.optim.sharding import Spread, whole


def as_dtensor(x: torch.Tensor) -> Any:
    """x where it is a DTensor, else None; without importing what a plain run does not need."""
    return x if hasattr(x, "device_mesh") and hasattr(x, "placements") else None


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's shard, sharing memory; the tensor itself where it is no DTensor."""
    sharded = as_dtensor(x)
    return x if sharded is None else sharded.to_local()


def local_grad(param: torch.Tensor, name: str) -> torch.Tensor | None:
    """This rank's shard of the gradient, laid out as the parameter."""
    grad = param.grad
    if grad is None:
        return None
    if grad.is_sparse:
        raise RuntimeError(f"{name} has a sparse gradient, which Muon does not support")
    sharded = as_dtensor(grad)
    if sharded is not None and sharded.placements != as_dtensor(param).placements:
        # a replicated weight may have partial sums as its gradient
        grad = sharded.redistribute(placements=as_dtensor(param).placements)
    return local(grad)


def spread_of(param: torch.Tensor, name: str) -> Spread:
    sharded = as_dtensor(param)
    if sharded is None:
        return whole()
    mesh = tuple(sharded.device_mesh.shape)
    dims: list[int | None] = []
    plain: list[int] = []
    strided: list[int] = []
    for axis, placement in enumerate(sharded.placements):
        if placement.is_replicate():
            dims.append(None)
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise ValueError(
                f"{name} has placements {sharded.placements}; Muon takes Shard and Replicate"
            )
        dims.append(dim % param.ndim)
        # FSDP over a dim that tensor parallelism shards already cuts inside its shards
        (plain if getattr(placement, "split_factor", None) is None else strided).append(axis)
    spread = Spread(mesh, tuple(dims), (*plain, *reversed(strided)))
    place = _place(sharded.device_mesh)
    expected = shape_of(spread.box(param.shape, place))
    if expected != tuple(local(param).shape):
        raise ValueError(
            f"{name} of shape {tuple(param.shape)} with placements {sharded.placements} has a "
            f"local shard of shape {tuple(local(param).shape)}; Muon expects {expected} here and "
            "does not know this layout"
        )
    return spread


def team_of(param: torch.Tensor, group: dist.ProcessGroup | None, name: str) -> Team:
    """The ranks that hold the parameter; with more than one mesh dim this makes a group for all of
    them, which all ranks have to do together."""
    sharded = as_dtensor(param)
    if sharded is None:
        if group is None:
            return Team()
        ranks = range(dist.get_world_size(group))
        return Team(group, tuple(ranks), dist.get_rank(group))
    mesh = sharded.device_mesh
    ranks = mesh.mesh.flatten().tolist()
    if len(ranks) == 1:
        return Team()
    mesh_group = _group_of(mesh, ranks, name)
    in_group = tuple(dist.get_group_rank(mesh_group, rank) for rank in ranks)
    return Team(mesh_group, in_group, _place(mesh))


def _place(mesh: Any) -> int:
    coordinate = mesh.get_coordinate()
    place = 0
    for here, size in zip(coordinate, mesh.shape, strict=True):
        place = place * size + here
    return place


def _group_of(mesh: Any, ranks: list[int], name: str) -> dist.ProcessGroup:
    sharing = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    if len(sharing) == 1:
        return mesh.get_group(sharing[0])
    if mesh.mesh_dim_names is not None:
        return flat_group(mesh)
    if sorted(ranks) == list(range(dist.get_world_size())):
        world = dist.group.WORLD
        assert world is not None
        return world
    raise ValueError(
        f"{name} lies on {mesh}, whose dims have no names, so no group of all its ranks can be "
        "made; pass mesh_dim_names to init_device_mesh"
    )
