"""Which rows of which parameter make the queries or keys of which head.

A projection's rows (dim 0 of its weight, and of its bias) are its output channels, so scaling the
logits of a head means scaling rows. A *row layout* names the owners of all rows in order, as
blocks; hq query heads and hk key heads of d channels.

>>> [(b.role.name, b.head, b.rows) for b in grouped_rows(4, 2, 8)]
[('Q', 0, 8), ('Q', 1, 8), ('K', 0, 8), ('REST', 0, 8),
 ('Q', 2, 8), ('Q', 3, 8), ('K', 1, 8), ('REST', 0, 8)]
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from keel.nn.config import check_count


class Role(enum.Enum):
    """What a block of rows is, and so which share of a clip it takes."""

    REST = enum.auto()
    """Values, gates, keys that heads share: never scaled."""
    Q = enum.auto()
    """A head's queries."""
    K = enum.auto()
    """A head's keys; `head` counts key heads."""
    Q_WHOLE = enum.auto()
    """Queries that meet keys which are never scaled: they take the whole clip."""
    LAYER_Q = enum.auto()
    """A gain on the queries that all heads share: the smallest gamma of the layer counts."""
    LAYER_K = enum.auto()
    """The same on the keys."""


@dataclass(frozen=True, slots=True)
class Block:
    role: Role
    head: int
    rows: int


RowLayout = tuple[Block, ...]


def query_rows(num_heads: int, dim: int) -> RowLayout:
    """A projection of queries alone: hq · d rows."""
    return tuple(Block(Role.Q, h, dim) for h in range(num_heads))


def key_rows(num_kv_heads: int, dim: int) -> RowLayout:
    """A projection of keys alone: hk · d rows."""
    return tuple(Block(Role.K, h, dim) for h in range(num_kv_heads))


def stacked_rows(
    num_heads: int, num_kv_heads: int, dim: int, v_dim: int | None = None
) -> RowLayout:
    """[q | k | v], all heads of each: (hq + hk) · d + hk · dv rows."""
    values = num_kv_heads * (dim if v_dim is None else v_dim)
    return (
        *query_rows(num_heads, dim),
        *key_rows(num_kv_heads, dim),
        Block(Role.REST, 0, values),
    )


def grouped_rows(
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    v_dim: int | None = None,
    *,
    gate: bool = False,
) -> RowLayout:
    """Megatron's: for each key head [queries | k | v], with `gate` [queries | gates | k | v]."""
    _check_groups("grouped_rows", num_heads, num_kv_heads)
    group, blocks = num_heads // num_kv_heads, []
    for kv in range(num_kv_heads):
        blocks += [Block(Role.Q, kv * group + n, dim) for n in range(group)]
        if gate:
            blocks.append(Block(Role.REST, 0, group * dim))
        blocks.append(Block(Role.K, kv, dim))
        blocks.append(Block(Role.REST, 0, dim if v_dim is None else v_dim))
    return tuple(blocks)


def interleaved_rows(num_heads: int, dim: int) -> RowLayout:
    """GPT-NeoX's and BLOOM's: for each head [q | k | v]."""
    return grouped_rows(num_heads, num_heads, dim)


def mla_query_rows(num_heads: int, nope: int, rope: int) -> RowLayout:
    """Multi-latent attention, queries: for each head [nope | rope].

    The rotated keys are shared by all heads and stay, so rotated queries take the whole clip.
    """
    blocks = []
    for h in range(num_heads):
        blocks += [Block(Role.Q, h, nope), Block(Role.Q_WHOLE, h, rope)]
    return tuple(b for b in blocks if b.rows)


def mla_key_rows(num_heads: int, nope: int, v_dim: int) -> RowLayout:
    """Multi-latent attention, keys and values: for each head [nope | v]."""
    blocks = []
    for h in range(num_heads):
        blocks += [Block(Role.K, h, nope), Block(Role.REST, 0, v_dim)]
    return tuple(blocks)


@dataclass(frozen=True, slots=True)
class ClippedRows:
    """A row layout and what has it."""

    of: torch.nn.Module | torch.Tensor
    """A module whose weight (and bias, if it has one) is clipped, or one tensor. A module is asked
    anew at each step, so it may be sharded after the spec was made."""
    layout: RowLayout
    name: str = ""
    """What messages call it."""

    def tensors(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """(name for messages, dict that holds it, its key) of weight and bias."""
        name = self.name or "parameter"
        if isinstance(self.of, torch.Tensor):
            yield name, {"tensor": self.of}, "tensor"
            return
        for key in ("weight", "bias"):
            if getattr(self.of, key, None) is None:
                if key == "weight":
                    raise ValueError(f"{name} ({type(self.of).__name__}) has no weight to clip")
                continue
            if key not in self.of._parameters:
                raise ValueError(
                    f"{name}.{key} is not a plain parameter of its {type(self.of).__name__} (it "
                    "may be parametrized, quantized or adapted): pass the tensors that make it"
                )
            yield f"{name}.{key}", self.of._parameters, key


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer's attention: its heads, the rows they own, and where its max logits are.

    >>> q, k = torch.nn.Linear(16, 32), torch.nn.Linear(16, 8)
    >>> spec = LayerSpec(
    ...     name="layer 0", num_heads=4, num_kv_heads=1,
    ...     rows=(ClippedRows(q, query_rows(4, 8), "q"), ClippedRows(k, key_rows(1, 8), "k")))
    """

    name: str
    num_heads: int
    """Query heads that the layouts count. Where parameters are DTensors, those of the whole layer;
    this rank's attention may report fewer of them."""
    num_kv_heads: int
    rows: tuple[ClippedRows, ...]
    source: Any = None
    """An object with `current_max_attn_logits` (hq,) or None, and perhaps `reset_max_logits()`;
    None: `QKClip.observe` will be told."""

    def __post_init__(self) -> None:
        check_count(f"num_heads of {self.name}", self.num_heads)
        check_count(f"num_kv_heads of {self.name}", self.num_kv_heads)
        _check_groups(self.name, self.num_heads, self.num_kv_heads)
        if not self.rows:
            raise ValueError(f"{self.name} names no rows to clip")
        for part in self.rows:
            self._check_layout(part)

    def _check_layout(self, part: ClippedRows) -> None:
        where = f"{part.name or 'a parameter'} of {self.name}"
        for block in part.layout:
            heads = self.num_kv_heads if block.role is Role.K else self.num_heads
            if not 0 <= block.head < heads:
                raise ValueError(
                    f"the row layout of {where} speaks of {block.role.name} head {block.head}, but "
                    f"there are {heads} of them"
                )
        total = sum(block.rows for block in part.layout)
        for name, holder, key in part.tensors():
            found = holder[key]
            if not found.is_floating_point():
                raise ValueError(
                    f"{name} of {self.name} is {found.dtype}: only floating point rows are scaled"
                )
            if found.ndim == 0 or found.shape[0] != total:
                raise ValueError(
                    f"{name} of {self.name} has shape {tuple(found.shape)}, but the row layout "
                    f"describes {total} rows ({describe(part.layout)}): check heads and channels"
                )


def describe(layout: RowLayout) -> str:
    """A layout in a few words: how many blocks of which role and size."""
    counts: dict[tuple[str, int], int] = {}
    for block in layout:
        counts[block.role.name, block.rows] = counts.get((block.role.name, block.rows), 0) + 1
    return ", ".join(f"{n} × {role} of {rows}" for (role, rows), n in counts.items())


def _check_groups(name: str, num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{name}: {num_heads} query heads are not a multiple of {num_kv_heads} key heads"
        )
