"""The blocked backend against the oracle, through the public call; layouts and memory."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import attn_masks
from torch.utils._python_dispatch import TorchDispatchMode

from keel import flex_flash_attn_func, masks
from keel.kernels import blocked
from keel.masks import AttnMask, AttnSlice
from keel.meta import Scoring
from keel.testing import Case, assert_right, judge, poisoned_memory, run_case

HEAD_DIMS = [8, 40, 64, 96, 128, 192, 256]
INF = float("inf")


@contextlib.contextmanager
def small_tiles(block_m: int = 16, block_n: int = 16) -> Iterator[None]:
    """Makes small problems span several tiles, and full runs several pieces."""
    tiles = {"block_m": block_m, "block_n": block_n}
    with contextlib.ExitStack() as stack:
        for function in (blocked.forward, blocked.backward):
            stack.enter_context(mock.patch.dict(function.__kwdefaults__, tiles))
        stack.enter_context(mock.patch.object(blocked, "MAX_COLUMNS", 24))
        yield


@st.composite
def cases(draw: st.DrawFn, max_tokens: int = 50, head_dims: list[int] = HEAD_DIMS) -> Case:
    """Any mask, any heads, any options."""
    mask = draw(attn_masks(max_tokens=max_tokens, max_slices=5))
    hk, group = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 8))
    full = (hk * group, *mask.shape)
    bias_shape = None
    if draw(st.integers(0, 2)) == 0:
        bias_shape = tuple(draw(st.sampled_from([1, size])) for size in full)
    return Case(
        mask=mask,
        hq=hk * group,
        hk=hk,
        d=draw(st.sampled_from(head_dims)),
        dv=draw(st.none() | st.sampled_from(head_dims)),
        dtype=torch.float64,
        seed=draw(st.integers(0, 99)),
        scale=draw(st.sampled_from([None, None, 0.2, -0.3, 0.0])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        sink=draw(st.booleans()),
        bias_shape=bias_shape,  # type: ignore[arg-type]
        alibi=draw(st.integers(0, 3)) == 0,
        with_dlse=draw(st.booleans()),
    )


def assert_exact(case: Case) -> None:
    with poisoned_memory():
        got = run_case(case, backend="blocked")
    wrong = [str(c) for c in judge(case, got) if not c.error <= 1e-10]
    assert not wrong, wrong


@settings(max_examples=450)
@given(cases(), st.sampled_from([(16, 16), (16, 8), (7, 16), (5, 3)]))
def test_equals_the_oracle_in_fp64(case: Case, tiles: tuple[int, int]) -> None:
    with small_tiles(*tiles):
        assert_exact(case)


@settings(max_examples=60)
@given(cases(max_tokens=24, head_dims=[8, 16]))
def test_equals_the_oracle_in_one_tile(case: Case) -> None:
    assert_exact(case)


BROADCASTS = [(heads, rows, keys) for heads in (1, 4) for rows in (1, 37) for keys in (1, 41)]


@pytest.mark.parametrize("bias_shape", BROADCASTS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_every_broadcast_of_a_bias(bias_shape: tuple[int, int, int], softcap: float) -> None:
    mask = masks.sliding_window(37, 41, left=20, right=3, sink_tokens=2)
    with small_tiles():
        assert_exact(
            Case(mask=mask, hq=4, hk=2, dtype=torch.float64, bias_shape=bias_shape, softcap=softcap)
        )


def drawn_case(seed: int, dtype: torch.dtype) -> Case:
    """A fixed case of a low-precision dtype; lengths with and without tails."""
    pick = random.Random(seed)
    tq, tk = pick.choice([33, 64, 111]), pick.choice([47, 64, 130])
    mask = pick.choice(
        [
            masks.causal(tq, tk),
            masks.full(tq, tk),
            masks.sliding_window(tq, tk, left=20, sink_tokens=2),
            masks.documents([0, 9, tq // 2, tq], [0, 30, 31, tk], causal=True),
            AttnMask([AttnSlice(3, tq, 0, 20), AttnSlice(0, tq - 9, 10, tk, lo=0)], tq, tk),
        ]
    )
    hk, group = pick.choice([1, 2]), pick.choice([1, 3, 8])
    return Case(
        mask=mask,
        hq=hk * group,
        hk=hk,
        d=pick.choice(HEAD_DIMS),
        dv=pick.choice([None, 64]),
        dtype=dtype,
        seed=seed,
        scale=pick.choice([None, None, -0.1]),
        softcap=pick.choice([0.0, 20.0]),
        sink=pick.random() < 0.5,
        bias_shape=pick.choice([None, None, (hk * group, tq, tk), (1, 1, tk)]),
        alibi=pick.random() < 0.3,
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tolerance_rule(seed: int, dtype: torch.dtype) -> None:
    with small_tiles(32, 48):
        assert_right(drawn_case(seed, dtype), backend="blocked")


Layout = Callable[[torch.Tensor], torch.Tensor]

LAYOUTS: dict[str, Layout] = {
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "dims first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "sliced tokens": lambda x: x.repeat_interleave(2, 0)[::2],
    "part of a fused projection": lambda x: torch.cat([x * 0, x, x * 0], 1)[
        :, x.shape[1] : 2 * x.shape[1]
    ],
    "strided last dim": lambda x: torch.stack([x, x * 0], 3)[..., 0],
}


def with_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttnMask, **options: Any
) -> list[torch.Tensor]:
    """out, lse, max_logits, dq, dk, dv for an asymmetric gradient of out."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, meta = flex_flash_attn_func(*leaves, mask, return_max_logits=True, **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    grads = torch.autograd.grad([out, meta.lse], leaves, [weight, weight.sum(2).to(meta.lse.dtype)])
    assert meta.max_logits is not None
    return [out.detach(), meta.lse.detach(), meta.max_logits, *grads]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    mask, change = masks.causal(40), LAYOUTS[layout]
    q, k, v = (torch.randn(40, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    with small_tiles():
        want = with_gradients(q, k, v, mask)
        got = with_gradients(*(change(x) for x in (q, k, v)), mask)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_expanded_inputs() -> None:
    """One head shared by all, and one token repeated: strides of 0."""
    q = torch.randn(40, 4, 16, dtype=torch.float64)
    one_head = torch.randn(40, 1, 16, dtype=torch.float64).expand(40, 4, 16)
    one_token = torch.randn(1, 4, 16, dtype=torch.float64).expand(40, 4, 16)
    with small_tiles():
        got = with_gradients(q, one_head, one_token, masks.causal(40))
        want = with_gradients(q, one_head.clone(), one_token.clone(), masks.causal(40))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_gradients_of_any_layout() -> None:
    """Autograd hands expanded and strided gradients of out: sum() is the usual one."""
    q, k, v = (torch.randn(20, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out, meta = flex_flash_attn_func(q, k, v, masks.causal(20), backend="blocked")
    ones, ones_lse = torch.ones_like(out), torch.ones_like(meta.lse)
    want = torch.autograd.grad([out, meta.lse], (q, k, v), [ones, ones_lse], retain_graph=True)
    for dout, dlse in (
        (out.new_ones(1).expand_as(out), ones_lse.new_ones(1).expand_as(ones_lse)),
        (ones.permute(2, 0, 1).contiguous().permute(1, 2, 0), ones_lse.T.contiguous().T),
    ):
        got = torch.autograd.grad([out, meta.lse], (q, k, v), [dout, dlse], retain_graph=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_elements_beyond_32_bits() -> None:
    """A view whose last elements lie more than 2**31 elements into its storage."""
    try:
        storage = torch.empty(2**31 + 2**20, dtype=torch.bfloat16)  # pages come when touched
    except RuntimeError:
        pytest.skip("no room for a storage of 4 GiB")
    views = []
    for n in range(3):
        view = storage.as_strided((5, 2, 8), (2**29, 8, 1), n * 64)
        view.copy_(torch.randn(5, 2, 8))
        views.append(view)
    assert (views[2].storage_offset() + 4 * 2**29) >= 2**31
    with small_tiles():
        got = with_gradients(*views, masks.causal(5))
        want = with_gradients(
            *(x.clone(memory_format=torch.contiguous_format) for x in views), masks.causal(5)
        )
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):  # an expanded view may be as large as it likes
                held = x.untyped_storage().nbytes() // x.itemsize
                self.numel = max(self.numel, min(x.numel(), held))
        return result


@pytest.mark.parametrize("kind", ["window", "full"])
def test_never_a_matrix_of_all_pairs(kind: str) -> None:
    tokens = 8192 if kind == "window" else 4096
    mask = masks.sliding_window(tokens, left=300) if kind == "window" else masks.full(tokens)
    q, k, v = (torch.randn(tokens, 1, 8) for _ in range(3))
    bias = torch.randn(1, 1, tokens)
    scoring = Scoring(scale=0.3, softcap=20.0, bias=bias)
    with LargestTensor() as largest:
        out, lse, _ = blocked.forward(q, k, v, mask, scoring)
        delta = (out * out).sum(-1)
        blocked.backward(out, q, k, v, lse, delta, mask, scoring, want_dbias=True)
    assert largest.numel <= tokens * tokens // 32
    assert largest.numel >= blocked.BLOCK_M * blocked.BLOCK_N, "the mode saw the tiles"


def test_rows_that_see_nothing() -> None:
    mask = AttnMask([AttnSlice(20, 30, 5, 25)], 50, 40)
    for sink in (None, torch.randn(2)):
        q, k, v = (torch.randn(n, 2, 8, requires_grad=True) for n in (50, 40, 40))
        with small_tiles(), poisoned_memory():
            out, meta = flex_flash_attn_func(q, k, v, mask, sink=sink, backend="blocked")
            out.backward(torch.randn_like(out))
        rows, keys = ~mask.to_dense().any(1), ~mask.to_dense().any(0)
        assert torch.all(out[rows] == 0)
        want = torch.full((2,), -INF) if sink is None else sink
        torch.testing.assert_close(meta.lse[rows], want.expand(int(rows.sum()), 2))
        for x, nothing in ((q, rows), (k, keys), (v, keys)):
            assert x.grad is not None and torch.all(x.grad[nothing] == 0)
            assert torch.all(x.grad.isfinite()) and not torch.all(x.grad == 0)


def test_nan_logits_show() -> None:
    q, k, v = (torch.randn(40, 2, 8) for _ in range(3))
    q[17, 1, 0] = float("nan")
    with small_tiles():
        out, meta = flex_flash_attn_func(
            q, k, v, masks.causal(40), return_max_logits=True, backend="blocked"
        )
    assert meta.max_logits is not None and meta.max_logits.isnan().tolist() == [False, True]
    broken = out.isnan().any(2)
    assert broken.nonzero().tolist() == [[17, 1]], "a NaN query is its own row's trouble"


def test_repeats_bit_by_bit() -> None:
    case = drawn_case(3, torch.float32)
    first, second = (run_case(case, backend="blocked") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
