"""What differs between versions of torch and Triton, or is spelled in a way that may change."""

from __future__ import annotations

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
