"""Launching Triton kernels with little work on the host.

What a launch needs beside its tensors (tile plan, tile sizes, strides, the compiled variant)
follows from the mask, the options and the layout of the tensors. It is worked out at the first
call and kept as a *recipe*; later calls fill in pointers and go straight to the driver, past
Triton's binding of arguments, which takes longer than small kernels run.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

logger = logging.getLogger("keel")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

Tensors = dict[str, torch.Tensor | None]

MAX_RECIPES = 256
"""Recipes keep tile plans alive on the device; the oldest go first."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a recipe is made of."""

    grid: tuple[int, ...]
    arguments: dict[str, Any]
    """Everything that is not a tensor of the call."""
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    """Per thread; fewer let more programs run side by side."""
    streamed: dict[str, Callable[[torch.Tensor], Any]] = field(default_factory=dict)
    """Tensors to pass as TMA descriptors, and what makes one."""
    left_out: tuple[str, ...] = ()
    """Tensors that this variant does not take."""


_recipes: dict[Hashable, Recipe] = {}
_captured: set[Recipe] = set()
"""Recipes that CUDA graphs hold pointers of: these stay for good."""

_compiled: set[tuple[str, str]] = set()


def launch(
    kernel: Any, key: Hashable, tensors: Tensors, prepare: Callable[[], Prepared | None]
) -> None:
    """Runs a kernel on `tensors`, its pointer arguments by name.

    `key` holds all that `prepare` looks at beside the layout of the tensors. `prepare` runs when
    this combination is new, and returns None where there is nothing to do.
    """
    layouts: list[Hashable] = []
    offset = 0
    for x in tensors.values():
        if x is None:
            layouts.append(None)
        else:
            layouts.append((x.dtype, x.shape, x.stride(), x.device))
            offset |= x.data_ptr()
    aligned = offset % 16 == 0
    if not aligned:
        layouts += [None if x is None else x.data_ptr() % 16 for x in tensors.values()]
    full_key = (kernel.__name__, key, *layouts)
    recipe = _recipes.get(full_key)
    if recipe is None:
        recipe = Recipe(kernel, prepare(), list(tensors), aligned)
        while len(_recipes) >= MAX_RECIPES:
            _recipes.pop(next(iter(_recipes)), None)
        _recipes[full_key] = recipe
    recipe.run(tensors)


class Recipe:
    """A launch with everything known but where the tensors are."""

    def __init__(
        self, kernel: Any, prepared: Prepared | None, names: list[str], aligned: bool
    ) -> None:
        self.kernel, self.prepared, self.aligned = kernel, prepared, aligned
        self.runner: Callable[..., None] | None = None
        if prepared is not None:
            self.template = [prepared.arguments.get(name) for name in kernel.arg_names]
            self.places = [
                (kernel.arg_names.index(name), name, prepared.streamed.get(name))
                for name in names
                if name not in prepared.left_out
            ]
            unknown = set(prepared.arguments) - set(kernel.arg_names)
            assert not unknown, f"{kernel.__name__} does not take {unknown}"

    def run(self, tensors: Tensors) -> None:
        if self.prepared is None:
            return
        if INTERPRETED:
            self._run(tensors)
            return
        if torch.cuda.is_current_stream_capturing():
            _captured.add(self)
        device = next(x.device for x in tensors.values() if x is not None)
        if device.index == torch.cuda.current_device():
            self._run(tensors)
        else:
            with torch.cuda.device(device):
                self._run(tensors)

    def _run(self, tensors: Tensors) -> None:
        assert self.prepared is not None
        arguments = self.template.copy()
        for place, name, describe in self.places:
            x = tensors[name]
            arguments[place] = x if describe is None or x is None else describe(x)
        if self.runner is not None:
            self.runner(*arguments)
            return
        began = time.perf_counter()
        compiled = self.kernel[self.prepared.grid](
            *arguments,
            num_warps=self.prepared.num_warps,
            num_stages=self.prepared.num_stages,
            maxnreg=self.prepared.max_registers,
        )
        if INTERPRETED:
            return
        _report(self.kernel.__name__, compiled.hash, time.perf_counter() - began)
        if self.aligned:  # the compiled variant takes alignment for granted
            grid = (*self.prepared.grid, 1, 1)[:3]
            self.runner = compiled[grid]


def _report(name: str, variant: str, seconds: float) -> None:
    """Says once that a variant had to be compiled, and how long it took."""
    if (name, variant) in _compiled:
        return
    _compiled.add((name, variant))
    if seconds > 0.4:  # from Triton's disk cache it loads much faster
        logger.warning(
            "keel compiled %s in %.1f s; it is cached on disk for later processes "
            "(keel.warmup does this ahead of time)",
            name.removesuffix("_kernel"),
            seconds,
        )


def rows_of_heads(block_rows: int) -> Callable[[torch.Tensor], Any]:
    """Rows of one head of (tokens, heads, dim) at a time, as a TMA descriptor."""

    def describe(x: torch.Tensor) -> Any:
        tokens, heads, dim = x.shape
        return TensorDescriptor(x, [tokens, heads * dim], [x.stride(0), 1], [block_rows, dim])

    return describe
