"""Masks of slices beside the dense ones that transformers makes of the same functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st
from transformers import masking_utils as hf

from keel.integrations.transformers_masks import make_mask, terms_of


def expected_mask(hides_queries: bool, **arguments: Any) -> torch.Tensor:
    """(b, sq, sk) of transformers, in causal masks without the rows that stand in the padding."""
    dense = hf.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]
    padding = arguments["attention_mask"]
    if padding is not None and hides_queries:
        start = arguments["q_offset"]
        rows = padding[:, start : start + arguments["q_length"]]
        dense = dense & rows[:, :, None]
    return dense


def got_mask(**arguments: Any) -> torch.Tensor:
    mask = make_mask(**arguments)
    whole = mask.attended.to_dense()
    b, _, sq, sk = mask.shape
    blocks = whole.view(b, sq, b, sk)
    parts = torch.stack([blocks[n, :, n] for n in range(b)])
    assert whole.sum() == parts.sum(), "samples see each other"
    return parts


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """A mask function with all else that transformers passes to mask interfaces."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 14))
    seed = draw(st.integers(0, 2**16))
    random = torch.Generator().manual_seed(seed)
    kinds = ("causal", "window", "chunked", "full", "wide")
    kind = draw(st.sampled_from(kinds))
    size = draw(st.integers(1, 6))
    attention_mask = None
    if draw(st.booleans()):
        holes = draw(st.booleans())  # anywhere, or only on the left
        attention_mask = torch.rand(batch, length, generator=random) < 0.7
        if not holes:
            attention_mask = attention_mask.cummax(1).values
    left = torch.zeros(batch, dtype=torch.int64)
    if attention_mask is not None:
        left = (attention_mask.cumsum(1) == 0).sum(1)
    function = {
        "causal": hf.causal_mask_function,
        "window": hf.sliding_window_causal_mask_function(size),
        "chunked": hf.chunked_causal_mask_function(size, left),
        "full": hf.bidirectional_mask_function,
        "wide": hf.sliding_window_bidirectional_mask_function(size),
    }[kind]
    if draw(st.booleans()):
        starts = torch.rand(batch, length, generator=random) < 0.3
        packed = hf.packed_sequence_mask_function(starts.cumsum(1))
        function = hf.and_masks(function, packed)
    if draw(st.booleans()):
        blocks = torch.randint(-1, 3, (batch, length), generator=random)
        function = hf.or_masks(function, hf.blockwise_overlay(blocks))
    # A cache: fewer queries than keys, the first keys gone.
    q_offset = draw(st.integers(0, length - 1))
    kv_offset = draw(st.integers(0, length - 1))
    return {
        "batch_size": batch,
        "q_length": draw(st.integers(1, length - q_offset)),
        "kv_length": draw(st.integers(1, length - kv_offset)),
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": attention_mask,
    }


@given(problems())
def test_as_transformers(problem: dict[str, Any]) -> None:
    causal = any(term.hi <= 0 for term in terms_of(problem["mask_function"]))
    assert torch.equal(got_mask(**problem), expected_mask(causal, **problem))


def test_a_cache_with_room_left() -> None:
    """Places behind the tokens seen so far, and an offset that is a tensor."""
    padding = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    got = got_mask(
        batch_size=2,
        q_length=1,
        kv_length=9,
        q_offset=torch.tensor(4),
        attention_mask=padding,
    )
    assert got[:, 0].int().tolist() == [[0, 1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0]]


def test_the_usual_masks_are_one_slice_a_sample() -> None:
    def slices(**changes: Any) -> int:
        given = {"batch_size": 4, "q_length": 4096, "kv_length": 4096} | changes
        return make_mask(**given).attended.num_slices

    window = hf.sliding_window_causal_mask_function(100)
    left = torch.ones(4, 4096, dtype=torch.bool)
    left[1, :1000] = False
    packed = hf.packed_sequence_mask_function(torch.arange(4096).expand(4, -1) // 1024)
    assert slices() == 4
    assert slices(mask_function=window) == 4
    assert slices(attention_mask=left) == slices(attention_mask=left.flip(1)) == 4
    assert slices(mask_function=hf.and_masks(window, packed)) == 16


def test_equal_masks_are_one_object() -> None:
    given = {"batch_size": 2, "q_length": 8, "kv_length": 8}
    assert make_mask(**given).attended is make_mask(**given).attended
    everything = torch.ones(2, 8, dtype=torch.bool)
    assert make_mask(**given, attention_mask=everything).attended is make_mask(**given).attended


def test_unknown_functions_are_refused() -> None:
    def diagonal(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return q == k

    given: dict[str, Any] = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    for function in (diagonal, hf.and_masks(hf.causal_mask_function, diagonal)):
        with pytest.raises(
            ValueError, match=r"diagonal is not known to attn_implementation='keel'"
        ):
            make_mask(**given, mask_function=function)
    offset = hf.add_offsets_to_mask_function(hf.causal_mask_function, 1, 1)
    with pytest.raises(ValueError, match="add_offsets_to_mask_function"):
        make_mask(**given, mask_function=offset)


def test_padding_of_another_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \(2, tokens\)"):
        make_mask(batch_size=2, q_length=4, kv_length=4, attention_mask=torch.ones(3, 4))
