"""Do all ranks mean the same? Asked before any data moves."""

from __future__ import annotations

import hashlib
import os
import weakref

import torch
import torch.distributed as dist

from keel._versions import backend_of
from keel.distributed.failures import failure
from keel.distributed.keys import AttnKey

VARIABLE = "KEEL_CHECK_AGREEMENT"
"""On all ranks: "first" (default), with the first use of each key and options; "always", with every
use, which also finds a rank that goes back to something older than the others; "never"."""

MOST_REMEMBERED = 4096

WIDTH = 24
"""Numbers that ranks exchange: always as many, since ranks may even be in different calls."""

_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[object, ...]]] = (
    weakref.WeakKeyDictionary()
)
"""Of each group. What is forgotten must not depend on anything but the calls of that group, or some
of its ranks would ask again and others not."""


def check_agreement(key: AttnKey, **options: object) -> None:
    """Raises on every rank if keys or the options of a call differ between ranks.

    Without it they would exchange other numbers of rows than expected, or take part in other
    collectives: a hang, or wrong results.
    """
    if key.group is not None:
        agree(key.group, key.fingerprint, options, key)


def agree(
    group: dist.ProcessGroup, numbers: dict[str, int], options: dict[str, object], source: object
) -> None:
    """Compares numbers, and options by their repr, over the ranks of a group."""
    when = os.environ.get(VARIABLE, "first")
    if when not in ("first", "always", "never"):
        raise ValueError(f"{VARIABLE} must be 'first', 'always' or 'never', got {when!r}")
    if when == "never" or group.size() == 1:
        return
    known = _agreed.setdefault(group, set())
    mine = (*numbers.values(), *options.items())
    if when == "first" and mine in known:
        return
    _compare(group, numbers | {n: _number(x) for n, x in options.items()}, options, source)
    if len(known) >= MOST_REMEMBERED:
        known.clear()
    known.add(mine)


def _compare(
    group: dist.ProcessGroup, numbers: dict[str, int], options: dict[str, object], source: object
) -> None:
    device = "cuda" if backend_of(group, torch.device("cpu")) is None else "cpu"
    row = torch.zeros(WIDTH, dtype=torch.int64)
    row[: len(numbers) + 1] = torch.tensor([_number(tuple(numbers)), *numbers.values()])
    row = row.to(device)
    everyone = [torch.empty_like(row) for _ in range(group.size())]
    try:
        dist.all_gather(everyone, row, group=group)
    except RuntimeError as error:
        what = f"comparing {', '.join(f'{n}={x!r}' for n, x in options.items())} between ranks"
        raise failure(what, group, error) from error
    table = torch.stack(everyone).cpu()
    for column, name in enumerate(["call", *numbers]):
        others = (table[:, column] != table[0, column]).nonzero().flatten().tolist()
        if others:
            here = f"{name}={options[name]!r}" if name in options else repr(source)
            here = f"one with {', '.join(options)}" if name == "call" else here
            raise ValueError(
                f"ranks disagree on the {name}: rank {others[0]} has another one than rank 0 "
                f"(on rank {group.rank()}, {here}); every rank must pass the same"
            )


def _number(value: object) -> int:
    """63 bits that name a value, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 1
