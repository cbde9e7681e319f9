"""Attention without torch's dispatcher, for calls that nobody traces.

Small problems take less time on a GPU than the host needs to check arguments, choose a backend and
dispatch an operator. All of that follows from the mask, the options and the layout of the tensors.
So a call is worked out once, as a `DirectCall`, and found again: by one lookup of all these, and
sooner where there is nothing but q, k and v, whose layouts torch itself compares in one go.

Shapes: q (tq, hq, d), k (tk, hk, d), v (tk, hk, dv), out (tq, hq, dv), lse (tq, hq).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from keel._versions import (
    launch_stream,
    layout_check,
    nobody_looks,
    plain_apply,
    quick_empty,
    runs_plainly,
)
from keel.bounded import make_room
from keel.masks import AttnMask
from keel.masks.inputs import tensors_of_mask
from keel.meta import Scoring
from keel.ops import as_kernels_take_it, attn_fwd, forward_kernel, gradients

Optional = torch.Tensor | None

MAX_BACKWARDS = 8

MAX_LAYOUTS = 8
"""Layouts of q, k and v that are looked at in turn for one mask and one set of options."""


class KnownCalls(dict[Hashable, "DirectCall"]):
    """Calls by `call_key`, bounded like the recipes that they hold on to."""

    def __init__(self) -> None:
        self.by_mask: dict[Hashable, list[tuple[Callable[..., bool], DirectCall]]] = {}
        """Those of q, k and v alone by mask and options, with what recognises such tensors. Lists
        are replaced, never written to: another thread may be reading."""

    def clear(self) -> None:
        super().clear()
        self.by_mask.clear()


_known = KnownCalls()


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


def recognise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask,
    options: tuple[Any, ...],
    call: DirectCall,
) -> None:
    """Lets `repeated` take tensors that look like these to a call that is known."""
    check = None if q is k or q is v or k is v else layout_check(q, k, v)
    if check is None:
        return
    key, by_mask = (mask.digest, options), _known.by_mask
    others = by_mask.get(key, [])[: MAX_LAYOUTS - 1]
    if not others:
        from keel.kernels import launch

        make_room(by_mask, launch.MAX_RECIPES)
    by_mask[key] = [(check, call), *others]


def repeated(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttnMask,
    options: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor, Optional] | None:
    """(out, lse, max_logits or None) of a call that is recognised; None of any other."""
    if not nobody_looks():
        return None
    try:
        similar = _known.by_mask.get((mask.digest, options))
    except TypeError:  # an option that cannot be hashed
        return None
    if similar is not None:
        for check, call in similar:
            if check(q, k, v):
                at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
                if (at_q | at_k | at_v) % 16:
                    return None
                return call(q, k, v, addresses={"Q": at_q, "K": at_k, "V": at_v})
    return None


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
        self._out_strides = (q.shape[1] * v.shape[2], v.shape[2], 1)
        self._lse_shape, self._lse_strides = self.out_shape[:2], (q.shape[1], 1)
        self._empty = quick_empty(q.device.type)
        self.device_index = q.device.index if q.device.type == "cuda" else None
        has_kernel = backend in ("hopper", "triton") and self.scale > 0 and mask.tk > 0
        self.kernel: Any = None
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._new_maxima: Callable[..., torch.Tensor] = functools.partial(_lowest, wide)
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
        *others: Optional,
        running: Optional = None,
        addresses: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        """(out, lse, max_logits or None); the last is `running`, raised in place, if given.

        others: sink, bias, slopes and offset, or nothing.
        addresses: of q, k and v, in a dictionary that becomes the launch's own, if they are known.
        """
        stream = launch_stream(self.device_index)
        max_logits = running
        if running is None and self.want_max:
            max_logits = self._new_maxima(self.out_shape[1], self.device, stream)
        if torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (others and any(x is not None and x.requires_grad for x in others))
        ):
            out, lse = _apply((self, stream, max_logits, addresses), q, k, v, *others)
        else:
            out, lse = self.forward(stream, max_logits, addresses, q, k, v, *others)
        if running is not None and not running.is_inference():  # those have no version
            torch.autograd.graph.increment_version(running)
        return out, lse, max_logits

    def forward(
        self,
        stream: int | None,
        max_logits: Optional,
        addresses: dict[str, Any] | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: Optional = None,
        bias: Optional = None,
        slopes: Optional = None,
        offset: Optional = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse); max_logits are raised in place. stream: from `launch_stream`.

        addresses: as `__call__` takes them.
        """
        if self.kernel is None:
            out, lse, _ = attn_fwd(
                *(q, k, v, tensors_of_mask(self.mask), sink, bias, slopes, offset),
                *(self.scale, self.softcap, self.want_max, self.deterministic),
                *(self.sm_margin, self.backend),
                max_logits=max_logits,
            )
            return out, lse
        device = self.device
        if stream is None:  # perhaps another device is current
            out = torch.empty(self.out_shape, dtype=self.dtype, device=device)
            lse = torch.empty(self._lse_shape, dtype=torch.float32, device=device)
        else:
            out = self._empty(self.out_shape, self._out_strides, self.dtype)
            lse = self._empty(self._lse_shape, self._lse_strides, torch.float32)
        recipe = self._recipe
        if recipe is not None:
            counter = self.kernel.work_counter(self.sm_margin, device, stream)
            more: dict[str, Optional] = {}
            if recipe.numbers_between:
                more = self.kernel.between_parts(recipe.numbers_between, device, stream)
            if addresses is not None and stream is not None:
                addresses["O"] = addresses["OUT"] = out.data_ptr()
                addresses["LSE"] = lse.data_ptr()
                if max_logits is not None:
                    addresses["MAX_LOGITS"] = max_logits.data_ptr()
                if counter is not None:
                    addresses["COUNTER"] = counter.data_ptr()
                for name, x in more.items():
                    addresses[name] = x.data_ptr()  # type: ignore[union-attr]
                if recipe.run_at(stream, addresses):
                    return out, lse
            tensors = {
                **{"Q": q, "K": k, "V": v, "O": out, "OUT": out, "LSE": lse},
                **{"MAX_LOGITS": max_logits, "SINK": sink, "BIAS": bias, "SLOPES": slopes},
                **{"OFFSET": offset, "COUNTER": counter, **more},
            }
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


def _lowest(dtype: torch.dtype, num: int, device: torch.device, _stream: Any) -> torch.Tensor:
    return torch.full((num,), -torch.inf, dtype=dtype, device=device)


class _Direct(torch.autograd.Function):
    """keel::attn_fwd and keel::attn_bwd by function calls.

    It may also do what operators with autograd formulas may not: write to an input, the maxima.
    Those come with all else that has no gradient in one object, and tensors that are not there do
    not come at all: autograd looks at each input, and keeps each that is saved.
    """

    @staticmethod
    def forward(
        ctx: Any, task: tuple[DirectCall, Any, Any, Any], *tensors: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        call, stream, max_logits, addresses = task
        out, lse = call.forward(stream, max_logits, addresses, *tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Optional) -> tuple[Any, ...]:
        dout, dlse = grads
        num_inputs = len(ctx.needs_input_grad)
        if dout is None and dlse is None:
            return (None,) * num_inputs
        call = ctx.call
        q, k, v, *others, out, lse = ctx.saved_tensors
        sink, bias, slopes, offset = others or (None,) * 4
        if dout is None:
            dout = torch.zeros_like(out)
        want_dbias = bias is not None and ctx.needs_input_grad[5]
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
        all_inputs = (
            *(None, dq, dk, dv, None if sink is None else dsink),
            *(dbias if want_dbias else None, None, None),
        )
        return all_inputs[:num_inputs]


_apply = plain_apply(_Direct)
