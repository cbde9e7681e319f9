"""attn_implementation="keel" beside transformers' own eager attention, in whole models."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.models import (
    DENSE,
    MODELS,
    WINDOW,
    assert_close,
    assert_rounded_as,
    pair,
    results,
    results_of_batches,
    tiny,
    tokens,
)
from transformers import AttentionMaskInterface

import keel.integrations.transformers as integration
from keel.integrations.transformers_masks import ModelMask, Term

BOUNDS = [0, 7, 9, 20]
"""Of packed documents: longer than the window, shorter, and longer than two."""


def positions(bounds: list[int] = BOUNDS) -> torch.Tensor:
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    return torch.cat([torch.arange(n) for n in lengths])[None]


def labels_of_documents(ids: torch.Tensor, bounds: list[int] = BOUNDS) -> torch.Tensor:
    """No document predicts the first token of the next."""
    labels = ids.clone()
    labels[:, bounds[1:-1]] = -100
    return labels


@pytest.mark.parametrize("name", MODELS)
def test_as_eager(name: str) -> None:
    eager, ours = pair(name)
    ids = tokens()
    assert_close(results(ours, ids), results(eager, ids))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_padding(name: str, side: str) -> None:
    eager, ours = pair(name)
    ids = tokens(3)
    mask = torch.ones_like(ids)
    for sample, missing in enumerate((0, 6, 13)):
        mask[sample, :missing] = 0
    if side == "right":
        mask = mask.flip(1)
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]  # the first token is nobody's to predict
    labels = ids.where(mask * before == 1, -100)
    inputs = {"labels": labels, "attention_mask": mask}
    assert_close(results(ours, ids, **inputs), results(eager, ids, **inputs))


@pytest.mark.parametrize("name", [x for x in MODELS if x != "gpt_oss"])
def test_packed_by_positions(name: str) -> None:
    eager, ours = pair(name)
    ids = tokens(2)
    inputs = {"position_ids": positions().expand(2, -1), "labels": labels_of_documents(ids)}
    expected = results(eager, ids, use_cache=False, **inputs)
    assert_close(results(ours, ids, use_cache=False, **inputs), expected)
    if name != "llama4":  # its layers do not tell their attention of positions
        # transformers does not look for documents where there is a cache, filled or not.
        assert_close(results(ours, ids, use_cache=True, **inputs), expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_by_bounds(name: str) -> None:
    eager, ours = pair(name)
    ids = tokens(1)
    labels = labels_of_documents(ids)
    expected = results(eager, ids, use_cache=False, labels=labels, position_ids=positions())
    cu = torch.tensor(BOUNDS, dtype=torch.int32)
    bounds = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 11, "max_length_k": 11}
    got = results(ours, ids, labels=labels, position_ids=positions(), **bounds)
    assert_close(got, expected)
    # Without position_ids rotations are those of one sequence, and only distances matter to them.
    assert_close(results(ours, ids, labels=labels, **bounds), expected, 5e-5)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_packed_documents_are_as_alone(name: str) -> None:
    """Losses and gradients, too: those of gpt-oss, whose eager attention ignores packing."""
    eager, ours = pair(name)
    ids = tokens(1)
    packed = results(ours, ids, labels=labels_of_documents(ids), position_ids=positions())
    expected: dict[str, torch.Tensor] = {}
    parts = []
    for start, end in itertools.pairwise(BOUNDS):
        alone = results(eager, ids[:, start:end])
        share = (end - start - 1) / (ids.shape[1] - len(BOUNDS) + 1)
        parts.append(alone.pop("logits")[0 if start == 0 else 1 :])
        expected = {n: share * x + expected.get(n, 0) for n, x in alone.items()}
    assert_close(packed, {**expected, "logits": torch.cat(parts)})


def test_packed_and_padded() -> None:
    """Documents, and padding behind them whose positions mean nothing."""
    model, alone = tiny("mistral"), tiny("mistral")
    ids, mask = tokens(2, 24), torch.ones(2, 24)
    mask[:, 20:] = 0
    labels = labels_of_documents(ids).where(mask == 1, -100)
    expected = results(alone, ids[:, :20], labels=labels[:, :20], position_ids=positions())
    where = torch.nn.functional.pad(positions(), (0, 4), value=3)
    inputs = {"labels": labels, "position_ids": where, "attention_mask": mask}
    assert_close(results(model, ids, **inputs), expected)


def test_positions_of_padding_mean_nothing() -> None:
    """As generation makes them, and with a hole: what is behind it still sees what is before."""
    eager, ours = pair("llama")
    ids = tokens(2)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, 6:9] = 0
    where = (mask.cumsum(1) - 1).clamp(min=0)
    labels = ids.clone()
    labels[0, :5] = labels[1, 6:10] = -100
    inputs = {"labels": labels, "position_ids": where, "attention_mask": mask}
    assert_close(results(ours, ids, **inputs), results(eager, ids, **inputs))


@pytest.mark.parametrize("name", DENSE)
def test_bf16(name: str) -> None:
    eager, ours = (model.bfloat16() for model in pair(name, **DENSE[name]))
    wide = copy.deepcopy(eager).float()
    assert_rounded_as(*(results_of_batches(model) for model in (ours, eager, wide)))


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_autocast(name: str) -> None:
    """Caches and rotations may widen queries and keys to fp32 while values are bf16."""
    eager, ours = pair(name, **DENSE[name])
    wide = results_of_batches(eager)
    with torch.autocast("cpu", torch.bfloat16):
        got, low = results_of_batches(ours), results_of_batches(eager)
    assert_rounded_as(got, low, wide)


def test_compiled() -> None:
    """Graphs end at attention; what is remembered of one forward must not serve the next."""
    eager, ours = pair("mistral")
    compiled = torch.compile(ours, backend="aot_eager")
    for seed, bounds in ((1, BOUNDS), (2, [0, 3, 20])):
        ids = tokens(1, seed=seed)
        inputs = {"position_ids": positions(bounds), "labels": labels_of_documents(ids, bounds)}
        expected = results(eager, ids, use_cache=False, **inputs)
        ours.zero_grad()
        got = results(compiled, ids, use_cache=False, **inputs)
        got = {name.removeprefix("_orig_mod."): x for name, x in got.items()}
        assert_close(got, expected)


def test_gradient_checkpointing() -> None:
    eager, ours = pair("gemma2")
    ids = tokens()
    ours.gradient_checkpointing_enable()
    assert_close(results(ours, ids), results(eager, ids))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "deepseek_v3"])
def test_generate(name: str, cache: str) -> None:
    """Left padding, caches that grow, that slide and that are larger than what they hold."""
    eager, ours = (model.eval() for model in pair(name))
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected, got = (model.generate(ids, **options) for model in (eager, ours))
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(
        torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4
    )


def test_bidirectional() -> None:
    """A decoder that is asked to look ahead; padded queries see, as with eager attention."""
    eager, ours = pair("llama")
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, 15:] = 0
    for inputs in ({}, {"attention_mask": mask}):
        expected = results(eager, ids, is_causal=False, **inputs)
        assert_close(results(ours, ids, is_causal=False, **inputs), expected)


def test_masks_are_made_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(**arguments: Any) -> ModelMask:
        made.append(integration.make_mask(**arguments))
        return made[-1]

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "keel", counted)
    model = tiny("gemma2", num_hidden_layers=6)
    model(input_ids=tokens(), attention_mask=torch.ones(2, 20))
    assert len(made) == 2  # full layers and windows
    assert [mask.attended.num_slices for mask in made] == [2, 2]


# What cannot be honoured


def test_refuses_masks_of_four_dims() -> None:
    model, ids = tiny("llama"), tokens(1)
    with pytest.raises(ValueError, match=r"attention_mask is a Tensor of shape \(1, 1, 20, 20\)"):
        model(input_ids=ids, attention_mask=torch.zeros(1, 1, 20, 20))


def test_refuses_dropout_in_training_only() -> None:
    model, ids = tiny("llama", attention_dropout=0.1), tokens(1)
    with pytest.raises(ValueError, match=r"attention dropout of 0\.1 in LlamaAttention"):
        model(input_ids=ids)
    with torch.no_grad():
        eager, ours = (x.eval()(input_ids=ids).logits for x in pair("llama", attention_dropout=0.1))
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


def test_refuses_to_output_attentions() -> None:
    model, ids = tiny("llama"), tokens(1)
    with pytest.raises(ValueError, match="probabilities are never made"):
        model(input_ids=ids, output_attentions=True)


@pytest.mark.parametrize("unknown", ["head_mask", "position_bias", "cache", "something_new"])
def test_refuses_arguments_that_it_does_not_know(unknown: str) -> None:
    model, ids = tiny("llama"), tokens(1)
    with pytest.raises(ValueError, match=rf"LlamaAttention got {unknown} \(Tensor\)"):
        model(input_ids=ids, **{unknown: torch.ones(4)})
    model(input_ids=ids, **{unknown: None})


def test_ignores_what_it_is_told_to() -> None:
    model, ids = tiny("llama"), tokens(1)
    try:
        integration.register(ignore=["note"])
        model(input_ids=ids, note="for somebody else")
    finally:
        integration.register()
    with pytest.raises(ValueError, match="note"):
        model(input_ids=ids, note="for somebody else")
    with pytest.raises(TypeError, match="ignore"):
        integration.register(ignore="note")


def test_refuses_half_of_the_bounds() -> None:
    model, ids = tiny("llama"), tokens(1)
    cu = torch.tensor(BOUNDS)
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k together"):
        model(input_ids=ids, cu_seq_lens_q=cu)
    with pytest.raises(ValueError, match="differ"):
        model(input_ids=ids, cu_seq_lens_q=cu, cu_seq_lens_k=cu + torch.tensor([0, 1, 0, 0]))
    with pytest.raises(ValueError, match="at most the 20 tokens"):
        model(input_ids=ids, cu_seq_lens_q=cu * 2, cu_seq_lens_k=cu * 2)


def test_refuses_packing_that_attention_does_not_hear_of() -> None:
    model, ids = tiny("llama"), tokens(1)
    number = torch.zeros(1, 20, dtype=torch.int32)
    with pytest.raises(ValueError, match="seq_idx"):
        model(input_ids=ids, seq_idx=number)
    model(input_ids=ids, seq_idx=number, position_ids=positions(), use_cache=False)


def call(**changes: Any) -> torch.Tensor:
    """The attention function alone, without a model."""
    q = torch.randn(1, 4, 6, 8)
    k, v = torch.randn(2, 1, 2, 6, 8)
    given = {"module": torch.nn.Identity(), "query": q, "key": k, "value": v}
    given["attention_mask"] = ModelMask([Term(hi=0)], 1, (0, 6), (0, 6))
    return integration.attention(**(given | changes))[0]


def test_refuses_a_window_that_is_not_in_the_mask() -> None:
    windowed = ModelMask([Term(lo=1 - WINDOW, hi=0)], 1, (0, 6), (0, 6))
    call(attention_mask=windowed, sliding_window=WINDOW)
    with pytest.raises(ValueError, match="a window of 4 tokens"):
        call(attention_mask=windowed, sliding_window=4)
    with pytest.raises(ValueError, match="a window of 5 tokens"):
        call(sliding_window=WINDOW)


def test_refuses_masks_of_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"is for \(b, 1, sq, sk\) = \(1, 1, 6, 6\)"):
        call(key=torch.randn(1, 2, 9, 8), value=torch.randn(1, 2, 9, 8))


def test_without_a_mask_the_module_must_say_what_it_is() -> None:
    module = torch.nn.Identity()
    with pytest.raises(ValueError, match="whether it is causal"):
        call(attention_mask=None)
    torch.manual_seed(0)
    causal = call(attention_mask=None, is_causal=True)
    module.is_causal = True
    torch.manual_seed(0)
    assert torch.equal(call(attention_mask=None, module=module), causal)
    torch.manual_seed(0)
    assert torch.equal(call(), causal)
    torch.manual_seed(0)
    assert not torch.allclose(call(attention_mask=None, is_causal=False), causal)
    with pytest.raises(ValueError, match="where the queries stand"):
        call(attention_mask=None, is_causal=True, query=torch.randn(1, 4, 1, 8))


def test_a_model_that_computes_with_its_mask_is_told() -> None:
    mask = ModelMask([Term(hi=0)], 1, (0, 6), (0, 6))
    with pytest.raises(ValueError, match="computes with its attention mask"):
        torch.zeros(1, 1, 6, 6) + mask  # type: ignore[operator]
