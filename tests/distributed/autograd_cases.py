"""What ranks run in test_autograd.py: `calc_attn` inside the graphs of training."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from tests.distributed.cases import number_alive
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from keel import flex_flash_attn_func, masks
from keel.distributed import (
    AttnKey,
    CostModel,
    MaxLogitsTracker,
    calc_attn,
    dispatch,
    flex_key,
    roll,
    undispatch,
)
from keel.distributed.comm import Cast

Tensor = torch.Tensor
TOTAL, HEADS, DIM = 45, 2, 8
MASK = masks.documents([0, 7, 30, TOTAL], causal=True)


def key_of(**options: Any) -> AttnKey:
    free = CostModel(gb_per_s=1e9, latency_us=0.0)
    return flex_key(MASK, **{"degree": 2, "cost": free, **options})


def drawn(*shape: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def tokens(count: int = 3) -> list[Tensor]:
    return list(drawn(count, TOTAL, HEADS, DIM).unbind())


def alone(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, meta = flex_flash_attn_func(q, k, v, MASK, backend="blocked")
    return out, meta.lse


def same(got: Tensor, want: Tensor, key: AttnKey) -> None:
    torch.testing.assert_close(got, dispatch(want, key), atol=1e-10, rtol=0)


def some_need_gradients(rank: int) -> None:
    """Every choice of q, k, v and of out and lse in the loss."""
    key, (*whole, dout) = key_of(), tokens(4)
    dlse = drawn(TOTAL, HEADS, seed=1)
    for needs in product((False, True), repeat=3):
        for by_out, by_lse in ((1, 0), (0, 1), (1, 1)) if any(needs) else ():
            full = [x.clone().requires_grad_(n) for x, n in zip(whole, needs, strict=True)]
            local = [dispatch(x, key).requires_grad_(n) for x, n in zip(whole, needs, strict=True)]
            grads = []
            for inputs, call, cut in (
                (full, lambda *x: alone(*x), lambda x: x),
                (local, lambda *x: spread(*x, key), lambda x: dispatch(x, key)),
            ):
                out, lse = call(*inputs)
                loss = torch.zeros((), dtype=out.dtype)
                if by_out:
                    loss = loss + (out * cut(dout)).sum()
                if by_lse:
                    loss = loss + (lse * cut(dlse)).sum()
                wanted = [x for x in inputs if x.requires_grad]
                grads.append(torch.autograd.grad(loss, wanted))
            for want, got in zip(*grads, strict=True):
                same(got, want, key)


def spread(q: Tensor, k: Tensor, v: Tensor, key: AttnKey) -> tuple[Tensor, Tensor]:
    out, meta = calc_attn(q, k, v, key)
    return out, meta.lse


def any_strides(rank: int) -> None:
    """Parts of one projection, heads in front, a last dim with gaps, a gradient without strides."""
    key, whole = key_of(), tokens()
    local = [dispatch(x, key) for x in whole]
    full = [x.requires_grad_() for x in whole]
    out, _ = alone(*full)
    wants = torch.autograd.grad(out.sum(), full)
    for kind in ("fused", "heads first", "gaps"):
        if kind == "fused":
            leaf = torch.stack(local, 1).requires_grad_()
            parts = list(leaf.unbind(1))
        elif kind == "heads first":
            leaf = torch.stack([x.transpose(0, 1) for x in local]).requires_grad_()
            parts = [x.transpose(0, 1) for x in leaf.unbind()]
        else:
            leaf = torch.stack(local).repeat_interleave(2, 3).requires_grad_()
            parts = [x[..., ::2] for x in leaf.unbind()]
        got, _ = calc_attn(*parts, key)
        same(got, out, key)
        (grad,) = torch.autograd.grad(got.sum(), leaf)  # expanded: all strides are 0
        if kind == "fused":
            grads = grad.unbind(1)
        elif kind == "heads first":
            grads = tuple(x.transpose(0, 1) for x in grad.unbind())
        else:
            grads = grad[..., ::2].unbind()
        for a, b in zip(grads, wants, strict=True):
            same(a, b, key)


def twice_in_one_graph(rank: int) -> None:
    """Two layers with one key, and keys of one layer that both use."""
    key, whole = key_of(), tokens()
    full = [x.requires_grad_() for x in whole]
    local = [dispatch(x.detach(), key).requires_grad_() for x in whole]
    first, _ = alone(*full)
    second, lse = alone(first + full[0], full[1], first)
    wants = torch.autograd.grad(second.square().sum() + lse.sum(), full)
    here, _ = calc_attn(*local, key)
    there, meta = calc_attn(here + local[0], local[1], here, key)
    same(there, second, key)
    grads = torch.autograd.grad(there.square().sum() + meta.lse.sum(), local)
    for got, want in zip(grads, wants, strict=True):
        same(got, want, key)


def evaluation_and_training(rank: int) -> None:
    """Whatever mode came first, gradients are right later."""
    key, whole = key_of(keep_remote_keys=True), tokens()
    local = [dispatch(x, key).requires_grad_() for x in whole]
    with torch.inference_mode():
        first, _ = calc_attn(*local, key)
        assert torch.equal(dispatch(undispatch(first, key), key), first)
    with torch.no_grad():
        second, meta = calc_attn(*local, key)
    assert not second.requires_grad and not meta.lse.requires_grad
    out, _ = calc_attn(*local, key)
    assert torch.equal(first, out) and torch.equal(second, out)
    full = [x.requires_grad_() for x in whole]
    wants = torch.autograd.grad(alone(*full)[0].square().sum(), full)
    for got, want in zip(torch.autograd.grad(out.square().sum(), local), wants, strict=True):
        same(got, want, key)


def stages_kept(rank: int) -> tuple[int, int]:
    """Most arrived stages alive at once, with keep_remote_keys: (in training, without)."""
    buffers: list[StorageWeakRef] = []
    most, real = [0, 0], Cast.wait

    def wait(self: Cast) -> list[Tensor]:
        found = real(self)
        buffers.append(StorageWeakRef(found[0].untyped_storage()))
        most[training] = max(most[training], number_alive(buffers, allowed=1))
        return found

    Cast.wait = wait  # type: ignore[method-assign]
    key = key_of(keep_remote_keys=True, degree=3)
    local = [dispatch(x, key).requires_grad_() for x in tokens()]
    for training in (True, False):
        buffers.clear()
        with torch.set_grad_enabled(training):
            calc_attn(*local, key)
    return most[True], most[False]


def recomputed(rank: int, reentrant: bool) -> None:
    """Activation checkpointing: right gradients, and maxima that count once."""
    key, whole = key_of(), tokens()
    tracker = MaxLogitsTracker()
    full = [x.requires_grad_() for x in whole]
    wants = torch.autograd.grad(alone(*full)[0].square().sum(), full)
    local = [dispatch(x.detach(), key).requires_grad_() for x in whole]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return calc_attn(q, k, v, key, defer_max_logits=tracker)[0].square()

    out = checkpoint(layer, *local, use_reentrant=reentrant)
    out.sum().backward()
    for x, want in zip(local, wants, strict=True):
        same(x.grad, want, key)
    assert len(tracker.local()) == 1


def compiled(rank: int) -> int:
    """The number of graphs around a call that breaks them; results as without."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    key, whole = key_of(), tokens()
    local = [dispatch(x, key).requires_grad_() for x in whole]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, meta = calc_attn(q * 2, k + 1, v, key, return_max_logits=True)
        return roll(out.sin(), 1, key) + meta.max_logits.sum()

    want = layer(*local)
    wants = torch.autograd.grad(want.sum(), local)
    torch._dynamo.reset()
    out = torch.compile(layer, backend=backend)(*local)
    torch.testing.assert_close(out, want)
    for got, ref in zip(torch.autograd.grad(out.sum(), local), wants, strict=True):
        torch.testing.assert_close(got, ref)
    return len(graphs)


def second_derivatives(rank: int) -> list[str]:
    """What who asks for them hears, from attention and from moved rows."""
    key = key_of()
    q, k, v = (dispatch(x, key).requires_grad_() for x in tokens())
    heard = []
    for call in (
        lambda: calc_attn(q, k, v, key)[0],
        lambda: undispatch(q, key, replicated=False),
    ):
        (grad,) = torch.autograd.grad(call().square().sum(), q, create_graph=True)
        try:
            grad.sum().backward()
        except RuntimeError as error:
            heard.append(str(error))
    return heard
