"""The attentions of sanitize.py, by kernels whose order racecheck can follow.

    python tests/gpu/followed.py [part of a name]      # compiles, and checks results
    compute-sanitizer --tool racecheck --kernel-name kns=hopper python tests/gpu/followed.py
    ... python tests/gpu/followed.py --broken tops     # one of BROKEN: racecheck must say so

Racecheck follows mbarriers, but knows of those threads alone that arrive there themselves
(`hand_over.py` shows it). These kernels are the others line by line, but for two things:

- Each thread arrives for itself at an mbarrier where else one lane does when its whole warp is
  there, and the barriers count 32 times as many arrivals.
- Threads load row vectors and then arrive, where else cp.async brings them and arrives. Racecheck
  would hold all that these threads write for told of by that. It still does not see who tells of
  row vectors too early: TMA's bytes complete those barriers.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sanitize
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental import gluon

from keel.kernels import (
    hopper_bwd_producer,
    hopper_forms,
    hopper_places,
    hopper_producer,
    hopper_put_away,
)

LANES = 32
BY_A_LANE = ("Q_EMPTY_AT", "FIELDS_FULL_AT", "FIELDS_EMPTY_AT")
"""Barriers at which one lane arrives for its warp; at the others the producer tells how much TMA
will bring."""
ARRIVAL_OF_COPIES = r"cp\.async\.mbarrier\.arrive\.noinc\S*\s*\[([^\]]+)\];"
"""Changed in the PTX (`asm["ptx"]` has it unchanged): Gluon has no arrival of each thread."""
HAS_NUMBERS = r"\.entry\s+hopper_bwd(_wide)?_kernel\b"
THIS = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]

TOLD = "        arrive_at(ring, FIELDS_FULL, slot, form)\n        buffer"
ROW_END = "        publish(ring, slot, 1, row_end)\n"
LEFT = "        leave_tops(ring, buffer, mine, row_top, form)\n"
LAST = "        if LAST:\n            arrive_at(ring, Q_EMPTY, buffer, form)\n"
LOADED = "    stage.store(gl.load(POINTER + place, mask=there, other=0))\n"
BROKEN = {
    "fields": [
        (hopper_producer.producer, ROW_END, ""),
        (
            hopper_producer.producer,
            TOLD,
            TOLD.replace("buffer", ROW_END.strip() + "\n        buffer"),
        ),
    ],
    "tops": [(hopper_put_away.put_away, LEFT + LAST, LAST + LEFT)],
}
"""Who tells of something before it is there."""


def change(function: Any, old: str, new: str, times: int = 1) -> None:
    """Not in silence: what is not found, or compiled already, is not changed."""
    found = function.src.count(old)
    if found != times or function.hash is not None:
        raise AssertionError(
            f"{function.__name__} has {found} times and not {times} {old!r}, or is compiled "
            "already: change this file too"
        )
    # Triton's cache looks at sources, so what else is changed here must be told in one
    function._unsafe_update_src(f"{function.src.replace(old, new).rstrip()}\n    # {THIS}\n")


def each_arrives() -> None:
    change(
        hopper_places.arrive_at, "setp.eq.u32 first, lane, 0", f"setp.lt.u32 first, lane, {LANES}"
    )
    change(
        hopper_producer.producer,
        "mbarrier.arrive(one_of(ring, FIELDS_FULL, slot), count=1)",
        "arrive_at(ring, FIELDS_FULL, slot, form)",
        times=2,
    )
    hopper_producer.arrive_at = hopper_places.arrive_at
    counts = hopper_places._counts
    by_a_lane = {first + i for first in map(vars(hopper_forms).get, BY_A_LANE) for i in range(2)}

    def of_each(form: Any) -> Iterator[tuple[int, int]]:
        for number, count in counts(form):
            yield number, count * LANES if number in by_a_lane else count

    hopper_places._counts = gluon.constexpr_function(of_each)


def numbers_are_loaded() -> None:
    copied = "    copy_async(stage, POINTER + place, mask=there)\n"
    change(hopper_bwd_producer.bring_numbers, copied, LOADED)
    change(
        hopper_bwd_producer.bring_q,
        """copy_async(
            ring.offset.index(stage), inputs.terms.OFFSET + rows, mask=there)""",
        "ring.offset.index(stage).store(gl.load(inputs.terms.OFFSET + rows, mask=there, other=0))",
    )
    make_cubin = CUDABackend.make_cubin

    def plainly(self: Any, ptx: str, *args: Any, **options: Any) -> Any:
        arrival = r"mbarrier.arrive.shared::cta.b64 _, [\1];"
        ptx, found = re.subn(ARRIVAL_OF_COPIES, arrival, ptx)
        if "cp.async.mbarrier" in ptx or (re.search(HAS_NUMBERS, ptx) and not found):
            raise AssertionError("arrivals of copies look different: change this file too")
        return make_cubin(self, ptx, *args, **options)

    CUDABackend.make_cubin = plainly


if __name__ == "__main__":
    names = sys.argv[1:]
    each_arrives()
    numbers_are_loaded()
    if names[:1] == ["--broken"]:
        for place in BROKEN[names[1]]:
            change(*place)
        names = names[2:]
    sys.exit(sanitize.main(names))
