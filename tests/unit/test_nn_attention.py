"""DotProductAttention: both paths against dense fp64 attention, and nothing dropped in silence."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.nn_cases import (
    BATCH,
    HEADS,
    INF,
    PATHS,
    assert_same,
    band,
    check,
    dense,
    leaves_of,
    make,
    make_config,
    make_module,
    normal,
    ranks,
    watch_paths,
    with_gradients,
)
from torch.utils._python_dispatch import TorchDispatchMode

from keel.nn import DotProductAttention, MLATransformerConfig
from keel.softmax import AttnMaskType


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    return watch_paths(monkeypatch)


MASKS: dict[str, tuple[str, tuple[int, int] | None, int, int]] = {
    "no mask": ("no_mask", None, 7, 7),
    "no mask, more keys": ("no_mask", None, 5, 9),
    "no mask, more queries": ("no_mask", None, 9, 5),
    "padding": ("padding", None, 7, 7),
    "causal": ("causal", None, 7, 7),
    "padding causal": ("padding_causal", None, 7, 7),
    "one query": ("causal", None, 1, 6),
    "bottom right": ("causal_bottom_right", None, 5, 9),
    "bottom right, rows without keys": ("causal_bottom_right", None, 9, 5),
    "causal window": ("causal", (2, 0), 7, 7),
    "causal window, more keys": ("causal", (2, 0), 5, 9),
    "causal hides what a window shows": ("causal", (2, 3), 7, 7),
    "window": ("no_mask", (2, 1), 5, 9),
    "open left": ("no_mask", (-1, 1), 7, 7),
    "open right": ("no_mask", (2, -1), 7, 7),
    "open causal window, more keys": ("causal", (-1, 0), 5, 9),
    "window of one": ("causal", (0, 0), 7, 7),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("path", PATHS)
def test_against_dense(path: str, name: str, groups: int, dtype: torch.dtype, taken: Any) -> None:
    kind, window, sq, sk = MASKS[name]
    config = make_config(num_query_groups=groups, window_size=window, qk_clip=True)
    hidden = band(sq, sk, "causal" in kind, window)
    check(make_module(path, config, 1, kind), make(sq, sk, groups=groups, dtype=dtype), hidden)
    assert [p for p, _ in taken] == [path]


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
@pytest.mark.parametrize("name", ["no mask", "causal window", "bottom right, rows without keys"])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("path", PATHS)
def test_sinks_against_dense(path: str, groups: int, name: str, softmax_type: str) -> None:
    kind, window, sq, sk = MASKS[name]
    config = make_config(
        num_query_groups=groups, window_size=window, softmax_type=softmax_type, qk_clip=True
    )
    module = make_module(path, config, 1, kind)
    assert module.softmax_offset.shape == (HEADS,)
    check(module, make(sq, sk, groups=groups), band(sq, sk, "causal" in kind, window))
    vanilla = make_module(path, make_config(num_query_groups=groups, window_size=window), 1, kind)
    tensors = make(sq, sk, groups=groups)
    assert not torch.allclose(module(**tensors), vanilla(**tensors))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(path: str, dtype: torch.dtype) -> None:
    config = make_config(
        num_query_groups=2, softmax_type="learnable", params_dtype=dtype, qk_clip=True
    )
    module = make_module(path, config, 1, "causal")
    tensors = make(groups=2, dtype=dtype)
    out = module(**tensors)
    hidden = band(7, 7, True, None)
    want = dense(**tensors, hidden=hidden, sink=module.softmax_offset)
    assert out.dtype == dtype and module.current_max_attn_logits.dtype == torch.float32
    assert_same({"out": out}, {"out": want["out"]}, dtype)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors.values())


def masks_of_all_forms() -> dict[str, torch.Tensor]:
    """Masks for [2, 4, 7, 7]; the second sample ends early."""
    padding = torch.zeros(BATCH, 1, 1, 7, dtype=torch.bool)
    padding[1, ..., 4:] = True
    some = normal(7, 7, seed=3) > 0.5
    rows = some.clone()
    rows[2] = True
    return {
        "padding": padding,
        "padding of queries and keys": padding | padding.mT,
        "one for all": some[None, None],
        "two dims": some,
        "rows that see nothing": rows,
        "by head": normal(1, HEADS, 7, 7, seed=4) > 0.5,
        "uint8": some.to(torch.uint8) * 3,
        "all": torch.ones(1, 1, 1, 1, dtype=torch.bool),
    }


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
@pytest.mark.parametrize("kind", ["padding", "causal", "no_mask", "arbitrary", "padding_causal"])
@pytest.mark.parametrize("form", masks_of_all_forms())
def test_attention_masks_compose(form: str, kind: str, softmax_type: str, taken: Any) -> None:
    """With causality and window, whatever the mask type says of masks."""
    mask = masks_of_all_forms()[form]
    for window in (None, (3, 0)):
        config = make_config(
            num_query_groups=2, window_size=window, softmax_type=softmax_type, qk_clip=True
        )
        module = make_module("flash", config, 1, kind)
        hidden = band(7, 7, "causal" in kind, window) | mask.bool()
        check(module, make(groups=2), hidden, attention_mask=mask)
    assert [path for path, _ in taken] == ["probabilities"] * 2


def test_an_added_mask_counts_as_logits() -> None:
    module = make_module("flash", make_config(qk_clip=True), 1, "causal")
    tensors, added = make(), normal(BATCH, 1, 7, 7)
    want = dense(**tensors, hidden=band(7, 7, True, None), bias=added)
    assert_same({"out": module(**tensors, attention_mask=added)}, {"out": want["out"]}, added.dtype)
    assert_same({"top": module.current_max_attn_logits}, {"top": want["top"]}, added.dtype)


@pytest.mark.parametrize("layer_scaling", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(
    "shape", [(BATCH, HEADS, 7, 9), (1, HEADS, 7, 9), (BATCH, 1, 1, 9), (7, 9), (HEADS, 7, 1)]
)
def test_bias_against_dense(
    shape: tuple[int, ...], dtype: torch.dtype, layer_scaling: bool, taken: Any
) -> None:
    config = make_config(
        num_query_groups=2,
        softmax_type="learnable",
        qk_clip=True,
        window_size=(4, 1),
        apply_query_key_layer_scaling=layer_scaling,
    )
    module = make_module("flash", config, 3, "no_mask")
    bias = normal(*shape).to(dtype).requires_grad_()
    hidden = band(7, 9, False, (4, 1))
    check(module, make(7, 9, groups=2, dtype=dtype), hidden, attention_bias=bias)
    some = normal(7, 9, seed=3) > 0.5
    check(
        make_module("flash", config, 3, "no_mask"),
        make(7, 9, groups=2, dtype=dtype),
        hidden | some,
        attention_bias=bias,
        attention_mask=some,
    )
    assert {path for path, _ in taken} == {"probabilities"}


def test_a_bias_may_be_wider_and_may_hide() -> None:
    module = make_module("flash", make_config(qk_clip=True), 1, "causal")
    tensors = make(dtype=torch.float32)
    bias = normal(7, 7)
    bias[3:, 1] = -INF
    hidden = band(7, 7, True, None) | (bias == -INF)
    out = module(**tensors, attention_bias=bias)
    assert out.dtype == torch.float32 and module.current_max_attn_logits.dtype == torch.float32
    want = dense(**tensors, hidden=hidden, bias=bias.clamp(min=-9.0))
    assert_same({"out": out}, {"out": want["out"]}, torch.float32)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layer", [1, 3])
def test_layer_scaling_changes_nothing(path: str, layer: int, taken: Any) -> None:
    config = make_config(apply_query_key_layer_scaling=True, qk_clip=True, softmax_scale=0.7)
    check(make_module(path, config, layer, "causal"), make(), band(7, 7, True, None))
    ((_, call),) = taken
    if path == "flash":
        assert call["softmax_scale"] == 0.7
    else:  # small in memory, whole in the softmax
        assert call["scale"] == layer
        raw = torch.einsum("sbhd,tbhd->bhst", make()["query"], make()["key"])
        torch.testing.assert_close(call["args"][0], raw * 0.7 / layer)


def test_layer_scaling_keeps_fp16_scores_finite() -> None:
    tensors = {name: x.detach() for name, x in make(dtype=torch.float16).items()}
    tensors["query"] = tensors["query"] * 3000
    tensors["key"] = tensors["key"] * 30
    hidden = band(7, 7, True, None)
    want = dense(**tensors, hidden=hidden)
    assert want["top"].max() > torch.finfo(torch.float16).max
    plain = make_module("probabilities", make_config(), 4, "causal")
    scaled = make_module(
        "probabilities", make_config(apply_query_key_layer_scaling=True), 4, "causal"
    )
    assert plain(**tensors).isnan().any()
    assert_same({"out": scaled(**tensors)}, {"out": want["out"]}, torch.float16)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("freq", "with_window"), [(2, [1, 3]), ([0, 1, 1, 0], [2, 3])])
def test_only_some_layers_have_the_window(path: str, freq: Any, with_window: list[int]) -> None:
    config = make_config(window_size=(2, 0), window_attn_skip_freq=freq)
    for layer in (1, 2, 3, 4):
        window = (2, 0) if layer in with_window else None
        check(make_module(path, config, layer, "causal"), make(), band(7, 7, True, window))


@pytest.mark.parametrize("path", PATHS)
def test_a_window_open_on_both_sides_is_none(path: str) -> None:
    config = make_config(window_size=(-1, -1))
    check(make_module(path, config, 1, "no_mask"), make(5, 9), band(5, 9, False, None))
    with pytest.raises(ValueError, match="needs sq == sk"):
        make_module(path, config, 1, "causal")(**make(5, 9))


class MegatronMaskType(enum.Enum):
    """Equal in name, another class."""

    causal = 2
    no_mask = 3


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("causal", ["causal", AttnMaskType.causal, MegatronMaskType.causal])
def test_the_mask_type_of_a_call_wins(path: str, causal: Any) -> None:
    module = make_module(path, make_config(), 1, MegatronMaskType.no_mask)
    check(module, make(), band(7, 7, False, None))
    check(module, make(), band(7, 7, True, None), attn_mask_type=causal)
    check(module, make(), band(7, 7, False, None))
    module = make_module(path, make_config(), 1, causal)
    check(module, make(), band(7, 7, False, None), attn_mask_type="no_mask")


MLA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 30,
    "num_attention_heads": HEADS,
    "params_dtype": torch.float64,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("path", PATHS)
def test_mla_channels(path: str, dtype: torch.dtype) -> None:
    config = MLATransformerConfig(
        **MLA, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=40, qk_clip=True
    )
    module = make_module(path, config, 1, "causal")
    assert module.softmax_scale == pytest.approx(24**-0.5)
    check(module, make(hn=24, hv=40, dtype=dtype), band(7, 7, True, None))
    plain = make_config(num_query_groups=2, qk_clip=True)
    module = make_module(path, plain, 1, "causal", k_channels=24, v_channels=16)
    assert module.softmax_scale == pytest.approx(24**-0.5)
    check(module, make(hn=24, hv=16, groups=2, dtype=dtype), band(7, 7, True, None))


@pytest.mark.parametrize(("hn", "hv"), [(3, 3), (12, 5), (16, 20), (20, 16)])
@pytest.mark.parametrize("path", PATHS)
def test_any_number_of_channels(path: str, hn: int, hv: int, taken: Any) -> None:
    config = make_config(num_query_groups=2, softmax_type="off-by-one", qk_clip=True)
    module = make_module(path, config, 1, "causal", k_channels=hn, v_channels=hv)
    check(module, make(hn=hn, hv=hv, groups=2), band(7, 7, True, None))
    assert [p for p, _ in taken] == [path]


@pytest.mark.parametrize(("hn", "hv"), [(264, 8), (8, 300)])
def test_very_wide_heads(hn: int, hv: int, taken: Any) -> None:
    module = make_module("flash", make_config(), 1, "causal", k_channels=hn, v_channels=hv)
    check(module, make(hn=hn, hv=hv), band(7, 7, True, None))
    assert [p for p, _ in taken] == ["probabilities"]


@pytest.mark.parametrize("path", PATHS)
def test_scales(path: str) -> None:
    """The constructor's before the config's; any sign."""
    assert make_module(path, make_config(), 1, "causal").softmax_scale == pytest.approx(8**-0.5)
    for scale in (0.3, -0.5, 0.0):
        module = make_module(path, make_config(softmax_scale=scale, qk_clip=True), 1, "causal")
        assert module.softmax_scale == scale
        check(module, make(), band(7, 7, True, None))
    module = make_module(path, make_config(softmax_scale=3.0), 1, "causal", softmax_scale=0.0)
    assert module.softmax_scale == 0.0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("batch", [1, 3])
def test_running_maximum(path: str, batch: int) -> None:
    module = make_module(path, make_config(num_query_groups=2, qk_clip=True), 1, "causal")
    assert module.current_max_attn_logits is None
    module.reset_max_logits()
    assert module.current_max_attn_logits is None
    tops = []
    for seed in range(4):
        tensors = make(groups=2, batch=(batch,), seed=seed)
        module(**tensors)
        tops.append(dense(**tensors, hidden=band(7, 7, True, None))["top"])
        running = module.current_max_attn_logits
        torch.testing.assert_close(running, torch.stack(tops).amax(0))
    assert len({int(i) for i in torch.stack(tops).argmax(0)}) > 1  # no call has them all
    module.reset_max_logits()
    assert module.current_max_attn_logits is running  # graphs that were captured write to it
    assert (running == -INF).all()
    module(**make(groups=2, batch=(batch,), seed=0))
    torch.testing.assert_close(running, tops[0])
    module.current_max_attn_logits = None  # how Megatron forgets
    module(**make(groups=2, batch=(batch,), seed=1))
    torch.testing.assert_close(module.current_max_attn_logits, tops[1])


def test_the_maximum_is_shared_by_both_paths() -> None:
    config = make_config(qk_clip=True, attention_dropout=0.5)
    module = make_module("flash", config, 1, "causal")
    low, high = make(seed=0), make(seed=1)
    tops = [dense(**x, hidden=band(7, 7, True, None))["top"] for x in (low, high)]
    module(**low)
    module.attention_dropout = 0.0
    module(**high)
    torch.testing.assert_close(module.current_max_attn_logits, torch.maximum(*tops))


@pytest.mark.parametrize("path", PATHS)
def test_evaluation_leaves_the_maximum_alone(path: str) -> None:
    module = make_module(path, make_config(qk_clip=True), 1, "causal")
    module.eval()(**make(seed=1))
    assert module.current_max_attn_logits is None
    module.train()(**make(seed=0))
    before = module.current_max_attn_logits.clone()
    module.eval()(**{name: 3 * x for name, x in make(seed=1).items()})
    assert torch.equal(module.current_max_attn_logits, before)


@pytest.mark.parametrize("path", PATHS)
def test_no_maximum_without_qk_clip(path: str, taken: Any) -> None:
    module = make_module(path, make_config(), 1, "causal")
    module(**make())
    assert module.current_max_attn_logits is None
    assert not taken[0][1]["return_max_logits"]


@pytest.mark.parametrize("path", PATHS)
def test_a_maximum_from_inference_serves_training(path: str) -> None:
    module = make_module(path, make_config(qk_clip=True), 1, "causal")
    with torch.inference_mode():
        module(**make())
    assert not module.current_max_attn_logits.is_inference()
    module(**make(seed=1)).sum().backward()
    with torch.inference_mode():  # another dtype: the tensor is made again
        module(**make(dtype=torch.float32))
    assert module.current_max_attn_logits.dtype == torch.float32
    module(**make(dtype=torch.float32, seed=1)).sum().backward()


@pytest.mark.parametrize("path", PATHS)
def test_the_maximum_is_in_no_checkpoint_and_survives_casts(path: str) -> None:
    module = make_module(path, make_config(qk_clip=True, softmax_type="learnable"), 1, "causal")
    module(**make())
    before = module.current_max_attn_logits.clone()
    assert list(module.state_dict()) == ["softmax_offset"]
    module.bfloat16()
    assert torch.equal(module.current_max_attn_logits, before)


def test_dropout_needs_probabilities(taken: Any) -> None:
    module = DotProductAttention(make_config(attention_dropout=0.5), 1, "causal")
    tensors = make()
    torch.manual_seed(0)
    first = module(**tensors)
    torch.manual_seed(0)
    again = module(**tensors)
    other = module(**tensors)
    assert torch.equal(first, again) and not torch.equal(first, other)
    module.eval()
    check(module, tensors, band(7, 7, True, None))
    assert [path for path, _ in taken] == ["probabilities"] * 3 + ["flash"]


@pytest.mark.parametrize("p", [0.25, 0.9])
def test_dropout_drops_probabilities(p: float) -> None:
    config = make_config(attention_dropout=0.1)
    module = DotProductAttention(config, 1, "causal", attention_dropout=p, need_probs=True)
    tensors = make()
    torch.manual_seed(0)
    out = module(**tensors)
    probs = dense(**tensors, hidden=band(7, 7, True, None))["probs"]
    torch.testing.assert_close(module.last_probs, probs)  # before dropout
    torch.manual_seed(0)
    kept = F.dropout(probs, p)
    want = torch.einsum("bhst,tbhd->sbhd", kept, tensors["value"]).flatten(2)
    torch.testing.assert_close(out, want)
    off = DotProductAttention(config, 1, "causal", attention_dropout=0.0)
    check(off, tensors, band(7, 7, True, None))


def test_probabilities_are_kept_only_on_request() -> None:
    module = DotProductAttention(make_config(), 1, "causal")
    module(**make(), attention_mask=torch.zeros(7, 7, dtype=torch.bool))
    assert module.last_probs is None


def test_fusion_chooses_who_makes_the_probabilities(taken: Any) -> None:
    for fusion in (True, False):
        config = make_config(masked_softmax_fusion=fusion, softmax_type="learnable", qk_clip=True)
        check(make_module("probabilities", config, 1, "causal"), make(), band(7, 7, True, None))
    assert [call["backend"] for _, call in taken] == ["auto", "blocked"]


@pytest.mark.parametrize("path", PATHS)
def test_heads_shared_by_ranks(path: str) -> None:
    config = make_config(
        num_attention_heads=2 * HEADS,
        num_query_groups=4,
        kv_channels=8,
        softmax_type="learnable",
        qk_clip=True,
    )
    module = make_module(path, config, 1, "causal", pg_collection=ranks(tp=2, cp=1))
    assert module.softmax_offset.shape == (HEADS,)
    check(module, make(groups=2), band(7, 7, True, None))


@pytest.mark.parametrize("path", PATHS)
def test_strided_inputs_are_left_alone(path: str) -> None:
    """As a fused projection gives them, query heads and key heads of a group side by side."""
    groups, each = 2, HEADS // 2
    mixed = normal(7, BATCH, groups, (each + 2) * 8).requires_grad_()
    before = mixed.detach().clone()
    query, key, value = mixed.split([each * 8, 8, 8], -1)
    query = query.unflatten(-1, (each, 8)).flatten(2, 3)
    bias = normal(7, 7)
    module = make_module(path, make_config(num_query_groups=groups), 1, "causal")
    if path == "probabilities":
        out = module(query, key, value, attention_bias=bias, attention_mask=bias > 1)
        hidden = band(7, 7, True, None) | (bias > 1)
        want = dense(query, key, value, hidden, bias=bias)["out"]
    else:
        out = module(query, key, value)
        want = dense(query, key, value, band(7, 7, True, None))["out"]
    leaves = {"mixed": mixed}
    got, expected = with_gradients(out, leaves), with_gradients(want, leaves)
    assert_same(got, expected, torch.float64)
    assert torch.equal(mixed, before)


class Copies(TorchDispatchMode):
    """Sizes of all tensors that an operator wrote to memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.sizes.append(x.numel())
        return result


@pytest.mark.parametrize("path", PATHS)
def test_keys_and_values_are_not_copied(path: str) -> None:
    """Twelve times the keys of the queries' tokens: a copy of them would be the largest tensor."""
    config = make_config(num_query_groups=1, kv_channels=64)
    module = DotProductAttention(config, 1, "no_mask", need_probs=path == "probabilities")
    tensors = {name: x.detach() for name, x in make(2, 24, groups=1, hn=64).items()}
    with Copies() as copies:
        out = module(**tensors)
    torch.testing.assert_close(out, dense(**tensors, hidden=band(2, 24, False, None))["out"])
    largest_copy = tensors["key"].numel()
    allowed = max(tensors["query"].numel(), BATCH * HEADS * 2 * 24)
    assert allowed < largest_copy
    assert copies.sizes and max(copies.sizes) <= allowed


@pytest.mark.parametrize("path", PATHS)
def test_autocast_does_not_round(path: str) -> None:
    module = make_module(path, make_config(), 1, "causal")
    tensors = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(**tensors)
    assert torch.equal(out, module(**tensors))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("path", PATHS)
def test_compiled(path: str, fresh_compiler: None) -> None:
    config = make_config(
        num_query_groups=2, softmax_type="learnable", qk_clip=True, window_size=(3, 0)
    )
    module = make_module(path, config, 1, "causal")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for tokens in (7, 9, 12):  # lengths become dynamic on the way
        tensors = make(tokens, groups=2)
        leaves = leaves_of(module, tensors)
        want = dense(**tensors, hidden=band(tokens, tokens, True, (3, 0)), sink=leaves["sink"])
        module.reset_max_logits()
        got = with_gradients(compiled(**tensors), leaves)
        assert_same(got, with_gradients(want["out"], leaves), torch.float64)
        assert_same({"top": module.current_max_attn_logits}, {"top": want["top"]}, torch.float64)


def test_softmax_offsets() -> None:
    offsets = {
        kind: DotProductAttention(make_config(softmax_type=kind), 1, "causal")
        for kind in ("vanilla", "off-by-one", "learnable")
    }
    assert offsets["vanilla"].softmax_offset is None
    assert [list(m.state_dict()) for m in offsets.values()] == [[], [], ["softmax_offset"]]
    assert [len(list(m.parameters())) for m in offsets.values()] == [0, 0, 1]
    for kind in ("off-by-one", "learnable"):
        offset = offsets[kind].softmax_offset
        assert offset is not None and offset.dtype == torch.float64
        assert torch.equal(offset, torch.zeros(HEADS, dtype=torch.float64))
        with torch.device("meta"):
            module = DotProductAttention(make_config(softmax_type=kind), 1, "causal")
        module.to_empty(device="cpu").softmax_offset.data.fill_(7.0)
        module.reset_parameters()
        assert (module.softmax_offset == 0).all()
    offsets["vanilla"].reset_parameters()


def test_repr_says_what_matters() -> None:
    module = DotProductAttention(make_config(window_size=(2, 0)), 3, "causal")
    assert "layer 3, causal, 4 heads on 4" in repr(module) and "window=(2, 0)" in repr(module)
