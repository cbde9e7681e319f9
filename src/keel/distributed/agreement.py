"""Do all ranks mean the same? Asked before any data moves."""

from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist

from keel.distributed.keys import AttnKey

VARIABLE = "KEEL_CHECK_AGREEMENT"
"""On all ranks: "first" (default), with the first use of each key; "always", with every use, which
also finds a rank that goes back to an older key than the others; "never"."""

_agreed: weakref.WeakSet[AttnKey] = weakref.WeakSet()


def check_agreement(key: AttnKey) -> None:
    """Raises on every rank if masks, layouts or degrees differ between ranks.

    Without it they would exchange other numbers of rows than expected: a hang, or wrong results.
    """
    when = os.environ.get(VARIABLE, "first")
    if when not in ("first", "always", "never"):
        raise ValueError(f"{VARIABLE} must be 'first', 'always' or 'never', got {when!r}")
    if key.num_ranks == 1 or when == "never" or (when == "first" and key in _agreed):
        return
    group = key.group
    assert group is not None
    mine = key.fingerprint
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    numbers = torch.tensor(list(mine.values()), dtype=torch.int64, device=device)
    everyone = [torch.empty_like(numbers) for _ in range(key.num_ranks)]
    dist.all_gather(everyone, numbers, group=group)
    table = torch.stack(everyone).cpu()
    for column, name in enumerate(mine):
        others = (table[:, column] != table[0, column]).nonzero().flatten().tolist()
        if others:
            raise ValueError(
                f"ranks disagree on the {name}: rank {others[0]} has another one than rank 0 "
                f"(this is rank {key.rank}: {key!r}); every rank must make its key from the same "
                "arguments"
            )
    _agreed.add(key)
