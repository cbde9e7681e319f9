"""Max logits on their way to the clip: from q and k where attention runs elsewhere, and packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from keel._versions import flat_group
from keel.checks import check_max_logits_out, check_qkv
from keel.distributed.maxima import start_maximum
from keel.kernels import blocked
from keel.masks import AttnMask
from keel.ops import choose_backend

Group = dist.ProcessGroup | DeviceMesh | Literal["local"] | None


@torch.no_grad()
def max_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: AttnMask,
    *,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Each head's largest softmax_scale * q·k over the pairs of a mask: (hq,) fp32, exact.

    For models whose attention hides its logits: half the products of a forward, so rather every
    few steps (`QKClip(every=...)`, `QKClip.due`) than always.

    Args:
        q: (tq, hq, d), as the softmax would see it, rotated; or (b, tq, hq, d), samples that all
            have the mask.
        k: (tk, hk, d) or (b, tk, hk, d).
        mask: an `AttnMask`, such as `masks.causal(tq)` or `masks.documents(cu_seqlens)`.
        softmax_scale: d ** -0.5 if None.
        out: (hq,) fp32 (fp64 for fp64 inputs) running maximum, raised in place and returned.
        backend: "auto", "triton" or "blocked".

    >>> from keel import masks
    >>> q, k = torch.randn(2, 6, 4, 8)
    >>> top = max_logits(q, k, masks.full(6))
    >>> bool(torch.allclose(top, torch.einsum("ihd,jhd->hij", q, k).amax((1, 2)) / 8**0.5))
    True
    """
    samples = 1
    if q.ndim == 4 and k.ndim == 4:  # samples become heads: query head n of b meets key head n / g
        samples = q.shape[0]
        q, k = (x.transpose(0, 1).flatten(1, 2) for x in (q, k))
    check_qkv(q, k, k)
    if not isinstance(mask, AttnMask):
        raise TypeError(f"mask must be an AttnMask, such as masks.causal(n), got {type(mask)}")
    if mask.shape != (q.shape[0], k.shape[0]):
        raise ValueError(f"the mask is {mask.shape}, but there are {q.shape[0]} queries and "
                         f"{k.shape[0]} keys")  # fmt: skip
    scale = q.shape[2] ** -0.5 if softmax_scale is None else float(softmax_scale)
    chosen = choose_backend(backend, q.device, q.dtype)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    top = torch.full((q.shape[1],), -torch.inf, dtype=wide, device=q.device)
    if out is not None:
        check_max_logits_out(out, q if samples == 1 else q[:, : q.shape[1] // samples])
        top = out if samples == 1 else top
    if chosen == "triton":
        from keel.kernels import qk_max

        q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
        if scale <= 0:  # maxima are taken before scaling: the sign moves into q
            q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
        qk_max.max_logits(q, k, mask, scale, out=top)
    elif chosen == "blocked":
        blocked.max_logits(q, k, mask, scale, out=top)
    else:
        raise ValueError(f"backend {chosen!r} has no max_logits: use 'auto', 'triton' or 'blocked'")
    if samples == 1:
        return top
    top = top.unflatten(0, (samples, -1)).amax(0)
    return top if out is None else torch.maximum(out, top, out=out)


def group_of(group: Group) -> dist.ProcessGroup | None:
    """The process group to reduce over; None where there is nobody to ask."""
    if isinstance(group, str):
        if group != "local":
            raise ValueError(f"group must be a process group, a mesh, None or 'local': {group!r}")
        return None
    if isinstance(group, DeviceMesh):
        found: dist.ProcessGroup = flat_group(group)
        return found
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return group


def reduce_packed(tops: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> torch.Tensor:
    """The maxima of many tensors over all ranks of a group, end to end: one all-reduce."""
    packed = torch.cat(list(tops))
    if group is None or group.size() == 1:
        return packed
    return start_maximum(packed, group).wait()
