"""What a clip needs beside its numbers: rows, factors and tables, for parameters where they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keel.optim.clip_specs import LayerSpec, Role
from keel.optim.clip_table import ClipTable, Factors, Gqa
from keel.optim.local_rows import local_tensor, row_stages
from keel.optim.logit_stats import Group, group_of
from keel.optim.replay import Replay
from keel.optim.row_scaling import RowScaler, ScaledTensor, can_use_triton

Tensor = torch.Tensor
MasterOf = Callable[[Tensor], Tensor | None]


class ClipProgram:
    """Made at the first step, and again when parameters or maxima have moved."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        tops: list[Tensor],
        *,
        alpha: float,
        gqa: Gqa,
        group: Group,
        master_of: MasterOf,
    ) -> None:
        self.names = tuple(spec.name for spec in layers)
        self.sizes = tuple(len(top) for top in tops)
        self.device, dtype = tops[0].device, torch.float32
        for top in tops:
            dtype = torch.promote_types(dtype, top.dtype)
        self.group = group_of(group)
        self.zero = torch.zeros(1, device=self.device)
        self.one = torch.ones(1, dtype=dtype, device=self.device)
        self._tau = (math.nan, self.one)
        self.lowest = [torch.full_like(top, -torch.inf) for top in tops]
        self.packed: Tensor | None = None
        """(heads + 1,): the step's maxima and its flag, where a recorded step looks for them."""
        self.replay = Replay(self.device)
        self.places: list[range] = []
        """Where the heads of each layer stand among those of all layers on all ranks."""
        self._tops, self._master_of = tops, master_of
        self._watched: list[tuple[dict[str, Any], str, Any, bool, int]] = []
        self._owners: dict[int, str] = {}
        table = ClipTable(alpha, gqa, sum(self.sizes))
        parts: list[ScaledTensor] = []
        first_gamma = first_place = 0
        for spec, top in zip(layers, tops, strict=True):
            if top.device != self.device:
                raise ValueError(
                    f"{spec.name} reported from {top.device}, {layers[0].name} from {self.device}: "
                    "layers of one QKClip share a device"
                )
            heads = _heads_here(spec, len(top), group)
            parts += self._parts(spec, table, first_gamma, heads, _kv_heads_here(spec, heads))
            self.places.append(range(first_place + heads.start, first_place + heads.stop))
            first_gamma += len(heads)
            first_place += spec.num_heads
        self.factors: Factors = table.on(self.device, dtype)
        self.scaler = RowScaler(parts, self.device)
        self.in_one_launch = can_use_triton(self.device) and self.factors.of_one_gamma_each
        """Whether a kernel makes gammas, counts and factors; else torch does."""

    def _parts(
        self,
        spec: LayerSpec,
        table: ClipTable,
        first_gamma: int,
        heads: range,
        kv_heads: range,
    ) -> Iterator[ScaledTensor]:
        for part in spec.rows:
            entries = table.rows_of(
                part.layout, first_gamma=first_gamma, heads=heads, kv_heads=kv_heads
            )
            for name, holder, key in part.tensors():
                parameter, name = holder[key], f"{name} of {spec.name}"
                other = self._owners.setdefault(id(parameter), name)
                if other != name:
                    raise ValueError(f"{name} is {other}: one tensor cannot be clipped twice")
                if parameter.shape[0] != len(entries):
                    raise ValueError(
                        f"{name} has {parameter.shape[0]} rows now, its layout {len(entries)}"
                    )
                first, last = row_stages(parameter, name)[-1]
                mine, local = entries[first:last], local_tensor(parameter)
                if (mine < 0).any():
                    raise ValueError(
                        f"this rank holds rows of {name} whose heads it has no max logits of: it "
                        f"reported heads {heads.start} to {heads.stop - 1} of {spec.num_heads}"
                    )
                if local.device != self.device:
                    raise ValueError(
                        f"{name} is on {local.device}, its max logits on {self.device}: move one"
                    )
                sharded = isinstance(parameter, DTensor)
                self._watched.append((holder, key, parameter, sharded, local.data_ptr()))
                yield ScaledTensor(local, mine, _master(parameter, local, self._master_of, name))

    def tau(self, value: float) -> Tensor:
        """(1,) with this value, which stays; a caller's graph fills one of its own, since it may be
        replayed when the value here is another one."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.full_like(self.one, value)
        if value != self._tau[0]:
            self._tau = (value, torch.full_like(self.one, value))
        return self._tau[1]

    def fits(self, tops: list[Tensor]) -> bool:
        """Whether parameters and maxima are still where and what they were."""
        for holder, key, parameter, sharded, pointer in self._watched:
            found: Any = holder.get(key)
            if found is not parameter:
                return False
            if (parameter._local_tensor if sharded else parameter).data_ptr() != pointer:
                return False
        return all(
            x is y or (x.shape == y.shape and x.device == y.device and x.dtype == y.dtype)
            for x, y in zip(tops, self._tops, strict=True)
        )


def _heads_here(spec: LayerSpec, count: int, group: Group) -> range:
    """Which of the layer's heads this rank's attention reported."""
    if count == spec.num_heads:
        return range(count)
    for part in spec.rows:
        for name, holder, key in part.tensors():
            total = holder[key].shape[0]
            for first, last in row_stages(holder[key], name):
                if (last - first) * spec.num_heads == count * total:
                    if group is None:
                        raise ValueError(
                            f"{spec.name} has its heads spread over ranks: pass the group of ranks "
                            "that hold the same heads (data times context parallel)"
                        )
                    start = first * spec.num_heads // total
                    return range(start, start + count)
    raise ValueError(
        f"{spec.name} reported max logits of {count} heads, but its parameters have "
        f"{spec.num_heads} and are not sharded accordingly"
    )


def _kv_heads_here(spec: LayerSpec, heads: range) -> range:
    group = spec.num_heads // spec.num_kv_heads
    if len(heads) != spec.num_heads:
        if heads.start % group or heads.stop % group:
            raise ValueError(
                f"{spec.name}: query heads {heads.start} to {heads.stop - 1} of this rank cut "
                f"through groups of {group} that share keys"
            )
        if any(b.role in (Role.LAYER_Q, Role.LAYER_K) for p in spec.rows for b in p.layout):
            raise ValueError(
                f"{spec.name}: all heads share a gain, but this rank knows only some of them"
            )
    return range(heads.start // group, heads.stop // group)


def main_param(parameter: Tensor) -> Tensor | None:
    """Megatron keeps a parameter's fp32 master there."""
    return getattr(parameter, "main_param", None)


def _master(parameter: Tensor, local: Tensor, master_of: MasterOf, name: str) -> Tensor | None:
    master = master_of(parameter)
    if master is None or master is parameter:
        return None
    found = local_tensor(master)
    if found.shape != local.shape or found.device != local.device:
        raise ValueError(
            f"the master of {name} is {tuple(found.shape)} on {found.device}, expected the rows "
            f"that this rank holds, {tuple(local.shape)} on {local.device}; flat shards of a "
            "distributed optimizer are not supported"
        )
    return found
