"""The softmax operators: schemas, fakes, autograd; scores are always (b, h, sq, sk) here."""

from __future__ import annotations

from typing import Any

import torch

from keel._versions import runs_plainly
from keel.kernels import softmax_blocked
from keel.masks.intervals import UNBOUNDED

_SCORE = "float scale, float softcap, int lo, int hi"
torch.library.define(
    "keel::softmax_fwd",
    f"(Tensor x, Tensor? mask, Tensor? sink, {_SCORE}, bool uniform, bool want_max, str backend)"
    " -> (Tensor y, Tensor lse, Tensor max_logits)",
)
torch.library.define(
    "keel::softmax_bwd",
    f"(Tensor dy, Tensor y, Tensor? x, Tensor? lse, {_SCORE}, bool want_dot, str backend)"
    " -> (Tensor dx, Tensor dot)",
)


def _softmax_fwd(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    scale: float,
    softcap: float,
    lo: int,
    hi: int,
    uniform: bool,
    want_max: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    want_lse = sink is not None or uniform
    if backend == "blocked" or x.numel() == 0:
        y, lse, top = softmax_blocked.forward(
            *(x, mask, sink), scale=scale, softcap=softcap, band=(lo, hi), uniform=uniform
        )
        return y, lse if want_lse else lse.new_empty(0), top if want_max else lse.new_empty(0)
    from keel.kernels import softmax_fwd

    b, h, sq, _ = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    lse = torch.empty((b, h, sq) if want_lse else 0, dtype=torch.float32, device=x.device)
    top = torch.full((h if want_max else 0,), -torch.inf, device=x.device)
    softmax_fwd.forward(
        *(x, mask, sink),
        scale=scale,
        softcap=softcap,
        band=(lo, hi),
        uniform=uniform,
        y=y,
        lse=lse if want_lse else None,
        max_logits=top if want_max else None,
    )
    return y, lse, top


def _softmax_bwd(
    dy: torch.Tensor,
    y: torch.Tensor,
    x: torch.Tensor | None,
    lse: torch.Tensor | None,
    scale: float,
    softcap: float,
    lo: int,
    hi: int,
    want_dot: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend == "blocked" or y.numel() == 0:
        dx, dot = softmax_blocked.backward(dy, y, x, scale=scale, softcap=softcap, lse=lse)
        return dx, dot if want_dot else dot.new_empty(0)
    from keel.kernels import softmax_bwd

    dy = dy if dy.stride(3) == 1 else dy.contiguous()
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    dot = torch.empty(y.shape[:3] if want_dot else 0, dtype=torch.float32, device=y.device)
    softmax_bwd.backward(
        *(dy, y, x),
        scale=scale,
        softcap=softcap,
        band=(lo, hi),
        dx=dx,
        lse=lse,
        dot=dot if want_dot else None,
    )
    return dx, dot


torch.library.impl("keel::softmax_fwd", "CompositeExplicitAutograd", _softmax_fwd)
torch.library.impl("keel::softmax_bwd", "CompositeExplicitAutograd", _softmax_bwd)


@torch.library.register_fake("keel::softmax_fwd")
def _fwd_fake(
    x: torch.Tensor, mask: torch.Tensor | None, sink: torch.Tensor | None, *args: Any
) -> tuple[torch.Tensor, ...]:
    wide, uniform, want_max = softmax_blocked.wide_dtype(x.dtype), args[4], args[5]
    lse_shape = x.shape[:3] if sink is not None or uniform else (0,)
    return (
        x.new_empty(x.shape),
        x.new_empty(lse_shape, dtype=wide),
        x.new_empty(x.shape[1] if want_max else 0, dtype=wide),
    )


@torch.library.register_fake("keel::softmax_bwd")
def _bwd_fake(dy: torch.Tensor, y: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    wide, want_dot = softmax_blocked.wide_dtype(y.dtype), args[6]
    return y.new_empty(y.shape), y.new_empty(y.shape[:3] if want_dot else (0,), dtype=wide)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, _mask, sink, scale, softcap, lo, hi, uniform, _want_max, backend = inputs
    y, lse, max_logits = output
    # The output says all that the gradient needs, unless a softcap bends the input.
    want_lse = sink is not None or uniform
    ctx.save_for_backward(y, x if softcap else None, sink, lse if want_lse else None)
    ctx.numbers = (scale, softcap, lo, hi)
    ctx.backend = backend
    ctx.mark_non_differentiable(lse, max_logits)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 10
    y, x, sink, lse = ctx.saved_tensors
    direct = not torch.is_grad_enabled() and runs_plainly(dy, y)
    run: Any = _softmax_bwd if direct else torch.ops.keel.softmax_bwd
    dx, dot = run(dy, y, x, lse, *ctx.numbers, sink is not None, ctx.backend)
    dsink = None
    if sink is not None:
        # The sink's probability has no value: its logit only ever loses dot.
        prob = torch.exp(sink.to(lse.dtype).view(1, -1, 1) - lse)
        prob = torch.where(lse == -torch.inf, 0.0, prob)
        dsink = -(prob * dot).sum((0, 2)).to(sink.dtype)
    return dx, None, dsink, *(None,) * 7


torch.library.register_autograd("keel::softmax_fwd", _backward, setup_context=_setup_context)


def _second_backward(ctx: Any, *grads: torch.Tensor) -> None:
    raise NotImplementedError("the fused softmax has no second derivatives: use torch.softmax")


torch.library.register_autograd("keel::softmax_bwd", _second_backward)


class _Direct(torch.autograd.Function):
    """keel::softmax_fwd without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        output = _softmax_fwd(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        return _backward(ctx, *grads)  # type: ignore[arg-type]


def softmax(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    *,
    scale: float,
    softcap: float,
    band: tuple[int, int],
    uniform: bool,
    want_max: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, max_logits or None), differentiable in x and sink."""
    inputs = (x, mask, sink, scale, softcap, *band, uniform, want_max, backend)
    if not runs_plainly(x):
        y, _, top = torch.ops.keel.softmax_fwd(*inputs)
    elif torch.is_grad_enabled() and (x.requires_grad or (sink is not None and sink.requires_grad)):
        y, _, top = _Direct.apply(*inputs)
    else:
        y, _, top = _softmax_fwd(*inputs)
    return y, top if want_max else None


def softmax_gradient(
    dy: torch.Tensor, y: torch.Tensor, *, scale: float, causal: bool, backend: str
) -> torch.Tensor:
    """The gradient of scores from their probabilities alone, any number of leading dims.

    `causal` promises that y is 0 right of the main diagonal of square matrices: nothing there is
    read.
    """
    rows, columns = y.shape[-2:]
    y4 = y.contiguous().view(-1, 1, rows, columns)
    dx, _ = _softmax_bwd(
        *(dy.reshape(y4.shape), y4, None, None, scale, 0.0),
        *(-UNBOUNDED, 0 if causal else UNBOUNDED, False, backend),
    )
    return dx.view(y.shape)
