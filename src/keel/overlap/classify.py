"""What a GPU event is: compute, communication or a copy.

The category that the profiler gives comes first, then what torch writes on collectives, then
names. Communication is what crosses devices; a kernel that packs rows for an exchange works on
local memory with local SMs, so it is compute.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Kind(IntEnum):
    """Classes of GPU work, in the order in which they claim time that several share."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2


COMMUNICATION = (
    r"\b_*p?nccl",  # ncclKernel_, ncclDevKernel_, ncclDev_, ncclSymk…
    r"\brccl|\bmscclpp?|\bhccl|\boneccl|\bxccl",
    r"nvshmem|rocshmem",
    r"\bdeep_ep::|\bdeepep",
    r"(one|two)_?shot_?all_?(reduce|gather)",  # torch's symmetric memory, and others
    r"\bmultimem_(all|one|two|reduce)",
    r"cross_device_reduce",  # custom all-reduce of inference engines
    r"\b(put_signal|wait_signal)_kernel|symm_?mem\w*barrier|\bc10d::",
    # but not the reductions of a warp or a block that some kernels are named after
    r"(?<!warp)(?<!warp_)(?<!block)(?<!block_)"
    r"(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)",
)
COMPUTE = (
    # Kernels of torch.compile are named after the operators around them, collectives as well.
    r"\btriton_\w+_fused_",
    # Products with communication fused in: the SMs compute.
    r"gemm|matmul",
)
WAITING = r"^(context|stream|event|device|cuda)\s*(sync|wait)"
"""Names of waits; some converters file them under kernels."""
PEER_COPY = r"ptop|peer|p2p"
COLLECTIVE_RANGE = r"^(nccl|rccl|gloo|ucc|mpi|xccl|c10d|keel):(?!:)|^keel stage"
"""Ranges that torch opens around collectives: copies inside are those of copy engines. And Keel's
own, where copies go to the host and back because gloo moves the rows; a profiler files GPU work
under its innermost range alone, so a stage of `calc_attn` has no second range for them."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Patterns of your own (regular expressions, any case, found anywhere), before the built-in.

    >>> rules = Rules(communication=["my_ring_kernel", "Memcpy (HtoD|DtoH)"])
    >>> rules.kind("kernel", "my_ring_kernel<8>", {})
    <Kind.COMMUNICATION: 1>
    >>> rules.kind("kernel", "Stream Wait Event", {}) is None
    True
    """

    communication: Sequence[str] = ()
    """Kernels and copies that are communication."""
    compute: Sequence[str] = ()
    """Kernels that are compute."""
    ignore: Sequence[str] = ()
    """Events to leave out, such as a spinning kernel of a benchmark."""
    _compiled: dict[str, re.Pattern[str] | None] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _known: dict[tuple[str, str], Kind | None] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for name in ("communication", "compute", "ignore"):
            patterns = getattr(self, name)
            if isinstance(patterns, str):
                raise TypeError(f"Rules.{name} must be a list of patterns, got one str")
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(
                        f"{name} pattern {pattern!r} does not compile: {error}"
                    ) from None
            self._compiled[name] = _any(patterns) if patterns else None

    def kind(self, category: str, name: str, args: dict[str, Any]) -> Kind | None:
        """The class of an event of a category (kernel, gpu_memcpy, gpu_memset); None: none."""
        if "Collective name" in args or args.get("inDevice") != args.get("outDevice"):
            chosen = self._chosen(name)
            return Kind.COMMUNICATION if chosen is _UNDECIDED else chosen
        key = category, name
        if key not in self._known:
            chosen = self._chosen(name)
            self._known[key] = _built_in(category, name) if chosen is _UNDECIDED else chosen
        return self._known[key]

    def _chosen(self, name: str) -> Any:
        """What the user's own patterns say."""
        for rule, kind in (
            ("ignore", None),
            ("communication", Kind.COMMUNICATION),
            ("compute", Kind.COMPUTE),
        ):
            pattern = self._compiled[rule]
            if pattern is not None and pattern.search(name):
                return kind
        return _UNDECIDED


_UNDECIDED = object()


def _any(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{x})" for x in patterns), re.IGNORECASE)


_COMMUNICATION, _COMPUTE = _any(COMMUNICATION), _any(COMPUTE)
_WAITING, _PEER_COPY = _any([WAITING]), _any([PEER_COPY])


def _built_in(category: str, name: str) -> Kind | None:
    if category == "gpu_memset":
        return Kind.COPY
    if category == "gpu_memcpy":
        return Kind.COMMUNICATION if _PEER_COPY.search(name) else Kind.COPY
    if _WAITING.search(name):
        return None
    if _COMPUTE.search(name):
        return Kind.COMPUTE
    return Kind.COMMUNICATION if _COMMUNICATION.search(name) else Kind.COMPUTE
