"""MagiAttention's names and signatures on `keel.distributed`.

Code that imports from `magi_attention.api` runs with this module in its place. What differs:
nothing is padded, so ranks may hold unequal numbers of tokens; a pair that several slices cover
attends once; environment variables of the original are not read. Settings that only tuned its
internals are accepted, and the log names each of them once; what has no meaning here is an error.

>>> q_ranges, k_ranges, types, *totals = infer_attn_mask_from_cu_seqlens([0, 4, 6], [0, 4, 6], True)
>>> q_ranges, types[0].name, totals
(AttnRanges([(0, 4), (4, 6)]), 'CAUSAL', [6, 6])
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from keel import attention, distributed
from keel.distributed import AttnKey
from keel.distributed.cost import CostModel
from keel.masks import AttnMask
from keel.masks import AttnMaskType as AttnMaskType
from keel.masks import AttnRange as AttnRange
from keel.masks import AttnRanges as AttnRanges
from keel.meta import AttnForwardMeta as AttnForwardMeta

Tensor = torch.Tensor
Group = dist.ProcessGroup | DeviceMesh
Ranges = tuple[AttnRanges, AttnRanges, list[AttnMaskType]]
DistAttnRuntimeKey = AttnKey
GeneralAttnMaskType = str | int | AttnMaskType | Sequence[str | int | AttnMaskType]

logger = logging.getLogger("keel")

_said: set[tuple[str, str]] = set()
_recent: dict[dist.ProcessGroup, DistAttnRuntimeKey] = {}


class AttnOverlapMode(Enum):
    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True)
class MinHeapDispatchAlg:
    """Equal work on all ranks: Keel's own solver."""


@dataclass(frozen=True)
class SequentialDispatchAlg:
    """Tokens in order, one piece per rank."""


@dataclass(frozen=True)
class UniformOverlapAlg:
    """Stages of about equal size, as they always are here."""

    random_costs: bool = False
    random_seed: int | None = None


@dataclass(frozen=True)
class DispatchConfig:
    chunk_size: int | None = None
    """No effect: the solver has its own unit."""
    uneven_shard: bool = False
    """Both values mean the same, since nothing is padded."""
    alg: object = MinHeapDispatchAlg()


@dataclass(frozen=True)
class OverlapConfig:
    mode: AttnOverlapMode = AttnOverlapMode.STATIC
    degree: int | None = 1
    """Stages of remote keys; 0: one blocking fetch; None: what the cost model finds fastest.
    DYNAMIC mode means None too, and overrules the default."""
    dynamic_max_degree: int | None = 8
    """The most stages that the cost model may choose."""
    min_chunk_size: int = 512
    max_num_chunks: int = 64
    alg: object = UniformOverlapAlg()
    calc_cost_factor: float = 1.0
    """Microseconds per attended pair, all heads together. Both factors 1: Keel's own rates."""
    comm_cost_factor: float = 1.0
    """Microseconds per key row that travels."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", AttnOverlapMode(self.mode))
        if self.mode is AttnOverlapMode.DYNAMIC and self.degree not in (None, 1):
            raise ValueError(f"DYNAMIC mode chooses the degree: leave out degree={self.degree}")
        if self.degree is not None and self.degree < 0:
            raise ValueError(f"degree must not be negative, got {self.degree}")
        for name in ("dynamic_max_degree", "calc_cost_factor", "comm_cost_factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")

    @property
    def stages(self) -> int | Literal["auto"]:
        if self.degree is None or self.mode is AttnOverlapMode.DYNAMIC:
            return "auto"
        return self.degree


@dataclass(frozen=True)
class GrpCollConfig:
    """Sizes for the original's own collectives. No effect."""

    num_sms: int = 24
    nvl_chunk_size: int = 8
    nvl_buffer_size: int = 256
    rdma_chunk_size: int = 16
    rdma_buffer_size: int = 128
    num_nvl_bytes: int = int(2e9)
    num_rdma_bytes: int = 0


@dataclass(frozen=True)
class DistAttnConfig:
    dispatch_config: DispatchConfig = DispatchConfig()
    overlap_config: OverlapConfig = OverlapConfig()
    grpcoll_config: GrpCollConfig = GrpCollConfig()


_DEFAULT = DistAttnConfig()


def magi_attn_flex_key(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: GeneralAttnMaskType,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: Group,
    dist_attn_config: DistAttnConfig = _DEFAULT,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    chunk_size: int | None = None,
) -> DistAttnRuntimeKey:
    """`keel.distributed.flex_key`. Heads serve the cost model; pad_size and chunk_size nothing.

    Tokens that may not be permuted stay in order, one piece per rank. With is_same_source=False
    (cross-attention) so do keys; `dispatch(x, key, keys=True)` selects them.
    """
    mask = AttnMask.from_ranges(q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k)
    _say("magi_attn_*_key", logging.INFO, _given(pad_size=pad_size, chunk_size=chunk_size))
    in_order = isinstance(dist_attn_config.dispatch_config.alg, SequentialDispatchAlg)
    in_order |= not is_q_permutable or (is_same_source and not is_k_permutable)
    key = _make_key(
        *(mask, dist_attn_config, (num_heads_q, num_heads_kv, head_dim)),
        group=cp_group_or_mesh,
        balance="contiguous" if in_order else "solver",
        k_balance=None if is_same_source else "contiguous",
    )
    return _remember(key)


def magi_attn_varlen_key(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: Group,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig = _DEFAULT,
    chunk_size: int | None = None,
) -> DistAttnRuntimeKey:
    """`magi_attn_flex_key` of packed documents."""
    q, k, types, *totals = infer_attn_mask_from_cu_seqlens(
        cu_seqlens_q, cu_seqlens_k, causal, window_size
    )
    return magi_attn_flex_key(
        *(q, k, types, totals[0], totals[1], num_heads_q, num_heads_kv, head_dim, pad_size),
        cp_group_or_mesh=cp_group_or_mesh,
        dist_attn_config=dist_attn_config,
        chunk_size=chunk_size,
    )


def make_flex_key_for_new_mask_after_dispatch(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: GeneralAttnMaskType,
    key_for_dispatch: DistAttnRuntimeKey,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    dist_attn_config: DistAttnConfig | None = None,
) -> DistAttnRuntimeKey:
    """Another mask on the tokens of a key; without a config also with that key's degrees."""
    old, where = key_for_dispatch, "make_*_key_for_new_mask_after_dispatch"
    mask = AttnMask.from_ranges(q_ranges, k_ranges, attn_mask_type, *old.mask.shape)
    if dist_attn_config is None:
        heads = _given(num_heads_q=num_heads_q, num_heads_kv=num_heads_kv, head_dim=head_dim)
        _say(f"{where} without dist_attn_config", logging.INFO, heads)
        return _remember(old.with_mask(mask))
    if dist_attn_config.dispatch_config != DispatchConfig():
        _say(where, logging.WARNING, ["dispatch_config"])
    made = _make_key(
        mask,
        replace(dist_attn_config, dispatch_config=DispatchConfig()),
        (num_heads_q, num_heads_kv, head_dim),
        num_ranks=old.num_ranks,
        balance=old.q_layout,
        k_balance=old.k_layout,
        keep_remote_keys=old.keep_remote_keys,
    )
    degrees = {"degree": made.degree, "backward_degree": made.backward_degree}
    return _remember(replace(old.with_mask(mask), **degrees))  # type: ignore[arg-type]


def make_varlen_key_for_new_mask_after_dispatch(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    key_for_dispatch: DistAttnRuntimeKey,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig | None = None,
) -> DistAttnRuntimeKey:
    """Other documents on the tokens of a key."""
    made = infer_attn_mask_from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, causal, window_size)
    return make_flex_key_for_new_mask_after_dispatch(
        *made[:3], key_for_dispatch, dist_attn_config=dist_attn_config
    )


def dispatch(
    x: Tensor, key: DistAttnRuntimeKey, pad_value: float = 0.0, *, keys: bool = False
) -> Tensor:
    """This rank's rows of a tensor that every rank holds.

    The backward collects gradients of the rows from all ranks: each rank gets all of x's. There
    are no rows of padding to get pad_value. keys: the rows of keys, in cross-attention.
    """
    _say("dispatch", logging.INFO, _given(pad_value=pad_value))
    rows: Tensor = _Dispatch.apply(x, key, keys)
    return rows


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: DistAttnRuntimeKey, keys: bool) -> Tensor:
        ctx.key, ctx.keys = key, keys
        return distributed.dispatch(x, key, keys=keys)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return distributed.undispatch(grad, ctx.key, keys=ctx.keys), None, None


def undispatch(
    x: Tensor, key: DistAttnRuntimeKey, is_partial_grad: bool = False, *, keys: bool = False
) -> Tensor:
    """The rows of all ranks in global order; is_partial_grad: the backward sums over ranks."""
    return distributed.undispatch(x, key, keys=keys, replicated=not is_partial_grad)


def roll(x: Tensor, shift: int, dim: int, key: DistAttnRuntimeKey, *, keys: bool = False) -> Tensor:
    """torch.roll along the global token axis, which local tensors have in dim."""
    return distributed.roll(x, shift, key, dim, keys=keys)


def calc_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: DistAttnRuntimeKey,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
) -> tuple[Tensor, AttnForwardMeta]:
    """`keel.distributed.calc_attn`; sink is (tokens, hq) or (hq,).

    The sink's gradient is that of local rows: sum it over ranks, like that of any weight.
    """
    variable = "MAGI_ATTENTION_DSINK_ALL_REDUCE_OP"
    if sink is not None and os.environ.get(variable, "none") != "none":
        raise ValueError(f"{variable} is not supported: unset it, and all-reduce the sink's grad")
    return distributed.calc_attn(
        *(q, k, v, key),
        sink=_one_token(sink),
        softmax_scale=softmax_scale,
        softcap=softcap,
        return_max_logits=return_max_logits,
    )


TUNING = (
    *("disable_fwd_atomic_reduction", "disable_bwd_dkv_atomic_reduction", "ref_block_size"),
    *("max_seqlen_q", "auto_range_merge", "swap_ab", "pack_gqa", "cat_gqa", "sparse_load"),
    "swap_bwd_qk_loop",
)
"""What `flex_flash_attn_func` takes without effect: choices among the original's kernels."""


def flex_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ranges: Tensor | None = None,
    k_ranges: Tensor | None = None,
    attn_type_map: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    **options: Any,
) -> tuple[Tensor, AttnForwardMeta]:
    """`keel.flex_flash_attn_func` and its options, with sink (tokens, hq) or (hq,), and TUNING."""
    blocks = options.pop("q_block_size", 1), options.pop("k_block_size", 1)
    indices, indexed = options.pop("index_attn_indices", None), options.pop("index_attn", False)
    if indexed or indices is not None or blocks != (1, 1):
        raise ValueError("attention by indices or blocks is not supported: give ranges")
    if q_ranges is None or k_ranges is None:
        raise ValueError("q_ranges and k_ranges must both be given")
    if sink_layout != "sh":
        raise ValueError(
            f"sink_layout must be 'sh', the same sink in all rows; got {sink_layout!r}"
        )
    tuned = {name: options.pop(name) for name in TUNING if name in options}
    _say("flex_flash_attn_func", logging.INFO, _given(**tuned))
    return attention.flex_flash_attn_func(
        *(q, k, v, q_ranges, k_ranges, attn_type_map), sink=_one_token(sink), **options
    )


def get_position_ids(key: DistAttnRuntimeKey) -> Tensor:
    """(local queries,) int64 global numbers, on the GPU where the group's backend is NCCL."""
    nccl = key.group is not None and dist.get_backend(key.group) == "nccl"
    return key.position_ids("cuda" if nccl else "cpu")


def get_most_recent_key(cp_group: dist.ProcessGroup) -> DistAttnRuntimeKey:
    """The last key that was made for a group."""
    if cp_group not in _recent:
        raise ValueError(f"no key was made for {cp_group}")
    return _recent[cp_group]


def clear_cache(cp_group: dist.ProcessGroup | None = None) -> None:
    """Forgets the last key of a group, or of all; keys that the caller holds stay good."""
    for group in list(_recent) if cp_group is None else [cp_group]:
        _recent.pop(group, None)


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Tokens missing to a multiple of cp_size * chunk_size. Nothing here needs them."""
    return -total_seqlen_q % (cp_size * chunk_size)


def squash_batch_dim(x: Tensor) -> Tensor:
    """(b, s, ...) -> (b * s, ...)."""
    return x.flatten(0, 1)


def infer_attn_mask_from_sliding_window(
    q_range: AttnRange, k_range: AttnRange, window_size: tuple[int, int]
) -> Ranges:
    """Query i, at p = i + len(k) - len(q), sees keys [p - left, p + right]; nothing if p < 0.

    >>> infer_attn_mask_from_sliding_window(AttnRange(0, 6), AttnRange(0, 6), (2, 0))[:2]
    (AttnRanges([(0, 2), (2, 6)]), AttnRanges([(0, 2), (0, 6)]))
    """
    return _windows([(q_range, k_range)], window_size)


def infer_attn_mask_from_cu_seqlens(
    cu_seqlens_q: Tensor | list[int],
    cu_seqlens_k: Tensor | list[int],
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    global_window_size: int = 0,
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType], int, int]:
    """(q_ranges, k_ranges, types, total_seqlen_q, total_seqlen_k) of packed documents.

    With a window, the first global_window_size keys of a document stay visible from any distance,
    but never ahead of the window.
    """
    bounds = [torch.as_tensor(x).tolist() for x in (cu_seqlens_q, cu_seqlens_k)]
    q, k = (AttnRanges.from_cu_seqlens(x) for x in bounds)
    if len(q) != len(k):
        raise ValueError(f"cu_seqlens bound {len(q)} documents of queries and {len(k)} of keys")
    made: Ranges = q, k, [AttnMaskType.CAUSAL if causal else AttnMaskType.FULL] * len(q)
    if tuple(window_size) != (-1, -1):
        if causal:
            raise ValueError(f"causal and window {window_size}: say (left, 0) without causal")
        made = _windows(zip(q, k, strict=True), window_size, global_window_size)
    return *made, bounds[0][-1], bounds[1][-1]


def _windows(
    pairs: Iterable[tuple[AttnRange, AttnRange]], window: tuple[int, int], num_global: int = 0
) -> Ranges:
    """Each document's first keys up to the right side, then the window over its other keys.

    Rows are cut where a side of the window begins or ends to move, which makes the types.
    """
    left, right = window
    if min(left, right) < -1 or num_global < 0:
        raise ValueError(f"windows must be -1 or sizes, got {window} and {num_global} global keys")
    q_ranges, k_ranges, types = AttnRanges(), AttnRanges(), []
    for q, k in pairs:
        lowest, highest, diagonal = k.start - q.end, k.end - q.start, k.end - q.end
        lo = lowest if left == -1 else max(lowest, diagonal - left)
        hi = highest if right == -1 else min(highest, diagonal + right)
        split = min(k.start + num_global, k.end)
        for k0, k1, low in ((k.start, split, lowest), (split, k.end, lo)):
            first = max(q.start, q.end - len(k), k0 - hi)
            last = min(q.end, k1 - low)
            moves, stops = k0 - low, k1 - hi  # the left side from here on, the right until here
            cuts = sorted({first, last, *(row for row in (moves, stops) if first < row < last)})
            for a, b in pairwise(cuts if k0 < k1 and first < last else []):
                q_ranges.append((a, b))
                k_ranges.append((max(k0, a + low), min(k1, b + hi)))
                types.append(AttnMaskType((a < stops) + 2 * (a >= moves)))
    return q_ranges, k_ranges, types


def _make_key(
    mask: AttnMask, config: DistAttnConfig, heads: tuple[int | None, ...], **options: Any
) -> DistAttnRuntimeKey:
    overlap, alg = config.overlap_config, config.dispatch_config.alg
    _say("environment", logging.WARNING, [x for x in os.environ if x.startswith("MAGI_ATTENTION_")])
    _say("DispatchConfig", logging.INFO, _given(chunk_size=config.dispatch_config.chunk_size))
    if not isinstance(alg, MinHeapDispatchAlg | SequentialDispatchAlg):
        _say("DispatchConfig", logging.WARNING, ["alg"])
    idle = ("min_chunk_size", "max_num_chunks", "alg")
    _say("OverlapConfig", logging.WARNING, [x for x in _changed(overlap) if x in idle])
    _say("GrpCollConfig", logging.WARNING, _changed(config.grpcoll_config))
    names = ("num_heads", "num_kv_heads", "head_dim")
    cost = CostModel(**{n: x for n, x in zip(names, heads, strict=True) if x is not None})
    if (overlap.calc_cost_factor, overlap.comm_cost_factor) != (1.0, 1.0):
        tflops = 2e-6 * cost.num_heads * cost.dims / overlap.calc_cost_factor
        rate = 1e-3 * cost.row_bytes / overlap.comm_cost_factor
        cost = replace(cost, tflops=tflops, backward_tflops=0.8 * tflops, gb_per_s=rate)
    key = distributed.flex_key(mask, degree=overlap.stages, cost=cost, **options)
    if overlap.stages != "auto" or overlap.dynamic_max_degree is None:
        return key
    both = [min(x, overlap.dynamic_max_degree) for x in (key.degree, key.backward_degree)]
    return replace(key, degree=both[0], backward_degree=both[1])


def _remember(key: DistAttnRuntimeKey) -> DistAttnRuntimeKey:
    if key.group is not None:
        _recent[key.group] = key
    return key


def _one_token(sink: Tensor | None) -> Tensor | None:
    """(tokens, hq) -> (hq,): tokens without values weigh in a softmax like one of their lse."""
    if sink is None or sink.ndim != 2:
        return sink
    none = (sink == -torch.inf).all(0)  # logsumexp would have the gradient NaN there
    return sink.masked_fill(none, 0.0).logsumexp(0).masked_fill(none, -torch.inf)


def _changed(config: Any) -> list[str]:
    return [x.name for x in fields(config) if getattr(config, x.name) != x.default]


def _given(**settings: Any) -> list[str]:
    return [name for name, value in settings.items() if value]


def _say(where: str, level: int, names: list[str]) -> None:
    for name in names:
        if (where, name) not in _said:
            _said.add((where, name))
            logger.log(level, "keel.compat.magi: %s of %s has no effect", name, where)
