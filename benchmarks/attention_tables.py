"""Times again all that docs/performance.md shows of attention, one run for each of its tables.

    python benchmarks/attention_tables.py --list                         # their names and commands
    python benchmarks/attention_tables.py --fa3 .peers                   # all
    python benchmarks/attention_tables.py forward-plain backward-64 --fa3 .peers

After a change of the kernels: figures of a table then have one age, and none is left behind. Each
run is one of attention.py, which says what it does and adds its rows to attention.csv; pictures are
drawn by its --table. One that fails is named at the end, behind the others.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import attention

TO_32K = "1024 2048 4096 8192 16384 32768"
MAIN = "--timing graph --heads 64:8 --dims 128"
PLAIN = "--masks full causal --peers fa3 cudnn flex --rounds 5"
DOCUMENTS = "--masks vfull vcausal swa --peers fa3 flex --rounds 5"
TINY = "--masks tiny --peers fa3 flex --rounds 5"
BLOCKS = "--masks blockcausal --peers fa3-loop flex --rounds 3"
VIDEO = f"--masks video --lengths {TO_32K} --peers fa3-loop flex --rounds 3"

# the bars ask for the best peer of all in one run; beside them, what FlexAttention is not asked
TABLES = {
    "forward-plain": f"--forward {MAIN} {PLAIN}",
    "forward-documents": f"--forward {MAIN} {DOCUMENTS}",
    "forward-tiny": f"--forward {MAIN} {TINY}",
    "forward-blocks": f"--forward {MAIN} {BLOCKS}",
    "forward-video": f"--forward {MAIN} {VIDEO}",
    "forward-64": f"--forward --timing graph --heads 64:8 --dims 64 {PLAIN}",
    "forward-256": f"--forward --timing graph --heads 64:8 --dims 256 {PLAIN}",
    "forward-eager": "--forward --timing eager --heads 64:8 --dims 64 128 256 --lengths 2048 4096 "
    "--masks full causal --peers fa3 cudnn --rounds 5",
    "backward-plain": f"--backward {MAIN} {PLAIN}",
    "backward-documents": f"--backward {MAIN} {DOCUMENTS}",
    "backward-tiny": f"--backward {MAIN} {TINY}",
    "backward-blocks": f"--backward {MAIN} {BLOCKS}",
    "backward-video": f"--backward {MAIN} {VIDEO}",
    "backward-64": f"--backward --timing graph --heads 32:32 --dims 64 {PLAIN}",
    "backward-256": f"--backward --timing graph --heads 16:16 --dims 256 {PLAIN}",
    "other-forward": "--forward --timing graph --heads 64:8 --dims 64 256 "
    "--lengths 2048 4096 8192 16384 32768 --masks vfull vcausal swa --peers fa3 --rounds 5",
    "forward-256-each": "--forward --timing graph --heads 16:16 --dims 256 "
    f"--lengths 4096 8192 16384 32768 {PLAIN}",
    "forward-96": f"--forward --timing graph --heads 32:32 --dims 96 --lengths 4096 16384 {PLAIN}",
    "latent": "--timing graph --heads 32:32 --dims 192/128 --lengths 2048 4096 8192 16384 "
    "--masks full causal vfull vcausal swa --peers fa3 --rounds 5",
}
"""What is asked of attention.py."""


def arguments_of(table: str, given: argparse.Namespace) -> list[str]:
    where = ["--fa3", str(given.fa3)] if given.fa3 else []
    where += ["--out", str(given.out), "--no-plots"]
    return [*shlex.split(TABLES[table]), "--seconds", str(given.seconds), *where]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("tables", nargs="*", metavar="TABLE", help="of --list; default: all")
    made.add_argument("--fa3", type=Path, help="folder with fa3_peer.py and fa3.so")
    made.add_argument("--out", type=Path, default=attention.RESULTS)
    made.add_argument("--seconds", type=float, default=400.0, help="each ends within about this")
    made.add_argument("--list", action="store_true", help="what would run, no run")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    tables = given.tables or list(TABLES)
    if unknown := [name for name in tables if name not in TABLES]:
        raise SystemExit(f"unknown table {unknown[0]!r}: one of {', '.join(TABLES)}")
    if given.list:
        for name in tables:
            print(f"{name}\n    python benchmarks/attention.py {TABLES[name]}")
        return 0
    failed = []
    for name in tables:
        print(f"\n== {name}", flush=True)
        try:
            if attention.main(arguments_of(name, given)):
                failed.append(name)
        except RuntimeError as problem:  # no memory, say; without a GPU all would fail, and it ends
            print(f"{name} failed: {problem}", file=sys.stderr, flush=True)
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
