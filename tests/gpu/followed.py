"""The attentions of sanitize.py, by kernels whose order racecheck can follow.

    python tests/gpu/followed.py [part of a name]      # compiles, and checks results
    compute-sanitizer --tool racecheck --kernel-name kns=hopper python tests/gpu/followed.py

Racecheck follows mbarriers, but knows of those threads alone that arrive there themselves
(`hand_over.py` shows it). These kernels are the others line by line, but for two things:

- Each thread arrives for itself at an mbarrier where else one lane does when its whole warp is
  there, and barriers count so many.
- Threads load row vectors and then arrive, where else cp.async brings them and arrives.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import sanitize
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental import gluon

from keel.kernels import hopper_bwd_producer, hopper_forms, hopper_places, hopper_producer

LANES = 32
BY_A_LANE = ("Q_EMPTY_AT", "FIELDS_FULL_AT", "FIELDS_EMPTY_AT")
"""Barriers at which one lane arrives for its warp; at the others TMA does."""
ARRIVAL_OF_COPIES = r"cp\.async\.mbarrier\.arrive\.noinc\S*\s*\[([^\]]+)\];"
"""In PTX: Triton has none of each thread."""


def change(function: Any, old: str, new: str) -> None:
    if old not in function.src:
        raise AssertionError(f"{function.__name__} has no {old!r} any more: change this file too")
    function._unsafe_update_src(function.src.replace(old, new))


def each_arrives() -> None:
    """Nothing may have been compiled before."""
    change(
        hopper_places.arrive_at, "setp.eq.u32 first, lane, 0", f"setp.lt.u32 first, lane, {LANES}"
    )
    change(
        hopper_producer.producer,
        "mbarrier.arrive(one_of(ring, FIELDS_FULL, slot), count=1)",
        "arrive_at(ring, FIELDS_FULL, slot, form)",
    )
    hopper_producer.arrive_at = hopper_places.arrive_at
    counts = hopper_places._counts
    by_a_lane = {first + i for first in map(vars(hopper_forms).get, BY_A_LANE) for i in range(2)}

    def of_each(form: Any) -> Iterator[tuple[int, int]]:
        for number, count in counts(form):
            yield number, count * LANES if number in by_a_lane else count

    hopper_places._counts = gluon.constexpr_function(of_each)


def numbers_are_loaded() -> None:
    change(
        hopper_bwd_producer.bring_numbers,
        "copy_async(stage, POINTER + place, mask=there)",
        "stage.store(gl.load(POINTER + place, mask=there, other=0))  # then a plain arrival",
    )
    change(
        hopper_bwd_producer.bring_q,
        """copy_async(
            ring.offset.index(stage), inputs.terms.OFFSET + rows, mask=there)""",
        "ring.offset.index(stage).store(gl.load(inputs.terms.OFFSET + rows, mask=there, other=0))",
    )
    make_cubin = CUDABackend.make_cubin

    def plainly(self: Any, ptx: str, *args: Any, **options: Any) -> Any:
        ptx = re.sub(ARRIVAL_OF_COPIES, r"mbarrier.arrive.shared::cta.b64 _, [\1];", ptx)
        return make_cubin(self, ptx, *args, **options)

    CUDABackend.make_cubin = plainly


if __name__ == "__main__":
    each_arrives()
    numbers_are_loaded()
    sys.exit(sanitize.main(sys.argv[1:]))
