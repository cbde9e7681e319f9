"""A collective that fails: which operation it was, and which ranks nobody hears from."""

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
    silent = silent_ranks(group)
    if silent is None:
        suspects = "a rank of the group probably died, left or was too late"
    elif silent:
        plural = "s" if len(silent) > 1 else ""
        suspects = (
            f"no sign of life from rank{plural} {', '.join(map(str, silent))} of the group: died, "
            "left, or busy elsewhere"
        )
    else:
        suspects = "all ranks of the group are alive and saw a failure too: one was too late"
    return RuntimeError(f"{what} failed; {suspects} ({error})")


def silent_ranks(group: dist.ProcessGroup) -> list[int] | None:
    """Ranks of the group that do not report a failure as well; None: there is no way to ask.

    Ranks tell each other through the store that they met in; a rank that is gone tells nothing.
    """
    name = group.group_name
    _failures[name] += 1
    try:
        store = store_of_all_ranks()
        keys = [f"keel/failed/{name}/{_failures[name]}/{rank}" for rank in range(group.size())]
        store.set(keys[group.rank()], "1")
        deadline = time.monotonic() + ROLL_CALL_S
        while True:
            silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(0.05)
    except (RuntimeError, ValueError):  # the store went with the rank that held it
        return None
