"""The CUDA modules that Megatron-LM and Apex import, made of Keel's softmax.

>>> names = install()
>>> import scaled_softmax_cuda
>>> scaled_softmax_cuda.forward(torch.zeros(1, 1, 1, 4), 1.0).tolist()
[[[[0.25, 0.25, 0.25, 0.25]]]]
>>> uninstall()
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from keel.ops import choose_backend
from keel.softmax import FusedScaleMaskSoftmax, scaled_masked_softmax
from keel.softmax.ops import softmax_gradient

Scale = float | torch.Tensor

MODULES = (
    "scaled_upper_triang_masked_softmax_cuda",
    "scaled_masked_softmax_cuda",
    "scaled_softmax_cuda",
    "generic_scaled_masked_softmax_cuda",
)


def install(*, replace: bool = False) -> list[str]:
    """Registers the modules in sys.modules, so that an unmodified wrapper imports them.

    A module of that name that is already loaded, a real extension, stays unless `replace`. Returns
    the names that were registered. Scales may be numbers or 0-dim tensors; they are kept in fp32.
    Unlike the originals these take any shape, stride and dtype, and never write to their arguments.
    """
    registered = []
    for name in MODULES:
        if not replace and name in sys.modules and not hasattr(sys.modules[name], "__keel__"):
            continue
        sys.modules[name] = _module(name)
        registered.append(name)
    return registered


def uninstall() -> None:
    """Takes out what `install` registered."""
    for name in MODULES:
        if hasattr(sys.modules.get(name), "__keel__"):
            del sys.modules[name]


def _module(name: str) -> ModuleType:
    causal = name == "scaled_upper_triang_masked_softmax_cuda"
    forward: Callable[..., torch.Tensor]
    if causal:
        forward = _causal_forward
    elif name == "scaled_softmax_cuda":
        forward = _plain_forward
    else:
        forward = _masked_forward

    def backward(
        output_grads: torch.Tensor, softmax_results: torch.Tensor, scale: Scale
    ) -> torch.Tensor:
        """The gradient of the scores, a new tensor."""
        return _backward(output_grads, softmax_results, float(scale), causal)

    module = ModuleType(name, f"{name}, by Keel")
    members: dict[str, Any] = {"forward": forward, "backward": backward, "__keel__": True}
    if name == "scaled_masked_softmax_cuda":
        members["get_batch_per_block"] = FusedScaleMaskSoftmax.get_batch_per_block
    for member, value in members.items():
        setattr(module, member, value)
    return module


def _causal_forward(scores: torch.Tensor, scale: Scale) -> torch.Tensor:
    """(n, s, s) -> (n, s, s), row i sees columns 0..i."""
    if scores.ndim != 3 or scores.shape[1] != scores.shape[2]:
        raise ValueError(f"causal scores must be (n, s, s), got {tuple(scores.shape)}")
    with torch.no_grad():
        return scaled_masked_softmax(scores, scale=scale, causal=True)


def _masked_forward(scores: torch.Tensor, mask: torch.Tensor, scale: Scale) -> torch.Tensor:
    """(b, h, sq, sk) and a mask (b | 1, 1, sq, sk), nonzero hides -> (b, h, sq, sk)."""
    with torch.no_grad():
        return scaled_masked_softmax(scores, mask, scale=scale)


def _plain_forward(scores: torch.Tensor, scale: Scale) -> torch.Tensor:
    """(b, h, sq, sk) -> (b, h, sq, sk)."""
    with torch.no_grad():
        return scaled_masked_softmax(scores, scale=scale)


def _backward(dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    if dy.shape != y.shape:
        raise ValueError(
            f"gradients {tuple(dy.shape)} and probabilities {tuple(y.shape)} must have one shape"
        )
    backend = choose_backend("auto", y.device, y.dtype)
    return softmax_gradient(dy, y, scale=scale, causal=causal, backend=backend)
