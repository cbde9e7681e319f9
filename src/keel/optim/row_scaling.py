"""Rows of many tensors multiplied in one pass, by factors that only the device knows."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """Local rows of a parameter, and which factor each of them takes."""

    tensor: Tensor
    """(rows, ...)."""
    entries: np.ndarray
    """(rows,) int: places in the table of factors; place 0 holds 1."""
    master: Tensor | None = None
    """The same rows in higher precision. It is scaled, and the tensor is rounded from it."""


class RowScaler:
    """Multiplies rows in place. What it is made of stays where it is until a new one is made.

    In plain torch all rows are multiplied, most of them by 1. The kernel leaves those alone, so a
    step that clips nothing costs next to nothing however large the weights are.
    """

    def __init__(self, parts: Sequence[ScaledTensor], device: torch.device, backend: str = "auto"):
        parts = [p for p in parts if p.tensor.numel() and p.entries.any()]
        with_kernel: list[ScaledTensor] = []
        if backend == "triton" or (backend == "auto" and can_use_triton(device)):
            with_kernel = [p for p in parts if _is_dense(p)]
        in_torch = [p for p in parts if not any(p is q for q in with_kernel)]
        self._torch = _InTorch(in_torch, device) if in_torch else None
        self._kernel = _InTriton(with_kernel, device) if with_kernel else None

    @torch.no_grad()
    def scale(self, factors: Tensor) -> None:
        """Row r of each tensor times factors[entries[r]]; a factor of 1 changes no bit."""
        if self._torch is not None:
            self._torch.scale(factors)
        if self._kernel is not None:
            self._kernel.scale(factors)


class _InTorch:
    def __init__(self, parts: list[ScaledTensor], device: torch.device) -> None:
        rows = np.concatenate([p.entries for p in parts]).astype(np.int64)
        self.entries = torch.from_numpy(rows).to(device)
        self.sizes = [len(p.entries) for p in parts]
        self.parts = parts

    def scale(self, factors: Tensor) -> None:
        columns = [
            x.view(-1, *[1] * (p.tensor.ndim - 1))
            for x, p in zip(factors[self.entries].split(self.sizes), self.parts, strict=True)
        ]
        scaled = [p.tensor if p.master is None else p.master for p in self.parts]
        torch._foreach_mul_(scaled, columns)
        for part, column in zip(self.parts, columns, strict=True):
            if part.master is not None:
                new = part.master.to(part.tensor.dtype)
                torch.where(column != 1, new, part.tensor, out=part.tensor)


class _InTriton:
    """One launch for each dtype, and one more where tensors have masters."""

    def __init__(self, parts: list[ScaledTensor], device: torch.device) -> None:
        plain: dict[Any, list[tuple[Tensor, Tensor, np.ndarray]]] = {}
        rounded: dict[Any, list[tuple[Tensor, Tensor, np.ndarray]]] = {}
        for p in parts:
            x = p.tensor if p.master is None else p.master
            plain.setdefault(x.dtype, []).append((x, x, p.entries))
            if p.master is not None:
                pair = (p.tensor.dtype, p.master.dtype)
                rounded.setdefault(pair, []).append((p.tensor, p.master, p.entries))
        self.plain = [_runs(found, device) for found in plain.values()]
        self.rounded = [_runs(found, device) for found in rounded.values()]

    def scale(self, factors: Tensor) -> None:
        from keel.kernels.row_scale import scale_runs

        for runs in self.plain:
            wide = torch.promote_types(factors.dtype, runs.target_like.dtype)
            scale_runs(factors.to(wide), runs)
        for runs in self.rounded:
            scale_runs(factors, runs, copy=True)


def _runs(found: list[tuple[Tensor, Tensor, np.ndarray]], device: torch.device) -> Any:
    """Stretches of memory with one factor each; those of place 0 are left out."""
    from keel.kernels.row_scale import Runs

    entries, targets, sources, counts = [], [], [], []
    for target, source, rows in found:
        width = target.numel() // len(rows)
        starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 1))
        ends = np.append(starts[1:], len(rows))
        keep = rows[starts] != 0
        starts, ends = starts[keep], ends[keep]
        entries.append(rows[starts])
        targets.append(target.data_ptr() + starts * width * target.element_size())
        sources.append(source.data_ptr() + starts * width * source.element_size())
        counts.append((ends - starts) * width)
    multiples = np.concatenate([*targets, *sources, *counts])
    longest = max(int(c.max()) for c in counts)
    assert longest < 2**31, f"one head's rows hold {longest} elements"

    def packed(arrays: list[np.ndarray], dtype: Any) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(dtype)).to(device)

    like = [torch.empty(1, dtype=x.dtype, device=device) for x in found[0][:2]]
    return Runs(
        entries=packed(entries, np.int32),
        targets=packed(targets, np.int64),
        sources=packed(sources, np.int64),
        counts=packed(counts, np.int32),
        target_like=like[0],
        source_like=like[1],
        aligned=bool((multiples % 16 == 0).all()),
    )


def _is_dense(part: ScaledTensor) -> bool:
    return part.tensor.is_contiguous() and (part.master is None or part.master.is_contiguous())


@functools.cache
def can_use_triton(device: torch.device) -> bool:
    """Whether kernels run there."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
