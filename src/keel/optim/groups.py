"""Parameter groups of Muon: names for messages, and checks before anything is computed."""

from __future__ import annotations

from typing import Any

import torch

from keel.optim.batching import Settings
from keel.optim.blocks import ADJUST_LR, row_blocks
from keel.optim.coefficients import resolve_coefficients
from keel.optim.newton_schulz import check_options, normalization_for

Group = dict[str, Any]

REFUSED = ("foreach", "fused", "maximize", "capturable", "differentiable", "amsgrad")
"""Options of other optimizers that would be silently without effect here."""


def names_of(group: Group, number: int) -> list[str]:
    """What to call its parameters: by the names of `model.named_parameters()`, if it was given."""
    names = group.get("param_names")
    if names is not None:
        return [f"parameter {name!r}" for name in names]
    return [f"parameter {i} of group {number}" for i in range(len(group["params"]))]


def settings_of(group: Group) -> Settings:
    coefficients = group["ns_coefficients"]
    return Settings(
        triples=resolve_coefficients(coefficients, group["ns_steps"]),
        eps=group["eps"],
        dtype=group["ns_dtype"],
        form=group["ns_form"],
        normalize=group["ns_normalize"] or normalization_for(coefficients),
    )


def blocks_of(group: Group, param: torch.Tensor, name: str) -> tuple[int, ...]:
    return row_blocks(param.shape, group["split_sizes"], group["num_heads"], name)


def check_group(group: Group, number: int) -> None:
    for key in REFUSED:
        if group.get(key):
            raise ValueError(f"Muon has no option {key!r}, got {key}={group[key]!r}")
    _check_lr(group["lr"])
    _at_least_zero("weight_decay", group["weight_decay"])
    if not isinstance(group["use_muon"], bool):
        raise TypeError(f"use_muon must be True or False, got {group['use_muon']!r}")
    names = names_of(group, number)
    for param, name in zip(group["params"], names, strict=True):
        if not param.is_floating_point():
            raise TypeError(f"{name} has dtype {param.dtype}; Muon trains floating-point numbers")
    if group["use_muon"]:
        _check_muon(group, names)
    else:
        _check_adamw(group)


def _check_muon(group: Group, names: list[str]) -> None:
    for key in ("momentum", "eps"):
        _at_least_zero(key, group[key])
    if group["momentum"] > 1:
        raise ValueError(f"momentum must be at most 1, got {group['momentum']}")
    if group["adjust_lr_fn"] not in ADJUST_LR:
        raise ValueError(
            "adjust_lr_fn must be None, 'original' or 'match_rms_adamw', got "
            f"{group['adjust_lr_fn']!r}"
        )
    check_options(group["ns_dtype"], group["ns_form"], group["ns_normalize"])
    settings_of(group)
    for param, name in zip(group["params"], names, strict=True):
        if param.ndim < 2:
            raise ValueError(
                f"{name} of shape {tuple(param.shape)} is no matrix; put it into a group with "
                "use_muon=False, which AdamW trains"
            )
        blocks_of(group, param, name)


def _check_adamw(group: Group) -> None:
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
    _at_least_zero("eps", group["eps"])
    for key in ("split_sizes", "num_heads"):
        if group[key] is not None:
            raise ValueError(f"{key} has no meaning in a group with use_muon=False")


def _check_lr(lr: Any) -> None:
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"a tensor as lr must hold one number, got shape {tuple(lr.shape)}")
    _at_least_zero("lr", lr)


def _at_least_zero(key: str, value: Any) -> None:
    if not value >= 0:  # NaN is not
        raise ValueError(f"{key} must be at least 0, got {value}")
