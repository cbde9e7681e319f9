"""Small attentions through every kind of Hopper kernel, to be run below compute-sanitizer.

    python tests/gpu/sanitize.py          # compiles, and checks results: then others take seconds
    python tests/gpu/sanitize.py forward  # or backward, or a part of a name
    compute-sanitizer --tool memcheck --kernel-name kns=hopper python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --kernel-name kns=hopper python tests/gpu/sanitize.py

All results are compared with fp64. test_sanitize.py runs both, and knows what racecheck reports.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from keel import direct, masks, tile_parts
from keel.kernels import hopper_launch, hopper_tiles, launch
from keel.testing import Case, assert_right

BOUNDS = [0, 37, 165, 300]
MASKS = {
    "full": masks.full(150, 330),
    "documents": masks.documents(BOUNDS, causal=True),
    "few": masks.causal(5, 300),
}


@dataclass(frozen=True)
class Run:
    """One attention, forward and backward."""

    name: str
    mask: str = "documents"
    d: int = 128
    dv: int | None = None
    heads: tuple[int, int] = (4, 2)
    case: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    cut: bool = False
    pack: bool = False
    wide: bool = False
    """Three consumers."""


RUNS = [
    Run("forward whole", "full"),
    Run("forward documents"),
    Run("forward d64", d=64),
    Run("forward d64 three consumers", "full", d=64, wide=True),
    Run("forward d192x128", d=192, dv=128),
    Run("forward d256", "full", d=256),
    Run("forward softcap sink", case={"softcap": 2.0, "sink": True}),
    Run("forward cut", "full", cut=True),
    Run("forward cut d64", d=64, cut=True),
    Run("forward packed", "few", heads=(16, 2), pack=True),
    Run("forward packed cut", "few", heads=(16, 2), cut=True, pack=True),
    Run("backward margin", options={"sm_margin": 130}),
    Run("backward deterministic", options={"deterministic": True}),
    Run("backward d64 deterministic", d=64, options={"deterministic": True}),
    Run("backward d256 margin", d=256, options={"sm_margin": 130}),
    Run("backward bias", case={"bias_shape": (4, 300, 300)}, options={"backend": "auto"}),
    Run("backward alibi", case={"alibi": True}, options={"backend": "auto"}),
    Run(
        "backward d256 bias", d=256, case={"bias_shape": (1, 300, 300)}, options={"backend": "auto"}
    ),
]


@contextlib.contextmanager
def chosen_tiles(run: Run) -> Iterator[None]:
    """Tiles as the run wants them, where the planner would not choose them for so little work."""

    def counts(records: Any, *_: Any, **__: Any) -> tuple[list[int], float]:
        number = len(records.tiles)
        return [1 + n % 3 if run.cut else 1 for n in range(number)], 1.0

    def wide_tiles(mask: Any, *_: Any, **__: Any) -> hopper_tiles.Tiles:
        return hopper_tiles.Tiles(hopper_launch.best_records(mask, (128,), 192), 3)

    with contextlib.ExitStack() as stack:
        patch = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        patch(direct, "_known", direct.KnownCalls())
        patch(launch, "_recipes", {})
        if run.cut or run.pack:
            patch(tile_parts, "choose_cuts", counts)
        for name in ("LEAST_SAVING", "LEAST_GAIN", "LONG_ROW") if run.pack else ():
            patch(hopper_tiles, name, 0)
        if run.wide:
            patch(hopper_launch, "tiles_for", wide_tiles)
        hopper_tiles.few_tiles.cache_clear()
        yield
    hopper_tiles.few_tiles.cache_clear()


def main(wanted: Sequence[str]) -> int:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("a Hopper GPU (sm_90) is needed, and there is none here")
    chosen = [run for run in RUNS if not wanted or any(part in run.name for part in wanted)]
    if not chosen:
        raise SystemExit(f"no run has {wanted} in its name: {', '.join(r.name for r in RUNS)}")
    wrong = 0
    for run in chosen:
        began = time.monotonic()
        case = Case(
            **{"mask": MASKS[run.mask], "hq": run.heads[0], "hk": run.heads[1], "d": run.d},
            **{"dv": run.dv, "dtype": torch.bfloat16, "device": "cuda", **run.case},
        )
        with chosen_tiles(run):
            try:
                assert_right(case, **{"backend": "hopper", **run.options})
                verdict = "right"
            except AssertionError as problem:
                wrong += 1
                verdict = f"WRONG: {problem}"
        torch.cuda.synchronize()
        print(f"{run.name}: {verdict} ({time.monotonic() - began:.1f} s)", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
