"""keel.compat.magi on one process: signatures, settings, masks and sinks."""

from __future__ import annotations

import inspect
import logging
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

import keel
from keel import masks
from keel.compat import magi
from keel.distributed import AttnKey, flex_key, layout
from keel.distributed.cost import CostModel
from keel.masks import AttnMask, AttnMaskType, AttnRange, AttnRanges

SIGNATURES = {
    "magi_attn_flex_key": "q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k, "
    "num_heads_q, num_heads_kv, head_dim, pad_size, cp_group_or_mesh, "
    "dist_attn_config=DistAttnConfig(), is_same_source=True, is_q_permutable=True, "
    "is_k_permutable=True, chunk_size=None",
    "magi_attn_varlen_key": "cu_seqlens_q, cu_seqlens_k, num_heads_q, num_heads_kv, head_dim, "
    "pad_size, cp_group_or_mesh, causal=False, window_size=(-1, -1), "
    "dist_attn_config=DistAttnConfig(), chunk_size=None",
    "make_flex_key_for_new_mask_after_dispatch": "q_ranges, k_ranges, attn_mask_type, "
    "key_for_dispatch, num_heads_q=None, num_heads_kv=None, head_dim=None, dist_attn_config=None",
    "make_varlen_key_for_new_mask_after_dispatch": "cu_seqlens_q, cu_seqlens_k, key_for_dispatch, "
    "causal=False, window_size=(-1, -1), dist_attn_config=None",
    "magi_attn_flex_dispatch": "x, q_ranges, k_ranges, attn_mask_type, total_seqlen_q, "
    "total_seqlen_k, num_heads_q, num_heads_kv, head_dim, pad_size, cp_group_or_mesh, "
    "dist_attn_config=DistAttnConfig(), is_same_source=True, is_q_permutable=True, "
    "is_k_permutable=True, chunk_size=None",
    "magi_attn_varlen_dispatch": "x, cu_seqlens_q, cu_seqlens_k, num_heads_q, num_heads_kv, "
    "head_dim, pad_size, cp_group_or_mesh, causal=False, window_size=(-1, -1), "
    "dist_attn_config=DistAttnConfig(), chunk_size=None",
    "dispatch": "x, key, pad_value=0.0",
    "undispatch": "x, key, is_partial_grad=False",
    "roll": "x, shift, dim, key",
    "roll_simple": "x, shift, dim, key",
    "calc_attn": "q, k, v, key, sink=None, softmax_scale=None, softcap=0.0, "
    "return_max_logits=False",
    "flex_flash_attn_func": "q, k, v, q_ranges=None, k_ranges=None, attn_type_map=None",
    "get_position_ids": "key",
    "get_most_recent_key": "cp_group",
    "clear_cache": "cp_group=None",
    "compute_pad_size": "total_seqlen_q, cp_size, chunk_size",
    "squash_batch_dim": "x",
    "infer_varlen_mask_from_batch": "batch_size, seq_len, device='cuda'",
    "pad_at_dim": "x, dim, pad_size, value=0.0, side='right'",
    "unpad_at_dim": "x, dim, pad_size",
    "apply_padding": "q_ranges, k_ranges, attn_mask_type, total_seqlen, pad_size",
    "DistAttnRuntimeDictManager": "max_size_per_group",
    "infer_attn_mask_from_sliding_window": "q_range, k_range, window_size",
    "infer_attn_mask_from_cu_seqlens": "cu_seqlens_q, cu_seqlens_k, causal=False, "
    "window_size=(-1, -1), global_window_size=0",
}
"""The original's parameters, as far as they may be passed by position."""

NAMES = (
    *("magi_attn_varlen_key", "magi_attn_varlen_dispatch", "magi_attn_flex_key"),
    *("magi_attn_flex_dispatch", "dispatch", "undispatch", "roll", "roll_simple", "calc_attn"),
    *("clear_cache", "get_most_recent_key", "get_position_ids", "flex_flash_attn_func"),
    *("make_varlen_key_for_new_mask_after_dispatch", "make_flex_key_for_new_mask_after_dispatch"),
    *("compute_pad_size", "squash_batch_dim", "infer_varlen_mask_from_batch"),
    *("infer_attn_mask_from_sliding_window", "infer_attn_mask_from_cu_seqlens"),
    *("AttnForwardMeta", "AttnMaskType", "AttnOverlapMode", "AttnRanges", "DistAttnRuntimeKey"),
    *("GeneralAttnMaskType", "DistAttnConfig", "DispatchConfig", "OverlapConfig", "GrpCollConfig"),
    *("DispatchAlg", "MinHeapDispatchAlg", "ToppHeapDispatchAlg", "SequentialDispatchAlg"),
    *("SortedSequentialSelectAlg", "LBDispatchAlg", "DPDispatchAlg", "BSDispatchAlg"),
    *("OverlapAlg", "UniformOverlapAlg", "GreedyOverlapAlg"),
    *("DistAttnRuntimeDictManager", "dist_attn_runtime_dict_mgr"),
)
"""All that `magi_attention.api` exports."""

FIELDS = {
    "ToppHeapDispatchAlg": {"top_p": 0.0},
    "SortedSequentialSelectAlg": {"allocation_ratio": 1.0},
    "UniformOverlapAlg": {"random_costs": False, "random_seed": None},
    "DispatchConfig": {"chunk_size": None, "uneven_shard": False, "alg": magi.MinHeapDispatchAlg()},
    "OverlapConfig": {
        "mode": magi.AttnOverlapMode.STATIC,
        "degree": 1,
        "dynamic_max_degree": 8,
        "min_chunk_size": 512,
        "max_num_chunks": 64,
        "alg": magi.UniformOverlapAlg(),
        "calc_cost_factor": 1.0,
        "comm_cost_factor": 1.0,
    },
    "GrpCollConfig": {
        "num_sms": 24,
        "nvl_chunk_size": 8,
        "nvl_buffer_size": 256,
        "rdma_chunk_size": 16,
        "rdma_buffer_size": 128,
        "num_nvl_bytes": 2_000_000_000,
        "num_rdma_bytes": 0,
    },
    "DistAttnConfig": {
        "dispatch_config": magi.DispatchConfig(),
        "overlap_config": magi.OverlapConfig(),
        "grpcoll_config": magi.GrpCollConfig(),
    },
}

FLEX_OPTIONS = {
    "index_attn_indices": None,
    "q_block_size": 1,
    "k_block_size": 1,
    "sink": None,
    "sink_layout": "sh",
    "softmax_scale": None,
    "softcap": 0.0,
    "deterministic": False,
    "sm_margin": 0,
    "disable_fwd_atomic_reduction": False,
    "disable_bwd_dkv_atomic_reduction": False,
    "ref_block_size": None,
    "max_seqlen_q": None,
    "auto_range_merge": False,
    "swap_ab": False,
    "pack_gqa": False,
    "cat_gqa": False,
    "sparse_load": False,
    "index_attn": False,
    "swap_bwd_qk_loop": False,
    "return_max_logits": False,
}


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(magi, "_said", set())


@pytest.fixture
def planned(monkeypatch):
    """Keys are made for rank 1 of 4, which need not be there; "auto" finds 3 stages.

    Gives the options with which flex_key was called.
    """
    asked = []

    def make(mask, **options):
        asked.append(dict(options))
        for name in ("group", "num_ranks"):
            options.pop(name, None)
        if options["degree"] == "auto":
            options["degree"] = 3
        return flex_key(mask, num_ranks=4, rank=1, **options)

    monkeypatch.setattr(magi.distributed, "flex_key", make)
    return asked


def named(caplog):
    """The settings that the log names, in order."""
    return [r.args[0] for r in caplog.records if "has no effect" in r.msg]


def make_key(n=64, config=None, *, tk=None, types="causal", **options):
    tk = n if tk is None else tk
    ranges = AttnRanges.from_ranges([(0, n)]), AttnRanges.from_ranges([(0, tk)])
    config = magi.DistAttnConfig() if config is None else config
    options = {"pad_size": 0, **options}
    return magi.magi_attn_flex_key(
        *(*ranges, types, n, tk, 8, 2, 16, options.pop("pad_size"), None, config), **options
    )


def overlapping(**options):
    return magi.DistAttnConfig(overlap_config=magi.OverlapConfig(**options))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    found = []
    for parameter in inspect.signature(getattr(magi, name)).parameters.values():
        default = parameter.default
        shown = "DistAttnConfig()" if default == magi.DistAttnConfig() else repr(default)
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            found.append(parameter.name + (f"={shown}" if default is not parameter.empty else ""))
    assert ", ".join(found) == SIGNATURES[name]


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name):
    assert {x.name: x.default for x in fields(getattr(magi, name))} == FIELDS[name]


def test_every_name_is_there():
    assert [name for name in NAMES if not hasattr(magi, name)] == []
    for name in NAMES:
        kind = getattr(magi, name)
        if name.endswith("Alg") and isinstance(kind, type):
            base = magi.OverlapAlg if "Overlap" in name else magi.DispatchAlg
            assert issubclass(kind, base) and kind() == kind()


def test_types_are_those_of_keel():
    assert magi.DistAttnRuntimeKey is AttnKey
    for name in ("AttnRange", "AttnRanges", "AttnMaskType", "AttnForwardMeta"):
        assert getattr(magi, name) is getattr(keel, name)


@pytest.mark.parametrize("degree", [0, 1, 3])
def test_degree(planned, degree):
    key = make_key(config=overlapping(degree=degree))
    assert (key.degree, key.backward_degree) == (degree, degree)


@pytest.mark.parametrize("options", [{"degree": None}, {"mode": "dynamic"}], ids=str)
def test_dynamic_degree(planned, options):
    cost = CostModel(num_heads=8, num_kv_heads=2, head_dim=16)
    for most, want in ((8, 3), (None, 3), (3, 3), (2, 2)):
        key = make_key(config=overlapping(dynamic_max_degree=most, **options))
        assert (key.degree, key.backward_degree) == (want, want)
        assert planned[-1]["degree"] == "auto" and planned[-1]["cost"] == cost


def test_cost_factors(planned):
    make_key(config=overlapping(degree=None, calc_cost_factor=3e-6, comm_cost_factor=0.25))
    cost, count = planned[0]["cost"], np.array(1_000_000)
    assert cost.compute_ms(count) == pytest.approx(3e-3)
    assert cost.compute_ms(count, True) == pytest.approx(3e-3 * 2.5 / 0.8)
    assert cost.transfer_ms(count) == pytest.approx(250, rel=1e-3)


def test_layouts(planned):
    """Tokens are permuted only where they may be; keys of another source have their own layout."""
    sequential = magi.DistAttnConfig(magi.DispatchConfig(alg=magi.SequentialDispatchAlg()))
    for options, q, k in (
        ({}, "solver", None),
        ({"config": sequential}, "contiguous", None),
        ({"is_q_permutable": False}, "contiguous", None),
        ({"is_k_permutable": False}, "contiguous", None),
        ({"is_same_source": False}, "solver", "solver"),
        ({"is_same_source": False, "is_k_permutable": False}, "solver", "contiguous"),
        ({"is_same_source": False, "is_q_permutable": False}, "contiguous", "solver"),
    ):
        make_key(**options)
        assert (planned[-1]["balance"], planned[-1]["k_balance"]) == (q, k), options
    cross = make_key(tk=96, is_same_source=False, is_k_permutable=False)
    assert cross.k_layout == layout.contiguous(96, 4) and cross.num_local_keys == 24
    with pytest.raises(ValueError, match="different tokens"):
        make_key(tk=96)


@pytest.mark.parametrize("types", ["causal", 1, AttnMaskType.CAUSAL, ["causal"], [1]], ids=repr)
def test_mask_types(planned, types):
    assert make_key(types=types).mask == masks.causal(64)


def test_varlen_key(planned):
    bounds = torch.tensor([0, 10, 64], dtype=torch.int32)
    key = magi.magi_attn_varlen_key(bounds, bounds, 8, 2, 16, 0, None, window_size=(4, 1))
    want = masks.documents(bounds, window=(4, 1))
    assert torch.equal(key.mask.to_dense(), want.to_dense())
    key = magi.magi_attn_varlen_key(bounds, bounds, 8, 2, 16, 0, None, True)
    assert torch.equal(key.mask.to_dense(), masks.documents(bounds, causal=True).to_dense())
    bounds[1] = 20  # tensors are read anew each time
    other = magi.magi_attn_varlen_key(bounds, bounds, 8, 2, 16, 0, None, True)
    assert other.mask != key.mask


def test_new_mask(planned):
    key = make_key(config=overlapping(degree=2))
    new = magi.make_flex_key_for_new_mask_after_dispatch([[0, 64]], [[0, 64]], "full", key)
    assert new.mask == masks.full(64) and new.q_layout == key.q_layout and new.degree == 2
    bounds = [0, 30, 64]
    new = magi.make_varlen_key_for_new_mask_after_dispatch(
        bounds, bounds, key, True, dist_attn_config=overlapping(degree=3)
    )
    assert torch.equal(new.mask.to_dense(), masks.documents(bounds, causal=True).to_dense())
    assert (new.q_layout, new.k_layout, new.rank) == (key.q_layout, key.k_layout, 1)
    assert (new.degree, new.backward_degree) == (3, 3)
    assert (planned[-1]["balance"], planned[-1]["k_balance"]) == (key.q_layout, key.k_layout)


def test_new_mask_of_a_key_that_keeps_remote_keys(planned):
    """Then both directions need the same stages, so whoever finds their number must know."""
    old = flex_key(masks.full(64), num_ranks=4, degree=1, keep_remote_keys=True)
    new = magi.make_flex_key_for_new_mask_after_dispatch(
        [[0, 64]], [[0, 64]], 1, old, dist_attn_config=overlapping(degree=None)
    )
    assert planned[-1]["keep_remote_keys"] and new.keep_remote_keys
    assert (new.degree, new.backward_degree) == (3, 3)


class Strange:
    """A dispatch or overlap algorithm that nobody knows."""


@pytest.mark.parametrize(
    ("options", "said", "level"),
    [
        ({"pad_size": 4}, ["pad_size"], "INFO"),
        ({"chunk_size": 16}, ["chunk_size"], "INFO"),
        (
            {"config": magi.DistAttnConfig(magi.DispatchConfig(chunk_size=9))},
            ["chunk_size"],
            "INFO",
        ),
        ({"config": magi.DistAttnConfig(magi.DispatchConfig(alg=Strange()))}, ["alg"], "WARNING"),
        (
            {"config": magi.DistAttnConfig(magi.DispatchConfig(alg=magi.DPDispatchAlg()))},
            ["alg"],
            "WARNING",
        ),
        ({"config": overlapping(alg=magi.GreedyOverlapAlg())}, ["alg"], "WARNING"),
        (
            {"config": overlapping(min_chunk_size=256, max_num_chunks=9, alg=Strange())},
            ["min_chunk_size", "max_num_chunks", "alg"],
            "WARNING",
        ),
        (
            {"config": magi.DistAttnConfig(grpcoll_config=magi.GrpCollConfig(num_sms=8))},
            ["num_sms"],
            "WARNING",
        ),
        ({"config": magi.DistAttnConfig(magi.DispatchConfig(uneven_shard=True))}, [], ""),
        ({"config": overlapping(degree=2)}, [], ""),
        ({}, [], ""),
    ],
)
def test_settings_without_effect_are_named_once(planned, caplog, options, said, level):
    with caplog.at_level(logging.INFO, "keel"):
        make_key(**options)
        make_key(**options)
    assert named(caplog) == said
    assert {r.levelname for r in caplog.records} == ({level} if said else set())
    assert all("has no effect" in r.getMessage() for r in caplog.records)


def test_new_masks_name_what_they_cannot_change(planned, caplog):
    key, ranges = make_key(), ([[0, 64]], [[0, 64]], 0)
    make = magi.make_flex_key_for_new_mask_after_dispatch
    sequential = magi.DistAttnConfig(magi.DispatchConfig(alg=magi.SequentialDispatchAlg()))
    with caplog.at_level(logging.INFO, "keel"):
        for _ in range(2):
            make(*ranges, key, num_heads_q=4)
            make(*ranges, key, num_heads_q=4, dist_attn_config=sequential)
    assert named(caplog) == ["num_heads_q", "dispatch_config"]


def test_environment_is_not_read(planned, caplog, monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_QO_COMM", "1")
    with caplog.at_level(logging.WARNING, "keel"):
        make_key()
        make_key()
    assert named(caplog) == ["MAGI_ATTENTION_QO_COMM"]


def test_sums_of_the_sinks_gradient_are_the_callers(planned, monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_DSINK_ALL_REDUCE_OP", "sum")
    x = torch.zeros(16, 8, 16)
    with pytest.raises(ValueError, match="DSINK_ALL_REDUCE_OP is not supported"):
        magi.calc_attn(x, x, x, make_key(), sink=torch.zeros(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"degree": -1}, "negative"),
        ({"mode": "dynamic", "degree": 2}, "leave out degree=2"),
        ({"mode": "sometimes"}, "sometimes"),
        ({"dynamic_max_degree": 0}, "dynamic_max_degree must be positive"),
        ({"calc_cost_factor": 0.0}, "calc_cost_factor must be positive"),
        ({"comm_cost_factor": -1.0}, "comm_cost_factor must be positive"),
    ],
)
def test_bad_overlap(options, message):
    with pytest.raises(ValueError, match=message):
        magi.OverlapConfig(**options)


def test_bad_keys(planned):
    with pytest.raises(ValueError, match="degree must be"):
        make_key(config=overlapping(degree=1000))
    with pytest.raises(ValueError, match="unknown mask type"):
        make_key(types="diagonal")
    with pytest.raises(ValueError, match="num_kv_heads"):
        magi.magi_attn_flex_key([[0, 8]], [[0, 8]], 0, 8, 8, 8, 0, 16, 0, None)
    with pytest.raises(ValueError, match="no key was made"):
        magi.get_most_recent_key("a group")


def test_dispatch_and_positions(planned, caplog):
    key, x = make_key(), torch.arange(64)
    with caplog.at_level(logging.INFO, "keel"):
        for _ in range(2):
            local = magi.dispatch(x, key, pad_value=-100)
    assert torch.equal(local, magi.get_position_ids(key))
    assert named(caplog) == ["pad_value"]


def test_keys_and_rows_in_one_call(planned):
    x, bounds = torch.arange(64), torch.tensor([0, 10, 64])
    ranges = AttnRanges.from_ranges([(0, 64)]), AttnRanges.from_ranges([(0, 64)])
    rows, key = magi.magi_attn_flex_dispatch(
        x,
        *ranges,
        "causal",
        64,
        64,
        8,
        2,
        16,
        0,
        None,
        overlapping(degree=3),
        is_q_permutable=False,
    )
    assert key == make_key(config=overlapping(degree=3), is_q_permutable=False)
    assert torch.equal(rows, magi.get_position_ids(key)) and planned[0]["balance"] == "contiguous"
    rows, key = magi.magi_attn_varlen_dispatch(
        x, bounds, bounds, 8, 2, 16, 0, None, False, (4, 1), overlapping(degree=2)
    )
    same = magi.magi_attn_varlen_key(
        bounds, bounds, 8, 2, 16, 0, None, False, (4, 1), overlapping(degree=2)
    )
    assert key == same and torch.equal(rows, magi.get_position_ids(key))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_padding_of_tensors(dim):
    x = torch.arange(1.0, 25).view(2, 3, 4)
    more = magi.pad_at_dim(x, dim, 2, value=-1.0)
    assert more.shape[dim] == x.shape[dim] + 2
    assert torch.equal(more.narrow(dim, 0, x.shape[dim]), x)
    assert (more.narrow(dim, x.shape[dim], 2) == -1).all()
    assert torch.equal(magi.unpad_at_dim(more, dim, 2), x)
    before = magi.pad_at_dim(x, dim, 2, side="left")
    assert torch.equal(before.narrow(dim, 2, x.shape[dim]), x)
    assert (before.narrow(dim, 0, 2) == 0).all()
    assert torch.equal(magi.pad_at_dim(x, dim, 0), x)


def test_padding_that_cannot_be():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="'left' or 'right', got 'both'"):
        magi.pad_at_dim(x, 0, 1, side="both")
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        magi.pad_at_dim(x, 0, -1)
    for size in (-1, 4):
        with pytest.raises(ValueError, match=f"cannot take {size} from dim 1"):
            magi.unpad_at_dim(x, 1, size)


def test_padding_of_masks():
    """Padded queries see nothing, and nobody sees padded keys."""
    q, k = AttnRanges.from_ranges([(0, 4), (4, 6)]), AttnRanges.from_ranges([(0, 4), (4, 6)])
    types = [AttnMaskType.CAUSAL, AttnMaskType.FULL]
    *padded, all_types = magi.apply_padding(q, k, types, 6, 2)
    assert [x.to_list() for x in padded] == [[(0, 4), (4, 6), (6, 8)], [(0, 4), (4, 6), (0, 0)]]
    assert all_types == [*types, AttnMaskType.FULL] and len(q) == len(k) == len(types) == 2
    dense = AttnMask.from_ranges(*padded, all_types, 8, 8).to_dense()
    assert torch.equal(dense[:6, :6], AttnMask.from_ranges(q, k, types, 6, 6).to_dense())
    assert not dense[6:].any() and not dense[:, 6:].any()


def test_batches_as_documents():
    q, k = magi.infer_varlen_mask_from_batch(3, 5, device="cpu")
    assert q.tolist() == k.tolist() == [0, 5, 10, 15] and q.dtype == torch.int32
    ranges, _, _, *totals = magi.infer_attn_mask_from_cu_seqlens(q, k)
    assert ranges.to_list() == [(0, 5), (5, 10), (10, 15)] and totals == [15, 15]


class Group:
    """Stands for a process group."""


def test_keys_that_were_made():
    manager = magi.DistAttnRuntimeDictManager(max_size_per_group=2)
    groups = [Group(), Group()]
    keys = [
        replace(flex_key(masks.causal(n), num_ranks=2, balance="zigzag", degree=1), group=group)
        for group in groups
        for n in (8, 9, 10)
    ]
    for key in keys[:3]:
        manager[key] = key
    assert manager.keys(groups[0]) == keys[1:3] and keys[0] not in manager
    manager[keys[1]] = keys[1]  # now the last
    assert manager.get_most_recent_key(groups[0]) is keys[1]
    assert manager.get_most_recent_key(groups[1]) is None
    manager[keys[3]] = keys[3]
    assert manager.keys() == [keys[2], keys[1], keys[3]]
    assert keys[3] in manager and manager[keys[3]] is manager.get(keys[3]) is keys[3]
    assert manager.get(keys[4]) is None and manager.get(keys[4], keys[0]) is keys[0]
    with pytest.raises(KeyError):
        manager[keys[4]]
    manager.clear(groups[0])
    assert manager.keys() == [keys[3]]
    manager.clear()
    assert manager.keys() == []


def test_small_helpers():
    sizes = [magi.compute_pad_size(n, 4, 128) for n in (512, 513, 1000, 0)]
    assert sizes == [0, 511, 24, 0]
    x = torch.arange(24).view(2, 3, 4)
    assert torch.equal(magi.squash_batch_dim(x), x.view(6, 4))


def seen(sq, sk, left, right, num_global=0):
    """What the docstrings say, row by row."""
    dense = torch.zeros(sq, sk, dtype=torch.bool)
    for i in range(sq):
        p = i + sk - sq
        for j in range(sk if p >= 0 else 0):
            behind = left == -1 or p - left <= j or j < num_global
            dense[i, j] = behind and (right == -1 or j <= p + right)
    return dense


@pytest.mark.parametrize(
    "lengths", [(9, 9), (5, 9), (9, 5), (1, 1), (1, 4), (0, 3), (3, 0)], ids=str
)
@pytest.mark.parametrize("left", [-1, 0, 2, 3, 8, 20])
def test_windows(lengths, left):
    for right in (-1, 0, 1, 4, 20):
        check_window(*lengths, left, right)


def check_window(sq, sk, left, right):
    q, k = AttnRange(3, 3 + sq), AttnRange(2, 2 + sk)
    made = magi.infer_attn_mask_from_sliding_window(q, k, (left, right))
    whole = AttnMask.from_ranges(*made, 20, 20)
    want = torch.zeros(20, 20, dtype=torch.bool)
    want[3 : 3 + sq, 2 : 2 + sk] = seen(sq, sk, left, right)
    assert torch.equal(whole.to_dense(), want)
    assert sum(s.area for s in whole) == whole.area()  # no pair twice
    if (left, right) == (-1, -1):
        return  # a window without sides: the types say it all
    for num_global in (0, 1, 3, 30):
        *made, tq, tk = magi.infer_attn_mask_from_cu_seqlens(
            [0, 4, 4 + sq], torch.tensor([0, 4, 4 + sk]), False, (left, right), num_global
        )
        assert (tq, tk) == (4 + sq, 4 + sk)
        whole = AttnMask.from_ranges(*made, tq, tk)
        want = torch.block_diag(
            seen(4, 4, left, right, num_global).int(), seen(sq, sk, left, right, num_global).int()
        )
        assert torch.equal(whole.to_dense(), want.bool())
        assert sum(s.area for s in whole) == whole.area()


def test_documents():
    q, k, types, tq, tk = magi.infer_attn_mask_from_cu_seqlens([0, 4, 6], [0, 4, 9], True)
    assert (q.to_list(), k.to_list()) == ([(0, 4), (4, 6)], [(0, 4), (4, 9)])
    assert (types, tq, tk) == ([AttnMaskType.CAUSAL] * 2, 6, 9)
    assert magi.infer_attn_mask_from_cu_seqlens([0, 4], [0, 4])[2] == [AttnMaskType.FULL]
    with pytest.raises(ValueError, match="2 documents of queries and 1 of keys"):
        magi.infer_attn_mask_from_cu_seqlens([0, 4, 6], [0, 4])
    with pytest.raises(ValueError, match="without causal"):
        magi.infer_attn_mask_from_cu_seqlens([0, 4], [0, 4], True, (2, 0))
    for bad in ((-2, 0), (0, -5)):
        with pytest.raises(ValueError, match="windows must be"):
            magi.infer_attn_mask_from_cu_seqlens([0, 4], [0, 4], False, bad)
    with pytest.raises(ValueError, match="-1 global"):
        magi.infer_attn_mask_from_cu_seqlens([0, 4], [0, 4], False, (2, 0), -1)


def inputs():
    random = torch.Generator().manual_seed(0)
    return [
        torch.randn(6, heads, 8, generator=random, dtype=torch.float64, requires_grad=True)
        for heads in (2, 1, 1)
    ]


def test_flex_flash_attn_func_takes_every_option(caplog):
    x, ranges = inputs(), (torch.tensor([[0, 6]]), torch.tensor([[0, 6]]), torch.tensor([1]))
    with caplog.at_level(logging.INFO, "keel"):
        out, meta = magi.flex_flash_attn_func(*x, *ranges, **FLEX_OPTIONS)
    want, same = keel.flex_flash_attn_func(*x, *ranges)
    assert torch.equal(out, want) and torch.equal(meta.lse, same.lse) and meta.max_logits is None
    assert named(caplog) == []
    options = {"softmax_scale": 0.5, "softcap": 2.0, "return_max_logits": True}
    out, meta = magi.flex_flash_attn_func(*x, *ranges, deterministic=True, **options)
    want, same = keel.flex_flash_attn_func(*x, *ranges, **options)
    assert torch.equal(out, want) and torch.equal(meta.max_logits, same.max_logits)
    tuned = dict.fromkeys(magi.TUNING, True)
    with caplog.at_level(logging.INFO, "keel"):
        magi.flex_flash_attn_func(*x, *ranges, **tuned)
        magi.flex_flash_attn_func(*x, *ranges, **tuned)
    assert named(caplog) == list(magi.TUNING)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"index_attn": True}, ValueError, "by indices"),
        ({"index_attn_indices": torch.zeros(1)}, ValueError, "by indices"),
        ({"q_block_size": 2}, ValueError, "blocks"),
        ({"k_ranges": None}, ValueError, "both be given"),
        ({"sink": torch.zeros(6, 2, 2), "sink_layout": "ssh"}, ValueError, "'ssh'"),
        ({"sink": torch.zeros(6, 2, 2)}, ValueError, "sink must have shape"),
        ({"sink": torch.zeros(3, 5)}, ValueError, "sink must have shape"),
        ({"swap_qk": True}, TypeError, "swap_qk"),
    ],
    ids=str,
)
def test_flex_flash_attn_func_refuses(options, error, message):
    options = {"q_ranges": [[0, 6]], "k_ranges": [[0, 6]], **options}
    with pytest.raises(error, match=message):
        magi.flex_flash_attn_func(*inputs(), **options)


def test_sinks_of_several_tokens():
    """Against a softmax in which every token of the sink has a column."""
    q, k, v = inputs()
    sink = torch.tensor([[0.5, -1.0], [2.0, 0.1], [-torch.inf, 1.0]], dtype=torch.float64)
    sink.requires_grad_()
    out, _ = magi.flex_flash_attn_func(q, k, v, [[0, 6]], [[0, 6]], 1, sink=sink)
    logits = torch.einsum("ihd,jd->hij", q, k[:, 0]) * 8**-0.5
    logits = logits.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    columns = sink.T[:, None].expand(-1, 6, -1)
    want = torch.cat([logits, columns], 2).softmax(2)[..., :6] @ v[:, 0]
    weights = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    torch.testing.assert_close(out, want.transpose(0, 1), atol=1e-12, rtol=0)
    got = torch.autograd.grad((out * weights).sum(), (q, k, v, sink))
    wants = torch.autograd.grad((want.transpose(0, 1) * weights).sum(), (q, k, v, sink))
    torch.testing.assert_close(got, wants, atol=1e-12, rtol=0)

    one = sink.detach().logsumexp(0)
    same, _ = magi.flex_flash_attn_func(q, k, v, [[0, 6]], [[0, 6]], 1, sink=one)
    torch.testing.assert_close(same, out, atol=1e-12, rtol=0)


def test_a_sink_that_is_off_has_no_gradient():
    x = inputs()
    sink = torch.tensor([[-torch.inf, 0.0], [-torch.inf, 1.0]], dtype=torch.float64)
    sink.requires_grad_()
    out, _ = magi.flex_flash_attn_func(*x, [[0, 6]], [[0, 6]], 0, sink=sink)
    plain, _ = magi.flex_flash_attn_func(*x, [[0, 6]], [[0, 6]], 0)
    torch.testing.assert_close(out[:, 0], plain[:, 0])
    (grad,) = torch.autograd.grad(out.square().sum(), sink)
    assert grad[:, 0].tolist() == [0.0, 0.0] and (grad[:, 1] != 0).all()
