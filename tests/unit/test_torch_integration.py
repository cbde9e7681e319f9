"""Inside torch's machinery: compile, opcheck, checkpointing, FLOP counts, autocast, pickling."""

from __future__ import annotations

import copy
import functools
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from keel import (
    AttnMask,
    flash_attn_func,
    flash_attn_varlen_func,
    flex_flash_attn_func,
    masks,
)

TOKENS = 40
RANGES = ([(0, 15), (15, 40)], [(0, 15), (5, 40)], [1, 0])

Tensors = list[torch.Tensor]

MASKS = {
    "full": masks.full(TOKENS),
    "causal": masks.causal(TOKENS),
    "window": masks.sliding_window(TOKENS, left=5),
    "overlapping": masks.full(TOKENS) | masks.causal(TOKENS),
    "nothing": AttnMask([], TOKENS, TOKENS),
}


def make(hq: int = 4, hk: int = 2, dtype: torch.dtype = torch.float32) -> Tensors:
    random = torch.Generator().manual_seed(0)
    return [
        torch.randn(TOKENS, heads, 16, generator=random).to(dtype).requires_grad_()
        for heads in (hq, hk, hk)
    ]


def with_ranges(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> Any:
    out, meta = flex_flash_attn_func(q, k, v, *mask, return_max_logits=True)
    return out * 2, meta.lse, meta.max_logits


def with_mask(mask: AttnMask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    out, meta = flex_flash_attn_func(q, k, v, mask, return_max_logits=True)
    return out * 2, meta.lse, meta.max_logits


def with_lists(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    out, meta = flex_flash_attn_func(q, k, v, *RANGES, softcap=5.0)
    return out * 2, meta.lse


def with_options(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, bias: torch.Tensor
) -> Any:
    slopes = torch.full((4,), 0.1)
    out, meta = flex_flash_attn_func(
        q, k, v, [(0, TOKENS)], [(0, TOKENS)], 1, sink=sink, bias=bias, alibi_slopes=slopes
    )
    return out * 2, meta.lse


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor) -> Any:
    slopes = torch.full((4,), 0.1)
    return (
        flash_attn_varlen_func(q, k, v, cu, cu, causal=True),
        flash_attn_varlen_func(q, k, v, cu, cu, window_size=(5, -1), alibi_slopes=slopes),
    )


def batched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    q, k, v = (x.unflatten(0, (4, x.shape[0] // 4)) for x in (q, k, v))
    slopes = torch.full((4,), 0.1)
    return (
        flash_attn_func(q, k, v, causal=True, softcap=3.0),
        flash_attn_func(q, k, v, window_size=(3, 0), alibi_slopes=slopes, return_max_logits=True)[
            0
        ],
    )


def int_tensors() -> Tensors:
    return [torch.tensor(x, dtype=torch.int32) for x in RANGES]


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Tensors]]] = {
    "ranges": (with_ranges, lambda: [*make(), *int_tensors()]),
    "ranges without types": (with_ranges, lambda: [*make(), *int_tensors()[:2]]),
    "mask": (functools.partial(with_mask, masks.causal(TOKENS)), make),
    "lists": (with_lists, make),
    "options": (
        with_options,
        lambda: [*make(), *(torch.randn(s).requires_grad_() for s in ((4,), (4, 1, TOKENS)))],
    ),
    "packed": (packed, lambda: [*make(), torch.tensor([0, 7, 30, 40])]),
    "batched": (batched, make),
}


def results_and_gradients(call: Callable[..., Any], given: Tensors) -> Tensors:
    leaves = [x for x in given if x.requires_grad]
    results = [x for x in call(*given) if x is not None]
    loss = sum((x.square() * 0.5).sum() for x in results if x.requires_grad)
    return [x.detach() for x in results] + list(torch.autograd.grad(loss, leaves))


def assert_all_close(got: Tensors, want: Tensors, tolerance: float = 1e-5) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.fixture
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", CALLS)
def test_compile_as_one_graph(name: str, fresh_compiler: None) -> None:
    call, inputs = CALLS[name]
    given = inputs()
    want = results_and_gradients(call, given)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_all_close(results_and_gradients(compiled, given), want)


def test_compiled_ranges_are_inputs_not_constants(fresh_compiler: None) -> None:
    compiled = torch.compile(with_ranges, fullgraph=True, backend="aot_eager")
    given = make()
    first = int_tensors()
    second = [torch.tensor(x) for x in ([(0, 30), (30, 40)], [(0, 20), (0, 40)], [0, 2])]
    for ranges in (first, [x.int() for x in second], first):
        want = results_and_gradients(with_ranges, [*given, *ranges])
        assert_all_close(results_and_gradients(compiled, [*given, *ranges]), want)
    first[0][0, 1] = TOKENS + 1
    with pytest.raises(ValueError, match="ends after the last of 40 tokens"):
        compiled(*given, *first)


def test_compiled_masks_are_inputs_not_constants(fresh_compiler: None) -> None:
    compiled = torch.compile(with_mask, fullgraph=True, backend="aot_eager")
    given = make()
    for mask in (masks.causal(TOKENS), masks.full(TOKENS), MASKS["window"], masks.causal(TOKENS)):
        want = results_and_gradients(functools.partial(with_mask, mask), given)
        assert_all_close(results_and_gradients(functools.partial(compiled, mask), given), want)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["ranges", "lists", "packed", "batched"])
def test_compile_with_changing_lengths(
    name: str, dynamic: bool | None, fresh_compiler: None
) -> None:
    """The second length makes torch trace with symbolic sizes: masks must follow them."""
    call, inputs = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for extra in (0, 8, 24):
        q, k, v, *mask = inputs()
        given = [
            torch.cat([x.detach(), x.detach()[:extra]]).requires_grad_() for x in (q, k, v)
        ] + [x + extra * (x == TOKENS) for x in mask]
        want = results_and_gradients(call, given)
        assert_all_close(results_and_gradients(compiled, given), want)


def test_compiled_calls_refuse_too(fresh_compiler: None) -> None:
    q, k, v = make()
    compiled = torch.compile(with_ranges, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="one head_dim, got 16 and 8"):
        compiled(q, k[..., :8], v, *int_tensors())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(fresh_compiler: None) -> None:
    for name in ("ranges", "packed"):
        call, inputs = CALLS[name]
        given = inputs()
        want = results_and_gradients(call, given)
        compiled = torch.compile(call, fullgraph=True, backend="inductor")
        assert_all_close(results_and_gradients(compiled, given), want)


def operator_arguments(**change: Any) -> list[Any]:
    """Arguments of keel::attn_fwd; names as in the schema."""
    q, k, v = make(dtype=change.pop("dtype", torch.float32))
    values = {
        "mask": [masks.causal(TOKENS).tensor],
        **dict.fromkeys(("sink", "bias", "alibi_slopes", "alibi_offset")),
        "scale": 0.25,
        "softcap": 0.0,
        "want_max": True,
        "deterministic": False,
        "sm_margin": 0,
        "backend": "blocked",
    }
    return [q, k, v, *(values | change).values()]


OPERATOR_OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "no maximum": lambda: {"want_max": False},
    "bf16": lambda: {"dtype": torch.bfloat16},
    "fp64": lambda: {"dtype": torch.float64},
    "ranges": lambda: {"mask": int_tensors(), "softcap": 4.0},
    "sink and bias": lambda: {
        "sink": torch.randn(4, requires_grad=True),
        "bias": torch.randn(1, TOKENS, TOKENS, requires_grad=True),
        "scale": -0.25,
    },
    "alibi": lambda: {
        "alibi_slopes": torch.rand(4),
        "alibi_offset": torch.zeros(TOKENS, dtype=torch.int32),
    },
}


@pytest.mark.parametrize("option", OPERATOR_OPTIONS)
def test_opcheck_forward(option: str) -> None:
    arguments = operator_arguments(**OPERATOR_OPTIONS[option]())
    torch.library.opcheck(torch.ops.keel.attn_fwd.default, tuple(arguments))


@pytest.mark.parametrize("option", OPERATOR_OPTIONS)
def test_opcheck_backward(option: str) -> None:
    arguments = operator_arguments(**OPERATOR_OPTIONS[option]())
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    out, lse, _ = torch.ops.keel.attn_fwd(*arguments)
    (q, k, v, mask), score, (_, *execution) = arguments[:4], arguments[4:10], arguments[10:]
    for dlse in (None, torch.randn_like(lse)):
        want_dbias = score[1] is not None
        torch.library.opcheck(
            torch.ops.keel.attn_bwd.default,
            (torch.randn_like(out), dlse, q, k, v, out, lse, mask, *score, want_dbias, *execution),
        )


@pytest.mark.parametrize("option", ["plain", "no maximum", "bf16", "fp64", "ranges", "alibi"])
def test_opcheck_accumulate(option: str) -> None:
    arguments = operator_arguments(**OPERATOR_OPTIONS[option]())
    (q, k, v, mask), score = arguments[:4], arguments[4:10]
    q, k, v = (x.detach() for x in (q, k, v))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    running = [torch.randn(TOKENS, 4, 16, dtype=wide), torch.randn(TOKENS, 4, dtype=wide)]
    top = torch.zeros(4, dtype=wide) if arguments[10] else None
    torch.library.opcheck(
        torch.ops.keel.attn_accumulate_.default,
        (*running, top, q, k, v, mask, *score, 0, "blocked"),
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["ranges", "mask", "packed"])
def test_checkpointing(name: str, use_reentrant: bool) -> None:
    call, inputs = CALLS[name]
    given = inputs()
    want = results_and_gradients(call, given)

    def recomputed(*args: torch.Tensor) -> Any:
        return checkpoint(call, *args, use_reentrant=use_reentrant)

    leaves = [x for x in given if x.requires_grad]
    results = recomputed(*given)
    loss = sum((x.square() * 0.5).sum() for x in results if x.requires_grad)
    loss.backward()  # the reentrant kind does not know autograd.grad
    assert_all_close([*results, *(x.grad for x in leaves)], want, 0.0)


@pytest.mark.parametrize("name", MASKS)
def test_flops(name: str) -> None:
    mask = MASKS[name]
    q, k, v = make()
    with FlopCounterMode(display=False) as counter:
        out, _ = flex_flash_attn_func(q, k, v, mask)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 4 * mask.area() * 4 * 16
    assert counter.get_total_flops() - forward == 2.5 * forward
    with FlopCounterMode(display=False) as counter:
        flex_flash_attn_func(q, k, v, mask, max_logits_out=torch.zeros(4))
    assert counter.get_total_flops() == forward
    # d != dv: each product by its own width.
    with FlopCounterMode(display=False) as counter:
        out, _ = flex_flash_attn_func(q, k, v[..., :8], mask)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * mask.area() * 4 * (16 + 8)
    assert counter.get_total_flops() - forward == 2 * mask.area() * 4 * (3 * 16 + 2 * 8)


@pytest.mark.parametrize("backend", ["blocked", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(backend: str, dtype: torch.dtype) -> None:
    """Products inside would silently be rounded to bf16 if autocast reached them."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out, meta = flex_flash_attn_func(
            q, k, v, masks.causal(TOKENS), return_max_logits=True, backend=backend
        )
        return out, meta.lse, meta.max_logits

    given = make(dtype=dtype)
    want = results_and_gradients(call, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = call(*given)
    loss = sum((x.square() * 0.5).sum() for x in results if x.requires_grad)
    context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=backend == "blocked")
    with context:
        grads = torch.autograd.grad(loss, given)
    assert_all_close([*(x.detach() for x in results), *grads], want, 1e-6)
    assert [x.dtype for x in results] == [dtype, torch.float32, torch.float32]


def test_autocast_of_a_layer() -> None:
    """A projection under autocast gives bf16; attention takes it as it comes."""
    layer = torch.nn.Linear(32, 3 * 32)
    x = torch.randn(TOKENS, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = layer(x).unflatten(1, (3, 2, 16)).unbind(1)
        out, meta = flex_flash_attn_func(q, k, v, masks.causal(TOKENS))
    assert out.dtype == torch.bfloat16 and meta.lse.dtype == torch.float32
    out.sum().backward()
    assert x.grad is not None and torch.all(x.grad.isfinite())


def test_copies_of_a_mask() -> None:
    mask = masks.sliding_window(TOKENS, left=7, sink_tokens=2)
    want, _ = flex_flash_attn_func(*make(), mask)
    for again in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert again == mask and hash(again) == hash(mask) and again.area() == mask.area()
        assert torch.equal(flex_flash_attn_func(*make(), again)[0], want)


def test_copies_of_a_model_with_a_mask() -> None:
    """A module that keeps its mask can be copied and saved whole."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sink = torch.nn.Parameter(torch.zeros(4))
            self.mask = masks.causal(TOKENS)

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out, _ = flex_flash_attn_func(q, k, v, self.mask, sink=self.sink)
            return out

    module = Attention()
    assert torch.equal(copy.deepcopy(module)(*make()), module(*make()))
    assert list(module.state_dict()) == ["sink"]


WITHOUT_EXTRAS = """
import sys
for name in ("triton", "matplotlib", "typer", "rich"):
    sys.modules[name] = None
import torch
import keel
q = torch.randn(9, 2, 8, requires_grad=True)
out, meta = keel.flex_flash_attn_func(q, q, q, [(0, 9)], [(0, 9)], 1, return_max_logits=True)
out.sum().backward()
assert torch.allclose(out[0], q[0]) and q.grad.isfinite().all()
print("ran", keel.masks.causal(4).draw() != "")
"""


def test_needs_only_torch_and_numpy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ran True"


def test_import_is_light() -> None:
    # torch's own FLOP counter may bring Triton in; our kernels and the extras must wait.
    heavy = ["keel.kernels.flash_fwd", "keel.cli", "matplotlib", "typer", "rich"]
    code = f"import sys, keel; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
