"""What differs between versions of torch and Triton, or is spelled in a way that may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant_in_traces(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.assume_constant_result, without the 1.8 s that its import of dynamo takes."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
