"""Dictionaries that do not grow for ever, and that threads share without locks."""

from __future__ import annotations

from typing import Any


def make_room(kept: dict[Any, Any], limit: int) -> None:
    """Drops the oldest entries until there is room for one more below `limit`.

    >>> kept = {"a": 1, "b": 2, "c": 3}
    >>> make_room(kept, 3)
    >>> kept
    {'b': 2, 'c': 3}
    """
    while len(kept) >= limit:
        try:
            kept.pop(next(iter(kept)), None)
        except (RuntimeError, StopIteration):  # another thread was at it: look again
            continue
