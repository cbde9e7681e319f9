"""A module's running maximum of logits, for QK-Clip."""

from __future__ import annotations

from typing import Any

import torch


class KeepsMaxLogits:
    """For attention modules: (heads,) raised by each forward in training, until it is reset.

    A plain attribute, neither buffer nor parameter: casts of the module and checkpoints leave it
    alone. Computing a layer again for its backward raises it to what it is already.
    """

    training: bool
    current_max_attn_logits: torch.Tensor | None = None
    """(heads,) fp32 (fp64 for fp64 inputs): each head's largest logit since the last reset, in
    training mode; None before the first."""

    def reset_max_logits(self) -> None:
        """Starts the running maximum again, in place: a captured graph goes on writing to it."""
        if self.current_max_attn_logits is not None:
            self.current_max_attn_logits.fill_(-torch.inf)

    def running_maximum(self, num_heads: int, like: torch.Tensor) -> torch.Tensor | None:
        """The tensor to raise, made or moved to suit a call; None outside of training."""
        return running_maximum(self, num_heads, like)


def running_maximum(module: Any, num_heads: int, like: torch.Tensor) -> torch.Tensor | None:
    """`module.current_max_attn_logits`, of any module, made or moved to suit a call.

    None outside of training.
    """
    if not module.training:
        return None
    running: torch.Tensor | None = getattr(module, "current_max_attn_logits", None)
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if running is not None and running.dtype == dtype and running.device == like.device:
        return running
    with torch.inference_mode(False):  # made in inference mode, it serves training too
        if running is None:
            running = torch.full((num_heads,), -torch.inf, dtype=dtype, device=like.device)
        else:
            running = running.to(like.device, dtype)
    module.current_max_attn_logits = running
    return running
