"""MuonClip: Muon for a model's hidden matrices, AdamW for the rest, QK-Clip after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from keel.optim.clip_program import MasterOf
from keel.optim.clip_table import Gqa
from keel.optim.logit_stats import Group as Ranks
from keel.optim.muon import Muon
from keel.optim.qk_clip import ClipMetrics, QKClip, QkNorm

HEADS = ("head", "lm_head", "output", "output_layer", "embed_out", "unembed", "score", "classifier")
"""What models call the projection to their outputs."""
CLIP_STATE = "qk_clip"

Chooser = Callable[[str, torch.Tensor], bool]


class MuonClip(Muon):
    """Muon with QK-Clip for a whole model, in one object.

    Muon trains the matrices of hidden layers: parameters of two or more dims that are none of the
    following. AdamW trains all others: weights of `nn.Embedding`, tied ones included, and
    parameters with "embed" in their name; the output head, which is what the model's
    `get_output_embeddings()` gives, or a module called head, lm_head, output, output_layer,
    embed_out, unembed, score or classifier; convolutions; and all that is no matrix, as norms and
    biases are, without weight decay. Frozen parameters are left out. `use_muon` decides otherwise.

    Args:
        model: its attention is found by `QKClip.from_model`; shard it (FSDP2, tensor parallel)
            before.
        lr: of Muon; with the default `adjust_lr_fn`, AdamW's usual values serve both.
        tau: the largest logit that is left alone.
        weight_decay: of the matrices.
        aux_lr, aux_weight_decay: AdamW's; None: as for Muon. Vectors have no decay.
        use_muon: (name, parameter) -> whether Muon trains it, instead of the rule above.
        alpha, gqa, every, qk_norm, skip, master_of: as in QKClip and its `from_model`.
        clip_group: QKClip's `group`.
        muon: further options of Muon: momentum, nesterov, ns_coefficients, ns_dtype, num_heads, ...

    `clip` is the QKClip, `metrics` what its last step saw and did. `state_dict` holds the clip's
    state beside the optimizer's; a state without it, say of Muon, loads as well, and leaves the
    clip's as it is. (`torch.distributed.checkpoint.state_dict` keeps only the optimizer's part:
    save `clip.state_dict()` beside it.)

    >>> from keel import masks
    >>> from keel.nn import GPT, GPTConfig
    >>> model = GPT(GPTConfig(vocab_size=256, num_layers=2, hidden_size=32, num_heads=4))
    >>> optimizer = MuonClip(model, lr=1e-3, tau=0.01, ns_dtype=torch.float32)
    >>> model(torch.arange(16), masks.causal(16)).square().mean().backward()
    >>> optimizer.step()
    >>> [len(group["params"]) for group in optimizer.param_groups], int(optimizer.metrics.clipped)
    ([14, 2, 5], 8)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lr: float | torch.Tensor = 1e-3,
        *,
        tau: float = 100.0,
        weight_decay: float = 0.1,
        aux_lr: float | torch.Tensor | None = None,
        aux_weight_decay: float | None = None,
        use_muon: Chooser | None = None,
        alpha: float = 0.5,
        gqa: Gqa = "q_only",
        every: int = 1,
        qk_norm: QkNorm = "refuse",
        skip: Sequence[str] = (),
        master_of: MasterOf | None = None,
        clip_group: Ranks = None,
        adjust_lr_fn: str | None = "match_rms_adamw",
        process_group: dist.ProcessGroup | None = None,
        **muon: Any,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"MuonClip takes a model, got {type(model).__name__}; for lists of parameters take "
                "Muon, and attach a QKClip to it"
            )
        # Both can refuse the model, so they come before anything is hooked up.
        self.clip = QKClip.from_model(
            model,
            tau=tau,
            alpha=alpha,
            gqa=gqa,
            every=every,
            qk_norm=qk_norm,
            skip=skip,
            master_of=master_of,
            group=clip_group,
        )
        aux_decay = weight_decay if aux_weight_decay is None else aux_weight_decay
        groups = sort_parameters(
            model, use_muon, aux_lr=lr if aux_lr is None else aux_lr, aux_weight_decay=aux_decay
        )
        super().__init__(
            groups,
            lr,
            weight_decay,
            adjust_lr_fn=adjust_lr_fn,
            process_group=process_group,
            **muon,
        )
        self.clip.attach(self)

    @property
    def metrics(self) -> ClipMetrics | None:
        """Of the last step that clipped; None before the first."""
        return self.clip.metrics

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), CLIP_STATE: self.clip.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        clip = state_dict.get(CLIP_STATE)
        super().load_state_dict({k: v for k, v in state_dict.items() if k != CLIP_STATE})
        if clip is not None:
            self.clip.load_state_dict(clip)


def sort_parameters(
    model: torch.nn.Module,
    use_muon: Chooser | None = None,
    *,
    aux_lr: float | torch.Tensor,
    aux_weight_decay: float,
) -> list[dict[str, Any]]:
    """Groups for Muon by `MuonClip`'s rule: hidden matrices; other matrices; vectors.

    Parameters come with their names. Empty groups are left out.
    """
    outside = set() if use_muon is not None else {id(x) for x in _not_hidden(model)}
    hidden: list[tuple[str, torch.Tensor]] = []
    matrices: list[tuple[str, torch.Tensor]] = []
    vectors: list[tuple[str, torch.Tensor]] = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if use_muon is not None:
            chosen = use_muon(name, param)
            if not isinstance(chosen, bool):
                raise TypeError(f"use_muon must say True or False, got {chosen!r} for {name!r}")
            if chosen and param.ndim < 2:
                raise ValueError(
                    f"use_muon gives {name!r} of shape {tuple(param.shape)} to Muon, which trains "
                    "matrices"
                )
        else:
            chosen = param.ndim >= 2 and id(param) not in outside and not _is_outside(name)
        where = hidden if chosen else matrices if param.ndim >= 2 else vectors
        where.append((name, param))
    if not hidden:
        raise ValueError(
            f"{type(model).__name__} has no matrix for Muon to train: all are frozen, embeddings "
            "or heads"
        )
    aux = {"use_muon": False, "lr": aux_lr}
    groups: list[dict[str, Any]] = [
        {"params": hidden},
        {"params": matrices, **aux, "weight_decay": aux_weight_decay},
        {"params": vectors, **aux, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _not_hidden(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Known by their modules, so that a weight shared with one of them counts as well."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag, torch.nn.modules.conv._ConvNd)
    for module in model.modules():
        if isinstance(module, kinds):
            yield from module.parameters(recurse=False)
    given = getattr(model, "get_output_embeddings", None)
    head = given() if callable(given) else None
    if isinstance(head, torch.nn.Module):
        yield from head.parameters()


def _is_outside(name: str) -> bool:
    """By its name: `layers.0.attention.output.weight` is no head, `output.weight` is one."""
    *path, _ = name.split(".")
    in_a_layer = any(part.isdigit() for part in path)
    return "embed" in name.lower() or (not in_a_layer and any(part in HEADS for part in path))
