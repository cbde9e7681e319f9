"""The operators: schemas, fakes, autograd, choice of backend, FLOP formulas.

Registered here with torch alone, before anything is traced; Triton is imported only when an
operator runs on it. Shapes: q (tq, hq, d), k (tk, hk, d), v (tk, hk, dv), lse (tq, hq).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from keel import reference
from keel._versions import constant_in_traces, runs_plainly
from keel.kernels import blocked
from keel.masks import AttnMask
from keel.masks.inputs import mask_of_tensors
from keel.meta import Scoring

logger = logging.getLogger("keel")

BACKENDS = ("auto", "hopper", "triton", "blocked", "reference")
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_SCORE = (
    "Tensor? sink, Tensor? bias, Tensor? alibi_slopes, Tensor? alibi_offset, "
    "float scale, float softcap"
)
torch.library.define(
    "keel::attn_fwd",
    f"(Tensor q, Tensor k, Tensor v, Tensor[] mask, {_SCORE}, bool want_max, bool deterministic, "
    "int sm_margin, str backend) -> (Tensor out, Tensor lse, Tensor max_logits)",
)
torch.library.define(
    "keel::attn_bwd",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor[] mask, {_SCORE}, bool want_dbias, bool deterministic, int sm_margin, str backend)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor dbias)",
)
torch.library.define(
    "keel::attn_accumulate_",
    "(Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? max_logits, Tensor q, Tensor k, Tensor v, "
    f"Tensor[] mask, {_SCORE}, int sm_margin, str backend) -> ()",
)


@constant_in_traces
def choose_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that will run; an explicit request is honoured or refused, never replaced."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    if backend == "auto":
        chosen, why = explain_backend(device, dtype)
        _log_choice(str(device), dtype, chosen, why)
        return chosen
    if backend == "triton":
        problem = _triton_problem(device, dtype)
        if problem is not None:
            raise ValueError(f"backend 'triton' cannot run here: {problem}; use backend='auto'")
    elif backend == "hopper":
        raise ValueError("backend 'hopper' is for attention alone: use 'auto' or 'triton' here")
    return backend


def choose_attention_backend(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring
) -> str:
    """As choose_backend, and "hopper": kernels for Hopper GPUs (see `_by_hopper`).

    "auto" stays "auto" on a GPU: each call takes the Hopper forward where it can run.
    """
    if backend != "hopper":
        chosen = choose_backend(backend, q.device, q.dtype)
        return backend if backend == "auto" and chosen == "triton" else chosen
    problem = _triton_problem(q.device, q.dtype) or _hopper_problem(q, k, v, scoring)
    if problem is not None:
        raise ValueError(f"backend 'hopper' cannot run here: {problem}; use backend='auto'")
    return backend


def _hopper_problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring
) -> str | None:
    from keel.kernels.hopper_launch import hopper_problem

    return hopper_problem(q, k, v, scoring)


def settled_backend(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring
) -> str:
    """What "auto" means on a GPU for these tensors; any other backend is itself."""
    if backend != "auto":
        return backend
    return "hopper" if _hopper_problem(q, k, v, scoring) is None else "triton"


def forward_kernel(backend: str) -> Any:
    """The module whose `forward` serves a settled backend that is not torch itself."""
    if backend == "hopper":
        from keel.kernels import hopper_launch

        return hopper_launch
    from keel.kernels import flash_fwd

    return flash_fwd


def explain_backend(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """(backend, why) that "auto" means for tensors of this device and dtype."""
    problem = _triton_problem(device, dtype)
    if problem is None and device.type != "cpu":  # the interpreter is for tests, not for work
        return "triton", "portable Triton kernels"
    return "blocked", problem or "CPU tensors"


def explain_attention_backend(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """As explain_backend, for attention, which also has kernels of its own for some GPUs."""
    backend, why = explain_backend(device, dtype)
    if backend == "triton" and dtype in (torch.bfloat16, torch.float16):
        from keel.kernels.hopper_launch import machine_problem

        if machine_problem(device) is None:
            return "hopper", "Hopper kernels; the portable Triton kernels where these cannot serve"
    return backend, why


@functools.cache
def _log_choice(device: str, dtype: torch.dtype, chosen: str, why: str) -> None:
    logger.info("attention on %s in %s uses backend %r: %s", device, dtype, chosen, why)


@functools.cache
def _triton_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton cannot run; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if dtype not in TRITON_DTYPES:
        return f"{dtype} is not supported by the Triton kernels (bf16, fp16 and fp32 are)"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return "CPU tensors (Triton runs on CPUs only in its interpreter, TRITON_INTERPRET=1)"
    if device.type != "cuda":
        return f"device {device} is not a CUDA device"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "compute capability 8.0 or newer is needed"
    return None


def num_sms(device: torch.device) -> int | None:
    """Multiprocessors of a CUDA device, None elsewhere."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).multi_processor_count


def in_a_row(x: torch.Tensor | None) -> torch.Tensor | None:
    """Numbers as kernels read them, side by side; one sink for all heads may come expanded."""
    return x.contiguous() if isinstance(x, torch.Tensor) and not x.is_contiguous() else x


def _scoring(
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    alibi_offset: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> Scoring:
    return Scoring(
        scale=scale,
        softcap=softcap,
        sink=in_a_row(sink),
        bias=bias,
        alibi_slopes=in_a_row(alibi_slopes),
        alibi_offset=in_a_row(alibi_offset),
    )


def _positive_scale(q: torch.Tensor, scoring: Scoring) -> tuple[torch.Tensor, Scoring, float]:
    """Kernels take the maximum before scaling, so they want scale > 0: the sign moves into q.

    Returns (q, scoring, factor) where the gradient of the old q is factor times the new one.
    """
    if scoring.scale > 0:
        return q, scoring, 1.0
    sign = -1.0 if scoring.scale < 0 else 0.0
    return q * sign, replace(scoring, scale=abs(scoring.scale) or 1.0), sign


def _in_its_own_precision(run: Callable[..., Any]) -> Callable[..., Any]:
    """Shields an operator from autocast, which would round the matrix products inside it."""

    @functools.wraps(run)
    def shielded(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device.type
        if not torch.is_autocast_enabled(device):  # the usual case: save the microseconds
            return run(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return run(*args, **kwargs)

    return shielded


@_in_its_own_precision
def attn_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: list[torch.Tensor],
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    alibi_offset: torch.Tensor | None,
    scale: float,
    softcap: float,
    want_max: bool,
    deterministic: bool,
    sm_margin: int,
    backend: str,
    *,
    max_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, max_logits); a buffer given for the last is raised in place."""
    (tq, hq, _), (tk, _, dv) = q.shape, v.shape
    attn_mask = mask_of_tensors(mask, tq, tk)
    scoring = _scoring(sink, bias, alibi_slopes, alibi_offset, scale, softcap)
    if backend == "blocked":
        out, lse, top = blocked.forward(q, k, v, attn_mask, scoring)
        if max_logits is not None:
            top = torch.maximum(max_logits, top, out=max_logits)
        return out.to(q.dtype), lse, top if want_max else top.new_empty(0)
    out = torch.empty(tq, hq, dv, dtype=q.dtype, device=q.device)
    lse = torch.empty(tq, hq, dtype=torch.float32, device=q.device)
    if max_logits is None:
        max_logits = lse.new_full((hq if want_max else 0,), -torch.inf)
    q, scoring, _ = _positive_scale(q, scoring)
    forward_kernel(settled_backend(backend, q, k, v, scoring)).forward(
        *(q, k, v, attn_mask, scoring),
        out=out,
        lse=lse,
        max_logits=max_logits if want_max else None,
        sm_margin=sm_margin,
    )
    return out, lse, max_logits


torch.library.impl("keel::attn_fwd", "CompositeExplicitAutograd", attn_fwd)


@torch.library.register_fake("keel::attn_fwd")
def _attn_fwd_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    want_max = args[7]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[0], q.shape[1], dtype=wide)
    return out, lse, q.new_empty(q.shape[1] if want_max else 0, dtype=wide)


@torch.library.impl("keel::attn_accumulate_", "CompositeExplicitAutograd")
@_in_its_own_precision
@torch.no_grad()  # running results are data: they keep no graph of the inputs
def _attn_accumulate(
    out: torch.Tensor,
    lse: torch.Tensor,
    max_logits: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: list[torch.Tensor],
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    alibi_offset: torch.Tensor | None,
    scale: float,
    softcap: float,
    sm_margin: int,
    backend: str,
) -> None:
    attn_mask = mask_of_tensors(mask, q.shape[0], k.shape[0])
    scoring = _scoring(sink, bias, alibi_slopes, alibi_offset, scale, softcap)
    if backend == "blocked":
        part_out, part_lse, part_top = blocked.forward(q, k, v, attn_mask, scoring)
        merged, merged_lse, _ = reference.merge([(out, lse, None), (part_out, part_lse, None)])
        out.copy_(merged)
        lse.copy_(merged_lse)
        if max_logits is not None:
            torch.maximum(max_logits, part_top, out=max_logits)
        return
    q, scoring, _ = _positive_scale(q, scoring)
    forward_kernel(settled_backend(backend, q, k, v, scoring)).forward(
        *(q, k, v, attn_mask, scoring),
        out=out,
        lse=lse,
        max_logits=max_logits,
        accumulate=True,
        sm_margin=sm_margin,
    )


@torch.library.register_fake("keel::attn_accumulate_")
def _attn_accumulate_fake(*args: Any) -> None:
    return None


@_in_its_own_precision
def attn_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: list[torch.Tensor],
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    alibi_offset: torch.Tensor | None,
    scale: float,
    softcap: float,
    want_dbias: bool,
    deterministic: bool,
    sm_margin: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scoring = _scoring(sink, bias, alibi_slopes, alibi_offset, scale, softcap)
    dq, dk, dv, dsink, dbias = gradients(
        *(dout, dlse, q, k, v, out, lse, mask_of_tensors(mask, q.shape[0], k.shape[0]), scoring),
        want_dbias=want_dbias,
        deterministic=deterministic,
        sm_margin=sm_margin,
        backend=backend,
        dtype=q.dtype,
    )
    dsink = lse.new_empty(0) if dsink is None else dsink
    dbias = lse.new_empty(0) if dbias is None or bias is None else dbias.to(bias.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, dbias


@_in_its_own_precision
def gradients(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    attn_mask: AttnMask,
    scoring: Scoring,
    *,
    want_dbias: bool,
    deterministic: bool,
    sm_margin: int,
    backend: str,
    dtype: torch.dtype,
    steps: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dq, dk, dv, dsink, dbias); the first three in `dtype` or wider.

    `steps`, a kernels.steps.Steps, gets the launches, where these are all there is.
    """
    sink, bias, dsink = scoring.sink, scoring.bias, None
    if backend == "blocked":
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        delta = delta if dlse is None else delta - dlse
        dq, dk, dv, dbias = blocked.backward(
            *(dout, q, k, v, lse, delta, attn_mask, scoring), want_dbias=want_dbias
        )
        if sink is not None:
            dsink = _sink_gradient(sink, lse, delta)
        return dq, dk, dv, dsink, dbias
    from keel.kernels import flash_bwd

    dout = as_kernels_take_it(dout)
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    q, scoring, factor = _positive_scale(q, scoring)
    deterministic |= torch.are_deterministic_algorithms_enabled()
    by_hopper = _by_hopper(dout, q, k, v, scoring, backend)
    dq32, dbias = None, None
    if want_dbias:
        assert bias is not None
        dbias = torch.zeros(bias.shape, dtype=torch.float32, device=q.device)
    if by_hopper:
        from keel.kernels import hopper_bwd_launch

        apart = hopper_bwd_launch.dq_apart(
            *(attn_mask, q, v, k.shape[1], scoring),
            deterministic=deterministic,
            sm_margin=sm_margin,
            outs_match=dtype == q.dtype,
        )
        if not apart:
            dq32 = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse2, delta = flash_bwd.row_terms(
        out, dout, lse, dlse, dq32=dq32, next_is_early=by_hopper, steps=steps
    )
    given = (dout, q, k, v, lse2, delta, attn_mask, scoring)
    if by_hopper:
        hopper_bwd_launch.backward(
            *given,
            dq=dq,
            dk=dk,
            dv=dv,
            dq32=dq32,
            dbias=dbias,
            apart=apart,
            deterministic=deterministic,
            sm_margin=sm_margin,
            steps=steps,
        )
    else:
        flash_bwd.backward(
            *given,
            dq=dq,
            dk=dk,
            dv=dv,
            dbias=dbias,
            deterministic=deterministic,
            sm_margin=sm_margin,
            steps=steps,
        )
    if factor != 1.0:
        dq.mul_(factor)
    if sink is not None:
        dsink = _sink_gradient(sink, lse, delta.T)
    return dq, dk, dv, dsink, dbias


def as_kernels_take_it(dout: torch.Tensor) -> torch.Tensor:
    """Rows of numbers that lie in memory, each in its own place: sums send expanded ones."""
    return dout if dout.stride(-1) == 1 and 0 not in dout.stride() else dout.contiguous()


def _by_hopper(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scoring: Scoring,
    backend: str,
) -> bool:
    """Whether the Hopper backward is wanted and can serve; else the portable one does."""
    if backend not in ("auto", "hopper"):
        return False
    from keel.kernels import hopper_bwd_launch

    return hopper_bwd_launch.backward_problem(dout, q, k, v, scoring) is None


torch.library.impl("keel::attn_bwd", "CompositeExplicitAutograd", attn_bwd)


def _sink_gradient(sink: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The sink's probability has no value: its logit only ever loses delta."""
    empty = lse == -torch.inf
    prob = torch.where(empty, 0.0, torch.exp(sink.to(lse.dtype) - lse))
    return -(prob * delta).sum(0).to(sink.dtype)


@torch.library.register_fake("keel::attn_bwd")
def _attn_bwd_fake(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: list[torch.Tensor],
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    *args: Any,
) -> tuple[torch.Tensor, ...]:
    want_dbias = args[4]
    grads = (x.new_empty(x.shape) for x in (q, k, v))
    dsink = lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    dbias = lse.new_empty(0)
    if want_dbias and bias is not None:
        dbias = bias.new_empty(bias.shape)
    return *grads, dsink, dbias


_NUM_FWD_INPUTS = 14


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, mask, sink, bias, slopes, offset, *numbers = inputs
    out, lse, max_logits = output
    ctx.save_for_backward(q, k, v, out, lse, sink, bias, slopes, offset, *mask)
    ctx.numbers = numbers
    ctx.want_dbias = bias is not None and bias.requires_grad
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(max_logits)


def _backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: None
) -> tuple[Any, ...]:
    q, k, v, out, lse, sink, bias, slopes, offset, *mask = ctx.saved_tensors
    scale, softcap, _want_max, deterministic, sm_margin, backend = ctx.numbers
    if dout is None and dlse is None:
        return (None, None, None, [None] * len(mask)) + (None,) * (_NUM_FWD_INPUTS - 4)
    if dout is None:
        dout = torch.zeros_like(out)
    # A graph of the gradients (create_graph) must meet the operator, which refuses it.
    direct = not torch.is_grad_enabled() and runs_plainly(dout, q)
    dq, dk, dv, dsink, dbias = (attn_bwd if direct else torch.ops.keel.attn_bwd)(
        *(dout, dlse, q, k, v, out, lse, mask, sink, bias, slopes, offset, scale, softcap),
        *(ctx.want_dbias, deterministic, sm_margin, backend),
    )
    dsink = None if sink is None else dsink
    dbias = dbias if ctx.want_dbias else None
    return (dq, dk, dv, [None] * len(mask), dsink, dbias) + (None,) * (_NUM_FWD_INPUTS - 6)


torch.library.register_autograd("keel::attn_fwd", _backward, setup_context=_setup_context)


def _second_backward(ctx: Any, *grads: torch.Tensor) -> None:
    raise NotImplementedError(
        "attention has no second derivatives on this backend: use backend='reference'"
    )


torch.library.register_autograd("keel::attn_bwd", _second_backward)


def _area(mask: list[torch.Tensor], q: torch.Tensor, k: torch.Tensor) -> int:
    return mask_of_tensors(mask, q.shape[0], k.shape[0]).area()


@register_flop_formula(torch.ops.keel.attn_fwd, get_raw=True)
def _forward_flops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: list[torch.Tensor],
    *args: Any,
    **_: Any,
) -> int:
    """4 * area * hq * d when d == dv."""
    return 2 * _area(mask, q, k) * q.shape[1] * (q.shape[2] + v.shape[2])


@register_flop_formula(torch.ops.keel.attn_bwd, get_raw=True)
def _backward_flops(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: list[torch.Tensor],
    *args: Any,
    **_: Any,
) -> int:
    """2.5 times the forward when d == dv: three products over d, two over dv."""
    return 2 * _area(mask, q, k) * q.shape[1] * (3 * q.shape[2] + 2 * v.shape[2])


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: list[torch.Tensor],
    scoring: Scoring,
    *,
    want_max: bool,
    max_logits_out: torch.Tensor | None = None,
    deterministic: bool,
    sm_margin: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(out, lse, max_logits or None), differentiable in q, k, v, sink and bias, by the operators.

    `max_logits_out` is raised in place and returned as max_logits.
    """
    want_max = want_max or max_logits_out is not None
    if backend == "reference":
        attn_mask: AttnMask = mask_of_tensors(mask, q.shape[0], k.shape[0])
        with torch.autocast(q.device.type, enabled=False):
            out, lse, top = reference.attention(q, k, v, attn_mask, scoring)
    else:
        out, lse, top = torch.ops.keel.attn_fwd(
            *(q, k, v, mask),
            *(scoring.sink, scoring.bias, scoring.alibi_slopes, scoring.alibi_offset),
            *(scoring.scale, scoring.softcap, want_max, deterministic, sm_margin, backend),
        )
    if max_logits_out is not None:
        top = max_logits_out.copy_(torch.maximum(max_logits_out, top))
    return out, lse, top if want_max else None


def accumulate_(
    out: torch.Tensor,
    lse: torch.Tensor,
    max_logits: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: list[torch.Tensor],
    scoring: Scoring,
    *,
    sm_margin: int,
    backend: str,
) -> None:
    """Merges attention over more keys into a running (out, lse, max_logits), in the kernel.

    out (tq, hq, dv) and lse (tq, hq) are fp32 (fp64 for fp64 inputs) and start at 0 and -inf.
    Not differentiable: stages of a distributed call keep their own books.
    """
    torch.ops.keel.attn_accumulate_(
        *(out, lse, max_logits, q, k, v, mask),
        *(scoring.sink, scoring.bias, scoring.alibi_slopes, scoring.alibi_offset),
        *(scoring.scale, scoring.softcap, sm_margin, backend),
    )


@_in_its_own_precision
@torch.no_grad()
def partial_gradients(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: AttnMask,
    scoring: Scoring,
    *,
    deterministic: bool,
    sm_margin: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dq, dk, dv, dsink) of what these keys add to a result over more keys, in lse's precision.

    out and lse are those of all keys; dsink, where scoring has a sink, is therefore that of all.
    """
    *grads, dsink, _ = gradients(
        *(dout, dlse, q, k, v, out, lse, mask, scoring),
        want_dbias=False,
        deterministic=deterministic,
        sm_margin=sm_margin,
        backend=backend,
        dtype=lse.dtype,
    )
    dq, dk, dv = (x.to(lse.dtype) for x in grads)
    return dq, dk, dv, dsink
