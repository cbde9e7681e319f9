"""Levers that decide whether communication runs beside attention, and what they stand at.

The order of launches on the host does not decide what a GPU runs: attention that holds every SM
leaves none for communication that was launched a moment later. A margin keeps SMs free for it; a
high-priority stream puts its blocks in front of those of attention that wait; some variables of
CUDA and NCCL can undo both.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

logger = logging.getLogger("keel")

FORWARD_MARGIN = "MAGI_ATTENTION_FFA_FORWARD_SM_MARGIN"
BACKWARD_MARGIN = "MAGI_ATTENTION_FFA_BACKWARD_SM_MARGIN"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
NCCL_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
NCCL_CLUSTERS = "NCCL_CGA_CLUSTER_SIZE"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapConfig:
    """SMs that attention leaves to communication, by direction, and whether it waits for it.

    A margin of None: what the variables MAGI_ATTENTION_FFA_FORWARD_SM_MARGIN and
    ..._BACKWARD_SM_MARGIN say, and 0 where they are not set.

    >>> OverlapConfig(forward_sm_margin=8).margins({BACKWARD_MARGIN: "4"})
    (8, 4)
    """

    forward_sm_margin: int | None = None
    backward_sm_margin: int | None = None
    barrier: bool = False
    """Attention starts only when the exchange launched before it has started (`KernelBarrier`), so
    that no margin is needed. Two small kernels a stage; without effect where exchanges take no
    SMs, as with gloo."""

    def __post_init__(self) -> None:
        for name in ("forward_sm_margin", "backward_sm_margin"):
            margin = getattr(self, name)
            if margin is None:
                continue
            if not isinstance(margin, int) or isinstance(margin, bool):
                raise TypeError(f"{name} must be a number of SMs or None, got {margin!r}")
            if margin < 0:
                raise ValueError(f"{name} must be at least 0, got {margin}")
        if not isinstance(self.barrier, bool):
            raise TypeError(f"barrier must be True or False, got {self.barrier!r}")

    def margins(self, environment: Mapping[str, str] | None = None) -> tuple[int, int]:
        """(forward, backward); `environment` is os.environ unless given."""
        found = os.environ if environment is None else environment
        forward, backward = self.forward_sm_margin, self.backward_sm_margin
        if forward is None:
            forward = _margin_in(found, FORWARD_MARGIN)
        if backward is None:
            backward = _margin_in(found, BACKWARD_MARGIN)
        return forward, backward


def _margin_in(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0").strip()
    if not text.isascii() or not text.isdigit():
        raise ValueError(
            f"{name} must be a number of SMs, 0 or more, got {environment[name]!r}: set it to one, "
            "or unset it"
        )
    return int(text)


@dataclass(frozen=True, slots=True)
class Lever:
    """A setting as it was found."""

    name: str
    value: str
    meaning: str
    """What that does to overlap, and what to do about it."""
    harmful: bool = False
    """Whether it is known to stand in the way."""


def levers(environment: Mapping[str, str] | None = None) -> list[Lever]:
    """Everything that decides about overlap, with what it means.

    >>> [x.name for x in levers({CONNECTIONS: "1"}) if x.harmful]
    ['CUDA_DEVICE_MAX_CONNECTIONS']
    """
    found = os.environ if environment is None else environment
    return [
        _margin(found, FORWARD_MARGIN, "forward"),
        _margin(found, BACKWARD_MARGIN, "backward"),
        _connections(found),
        _nccl_priority(found),
        _nccl_clusters(found),
    ]


def advise(environment: Mapping[str, str] | None = None) -> str:
    """Prints all levers with advice, and returns what it printed."""
    lines = ["What decides whether communication overlaps with attention:"]
    for lever in levers(environment):
        lines.append(f"{'!' if lever.harmful else ' '} {lever.name} = {lever.value}")
        lines.append(f"    {lever.meaning}")
    text = "\n".join(lines)
    print(text)
    return text


@functools.cache
def warn_once() -> None:
    """Logs, at the first call of a process, what stands in the way of overlap."""
    for lever in levers():
        if lever.harmful:
            logger.warning("keel: %s=%s: %s", lever.name, lever.value, lever.meaning)


def _margin(environment: Mapping[str, str], name: str, direction: str) -> Lever:
    try:
        margin = _margin_in(environment, name)
    except ValueError as error:
        return Lever(name, environment[name], str(error), harmful=True)
    value = environment.get(name, "not set")
    if margin == 0:
        return Lever(
            name,
            value,
            f"The {direction} may fill every SM, so communication launched behind it may start "
            "only when it ends. calc_attn takes sm_margin or an OverlapConfig, too.",
        )
    return Lever(name, value, f"The {direction} of calc_attn leaves {margin} SMs free.")


def _connections(environment: Mapping[str, str]) -> Lever:
    value = environment.get(CONNECTIONS)
    if value is None:
        return Lever(CONNECTIONS, "not set", "CUDA's own number of hardware queues: streams run "
                     "beside each other.")  # fmt: skip
    if value.strip() == "1":
        return Lever(
            CONNECTIONS,
            value,
            "All streams share one hardware queue: kernels start in the order of their launches, "
            "and a launch behind one that waits, waits as well. Unset it, or set it to 8 or more, "
            "unless tensor-parallel code relies on that order; then launch communication first.",
            harmful=True,
        )
    return Lever(CONNECTIONS, value, "Several hardware queues: streams run beside each other.")


def _nccl_priority(environment: Mapping[str, str]) -> Lever:
    value = environment.get(NCCL_PRIORITY)
    if value is not None and value.strip().lower() in ("1", "true", "yes", "y", "on"):
        return Lever(NCCL_PRIORITY, value, "NCCL's kernels go before waiting blocks of attention.")
    return Lever(
        NCCL_PRIORITY,
        "not set" if value is None else value,
        "NCCL's kernels queue behind blocks of attention that already wait. Keel's own stream has "
        "high priority, NCCL's has not: set this to 1 before init_process_group.",
    )


def _nccl_clusters(environment: Mapping[str, str]) -> Lever:
    value = environment.get(NCCL_CLUSTERS)
    if value is None:
        return Lever(
            NCCL_CLUSTERS,
            "not set",
            "On Hopper NCCL may launch clusters of blocks, which start only where a whole cluster "
            "finds room: with a small margin set this to 0 or 1.",
        )
    if value.strip() in ("0", "1"):
        return Lever(NCCL_CLUSTERS, value, "Single blocks: a small margin is enough for NCCL.")
    return Lever(
        NCCL_CLUSTERS,
        value,
        "Clusters of blocks start only where all of them find room: the margin must cover all SMs "
        "that NCCL uses, or set this to 0 or 1.",
    )
