"""DotProductAttention: both paths against dense fp64 attention, and nothing dropped in silence."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from keel.nn import DotProductAttention, MLATransformerConfig, TransformerConfig
from keel.nn import attention as under_test
from keel.softmax import AttnMaskType
from keel.testing import poisoned_memory

INF = float("inf")
HEADS, BATCH = 4, 2
PATHS = ["flash", "probabilities"]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}

Tensors = dict[str, torch.Tensor]


def make_config(**changes: Any) -> TransformerConfig:
    sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": HEADS}
    return TransformerConfig(**(sizes | {"params_dtype": torch.float64} | changes))


def make(
    sq: int = 7,
    sk: int | None = None,
    *,
    groups: int = HEADS,
    batch: tuple[int, ...] = (BATCH,),
    hn: int = 8,
    hv: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Tensors:
    """query, key and value, [s, b, heads, channels], that want gradients."""
    random = torch.Generator().manual_seed(seed)
    sk = sq if sk is None else sk
    shapes = {
        "query": (sq, *batch, HEADS, hn),
        "key": (sk, *batch, groups, hn),
        "value": (sk, *batch, groups, hv or hn),
    }
    return {
        name: torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)


def make_module(path: str, config: TransformerConfig, *args: Any, **kwargs: Any) -> Any:
    """An attention that takes the given path, with random softmax offsets where it learns them."""
    module = DotProductAttention(config, *args, **kwargs, need_probs=path == "probabilities")
    if config.softmax_type == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(normal(len(module.softmax_offset), seed=5))
    return module


def band(sq: int, sk: int, causal: bool, window: tuple[int, int] | None) -> torch.Tensor:
    """(sq, sk), True where a pair is hidden; diagonals meet in the bottom-right corner."""
    distance = torch.arange(sk) - torch.arange(sq)[:, None] - (sk - sq)
    left, right = window or (-1, -1)
    hidden = torch.zeros(sq, sk, dtype=torch.bool)
    hidden |= (distance > 0) if causal else False
    hidden |= (distance < -left) if left >= 0 else False
    hidden |= (distance > right) if right >= 0 else False
    return hidden


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    *,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> Tensors:
    """Attention as the textbook has it, in fp64: out, probs, and each head's largest logit."""
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias.double()
    hidden = hidden.expand_as(logits)
    logits = logits.masked_fill(hidden, -INF)
    top = logits.amax((0, 2, 3)).detach()
    offset = torch.full((q.shape[1],), -INF) if sink is None else sink
    columns = offset.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    nothing = hidden.all(-1, keepdim=True)
    probs = torch.softmax(torch.cat([logits.masked_fill(nothing, 0.0), columns], -1), -1)[..., :-1]
    probs = probs.masked_fill(nothing, 0.0)
    out = (probs @ v).permute(2, 0, 1, 3).flatten(2)
    return {"out": out, "probs": probs.detach(), "top": top}


def with_gradients(out: torch.Tensor, leaves: Tensors) -> Tensors:
    """out, and d<name> of each leaf for some gradient of out."""
    upstream = normal(*out.shape, seed=9).to(out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), upstream)
    named = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"out": out.detach(), **named}


def assert_same(got: Tensors, want: Tensors, dtype: torch.dtype) -> None:
    assert got.keys() == want.keys()
    for name, x in got.items():
        error = f"{name}: {{}}".format
        torch.testing.assert_close(
            x.double(), want[name].double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], msg=error
        )


def leaves_of(module: DotProductAttention, tensors: Tensors, *more: str) -> Tensors:
    names = ("query", "key", "value", *more)
    leaves = {name: tensors[name] for name in names}
    if module.config.softmax_type == "learnable":
        assert module.softmax_offset is not None
        leaves["sink"] = module.softmax_offset
    return leaves


def check(module: DotProductAttention, tensors: Tensors, hidden: torch.Tensor, **call: Any) -> None:
    """One call of a module against dense attention: out, gradients, probabilities, maximum."""
    bias = call.get("attention_bias")
    if bias is not None and bias.requires_grad:
        tensors = tensors | {"bias": bias}
    leaves = leaves_of(module, tensors, *(["bias"] if "bias" in tensors else []))
    dtype = tensors["query"].dtype
    qkv = [tensors[name] for name in ("query", "key", "value")]
    with poisoned_memory():
        out = module(*qkv, **call)
        got = with_gradients(out, leaves)
    assert out.dtype == dtype and out.shape[:2] == qkv[0].shape[:2]
    want = dense(*(*qkv, hidden), scale=module.softmax_scale, bias=bias, sink=module.softmax_offset)
    assert_same(got, with_gradients(want["out"], leaves), dtype)
    if module.need_probs:
        assert module.last_probs is not None and not module.last_probs.requires_grad
        assert_same({"probs": module.last_probs}, {"probs": want["probs"]}, dtype)
    if module.config.qk_clip:
        top = module.current_max_attn_logits
        assert top is not None and top.dtype == (dtype if dtype.itemsize == 8 else torch.float32)
        assert_same({"top": top}, {"top": want["top"]}, dtype)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """(path, keywords) of each call of attention or softmax by a module."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def watch(name: str, path: str) -> None:
        real: Callable[..., Any] = getattr(under_test, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.append((path, kwargs | {"args": args}))
            return real(*args, **kwargs)

        monkeypatch.setattr(under_test, name, watched)

    watch("flex_flash_attn_func", "flash")
    watch("scaled_masked_softmax", "probabilities")
    return calls


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


LENGTHS = {
    "alike": ([3, 1, 5], [3, 1, 5]),
    "one": ([9], [9]),
    "with an empty one": ([4, 0, 5], [4, 0, 5]),
    "more keys": ([3, 1, 4], [5, 6, 4]),
    "fewer keys": ([6, 3], [2, 3]),
}


def pack(*lengths: list[int], dtype: torch.dtype = torch.int32) -> SimpleNamespace:
    q, k = (torch.tensor([0, *x]).cumsum(0).to(dtype) for x in lengths)
    return SimpleNamespace(qkv_format="thd", cu_seqlens_q=q, cu_seqlens_kv=k)


def by_document(module: Any, tensors: Tensors, lengths: tuple[list[int], list[int]]) -> Any:
    """Each document through dense attention on its own: (out [t, 1, np * hv], maxima)."""
    splits = [
        tensors[name].view(-1, 1, *tensors[name].shape[-2:]).split(lengths[n > 0])
        for n, name in enumerate(("query", "key", "value"))
    ]
    parts = []
    for q, k, v in zip(*splits, strict=True):
        hidden = band(len(q), len(k), "causal" in module.attn_mask_type.name, module.window_size)
        if len(q):
            parts.append(dense(q, k, v, hidden, sink=module.softmax_offset))
    return torch.cat([x["out"] for x in parts]), torch.stack([x["top"] for x in parts]).amax(0)


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
@pytest.mark.parametrize("batch", [(1,), ()], ids=["t1hd", "thd"])
@pytest.mark.parametrize(
    ("kind", "window"),
    [("padding_causal", None), ("no_mask", None), ("causal", (2, 0)), ("padding", (1, 2))],
)
@pytest.mark.parametrize("name", LENGTHS)
def test_packed(
    name: str, kind: str, window: Any, batch: tuple[int, ...], softmax_type: str, taken: Any
) -> None:
    lengths = LENGTHS[name]
    if lengths[0] != lengths[1] and kind == "padding_causal":
        kind = "causal_bottom_right"
    config = make_config(
        num_query_groups=2, window_size=window, softmax_type=softmax_type, qk_clip=True
    )
    module = make_module("flash", config, 1, kind, v_channels=16)
    tensors = make(sum(lengths[0]), sum(lengths[1]), groups=2, batch=batch, hv=16)
    leaves = leaves_of(module, tensors)
    out = module(**tensors, packed_seq_params=pack(*lengths))
    assert out.shape == (sum(lengths[0]), *batch, HEADS * 16)
    want, top = by_document(module, tensors, lengths)
    assert_same(
        with_gradients(out, leaves), with_gradients(want.view_as(out), leaves), torch.float64
    )
    assert_same({"top": module.current_max_attn_logits}, {"top": top}, torch.float64)
    assert [path for path, _ in taken] == ["flash"]


def test_packed_tokens_behind_the_documents_are_padding() -> None:
    module = DotProductAttention(make_config(), 1, "padding_causal")
    tensors = make(9, batch=(1,))
    out = module(**tensors, packed_seq_params=pack([3, 4], [3, 4]))
    assert (out[7:] == 0).all()
    short = {name: x[:7] for name, x in tensors.items()}
    want, _ = by_document(module, short, ([3, 4], [3, 4]))
    torch.testing.assert_close(out[:7], want)


def test_packed_bounds_may_change_in_place() -> None:
    module = DotProductAttention(make_config(), 1, "padding_causal")
    tensors, packed = make(9, batch=(1,)), pack([3, 6], [3, 6], dtype=torch.int64)
    for lengths in ([3, 6], [5, 4]):
        packed.cu_seqlens_q[1] = packed.cu_seqlens_kv[1] = lengths[0]
        want, _ = by_document(module, tensors, (lengths, lengths))
        torch.testing.assert_close(module(**tensors, packed_seq_params=packed), want)


def test_packed_without_dropout_when_evaluating() -> None:
    module = DotProductAttention(make_config(attention_dropout=0.5), 1, "padding_causal").eval()
    tensors = make(9, batch=(1,))
    want, _ = by_document(module, tensors, ([3, 6], [3, 6]))
    packed = pack([3, 6], [3, 6])
    packed.cu_seqlens_q_padded = packed.cu_seqlens_q.clone()  # padding of no tokens
    packed.cu_seqlens_kv_padded = packed.cu_seqlens_kv
    torch.testing.assert_close(module(**tensors, packed_seq_params=packed), want)


def ranks(**sizes: int) -> SimpleNamespace:
    """A collection of process groups."""
    return SimpleNamespace(
        **{name: SimpleNamespace(size=lambda n=n: n) for name, n in sizes.items()}
    )


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


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"context_parallel_size": 2}, {}, "context parallelism over 2 ranks is not supported yet"),
        ({}, {"pg_collection": ranks(cp=4)}, "context parallelism over 4 ranks is not supported"),
        ({}, {"pg_collection": ranks(tp=3)}, "4 query heads and 4 query groups cannot be shared"),
        (
            {"num_query_groups": 1},
            {"pg_collection": ranks(tp=2)},
            "4 query heads and 1 query group",
        ),
        ({}, {"attn_mask_type": "triangular"}, "unknown attn_mask_type 'triangular': expected one"),
        ({}, {"attn_mask_type": None}, "unknown attn_mask_type None"),
        ({}, {"attention_type": "both"}, "attention_type must be 'self' or 'cross', got 'both'"),
        ({}, {"attention_dropout": 1.0}, "attention_dropout must be a probability"),
        ({}, {"softmax_scale": INF}, "softmax_scale must be a finite number"),
        ({}, {"k_channels": 0}, "k_channels must be a positive int, got 0"),
        ({}, {"v_channels": 1.5}, "v_channels must be a positive int, got 1.5"),
        ({}, {"layer_number": 0}, "layer_number must be an int, counted from 1; got 0"),
    ],
)
def test_refused_by_the_constructor(config: Any, arguments: Any, message: str) -> None:
    defaults = {"layer_number": 1, "attn_mask_type": "causal"}
    with pytest.raises(ValueError, match=message):
        DotProductAttention(make_config(**config), **(defaults | arguments))


SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "three dims": (
        {"query": normal(7, 4, 8)},
        r"query must be \[s, b, 4, 8\] by config and constructor, got \(7, 4, 8\)",
    ),
    "query heads": ({"query": normal(7, 2, 6, 8)}, r"query must be \[s, b, 4, 8\]"),
    "key heads": ({"key": normal(7, 2, 4, 8)}, r"key must be \[s, b, 2, 8\] .* got \(7, 2, 4, 8\)"),
    "channels": ({"query": normal(7, 2, 4, 16)}, r"query must be \[s, b, 4, 8\]"),
    "value channels": ({"value": normal(7, 2, 2, 16)}, r"value must be \[s, b, 2, 8\]"),
    "batch": ({"query": normal(7, 3, 4, 8)}, "query, key and value must agree in batch"),
    "tokens": ({"value": normal(5, 2, 2, 8)}, "key and value in tokens"),
    "dtype": ({"value": normal(7, 2, 2, 8).float()}, "must have one dtype, got torch.float64"),
    "mask shape": (
        {"attention_mask": torch.zeros(3, 1, 7, 7, dtype=torch.bool)},
        "cannot be broadcast",
    ),
    "mask dtype": ({"attention_mask": torch.zeros(7, 7, dtype=torch.int64)}, "mask must be bool"),
    "mask with gradient": (
        {"attention_mask": torch.zeros(7, 7, requires_grad=True)},
        "mask requires grad",
    ),
    "bias shape": (
        {"attention_bias": normal(3, 1, 7, 7)},
        r"attention_bias must be broadcastable to \(b, np, sq, sk\) = \(2, 4, 7, 7\) on cpu, got",
    ),
    "bias dims": (
        {"attention_bias": normal(1, 1, 1, 7, 7)},
        "attention_bias must be broadcastable",
    ),
    "bias dtype": (
        {"attention_bias": torch.zeros(7, 7, dtype=torch.bool)},
        "attention_bias must be a floating point tensor, got torch.bool; what hides goes into",
    ),
    "bias type": ({"attention_bias": 1.0}, "must be a floating point tensor, got float"),
    "mask type": ({"attn_mask_type": "diagonal"}, "unknown attn_mask_type 'diagonal'"),
    "arbitrary without mask": ({"attn_mask_type": "arbitrary"}, "and there is none: pass one, or"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", SHAPES)
def test_refused_by_the_call(name: str, path: str) -> None:
    changes, message = SHAPES[name]
    module = make_module(path, make_config(num_query_groups=2), 1, "causal")
    with pytest.raises(ValueError, match=message):
        module(**(make(groups=2) | changes))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["causal", "padding_causal"])
def test_causal_wants_a_square(path: str, kind: str) -> None:
    """ValueError and AssertionError alike; see "one query" and windows above for what passes."""
    module = make_module(path, make_config(), 1, kind)
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match=rf"{kind} needs sq == sk, got \(5, 9\); causal_bottom_"):
            module(**make(5, 9))


PACKED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dropout": ({"attention_dropout": 0.1}, {}, "attention_dropout=0.1 in training cannot go"),
    "probabilities": ({"need_probs": True}, {}, "need_probs=True cannot go together"),
    "mask": (
        {},
        {"attention_mask": torch.zeros(9, 9, dtype=torch.bool)},
        "packed_seq_params and an attention_mask cannot go together",
    ),
    "bias": ({}, {"attention_bias": normal(9, 9)}, "an attention_bias cannot go together"),
    "arbitrary": ({}, {"attn_mask_type": "arbitrary"}, "arbitrary leaves it to the attention_mask"),
    "batch": ({}, make(9), "packed documents are a batch of 1, got query of shape"),
    "mixed dims": ({}, {"query": normal(9, 4, 8)}, "query, key and value must agree in batch"),
    "dims": (
        {},
        {"query": normal(9, 32)},
        r"query must be \[t, 1, 4, 8\] or \[t, 4, 8\] by config",
    ),
    "no bounds": (
        {},
        {"packed_seq_params": SimpleNamespace(cu_seqlens_q=torch.tensor([0, 9]))},
        "packed_seq_params.cu_seqlens_kv must be an .* int tensor of document bounds, got None",
    ),
    "layout": (
        {},
        {"packed_seq_params": SimpleNamespace(**(vars(pack([9], [9])) | {"qkv_format": "sbhd"}))},
        "qkv_format must be 'thd' or None, got 'sbhd'",
    ),
    "padding": (
        {},
        {
            "packed_seq_params": SimpleNamespace(
                **vars(pack([3, 4], [3, 4])), cu_seqlens_kv_padded=torch.tensor([0, 4, 9])
            )
        },
        "padding between documents is not supported",
    ),
    "numbers of documents": (
        {},
        {"packed_seq_params": pack([3, 6], [9])},
        "must bound the same number of documents, got 2 and 1",
    ),
    "too many tokens": ({}, {"packed_seq_params": pack([10], [10])}, "less than the 10 tokens"),
    "not a square": (
        {},
        {"packed_seq_params": pack([3, 6], [4, 5])},
        r"padding_causal needs sq == sk, got \(3, 4\); causal_bottom_right",
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_refused_with_packed_documents(name: str) -> None:
    arguments, call, message = PACKED[name]
    module = DotProductAttention(make_config(), 1, "padding_causal", **arguments)
    defaults = make(9, batch=(1,)) | {"packed_seq_params": pack([3, 6], [3, 6])}
    with pytest.raises(ValueError, match=message):
        module(**(defaults | call))
