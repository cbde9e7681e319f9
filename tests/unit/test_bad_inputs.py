"""Every wrong argument is refused before anything runs, in words that name it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from keel import flash_attn_func, flash_attn_varlen_func, flex_flash_attn_func, masks

GOOD: dict[str, Any] = {
    "q": torch.randn(6, 4, 8),
    "k": torch.randn(8, 2, 8),
    "v": torch.randn(8, 2, 16),
    "q_ranges": [(0, 3), (3, 6)],
    "k_ranges": [(0, 4), (4, 8)],
    "attn_type_map": [1, 0],
}
GOOD_MASK = {n: GOOD[n] for n in "qkv"} | {"q_ranges": masks.causal(6, 8)}

Table = list[tuple[dict[str, Any], str]]
"""Arguments that replace good ones, and the decisive words of the error."""

NAN, INF = float("nan"), float("inf")


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, **options)


RANGES: Table = [
    ({"q_ranges": [(0, 3), (3, 7)]}, r"slice 1: q_range \[3, 7\) ends after the last of 6 tokens"),
    ({"k_ranges": [(0, 4), (4, 9)]}, r"slice 1: k_range \[4, 9\) ends after the last of 8 tokens"),
    ({"q_ranges": [(0, 3), (6, 3)]}, r"slice 1: q_range \[6, 3\) is reversed"),
    ({"k_ranges": [(-1, 4), (4, 8)]}, r"slice 0: k_range \[-1, 4\) starts below 0"),
    ({"q_ranges": [(0, 3.5), (3, 6)]}, "q_ranges must hold integers, got float64"),
    ({"k_ranges": [(0, 4, 1), (4, 8, 1)]}, r"k_ranges must have shape \(n, 2\), got \(2, 3\)"),
    ({"q_ranges": [0, 3]}, r"q_ranges must be a list of pairs \(start, end\)"),
    ({"q_ranges": [(0, 3)]}, "same length, got 1 and 2"),
    ({"q_ranges": None}, "q_ranges must be a list of pairs"),
    ({"k_ranges": None}, "k_ranges is missing"),
    ({"attn_type_map": [0, 4]}, "unknown mask type 4: expected 0..3"),
    ({"attn_type_map": -1}, "unknown mask type -1"),
    ({"attn_type_map": "diagonal"}, "unknown mask type 'diagonal'"),
    ({"attn_type_map": [0]}, r"attn_type_map must have shape \(2,\), .* got \(1,\)"),
    ({"attn_type_map": [0, 1, 0]}, r"attn_type_map must have shape \(2,\), .* got \(3,\)"),
    ({"q_ranges": masks.causal(6, 8)}, "a ready AttnMask replaces k_ranges and attn_type_map"),
    ({"q_ranges": masks.causal(6, 8), "k_ranges": None}, "pass it alone"),
]

TENSOR_RANGES: Table = [
    ({"q_ranges": ints([0, 3], [3, 7])}, r"slice 1: q_range \[3, 7\) ends after the last of 6"),
    ({"k_ranges": ints([0, 4], [8, 4])}, r"slice 1: k_range \[8, 4\) is reversed"),
    ({"q_ranges": ints([-2, 3], [3, 6])}, r"slice 0: q_range \[-2, 3\) starts below 0"),
    ({"k_ranges": zeros(2, 2)}, "k_ranges must be int32 or int64, got torch.float32"),
    ({"q_ranges": zeros(2, 2).bool()}, "q_ranges must be int32 or int64, got torch.bool"),
    ({"q_ranges": ints(0, 3)}, r"q_ranges must have shape \(n, 2\), got \(2,\)"),
    ({"q_ranges": torch.tensor(3)}, r"q_ranges must have shape \(n, 2\), got \(\)"),
    ({"k_ranges": ints([0, 4, 1])}, r"k_ranges must have shape \(n, 2\), got \(1, 3\)"),
    ({"k_ranges": ints([0, 4])}, "same length, got 2 and 1"),
    ({"attn_type_map": ints(0, 4)}, r"attn_type_map\[1\] is 4: expected 0 \(full\)"),
    ({"attn_type_map": ints(-1, 0)}, r"attn_type_map\[0\] is -1"),
    ({"attn_type_map": ints(0)}, r"attn_type_map must have shape \(2,\), .* got \(1,\)"),
    ({"attn_type_map": ints([0, 1])}, r"attn_type_map must have shape \(2,\), .* got \(1, 2\)"),
    ({"attn_type_map": zeros(2)}, "attn_type_map must be int32 or int64, got torch.float32"),
]

TENSORS: Table = [
    ({"q_ranges": masks.causal(6)}, r"mask is for .* \(6, 6\), but q and k have \(6, 8\) tokens"),
    ({"q": zeros(6, 8)}, r"q must have shape \(tq, hq, d\), got \(6, 8\)"),
    ({"v": zeros(1, 8, 2, 8)}, r"v must have shape \(tk, hk, dv\), got \(1, 8, 2, 8\)"),
    ({"k": zeros(8, 2, 8).half()}, "one dtype, got torch.float32, torch.float16, torch.float32"),
    ({"v": zeros(8, 2, 8, device="meta")}, "one device, got cpu, cpu, meta"),
    ({n: GOOD[n].int() for n in "qkv"}, "must be bf16, fp16, fp32 or fp64, got torch.int32"),
    ({"k": zeros(8, 2, 16)}, "one head_dim, got 8 and 16"),
    ({"v": zeros(7, 2, 8)}, r"same tokens and heads, got \(8, 2\) and \(7, 2\)"),
    ({"v": zeros(8, 4, 8)}, r"same tokens and heads, got \(8, 2\) and \(8, 4\)"),
    ({"q": zeros(6, 3, 8)}, "multiple of key heads, got hq=3, hk=2"),
    ({"q": zeros(6, 0, 8)}, "multiple of key heads, got hq=0, hk=2"),
    ({"q": zeros(6, 4, 0), "k": zeros(8, 2, 0)}, "head_dim of q and k must .* up to 256, got 0"),
    ({"q": zeros(6, 4, 264), "k": zeros(8, 2, 264)}, "head_dim of q and k .* up to 256, got 264"),
    (
        {"q": zeros(6, 4, 12), "k": zeros(8, 2, 12)},
        "head_dim of q and k .* multiple of 8 .* got 12",
    ),
    ({"v": zeros(8, 2, 12)}, "head_dim of v must be a multiple of 8 up to 256, got 12"),
]

SCORES: Table = [
    ({"softmax_scale": NAN}, "softmax_scale must be finite, got nan"),
    ({"softmax_scale": -INF}, "softmax_scale must be finite, got -inf"),
    ({"softcap": -1.0}, r"softcap must be 0 \(off\) or positive, got -1.0"),
    ({"softcap": INF}, r"softcap must be 0 \(off\) or positive, got inf"),
    ({"sink": zeros(2)}, r"sink must have shape \(4,\), got \(2,\)"),
    ({"sink": zeros(4, 1)}, r"sink must have shape \(4,\), got \(4, 1\)"),
    ({"sink": ints(1, 2, 3, 4)}, "sink must be floating point, got torch.int32"),
    ({"sink": zeros(4, device="meta")}, "sink must be on cpu like q, got meta"),
    ({"bias": zeros(6, 8)}, r"bias must be broadcastable .* = \(4, 6, 8\) .* got \(6, 8\)"),
    ({"bias": zeros(2, 6, 8)}, r"bias must be broadcastable .* got \(2, 6, 8\)"),
    ({"bias": zeros(4, 8, 6)}, r"bias must be broadcastable .* got \(4, 8, 6\)"),
    ({"bias": zeros(1, 6, 8, dtype=torch.int64)}, "bias must be floating point, got torch.int64"),
    ({"bias": zeros(1, 6, 8, dtype=torch.bool)}, "a bool mask becomes slices with .*from_dense"),
    ({"bias": zeros(1, 6, 8, device="meta")}, "bias must be on cpu like q, got meta"),
    ({"alibi_slopes": zeros(2)}, r"alibi_slopes must have shape \(4,\), got \(2,\)"),
    ({"alibi_slopes": zeros(3, 4)}, r"alibi_slopes must have shape \(4,\), got \(3, 4\)"),
    ({"alibi_slopes": zeros(4, requires_grad=True)}, "alibi_slopes have no gradient here"),
]

EXECUTION: Table = [
    ({"backend": "cuda"}, "unknown backend 'cuda': expected one of auto, hopper, triton"),
    ({"backend": "hopper"}, "backend 'hopper' cannot run here: "),
    ({"sm_margin": -1}, "sm_margin must be at least 0, got -1"),
    ({"max_logits_out": zeros(2)}, r"max_logits_out must be torch.float32 of shape \(4,\) on cpu"),
    ({"max_logits_out": zeros(4).double()}, "max_logits_out must be .* got torch.float64"),
    ({"max_logits_out": zeros(4).requires_grad_()}, "max_logits_out requires grad, but maxima"),
    ({"max_logits_out": zeros(4, device="meta")}, "max_logits_out must be .* on meta"),
]


def test_the_good_calls_are_good() -> None:
    tensors = {n: torch.tensor(x) for n, x in GOOD.items() if n not in "qkv"}
    for good in (GOOD, GOOD_MASK, GOOD | tensors):
        out, _ = flex_flash_attn_func(**good)
        assert out.shape == (6, 4, 16)


@pytest.mark.parametrize(("change", "message"), RANGES)
def test_ranges_and_types(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flex_flash_attn_func(**(GOOD | change))


@pytest.mark.parametrize(("change", "message"), TENSOR_RANGES)
def test_ranges_and_types_as_tensors(change: dict[str, Any], message: str) -> None:
    tensors = {n: torch.tensor(x) for n, x in GOOD.items() if n not in "qkv"}
    types = {} if "attn_type_map" in change else {"attn_type_map": None}
    for good in (tensors, tensors | types):
        with pytest.raises(ValueError, match=message):
            flex_flash_attn_func(**(GOOD | good | change))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("change", "message"), TENSORS + SCORES)
def test_tensors_and_scores(change: dict[str, Any], message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message):
        flex_flash_attn_func(**(GOOD_MASK | change), backend=backend)


@pytest.mark.parametrize(("change", "message"), EXECUTION)
def test_execution(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flex_flash_attn_func(**(GOOD_MASK | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": [[1.0]]}, "q must be a tensor, got list"),
        ({"sink": [0.0] * 4}, "sink must be a tensor, got list"),
        ({"bias": 1.0}, "bias must be a tensor, got float"),
        ({"alibi_slopes": (0.5,) * 4}, "alibi_slopes must be a tensor, got tuple"),
        ({"sm_margin": True}, "sm_margin must be an int, got True"),
        ({"sm_margin": 1.0}, "sm_margin must be an int, got 1.0"),
    ],
)
def test_wrong_kinds(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        flex_flash_attn_func(**(GOOD_MASK | change))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes CPUs")
def test_triton_does_not_fall_back() -> None:
    # Which of the two is missing depends on the installation.
    with pytest.raises(ValueError, match=r"cannot run here: (CPU tensors|Triton is not)"):
        flex_flash_attn_func(**GOOD_MASK, backend="triton")
    in_fp64 = {n: GOOD[n].double() for n in "qkv"}
    with pytest.raises(ValueError, match=r"cannot run here: (torch.float64 is not|Triton is not)"):
        flex_flash_attn_func(**(GOOD_MASK | in_fp64), backend="triton")


def test_a_refused_call_leaves_the_running_maximum_alone() -> None:
    running = torch.full((4,), 0.5)
    with pytest.raises(ValueError, match="ends after"):
        flex_flash_attn_func(**(GOOD | {"q_ranges": [(0, 3), (3, 7)]}), max_logits_out=running)
    assert torch.all(running == 0.5)


Q, SLOPES = torch.randn(2, 6, 4, 8), torch.ones(4)
CU = ints(0, 3, 6)

FLASH: Table = [
    ({"dropout_p": 0.1}, "dropout_p=0.1: attention dropout is not supported"),
    ({"softcap": 1.0, "alibi_slopes": SLOPES}, "FlashAttention adds ALiBi after the softcap"),
    ({"alibi_slopes": zeros(2, 4)}, r"alibi_slopes must have shape \(hq,\), got \(2, 4\)"),
    ({"alibi_slopes": zeros(3)}, r"alibi_slopes must have shape \(4,\), got \(3,\)"),
    ({"window_size": (-2, 0)}, r"window_size must be \(left, right\) with -1 for unbounded"),
    ({"backend": "hopper"}, "backend 'hopper' cannot run here: "),
    ({"softmax_scale": NAN}, "softmax_scale must be finite"),
]


@pytest.mark.parametrize(("change", "message"), FLASH)
def test_both_flash_calls(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attn_func(Q, Q, Q, **change)
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(Q[0], Q[0], Q[0], CU, CU, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, r"q must have shape \(b, s, h, d\), got \(6, 4, 8\)"),
        ({"k": Q[:1], "v": Q[:1]}, "q, k and v disagree: batches 2, 1, 1"),
        ({"v": Q[:, :5]}, "q, k and v disagree: .* key lengths 6, 5"),
        ({"k": Q[..., :3, :], "v": Q[..., :3, :]}, "multiple of key heads, got hq=4, hk=3"),
    ],
)
def test_batched_shapes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attn_func(**({"q": Q, "k": Q, "v": Q} | change))


@pytest.mark.parametrize("alibi_slopes", [None, SLOPES], ids=["plain", "alibi"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": ints(0)}, "block_table .* is not supported"),
        ({"cu_seqlens_q": ints(0, 6)}, "same number of documents, got 1 and 2"),
        ({"cu_seqlens_k": ints(0, 3, 7)}, "tk=6 is less than the 7 tokens"),
        ({"cu_seqlens_q": ints(1, 3, 6)}, "cu_seqlens_q must start with 0"),
        ({"cu_seqlens_k": ints(0, 6, 3)}, "cu_seqlens_k must not decrease, got 6 then 3"),
        ({"cu_seqlens_q": CU.float()}, "cu_seqlens_q must hold integers, got float32"),
        ({"cu_seqlens_q": CU[None]}, "cu_seqlens_q must have one dimension"),
        ({"cu_seqlens_q": CU[:0]}, "cu_seqlens_q must start with 0"),
    ],
)
def test_packed_lengths(
    change: dict[str, Any], message: str, alibi_slopes: torch.Tensor | None
) -> None:
    good = {"q": Q[0], "k": Q[0], "v": Q[0], "cu_seqlens_q": CU, "cu_seqlens_k": CU}
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(**(good | change), alibi_slopes=alibi_slopes)
