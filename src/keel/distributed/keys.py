"""`flex_key` and `varlen_key`: everything about one mask over one group, worked out once.

A key is made without communication: every rank makes the same one. It is immutable and equal by
value, so that layers may share it or make their own.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from keel import masks
from keel._versions import flat_group
from keel.distributed import layout as layouts
from keel.distributed.balance import balanced
from keel.distributed.cost import CostModel, best_degree, expected_ms, first_of_the_best
from keel.distributed.hierarchy import Links
from keel.distributed.layout import Layout
from keel.distributed.placement import near_readers
from keel.distributed.plan import MAX_DEGREE, Plan, make_plan
from keel.distributed.work import rows_received
from keel.masks import AttnMask
from keel.masks.mask import RangesLike, TypesLike

Balance = Literal["contiguous", "zigzag", "solver", "traffic"]
Degree = int | Literal["auto"]
Group = dist.ProcessGroup | DeviceMesh | None

UNIT = 128
"""The solver hands out tokens in runs of this many: the rows of a kernel's tile."""


@dataclass(frozen=True, eq=False)
class AttnKey:
    """A mask, its tokens on the ranks of a group, and the plans of both directions.

    >>> key = flex_key(masks.causal(1024), num_ranks=4, rank=1, balance="zigzag")
    >>> key.num_local, key.position_ids().tolist()[:2], key.forward_plan.num_stages
    (256, [128, 129], 2)
    """

    mask: AttnMask
    q_layout: Layout
    k_layout: Layout
    rank: int
    group: dist.ProcessGroup | None
    """None where a key only plans, for ranks that need not be there."""
    degree: int
    """Stages of remote keys in the forward; 0: one blocking fetch and one kernel call."""
    backward_degree: int
    keep_remote_keys: bool
    """Keep what the forward fetched for the backward, instead of fetching it again."""
    links: Links | None = None
    """Where the ranks are those of a mesh (nodes, ranks of a node): its groups."""

    @property
    def num_ranks(self) -> int:
        return self.q_layout.num_ranks

    @property
    def num_local(self) -> int:
        """Query tokens of this rank."""
        return int(self.q_layout.rows[self.rank])

    @property
    def num_local_keys(self) -> int:
        return int(self.k_layout.rows[self.rank])

    @property
    def forward_plan(self) -> Plan:
        return make_plan(self.mask, self.q_layout, self.k_layout, self.degree)

    @property
    def backward_plan(self) -> Plan:
        return make_plan(self.mask, self.q_layout, self.k_layout, self.backward_degree)

    def position_ids(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """(num_local,) int64: global numbers of this rank's queries, in local order."""
        return torch.from_numpy(self.q_layout.tokens_of(self.rank)).to(device)

    def with_mask(
        self,
        mask: AttnMask | RangesLike,
        k_ranges: RangesLike | None = None,
        attn_type_map: TypesLike = None,
    ) -> AttnKey:
        """Another mask on the same tokens, for models whose layers differ."""
        return replace(self, mask=_as_mask(mask, k_ranges, attn_type_map, *self.mask.shape))

    @functools.cached_property
    def fingerprint(self) -> dict[str, int]:
        """What ranks must agree on, as 63-bit numbers."""
        parts = {
            "mask": self.mask.digest,
            "layout of the queries": self.q_layout.digest,
            "layout of the keys": self.k_layout.digest,
            "degree": str((self.degree, self.backward_degree)).encode(),
            "keep_remote_keys": str(self.keep_remote_keys).encode(),
            "number of ranks in a node": str(self.links and self.links.per_node).encode(),
        }
        return {
            name: int.from_bytes(hashlib.sha256(value).digest()[:8], "big") >> 1
            for name, value in parts.items()
        }

    @functools.cached_property
    def _value(self) -> tuple[object, ...]:
        return (
            *(self.mask, self.q_layout, self.k_layout, self.rank, self.group),
            *(self.degree, self.backward_degree, self.keep_remote_keys, self.links),
        )

    def __eq__(self, other: object) -> bool:
        return self._value == other._value if isinstance(other, AttnKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return (
            f"AttnKey({self.mask!r}, rank {self.rank} of {self.num_ranks}, {self.num_local} "
            f"tokens here, degree {self.degree} / {self.backward_degree})"
        )

    def draw(self, path: str, *, title: str | None = None) -> None:
        """A picture: who holds which tokens, who sends how much to whom (needs matplotlib)."""
        from keel.distributed.report import draw_plan

        draw_plan(self, path, title=title)

    def describe(self) -> str:
        """A table of what each rank holds, computes and receives in the forward."""
        plan = self.forward_plan
        lines = ["rank   tokens  pieces          area  of mean    receives"]
        area, rows = plan.areas.sum(1), plan.rows_received.sum(1)
        pieces = np.bincount(self.q_layout.ranks, minlength=self.num_ranks)
        mean = max(area.mean(), 1)
        for rank in range(self.num_ranks):
            lines.append(
                f"{rank:4d} {self.q_layout.rows[rank]:8d} {pieces[rank]:7d} {area[rank]:13d}  "
                f"{area[rank] / mean:7.3f}  {rows[rank]:10d}"
            )
        return "\n".join(lines)


def get_position_ids(key: AttnKey, device: torch.device | str = "cpu") -> torch.Tensor:
    """`key.position_ids(device)`."""
    return key.position_ids(device)


def flex_key(
    q_ranges: RangesLike | AttnMask,
    k_ranges: RangesLike | None = None,
    attn_type_map: TypesLike = None,
    total_seqlen_q: int | None = None,
    total_seqlen_k: int | None = None,
    *,
    group: Group = None,
    num_ranks: int | None = None,
    rank: int | None = None,
    balance: Balance | Layout = "solver",
    k_balance: Balance | Layout | None = None,
    degree: Degree = "auto",
    backward_degree: Degree | None = None,
    keep_remote_keys: bool = False,
    cost: CostModel | None = None,
) -> AttnKey:
    """The key of a mask over the ranks of a group. No communication: all ranks make the same.

    Args:
        q_ranges, k_ranges, attn_type_map: as in `flex_flash_attn_func`, or a ready AttnMask.
        total_seqlen_q, total_seqlen_k: tokens over all ranks; needed with ranges.
        group: a process group or a mesh; None: the default group, or with num_ranks and rank no
            group at all, for planning. With a mesh of two dims (nodes, ranks of a node) a row
            crosses between two nodes once, however many ranks want it there.
        balance: "contiguous", "zigzag", "solver", "traffic", or a Layout of the queries. "solver"
            takes what is fastest by `cost`; "traffic" what makes the rank that receives the most
            receive the least, of the same layouts, however uneven the work.
        k_balance: the same for the keys, where they are other tokens than the queries
            (cross-attention); "solver": near the queries that read them; None: they are the same
            tokens.
        degree: stages in which remote keys arrive; 0: one blocking fetch and one kernel call;
            "auto": what the cost model finds fastest.
        backward_degree: the same for the backward; None: as forward.
        keep_remote_keys: keep what the forward fetched, instead of fetching it again. Costs
            (keys received) * hk * (d + dv) elements until the backward; needs equal degrees.
        cost: heads, rates and latency for "auto" and "solver"; None: 64:8 heads of dim 128 on
            H100 nodes.
    """
    mask = _as_mask(q_ranges, k_ranges, attn_type_map, total_seqlen_q, total_seqlen_k)
    process_group, size, me = _group_of(group, num_ranks, rank)
    links = None
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        links = Links(group.get_group(0), group.get_group(1), group.size(1))
    model = CostModel() if cost is None else cost
    if k_balance is None:
        if mask.tq != mask.tk:
            raise ValueError(
                f"queries ({mask.tq}) and keys ({mask.tk}) are different tokens: say with "
                "k_balance how keys are laid out"
            )
        q_layout = _layout(balance, mask.tq, size, "balance")
        if q_layout is None:
            q_layout = _solved(mask, size, None if balance == "traffic" else model)
        k_layout = q_layout
    else:
        given = (
            _layout(balance, mask.tq, size, "balance"),
            _layout(k_balance, mask.tk, size, "k_balance"),
        )
        aim = None if "traffic" in (balance, k_balance) else model
        q_layout, k_layout = _solved_cross(mask, size, aim, *given)
    if backward_degree is None:
        backward_degree = degree if degree != "auto" or not keep_remote_keys else None
    both = (mask, q_layout, k_layout, model)
    forward = _degree(degree, "degree", *both, backward=False)
    backward = forward
    if backward_degree is not None:
        backward = _degree(backward_degree, "backward_degree", *both, backward=True)
    if keep_remote_keys and forward != backward:
        raise ValueError(
            "keep_remote_keys needs the same stages both ways, got degree "
            f"{forward} and backward_degree {backward}"
        )
    return AttnKey(
        *(mask, q_layout, k_layout, me, process_group),
        *(forward, backward, keep_remote_keys, links),
    )


def varlen_key(
    cu_seqlens_q: torch.Tensor | list[int],
    cu_seqlens_k: torch.Tensor | list[int] | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    total_seqlen_q: int | None = None,
    total_seqlen_k: int | None = None,
    **options: object,
) -> AttnKey:
    """The key of packed documents; options are those of `flex_key`."""
    mask = masks.documents(
        *(cu_seqlens_q, cu_seqlens_k),
        causal=causal,
        window=window,
        tq=total_seqlen_q,
        tk=total_seqlen_k,
    )
    return flex_key(mask, **options)  # type: ignore[arg-type]


def _as_mask(
    q_ranges: RangesLike | AttnMask,
    k_ranges: RangesLike | None,
    types: TypesLike,
    tq: int | None,
    tk: int | None,
) -> AttnMask:
    if isinstance(q_ranges, AttnMask):
        given = (tq, q_ranges.tq), (tk, q_ranges.tk)
        if any(said is not None and said != has for said, has in given):
            raise ValueError(f"the mask is for {q_ranges.shape} tokens, but {(tq, tk)} were given")
        return q_ranges
    if k_ranges is None or tq is None:
        raise ValueError("pass q_ranges, k_ranges and total_seqlen_q, or an AttnMask")
    return AttnMask.from_ranges(q_ranges, k_ranges, types, tq, tq if tk is None else tk)


def _group_of(
    group: Group, num_ranks: int | None, rank: int | None
) -> tuple[dist.ProcessGroup | None, int, int]:
    if num_ranks is not None:
        if group is not None:
            raise ValueError("num_ranks is for planning without a group: pass one of the two")
        me = 0 if rank is None else rank
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        if not 0 <= me < num_ranks:
            raise ValueError(f"rank must be in 0..{num_ranks - 1}, got {me}")
        return None, num_ranks, me
    if rank is not None:
        raise ValueError("rank goes with num_ranks, to plan without a group: a group knows its own")
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise ValueError(
                f"the mesh must have one dim, or two (nodes, ranks of a node), got {group.ndim}: "
                "slice it, as in mesh['cp']"
            )
        if group.ndim == 2 and group.mesh_dim_names is None:
            raise ValueError(
                "a mesh of two dims needs names, or torch cannot make a group of all its ranks: "
                "pass mesh_dim_names=('node', 'rank') to init_device_mesh"
            )
        process_group: dist.ProcessGroup | None = flat_group(group)
    else:
        process_group = group
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: call init_process_group (torchrun sets what it "
            "needs), or pass num_ranks and rank to plan without communication"
        )
    process_group = dist.group.WORLD if process_group is None else process_group
    me = dist.get_rank(process_group)
    if me < 0:
        raise ValueError("this process is not a member of the group")
    return process_group, dist.get_world_size(process_group), me


def _degree(
    degree: Degree,
    name: str,
    mask: AttnMask,
    q_layout: Layout,
    k_layout: Layout,
    model: CostModel,
    *,
    backward: bool,
) -> int:
    if degree == "auto":
        return best_degree(mask, q_layout, k_layout, model, backward=backward)
    if isinstance(degree, bool) or not isinstance(degree, int) or not 0 <= degree <= MAX_DEGREE:
        raise ValueError(f"{name} must be 'auto' or an int in 0..{MAX_DEGREE}, got {degree!r}")
    return degree


def _layout(balance: Balance | Layout, total: int, size: int, name: str) -> Layout | None:
    """A layout that does not look at the mask; None: the solver has to."""
    if isinstance(balance, Layout):
        if balance.num_ranks != size or balance.total != total:
            raise ValueError(
                f"{name} is a layout of {balance.total} tokens over {balance.num_ranks} ranks, "
                f"expected {total} over {size}"
            )
        return balance
    if balance == "contiguous":
        return layouts.contiguous(total, size)
    if balance == "zigzag":
        return layouts.zigzag(total, size)
    if balance in ("solver", "traffic"):
        return None
    raise ValueError(
        f"{name} must be 'contiguous', 'zigzag', 'solver', 'traffic' or a Layout, got {balance!r}"
    )


def _unit(total: int, size: int) -> int:
    return max(1, min(UNIT, total // (8 * size)))  # or few tokens would be few runs


@functools.lru_cache(maxsize=64)
def _solved(mask: AttnMask, size: int, model: CostModel | None) -> Layout:
    """The balanced layout; or a simple one, where balance does not pay for its traffic.

    Without a model, the one of them whose busiest rank receives the least.
    """
    return _best(mask, [(x, x) for x in _candidates(mask, size)], model)[0]


@functools.lru_cache(maxsize=64)
def _candidates(mask: AttnMask, size: int) -> tuple[Layout, ...]:
    simple = [make(mask.tq, size) for make in (layouts.contiguous, layouts.zigzag)]
    return (*simple, balanced(mask, size, unit=_unit(mask.tq, size)))


def _best(
    mask: AttnMask, candidates: list[tuple[Layout, Layout]], model: CostModel | None
) -> tuple[Layout, Layout]:
    """Of layouts of queries and of keys."""
    if model is not None:
        times = [expected_ms(mask, *x, model) for x in candidates]
        return candidates[first_of_the_best(times)]
    return min(candidates, key=lambda x: rows_received(mask, *x).max(initial=0))


@functools.lru_cache(maxsize=64)
def _solved_cross(
    mask: AttnMask,
    size: int,
    model: CostModel | None,
    q_layout: Layout | None,
    k_layout: Layout | None,
) -> tuple[Layout, Layout]:
    """The same where keys are other tokens; what is given is left as it is."""

    @functools.cache
    def keys_of(queries: Layout) -> Layout:
        if k_layout is not None:
            return k_layout
        return near_readers(mask, queries, unit=_unit(mask.tk, size))

    if q_layout is not None:
        return q_layout, keys_of(q_layout)
    simple = [make(mask.tq, size) for make in (layouts.contiguous, layouts.zigzag)]
    queries = [*simple, balanced(mask, size, unit=_unit(mask.tq, size), keys_of=keys_of)]
    candidates = [(x, keys_of(x)) for x in queries]
    if k_layout is None:
        candidates.insert(0, (simple[0], layouts.contiguous(mask.tk, size)))
    return _best(mask, candidates, model)
