"""Calls that are recognised in one look at q, k and v: as fast as they come, never another's."""

from __future__ import annotations

import gc
import os
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._C._dynamo.guards as guards
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are stand-ins here, not interpreted", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from tests.stub_cases import HK, HQ, MASK, TOKENS, D, Stub, attend, make

from keel import (
    _versions,
    direct,
    flash_attn_func,
    flash_attn_varlen_func,
    masks,
)

Served = list[tuple[direct.DirectCall, bool]]


@pytest.fixture
def served(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Of each direct call: who served it, and whether it was recognised."""
    noted: Served = []
    call = direct.DirectCall.__call__

    def noting(self: direct.DirectCall, *args: Any, **kwargs: Any) -> Any:
        noted.append((self, kwargs.get("addresses") is not None))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(direct.DirectCall, "__call__", noting)
    return noted


def sent_maps(stub: Stub) -> list[Any]:
    """The descriptors of Q, K, V and O in the last launch of the hopper forward."""
    name, _, arguments = stub.launches[-1]
    assert name == "hopper_fwd_kernel"
    return [arguments[7 * i] for i in (1, 2, 3, 0)]


def maps_of(*tensors: torch.Tensor) -> list[Any]:
    return [("map", x.data_ptr(), list(x.shape), list(x.stride())) for x in tensors]


def test_a_third_call_is_recognised(served: Served) -> None:
    """Worked out, known, recognised; whatever made the tensors, and whatever made the mask."""
    for turn in range(5):
        attend(*make(), masks.causal(TOKENS))
        assert served[-1][1] == (turn >= 2)
    assert len({id(call) for call, _ in served}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"mask": masks.full(TOKENS, TOKENS)},
        {"softmax_scale": 0.5},
        {"softmax_scale": 2},
        {"softcap": 3.0},
        {"return_max_logits": True},
        {"deterministic": True},
        {"sm_margin": 4},
        {"backend": "triton"},
    ],
    ids=str,
)
def test_options_are_never_those_of_another_call(change: dict[str, Any], served: Served) -> None:
    q, k, v = make()
    for _ in range(3):
        attend(q, k, v)
    for turn in range(4):
        _, meta = attend(q, k, v, **change)
        call, recognised = served[-1]
        wanted = {
            "mask": MASK,
            "softmax_scale": D**-0.5,
            "softcap": 0.0,
            "return_max_logits": False,
            **{"deterministic": False, "sm_margin": 0, "backend": "hopper"},
            **change,
        }
        got = (call.mask, call.scale, call.softcap, call.want_max)
        assert (*got, call.deterministic, call.sm_margin, call.backend) == tuple(wanted.values())
        assert (meta.max_logits is not None) == call.want_max
        assert recognised == (turn >= 2)
    attend(q, k, v)
    assert served[-1] == (served[0][0], True)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("sm_margin must be an int", {"sm_margin": True}),
        ("sm_margin must be an int", {"sm_margin": 1.0}),
        ("unknown backend", {"backend": "best"}),
        ("must be a real number|float", {"softmax_scale": [0.5]}),
        ("mask is for", {"mask": masks.causal(TOKENS + 1)}),
        ("one dtype", {"k": torch.zeros(TOKENS, HK, D)}),
        ("one device", {"k": torch.zeros(TOKENS, HK, D, dtype=torch.bfloat16, device="meta")}),
        ("must be a tensor", {"k": None}),
        ("must be a tensor", {"q": [1.0]}),
        ("must have shape", {"q": torch.zeros(1, TOKENS, HQ, D, dtype=torch.bfloat16)}),
        ("same tokens", {"v": torch.zeros(TOKENS - 1, HK, D, dtype=torch.bfloat16)}),
    ],
)
def test_a_recognised_call_excuses_no_other(
    served: Served, message: str, change: dict[str, Any]
) -> None:
    q, k, v = make()
    for _ in range(4):
        attend(q, k, v, sm_margin=1)
    assert served[-1][1]
    with pytest.raises((ValueError, TypeError), match=message):
        attend(**{"q": q, "k": k, "v": v, "sm_margin": 1, **change})


def test_layouts_are_told_apart(stub: Stub, served: Served) -> None:
    """Each change of one tensor alone, all of them under one mask and one set of options."""
    q, k, v = make()
    wide = [torch.randn(TOKENS, heads, 2 * D).bfloat16()[..., :D] for heads in (HQ, HK, HK)]
    cases = [(q, k, v), (wide[0], k, v), (q, wide[1], v), (q, k, wide[2])]
    cases += [(q, k[:, :1], v[:, :1]), tuple(x.half() for x in (q, k, v))]
    cases += [(q.transpose(0, 1).contiguous().transpose(0, 1), k, v)]
    for turn in range(4):
        for case in cases:
            out, _ = attend(*case)
            assert served[-1][1] == (turn >= 2)
            assert served[-1][0].dtype == case[0].dtype == out.dtype
            if turn >= 2:
                assert sent_maps(stub) == maps_of(*case, out)
            assert out.stride() == (HQ * D, D, 1)


def test_unaligned_tensors_of_the_same_layout_are_copied(stub: Stub, served: Served) -> None:
    given = make()
    for _ in range(3):
        attend(*given)
    for place in range(3):
        case = list(given)
        x = given[place]
        case[place] = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
        attend(*case)
        assert not served[-1][1]
        assert all(address % 16 == 0 for _, address, *_ in sent_maps(stub))


def test_gradients_are_wanted_where_they_are(served: Served) -> None:
    """Tensors of one layout with and without; grad modes that come and go."""
    plain = make()
    leaves = [[x.clone().requires_grad_(n == i) for n, x in enumerate(plain)] for i in range(3)]
    leaves.append([torch.nn.Parameter(x) for x in plain])
    for given in (plain, *leaves):
        for turn in range(3):
            for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
                with mode():
                    out, meta = attend(*given, return_max_logits=True)
                wanted = mode is torch.enable_grad and given is not plain
                assert out.requires_grad == meta.lse.requires_grad == wanted
                assert out.is_inference() == (mode is torch.inference_mode)
                assert not meta.max_logits.requires_grad
                assert turn < 2 or served[-1][1]
                if wanted:
                    inputs = [x for x in given if x.requires_grad]
                    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
                    assert [x.shape for x in grads] == [x.shape for x in inputs]
    assert len({id(call) for call, _ in served}) == 1


def negative(x: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(x)


def special(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(type("Special", (torch.Tensor,), {}))


@pytest.mark.parametrize("change", [negative, special])
@pytest.mark.parametrize("place", range(3))
def test_tensors_that_are_more_than_memory_meet_the_operator(
    served: Served, change: Callable[[torch.Tensor], torch.Tensor], place: int
) -> None:
    given = make()
    for _ in range(3):
        attend(*given)
    before = len(served)
    given[place] = change(given[place])
    attend(*given)
    assert len(served) == before


class Nothing(TorchFunctionMode):
    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


LOOKING: dict[str, Callable[[], Any]] = {
    "function mode": Nothing,
    "flop counter": lambda: FlopCounterMode(display=False),
    "forward derivatives": forward_ad.dual_level,
}


@pytest.mark.parametrize("mode", LOOKING)
def test_those_who_look_meet_the_operator(served: Served, mode: str) -> None:
    given = make()
    for _ in range(3):
        attend(*given)
    before = len(served)
    with LOOKING[mode]():
        assert direct.repeated(*given, MASK, (None, 0.0, False, False, "hopper", 0, int)) is None
        attend(*given)
    assert len(served) == before
    attend(*given)
    assert served[-1][1] and len(served) == before + 1


def test_transforms_and_traces_meet_the_operator(served: Served) -> None:
    given = make()
    options = (None, 0.0, False, False, "hopper", 0, int)
    for _ in range(3):
        attend(*given)
    assert direct.repeated(*given, MASK, options) is not None
    seen: list[Any] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((_versions.nobody_looks(), direct.repeated(*given, MASK, options)))
        return x + 1

    torch.vmap(look)(torch.zeros(2))
    torch.jit.trace(look, torch.zeros(2), check_trace=False)
    assert seen == [(False, None)] * 2


def test_one_tensor_in_two_places_is_served_all_the_same(stub: Stub, served: Served) -> None:
    q, k, _ = make()
    for _ in range(4):
        out, _ = attend(q, k, k)
    assert sent_maps(stub) == maps_of(q, k, k, out)
    assert not any(recognised for _, recognised in served) and not direct._known.by_mask


def test_what_is_kept_is_bounded_and_holds_no_tensor(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "MAX_LAYOUTS", 2)
    given = make()
    for heads in (2, 4, 6, 8):
        for _ in range(3):
            attend(torch.randn(TOKENS, heads, D).bfloat16(), *given[1:])
        assert served[-1][1]
    assert [len(x) for x in direct._known.by_mask.values()] == [2]
    gone = [weakref.ref(x) for x in given]
    del given
    gc.collect()
    assert [x() for x in gone] == [None] * 3
    direct._known.clear()
    assert not direct._known and not direct._known.by_mask


def test_flash_attentions_calls_are_recognised(served: Served) -> None:
    q, k, v = make()
    cu = torch.tensor([0, 10, TOKENS])
    batched = [x.unflatten(0, (2, TOKENS // 2)) for x in (q, k, v)]
    for _ in range(3):
        flash_attn_func(*batched, causal=True, backend="hopper")
        flash_attn_varlen_func(q, k, v, cu, cu, causal=True, backend="hopper")
    assert [recognised for _, recognised in served[-2:]] == [True, True]
    assert served[-1][0].mask == masks.documents([0, 10, TOKENS], causal=True)
    cu[1] = 12  # the same tensor, with other bounds
    flash_attn_varlen_func(q, k, v, cu, cu, causal=True, backend="hopper")
    assert served[-1][0].mask == masks.documents([0, 12, TOKENS], causal=True)


EXACT = guards.TensorGuards


def credulous(*tensors: torch.Tensor, **_: Any) -> Any:
    """A guard that takes everything for what it knows."""
    return types.SimpleNamespace(check=lambda *others: True)


def blind_to_strides(*tensors: torch.Tensor, **_: Any) -> Any:
    return EXACT(
        *tensors,
        dynamic_dims_sizes=None,
        dynamic_dims_strides=[[None] * x.ndim for x in tensors],
    )


@pytest.mark.parametrize("guard", [credulous, blind_to_strides, None])
def test_guards_that_are_not_exact_are_not_used(
    served: Served, monkeypatch: pytest.MonkeyPatch, guard: Any
) -> None:
    assert _versions._layout_guard() is not None  # of this torch
    given = make()
    with monkeypatch.context() as patch:
        patch.setattr(_versions, "_layout_guard", _versions._layout_guard.__wrapped__)
        patch.setattr("torch._C._dynamo.guards.TensorGuards", guard)
        assert _versions._layout_guard() is None
        for _ in range(4):
            attend(*given)
    assert len(served) == 4 and not any(recognised for _, recognised in served)


@pytest.mark.parametrize("broken", ["missing", "of another dtype"])
def test_memory_comes_from_torch_where_the_quick_way_is_not_known(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    quick = _versions.quick_empty("cpu")
    assert quick is guards._empty_strided_cpu  # of this torch
    other = None if broken == "missing" else lambda *given: torch.empty(2, 3)
    monkeypatch.setattr("torch._C._dynamo.guards._empty_strided_cpu", other)
    monkeypatch.setattr(direct, "quick_empty", _versions.quick_empty.__wrapped__)
    given = make()
    for _ in range(3):
        out, meta = attend(*given)
    assert (out.shape, out.dtype, out.stride()) == ((TOKENS, HQ, D), out.dtype, (HQ * D, D, 1))
    assert (meta.lse.shape, meta.lse.dtype) == ((TOKENS, HQ), torch.float32)


def test_memory_is_taken_with_care_where_another_device_may_be_current(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = make()
    for _ in range(3):
        attend(*given)
    (call,) = direct._known.values()
    monkeypatch.setattr(call, "_empty", None)
    monkeypatch.setattr(direct, "launch_stream", lambda index: None)
    out, meta = attend(*given)
    assert (out.shape, out.dtype, meta.lse.shape) == ((TOKENS, HQ, D), out.dtype, (TOKENS, HQ))
