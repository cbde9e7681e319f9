"""Finds the attention of a model and the rows of its heads, by structure: nothing is imported.

A module is known by the names of its projections. Heads and channels come from its attributes or
its config, and every layout is held against the shapes of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keel.optim.clip_specs import (
    Block,
    ClippedRows,
    LayerSpec,
    Role,
    RowLayout,
    grouped_rows,
    interleaved_rows,
    key_rows,
    mla_key_rows,
    mla_query_rows,
    query_rows,
    stacked_rows,
)

SEPARATE = (
    *(("q_proj", "k_proj"), ("wq", "wk"), ("linear_q", "linear_k")),
    ("qkv_linear.wq", "qkv_linear.wk"),  # torchtitan
)
FUSED = ("linear_qkv", "qkv_proj", "query_key_value", "qkv_linear.wqkv")
MLA = (
    *(("q_b_proj", "kv_b_proj"), ("q_proj", "kv_b_proj")),  # DeepSeek, Kimi
    *(("wq_b", "wkv_b"), ("wq", "wkv_b")),  # torchtitan
    *(
        ("linear_q_up_proj", "linear_kv_up_proj"),
        ("linear_q_proj", "linear_kv_up_proj"),
    ),  # Megatron
)
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "qk_norm", "query_norm", "key_norm")


def find_layers(
    model: torch.nn.Module, *, scale_gains: bool = False, skip: Sequence[str] = ()
) -> list[LayerSpec]:
    """A spec for each attention of the model, named as in `model.named_modules()`.

    Attention whose projections are frozen is left out: it does not grow.
    """
    if isinstance(skip, str):
        raise TypeError(f"skip takes a sequence of names, got the string {skip!r}")
    found: list[LayerSpec] = []
    inside: list[str] = []
    for name, module in model.named_modules():
        if "" in inside or any(f"{name}.".startswith(f"{out}.") for out in (*skip, *inside)):
            continue
        spec = recognise(name or "the model", module, scale_gains)
        if spec is not None:
            inside.append(name)
            if _learns(spec):
                found.append(spec)
        elif hasattr(module, "current_max_attn_logits") or _looks_like_attention(module):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) looks like attention, but its "
                f"projections are not known ({_children(module)}): describe them "
                "with a LayerSpec, or leave the module out with skip="
            )
    if not found:
        raise ValueError(
            f"no attention that learns was found in {type(model).__name__}: describe it with "
            "LayerSpecs"
        )
    return found


def recognise(name: str, module: torch.nn.Module, scale_gains: bool = False) -> LayerSpec | None:
    """The spec of one attention module; None if it is none that is known."""
    named = list(module.named_children())
    inner = getattr(module, "qkv_linear", None)
    if isinstance(inner, torch.nn.Module):
        named += [(f"qkv_linear.{n}", x) for n, x in inner.named_children()]
    children = {n for n, x in named if hasattr(x, "weight")}
    for pair in MLA:
        if children.issuperset(pair):
            return _mla(name, module, *pair)
    for q, k in SEPARATE:
        if children.issuperset((q, k)):
            return _separate(name, module, q, k, scale_gains)
    for fused in FUSED:
        if fused in children:
            return _fused(name, module, fused, scale_gains)
    return None


def _learns(spec: LayerSpec) -> bool:
    learning = {
        name: holder[key].requires_grad
        for part in spec.rows
        for name, holder, key in part.tensors()
    }
    if len(set(learning.values())) > 1:
        frozen = [name for name, learns in learning.items() if not learns]
        raise ValueError(
            f"{', '.join(frozen)} of {spec.name} is frozen, but not all that it shares a clip "
            "with: freeze all of them, or leave the layer out with skip="
        )
    return any(learning.values())


def _looks_like_attention(module: torch.nn.Module) -> bool:
    """By its class's name, if it has weights; a module that wraps such a one is not meant."""
    looking = [
        x
        for x in module.modules()
        if "attention" in type(x).__name__.lower() and any(w.ndim > 1 for w in x.parameters())
    ]
    return looking == [module]


def _separate(name: str, module: torch.nn.Module, q: str, k: str, scale_gains: bool) -> LayerSpec:
    heads, kv_heads = _heads(name, module)
    projection: Any = module.get_submodule(q)
    rows = projection.weight.shape[0]
    dim = _number(module, ("head_dim", "kv_channels")) or rows // heads
    layouts = {q: query_rows(heads, dim), k: key_rows(kv_heads, dim)}
    return _spec(name, module, heads, kv_heads, dim, layouts, scale_gains)


def _fused(name: str, module: torch.nn.Module, fused: str, scale_gains: bool) -> LayerSpec:
    heads, kv_heads = _heads(name, module)
    dim = _number(module, ("head_dim", "hidden_size_per_attention_head", "head_size"))
    config = getattr(module, "config", None)
    layout: RowLayout
    if fused == "linear_qkv":
        dim = dim or _number(module, ("kv_channels",))
        core = _source(module)
        dim = dim or getattr(core, "k_channels", None)
        gate = bool(getattr(config, "attention_output_gate", False))
        dim = _needed(name, "head_dim", dim)
        layout = grouped_rows(heads, kv_heads, dim, gate=gate)
    elif fused == "qkv_linear.wqkv":
        dim = _needed(name, "head_dim", dim)
        layout = grouped_rows(heads, kv_heads, dim)
    elif fused == "qkv_proj":
        dim = _needed(name, "head_dim", dim)
        layout = stacked_rows(heads, kv_heads, dim)
    elif any(kind in type(module).__name__ for kind in ("NeoX", "Bloom")):
        dim = dim or getattr(module, fused).weight.shape[0] // (3 * heads)
        layout, kv_heads = interleaved_rows(heads, dim), heads
    else:
        raise ValueError(
            f"{name}.{fused} ({type(module).__name__}) could be laid out per head or per group: "
            "say which with a LayerSpec (interleaved_rows, grouped_rows, stacked_rows)"
        )
    return _spec(name, module, heads, kv_heads, dim, {fused: layout}, scale_gains)


def _mla(name: str, module: torch.nn.Module, q: str, kv: str) -> LayerSpec:
    heads, _ = _heads(name, module)
    # Megatron's qk_head_dim is what others call nope; theirs is nope and rope together.
    word = "qk_head_dim" if q.startswith("linear") else "qk_nope_head_dim"
    nope = _needed(name, word, _number(module, (word,)))
    rope = _number(module, ("qk_rope_head_dim", "qk_pos_emb_head_dim"))
    rope = _needed(name, "qk_rope_head_dim", rope, least=0)
    v_dim = _needed(name, "v_head_dim", _number(module, ("v_head_dim",)))
    layouts = {q: mla_query_rows(heads, nope, rope), kv: mla_key_rows(heads, nope, v_dim)}
    return _clipped(name, module, heads, heads, layouts)


def _spec(
    name: str,
    module: torch.nn.Module,
    heads: int,
    kv_heads: int,
    dim: int,
    layouts: dict[str, RowLayout],
    scale_gains: bool,
) -> LayerSpec:
    norms = [n for n in NORMS if _acts(getattr(module, n, None))]
    flags = ("qk_l2_norm", "use_qk_norm", "qk_layernorm")
    flagged = [n for n in flags if getattr(getattr(module, "config", None), n, False) is True]
    if not norms and not flagged:
        return _clipped(name, module, heads, kv_heads, layouts)
    if not scale_gains:
        raise ValueError(
            f"{name} normalises queries and keys ({', '.join(norms or flagged)}), so scaling their "
            'projections does nothing: pass qk_norm="gains" to scale the norms\' gains, or leave '
            "the layer out with skip="
        )
    gains: dict[str, RowLayout] = {}
    for norm in norms:
        is_query = norm.startswith("q") and norm != "qk_norm"
        if norm == "qk_norm":
            break
        gains[norm] = _gain(name, module, norm, is_query, heads if is_query else kv_heads, dim)
    if len(gains) != 2:
        raise ValueError(
            f"{name} normalises queries and keys, but not with a gain for each "
            f"({', '.join(norms or flagged)}): there is nothing to scale"
        )
    return _clipped(name, module, heads, kv_heads, gains)


def _gain(
    name: str, module: torch.nn.Module, norm: str, is_query: bool, heads: int, dim: int
) -> RowLayout:
    inner: Any = getattr(module, norm)
    weight = getattr(inner, "weight", None)
    where = f"{name}.{norm} ({type(inner).__name__})"
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        raise ValueError(f"{where} has no gain of one dim to scale")
    if not _gain_is_a_factor(inner):
        raise ValueError(
            f"{where}: doubling its gain does not double its result, so it cannot be clipped by it"
        )
    if weight.shape[0] == dim:
        return (Block(Role.LAYER_Q if is_query else Role.LAYER_K, 0, dim),)
    if weight.shape[0] == heads * dim:
        return query_rows(heads, dim) if is_query else key_rows(heads, dim)
    raise ValueError(
        f"{where} has a gain of {weight.shape[0]} numbers, expected {dim} for all heads together "
        f"or {heads * dim} for {heads} heads"
    )


def _gain_is_a_factor(norm: torch.nn.Module) -> bool:
    """Tries it: some norms multiply by 1 + weight."""
    names = dict(norm.named_parameters())
    random = torch.Generator().manual_seed(0)
    once = {n: torch.rand(x.shape, generator=random) + 0.5 for n, x in names.items()}
    x = torch.randn(3, once["weight"].shape[0], generator=random)
    try:
        with torch.no_grad():
            one = torch.func.functional_call(norm, once, (x,))
            two = torch.func.functional_call(norm, {n: 2 * w for n, w in once.items()}, (x,))
    except Exception as error:
        raise ValueError(f"{type(norm).__name__} could not be tried on numbers: {error}") from error
    return torch.allclose(two, 2 * one, rtol=1e-4, atol=1e-4)


def _clipped(
    name: str,
    module: torch.nn.Module,
    heads: int,
    kv_heads: int,
    layouts: dict[str, RowLayout],
) -> LayerSpec:
    rows = []
    for child, layout in layouts.items():
        projection = module.get_submodule(child)
        if hasattr(projection, "base_layer") or hasattr(projection, "lora_A"):
            raise ValueError(
                f"{name}.{child} is adapted ({type(projection).__name__}): scaling a part of its "
                "sum would not scale its result; merge the adapter first"
            )
        rows.append(ClippedRows(projection, layout, f"{name}.{child}"))
    return LayerSpec(
        name=name,
        num_heads=heads,
        num_kv_heads=kv_heads,
        rows=tuple(rows),
        source=_source(module),
    )


def _source(module: torch.nn.Module) -> Any:
    """What keeps the max logits: the module itself, or a core attention in it.

    Hugging Face's modules have them from their first forward on, if their attention is Keel's.
    """
    for found in (module, *module.children()):
        if hasattr(found, "current_max_attn_logits"):
            return found
    config = getattr(module, "config", None)
    return module if getattr(config, "_attn_implementation", None) == "keel" else None


def _heads(name: str, module: torch.nn.Module) -> tuple[int, int]:
    """(query heads, key heads) of this rank's projections."""
    core = _source(module)
    query = ("num_attention_heads_per_partition", "num_heads", "n_heads", "num_attention_heads")
    key = (
        *("num_query_groups_per_partition", "num_key_value_heads", "num_kv_heads", "n_kv_heads"),
        "num_query_groups",
    )
    heads = _number(module, query) or getattr(core, "num_heads", None)
    kv_heads = _number(module, key) or getattr(core, "num_groups", None)
    if core is not None and core is not module and hasattr(core, "num_groups"):
        heads, kv_heads = core.num_heads, core.num_groups  # of this rank; a config has all ranks'
    heads = _needed(name, "num_heads", heads)
    return heads, kv_heads or heads


def _number(module: torch.nn.Module, names: Sequence[str]) -> int | None:
    """The first int under one of these names, of the module or else of its config."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _needed(name: str, what: str, value: int | None, least: int = 1) -> int:
    if value is None or value < least:
        raise ValueError(
            f"{name} does not say its {what} (nor does its config): describe it with a LayerSpec"
        )
    return value


def _children(module: torch.nn.Module) -> str:
    return ", ".join(name for name, _ in module.named_children()) or "it has no children"


def _acts(norm: Any) -> bool:
    return isinstance(norm, torch.nn.Module) and "Identity" not in type(norm).__name__
