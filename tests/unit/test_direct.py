"""Calls seen before, on a GPU that does nothing: what they launch, and when they may not."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are stand-ins here, not interpreted", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts: plain names

import host_cost
from host_stub import Stub, stubbed

from keel import direct, flex_flash_attn_func, masks, ops
from keel._versions import c_launcher, runs_plainly
from keel.kernels import (
    fresh_maxima,
    hopper_bwd_launch,
    hopper_launch,
    hopper_tiles,
    launch,
    tensor_maps,
)

TOKENS, HQ, HK, D = 24, 4, 2, 64
MASK = masks.causal(TOKENS)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with stubbed() as stub:
        yield stub


def make(dtype: torch.dtype = torch.bfloat16, d: int = D) -> list[torch.Tensor]:
    return [torch.randn(TOKENS, heads, d).to(dtype) for heads in (HQ, HK, HK)]


def attend(q: Any, k: Any, v: Any, mask: Any = MASK, **options: Any) -> Any:
    return flex_flash_attn_func(q, k, v, mask, **{"backend": "hopper", **options})


def map_of(x: torch.Tensor) -> tuple[Any, ...]:
    return ("map", x.data_ptr(), list(x.shape), list(x.stride()))


HOPPER_BACKWARD = ["row_terms_kernel", "hopper_bwd_kernel", "gradient_sums_kernel"]
ORDERED_BACKWARD = [*HOPPER_BACKWARD[:2], "hopper_bwd_dq_kernel"]


def gradients(out: torch.Tensor, inputs: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out, inputs, dout, retain_graph=True)


def last_launch(stub: Stub) -> dict[str, Any]:
    """Of the hopper forward: descriptors O, Q, K and V are followed by three shapes and strides."""
    name, stream, arguments = stub.launches[-1]
    assert name == "hopper_fwd_kernel"
    maps = {n: arguments[7 * i] for i, n in enumerate("OQKV")}
    rest = ("OUT", "LSE", "MAX_LOGITS", "SINK", "PARTS", "MEETINGS", "SHARES")
    rest += ("TILES", "RUNS", "ROW_LO", "ROW_HI", "COUNTER")
    scalars = ("scale", "softcap")
    return {**maps, **dict(zip(rest + scalars, arguments[28:], strict=False)), "stream": stream}


def test_repeated_calls_do_not_grow_anything(stub: Stub) -> None:
    q, k, v = make()
    for _ in range(3):
        attend(q, k, v, return_max_logits=True)
    known = [len(x) for x in (direct._known, launch._recipes, tensor_maps._by_layout)]
    compiled = list(stub.compiled)
    stub.encoded.clear()
    kept = [attend(q, k, v, return_max_logits=True) for _ in range(50)]
    assert [len(x) for x in (direct._known, launch._recipes, tensor_maps._by_layout)] == known
    assert stub.compiled == compiled == ["hopper_fwd_kernel"]
    new = {address for address, *_ in stub.encoded}
    assert new <= {out.data_ptr() for out, _ in kept}  # those of q, k and v were there


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_later_launches_are_those_of_the_first(stub: Stub, backend: str) -> None:
    """Through Triton's Python and past it, the same kernel gets the same arguments."""
    q, k, v = make()
    sink = torch.zeros(HQ)
    options = {"sink": sink, "return_max_logits": True, "backend": backend, "softcap": 2.0}
    results = []
    for hooked in (False, True, False):
        stub.hooked = hooked
        results.append(attend(q, k, v, **options))
    (_, minus, ordinary), (_, stream, straight) = stub.launches
    assert (minus, stream) == (-1, 0)
    flat: list[Any] = []
    for x in ordinary:
        if hasattr(x, "block_shape"):
            flat += [("map", x.base.data_ptr(), list(x.shape), list(x.strides))]
            flat += [*x.shape, *x.strides]
        else:
            flat.append(x.data_ptr() if isinstance(x, torch.Tensor) else x)
    (out, meta), (again, meta_again) = results[1:]
    pairs = ((out, again), (meta.lse, meta_again.lse), (meta.max_logits, meta_again.max_logits))
    own = {a.data_ptr(): b.data_ptr() for a, b in pairs}  # what each call allocates for itself
    assert len(flat) == len(straight) > 20
    for x, y in zip(flat, straight, strict=True):
        if isinstance(x, tuple) and x[0] == "map":
            x = ("map", own.get(x[1], x[1]), *x[2:])
        assert (own.get(x, x) if isinstance(x, int) else x) == y


def test_what_moved_gets_its_own_descriptor(stub: Stub) -> None:
    q, k, v = make()
    for x in (q, q, q.clone(), q):
        out, meta = attend(x, k, v, return_max_logits=True)
    for x, y in ((q.clone(), k), (q, k.clone())):
        out, meta = attend(x, y, v, return_max_logits=True)
        sent = last_launch(stub)
        assert [sent[n] for n in "QKVO"] == [map_of(t) for t in (x, y, v, out)]
        assert sent["OUT"] == out.data_ptr() and sent["LSE"] == meta.lse.data_ptr()
        assert sent["MAX_LOGITS"] == meta.max_logits.data_ptr()
    assert len(direct._known) == 1


def test_layouts_never_share_a_recipe(stub: Stub) -> None:
    q, k, v = make()
    wide = torch.randn(TOKENS, HQ, 2 * D).bfloat16()
    fused = torch.randn(TOKENS, HQ + 2 * HK, D).bfloat16()
    odd = torch.empty(TOKENS * HQ * D + 8, dtype=torch.bfloat16)
    cases = [
        (q, k, v),
        (wide[..., :D], k, v),
        (wide[..., D:], k, v),  # the strides of the one before, at another address
        tuple(fused.split((HQ, HK, HK), 1)),
        (q, k[:, :1], v[:, :1]),
        (q.transpose(0, 1).contiguous().transpose(0, 1), k, v),
        (odd[8:].view(TOKENS, HQ, D), k, v),
        tuple(x.half() for x in (q, k, v)),
    ]
    for _ in range(3):
        for case in cases:
            out, _ = attend(*case)
    stub.launches.clear()
    for case in cases:
        out, _ = attend(*case)
        sent = last_launch(stub)
        assert [sent[n] for n in "QKVO"] == [map_of(t) for t in (*case, out)]
        assert sent["stream"] == 0 and out.dtype == case[0].dtype
    assert len(direct._known) == len(cases) - 2  # wide's halves share, odd is like q


def test_pointers_that_are_not_aligned_are_not_known(stub: Stub) -> None:
    q, k, v = make()
    odd = torch.empty(TOKENS * HQ * D + 1, dtype=torch.bfloat16)[1:].view(TOKENS, HQ, D)
    attend(q, k, v)
    for _ in range(3):
        attend(odd, k, v)
    assert len(direct._known) == 1
    assert last_launch(stub)["Q"][1] % 16 == 0  # of a copy


def test_hooks_are_called_by_triton(stub: Stub) -> None:
    q, k, v = make()
    for calls in (1, 3):  # the next is found by its key, then recognised
        for _ in range(calls):
            attend(q, k, v)
        stub.launches.clear()
        stub.hooked = True
        attend(q, k, v)
        stub.hooked = False
        attend(q, k, v)
        assert [stream for _, stream, _ in stub.launches] == [-1, 0]


def test_streams_have_their_own_buffers(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make()
    attend(q, k, v, return_max_logits=True)
    counters, streams = {}, [0, 5, 5, 0]
    for stream in streams:
        monkeypatch.setattr(direct, "launch_stream", lambda index, stream=stream: stream)
        attend(q, k, v, return_max_logits=True)
        sent = last_launch(stub)
        assert sent["stream"] == stream
        assert counters.setdefault(stream, sent["COUNTER"]) == sent["COUNTER"]
    assert counters[0] != counters[5]


def test_a_capture_takes_the_careful_way(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay must find its maxima at -inf again: they come from a fill of its own.

    And what it points to must be what is held on to, even if the recipe was forgotten elsewhere.
    """
    q, k, v = make()
    for calls in (1, 3):  # the next is found by its key, then recognised
        for _ in range(calls):
            attend(q, k, v, return_max_logits=True)
        launch._recipes.clear()
        with monkeypatch.context() as patch:
            patch.setattr(direct, "launch_stream", lambda index: None)
            _, meta = attend(q, k, v, return_max_logits=True)
        assert stub.compiled == ["hopper_fwd_kernel"] and not launch._recipes
        assert meta.max_logits.untyped_storage().nbytes() == 4 * HQ
        assert (meta.max_logits == -torch.inf).all()


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


def test_descriptors_are_bounded(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "MAX_ADDRESSES", 3)
    q, k, v = make()
    kept = [q.clone() for _ in range(6)]
    for x in [*kept, *kept]:
        out, _ = attend(x, k, v)
    assert last_launch(stub)["Q"] == map_of(kept[-1]) and last_launch(stub)["O"] == map_of(out)
    assert all(len(x) <= 3 for x in tensor_maps._by_layout.values())


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("sm_margin must be an int", {"sm_margin": True}),
        ("sm_margin must be an int", {"sm_margin": 1.0}),
        ("unknown backend", {"backend": "best"}),
        ("must be a real number|float", {"softmax_scale": [0.5]}),
        ("softcap must be 0", {"softcap": -1.0}),
        ("mask is for", {"mask": masks.causal(TOKENS + 1)}),
        ("one dtype", {"k": torch.zeros(TOKENS, HK, D)}),
        ("must be a tensor", {"k": None}),
        ("have no gradient here", {"alibi_slopes": torch.zeros(HQ, requires_grad=True)}),
        ("requires grad", {"max_logits_out": torch.zeros(HQ, requires_grad=True)}),
    ],
)
def test_a_known_call_excuses_no_other(stub: Stub, message: str, change: dict[str, Any]) -> None:
    q, k, v = make()
    for more in ({}, {"alibi_slopes": torch.zeros(HQ)}, {"max_logits_out": torch.zeros(HQ)}):
        for _ in range(3):
            attend(q, k, v, sm_margin=1, backend="triton", **more)
    given = {"q": q, "k": k, "v": v, "sm_margin": 1, "backend": "triton", **change}
    with pytest.raises((ValueError, TypeError), match=message):
        attend(**given)


def test_a_scale_in_a_tensor_is_read_each_time(stub: Stub) -> None:
    q, k, v = make()
    scale = torch.tensor(0.5)
    for value in (0.5, 0.25):
        scale.fill_(value)
        attend(q, k, v, softmax_scale=scale)
        attend(q, k, v, softmax_scale=scale)
        assert last_launch(stub)["scale"] == value


def under(mode: str) -> Any:
    class Nothing(TorchFunctionMode):
        def __torch_function__(self, func, kinds, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    makers: dict[str, Callable[[], Any]] = {
        "function mode": Nothing,
        "flop counter": lambda: FlopCounterMode(display=False),
        "forward derivatives": forward_ad.dual_level,
    }
    return makers[mode]()


@pytest.mark.parametrize("mode", ["function mode", "flop counter", "forward derivatives"])
def test_those_who_look_at_operators_see_them(mode: str) -> None:
    x = torch.zeros(1)
    assert runs_plainly(x) and runs_plainly(torch.nn.Parameter(x))
    with under(mode):
        assert not runs_plainly(x)
    seen = []
    torch.vmap(lambda y: seen.append(runs_plainly(x)) or y)(x)
    assert seen == [False] and runs_plainly(x)
    with torch.device("cpu"):
        assert runs_plainly(x)
    assert not runs_plainly(x, x.as_subclass(type("Special", (torch.Tensor,), {})))


def test_flops_of_a_known_call_are_counted(stub: Stub) -> None:
    q, k, v = make()
    for _ in range(3):
        attend(q, k, v)
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v)
    assert counter.get_total_flops() == 4 * MASK.area() * HQ * D


def test_traces_hold_the_operator(stub: Stub) -> None:
    q, k, v = make()
    for _ in range(3):
        attend(q, k, v)
    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    torch.compile(lambda q, k, v: attend(q, k, v)[0], backend=keep, fullgraph=True)(q, k, v)
    assert any("attn_fwd" in str(node.target) for node in graphs[0].graph.nodes)


def test_maxima_share_nothing_but_memory() -> None:
    fresh_maxima._ready.clear()
    with torch.inference_mode():
        rows = [fresh_maxima.fresh_maxima(5, torch.device("cpu"), 3) for _ in range(40)]
    assert len({x.data_ptr() for x in rows}) == 40
    assert all(x.shape == (5,) and x.data_ptr() % 16 == 0 for x in rows)
    assert all((x == -torch.inf).all() for x in rows)
    rows[0].fill_(1.0)
    assert (rows[0]._version, rows[1]._version) == (1, 0)
    assert all((x == -torch.inf).all() for x in rows[1:]) and not rows[0]._is_view()


def test_one_fill_of_maxima_for_many_calls_of_a_capture(monkeypatch) -> None:
    monkeypatch.setattr(fresh_maxima, "_in_capture", {})
    monkeypatch.setattr(fresh_maxima, "NUM_ROWS", 4)
    current: list[tuple[int, int] | None] = [(7, 1)]
    monkeypatch.setattr(fresh_maxima, "capture_id", lambda index: current[0])

    def fills(calls: int, heads: int = 5) -> list[int]:
        rows = [fresh_maxima.fresh_maxima(heads, torch.device("cpu"), None) for _ in range(calls)]
        assert all(row.shape == (heads,) and (row == -torch.inf).all() for row in rows)
        assert len({row.data_ptr() for row in rows}) == calls
        kept.extend(rows)
        return [row.untyped_storage().data_ptr() for row in rows]

    kept: list[torch.Tensor] = []
    first = fills(6)
    assert len(set(first[:4])) == 1 and first[4] == first[5] != first[0]
    assert set(fills(1, heads=6)).isdisjoint(first)
    for other in ((7, 2), (8, 2), None):  # the next capture, another stream of it, unknown
        current[0] = other
        assert set(fills(1)).isdisjoint(first)


def test_parts_of_tiles_get_memory_of_their_own(stub: Stub, monkeypatch) -> None:
    """New memory for each launch; counters for each stream, which launches leave at zero."""
    monkeypatch.setattr(hopper_tiles, "_meetings", {})
    mask = masks.full(TOKENS, 2048)  # one tile for each of four heads, and 132 SMs
    q = torch.randn(TOKENS, HQ, D).bfloat16()
    k, v = (torch.randn(2048, HK, D).bfloat16() for _ in range(2))
    _, cut, _ = hopper_tiles.few_tiles(mask, (64, 128), HQ, 132, False)
    assert cut is not None and cut.num_cut == 1
    kept, sizes = [], []
    between = hopper_launch.between_parts

    def keep(numbers: int, *where: Any) -> Any:
        kept.append(between(numbers, *where))
        sizes.append(numbers)
        return kept[-1]

    monkeypatch.setattr(hopper_launch, "between_parts", keep)
    sent = []
    for stream in (0, 0, 0, 5):
        monkeypatch.setattr(direct, "launch_stream", lambda index, stream=stream: stream)
        attend(q, k, v, mask)
        sent.append(last_launch(stub) if len(stub.launches) else {})
    later = [x for x in sent if x]
    assert len(later) == 3
    assert [x["PARTS"] for x in later] == [x["PARTS"].data_ptr() for x in kept[1:]]
    assert [x["MEETINGS"] for x in later] == [x["MEETINGS"].data_ptr() for x in kept[1:]]
    assert len({x["PARTS"] for x in later}) == 3
    assert later[0]["MEETINGS"] == later[1]["MEETINGS"] != later[2]["MEETINGS"]
    rows = cut.most_parts * HQ * 128
    assert set(sizes) == {rows * (D + 8)} and all(x["PARTS"].numel() == sizes[0] for x in kept)
    attend(q[:, :, :], k[:TOKENS], v[:TOKENS])  # not cut: none of it
    attend(q[:, :, :], k[:TOKENS], v[:TOKENS])
    assert last_launch(stub)["PARTS"] is last_launch(stub)["MEETINGS"] is None


def test_meetings_of_graphs_are_their_own(monkeypatch) -> None:
    for name in ("_meetings", "_spares"):
        monkeypatch.setattr(hopper_tiles, name, {})
    monkeypatch.setattr(hopper_tiles, "NUM_SPARES", 4)
    cpu = torch.device("cpu")
    before = hopper_tiles.meetings(cpu, None)
    one, other = hopper_tiles.meetings(cpu, 1), hopper_tiles.meetings(cpu, 2)
    assert hopper_tiles.meetings(cpu, 1) is one
    rows = [before, one, other, *(hopper_tiles.meetings(cpu, None) for _ in range(6))]
    assert len({x.data_ptr() for x in rows}) == 9
    assert all(x.numel() == hopper_tiles.NUM_MEETINGS and not x.any() for x in rows)


def test_a_counter_for_each_stream_and_launch_of_a_graph(monkeypatch) -> None:
    for name in ("_counters", "_spare_counters"):
        monkeypatch.setattr(hopper_launch, name, {})
    monkeypatch.setattr(hopper_launch, "NUM_SPARES", 4)
    current: list[int | None] = [None]
    monkeypatch.setattr(hopper_launch, "_stream_of", lambda device: current[0])
    cpu = torch.device("cpu")
    before = hopper_launch.work_counter(0, cpu)  # a graph that nothing was called before
    one, other = hopper_launch.work_counter(0, cpu, 1), hopper_launch.work_counter(0, cpu, 2)
    assert hopper_launch.work_counter(0, cpu, 1) is one is not other
    in_graphs = [hopper_launch.work_counter(0, cpu) for _ in range(6)]
    places = {x.data_ptr() for x in (before, one, other, *in_graphs)}
    assert len(places) == 9 and all(x.tolist() == [0] for x in (before, one, *in_graphs))
    assert all(x.data_ptr() % 16 == 0 for x in (one, *in_graphs))  # as compiled kernels expect


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
@pytest.mark.parametrize("described", [False, True])
def test_the_launcher_in_c_gets_what_triton_gives_it(
    version: str, described: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`print` stands for the launcher: both ways must say the same but for hooks and metadata."""
    import triton
    from triton.backends.nvidia import driver

    monkeypatch.setattr(triton, "__version__", version)
    launcher = object.__new__(driver.CudaLauncher)
    kind = "tensordesc<fp16[64,64]>" if described else "*fp16"
    signature = {"A": kind, "n": "i32"}
    form = {"swizzle": 3}
    metas = [form] if described else []
    vars(launcher).update(
        global_scratch_size=0,
        profile_scratch_size=0,
        launch_cooperative_grid=False,
        launch_pdl=True,
        arg_annotations="annotations",
        kernel_signature="signature",
        launch=driver.wrap_handle_tensordesc(print, signature, metas),
    )
    compiled = types.SimpleNamespace(
        run=launcher,
        function="handle",
        packed_metadata="metadata",
        metadata=types.SimpleNamespace(tensordesc_meta=metas),
        src=types.SimpleNamespace(signature=signature),
    )
    fast = c_launcher(compiled, (4, 2, 1))
    assert fast is not None and list(fast.forms) == metas
    fast.run(7, ["x", 3])
    options = "4 2 1 7 handle False True"
    expected = {
        "3.6.0": f"{options} None None metadata None None None x 3\n",
        "3.7.1": f"{options} metadata None None None None None annotations signature ['x', 3]\n",
    }
    assert capsys.readouterr().out == expected[version]
    for change in ({"global_scratch_size": 8}, {"launch": launch.launch}):
        other = object.__new__(driver.CudaLauncher)
        vars(other).update({**vars(launcher), **change})
        compiled.run = other
        assert c_launcher(compiled, (4, 2, 1)) is None
    compiled.run = launcher
    monkeypatch.setattr(triton, "__version__", "9.0.0")
    assert c_launcher(compiled, (4, 2, 1)) is None


def test_hooks_of_triton_are_noticed() -> None:
    from triton import knobs

    from keel._versions import has_launch_hooks

    assert not has_launch_hooks()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(knobs.runtime, name)
        chain.add(print)
        try:
            assert has_launch_hooks()
        finally:
            chain.remove(print)
    assert not has_launch_hooks()


def test_the_benchmark_runs_without_a_gpu(tmp_path: Path, capsys: Any) -> None:
    rows = host_cost.main(["--stub", "--calls", "50", "--out", str(tmp_path)])
    kinds = {(row.backend, row.direction, row.grad, row.max_logits) for row in rows}
    assert len(kinds) == len(rows) == 10 and all(row.us > 0 for row in rows)
    assert len((tmp_path / "host_cost_stub.csv").read_text().splitlines()) == 11
    assert not direct._known


def test_flags_of_any_sort_are_what_they_say(stub: Stub) -> None:
    q, k, v = make()
    flag = torch.tensor(False)
    assert attend(q, k, v, return_max_logits=flag)[1].max_logits is None
    flag.fill_(True)
    assert attend(q, k, v, return_max_logits=flag)[1].max_logits is not None
    assert attend(q, k, v, return_max_logits=[])[1].max_logits is None
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = attend(*leaves, deterministic=None)  # what FlashAttention's callers mean by "default"
    torch.autograd.grad(out.sum(), leaves)


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


def test_expanded_tensors_are_not_described(stub: Stub) -> None:
    q, k, v = make()
    one_head = k[:, :1].expand(-1, HK, -1)
    with pytest.raises(ValueError, match="not 0"):
        attend(q, one_head, v)
    attend(q, one_head, v, backend="triton")
    assert stub.compiled == ["flash_fwd_kernel"]
