"""What differs between versions of torch and Triton, or is spelled in a way that may change."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def constant_in_traces(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.assume_constant_result, without the 1.8 s that its import of dynamo takes."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def runs_plainly(*tensors: torch.Tensor) -> bool:
    """Whether nobody traces, transforms or counts operators, so that one may be bypassed."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors)
    )


def flat_group(mesh: Any) -> Any:
    """The group of all ranks of a device mesh, in its row-major order; flattening is private."""
    return mesh._flatten().get_group() if mesh.ndim > 1 else mesh.get_group()


def outside_of_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.disable, a clean break of a traced graph, where somebody imported dynamo."""
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def backend_of(group: Any, device: torch.device) -> str | None:
    """Who moves tensors of a device in a group, as "nccl" or "gloo"; None: nobody can.

    `get_backend` does not tell: a group that was made without a name of a backend has one for each
    kind of device, and answers "undefined".
    """
    try:
        name: str = group._get_backend(device).name()
    except RuntimeError:
        return None
    return name.lower()


def store_of_all_ranks() -> Any:
    """The store in which the processes of the default group met."""
    return torch.distributed.distributed_c10d._get_default_store()


_NO_RANGE = contextlib.nullcontext()


def profiler_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range of torch's profiler; without one that runs, nothing: a range takes microseconds."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return _NO_RANGE


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread: forwards are then recomputations."""
    return torch._C._current_graph_task_id() != -1


def __getattr__(name: str) -> Any:
    """Gluon's TMA copies, called otherwise until Triton 3.7; imported when somebody asks."""
    if name == "tma_add":
        return _tma_add()
    spellings = {
        "tma_load": ("async_load", "async_copy_global_to_shared"),
        "tma_store": ("async_store", "async_copy_shared_to_global"),
    }
    if name not in spellings:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from triton.experimental.gluon.language.nvidia.hopper import tma

    return next(getattr(tma, n) for n in spellings[name] if hasattr(tma, n))


@functools.cache
def _tma_add() -> Any:
    """tma_add(descriptor, place, shared memory), which before Triton 3.8 only the builder has."""
    from triton.experimental.gluon.language._core import builtin
    from triton.experimental.gluon.language.nvidia.hopper import tma

    if hasattr(tma, "async_atomic_add"):
        return tma.async_atomic_add
    from triton._C.libtriton import ir

    @builtin
    def tma_add(descriptor: Any, coord: Any, source: Any, _semantic: Any = None) -> None:
        place = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, place, source.handle)

    return tma_add
