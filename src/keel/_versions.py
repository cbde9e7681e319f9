"""What differs between versions of torch and Triton, or is spelled in a way that may change."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
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

# Looked up once: these are asked at each call, and a lookup takes as long as an answer.
_is_compiling = torch.compiler.is_compiling
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_num_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state


def nobody_looks() -> bool:
    """Whether nobody traces, transforms or counts operators."""
    if (
        _is_compiling()
        or _num_dispatch_modes()
        or _transform() is not None
        or forward_ad._current_level >= 0
        or _tracing_state() is not None
    ):
        return False
    if _num_function_modes():  # a default device is one, and looks at nothing
        modes = torch.overrides._get_current_function_mode_stack()
        return all(type(mode) is DeviceContext for mode in modes)
    return True


def runs_plainly(*tensors: torch.Tensor) -> bool:
    """Whether nobody looks, and tensors are no more than memory: operators may be bypassed."""
    return (
        nobody_looks()
        and _PLAIN.issuperset(map(type, tensors))
        and not any(x.is_neg() for x in tensors)
    )


def layout_check(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """Recognises tensors of the same types, shapes, strides, dtypes and devices, and all else that
    torch's dispatcher goes by, as a negative bit, modes of this thread and requires_grad.

    None where that is not known to work. It is how dynamo knows the inputs of compiled code: one
    call in C, where asking each tensor for each property takes five times as long. It is False
    where one object comes twice.
    """
    make = _layout_guard()
    return None if make is None else make(*tensors)


@functools.cache
def _layout_guard() -> Callable[..., Callable[..., bool]] | None:
    """Makes dynamo's guards of tensors, after they were seen to tell tensors apart."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        def make(*tensors: torch.Tensor) -> Callable[..., bool]:
            exact: dict[str, Any] = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
            check: Callable[..., bool] = TensorGuards(*tensors, **exact).check
            return check

        with torch.inference_mode(False), torch.device("cpu"):
            x, other = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
            strange = (
                *(x.half(), x[:1], x.mT.contiguous().mT, x[..., 0], torch._neg_view(x)),
                *(x.to("meta"), x.clone().requires_grad_(), torch.nn.Parameter(x), None),
            )
            check = make(x, other)
            works = check(x, other) and check(other, x)
            works &= not any(check(x, y) or check(y, x) for y in strange)
    except Exception:  # private: whatever it has become, there is another way
        return None
    return make if works else None


@functools.cache
def quick_empty(device_type: str) -> Callable[[tuple[int, ...], tuple[int, ...], Any], Any]:
    """(shape, strides, dtype): torch.empty_strided on the current device of this type.

    Where it is known to work, by what compiled code of inductor allocates with: past the dispatcher
    and its reading of arguments, in half the time. For where nobody looks.
    """
    shape, strides = (2, 3), (3, 1)
    try:
        import torch._C._dynamo.guards as allocators

        quick: Callable[..., torch.Tensor] = getattr(allocators, f"_empty_strided_{device_type}")
        x = quick(shape, strides, torch.bfloat16)
        found = (x.shape, x.stride(), x.dtype, x.device.type)
        if type(x) is torch.Tensor and found == (shape, strides, torch.bfloat16, device_type):
            return quick
    except Exception:  # private: whatever it has become, there is another way
        pass
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device_type
    )


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """function.apply without its look at torch.func's transforms, for after `runs_plainly`."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


_current_device = getattr(torch._C, "_cuda_getDevice", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Of builds with CUDA."""


def launch_stream(index: int | None) -> int | None:
    """The current stream of a CUDA device, as the driver takes it; 0 for no index, a CPU.

    None where a launch has to take care: another device is current, or a graph is being captured.
    """
    if index is None:
        return 0
    if _current_device() != index or _is_capturing():  # type: ignore[misc]
        return None
    stream: int = _raw_stream(index)  # type: ignore[misc]
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
    cooperative, pdl = launcher.launch_cooperative_grid, launcher.launch_pdl
    handle, metadata = compiled.function, compiled.packed_metadata
    x, y, z = grid
    run: Callable[[int, list[Any]], None]
    # fmt: off
    if version == ("3", "6"):
        def run(stream: int, arguments: list[Any]) -> None:
            function(
                x, y, z, stream, handle, cooperative, pdl, None, None, metadata, None, None, None,
                *arguments,
            )

    else:
        annotations, signature = launcher.arg_annotations, launcher.kernel_signature

        def run(stream: int, arguments: list[Any]) -> None:
            function(
                x, y, z, stream, handle, cooperative, pdl, metadata, None, None, None, None, None,
                annotations, signature, arguments,
            )

    # fmt: on

    return CLauncher(run, driver.make_tensordesc_arg, forms)


@functools.cache
def knows_clusters() -> bool:
    """Whether `in_clusters` does what it says: as the launchers of Triton 3.6 to 3.9 read it."""
    import triton

    return triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))


def in_clusters(compiled: Any, size: int) -> None:
    """Launches of a compiled kernel are of clusters of so many blocks of threads, from now on.

    It is compiled for single ones: to Triton itself, a cluster is one block that is spread out.
    """
    warps, _, shared = compiled.packed_metadata
    compiled.packed_metadata = (warps, size, shared)


def fp_fusion() -> bool:
    """Whether products and sums become one operation, as the kernels are written for, unless the
    user says otherwise. Triton 3.9 announces another default."""
    said = os.environ.get("TRITON_DEFAULT_FP_FUSION", "1")
    return said.lower() in ("1", "true", "yes", "on", "y")


def for_few_registers() -> dict[str, Any]:
    """Options of a launch for which LLVM orders instructions so that few registers are needed.

    Triton 3.9 has such an option, and needs it.
    """
    from triton.backends.nvidia.compiler import CUDAOptions

    return {"sched4reg": True} if "sched4reg" in CUDAOptions.__dataclass_fields__ else {}


_choosing = threading.RLock()
PTXAS = "TRITON_PTXAS_PATH"


@contextlib.contextmanager
def sparing_ptxas(wanted: bool = True) -> Iterator[dict[str, Any]]:
    """While Hopper kernels are compiled: by the ptxas that needs the fewest registers. Yields
    options of the launch, by which Triton's cache tells what another one made.

    That is one of Triton's own, with which they are tested: torch.compile puts torch's in its place
    for the whole process, where torch brings one. Triton 3.9 comes with two, and copies operands of
    products that are in registers: 13.4, which it takes for Hopper, keeps many of the copies, and
    loops spill; 12.9, for older GPUs, sees that nobody needs them.
    """
    if not wanted or (PTXAS not in os.environ and _other_ptxas() is None):
        yield {}
        return
    from triton import knobs

    with _choosing, knobs.nvidia.scope():
        own = _in_place_of_torchs()
        if own is not None:
            knobs.nvidia.ptxas = own
        path, options = _other_ptxas() or (None, {})
        if path is not None:
            knobs.nvidia.ptxas_blackwell = path
        yield options


def _in_place_of_torchs() -> str | None:
    """Triton's own ptxas, where it would take one from torch's folder."""
    from triton import knobs

    path, torchs = os.environ.get(PTXAS), Path(torch.__file__).parent
    if path is None or not Path(path).is_relative_to(torchs):
        return None
    if "ptxas" in vars(knobs.nvidia):  # the user's, which is asked before the environment
        return None
    own: str | None = getattr(vars(type(knobs.nvidia)).get("ptxas"), "default_path", None)
    return own


@functools.cache
def _other_ptxas() -> tuple[str, dict[str, Any]] | None:
    """(path, options) of `sparing_ptxas`; None where there is one alone, or the user chose it."""
    try:
        from triton import knobs
        from triton.backends.nvidia import compiler

        nvidia = knobs.nvidia
        if "TRITON_PTXAS_BLACKWELL_PATH" in os.environ or "ptxas_blackwell" in vars(nvidia):
            return None
        usual, other = compiler.get_ptxas(90), nvidia.ptxas
        if int(usual.version.split(".")[0]) < 13 or int(other.version.split(".")[0]) >= 13:
            return None
        compiler.get_ptxas_version(90)  # is kept, and part of every name in Triton's cache
        return other.path, {"ptx_version": compiler.ptx_get_version(other.version)}
    except Exception:  # private: whatever it has become, the usual one works
        return None


@functools.cache
def wastes_registers() -> bool:
    """Whether this Triton makes code of the Hopper kernels that takes more registers than others'.
    The forward of 3.8 spills with three consumers, and with 256 columns where scores are capped or
    results are added to what is there; for parts of tiles there is no way around it."""
    import triton

    return triton.__version__.startswith("3.8.")


@functools.cache
def copies_operands() -> bool:
    """Whether code of this Triton copies operands of products that are in registers, and so has one
    or two registers fewer where there are few: that of 3.9; newer ones are taken for such."""
    import triton

    return not triton.__version__.startswith(("3.6.", "3.7.", "3.8."))


@functools.cache
def goes_on_after_products() -> bool:
    """Whether a warp goes on when its products are done. Code of 3.9 waits for all warps that run
    it, which must not be where four of eight go their own way; newer ones are not known."""
    import triton

    return triton.__version__.startswith(("3.6.", "3.7.", "3.8."))


@functools.cache
def holds_wide_tiles() -> bool:
    """Whether a tile of 256 columns can be kept in registers into the next one's iteration: code of
    3.8 and 3.9 has up to 24 and 304 bytes on the stack then; nobody knows if it is faster."""
    import triton

    return triton.__version__.startswith(("3.6.", "3.7."))


@functools.cache
def keeps_addresses() -> bool:
    """Whether the fullest loops of wide heads have a register left for an address: those of 3.7
    spill for it; others keep less on the stack with it. 3.7 has none either for the number of a
    warp in parts of sixteen packed heads."""
    import triton

    return not triton.__version__.startswith("3.7.")


@functools.cache
def _triton_runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def has_launch_hooks() -> bool:
    """Whether a profiler asked Triton to be told of launches."""
    runtime = _triton_runtime()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # somebody set one to a function, or to None
        hooks = [hook for hook in (enter, leave) if hook is not None]
        return any(getattr(hook, "calls", True) for hook in hooks)


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
    """What Gluon has called otherwise; imported when somebody asks."""
    if name == "tma_add":
        return _tma_add()
    if name == "thread_barrier":
        from triton.experimental.gluon import language

        return language.barrier if hasattr(language, "barrier") else language.thread_barrier
    if name == "reinterpreted":  # (shared memory, dtype, shape, layout); a method since Triton 3.9
        from triton.experimental.gluon import language

        kind = language.shared_memory_descriptor
        return kind.reinterpret if hasattr(kind, "reinterpret") else kind._reinterpret
    spellings = {
        "tma_load": ("tma", "async_load", "async_copy_global_to_shared"),
        "tma_store": ("tma", "async_store", "async_copy_shared_to_global"),
        "copy_async": ("async_copy", "async_load", "async_copy_global_to_shared"),
    }
    if name not in spellings:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from triton.experimental.gluon.language.nvidia import hopper

    where, *names = spellings[name]
    module = getattr(hopper, where)
    return next(getattr(module, n) for n in names if hasattr(module, n))


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
