"""Each builder against its definition, asked pair by pair."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import attn_masks
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from keel.masks import (
    AttnMask,
    AttnSlice,
    block_causal,
    causal,
    documents,
    from_block_mask,
    from_dense,
    full,
    prefix_lm,
    sliding_window,
)

Sees = Callable[[int, int], bool]


def agrees(mask: AttnMask, tq: int, tk: int, sees: Sees) -> None:
    want = [[sees(i, j) for j in range(tk)] for i in range(tq)]
    assert mask.shape == (tq, tk)
    np.testing.assert_array_equal(
        mask.to_dense().numpy(), np.array(want, bool).reshape(tq, tk), strict=True
    )


def in_window(p: int, j: int, left: int | None, right: int | None, sinks: int) -> bool:
    """Whether position p of a document sees its key j."""
    ahead = right in (None, -1) or j <= p + right  # type: ignore[operator]
    near = left in (None, -1) or j >= p - left  # type: ignore[operator]
    return ahead and (near or j < sinks)


sides = st.sampled_from([None, -1]) | st.integers(0, 12)


@given(st.integers(0, 20), st.none() | st.integers(0, 20))
def test_full_and_causal(tq: int, tk: int | None) -> None:
    keys = tq if tk is None else tk
    agrees(full(tq, tk), tq, keys, lambda i, j: True)
    agrees(causal(tq, tk), tq, keys, lambda i, j: keys - 1 - j >= tq - 1 - i)
    assert full(tq, tk).num_slices <= 1 and causal(tq, tk).num_slices <= 1


@given(st.integers(1, 20), st.none() | st.integers(1, 20), sides, sides, st.integers(0, 8))
def test_sliding_window(
    tq: int, tk: int | None, left: int | None, right: int | None, sinks: int
) -> None:
    keys = tq if tk is None else tk
    mask = sliding_window(tq, tk, left=left, right=right, sink_tokens=sinks)
    agrees(mask, tq, keys, lambda i, j: in_window(i + keys - tq, j, left, right, sinks))
    assert mask.num_slices <= 2


lengths = st.lists(st.integers(0, 7), max_size=5)


def cumulative(sizes: list[int]) -> list[int]:
    return [0, *np.cumsum(sizes).tolist()]


def document_of(sizes: list[int], token: int) -> int:
    """Which document a token is in; -1 for padding."""
    return next((n for n, end in enumerate(cumulative(sizes)[1:]) if token < end), -1)


@settings(max_examples=150)
@given(st.data(), lengths, sides, sides, st.integers(0, 3), st.booleans())
def test_documents(
    data: st.DataObject,
    q_sizes: list[int],
    left: int | None,
    right: int | None,
    sinks: int,
    is_causal: bool,
) -> None:
    k_sizes = data.draw(st.lists(st.integers(0, 7), min_size=len(q_sizes), max_size=len(q_sizes)))
    q_pad, k_pad = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    tq, tk = sum(q_sizes) + q_pad, sum(k_sizes) + k_pad

    def sees(i: int, j: int) -> bool:
        doc = document_of(q_sizes, i)
        if doc < 0 or doc != document_of(k_sizes, j):
            return False
        row, key = i - cumulative(q_sizes)[doc], j - cumulative(k_sizes)[doc]
        position = row + k_sizes[doc] - q_sizes[doc]
        return in_window(position, key, left, 0 if is_causal else right, sinks)

    mask = documents(
        cumulative(q_sizes),
        cumulative(k_sizes),
        causal=is_causal,
        window=(left, right),
        sink_tokens=sinks,
        tq=tq,
        tk=tk,
    )
    agrees(mask, tq, tk, sees)


def test_documents_takes_tensors_arrays_and_lists() -> None:
    want = documents([0, 3, 5], causal=True)
    assert want.shape == (5, 5) and want.num_slices == 2
    for cu_seqlens in (torch.tensor([0, 3, 5]), torch.tensor([0, 3, 5]).int(), np.array([0, 3, 5])):
        assert documents(cu_seqlens, cu_seqlens, causal=True) == want
    assert documents([0, 3, 5], tq=8).shape == (8, 8)
    assert documents([0, 3, 3, 5], causal=True) == want, "empty documents leave no slice"
    assert documents([0]).shape == (0, 0)


def test_documents_do_not_loop_in_python() -> None:
    cu_seqlens = np.arange(10_001) * 100
    documents(cu_seqlens, causal=True)
    start = time.perf_counter()
    mask = documents(cu_seqlens, causal=True)
    assert time.perf_counter() - start < 0.1
    assert mask.num_slices == 10_000 and mask.area() == 10_000 * 5050


@given(st.data(), lengths)
def test_prefix_lm(data: st.DataObject, sizes: list[int]) -> None:
    prefixes = [data.draw(st.integers(0, size)) for size in sizes]

    def sees(i: int, j: int) -> bool:
        doc = document_of(sizes, i)
        if doc != document_of(sizes, j):
            return False
        return j <= i or j - cumulative(sizes)[doc] < prefixes[doc]

    agrees(prefix_lm(cumulative(sizes), prefixes), sum(sizes), sum(sizes), sees)


@given(lengths, st.integers(1, 9))
def test_block_causal_by_size(sizes: list[int], block: int) -> None:
    def sees(i: int, j: int) -> bool:
        doc = document_of(sizes, i)
        start = cumulative(sizes)[doc]
        return doc == document_of(sizes, j) and (j - start) // block <= (i - start) // block

    agrees(block_causal(block, cumulative(sizes)), sum(sizes), sum(sizes), sees)


@given(st.data(), lengths, st.booleans())
def test_block_causal_by_bounds(data: st.DataObject, sizes: list[int], one: bool) -> None:
    total = sum(sizes)
    inner = data.draw(st.lists(st.integers(0, total), max_size=5))
    bounds = [0, *sorted(inner), total]

    def sees(i: int, j: int) -> bool:
        block = [int(np.searchsorted(bounds, t, side="right")) for t in (i, j)]
        same = one or document_of(sizes, i) == document_of(sizes, j)
        return same and block[1] <= block[0]

    mask = block_causal(bounds) if one else block_causal(bounds, torch.tensor(cumulative(sizes)))
    agrees(mask, total, total, sees)


@settings(max_examples=200)
@given(st.integers(0, 24), st.integers(0, 24), st.integers(0, 2**32), st.floats(0, 1))
def test_from_dense_random(tq: int, tk: int, seed: int, density: float) -> None:
    dense = torch.rand(tq, tk, generator=torch.Generator().manual_seed(seed)) < density
    assert torch.equal(from_dense(dense).to_dense(), dense)


@settings(max_examples=200)
@given(attn_masks(max_tokens=40))
def test_from_dense_round_trip(mask: AttnMask) -> None:
    again = from_dense(mask.to_dense())
    assert torch.equal(again.to_dense(), mask.to_dense()) and again.area() == mask.area()


STRUCTURED = [
    (full(50, 30), 1),
    (causal(64), 1),
    (causal(64, 100), 1),
    (causal(100, 64), 1),
    (sliding_window(64, left=9), 2),
    (sliding_window(64, left=9, right=4), 3),
    (sliding_window(64, left=9, sink_tokens=3), 5),
    (documents([0, 20, 50, 64], causal=True), 3),
    (prefix_lm([0, 30, 64], [10, 5]), 6),
    (block_causal(16, [0, 64]), 4),
    (AttnMask([], 20, 20), 0),
]


@pytest.mark.parametrize(("mask", "limit"), STRUCTURED)
def test_from_dense_finds_structure(mask: AttnMask, limit: int) -> None:
    again = from_dense(mask.to_dense())
    assert torch.equal(again.to_dense(), mask.to_dense())
    assert again.num_slices <= limit


# from_block_mask: mask_mods as flex_attention users write them.


def causal_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q >= k


def window_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q >= k) & (q - k <= 37)


def noop_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return b.new_ones((), dtype=torch.bool)


def per_head_mod(
    b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    return (q - k).abs() <= 10 * h + 30 * b + 3


def document_mod(
    ids: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    return (ids[q] == ids[k]) & (q >= k)


@functools.cache
def document_ids(length: int) -> torch.Tensor:
    return torch.arange(length) ** 2 // 3000


def dense_mod(mod: Callable[..., torch.Tensor], tq: int, tk: int, b: int = 0, h: int = 0) -> object:
    return create_mask(mod, b + 1, h + 1, tq, tk, device="cpu")[b, h].expand(tq, tk)


@pytest.mark.parametrize("tq,tk", [(256, 256), (300, 300), (111, 333), (333, 111), (1, 129)])
@pytest.mark.parametrize("block", [128, (64, 32)])
@pytest.mark.parametrize("mod", [causal_mod, window_mod, noop_mod, per_head_mod])
def test_from_block_mask(
    mod: Callable[..., torch.Tensor], tq: int, tk: int, block: int | tuple[int, int]
) -> None:
    block_mask = create_block_mask(mod, None, None, tq, tk, device="cpu", BLOCK_SIZE=block)
    mask = from_block_mask(block_mask)
    assert torch.equal(mask.to_dense(), dense_mod(mod, tq, tk))
    assert mask.num_slices <= 3


def test_from_block_mask_indexing_mod() -> None:
    """The mask_mod indexes a tensor that is exactly as long as the sequence."""
    mod = functools.partial(document_mod, document_ids(301))
    block_mask = create_block_mask(
        lambda b, h, q, k: mod(b, h, q, k), None, None, 301, 301, device="cpu"
    )
    mask = from_block_mask(block_mask)
    assert torch.equal(mask.to_dense(), dense_mod(lambda b, h, q, k: mod(b, h, q, k), 301, 301))
    assert mask.num_slices == int(document_ids(301)[-1]) + 1


def test_from_block_mask_without_full_blocks() -> None:
    hand_made = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 2, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 9, 9], [1, 0, 9], [2, 9, 9]]]], dtype=torch.int32),
        BLOCK_SIZE=16,
        mask_mod=causal_mod,
        seq_lengths=(41, 43),
        compute_q_blocks=False,
    )
    i, j = np.ogrid[:41, :43]
    listed = (i // 16 == j // 16) | ((i // 16 == 1) & (j // 16 == 0))
    np.testing.assert_array_equal(from_block_mask(hand_made).to_dense().numpy(), listed & (i >= j))


def test_from_block_mask_full_blocks_skip_mask_mod() -> None:
    """A block listed as full is full whatever mask_mod says, and is cut at the lengths."""
    block_mask = BlockMask.from_kv_blocks(
        torch.tensor([[[0, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 0], [1, 0]]]], dtype=torch.int32),
        torch.tensor([[[2, 1]]], dtype=torch.int32),
        torch.tensor([[[[1, 0], [0, 0]]]], dtype=torch.int32),
        BLOCK_SIZE=8,
        mask_mod=causal_mod,
        seq_lengths=(13, 11),
    )
    i, j = np.ogrid[:13, :11]
    np.testing.assert_array_equal(
        from_block_mask(block_mask).to_dense().numpy(), (i < 8) | (j < 8) | (i >= j)
    )


def test_from_block_mask_batch_and_head() -> None:
    block_mask = create_block_mask(per_head_mod, 2, 3, 200, 150, device="cpu", BLOCK_SIZE=64)
    for b in range(2):
        for h in range(3):
            mask = from_block_mask(block_mask, batch=b, head=h)
            assert torch.equal(mask.to_dense(), dense_mod(per_head_mod, 200, 150, b, h))
    shared = create_block_mask(noop_mod, None, 3, 64, 64, device="cpu", BLOCK_SIZE=64)
    assert from_block_mask(shared, batch=5, head=2) == full(64)
    with pytest.raises(ValueError, match="holds 2 masks along batch: choose one with batch=n"):
        from_block_mask(block_mask, head=1)
    with pytest.raises(ValueError, match=r"holds 3 masks along head: .* n in 0\.\.2"):
        from_block_mask(block_mask, batch=1)
    with pytest.raises(ValueError, match="batch=2 is outside the 2 masks"):
        from_block_mask(block_mask, batch=2, head=0)
    with pytest.raises(ValueError, match="head=-1 is outside the 3 masks"):
        from_block_mask(block_mask, batch=0, head=-1)


@pytest.mark.parametrize("dims", [0, 1])
def test_from_block_mask_without_leading_dimensions(dims: int) -> None:
    """Older PyTorch drops the dimensions that one indexes."""
    whole = create_block_mask(window_mod, 1, 1, 100, 100, device="cpu", BLOCK_SIZE=32)
    index = (0,) * (2 - dims)
    assert whole.full_kv_num_blocks is not None and whole.full_kv_indices is not None
    part = BlockMask.from_kv_blocks(
        whole.kv_num_blocks[index],
        whole.kv_indices[index],
        whole.full_kv_num_blocks[index],
        whole.full_kv_indices[index],
        BLOCK_SIZE=32,
        mask_mod=window_mod,
        seq_lengths=(100, 100),
        compute_q_blocks=False,
    )
    assert from_block_mask(part) == from_block_mask(whole)


def test_from_block_mask_in_several_batches_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from keel.masks import builders

    block_mask = create_block_mask(window_mod, None, None, 300, 300, device="cpu", BLOCK_SIZE=32)
    want = from_block_mask(block_mask)
    monkeypatch.setattr(builders, "_PAIRS_AT_ONCE", 3 * 32 * 32)
    assert from_block_mask(block_mask) == want
    monkeypatch.setattr(builders, "_EXPAND_LIMIT", 0)  # keeps the blocks as slices
    assert torch.equal(from_block_mask(block_mask).to_dense(), want.to_dense())


BAD_CALLS: list[tuple[Callable[[], AttnMask], str]] = [
    (lambda: full(-1), "tq must be in 0"),
    (lambda: causal(4, -1), "tk must be in 0"),
    (lambda: sliding_window(4, left=-2), "window left must be a number of tokens, .* got -2"),
    (lambda: sliding_window(4, left=0, right=-3), "window right must be .* got -3"),
    (lambda: sliding_window(4, left=1.5), "window left must be .* got 1.5"),  # type: ignore[arg-type]
    (lambda: sliding_window(4, left=1, sink_tokens=-1), "sink_tokens must not be negative, got -1"),
    (lambda: documents([1, 3]), r"cu_seqlens_q must start with 0, got \[1, 3\]"),
    (lambda: documents([]), r"cu_seqlens_q must start with 0, got \[\]"),
    (lambda: documents([0, 5, 3]), "cu_seqlens_q must not decrease, got 5 then 3 at 2: give cumul"),
    (lambda: documents([0, 3], [0, 2, 3]), "same number of documents, got 1 and 2"),
    (lambda: documents([0, 3], [0, 3, 2]), "cu_seqlens_k must not decrease"),
    (lambda: documents([0.0, 3.0]), "cu_seqlens_q must hold integers, got float64"),  # type: ignore[list-item]
    (lambda: documents(torch.tensor([[0, 3]])), r"one dimension, got shape \(1, 2\)"),
    (lambda: documents([0, 3], tq=2), "tq=2 is less than the 3 tokens"),
    (lambda: documents([0, 3], tk=1), "tk=1 is less than the 3 tokens"),
    (lambda: prefix_lm([0, 3], [1, 1]), "one entry for each of 1 documents, got 2"),
    (lambda: prefix_lm([0, 3, 5], [1, 3]), r"prefix_lengths\[1\] is 3: expected 0..2"),
    (lambda: prefix_lm([0, 3], -1), r"prefix_lengths\[0\] is -1"),
    (lambda: block_causal(0, [0, 3]), "block size must be at least 1 token, got 0"),
    (lambda: block_causal(4), r"how many tokens there are: give cu_seqlens"),
    (lambda: block_causal([0, 4], [0, 5]), "same token, got 4 and 5"),
    (lambda: block_causal([2, 4]), "block_bounds must start with 0"),
    (lambda: from_dense(torch.ones(2, 2)), "mask must be bool .* got torch.float32"),
    (lambda: from_dense(torch.ones(1, 2, 2).bool()), r"shape \(tq, tk\), got \(1, 2, 2\)"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_builders_reject_nonsense(call: Callable[[], AttnMask], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_from_dense_wants_a_tensor() -> None:
    with pytest.raises(TypeError, match="mask must be a bool tensor, got list"):
        from_dense([[True]])  # type: ignore[arg-type]


def test_one_prefix_length_serves_all_documents() -> None:
    assert prefix_lm([0, 3, 8], 2) == prefix_lm([0, 3, 8], [2, 2])
    assert list(prefix_lm([0, 2], 2)) == [AttnSlice(0, 2, 0, 2)]
