"""What differs between versions of torch and Triton, or is spelled in a way that may change."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

P = ParamSpec("P")
R = TypeVar("R")


def constant_in_traces(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.assume_constant_result, without the 1.8 s that its import of dynamo takes."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def runs_plainly(*tensors: torch.Tensor) -> bool:
    """Whether nobody traces, transforms or counts operators, so that one may be bypassed."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ):
        return False
    if torch._C._len_torch_function_stack():  # a default device is one, and looks at nothing
        modes = torch.overrides._get_current_function_mode_stack()
        if any(type(mode) is not DeviceContext for mode in modes):
            return False
    return _PLAIN.issuperset(map(type, tensors)) and not any(x.is_neg() for x in tensors)


def apply_plainly(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """function.apply without its look at torch.func's transforms, after `runs_plainly`."""
    return super(torch.autograd.Function, function).apply(*inputs)  # type: ignore[misc]


def launch_stream(index: int | None) -> int | None:
    """The current stream of a CUDA device, as the driver takes it; 0 for no index, a CPU.

    None where a launch has to take care: another device is current, or a graph is being captured.
    """
    if index is None:
        return 0
    if torch._C._cuda_getDevice() != index or torch._C._cuda_isCurrentStreamCapturing():
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


def capture_id(index: int | None) -> tuple[int, int] | None:
    """(stream, number of its capture) of a CUDA device; None outside of captures, and where the
    driver cannot be asked. torch does not tell one capture from the next.
    """
    ask = _driver_function("cuStreamGetCaptureInfo")
    if index is None or ask is None:
        return None
    stream = torch._C._cuda_getCurrentRawStream(index)
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    failed = ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number))
    return (stream, number.value) if not failed and status.value == CAPTURE_ACTIVE else None


CAPTURE_ACTIVE = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE."""


@functools.cache
def _driver_function(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None


@dataclass(frozen=True, slots=True)
class CLauncher:
    """Triton's launcher in C, below its Python: no hooks, no scratch memory, no encoding."""

    run: Callable[[int, list[Any]], None]
    """(stream, kernel arguments): addresses for tensors, what `expand` gives for descriptors."""
    expand: Callable[[Any, Any], list[Any]]
    """(TMA descriptor, its form): what stands for it, encoded map or address first."""
    forms: Sequence[Any]
    """How each descriptor of the kernel is encoded; None where it takes an address."""


def c_launcher(compiled: Any, grid: Sequence[int]) -> CLauncher | None:
    """How to launch a compiled kernel without Triton's Python; None where that is not known.

    Read from the drivers of Triton 3.6 and 3.7. Others, other vendors and kernels that want
    scratch memory take the ordinary way.
    """
    import triton

    version = tuple(triton.__version__.split(".")[:2])
    if version not in (("3", "6"), ("3", "7")) or torch.version.hip is not None:
        return None
    from triton.backends.nvidia import driver

    launcher: Any = getattr(compiled, "run", None)
    if type(launcher) is not driver.CudaLauncher:
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    function = launcher.launch
    if isinstance(function, FunctionType):  # the wrapper that encodes descriptors
        function = inspect.getclosurevars(function).nonlocals.get("launcher")
    if not isinstance(function, BuiltinFunctionType):
        return None
    kinds = [kind for kind in compiled.src.signature.values() if isinstance(kind, str)]
    num_descriptors = sum(kind.startswith("tensordesc") for kind in kinds)
    forms = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * num_descriptors
    if len(forms) != num_descriptors:
        return None
    options = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    handle, metadata = compiled.function, compiled.packed_metadata
    x, y, z = grid
    run: Callable[[int, list[Any]], None]
    if version == ("3", "6"):

        def run(stream: int, arguments: list[Any]) -> None:
            function(
                *(x, y, z, stream, handle, *options, None, None, metadata, None, None, None),
                *arguments,
            )

    else:
        signature = (launcher.arg_annotations, launcher.kernel_signature)

        def run(stream: int, arguments: list[Any]) -> None:
            function(
                *(x, y, z, stream, handle, *options, metadata, None, None, None, None, None),
                *signature,
                arguments,
            )

    return CLauncher(run, driver.make_tensordesc_arg, forms)


@functools.cache
def _triton_runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def has_launch_hooks() -> bool:
    """Whether a profiler asked Triton to be told of launches."""
    runtime = _triton_runtime()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
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
    """What Gluon called otherwise until Triton 3.7; imported when somebody asks."""
    if name == "tma_add":
        return _tma_add()
    if name == "thread_barrier":
        from triton.experimental.gluon import language

        return language.barrier if hasattr(language, "barrier") else language.thread_barrier
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
