"""A collective that fails: which operation it was, which ranks are silent, where the others are."""

from __future__ import annotations

import collections
import time

import torch.distributed as dist

from keel._versions import store_of_all_ranks

ROLL_CALL_S = 2.0
"""How long a rank that saw a failure waits to hear that others saw it too."""

_failures: collections.Counter[str] = collections.Counter()


def failure(what: str, group: dist.ProcessGroup, error: Exception) -> RuntimeError:
    """The error to raise for a collective of a group that raised `error`."""
    seen = roll_call(group, what)
    if seen is None:
        return RuntimeError(
            f"{what} failed; a rank of the group probably died, left or was too late ({error})"
        )
    silent = [str(rank) for rank, at in enumerate(seen) if at is None]
    elsewhere = [
        f"rank {rank} failed at {at}"
        for rank, at in enumerate(seen)
        if at is not None and rank != group.rank()
    ]
    news = [f"no sign of life from rank {', '.join(silent)} of the group"] if silent else []
    return RuntimeError(f"{what} failed; {'; '.join(news + elsewhere)} ({error})")


def roll_call(group: dist.ProcessGroup, what: str) -> list[str | None] | None:
    """What each rank of the group failed at; None for one that is silent, or for all if nobody can
    be asked.

    Ranks tell each other through the store that they met in. One that died tells nothing, nor does
    one that is busy elsewhere and does not know yet.
    """
    name = group.group_name
    _failures[name] += 1
    try:
        store = store_of_all_ranks()
        keys = [f"keel/failed/{name}/{_failures[name]}/{rank}" for rank in range(group.size())]
        store.set(keys[group.rank()], what)
        deadline = time.monotonic() + ROLL_CALL_S
        while not all(there := [store.check([key]) for key in keys]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return [
            store.get(key).decode() if here else None for key, here in zip(keys, there, strict=True)
        ]
    except (RuntimeError, ValueError):  # the store went with the rank that held it
        return None
