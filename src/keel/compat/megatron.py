"""The CUDA modules that Megatron-LM and Apex import, made of Keel's softmax; and `clip_qk`.

>>> names = install()
>>> import scaled_softmax_cuda
>>> scaled_softmax_cuda.forward(torch.zeros(1, 1, 1, 4), 1.0).tolist()
[[[[0.25, 0.25, 0.25, 0.25]]]]
>>> uninstall()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from keel.ops import choose_backend
from keel.optim import LayerSpec, QKClip
from keel.optim.clip_models import recognise
from keel.optim.clip_table import Gqa
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


def clip_qk(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    log_max_only: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
    gqa: Gqa = "group",
) -> torch.Tensor:
    """QK-Clip of a Megatron model, after `optimizer.step()`, by its config's flags.

    Wherever a module has a `core_attention` with `current_max_attn_logits`, its linear_qkv (or the
    up-projections of multi-latent attention) is clipped by config.qk_clip_threshold and
    qk_clip_alpha: weight, bias and fp32 main_param. One all-reduce for all layers, no host sync.

    Args:
        model: model chunks, wrapped or not.
        log_max_only: measure, and leave the weights alone.
        group: ranks that saw other tokens of the step; None: Megatron's data and context parallel
            group where Megatron is in use, else the default group.
        gqa: "group" is Megatron's rule; "q_only" and "compensated" clip each head by itself.

    Returns:
        The largest logit of this rank's layers, a tensor of no dims.

    Raises:
        ValueError: "qk_clip option needs to be enabled", "current_max_attn_logits is None", and for
            attention that cannot be clipped, with the module's name.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    kept = vars(chunks[0]).setdefault("_keel_qk_clip", _Kept())
    if kept.key != (key := (len(chunks), log_max_only, gqa, group)):
        kept.key, kept.clip = key, _make_clip(chunks, log_max_only, gqa, group)
    clip = kept.clip
    assert clip is not None
    for spec in clip.layers:
        if spec.source.current_max_attn_logits is None:
            raise ValueError(f"current_max_attn_logits is None in {spec.name}: it did not run")
    metrics = clip.step(apply=not log_max_only)
    assert metrics is not None
    for spec in clip.layers:
        if not hasattr(spec.source, "reset_max_logits"):
            spec.source.current_max_attn_logits = None
    return metrics.max_logits.max()


class _Kept:
    """A model's clip from one call to the next. Copies and pickles of the model do without."""

    def __init__(self) -> None:
        self.key: Any = None
        self.clip: QKClip | None = None

    def __reduce__(self) -> Any:
        return _Kept, ()


def _make_clip(chunks: list[torch.nn.Module], log_max_only: bool, gqa: Gqa, group: Any) -> QKClip:
    layers: list[LayerSpec] = []
    numbers = set()
    for index, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            core = getattr(module, "core_attention", None)
            if not hasattr(core, "current_max_attn_logits"):
                continue
            name = name if len(chunks) == 1 else f"chunk {index}, {name}"
            config = getattr(core, "config", None) or getattr(module, "config", None)
            if not log_max_only and not getattr(config, "qk_clip", False):
                raise ValueError(f"qk_clip option needs to be enabled, but is not in {name}")
            spec = recognise(name, module)
            if spec is None:
                raise ValueError(
                    f"{name} ({type(module).__name__}) has projections that are not known: "
                    "expected linear_qkv, or linear_q_up_proj (linear_q_proj) and linear_kv_up_proj"
                )
            layers.append(spec)
            numbers.add((config.qk_clip_threshold, config.qk_clip_alpha))  # type: ignore[union-attr]
    if not layers:
        raise ValueError("no attention of the model keeps current_max_attn_logits")
    if len(numbers) > 1:
        raise ValueError(f"layers differ in (qk_clip_threshold, qk_clip_alpha): {sorted(numbers)}")
    ((tau, alpha),) = numbers
    group = _data_parallel_group() if group is None else group
    return QKClip(layers, tau=tau, alpha=alpha, gqa=gqa, group=group)


def _data_parallel_group() -> Any:
    """Megatron's, with context parallelism; None where Megatron is not in use."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return state.get_data_parallel_group(with_context_parallel=True)
