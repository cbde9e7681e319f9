"""Compiles a few of the kernels that racecheck is asked about (gpu/followed.py), without a GPU.

python tests/compile_followed.py    # a line of JSON for each
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from compile_hopper import compile_form
from compile_hopper_bwd import FEW, as_variant, compile_variant

from keel.kernels.hopper_launch import choose_form

sys.path.append(str(Path(__file__).parent / "gpu"))
import followed

BACKWARD = {"narrow": FEW[0], "wide": FEW[7], "offset": FEW[14]}


def counts(compiled: Any) -> list[int]:
    """How many arrive at mbarriers."""
    found = re.findall(r"mbarrier\.init\S* \[[^\]]*\], (\d+);", compiled.asm["ptx"])
    return sorted(set(map(int, found)))


def main() -> None:
    followed.each_arrives()
    followed.numbers_are_loaded()
    for place in (place for places in followed.BROKEN.values() for place in places):
        followed.change(*place)  # they must be found, and compile
    form = choose_form(128, 128, 128, out_matches=True, want_max=True, cuts=True)
    compiled = {"forward": compile_form(form)}
    compiled |= {name: compile_variant(as_variant(*x)) for name, x in BACKWARD.items()}
    for name, kernel in compiled.items():
        print(json.dumps({"kernel": name, "counts": counts(kernel)}), flush=True)


if __name__ == "__main__":
    main()
