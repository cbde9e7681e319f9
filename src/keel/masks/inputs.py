"""From what callers pass to masks: tensors on any device, seen once and remembered.

Operators receive masks as tensors, so that they can be traced: either one (n, 6) tensor of slices
or the three tensors q_ranges, k_ranges, attn_type_map. Reading a CUDA tensor stalls the host, so
a tensor object is read only once, as long as torch's version counter says nobody wrote to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from keel.masks.mask import AttnMask

T = TypeVar("T")

_seen: dict[tuple[Any, ...], tuple[tuple[weakref.ref[torch.Tensor], ...], list[int], Any]] = {}

_owners: weakref.WeakValueDictionary[int, AttnMask] = weakref.WeakValueDictionary()
"""Masks by the identity of their own tensor; weak, since a mask keeps that tensor alive."""


def mask_of_tensors(tensors: Sequence[torch.Tensor], tq: int, tk: int) -> AttnMask:
    """The mask that an operator's mask tensors mean, validated."""
    if len(tensors) == 1:
        owner = _owners.get(id(tensors[0]))
        if owner is not None and owner.tensor is tensors[0] and owner.shape == (tq, tk):
            return owner
        return remembered(tensors, ("slices", tq, tk), lambda: _mask_of_slices(tensors[0], tq, tk))
    if len(tensors) == 3:
        return remembered(
            tensors,
            ("ranges", tq, tk),
            lambda: AttnMask.from_ranges(tensors[0], tensors[1], tensors[2], tq, tk),
        )
    raise ValueError(f"a mask is 1 tensor of slices or 3 of ranges and types, got {len(tensors)}")


def tensors_of_mask(mask: AttnMask) -> list[torch.Tensor]:
    """What to hand an operator; it will find this very mask again."""
    _owners[id(mask.tensor)] = mask
    return [mask.tensor]


def remembered(tensors: Sequence[torch.Tensor], tag: tuple[Any, ...], build: Callable[[], T]) -> T:
    """build(), unless the same tensor objects, unchanged, were seen before with the same tag.

    What is built must depend on nothing else.
    """
    if any(t.is_inference() for t in tensors):  # these have no version counter to trust
        return build()
    key = (*map(id, tensors), *tag)
    versions = [t._version for t in tensors]
    found = _seen.get(key)
    if found is not None:
        references, known, built = found
        if known == versions and all(r() is t for r, t in zip(references, tensors, strict=True)):
            return built
    built = build()

    def forget(_: Any) -> None:
        _seen.pop(key, None)

    _seen[key] = (tuple(weakref.ref(t, forget) for t in tensors), versions, built)
    return built


def _mask_of_slices(slices: torch.Tensor, tq: int, tk: int) -> AttnMask:
    if slices.dtype != torch.int64 or slices.ndim != 2 or slices.shape[1] != 6:
        raise ValueError(
            f"slices must be int64 of shape (n, 6), got {slices.dtype} {tuple(slices.shape)}"
        )
    return AttnMask(slices.detach().cpu().numpy().copy(), tq, tk)
