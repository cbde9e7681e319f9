"""Attention without torch's dispatcher, for calls that nobody traces.

Small problems take less time on a GPU than the host needs to check arguments, choose a backend and
dispatch an operator. All of that follows from the mask, the options and the layout of the tensors.
So a call is worked out once, as a `DirectCall`, and found again by one lookup.

Shapes: q (tq, hq, d), k (tk, hk, d), v (tk, hk, dv), out (tq, hq, dv), lse (tq, hq).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from keel._versions import apply_plainly, launch_stream, runs_plainly
from keel.bounded import make_room
from keel.masks import AttnMask
from keel.masks.inputs import tensors_of_mask
from keel.meta import Scoring
from keel.ops import as_kernels_take_it, attn_fwd, forward_kernel, gradients

Optional = torch.Tensor | None

MAX_BACKWARDS = 8

_known: dict[Hashable, DirectCall] = {}
"""Bounded like the recipes that its calls hold on to."""


def call_key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask,
    others: tuple[Optional, ...],
    options: tuple[Any, ...],
) -> Hashable:
    """All that checks and choices look at; None where a pointer is not aligned.

    others: the further tensors of a call, each with its own place.
    """
    address = q.data_ptr() | k.data_ptr() | v.data_ptr()
    layouts: tuple[Hashable, ...] = ()
    for x in others:
        if x is None:
            layouts += (None,)
        else:
            layouts += (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
            address |= x.data_ptr()
    if address % 16:
        return None
    return (
        *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device, mask.digest, options, layouts),
    )


def known_call(key: Hashable) -> DirectCall | None:
    """The call that was remembered for this key."""
    try:
        return _known.get(key)
    except TypeError:  # an option that cannot be hashed is no good: checks will say so
        return None


def remember(key: Hashable, call: DirectCall) -> None:
    """For calls with this key, from now on; calls that launch no kernel are not worth it."""
    if key is None or call.kernel is None:
        return
    from keel.kernels import launch

    make_room(_known, launch.MAX_RECIPES)
    _known[key] = call


class DirectCall:
    """An attention call with everything known but where the tensors are."""

    def __init__(
        self,
        q: torch.Tensor,
        v: torch.Tensor,
        mask: AttnMask,
        scoring: Scoring,
        *,
        want_max: bool,
        deterministic: bool,
        sm_margin: int,
        backend: str,
        backward_backend: str,
    ) -> None:
        """backend: settled, of the forward; "auto" may have another one for the backward."""
        self.mask, self.scale, self.softcap = mask, scoring.scale, scoring.softcap
        self.want_max, self.deterministic = want_max, deterministic
        self.sm_margin, self.backend = sm_margin, backend
        self.backward_backend = backward_backend
        self.out_shape = (q.shape[0], q.shape[1], v.shape[2])
        self.dtype, self.device = q.dtype, q.device
        self.device_index = q.device.index if q.device.type == "cuda" else None
        has_kernel = backend in ("hopper", "triton") and self.scale > 0 and mask.tk > 0
        self.kernel: Any = None
        if has_kernel:
            from keel.kernels.fresh_maxima import fresh_maxima
            from keel.kernels.steps import Steps

            self.kernel, self._new_maxima = forward_kernel(backend), fresh_maxima
            self._new_steps = Steps
        self._recipe: Any = None
        self._backwards: dict[Hashable, Any] = {}
        """Launches of backwards by the layout of their tensors, few: autograd's own habits."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: Optional,
        bias: Optional,
        slopes: Optional,
        offset: Optional,
        running: Optional,
    ) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        """(out, lse, max_logits or None); the last is `running`, raised in place, if given."""
        stream = launch_stream(self.device_index)
        max_logits = running
        if running is None and self.want_max:
            max_logits = self._fresh_maxima(self.out_shape[1], stream)
        tensors = (q, k, v, sink, bias, slopes, offset)
        if torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (sink is not None and sink.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            out, lse = apply_plainly(_Direct, self, stream, max_logits, *tensors)
        else:
            out, lse = self.forward(stream, max_logits, *tensors)
        if running is not None and not running.is_inference():  # those have no version
            torch.autograd.graph.increment_version(running)
        return out, lse, max_logits

    def forward(
        self,
        stream: int | None,
        max_logits: Optional,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: Optional,
        bias: Optional,
        slopes: Optional,
        offset: Optional,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse); max_logits are raised in place. stream: from `launch_stream`."""
        if self.kernel is None:
            out, lse, _ = attn_fwd(
                *(q, k, v, tensors_of_mask(self.mask), sink, bias, slopes, offset),
                *(self.scale, self.softcap, self.want_max, self.deterministic),
                *(self.sm_margin, self.backend),
                max_logits=max_logits,
            )
            return out, lse
        device = self.device
        tq, hq, dv = self.out_shape
        out = torch.empty(tq, hq, dv, dtype=self.dtype, device=device)
        lse = torch.empty(tq, hq, dtype=torch.float32, device=device)
        recipe = self._recipe
        if recipe is not None:
            tensors = {
                "Q": q,
                "K": k,
                "V": v,
                "O": out,
                "OUT": out,
                "LSE": lse,
                "MAX_LOGITS": max_logits,
                "SINK": sink,
                "BIAS": bias,
                "SLOPES": slopes,
                "OFFSET": offset,
                "COUNTER": self.kernel.work_counter(self.sm_margin, device, stream),
            }
            if recipe.numbers_between:
                tensors |= self.kernel.between_parts(recipe.numbers_between, device, stream)
            if stream is None:
                recipe.run(tensors)
            else:
                recipe.run_on(stream, tensors)
            return out, lse
        self._recipe = self.kernel.forward(
            *(q, k, v, self.mask, self._scoring(sink, bias, slopes, offset)),
            out=out,
            lse=lse,
            max_logits=max_logits,
            sm_margin=self.sm_margin,
        )
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        dlse: Optional,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        sink: Optional,
        bias: Optional,
        slopes: Optional,
        offset: Optional,
        want_dbias: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Optional, Optional]:
        """(dq, dk, dv, dsink, dbias) in the dtypes of what they belong to."""
        key, steps = None, None
        if sink is bias is slopes is offset is None and self.kernel:
            dout = as_kernels_take_it(dout)
            # all of them: hooks of saved tensors may have changed their layouts
            tensors = (dout, q, k, v, out, lse) if dlse is None else (dout, q, k, v, out, lse, dlse)
            key = (
                torch.are_deterministic_algorithms_enabled(),
                *[(x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors],
            )
            steps = self._backwards.get(key)
            if steps is not None:
                stream = launch_stream(self.device_index)
                return *steps.repeat(stream, dout, dlse, q, k, v, out, lse), None, None
            steps = self._new_steps()
        scoring = self._scoring(sink, bias, slopes, offset)
        dq, dk, dv, dsink, dbias = gradients(
            *(dout, dlse, q, k, v, out, lse, self.mask, scoring),
            want_dbias=want_dbias,
            deterministic=self.deterministic,
            sm_margin=self.sm_margin,
            backend=self.backward_backend,
            dtype=self.dtype,
            steps=steps,
        )
        if steps is not None and steps.recipes and len(self._backwards) < MAX_BACKWARDS:
            self._backwards[key] = steps
        if dq.dtype != self.dtype:
            dq, dk, dv = (x.to(self.dtype) for x in (dq, dk, dv))
        if dbias is not None and bias is not None:
            dbias = dbias.to(bias.dtype)
        return dq, dk, dv, dsink, dbias

    def _scoring(
        self, sink: Optional, bias: Optional, slopes: Optional, offset: Optional
    ) -> Scoring:
        return Scoring(
            scale=self.scale,
            softcap=self.softcap,
            sink=sink,
            bias=bias,
            alibi_slopes=slopes,
            alibi_offset=offset,
        )

    def _fresh_maxima(self, num_heads: int, stream: int | None) -> torch.Tensor:
        if self.kernel is not None:
            return self._new_maxima(num_heads, self.device, stream)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return torch.full((num_heads,), -torch.inf, dtype=wide, device=self.device)


class _Direct(torch.autograd.Function):
    """keel::attn_fwd and keel::attn_bwd by function calls.

    It may also do what operators with autograd formulas may not: write to an input, the maxima.
    """

    @staticmethod
    def forward(
        ctx: Any, call: DirectCall, stream: int | None, max_logits: Optional, *tensors: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = call.forward(stream, max_logits, *tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Optional) -> tuple[Any, ...]:
        dout, dlse = grads
        if dout is None and dlse is None:
            return (None,) * 10
        call = ctx.call
        q, k, v, sink, bias, slopes, offset, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        want_dbias = ctx.needs_input_grad[7]
        if not torch.is_grad_enabled() and runs_plainly(dout, q):
            dq, dk, dv, dsink, dbias = call.backward(
                *(dout, dlse, q, k, v, out, lse, sink, bias, slopes, offset), want_dbias
            )
        else:  # a graph of the gradients (create_graph) must meet the operator, which refuses it
            dq, dk, dv, dsink, dbias = torch.ops.keel.attn_bwd(
                *(dout, dlse, q, k, v, out, lse, tensors_of_mask(call.mask)),
                *(sink, bias, slopes, offset, call.scale, call.softcap),
                *(want_dbias, call.deterministic, call.sm_margin, call.backward_backend),
            )
        return (
            *(None, None, None, dq, dk, dv, None if sink is None else dsink),
            *(dbias if want_dbias else None, None, None),
        )
