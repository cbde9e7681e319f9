"""Core attention for Megatron against Megatron's own, and under its own QK-Clip."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optimizer.qk_clip import clip_qk
from tests.integrations import megatron_cases
from tests.integrations.megatron_models import (
    AttnMaskType,
    KeelDotProductAttention,
    PackedSeqParams,
    config_of,
    local_attention,
    losses,
    megatron_on_cpu,
    model_of,
    tokens,
    with_keel_attention,
)

import keel.compat.megatron
from keel.optim import QKClip
from keel.testing import run_ranks


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with megatron_on_cpu():
        yield


def core(kind: str = "causal", *, own: bool = False, mla: bool = False, **changes: Any) -> Any:
    """Keel's core attention, or with `own` Megatron's local one."""
    options = {}
    for name in ("softmax_scale", "k_channels", "v_channels", "layer_number"):
        if name in changes:
            options[name] = changes.pop(name)
    make = local_attention.DotProductAttention if own else KeelDotProductAttention
    torch.manual_seed(1)
    return make(
        config=config_of(mla, **changes),
        attn_mask_type=AttnMaskType[kind],
        attention_type="self",
        **{"layer_number": 1} | options,
    )


def qkv(sq: int, b: int, heads: int = 4, groups: int = 4, hn: int = 8, hv: int = 8) -> list[Any]:
    random = torch.Generator().manual_seed(0)
    shapes = (sq, b, heads, hn), (sq, b, groups, hn), (sq, b, groups, hv)
    return [torch.randn(x, generator=random, dtype=torch.float64).requires_grad_() for x in shapes]


def with_gradients(module: Any, tensors: list[Any], mask: Any = None, **inputs: Any) -> list[Any]:
    out = module(*tensors, mask, **inputs)
    leaves = [*tensors, *module.parameters()]
    weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped heads": {"num_query_groups": 2},
    "scale": {"softmax_scale": 0.7},
    "layer scaling": {"apply_query_key_layer_scaling": True, "layer_number": 3},
    "window": {"window_size": (3, 0)},
    "layer without its window": {
        "window_size": (3, 0),
        "window_attn_skip_freq": 2,
        "layer_number": 2,
    },
    "off by one": {"softmax_type": "off-by-one"},
    "learnable sink": {"softmax_type": "learnable"},
    "all": {"softmax_type": "learnable", "window_size": (5, 0), "num_query_groups": 1},
}


@pytest.mark.parametrize("name", CHANGES)
def test_result_and_gradients_are_those_of_local_attention(name: str) -> None:
    changes = CHANGES[name]
    tensors = qkv(13, 3, groups=changes.get("num_query_groups", 4))
    ours, own = core(**changes), core(own=True, **changes)
    for x, y in zip(ours.parameters(), own.parameters(), strict=True):
        assert torch.equal(x, y) and x.any(), "sinks begin as Megatron's do"
    got = with_gradients(ours, tensors, attn_mask_type=AttnMaskType.causal)
    expected = with_gradients(own, tensors)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    if name != "plain":
        return
    other = with_gradients(core("no_mask"), tensors)
    assert not torch.allclose(other[0], expected[0]), "causality makes no difference"


def test_a_call_may_change_the_mask_type() -> None:
    tensors = qkv(9, 2)
    got = with_gradients(core("causal"), tensors, attn_mask_type=AttnMaskType.no_mask)
    nothing_hidden = torch.zeros(1, 1, 9, 9, dtype=torch.bool)
    expected = with_gradients(core("padding", own=True), tensors, nothing_hidden)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_queries_behind_their_keys() -> None:
    """Bottom-right: what a whole sequence gives for its last queries."""
    q, k, v = qkv(12, 2)
    whole = core()(q, k, v)
    for kind, left in (("causal_bottom_right", 3), ("causal", 1)):
        got = core(kind)(q[-left:], k, v)
        torch.testing.assert_close(got, whole[-left:], rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=r"needs as many queries as keys, got 3 and 12"):
        core("causal")(q[-3:], k, v)


def packed_params(*bounds: Any) -> Any:
    cu, padded = (None if x is None else torch.tensor(x, dtype=torch.int32) for x in bounds)
    return PackedSeqParams("thd", cu, cu, padded, padded)


@pytest.mark.parametrize("window", [None, (2, 0)])
@pytest.mark.parametrize("kind", ["causal", "padding_causal", "no_mask", "padding"])
def test_packed_documents_are_as_alone(kind: str, window: Any) -> None:
    bounds, padded = [0, 5, 6, 13], [0, 8, 10, 20]
    changes = {"num_query_groups": 2, "window_size": window, "softmax_type": "learnable"}
    alone = qkv(13, 1, groups=2)
    simple = "causal" if kind.endswith("causal") else "no_mask"
    module = core(simple, **changes)
    expected = torch.cat([module(*(x[a:b] for x in alone)) for a, b in itertools.pairwise(bounds)])
    flat = [x.squeeze(1) for x in alone]
    params = packed_params(bounds, None)
    got = core(kind, **changes)(*flat, packed_seq_params=params)
    torch.testing.assert_close(got, expected.squeeze(1), rtol=1e-10, atol=1e-10)
    got = core(kind, **changes)(*alone, packed_seq_params=params)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    # Behind each document there is room; what stands there changes nothing, and its rows are 0.
    where = torch.cat([torch.arange(5), torch.arange(8, 9), torch.arange(10, 17)])
    room = [torch.full((22, *x.shape[1:]), 7.0, dtype=x.dtype) for x in flat]
    room = [x.index_copy(0, where, y) for x, y in zip(room, flat, strict=True)]
    out = core(kind, **changes)(*room, packed_seq_params=packed_params(bounds, padded))
    torch.testing.assert_close(out[where], expected.squeeze(1), rtol=1e-10, atol=1e-10)
    assert not out[[5, 6, 7, 9, 17, 21]].any()


def test_multi_latent_attention_of_192_and_128_channels() -> None:
    tensors = q, k, v = qkv(7, 2, hn=192, hv=128)
    module = core(mla=True, k_channels=192, v_channels=128, softmax_scale=0.05, qk_clip=True)
    got = with_gradients(module, tensors)
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) * 0.05
    scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), v).flatten(2)
    weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()
    expected = [out, *torch.autograd.grad((out * weights).sum(), tensors)]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(module.current_max_attn_logits, scores.amax((0, 2, 3)).detach())


@pytest.mark.parametrize("groups", [4, 2])
def test_models_learn_alike(groups: int) -> None:
    config = config_of(num_query_groups=groups)
    ids = tokens(2, 11)
    found = []
    for keel_attention in (True, False):
        model = model_of(config, keel=keel_attention)
        loss = losses(model, ids)
        loss.square().mean().backward()
        found.append([loss, *(x.grad for x in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


def test_recomputed_attention() -> None:
    ids, found = tokens(2, 11), []
    for again in ({}, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}):
        model = model_of(config_of(qk_clip=True, **again))
        losses(model, ids).mean().backward()
        core_of_layer = model.decoder.layers[1].self_attention.core_attention
        found.append([core_of_layer.current_max_attn_logits, *(x.grad for x in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


class Recorder:
    """Queries and keys that reach the core attention of each layer."""

    def __init__(self, model: Any) -> None:
        self.calls: list[list[Any]] = [[] for _ in model.decoder.layers]
        for layer, calls in zip(model.decoder.layers, self.calls, strict=True):
            core = layer.self_attention.core_attention
            core.register_forward_pre_hook(lambda module, args, calls=calls: calls.append(args))

    def maxima(self, layer: int, scale: float) -> torch.Tensor:
        tops = []
        for q, k, *_ in self.calls[layer]:
            k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
            scores = torch.einsum("ibhd,jbhd->bhij", q, k) * scale
            future = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
            tops.append(scores.masked_fill(future, -torch.inf).amax((0, 2, 3)).detach())
        return torch.stack(tops).amax(0)


@pytest.mark.parametrize("flag", ["qk_clip", "log_max_attention_logit"])
def test_maxima_are_those_of_all_logits(flag: str) -> None:
    model = model_of(config_of(num_query_groups=2, **{flag: True}))
    recorder = Recorder(model)
    for seed in (1, 2):  # two micro-batches: the larger of both stays
        losses(model, tokens(3, 9, seed))
    cores = [x.self_attention.core_attention for x in model.decoder.layers]
    for layer, module in enumerate(cores):
        expected = recorder.maxima(layer, 1 / math.sqrt(8))
        assert module.current_max_attn_logits.shape == (4,) and (expected > 0).all()
        torch.testing.assert_close(module.current_max_attn_logits, expected)
    before = [x.current_max_attn_logits.clone() for x in cores]
    model.eval()
    losses(model, tokens(3, 9, seed=3))
    assert all(
        torch.equal(x.current_max_attn_logits, y) for x, y in zip(cores, before, strict=True)
    )


def test_nothing_is_kept_unasked() -> None:
    model = model_of(config_of())
    losses(model, tokens(1, 9))
    assert model.decoder.layers[0].self_attention.core_attention.current_max_attn_logits is None


def megatron_model(model: Any) -> list[Any]:
    """As Megatron's training wraps it: DistributedDataParallel(Float16Module(model))."""
    return [SimpleNamespace(module=SimpleNamespace(module=model))]


def first_core(model: Any) -> Any:
    return model.decoder.layers[0].self_attention.core_attention


@pytest.mark.parametrize("groups", [4, 2])
def test_megatrons_own_clip(groups: int) -> None:
    """After a step: rows of queries and keys of a group by the root of gamma, values as before."""
    tau = 2.0
    model = model_of(config_of(num_query_groups=groups, qk_clip=True, qk_clip_threshold=tau))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids = tokens(2, 11)
    losses(model, ids).mean().backward()
    tops = first_core(model).current_max_attn_logits.clone()
    optimizer.step()
    weight = model.decoder.layers[0].self_attention.linear_qkv.weight
    before = weight.detach().clone().view(groups, -1, 8, 32)
    top = clip_qk(megatron_model(model))
    assert top >= tops.max().item() > tau and first_core(model).current_max_attn_logits is None
    gamma = (tau / tops.view(groups, -1).amax(1)).clamp(max=1)
    assert (gamma < 1).any()
    factor = gamma.sqrt().view(-1, 1, 1, 1).expand(-1, before.shape[1], -1, -1).clone()
    factor[:, -1] = 1  # [queries.., keys, values] of each group
    torch.testing.assert_close(weight.detach().view_as(before), before * factor)


def test_logits_after_megatrons_own_clip() -> None:
    """The same tokens then give tau wherever there was more: here for multi-latent attention."""
    tau = 12.0
    model = model_of(config_of(mla=True, qk_clip=True, qk_clip_threshold=tau))
    ids = tokens(2, 11)
    losses(model, ids)
    before = first_core(model).current_max_attn_logits.clone()
    assert (before > tau).any() and (before < tau).any()
    clip_qk(megatron_model(model))
    losses(model, ids)
    after = first_core(model).current_max_attn_logits
    torch.testing.assert_close(after, before.clamp(max=tau))


def test_negative_maxima_leave_weights_whole() -> None:
    """threshold / maximum is negative then, and its root NaN."""
    model = model_of(config_of(qk_clip=True, qk_clip_threshold=0.5))
    weight = model.decoder.layers[0].self_attention.linear_qkv.weight
    with (
        torch.no_grad()
    ):  # [query, key, value] of each head; the first head's key against its query
        rows = weight.view(4, 3, 8, 32)
        rows[0, 1] = -rows[0, 0]
    losses(model, tokens(1, 1))
    tops = first_core(model).current_max_attn_logits
    assert tops[0] == 0 and tops.max() > 0.5
    clip_qk(megatron_model(model))
    assert weight.isfinite().all()


@pytest.mark.parametrize("mla", [False, True])
def test_keels_own_clip(mla: bool) -> None:
    for clip_with in ("compat", "QKClip"):
        model = model_of(config_of(mla, qk_clip=True, qk_clip_threshold=1.0))
        clip = QKClip.from_model(model, tau=1.0)
        ids = tokens(2, 11)
        losses(model, ids)
        before = first_core(model).current_max_attn_logits.clone()
        if clip_with == "compat":
            keel.compat.megatron.clip_qk(model)
        else:
            clip.step()
        losses(model, ids)
        torch.testing.assert_close(first_core(model).current_max_attn_logits, before.clamp(max=1.0))


def test_context_parallel_models_are_those_of_one_rank() -> None:
    """Two ranks in Megatron's own order of tokens: losses, gradients and max logits."""
    expected = {case: megatron_cases.one_rank(*case) for case in megatron_cases.CASES}
    for found, errors in run_ranks(megatron_cases.two_ranks, 2):
        for case in megatron_cases.CASES:
            torch.testing.assert_close(found[case], expected[case], rtol=1e-8, atol=1e-10)
        assert "multiple of 4" in errors[0] and "document 1 has 6 tokens" in errors[1]


def test_heads_over_tensor_parallel_ranks() -> None:
    """Two ranks have two heads each; the clip is Keel's, since Megatron's takes all heads' rows."""
    expected = megatron_cases.heads_over(1)
    found = run_ranks(megatron_cases.heads_of_rank, 2)
    for name, (loss, *maxima) in expected.items():
        assert (maxima[0] > megatron_cases.TAU).any()
        for after in maxima[1:]:
            torch.testing.assert_close(after, maxima[0].clamp(max=megatron_cases.TAU))
        for rank, got in enumerate(found):
            wanted = [loss, *(x[2 * rank : 2 * rank + 2] for x in maxima)]
            torch.testing.assert_close(got[name], wanted, rtol=1e-5, atol=1e-5)


REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"attention_dropout": 0.1}, r"attention dropout of 0.1"),
    "fp8": ({"fp8_dot_product_attention": True}, r"fp8_dot_product_attention is not supported"),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_refuses_at_construction(name: str) -> None:
    changes, message = REFUSED_CONFIGS[name]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        core(**changes)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        model_of(config_of(**changes))


def test_refuses_what_it_would_drop() -> None:
    tensors = [x.detach() for x in qkv(4, 1)]
    flat = [x.squeeze(1) for x in tensors]
    module = core()
    calls: list[tuple[str, dict[str, Any]]] = [
        (r"attention_mask of shape \(1, 1, 4, 4\)", {"attention_mask": torch.zeros(1, 1, 4, 4)}),
        (r"attention_bias", {"attention_bias": torch.zeros(1, 4, 4, 4)}),
        (r"num_splits=2", {"num_splits": 2}),
        (r"padding needs an attention_mask", {"attn_mask_type": AttnMaskType.padding}),
        (r"padding_causal needs an att", {"attn_mask_type": AttnMaskType.padding_causal}),
        (r"arbitrary leaves it to", {"attn_mask_type": AttnMaskType.arbitrary}),
        (r"qkv_format must be 'thd'", {"packed_seq_params": PackedSeqParams("bshd")}),
        (r"cu_seqlens_q must be an", {"packed_seq_params": PackedSeqParams("thd")}),
        (r"bounds 5 tokens, but there are 4", {"packed_seq_params": packed_params([0, 5], None)}),
        (r"local_cp_size is 2 without", {"packed_seq_params": PackedSeqParams(local_cp_size=2)}),
    ]
    for message, inputs in calls:
        with pytest.raises((ValueError, NotImplementedError), match=message):
            module(*tensors, **inputs)
    with pytest.raises(ValueError, match=r"query must be \[s, b, 4, 8\]"):
        module(*flat)


def test_specs() -> None:
    local = gpt_layer_specs.get_gpt_layer_local_spec()
    swapped = with_keel_attention(local)
    attention = swapped.submodules.self_attention
    assert attention.submodules.core_attention is KeelDotProductAttention
    assert attention.params == local.submodules.self_attention.params
    kept = local.submodules.self_attention.submodules.core_attention
    assert kept is local_attention.DotProductAttention, "the given spec was changed"
    assert with_keel_attention(swapped) == swapped
    block = gpt_layer_specs.get_gpt_decoder_block_spec(config_of(), use_transformer_engine=False)
    layers = with_keel_attention(block).layer_specs
    assert [x.submodules.self_attention.submodules.core_attention for x in layers] == [
        KeelDotProductAttention
    ] * 2
    with pytest.raises(ValueError, match="there is no core_attention"):
        with_keel_attention(local.submodules.mlp)


def test_specs_with_another_core_are_refused() -> None:
    class SparseAttention(torch.nn.Module):
        pass

    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = SparseAttention
    with pytest.raises(ValueError, match="core_attention is SparseAttention"):
        with_keel_attention(spec)


def test_sharded_state() -> None:
    group = torch.distributed.group.WORLD
    for kind, names in (("learnable", ["layer.softmax_offset"]), ("off-by-one", [])):
        state = core(softmax_type=kind).sharded_state_dict("layer.", (), {"dp_cp_group": group})
        assert list(state) == names
