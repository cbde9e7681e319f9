"""Masks and token orders of Megatron, which need nothing of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keel import masks
from keel.integrations.megatron_masks import batch_tokens, packed_tokens


def packed(cu: Any, padded: Any = None, cu_k: Any = None) -> Any:
    cu, padded, cu_k = (None if x is None else torch.tensor(x) for x in (cu, padded, cu_k))
    return SimpleNamespace(
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu if cu_k is None else cu_k,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
    )


@pytest.mark.parametrize(
    ("kind", "window", "expected"),
    [
        ("causal", None, masks.causal(6)),
        ("causal", (2, 5), masks.sliding_window(6, left=2, right=0)),
        ("no_mask", (2, 1), masks.sliding_window(6, left=2, right=1)),
        ("no_mask", (-1, -1), masks.full(6)),
        ("causal_bottom_right", (-1, 0), masks.causal(6)),
    ],
)
def test_batches(kind: str, window: Any, expected: masks.AttnMask) -> None:
    mask, layout = batch_tokens(kind, window, 6, 6, 1)
    assert torch.equal(mask.to_dense(), expected.to_dense()) and layout is None


def test_ranks_of_a_batch_hold_a_piece_and_its_mirror_image() -> None:
    mask, layout = batch_tokens("causal", None, 4, 4, 3)
    assert mask == masks.causal(12) and layout is not None
    assert [layout.tokens_of(n).tolist() for n in range(3)] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]


def test_padded_documents() -> None:
    mask, _ = packed_tokens(packed([0, 3, 4], [0, 4, 8]), "padding_causal", None, 9, 9, 1)
    dense = torch.zeros(9, 9, dtype=torch.bool)
    dense[:3, :3] = torch.ones(3, 3, dtype=torch.bool).tril()
    dense[4, 4] = True
    assert torch.equal(mask.to_dense(), dense)


def test_ranks_of_documents() -> None:
    """Each document is cut by itself."""
    mask, layout = packed_tokens(packed([0, 3, 10], [0, 4, 12]), "causal", None, 6, 6, 2)
    assert mask.shape == (12, 12) and mask.area() == 6 + 28 and layout is not None
    assert layout.tokens_of(0).tolist() == [0, 3, 4, 5, 10, 11]
    assert layout.tokens_of(1).tolist() == [1, 2, 6, 7, 8, 9]


def test_bounds_are_read_anew_when_they_change() -> None:
    params = packed([0, 3, 6])
    assert packed_tokens(params, "causal", None, 6, 6, 1).mask.area() == 12
    assert packed_tokens(params, "no_mask", None, 6, 6, 1).mask.area() == 18
    params.cu_seqlens_q[1] = 1
    assert packed_tokens(params, "causal", None, 6, 6, 1).mask.area() == 16
    params.cu_seqlens_q_padded = torch.tensor([0, 2, 8])
    params.cu_seqlens_kv_padded = params.cu_seqlens_q_padded
    assert packed_tokens(params, "causal", None, 8, 8, 1).mask.to_dense()[1].sum() == 0


@pytest.mark.parametrize(
    ("params", "kind", "ranks", "message"),
    [
        (packed([1, 6]), "causal", 1, "must begin with 0"),
        (packed([0, 4, 3]), "causal", 1, "never decrease"),
        (packed([0, 3, 6], [0, 2, 6]), "causal", 1, "at least the room"),
        (packed([0, 3, 6], cu_k=[0, 6]), "causal", 1, "same number of documents, got 2 and 1"),
        (packed([0, 3, 6], cu_k=[0, 2, 6]), "causal", 1, "got 3 and 2 in document 0"),
        (packed([0.0, 6.0]), "causal", 1, "must be an"),
        (packed([0, 3, 6]), "arbitrary", 1, "arbitrary leaves it"),
        (packed([0, 4, 12], cu_k=[0, 8, 12]), "no_mask", 2, "same tokens"),
        (packed([0, 4, 8]), "no_mask", 2, "they have 8 of 12 tokens"),
    ],
)
def test_bounds_that_cannot_be_meant(params: Any, kind: str, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_tokens(params, kind, None, 6, 6, ranks)
