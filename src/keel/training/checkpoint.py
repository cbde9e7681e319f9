"""Checkpoints that are whole or not there, whenever the writer is killed."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LOCK = ".lock"


def save(state: dict[str, Any], path: Path) -> None:
    """Writes beside the file and renames: a reader sees the old one or the new one.

    What a killed writer leaves is a file of another name, which nobody reads and the next save
    overwrites. The data reach the disk before the name does.
    """
    beside = temporary(path)
    with open(beside, "wb") as file:
        torch.save(_canonical(state, {}), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    if os.name == "posix":  # the rename itself survives a power cut, too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _canonical(value: Any, tuples: dict[Any, Any]) -> Any:
    """Equal states become equal bytes: pickle writes an object that it meets again as a reference,
    and a state that was loaded shares other objects than one that never was."""
    if isinstance(value, dict):
        made = {_canonical(k, tuples): _canonical(x, tuples) for k, x in value.items()}
        return OrderedDict(made) if isinstance(value, OrderedDict) else made
    if isinstance(value, list):
        return [_canonical(x, tuples) for x in value]
    if isinstance(value, tuple):
        return tuples.setdefault(value, value)
    return sys.intern(value) if type(value) is str else value


def load(path: Path) -> dict[str, Any] | None:
    """The state on the CPU; None where there is none."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a broken file makes of it
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read ({reason}): start over with --fresh") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} is no checkpoint: start over with --fresh")
    return state


def temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def refuse_other_settings(found: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """A run can only go on as what it was."""
    differing = [
        f"{key} was {found.get(key)!r} and is {wanted.get(key)!r}"
        for key in dict.fromkeys([*found, *wanted])
        if found.get(key) != wanted.get(key)
    ]
    if differing:
        raise ValueError(
            f"{path} is of a run with other settings: {'; '.join(differing)}. Give it the same "
            "settings, another folder with --out, or start over with --fresh"
        )


@contextlib.contextmanager
def only_writer(folder: Path, patience: float = 30.0) -> Iterator[None]:
    """Holds the folder for this process; waits a while for one that is just ending.

    The system lets go of the lock when its holder dies, however it dies.
    """
    try:
        import fcntl
    except ImportError:  # no such locks here: runs in one folder are the user's to keep apart
        yield
        return
    with open(folder / LOCK, "w") as file:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"another run is writing to {folder}: wait for it, end it, or take another "
                        "folder with --out"
                    ) from None
                time.sleep(0.05)
        yield
