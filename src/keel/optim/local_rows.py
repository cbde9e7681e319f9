"""Which rows of a parameter this rank holds: DTensors of FSDP2, of tensor parallelism, or both."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

Rows = tuple[int, int]
"""[first, last) of the rows of the whole parameter."""


def local_tensor(x: torch.Tensor) -> torch.Tensor:
    """What this rank holds; the very memory, not a copy."""
    return x._local_tensor if isinstance(x, DTensor) else x.detach()


def row_stages(x: torch.Tensor, name: str) -> list[Rows]:
    """The rows that remain after each cut of dim 0, from all of them to this rank's.

    Cuts are listed in the order in which they were made: FSDP2 cuts what tensor parallelism left,
    although its mesh dim comes first, and marks that with a strided placement. Each cut gives
    ceil(n / ranks) rows to the ranks in order, so the last ones may hold fewer, or none.
    """
    stages = [(0, x.shape[0])]
    if not isinstance(x, DTensor):
        return stages
    mesh, coordinate = x.device_mesh, x.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{name} lives on {mesh}, which this rank is not part of")
    plain: list[int] = []
    strided: list[int] = []
    for axis, placement in enumerate(x.placements):
        if placement.is_partial():
            raise ValueError(f"{name} is a sum over ranks ({placement}): it cannot be scaled here")
        if placement.is_replicate() or placement.dim != 0:  # type: ignore[attr-defined]
            continue
        (strided if hasattr(placement, "split_factor") else plain).append(axis)
    for axis in (*plain, *reversed(strided)):
        first, last = stages[-1]
        step = -(-(last - first) // mesh.size(axis))
        begin = min(first + step * coordinate[axis], last)
        stages.append((begin, min(begin + step, last)))
    held = local_tensor(x).shape[0]
    if held != stages[-1][1] - stages[-1][0]:
        raise ValueError(
            f"{name}: this rank holds {held} rows, expected {stages[-1]} from {x.placements} on "
            f"{mesh}; such a sharding is not known here"
        )
    return stages
