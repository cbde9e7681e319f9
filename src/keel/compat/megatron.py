"""The CUDA modules that Megatron-LM and Apex import, made of Keel's softmax; and `clip_qk`.

>>> names = install()
>>> import scaled_softmax_cuda
>>> scaled_softmax_cuda.forward(torch.zeros(1, 1, 1, 4), 1.0).tolist()
[[[[0.25, 0.25, 0.25, 0.25]]]]
>>> uninstall()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from keel.ops import choose_backend
from keel.softmax import FusedScaleMaskSoftmax, scaled_masked_softmax
from keel.softmax.ops import softmax_gradient

if TYPE_CHECKING:  # DTensors take a second to import: those who want a softmax do without
    from keel.optim import LayerSpec, QKClip
    from keel.optim.clip_table import Gqa

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
        log_max_only: measure, and leave the weights alone; any core attention will do.
        group: ranks that saw other tokens of the step; None: Megatron's data and context parallel
            group where Megatron is in use, else the default group.
        gqa: "group" is Megatron's rule; "q_only" and "compensated" clip each head by itself.

    Returns:
        The largest logit of this rank's layers, a tensor of no dims.

    Raises:
        ValueError: "qk_clip option needs to be enabled", "current_max_attn_logits is None", and for
            attention that cannot be clipped, with the module's name.
    """
    from keel.optim.logit_stats import group_of, reduce_packed

    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    found = list(_core_attention(chunks))
    if not found:
        raise ValueError("no attention of the model keeps current_max_attn_logits")
    for name, module, core in found:
        if not log_max_only and not getattr(_config(module, core), "qk_clip", False):
            raise ValueError(f"qk_clip option needs to be enabled, but is not in {name}")
        if core.current_max_attn_logits is None:
            raise ValueError(f"current_max_attn_logits is None in {name}: it did not run")
    group = _data_parallel_group() if group is None else group
    if log_max_only:
        tops = [core.current_max_attn_logits for _, _, core in found]
        top = reduce_packed(tops, group_of(group)).max()
        torch._foreach_copy_(tops, [torch.full_like(x, -torch.inf) for x in tops])
    else:
        kept = vars(chunks[0]).setdefault("_keel_qk_clip", _Kept())
        if kept.key != (key := ([name for name, _, _ in found], gqa, group)):
            kept.key, kept.clip = key, _make_clip(found, gqa, group)
        metrics = kept.clip.step()
        top = metrics.max_logits.max()
    for _, _, core in found:
        if not hasattr(core, "reset_max_logits"):
            core.current_max_attn_logits = None
    return top


def _core_attention(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """(name, module, its core attention) of all that keep max logits."""
    for index, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            core = getattr(module, "core_attention", None)
            if hasattr(core, "current_max_attn_logits"):
                yield name if len(chunks) == 1 else f"chunk {index}, {name}", module, core


class _Kept:
    """A model's clip from one call to the next. Copies and pickles of the model do without."""

    def __init__(self) -> None:
        self.key: Any = None
        self.clip: QKClip | None = None

    def __reduce__(self) -> Any:
        return _Kept, ()


def _make_clip(found: list[tuple[str, torch.nn.Module, Any]], gqa: Gqa, group: Any) -> QKClip:
    from keel.optim import QKClip
    from keel.optim.clip_models import recognise

    layers: list[LayerSpec] = []
    for name, module, _ in found:
        spec = recognise(name, module)
        if spec is None:
            raise ValueError(
                f"{name} ({type(module).__name__}) has projections that are not known: expected "
                "linear_qkv, or linear_q_up_proj (linear_q_proj) and linear_kv_up_proj"
            )
        layers.append(spec)
    configs = [_config(module, core) for _, module, core in found]
    numbers = {(x.qk_clip_threshold, x.qk_clip_alpha) for x in configs}
    if len(numbers) > 1:
        raise ValueError(f"layers differ in (qk_clip_threshold, qk_clip_alpha): {sorted(numbers)}")
    ((tau, alpha),) = numbers
    return QKClip(layers, tau=tau, alpha=alpha, gqa=gqa, group=group)


def _config(module: Any, core: Any) -> Any:
    return core.config if hasattr(core, "config") else module.config


def _data_parallel_group() -> Any:
    """Megatron's, with context parallelism; None where Megatron is not in use."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return state.get_data_parallel_group(with_context_parallel=True)
