"""MagiAttention's names and signatures on `keel.distributed`.

Code that imports from `magi_attention.api` runs with this module in its place. What differs:
nothing is padded, so ranks may hold unequal numbers of tokens; a pair that several slices cover
attends once; of the original's environment variables only those of the SM margin are read. Settings
that only tuned its internals are accepted, and the log names each of them once; what has no meaning
here is an error.

>>> q_ranges, k_ranges, types, *totals = infer_attn_mask_from_cu_seqlens([0, 4, 6], [0, 4, 6], True)
>>> q_ranges, types[0].name, totals
(AttnRanges([(0, 4), (4, 6)]), 'CAUSAL', [6, 6])
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from keel import attention, distributed
from keel._versions import backend_of
from keel.compat.magi_config import AttnOverlapMode as AttnOverlapMode
from keel.compat.magi_config import BSDispatchAlg as BSDispatchAlg
from keel.compat.magi_config import DispatchAlg as DispatchAlg
from keel.compat.magi_config import DispatchConfig as DispatchConfig
from keel.compat.magi_config import DistAttnConfig as DistAttnConfig
from keel.compat.magi_config import DPDispatchAlg as DPDispatchAlg
from keel.compat.magi_config import GreedyOverlapAlg as GreedyOverlapAlg
from keel.compat.magi_config import GrpCollConfig as GrpCollConfig
from keel.compat.magi_config import LBDispatchAlg as LBDispatchAlg
from keel.compat.magi_config import MinHeapDispatchAlg as MinHeapDispatchAlg
from keel.compat.magi_config import OverlapAlg as OverlapAlg
from keel.compat.magi_config import OverlapConfig as OverlapConfig
from keel.compat.magi_config import SequentialDispatchAlg as SequentialDispatchAlg
from keel.compat.magi_config import SortedSequentialSelectAlg as SortedSequentialSelectAlg
from keel.compat.magi_config import ToppHeapDispatchAlg as ToppHeapDispatchAlg
from keel.compat.magi_config import UniformOverlapAlg as UniformOverlapAlg
from keel.compat.magi_functools import apply_padding as apply_padding
from keel.compat.magi_functools import compute_pad_size as compute_pad_size
from keel.compat.magi_functools import (
    infer_attn_mask_from_cu_seqlens as infer_attn_mask_from_cu_seqlens,
)
from keel.compat.magi_functools import (
    infer_attn_mask_from_sliding_window as infer_attn_mask_from_sliding_window,
)
from keel.compat.magi_functools import infer_varlen_mask_from_batch as infer_varlen_mask_from_batch
from keel.compat.magi_functools import pad_at_dim as pad_at_dim
from keel.compat.magi_functools import squash_batch_dim as squash_batch_dim
from keel.compat.magi_functools import unpad_at_dim as unpad_at_dim
from keel.distributed import AttnKey
from keel.distributed.cost import CostModel
from keel.masks import AttnMask
from keel.masks import AttnMaskType as AttnMaskType
from keel.masks import AttnRange as AttnRange
from keel.masks import AttnRanges as AttnRanges
from keel.meta import AttnForwardMeta as AttnForwardMeta
from keel.overlap.control import BACKWARD_MARGIN, FORWARD_MARGIN

Tensor = torch.Tensor
Group = dist.ProcessGroup | DeviceMesh
DistAttnRuntimeKey = AttnKey
RangeError = ValueError
GeneralAttnMaskType = str | int | AttnMaskType | Sequence[str | int | AttnMaskType]

logger = logging.getLogger("keel")

_said: set[tuple[str, str]] = set()


_DEFAULT = DistAttnConfig()


class DistAttnRuntimeDictManager:
    """The keys that were made for each group, in the order in which they were last made.

    Keys need no cache to work: this is for code that asks for them. The oldest are forgotten.
    """

    def __init__(self, max_size_per_group: int) -> None:
        self.max_size_per_group = max_size_per_group
        self._keys: dict[dist.ProcessGroup, dict[DistAttnRuntimeKey, DistAttnRuntimeKey]] = {}

    def get(
        self, key: DistAttnRuntimeKey, default: DistAttnRuntimeKey | None = None
    ) -> DistAttnRuntimeKey | None:
        """The key that was made with the same value."""
        return self._of(key.group).get(key, default)

    def __contains__(self, key: DistAttnRuntimeKey) -> bool:
        return key in self._of(key.group)

    def __getitem__(self, key: DistAttnRuntimeKey) -> DistAttnRuntimeKey:
        return self._of(key.group)[key]

    def __setitem__(self, key: DistAttnRuntimeKey, value: DistAttnRuntimeKey) -> None:
        assert key.group is not None
        keys = self._keys.setdefault(key.group, {})
        keys.pop(key, None)  # to the end
        keys[key] = value
        if len(keys) > self.max_size_per_group:
            del keys[next(iter(keys))]

    def keys(self, cp_group: dist.ProcessGroup | None = None) -> list[DistAttnRuntimeKey]:
        """Of a group, or of all; the oldest first."""
        groups = list(self._keys) if cp_group is None else [cp_group]
        return [key for group in groups for key in self._of(group)]

    def get_most_recent_key(self, cp_group: dist.ProcessGroup) -> DistAttnRuntimeKey | None:
        return next(reversed(self._of(cp_group).values()), None)

    def clear(self, cp_group: dist.ProcessGroup | None = None) -> None:
        for group in list(self._keys) if cp_group is None else [cp_group]:
            self._keys.pop(group, None)

    def _of(self, group: dist.ProcessGroup | None) -> dict[DistAttnRuntimeKey, DistAttnRuntimeKey]:
        return {} if group is None else self._keys.get(group, {})


dist_attn_runtime_dict_mgr = DistAttnRuntimeDictManager(max_size_per_group=1000)


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
    (cross-attention) keys have a layout of their own; `dispatch(x, key, keys=True)` selects them.
    """
    mask = AttnMask.from_ranges(q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k)
    _say("magi_attn_*_key", logging.INFO, _given(pad_size=pad_size, chunk_size=chunk_size))
    in_order = isinstance(dist_attn_config.dispatch_config.alg, SequentialDispatchAlg)
    in_order |= not is_q_permutable or (is_same_source and not is_k_permutable)
    key = _make_key(
        *(mask, dist_attn_config, (num_heads_q, num_heads_kv, head_dim)),
        group=cp_group_or_mesh,
        balance="contiguous" if in_order else "solver",
        k_balance=None if is_same_source else "solver" if is_k_permutable else "contiguous",
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


def magi_attn_flex_dispatch(
    x: Tensor,
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
) -> tuple[Tensor, DistAttnRuntimeKey]:
    """(this rank's rows of x, the key): `magi_attn_flex_key` and `dispatch` in one call."""
    key = magi_attn_flex_key(
        *(q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k, num_heads_q),
        *(num_heads_kv, head_dim, pad_size, cp_group_or_mesh),
        dist_attn_config=dist_attn_config,
        is_same_source=is_same_source,
        is_q_permutable=is_q_permutable,
        is_k_permutable=is_k_permutable,
        chunk_size=chunk_size,
    )
    return dispatch(x, key), key


def magi_attn_varlen_dispatch(
    x: Tensor,
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
) -> tuple[Tensor, DistAttnRuntimeKey]:
    """(this rank's rows of x, the key): `magi_attn_varlen_key` and `dispatch` in one call."""
    key = magi_attn_varlen_key(
        *(cu_seqlens_q, cu_seqlens_k, num_heads_q, num_heads_kv, head_dim, pad_size),
        cp_group_or_mesh=cp_group_or_mesh,
        causal=causal,
        window_size=window_size,
        dist_attn_config=dist_attn_config,
        chunk_size=chunk_size,
    )
    return dispatch(x, key), key


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


roll_simple = roll
"""The original's second way to send the same rows."""


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


MARGINS = (FORWARD_MARGIN, BACKWARD_MARGIN)
"""Variables that `keel.distributed.calc_attn` reads."""

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
    on_gpu = key.group is not None and backend_of(key.group, torch.device("cuda")) == "nccl"
    return key.position_ids("cuda" if on_gpu else "cpu")


def get_most_recent_key(cp_group: dist.ProcessGroup) -> DistAttnRuntimeKey:
    """The last key that was made for a group."""
    key = dist_attn_runtime_dict_mgr.get_most_recent_key(cp_group)
    if key is None:
        raise ValueError(f"no key was made for {cp_group}")
    return key


def clear_cache(cp_group: dist.ProcessGroup | None = None) -> None:
    """Forgets the keys of a group, or of all; keys that the caller holds stay good."""
    dist_attn_runtime_dict_mgr.clear(cp_group)


def _make_key(
    mask: AttnMask, config: DistAttnConfig, heads: tuple[int | None, ...], **options: Any
) -> DistAttnRuntimeKey:
    overlap, alg = config.overlap_config, config.dispatch_config.alg
    unread = [x for x in os.environ if x.startswith("MAGI_ATTENTION_") and x not in MARGINS]
    _say("environment", logging.WARNING, unread)
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
        dist_attn_runtime_dict_mgr[key] = key
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
