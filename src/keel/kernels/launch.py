"""Launching Triton kernels with little work on the host.

What a launch needs beside its tensors (tile plan, tile sizes, strides, the compiled variant)
follows from the mask, the options and the layout of the tensors. It is worked out at the first
call and kept as a *recipe*; later calls fill in addresses and go straight to Triton's launcher in
C, past its Python, which takes longer than small kernels run.
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

from keel._versions import (
    CLauncher,
    c_launcher,
    fp_fusion,
    has_launch_hooks,
    in_clusters,
    launch_stream,
    sparing_ptxas,
)
from keel.bounded import make_room
from keel.kernels.tensor_maps import TensorMaps, tensor_maps

logger = logging.getLogger("keel")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

Tensors = dict[str, torch.Tensor | None]
Addresses = dict[str, Any]
"""data_ptr() of tensors, by the names of kernel arguments; None for one that is not there."""

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
    hopper: bool = False
    """Compiled for Hopper alone, by `sparing_ptxas`."""
    early: bool = False
    """Begins before the launch before it is done, and waits for that one itself
    (`early_launches`)."""
    check: Callable[[Any], None] | None = None
    """Sees the compiled kernel before it runs for the first time."""
    cluster: int = 1
    """Blocks of threads that run side by side, for each of the grid; only with a check."""
    options: dict[str, Any] = field(default_factory=dict)
    """More of what Triton's compiler is told."""
    streamed: dict[str, Callable[[torch.Tensor], Any]] = field(default_factory=dict)
    """Tensors to pass as TMA descriptors, and what makes one."""
    left_out: tuple[str, ...] = ()
    """Tensors that this variant does not take."""
    numbers_between: int = 0
    """fp32 numbers that its parts leave for each other, in memory that each call brings along."""


_recipes: dict[Hashable, Recipe] = {}
_captured: set[Recipe] = set()
"""Recipes that CUDA graphs hold pointers of: these stay for good."""

_compiled: set[tuple[str, str]] = set()


def launch(
    kernel: Any, key: Hashable, tensors: Tensors, prepare: Callable[[], Prepared | None]
) -> Recipe:
    """Runs a kernel on `tensors`, its pointer arguments by name; returns the recipe it followed.

    `key` holds all that `prepare` looks at beside the layout of the tensors. `prepare` runs when
    this combination is new, and returns None where there is nothing to do.
    """
    full_key: list[Hashable] = [kernel.__name__, key]
    offset = 0
    for x in tensors.values():
        if x is None:
            full_key.append(None)
        else:
            full_key += (x.dtype, x.shape, x.stride(), x.get_device())
            offset |= x.data_ptr()
    aligned = offset % 16 == 0
    if not aligned:
        full_key += [None if x is None else x.data_ptr() % 16 for x in tensors.values()]
    found = tuple(full_key)
    recipe = _recipes.get(found)
    if recipe is None:
        recipe = Recipe(kernel, prepare(), tensors, aligned)
        make_room(_recipes, MAX_RECIPES)
        _recipes[found] = recipe
    recipe.run(tensors)
    return recipe


class Recipe:
    """A launch with everything known but where the tensors are."""

    def __init__(
        self, kernel: Any, prepared: Prepared | None, tensors: Tensors, aligned: bool
    ) -> None:
        self.kernel, self.prepared, self.aligned = kernel, prepared, aligned
        device = next(x.device for x in tensors.values() if x is not None)
        self.device_index = device.index if device.type == "cuda" else None
        self.numbers_between = 0 if prepared is None else prepared.numbers_between
        self.runner: Callable[..., None] | None = None
        self.straight: _Straight | None = None
        if prepared is not None:
            self.template = [prepared.arguments.get(name) for name in kernel.arg_names]
            self.places = [
                (kernel.arg_names.index(name), name, prepared.streamed.get(name))
                for name in tensors
                if name not in prepared.left_out
            ]
            unknown = set(prepared.arguments) - set(kernel.arg_names)
            assert not unknown, f"{kernel.__name__} does not take {unknown}"

    def run(self, tensors: Tensors) -> None:
        """On the current stream of the tensors' device."""
        if self.prepared is None:
            return
        stream = launch_stream(self.device_index)
        if stream is not None:
            self.run_on(stream, tensors)
            return
        with torch.cuda.device(self.device_index):
            if torch.cuda.is_current_stream_capturing():
                _captured.add(self)
            self._run(tensors)

    def run_on(self, stream: int, tensors: Tensors) -> None:
        """As `run`, for a caller that knows from `launch_stream` where it is.

        `tensors` may hold more than the kernel takes.
        """
        addresses = {name: x.data_ptr() for name, x in tensors.items() if x is not None}
        if not self.run_at(stream, addresses) and self.prepared is not None:
            self._run(tensors)

    def run_at(self, stream: int, addresses: Addresses) -> bool:
        """As `run_on`, for a caller that has all addresses at hand; False where they are not enough
        and nothing was launched.

        `addresses` may hold more than the kernel takes.
        """
        straight = self.straight
        if straight is None or has_launch_hooks():
            return False
        arguments = straight.template.copy()
        for place, name, maps in straight.places:
            address = addresses[name]
            arguments[place] = address if maps is None else maps[address]
        straight.run(stream, arguments)
        return True

    def _run(self, tensors: Tensors) -> None:
        """Through Triton's Python; the first time through its compiler."""
        assert self.prepared is not None
        arguments = self.template.copy()
        for place, name, describe in self.places:
            x = tensors[name]
            arguments[place] = x if describe is None or x is None else describe(x)
        if self.runner is not None:
            self.runner(*arguments)
            return
        began = time.perf_counter()
        with sparing_ptxas(self.prepared.hopper) as options:
            options = {
                **{"num_warps": self.prepared.num_warps, "num_stages": self.prepared.num_stages},
                **{"maxnreg": self.prepared.max_registers, "enable_fp_fusion": fp_fusion()},
                **({"launch_pdl": True} if self.prepared.early else {}),
                **self.prepared.options,
                **options,
            }
            if self.prepared.check is not None and not INTERPRETED:
                compiled = self.kernel.warmup(*arguments, grid=self.prepared.grid, **options)
                self.prepared.check(compiled)
                if self.prepared.cluster > 1:
                    in_clusters(compiled, self.prepared.cluster)
            compiled = self.kernel[self.prepared.grid](*arguments, **options)
        if INTERPRETED:
            return
        _report(self.kernel.__name__, compiled.hash, time.perf_counter() - began)
        if self.aligned:  # the compiled variant takes alignment for granted
            grid = (*self.prepared.grid, 1, 1)[:3]
            self.runner = compiled[grid]
            launcher = c_launcher(compiled, grid)
            if launcher is not None:
                self.straight = _straight(launcher, arguments, self.places)


@dataclass(frozen=True, slots=True)
class _Straight:
    """A launch in the terms of Triton's launcher in C."""

    run: Callable[[int, list[Any]], None]
    template: list[Any]
    places: list[tuple[int, str, TensorMaps | None]]
    """Where addresses go, or the encoded maps of what is there."""


def _straight(
    launcher: CLauncher,
    arguments: list[Any],
    places: list[tuple[int, str, Callable[[torch.Tensor], Any] | None]],
) -> _Straight | None:
    """From the arguments of an ordinary launch, of which `places` are the call's own tensors."""
    names = {place: name for place, name, _ in places if arguments[place] is not None}
    template: list[Any] = []
    filled: list[tuple[int, str, TensorMaps | None]] = []
    forms = iter(launcher.forms)
    for place, argument in enumerate(arguments):
        name, start = names.get(place), len(template)
        maps = None
        if hasattr(argument, "block_shape"):  # a TMA descriptor
            form = next(forms, None)
            template += launcher.expand(argument, form)
            if name is None:
                return None
            maps = None if form is None else tensor_maps(argument, form, launcher.expand)
        elif isinstance(argument, torch.Tensor):
            template.append(argument.data_ptr())  # of a plan it holds: the recipe keeps that
        else:
            template.append(argument)
        if name is not None:
            template[start] = None
            filled.append((start, name, maps))
    return _Straight(launcher.run, template, filled)


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
