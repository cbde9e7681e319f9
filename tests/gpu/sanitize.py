"""Small attentions through every kind of Hopper kernel, to be run below compute-sanitizer.

    python tests/gpu/sanitize.py          # compiles, and checks results: then others take seconds
    python tests/gpu/sanitize.py forward  # or backward, or a part of a name
    compute-sanitizer --tool memcheck --kernel-name kns=hopper python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --kernel-name kns=hopper python tests/gpu/sanitize.py

All results are compared with fp64. test_sanitize.py runs both, and knows what racecheck reports;
`followed.py` has kernels that it can follow.
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

from keel import direct, key_order, masks, tile_parts
from keel.kernels import hopper_bwd_launch, hopper_launch, hopper_tiles, launch
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
    turns: bool = False
    """Heads take turns in the backward."""
    parts: bool = False
    """dk and dv are made in parts, of a query head each."""
    long: bool = False
    """Tiles count as long."""
    pairs: bool = False
    """Query heads share keys and values by twos."""

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        return self.cut, self.pack, self.wide


def kind_of(tiles: hopper_tiles.Tiles) -> tuple[bool, bool, bool]:
    """Whether some are cut, heads are packed, and there are three consumers."""
    return tiles.cut is not None, tiles.pack > 1, tiles.consumers == 3


RUNS = [
    Run("forward whole", "full"),
    Run("forward documents"),
    Run("forward d64", d=64),
    Run("forward d64 three consumers", "full", d=64, wide=True),
    Run("forward d192x128", d=192, dv=128),
    Run("forward d192x128 whole", "full", d=192, dv=128),
    Run("forward d256", "full", d=256),
    Run("forward d256 long tiles", "full", d=256, long=True),
    Run("forward softcap sink", case={"softcap": 2.0, "sink": True}),
    Run("forward pairs", "full", heads=(8, 2), pairs=True),
    Run("forward pairs documents", heads=(8, 2), pairs=True),
    Run("forward pairs d64 three consumers", "full", d=64, wide=True, pairs=True),
    Run("forward pairs d256", d=256, pairs=True),
    Run("forward cut", "full", cut=True),
    Run("forward cut d64", d=64, cut=True),
    Run("forward packed", "few", heads=(16, 2), pack=True),
    Run("forward packed cut", "few", heads=(16, 2), cut=True, pack=True),
    Run("backward parts", parts=True),
    Run("backward parts d64", d=64, parts=True),
    Run("backward turns", turns=True),
    Run("backward turns d64", d=64, turns=True),
    Run("backward margin", options={"sm_margin": 130}),
    Run("backward margin turns", turns=True, options={"sm_margin": 130}),
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
def chosen_tiles(run: Run) -> Iterator[list[hopper_tiles.Tiles]]:
    """Tiles as the run wants them, where the planner would not choose them for so little work;
    and those that forwards got."""
    choose, got = hopper_tiles.tiles_for, []

    def counts(records: Any, *_: Any, **__: Any) -> tuple[list[int], float]:
        return [2 + n % 2 if run.cut else 1 for n in range(len(records.tiles))], 1.0

    def noted(mask: Any, *args: Any, **options: Any) -> hopper_tiles.Tiles:
        if run.wide:
            got.append(hopper_tiles.Tiles(hopper_tiles.best_records(mask, (128,), 192), 3))
        else:
            got.append(choose(mask, *args, **options))
        return got[-1]

    patches: list[tuple[Any, str, Any]] = [
        (direct, "_known", direct.KnownCalls()),
        (launch, "_recipes", {}),
        (hopper_launch, "tiles_for", noted),
        (hopper_launch, "has_long_tiles", lambda _: run.long),
        (hopper_launch, "pays_to_pace", lambda *_: run.long),
        (hopper_launch, "can_be_paired", lambda *_: run.pairs),
    ]
    if run.pairs:
        patches.append((hopper_tiles, "are_few", lambda *_: False))  # those are cut
    if run.cut or run.pack:
        patches.append((tile_parts, "choose_cuts", counts))
    if run.pack:
        patches += [(hopper_tiles, x, 0) for x in ("LEAST_SAVING", "LEAST_GAIN", "LONG_ROW")]
    order = mock.Mock(wraps=key_order.in_order)
    patches.append((key_order, "in_order", order))
    if run.turns:
        patches.append((hopper_bwd_launch, "fastest_way", lambda *_, in_order: "together"))
    if run.turns or run.parts:
        group = run.heads[0] // run.heads[1]
        splits = group if run.parts else 1
        patches.append((hopper_bwd_launch, "_splits_for", lambda *_: splits))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        hopper_tiles.few_tiles.cache_clear()
        yield got
        assert order.called == run.turns
    hopper_tiles.few_tiles.cache_clear()


def main(wanted: Sequence[str]) -> int:
    chosen = [run for run in RUNS if not wanted or any(part in run.name for part in wanted)]
    if not chosen:
        raise SystemExit(
            f"no run has {' or '.join(wanted)} in its name: {', '.join(r.name for r in RUNS)}"
        )
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("a Hopper GPU (sm_90) is needed, and there is none here")
    wrong = 0
    for run in chosen:
        began = time.monotonic()
        case = Case(
            **{"mask": MASKS[run.mask], "hq": run.heads[0], "hk": run.heads[1], "d": run.d},
            **{"dv": run.dv, "dtype": torch.bfloat16, "device": "cuda", **run.case},
        )
        with chosen_tiles(run) as got:
            try:
                assert_right(case, **{"backend": "hopper", **run.options})
                assert all(kind_of(tiles) == run.kind for tiles in got), got
                verdict = "right"
            except AssertionError as problem:
                wrong += 1
                verdict = f"WRONG: {problem}"
        torch.cuda.synchronize()
        print(f"{run.name}: {verdict} ({time.monotonic() - began:.1f} s)", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
