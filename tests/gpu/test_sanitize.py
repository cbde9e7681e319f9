"""The Hopper kernels below compute-sanitizer: no access outside of memory, no unknown hazard.

Racecheck follows barriers of nvcc's cuda::barrier, not the mbarriers of other compilers, so words
that are handed over by one look like races to it: also those of a kernel of twenty lines that does
nothing else (`hand_over.py`). So the hazards that it reports are held against a list of hand-overs,
each with how it is ordered.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
    pytest.mark.skipif(
        shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not in PATH"
    ),
]

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "src/keel/kernels"
START = "*_kernel"
ANYONE = "who reads"
"""Fields are read in one function, and compilers give that the lines of others that use them."""
HAND_OVERS = {
    (START, START): "Triton's own: what the first warps leave for others when these start",
    ("publish", ANYONE): "fields_full and fields_empty, which all readers arrive at",
    ("producer", ANYONE): "the same: one more of the fields, where tiles are cut",
    ("leave_tops", "left_tops"): "q_empty; the next write there is behind loads that follow",
    ("bring_numbers", "of_rows"): "q_full, do_full (cp.async); then Q_FREE or DO_FREE",
    ("add_to_dv", "add_to_dk"): "a named barrier; the next write is behind Q_FREE and q_full",
}
"""(who writes, who reads): the mbarriers that order them."""


def sanitize(
    tool: str,
    *options: str,
    script: str = "sanitize.py",
    kernels: str = "hopper",
    last: str = "backward d256 bias: right",
) -> str:
    """What the tool prints about a script, whose results must be right, the last one's as well."""
    command = ["compute-sanitizer", "--tool", tool, "--kernel-name", f"kns={kernels}"]
    run = subprocess.run(
        [*command, *options, sys.executable, str(HERE / script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    printed = run.stdout + run.stderr
    assert last in printed and "WRONG" not in printed, printed
    return printed


def function_at(place: str) -> str:
    """The function of "hopper_fwd.py:300"."""
    name, line = place.split(":")
    folder = HERE if (HERE / name).exists() else KERNELS
    tree = ast.parse((folder / name).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            if first <= int(line) <= (node.end_lineno or first):
                return START if node.name.endswith("_kernel") else node.name
    raise AssertionError(f"no function at {place}")


def hazards(printed: str) -> set[tuple[str, str]]:
    """(who writes, who reads) of all that racecheck reports, or who writes as well."""
    found, first = set(), ("", "")
    for line in printed.splitlines():
        access = re.search(r"(Read|Write) access at \S+ in (\w+\.py:\d+)", line)
        if access is None:
            continue
        kind, who = access[1], function_at(access[2])
        if "Race reported between" in line:
            first = (kind, who)
        else:
            a, b = sorted([first, (kind, who)], reverse=True)  # Write before Read
            found.add((a[1], b[1] if b[0] == "Read" else f"{b[1]}, who writes"))
    return found


def is_known(writer: str, other: str) -> bool:
    reads = not other.endswith("who writes")
    return (writer, other) in HAND_OVERS or (reads and (writer, ANYONE) in HAND_OVERS)


def test_memcheck_finds_nothing():
    assert "ERROR SUMMARY: 0 errors" in sanitize("memcheck")


def test_racecheck_reports_known_hand_overs_alone():
    printed = sanitize("racecheck", "--print-limit", "100000")
    found = hazards(printed)
    assert found, "it reports some of them always: else it did not look\n" + printed
    unknown = {pair for pair in found if not is_known(*pair)}
    assert not unknown, f"{unknown}\n{printed}"


def test_racecheck_does_not_follow_mbarriers():
    """Else the list is not needed any more."""
    printed = sanitize("racecheck", script="hand_over.py", kernels="hand_over", last="right")
    assert ("giver", "taker") in hazards(printed), printed
