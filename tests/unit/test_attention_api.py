"""What the main call promises besides right numbers: forms of masks, outputs, memory of masks."""

from __future__ import annotations

import gc
import logging
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import attn_masks

from keel import (
    AttnForwardMeta,
    AttnMask,
    AttnMaskType,
    AttnRange,
    AttnRanges,
    AttnSlice,
    flash_attn_func,
    flash_attn_varlen_func,
    flex_flash_attn_func,
    masks,
    ops,
    reference,
)
from keel.masks import inputs
from keel.meta import Scoring

INF = float("inf")
TOKENS = 12


def make(
    tq: int = TOKENS, tk: int = TOKENS, hq: int = 4, hk: int = 2, seed: int = 0
) -> list[torch.Tensor]:
    """q, k, v in fp64 with dv twice d."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((tq, hq, 8), (tk, hk, 8), (tk, hk, 16))
    return [torch.randn(*shape, generator=random, dtype=torch.float64) for shape in shapes]


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttnMask) -> Any:
    return reference.attention(q, k, v, mask, Scoring(scale=8**-0.5))


def assert_same(got: tuple[torch.Tensor, AttnForwardMeta], want: Any) -> None:
    results = (got[0], got[1].lse, got[1].max_logits)
    for a, b in zip(results, want, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0, check_stride=False)


Q = [(0, 5), (5, 12), (3, 9)]
K = [(0, 5), (2, 12), (6, 12)]
TYPES = [1, 3, 2]

FORMS: dict[str, tuple[Any, ...]] = {
    "int32 tensors": tuple(torch.tensor(x, dtype=torch.int32) for x in (Q, K, TYPES)),
    "int64 tensors": tuple(torch.tensor(x) for x in (Q, K, TYPES)),
    "mixed tensors": (torch.tensor(Q).int(), torch.tensor(K), torch.tensor(TYPES).int()),
    "views": (torch.tensor(Q).T.contiguous().T, torch.tensor(K + K)[:3], torch.tensor(TYPES)),
    "AttnRanges": (AttnRanges(Q), AttnRanges(K), TYPES),
    "lists of ranges": ([AttnRange(*r) for r in Q], [AttnRange(*r) for r in K], TYPES),
    "lists of lists": (
        [list(r) for r in Q],
        [list(r) for r in K],
        [AttnMaskType(t) for t in TYPES],
    ),
    "tuples and names": (tuple(Q), tuple(K), ["causal", "bi_causal", "INVCAUSAL"]),
    "tensor and list": (torch.tensor(Q), K, torch.tensor(TYPES)),
    "mask": (AttnMask.from_ranges(Q, K, TYPES, TOKENS, TOKENS),),
    "mask of slices": (
        AttnMask(
            [AttnSlice.of_type(q, k, t) for q, k, t in zip(Q, K, TYPES, strict=True)],
            TOKENS,
            TOKENS,
        ),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["auto", "blocked", "reference"])
def test_every_form_of_a_mask(form: str, backend: str) -> None:
    q, k, v = make()
    want = oracle(q, k, v, AttnMask.from_ranges(Q, K, TYPES, TOKENS, TOKENS))
    for _ in range(2):  # the second call finds what the first remembered
        got = flex_flash_attn_func(q, k, v, *FORMS[form], return_max_logits=True, backend=backend)
        assert_same(got, want)


@pytest.mark.parametrize("one", [1, "causal", "CAUSAL", AttnMaskType.CAUSAL])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_one_type_for_all(one: Any, as_tensors: bool) -> None:
    q, k, v = make()
    ranges = (torch.tensor(Q), torch.tensor(K)) if as_tensors else (Q, K)
    want = oracle(q, k, v, AttnMask.from_ranges(Q, K, [1, 1, 1], TOKENS, TOKENS))
    assert_same(flex_flash_attn_func(q, k, v, *ranges, one), want)


@pytest.mark.parametrize("as_tensors", [False, True])
def test_no_types_means_full(as_tensors: bool) -> None:
    q, k, v = make()
    ranges = (torch.tensor(Q), torch.tensor(K)) if as_tensors else (Q, K)
    want = oracle(q, k, v, AttnMask.from_ranges(Q, K, [0, 0, 0], TOKENS, TOKENS))
    for _ in range(2):
        assert_same(flex_flash_attn_func(q, k, v, *ranges), want)
        assert_same(flex_flash_attn_func(q, k, v, *ranges, None), want)


def test_pairs_covered_twice_attend_once() -> None:
    q, k, v = make()
    whole = oracle(q, k, v, masks.full(TOKENS))
    for q_ranges, k_ranges, types in (
        ([(0, 12), (0, 12)], [(0, 12), (0, 12)], [0, 0]),
        ([(0, 12), (2, 7), (0, 12)], [(0, 12), (3, 9), (0, 12)], [0, 1, 2]),
        ([(0, 8), (4, 12), (0, 8), (4, 12)], [(0, 8), (4, 12), (4, 12), (0, 8)], 0),
    ):
        got = flex_flash_attn_func(q, k, v, q_ranges, k_ranges, types, return_max_logits=True)
        assert_same(got, whole)


@pytest.mark.parametrize("backend", ["blocked", "reference"])
@pytest.mark.parametrize(("tq", "tk"), [(0, 5), (5, 0), (0, 0), (5, 6)])
@pytest.mark.parametrize("form", ["lists", "tensors", "mask"])
def test_nothing_to_attend(backend: str, tq: int, tk: int, form: str) -> None:
    """No tokens, or no slices: empty or zero results, and gradients of zero."""
    none = torch.zeros(0, 2, dtype=torch.int32)
    mask: tuple[Any, ...] = {
        "lists": ([], []),
        "tensors": (none, none, none[:, 0]),
        "mask": (AttnMask([], tq, tk),),
    }[form]
    q, k, v = (x.requires_grad_() for x in make(tq, tk))
    out, meta = flex_flash_attn_func(q, k, v, *mask, return_max_logits=True, backend=backend)
    assert out.shape == (tq, 4, 16) and meta.lse.shape == (tq, 4)
    assert torch.all(out == 0) and torch.all(meta.lse == -INF)
    assert meta.max_logits is not None and meta.max_logits.tolist() == [-INF] * 4
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None and torch.all(x.grad == 0)


def test_max_logits_only_when_asked() -> None:
    q, k, v = make()
    for backend in ("blocked", "reference"):
        _, meta = flex_flash_attn_func(q, k, v, masks.causal(TOKENS), backend=backend)
        assert meta.max_logits is None
        _, meta = flex_flash_attn_func(
            q, k, v, masks.causal(TOKENS), return_max_logits=True, backend=backend
        )
        assert meta.max_logits is not None and meta.max_logits.shape == (4,)


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_running_maximum(backend: str) -> None:
    running = torch.full((4,), -INF, dtype=torch.float64)
    seen = []
    for seed in range(3):
        q, k, v = make(seed=seed)
        q = q * (3 - seed)  # so that later calls do not simply replace
        _, meta = flex_flash_attn_func(
            q, k, v, masks.causal(TOKENS), max_logits_out=running, backend=backend
        )
        assert meta.max_logits is running
        seen.append(oracle(q, k, v, masks.causal(TOKENS))[2])
        torch.testing.assert_close(running, torch.stack(seen).amax(0), atol=1e-12, rtol=0)


def test_running_maximum_keeps_nan_and_training_works() -> None:
    q, k, v = (x.float().requires_grad_() for x in make())
    running = torch.tensor([float("nan"), -INF, 1e9, -INF])
    out, meta = flex_flash_attn_func(q, k, v, masks.causal(TOKENS), max_logits_out=running)
    assert meta.max_logits is running and not running.requires_grad
    assert running[0].isnan() and running[2] == 1e9 and running[1].isfinite()
    out.sum().backward()
    assert q.grad is not None


def test_running_maximum_changes_no_gradient() -> None:
    given = [*make(), torch.randn(4).double(), torch.randn(4, 1, TOKENS).double()]
    results = []
    for running in (None, torch.full((4,), -INF, dtype=torch.float64)):
        q, k, v, sink, bias = leaves = [x.clone().requires_grad_() for x in given]
        out, meta = flex_flash_attn_func(
            q, k, v, masks.causal(TOKENS), sink=sink, bias=bias, max_logits_out=running
        )
        results.append(torch.autograd.grad(out.sin().sum() + meta.lse.cos().sum(), leaves))
    for a, b in zip(*results, strict=True):
        assert a.abs().max() > 0 and torch.equal(a, b)


def test_running_maximum_of_any_layout() -> None:
    q, k, v = make()
    memory = torch.full((8,), -INF, dtype=torch.float64)
    flex_flash_attn_func(q, k, v, masks.causal(TOKENS), max_logits_out=memory[::2])
    torch.testing.assert_close(memory[::2], oracle(q, k, v, masks.causal(TOKENS))[2])
    assert (memory[1::2] == -INF).all()


def test_autograd_sees_that_the_running_maximum_was_written_to() -> None:
    q, k, v = make()
    factor = torch.ones(4, dtype=torch.float64, requires_grad=True)
    running = torch.zeros(4, dtype=torch.float64)
    product = (factor * running).sum()  # saves running for its backward
    flex_flash_attn_func(q, k, v, masks.causal(TOKENS), max_logits_out=running)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_dtypes_of_results() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        q, k, v = (x.to(dtype) for x in make())
        for backend in ("blocked", "reference"):
            out, meta = flex_flash_attn_func(
                q, k, v, masks.causal(TOKENS), return_max_logits=True, backend=backend
            )
            assert meta.max_logits is not None
            assert (out.dtype, meta.lse.dtype, meta.max_logits.dtype) == (dtype, wide, wide)


@pytest.mark.parametrize("only", ["out", "lse", "both"])
def test_gradients_through_out_and_lse(only: str) -> None:
    mask = AttnMask.from_ranges(Q, K, TYPES, TOKENS, TOKENS)
    results = []
    for backend in ("blocked", "reference"):
        q, k, v = (x.requires_grad_() for x in make())
        out, meta = flex_flash_attn_func(q, k, v, mask, return_max_logits=True, backend=backend)
        assert meta.lse.requires_grad
        assert meta.max_logits is not None and not meta.max_logits.requires_grad
        lse = torch.where(meta.lse == -INF, 0.0, meta.lse)
        loss = {"out": out.square().sum(), "lse": lse.square().sum()}
        loss["both"] = loss["out"] + loss["lse"]
        loss[only].backward()
        results.append([torch.zeros_like(x) if x.grad is None else x.grad for x in (q, k, v)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_gradients_only_where_wanted() -> None:
    q, k, v = make()
    k.requires_grad_()
    sink, bias = torch.randn(4).double().requires_grad_(), torch.randn(4, 1, TOKENS).double()
    out, _ = flex_flash_attn_func(q, k, v, masks.causal(TOKENS), sink=sink, bias=bias)
    out.sum().backward()
    assert k.grad is not None and sink.grad is not None
    assert q.grad is None and v.grad is None and bias.grad is None


def test_second_derivatives_are_refused() -> None:
    def slope(backend: str) -> torch.Tensor:
        q, k, v = (x.requires_grad_() for x in make())
        out, _ = flex_flash_attn_func(q, k, v, masks.causal(TOKENS), backend=backend)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(dq.sum(), q)
        return second

    with pytest.raises(NotImplementedError, match="no second derivatives"):
        slope("blocked")
    assert torch.all(slope("reference").isfinite())


@settings(max_examples=100)
@given(st.data(), attn_masks(max_tokens=24), st.booleans())
def test_accumulate_over_key_parts(data: st.DataObject, mask: AttnMask, sink: bool) -> None:
    q, k, v = make(*mask.shape)
    logit = torch.randn(4, dtype=torch.float64) if sink else None
    slopes = torch.rand(4, dtype=torch.float64)
    whole = reference.attention(
        q, k, v, mask, Scoring(scale=0.4, softcap=3.0, sink=logit, alibi_slopes=slopes)
    )
    out, lse = torch.zeros_like(whole[0]), torch.full_like(whole[1], -INF)
    top = torch.full((4,), -INF, dtype=torch.float64)
    cuts = sorted(data.draw(st.lists(st.integers(0, mask.tk), max_size=3)))
    for n, (a, b) in enumerate(pairwise([0, *cuts, mask.tk])):
        part = mask.cut(k=(a, b))
        ops.accumulate_(
            *(out, lse, top, q, k[a:b], v[a:b], inputs.tensors_of_mask(part)),
            Scoring(
                scale=0.4,
                softcap=3.0,
                sink=logit if n == 0 else None,
                alibi_slopes=slopes,
                alibi_offset=torch.full((mask.tq,), mask.tk - mask.tq - a, dtype=torch.int32),
            ),
            sm_margin=0,
            backend="blocked",
        )
    for got, want in zip((out, lse, top), whole, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0, check_stride=False)


def test_accumulate_keeps_no_graph() -> None:
    q, k, v = (x.requires_grad_() for x in make())
    out, lse = torch.zeros(TOKENS, 4, 16).double(), torch.full((TOKENS, 4), -INF).double()
    top = torch.full((4,), -INF).double()
    mask = masks.causal(TOKENS)
    ops.accumulate_(
        *(out, lse, top, q, k, v, inputs.tensors_of_mask(mask), Scoring(scale=1.0)),
        sm_margin=0,
        backend="blocked",
    )
    assert not (out.requires_grad or lse.requires_grad or top.requires_grad)
    assert out.any()


def test_edits_of_a_ranges_tensor_are_noticed() -> None:
    q, k, v = make()
    q_ranges, k_ranges, types = (torch.tensor(x) for x in (Q, K, TYPES))
    for tensor, value in ((q_ranges, 7), (k_ranges, 9), (types, 0)):
        flex_flash_attn_func(q, k, v, q_ranges, k_ranges, types)
        tensor.view(-1)[-1] = value
        mask = AttnMask.from_ranges(
            q_ranges.tolist(), k_ranges.tolist(), types.tolist(), TOKENS, TOKENS
        )
        assert_same(flex_flash_attn_func(q, k, v, q_ranges, k_ranges, types), oracle(q, k, v, mask))
    q_ranges[0, 1] = TOKENS + 1
    with pytest.raises(ValueError, match="ends after the last of 12 tokens"):
        flex_flash_attn_func(q, k, v, q_ranges, k_ranges, types)


def test_an_edit_before_the_backward_does_not_reach_it() -> None:
    q, k, v = (x.requires_grad_() for x in make())
    q_ranges, k_ranges = torch.tensor(Q), torch.tensor(K)
    out, _ = flex_flash_attn_func(q, k, v, q_ranges, k_ranges)
    expected = torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True)
    q_ranges[0, 1] = 1
    again = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(map(torch.equal, again, expected))
    edited, _ = flex_flash_attn_func(q, k, v, q_ranges, k_ranges)
    assert not torch.equal(edited, out)


def test_tensors_are_read_once() -> None:
    tensors = [torch.tensor(x) for x in (Q, K, TYPES)]
    mask = inputs.mask_of_tensors(tensors, TOKENS, TOKENS)
    assert inputs.mask_of_tensors(tensors, TOKENS, TOKENS) is mask
    assert inputs.mask_of_tensors(tensors, TOKENS, TOKENS + 1) is not mask
    assert inputs.mask_of_tensors([x.clone() for x in tensors], TOKENS, TOKENS) == mask
    (own,) = inputs.tensors_of_mask(mask)
    assert inputs.mask_of_tensors([own], TOKENS, TOKENS) is mask


def test_a_reused_address_is_another_tensor() -> None:
    """CPython gives a freed tensor's id to the next one; the old mask must not come with it."""
    gc.collect()
    known = len(inputs._seen)
    q, k, v = make(hq=2)
    addresses = set()
    for n in range(60):
        q_ranges, k_ranges = torch.tensor([(0, n % 11 + 1)]), torch.tensor([(n % 7, 12)])
        addresses.add(id(q_ranges))
        mask = AttnMask.from_ranges([(0, n % 11 + 1)], [(n % 7, 12)], None, TOKENS, TOKENS)
        assert_same(flex_flash_attn_func(q, k, v, q_ranges, k_ranges), oracle(q, k, v, mask))
        del q_ranges, k_ranges
    assert len(addresses) < 60, "no address was used twice: the test shows nothing"
    gc.collect()
    assert len(inputs._seen) <= known, "masks of dead tensors stay"


def test_a_reused_address_of_a_mask() -> None:
    q, k, v = make(hq=2)
    for n in range(60):
        mask = AttnMask([AttnSlice(0, n % 11 + 1, n % 7, 12)], TOKENS, TOKENS)
        assert_same(flex_flash_attn_func(q, k, v, mask), oracle(q, k, v, mask))
        del mask


def test_inference_mode_and_no_grad() -> None:
    want = oracle(*make(), AttnMask.from_ranges(Q, K, TYPES, TOKENS, TOKENS))
    outside = [torch.tensor(x) for x in (Q, K, TYPES)]
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            q, k, v = make()
            inside = [torch.tensor(x) for x in (Q, K, TYPES)]
            for ranges in (outside, inside):
                for _ in range(2):
                    got = flex_flash_attn_func(q, k, v, *ranges, return_max_logits=True)
                    assert_same(got, want)
                    assert not got[0].requires_grad
            # Without a version counter an edit must show all the same.
            inside[2][:] = 0
            mask = AttnMask.from_ranges(Q, K, 0, TOKENS, TOKENS)
            assert_same(flex_flash_attn_func(q, k, v, *inside), oracle(q, k, v, mask))


def test_training_after_evaluation() -> None:
    """Masks made or remembered in inference mode must not be inference tensors."""
    q, k, v = (x.requires_grad_() for x in make())
    batched = [x[None] for x in (q, k, v)]
    ranges, bounds = torch.tensor([(0, 5), (5, 11)]), torch.tensor([0, 5, 11])
    with torch.inference_mode():
        mask = masks.causal(TOKENS)

    def calls() -> list[torch.Tensor]:
        return [
            flex_flash_attn_func(q, k, v, ranges, ranges)[0],
            flex_flash_attn_func(q, k, v, [(0, 5)], [(0, 6)])[0],
            flex_flash_attn_func(q, k, v, mask)[0],
            flash_attn_varlen_func(q, k, v, bounds, bounds, window_size=(3, 1)),
            flash_attn_func(*batched, window_size=(4, 2)),
        ]

    with torch.inference_mode():
        calls()
    for out in calls():
        out.sum().backward()


def test_a_default_device_does_not_reach_the_masks() -> None:
    q, k, v = make()
    ranges = torch.tensor([(0, 1), (1, 2), (2, 3), (3, 4), (4, 12)])  # a count of its own
    with torch.device("meta"):
        out, _ = flex_flash_attn_func(q, k, v, ranges, ranges, backend="reference")
    assert out.device.type == "cpu"
    flex_flash_attn_func(q, k, v, ranges, ranges)


def test_execution_knobs_do_not_change_results() -> None:
    q, k, v = make()
    want = oracle(q, k, v, masks.causal(TOKENS))
    assert_same(flex_flash_attn_func(q, k, v, masks.causal(TOKENS), sm_margin=8), want)
    assert_same(flex_flash_attn_func(q, k, v, masks.causal(TOKENS), deterministic=True), want)


def test_auto_says_its_choice_once(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = make()
    ops._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="keel"):
        for _ in range(3):
            flex_flash_attn_func(q, k, v, masks.causal(TOKENS))
    said = [r.getMessage() for r in caplog.records if "backend" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("attention on cpu in torch.float64 uses backend 'blocked': ")
