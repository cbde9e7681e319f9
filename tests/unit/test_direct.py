"""Calls seen before, on a GPU that does nothing: what they launch, and when they may not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
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
from tests.stub_cases import (
    HK,
    HQ,
    MASK,
    TOKENS,
    D,
    Stub,
    attend,
    last_launch,
    make,
    map_of,
)

from keel import direct, masks
from keel._versions import runs_plainly
from keel.kernels import (
    launch,
    tensor_maps,
)


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


def test_expanded_tensors_are_not_described(stub: Stub) -> None:
    q, k, v = make()
    one_head = k[:, :1].expand(-1, HK, -1)
    with pytest.raises(ValueError, match="not 0"):
        attend(q, one_head, v)
    attend(q, one_head, v, backend="triton")
    assert stub.compiled == ["flash_fwd_kernel"]
