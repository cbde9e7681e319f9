"""Backwards seen before, on a GPU that does nothing: what they launch, and when they may not."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are stand-ins here, not interpreted", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from tests.stub_cases import (
    HK,
    HQ,
    TOKENS,
    D,
    Stub,
    attend,
    gradients,
    make,
    map_of,
)

from keel import direct, ops
from keel.kernels import hopper_bwd_launch

HOPPER_BACKWARD = ["row_terms_kernel", "hopper_bwd_kernel", "gradient_sums_kernel"]
ORDERED_BACKWARD = [*HOPPER_BACKWARD[:2], "hopper_bwd_dq_kernel"]


def test_backwards_are_repeated(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where nothing but addresses changed; dout and hooks of saved tensors may bring more."""
    q, k, v = (x.requires_grad_() for x in make())
    out, meta = attend(q, k, v, backend="triton")
    douts = [torch.randn_like(out), torch.randn(TOKENS, HQ, 2 * D).bfloat16()[..., :D]]
    wide = [{"grad_outputs": d} for d in douts]
    cases = [*wide, {"outputs": (out, meta.lse), "grad_outputs": (douts[0], meta.lse.detach())}]
    for case in cases:
        torch.autograd.grad(**{"outputs": out, "inputs": (q, k, v), "retain_graph": True, **case})
    prepared = len(stub.compiled)
    with monkeypatch.context() as patch:
        patch.setattr(direct, "gradients", None)  # nobody asks it again
        for case in cases:
            stub.launches.clear()
            given = {"outputs": out, "inputs": (q, k, v), "retain_graph": True, **case}
            grads = torch.autograd.grad(**given)
            names = ["row_terms_kernel", "flash_bwd_dkdv_kernel", "flash_bwd_dq_kernel"]
            assert [name for name, *_ in stub.launches] == names
            (_, _, terms), (_, _, dkdv), (_, _, dq) = stub.launches
            dout = case["grad_outputs"][0] if "outputs" in case else case["grad_outputs"]
            assert terms[:3] == [out.data_ptr(), dout.data_ptr(), meta.lse.data_ptr()]
            assert dq[0] == q.data_ptr() and all(g.data_ptr() in dkdv for g in grads[1:])
            assert grads[0].data_ptr() in dq
    assert len(stub.compiled) == prepared

    def pad(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], -1)[..., : x.shape[-1]] if x.ndim == 3 else x

    with torch.autograd.graph.saved_tensors_hooks(pad, lambda x: x):
        out, _ = attend(q, k, v, backend="triton")
    torch.autograd.grad(out, (q, k, v), douts[0])
    assert len(stub.compiled) > prepared  # strides of 2 * D


@pytest.mark.parametrize("parts", [1, 2])
def test_hopper_backwards_are_repeated(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """What lies between launches is where the next one looks for it."""
    monkeypatch.setattr(hopper_bwd_launch, "_splits_for", lambda *args: parts)
    q, k, v = (x.requires_grad_() for x in make())
    out, meta = attend(q, k, v)
    douts = [torch.randn_like(out), torch.randn_like(out)]
    gradients(out, (q, k, v), douts[0])
    monkeypatch.setattr(direct, "gradients", None)  # nobody asks it again
    for dout in (*douts, torch.ones(()).expand_as(out)):  # the last is copied, then as the others
        stub.launches.clear()
        dq, dk, dv = gradients(out, (q, k, v), dout)
        assert [name for name, *_ in stub.launches] == HOPPER_BACKWARD
        (_, _, terms), (_, _, kernel), (_, _, sums) = stub.launches
        assert terms[0] == out.data_ptr() and terms[2] == meta.lse.data_ptr()
        if dout.stride(-1) == 1:
            assert terms[1] == dout.data_ptr() and map_of(dout) in kernel
        lse2, delta, dq32 = terms[4:7]
        assert all(map_of(x) in kernel for x in (q, k, v))
        assert ("map", dq32, list(q.shape), [HQ * D, D, 1]) in kernel
        at = kernel.index(lse2)  # LSE2, DELTA, DK_OUT, DV_OUT
        assert kernel[at + 1] == delta
        assert sums[:2] == [dq32, dq.data_ptr()]
        if parts == 1:
            assert kernel[at + 2 : at + 4] == [dk.data_ptr(), dv.data_ptr()]
            assert map_of(dk) in kernel and map_of(dv) in kernel
        else:
            dk_parts, dv_parts = kernel[at + 2 : at + 4]
            assert sums[2:6] == [dk_parts, dk.data_ptr(), dv_parts, dv.data_ptr()]
        made = {lse2, delta, dq32, *(x.data_ptr() for x in (dq, dk, dv)), *kernel[at + 2 : at + 4]}
        assert len(made) == 6 + 2 * (parts > 1)


def test_margins_are_repeated_on_hopper(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the portable ones, whose counter is filled each time."""
    q, k, v = (x.requires_grad_() for x in make())
    outs = {b: attend(q, k, v, backend=b, sm_margin=4)[0] for b in ("hopper", "triton")}
    for out in outs.values():
        gradients(out, (q, k, v), torch.ones_like(out))
    known = {call.backend: len(call._backwards) for call in direct._known.values()}
    assert known == {"hopper": 1, "triton": 0}
    monkeypatch.setattr(direct, "gradients", None)
    stub.launches.clear()
    gradients(outs["hopper"], (q, k, v), torch.ones_like(q))
    assert [name for name, *_ in stub.launches] == HOPPER_BACKWARD


def test_hopper_backwards_that_copy_are_not_repeated(stub: Stub) -> None:
    """A dout that TMA cannot take: it is more than launches, and done anew each time."""
    q, k, v = (x.requires_grad_() for x in make())
    out, _ = attend(q, k, v)
    shifted = torch.randn(TOKENS * HQ * D + 1).bfloat16()[1:].view(out.shape)
    gradients(out, (q, k, v), shifted)  # compiles
    for _ in range(2):
        stub.launches.clear()
        gradients(out, (q, k, v), shifted)
        # row terms read it as it is, by way of Triton's Python, which looks at its alignment
        assert [name for name, *_ in stub.launches] == HOPPER_BACKWARD[1:]
        assert map_of(shifted) not in stub.launches[0][2]
    assert not any(call._backwards for call in direct._known.values())


@pytest.mark.parametrize("parts", [1, 2])
def test_dq_in_a_fixed_order_is_repeated(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    monkeypatch.setattr(hopper_bwd_launch, "_splits_for", lambda *args: parts)
    q, k, v = (x.requires_grad_() for x in make())
    out, _ = attend(q, k, v, deterministic=True)
    gradients(out, (q, k, v), torch.ones_like(out))
    monkeypatch.setattr(direct, "gradients", None)
    stub.launches.clear()
    dout = torch.ones_like(out)
    dq, dk, dv = gradients(out, (q, k, v), dout)
    names = [name for name, *_ in stub.launches]
    assert names == ORDERED_BACKWARD + HOPPER_BACKWARD[2:] * (parts > 1)
    terms, keys, queries = (arguments for _, _, arguments in stub.launches[:3])
    lse2, delta = terms[4:6]
    assert all(map_of(x) in keys and map_of(x) in queries for x in (q, k, v, dout))
    assert {lse2, delta} <= {x for x in keys if isinstance(x, int)}
    assert map_of(dq) in queries and [lse2, delta, dq.data_ptr()] == queries[35:38]
    if parts == 1:
        assert map_of(dk) in keys and map_of(dv) in keys
    else:
        sums = stub.launches[3][2]
        assert dk.data_ptr() in sums and dv.data_ptr() in sums and dq.data_ptr() not in sums


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_wide_heads_have_kernels_of_their_own(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, softcap: float
) -> None:
    """Keys and values of 192 and 128 columns; both kernels get the softcap, and are repeated."""
    monkeypatch.setattr(hopper_bwd_launch, "_splits_for", lambda *args: 1)
    shapes = ((HQ, 192), (HK, 192), (HK, 128))
    q, k, v = (torch.randn(TOKENS, *shape).bfloat16().requires_grad_() for shape in shapes)
    out, _ = attend(q, k, v, softcap=softcap)
    gradients(out, (q, k, v), torch.ones_like(out))
    monkeypatch.setattr(direct, "gradients", None)
    stub.launches.clear()
    dout = torch.ones_like(out)
    dq, dk, dv = gradients(out, (q, k, v), dout)
    (*_, keys), (*_, queries) = stub.launches[1:]
    assert [name for name, *_ in stub.launches] == [
        *("row_terms_kernel", "hopper_bwd_wide_kernel", "hopper_bwd_dq_kernel")
    ]
    for given in (keys, queries):
        assert all(map_of(x) in given for x in (q, k, v, dout))
        assert given[-1].has_softcap == (softcap > 0) and softcap in given
    assert [dk.data_ptr(), dv.data_ptr()] == [
        x for x in keys if x in (dk.data_ptr(), dv.data_ptr())
    ]
    assert map_of(dq) in queries and dq.data_ptr() in queries


@pytest.mark.parametrize(
    ("d", "deterministic", "num"), [(128, False, 1), (128, True, 2), (64, False, 2)]
)
def test_each_softcap_has_launches_of_its_own(
    stub: Stub, d: int, deterministic: bool, num: int
) -> None:
    q, k, v = (x.requires_grad_() for x in make(d=d))
    for softcap in (5.0, 3.0):
        out, _ = attend(q, k, v, softcap=softcap, deterministic=deterministic)
        for _ in range(2):
            stub.launches.clear()
            gradients(out, (q, k, v), torch.ones_like(out))
        kernels = [given for name, _, given in stub.launches if name.startswith("hopper")]
        assert len(kernels) == num
        assert all(softcap in given and given[-1].has_softcap for given in kernels)


def test_auto_has_another_backend_for_the_backward_of_a_bias(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hopper forward has no bias, its backward does; layouts of it never share a launch."""
    monkeypatch.setattr(ops, "explain_backend", lambda device, dtype: ("triton", "a GPU"))
    monkeypatch.setattr(hopper_bwd_launch, "_splits_for", lambda *args: 1)
    q, k, v = (x.requires_grad_() for x in make())
    room = torch.zeros(HQ, TOKENS, TOKENS + 8)
    dense, cut = torch.zeros(HQ, TOKENS, TOKENS), room[:, :, :TOKENS]
    for bias in (dense, cut, dense[:1], dense.half()):
        bias = bias.detach().requires_grad_()
        for _ in range(2):  # the first time goes to the compiler
            stub.launches.clear()
            out, _ = attend(q, k, v, backend="auto", bias=bias)
            dbias = torch.autograd.grad(out, (bias,), torch.ones_like(out))[0]
        assert dbias.shape == bias.shape and dbias.dtype == bias.dtype
        names = [name for name, *_ in stub.launches]
        assert names[:3] == ["flash_fwd_kernel", "row_terms_kernel", "hopper_bwd_kernel"]
        assert "hopper_bwd_dq_kernel" in names and "flash_bwd_dq_kernel" not in names
        for name, _, given in stub.launches:
            if name in ("hopper_bwd_kernel", "hopper_bwd_dq_kernel"):
                assert given[-1].has_bias and bias.data_ptr() in given
                strides = bias.expand(HQ, TOKENS, TOKENS).stride()
                where = list(given).index(TOKENS, list(given).index(bias.data_ptr()))
                assert strides[:2] in zip(given[where:], given[where + 1 :], strict=False)
    for backend, added in (("triton", {"bias": dense}), ("auto", {"alibi_slopes": torch.ones(HQ)})):
        out, _ = attend(q, k, v, backend=backend, **added)
        for _ in range(2):
            stub.launches.clear()
            gradients(out, (q, k, v), torch.ones_like(out))
        if backend == "triton":
            assert stub.launches
            assert not [name for name, *_ in stub.launches if name.startswith("hopper")]
    forms = [given[-1] for name, _, given in stub.launches if name.startswith("hopper_bwd")]
    assert [form.has_alibi for form in forms] == [True, True]


def test_deterministic_mode_is_asked_at_each_backward(stub: Stub) -> None:
    leaves = [x.requires_grad_() for x in make()]
    out, _ = attend(*leaves)
    seen = []
    for mode in (False, True, True, False, False):
        torch.use_deterministic_algorithms(mode)
        try:
            stub.launches.clear()
            stub.compiled.clear()
            torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
        finally:
            torch.use_deterministic_algorithms(False)
        names = {name for name, *_ in stub.launches} | set(stub.compiled)
        seen.append("hopper_bwd_dq_kernel" in names)
    assert seen == [False, True, True, False, False]
