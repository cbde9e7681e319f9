"""DotProductAttention with packed documents: each is what dense attention makes of it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.nn_cases import (
    HEADS,
    Tensors,
    assert_same,
    band,
    dense,
    leaves_of,
    make,
    make_config,
    make_module,
    pack,
    watch_paths,
    with_gradients,
)

from keel.nn import DotProductAttention

LENGTHS = {
    "alike": ([3, 1, 5], [3, 1, 5]),
    "one": ([9], [9]),
    "with an empty one": ([4, 0, 5], [4, 0, 5]),
    "more keys": ([3, 1, 4], [5, 6, 4]),
    "fewer keys": ([6, 3], [2, 3]),
}


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
    name: str,
    kind: str,
    window: Any,
    batch: tuple[int, ...],
    softmax_type: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = watch_paths(monkeypatch)
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
