"""A GPU that does nothing: what Keel's own Python takes on the way to one, on any machine.

Inside `stubbed()`, tensors on the CPU count as those of an H200, kernels are not compiled, and a
launch is only counted. Results are garbage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from keel import direct, ops
from keel._versions import CLauncher
from keel.kernels import (
    flash_bwd,
    flash_common,
    flash_fwd,
    gradient_sums,
    hopper_bwd,
    hopper_bwd_dq,
    hopper_bwd_launch,
    hopper_bwd_wide,
    hopper_dq_launch,
    hopper_fwd,
    hopper_launch,
    launch,
)
from keel.kernels import tensor_maps as maps


@dataclass
class Stub:
    """What would have gone to the GPU."""

    launches: list[tuple[str, int, list[Any]]] = field(default_factory=list)
    """(kernel, stream, arguments) of each launch from Triton's launcher in C."""
    compiled: list[str] = field(default_factory=list)
    encoded: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    """(address, shape, strides) of each TMA descriptor."""
    keep: bool = True
    """Whether launches are noted; a benchmark does not want to pay for that."""
    hooked: bool = False
    """Whether somebody asked Triton to be told of launches."""

    def c_launcher(self, compiled: Any, grid: Sequence[int]) -> CLauncher:
        def run(stream: int, arguments: list[Any]) -> None:
            if self.keep:
                self.launches.append((compiled.name, stream, arguments))

        def expand(descriptor: Any, form: Any) -> list[Any]:
            shape, strides = list(descriptor.shape), list(descriptor.strides)
            self.encoded.append((descriptor.base.data_ptr(), shape, strides))
            return [("map", *self.encoded[-1]), *shape, *strides]

        return CLauncher(run, expand, compiled.forms)


class _Kernel:
    """Stands for a Triton kernel."""

    def __init__(self, kernel: Any, stub: Stub) -> None:
        self.__name__, self.arg_names, self._stub = kernel.__name__, kernel.arg_names, stub

    def warmup(self, *arguments: Any, **options: Any) -> None:
        """Nothing is compiled, and there is nothing to look at."""

    def __getitem__(self, grid: Any) -> Any:
        def compile_and_run(*arguments: Any, **options: Any) -> Any:
            self._stub.compiled.append(self.__name__)
            forms = [{"box": x.block_shape} for x in arguments if hasattr(x, "block_shape")]
            return _Compiled(self.__name__, forms, self._stub)

        return compile_and_run


class _Compiled(SimpleNamespace):
    def __init__(self, name: str, forms: list[Any], stub: Stub) -> None:
        super().__init__(name=name, forms=forms, hash=name, stub=stub)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.stub.launches.append((self.name, -1, list(arguments)))


@contextlib.contextmanager
def stubbed() -> Iterator[Stub]:
    """Replaces the GPU; what was remembered of calls is forgotten before and after."""
    stub = Stub()
    kernels = [
        (hopper_fwd, "hopper_fwd_kernel"),
        (hopper_bwd, "hopper_bwd_kernel"),
        (hopper_bwd_wide, "hopper_bwd_wide_kernel"),
        (hopper_bwd_dq, "hopper_bwd_dq_kernel"),
        (flash_fwd, "flash_fwd_kernel"),
        (flash_bwd, "row_terms_kernel"),
        (flash_bwd, "flash_bwd_dkdv_kernel"),
        (flash_bwd, "flash_bwd_dq_kernel"),
        (gradient_sums, "gradient_sums_kernel"),
    ]
    remembered = (launch._recipes, direct._known, maps._by_layout, hopper_launch._counters)
    with contextlib.ExitStack() as stack:

        def replace(where: Any, name: str, by: Any) -> None:
            stack.enter_context(mock.patch.object(where, name, by))

        for module, name in kernels:
            replace(module, name, _Kernel(getattr(module, name), stub))
        replace(hopper_launch, "check_compiled", lambda form, compiled: None)
        replace(ops, "_triton_problem", lambda device, dtype: None)
        replace(hopper_launch, "machine_problem", lambda device: None)
        replace(launch, "c_launcher", stub.c_launcher)
        replace(launch, "in_clusters", lambda compiled, size: None)
        replace(launch, "has_launch_hooks", lambda: stub.hooked)
        replace(torch.cuda, "is_current_stream_capturing", lambda: False)
        hopper = (hopper_launch, hopper_bwd_launch, hopper_dq_launch)
        for module in (flash_common, flash_fwd, flash_bwd, *hopper):
            for name, value in (("num_sms", 132), ("compute_capability", (9, 0))):
                if hasattr(module, name):
                    replace(module, name, lambda device, value=value: value)
        for known in remembered:
            known.clear()
        try:
            yield stub
        finally:
            for known in remembered:
                known.clear()
