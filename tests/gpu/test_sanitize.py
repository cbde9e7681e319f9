"""The Hopper kernels below compute-sanitizer: no access outside of memory, no unknown hazard.

Racecheck follows mbarriers, but only for threads that arrive there themselves: where one lane does
when its whole warp is there, it reports a race, also in a kernel that does nothing else
(`hand_over.py`). So it is asked twice:

- about kernels in which each thread arrives for itself (`followed.py`). All that it then reports is
  handed over by named barriers, which it reports in `hand_over.py` as well. Of row vectors it would
  report nothing: TMA's bytes complete their barriers;
- about the kernels as they are: each hazard must be on a list of hand-overs, with its order.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import signal
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
BY_NAMED_BARRIERS = {
    (START, START): "Triton's own: what the first warps leave for others when these start",
    ("add_to_dv", "add_to_dk"): "a named barrier; the next write is behind Q_FREE and q_full",
}
"""(who writes, who reads): what orders them."""
HAND_OVERS = BY_NAMED_BARRIERS | {
    ("publish", ANYONE): "fields_full and fields_empty, which all readers arrive at",
    ("producer", ANYONE): "the same: one more of the fields, where tiles are cut",
    ("leave_tops", "left_tops"): "q_empty; the next write there is behind loads that follow",
    ("bring_numbers", "of_rows"): "q_full, do_full (cp.async); then Q_FREE or DO_FREE",
}
"""And those by mbarriers."""


def sanitize(
    tool: str,
    *options: str,
    script: str = "sanitize.py",
    given: tuple[str, ...] = (),
    kernels: str = "hopper",
    last: str | None = "backward d256 bias: right",
) -> str:
    """What the tool prints about a script, whose results must be right, the last one's as well."""
    command = ["compute-sanitizer", "--tool", tool, "--kernel-name", f"kns={kernels}"]
    with subprocess.Popen(
        [*command, *options, sys.executable, str(HERE / script), *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            printed = "".join(run.communicate(timeout=500))
        finally:  # a kernel that hangs stays on the GPU when the tool alone has gone
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    assert last is None or (last in printed and "WRONG" not in printed), printed
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


def test_racecheck_finds_no_race_where_it_can_follow():
    printed = sanitize("racecheck", "--print-limit", "100000", script="followed.py")
    assert hazards(printed) <= BY_NAMED_BARRIERS.keys(), printed


@pytest.mark.parametrize(
    ("broken", "name", "writer"),
    [
        ("fields", "forward documents", "publish"),
        ("tops", "forward documents", "leave_tops"),
    ],
)
def test_racecheck_finds_what_is_told_of_too_early(broken: str, name: str, writer: str):
    given = ("--broken", broken, name)
    printed = sanitize("racecheck", script="followed.py", given=given, last=None)
    assert writer in {who for who, _ in hazards(printed)}, printed


def test_racecheck_reports_known_hand_overs_alone():
    printed = sanitize("racecheck", "--print-limit", "100000")
    found = hazards(printed)
    assert found, "it reports some of them always: else it did not look\n" + printed
    unknown = {pair for pair in found if not is_known(*pair)}
    assert not unknown, f"{unknown}\n{printed}"


@pytest.mark.parametrize(("how", "reported"), [("each", False), ("lane", True), ("named", True)])
def test_racecheck_reports_hand_overs_that_are_in_order(how: str, reported: bool):
    """If none is reported one day, neither lists nor `followed.py` are needed any more."""
    printed = sanitize(
        "racecheck", script="hand_over.py", given=(how,), kernels="hand_over", last="right"
    )
    assert (("giver", "taker") in hazards(printed)) == reported, printed
