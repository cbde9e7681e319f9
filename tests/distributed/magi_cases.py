"""What ranks do in test_magi.py: scripts as they are written for MagiAttention."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from keel.compat.magi import (
    AttnMaskType,
    AttnRange,
    AttnRanges,
    DistAttnConfig,
    DistAttnRuntimeKey,
    OverlapConfig,
    calc_attn,
    clear_cache,
    compute_pad_size,
    dispatch,
    get_most_recent_key,
    get_position_ids,
    infer_attn_mask_from_sliding_window,
    magi_attn_flex_key,
    magi_attn_varlen_key,
    make_flex_key_for_new_mask_after_dispatch,
    make_varlen_key_for_new_mask_after_dispatch,
    roll,
    roll_simple,
    undispatch,
)
from keel.masks import AttnMask

TOTAL, HEADS_Q, HEADS_KV, DIM, EMBED = 93, 4, 2, 8, 12
BOUNDS = [0, 20, 41, 77, TOTAL]
SLOW = {"calc_cost_factor": 1.0, "comm_cost_factor": 0.01}
"""Rates at which balance pays even for few tokens, so that they are permuted."""


def block_causal() -> tuple[AttnRanges, AttnRanges, list[AttnMaskType]]:
    q_ranges = AttnRanges.from_ranges(pairwise(BOUNDS))
    k_ranges = AttnRanges.from_ranges([(0, end) for end in BOUNDS[1:]])
    return q_ranges, k_ranges, [AttnMaskType.FULL] * len(q_ranges)


def normal(*shape: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask,
    sink: torch.Tensor | None = None,
    scale: float = DIM**-0.5,
    softcap: float = torch.inf,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, max_logits) in plain torch; each token of the sink is a column of its own."""
    shown = mask.to_dense()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("ihd,jhd->hij", q, k) * scale
    top = logits.masked_fill(~shown, -torch.inf).amax((1, 2))
    if softcap < torch.inf:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~shown, -torch.inf)
    if sink is not None:
        logits = torch.cat([logits, sink.T[:, None].expand(-1, len(q), -1)], 2)
    out = torch.einsum("hij,jhd->ihd", logits.softmax(2)[..., : len(k)], v)
    return out, logits.logsumexp(2).T, top


def qkv_projections() -> list[nn.Linear]:
    made = []
    for seed, heads in enumerate((HEADS_Q, HEADS_KV, HEADS_KV)):
        linear = nn.Linear(EMBED, heads * DIM, bias=False, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(normal(heads * DIM, EMBED, seed=seed))
        made.append(linear)
    return made


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape, (got.shape, want.shape)
    return float((got - want).abs().max())


def quickstart(rank: int, config: dict[str, Any]) -> dict[str, float]:
    """Key, dispatch, projections, calc_attn, undispatch, backward; largest differences."""
    world_size = dist.get_world_size()
    weights = normal(TOTAL, HEADS_Q, DIM, seed=9)
    q_ranges, k_ranges, attn_mask_type = block_causal()

    x = normal(TOTAL, EMBED, seed=3).requires_grad_()
    sink = nn.Parameter(normal(3, HEADS_Q, seed=4))
    chunk_size = 16
    key = magi_attn_flex_key(
        q_ranges=q_ranges,
        k_ranges=k_ranges,
        attn_mask_type=attn_mask_type,
        total_seqlen_q=TOTAL,
        total_seqlen_k=TOTAL,
        num_heads_q=HEADS_Q,
        num_heads_kv=HEADS_KV,
        head_dim=DIM,
        pad_size=compute_pad_size(TOTAL, world_size, chunk_size),
        chunk_size=chunk_size,
        cp_group_or_mesh=dist.group.WORLD,
        dist_attn_config=DistAttnConfig(overlap_config=OverlapConfig(**SLOW, **config)),
    )
    local_x = dispatch(x, key=key)
    projections = qkv_projections()
    q, k, v = (
        project(local_x).view(-1, project.out_features // DIM, DIM) for project in projections
    )
    scoring = {"softmax_scale": 0.3, "softcap": 5.0}
    local_out, meta = calc_attn(
        q=q, k=k, v=v, key=key, sink=sink, return_max_logits=True, **scoring
    )
    total_out = undispatch(x=local_out, key=key)
    (total_out * weights).sum().backward()
    for parameter in (sink, *(p.weight for p in projections)):
        dist.all_reduce(parameter.grad)

    one_x, one_sink = x.detach().clone().requires_grad_(), nn.Parameter(sink.detach().clone())
    one = qkv_projections()
    q, k, v = (project(one_x).view(-1, project.out_features // DIM, DIM) for project in one)
    mask = AttnMask.from_ranges(q_ranges, k_ranges, attn_mask_type, TOTAL, TOTAL)
    out, lse, top = dense_attention(q, k, v, mask, one_sink, *scoring.values())
    (out * weights).sum().backward()
    assert 0 < len(local_x) < TOTAL and meta.max_logits is not None
    assert one_x.grad is not None and x.grad is not None
    found = {
        "out": gap(total_out, out),
        "lse": gap(meta.lse, lse[get_position_ids(key)]),
        "max_logits": gap(meta.max_logits, top),
        "dx": gap(x.grad, one_x.grad),
        "dsink": gap(sink.grad, one_sink.grad),
    }
    for name, a, b in zip("qkv", projections, one, strict=True):
        found[f"d{name}_proj"] = gap(a.weight.grad, b.weight.grad)
    return found


def causal_key(degree: int = 1) -> DistAttnRuntimeKey:
    bounds = torch.tensor([0, 30, TOTAL], dtype=torch.int32)
    return magi_attn_varlen_key(
        *(bounds, bounds, HEADS_Q, HEADS_KV, DIM, 0, dist.group.WORLD),
        causal=True,
        dist_attn_config=DistAttnConfig(overlap_config=OverlapConfig(degree=degree, **SLOW)),
    )


def new_masks(rank: int) -> dict[str, float]:
    """Three masks, one layout: tokens are dispatched once."""
    key = causal_key()
    whole = [normal(TOTAL, heads, DIM, seed=h) for h, heads in enumerate((HEADS_Q, HEADS_KV, 2))]
    local = [dispatch(x, key) for x in whole]
    every = AttnRange(0, TOTAL)
    window = infer_attn_mask_from_sliding_window(every, every, (17, 0))
    bounds = torch.tensor([0, 50, TOTAL])
    two = DistAttnConfig(overlap_config=OverlapConfig(degree=2))
    keys = {
        "window": make_flex_key_for_new_mask_after_dispatch(*window, key),
        "types": make_flex_key_for_new_mask_after_dispatch(
            AttnRanges.from_ranges([(0, 17), (17, TOTAL)]),
            AttnRanges.from_ranges([(0, 17), (0, TOTAL)]),
            ["causal", "bi_causal"],
            key,
        ),
        "documents": make_varlen_key_for_new_mask_after_dispatch(
            bounds, bounds, key, window_size=(9, 2), dist_attn_config=two
        ),
    }
    assert get_most_recent_key(dist.group.WORLD) is keys["documents"]
    again = make_flex_key_for_new_mask_after_dispatch(*window, key)
    assert get_most_recent_key(dist.group.WORLD) is again and again == keys["window"]
    assert keys["documents"].degree == keys["documents"].backward_degree == 2
    assert keys["window"].degree == key.degree == 1
    i = torch.arange(TOTAL)
    distance = i[:, None] - i
    same = torch.bucketize(i, bounds[1:], right=True)
    behind = (distance >= 0) & (distance <= 17)
    near = (distance >= -2) & (distance <= 9) & (same[:, None] == same)
    shown = {"window": behind, "types": behind, "documents": near}
    found = {}
    for name, new in keys.items():
        assert torch.equal(get_position_ids(new), get_position_ids(key))
        assert torch.equal(new.mask.to_dense(), shown[name]), name
        out, _ = calc_attn(*local, new)
        found[name] = gap(undispatch(out, new), dense_attention(*whole, new.mask)[0])
    return found


def movement(rank: int) -> None:
    """roll, undispatch of partial gradients, and whose gradient dispatch returns."""
    key = causal_key()
    x = normal(TOTAL, 3, seed=1)
    local = dispatch(x, key, pad_value=-100.0)
    assert torch.equal(local, x[get_position_ids(key)])
    assert (get_position_ids(key).diff() > 1).any()  # they were permuted
    for shift in (1, -1, 40):
        assert torch.equal(roll(local, shift, 0, key), dispatch(x.roll(shift, 0), key)), shift
        assert torch.equal(roll_simple(local, shift, 0, key), roll(local, shift, 0, key))
    turned = local.T.contiguous()
    assert torch.equal(roll(turned, 1, 1, key), dispatch(x.roll(1, 0), key).T)

    weights, factor = normal(TOTAL, 3, seed=2), float(rank + 1)
    for partial, total in ((False, factor), (True, 3.0)):  # alone, or 1 + 2 of both ranks
        leaf = local.clone().requires_grad_()
        back = undispatch(leaf, key, is_partial_grad=partial)
        (grad,) = torch.autograd.grad((back * weights * factor).sum(), leaf)
        torch.testing.assert_close(grad, dispatch(weights, key) * total)

    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad((dispatch(leaf, key) * dispatch(weights, key)).sum(), leaf)
    assert torch.equal(grad, weights)


def cross_attention(rank: int) -> dict[str, float]:
    """41 queries of one source, 93 keys of another."""
    tokens = 41
    ranges = [(0, 20), (20, tokens)], [(0, 60), (30, TOTAL)]
    key = magi_attn_flex_key(
        *(AttnRanges.from_ranges(ranges[0]), AttnRanges.from_ranges(ranges[1]), "full"),
        *(tokens, TOTAL, HEADS_Q, HEADS_KV, DIM, 0, init_device_mesh("cpu", (2,))),
        is_same_source=False,
    )
    whole = [normal(n, h, DIM, seed=h) for n, h in ((tokens, HEADS_Q), (TOTAL, 2), (TOTAL, 2))]
    leaves = [x.clone().requires_grad_() for x in whole]
    local = [dispatch(leaves[0], key), *(dispatch(x, key, keys=True) for x in leaves[1:])]
    out, _ = calc_attn(*local, key)
    weights = normal(tokens, HEADS_Q, DIM, seed=7)
    grads = torch.autograd.grad((undispatch(out, key) * weights).sum(), leaves)
    ones = [x.clone().requires_grad_() for x in whole]
    want = dense_attention(*ones, AttnMask.from_ranges(*ranges, 0, tokens, TOTAL))[0]
    wants = torch.autograd.grad((want * weights).sum(), ones)
    found = {"out": gap(undispatch(out, key), want)}
    return found | {n: gap(a, b) for n, a, b in zip("qkv", grads, wants, strict=True)}


def recent_keys(rank: int) -> None:
    """Each group has its own last key."""
    world, pair = dist.group.WORLD, dist.new_group([0, 1])
    first, second = causal_key(), causal_key(degree=2)
    other = magi_attn_flex_key([[0, 8]], [[0, 8]], AttnMaskType.CAUSAL, 8, 8, 1, 1, 8, 0, pair)
    assert get_most_recent_key(world) is second and second != first
    assert get_most_recent_key(pair) is other
    clear_cache(pair)
    assert get_most_recent_key(world) is second
    for group in (pair, world):
        try:
            get_most_recent_key(group)
        except ValueError as error:
            assert "no key" in str(error)
        else:
            raise AssertionError(group)
        clear_cache()
    assert len(dispatch(torch.zeros(8), other)) == 4  # who holds a key can go on with it
