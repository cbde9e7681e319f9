"""The public surface, written down: a change here is a change for users."""

from __future__ import annotations

import inspect

import keel

PUBLIC = [
    "AttnForwardMeta",
    "AttnMask",
    "AttnMaskType",
    "AttnRange",
    "AttnRanges",
    "AttnSlice",
    "__version__",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flex_flash_attn_func",
    "masks",
    "warmup",
]

MASKS = [
    "AttnMask",
    "AttnMaskType",
    "AttnRange",
    "AttnRanges",
    "AttnSlice",
    "RowIntervals",
    "block_causal",
    "causal",
    "documents",
    "from_block_mask",
    "from_dense",
    "full",
    "prefix_lm",
    "sliding_window",
]


def test_public_names() -> None:
    assert sorted(keel.__all__) == PUBLIC
    assert sorted(keel.masks.__all__) == MASKS
    assert all(hasattr(keel, name) for name in PUBLIC)
    assert all(hasattr(keel.masks, name) for name in MASKS)


def parameters(function: object) -> tuple[list[str], list[str]]:
    """Names that may be passed by position, and names that must be given."""
    by_position, by_name = [], []
    for name, parameter in inspect.signature(function).parameters.items():  # type: ignore[arg-type]
        keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        (by_name if keyword_only else by_position).append(name)
    return by_position, by_name


def test_signature_of_the_main_call() -> None:
    assert parameters(keel.flex_flash_attn_func) == (
        ["q", "k", "v", "q_ranges", "k_ranges", "attn_type_map"],
        [
            "softmax_scale",
            "softcap",
            "sink",
            "bias",
            "alibi_slopes",
            "return_max_logits",
            "max_logits_out",
            "deterministic",
            "sm_margin",
            "backend",
        ],
    )


def test_flash_attention_signatures() -> None:
    """FlashAttention's own order: calls that pass options by position must keep working."""
    options = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"]
    options += ["deterministic", "return_attn_probs"]
    ours = ["return_max_logits", "backend"]
    assert parameters(keel.flash_attn_func) == (["q", "k", "v", *options], ours)
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert parameters(keel.flash_attn_varlen_func) == (
        ["q", "k", "v", *lengths, *options, "block_table"],
        ours,
    )


def test_fields_of_the_result() -> None:
    assert list(inspect.signature(keel.AttnForwardMeta).parameters) == ["lse", "max_logits"]
