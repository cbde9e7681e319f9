"""The Hopper forward where tiles are few: the cheapest ones, those done first, and cut ones.

    python benchmarks/few_tiles.py --heads 8:8 16:16 --lengths 512 1024 2048
    python benchmarks/few_tiles.py --heads 64:8 --lengths 1024 4096 --masks swa vcausal tiny

bf16 on a Hopper GPU. Each way is captured in a CUDA graph, replayed and checked against fp64; what
is wrong, or not the same at each replay, is not timed. Ways take turns, the median counts. `64` and
`128` are the cheapest tiles with blocks of so many keys. Rows are added to results/few_tiles.csv.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from attention_masks import MASKS, Problem
from exact import TOLERANCE, Exact
from timing import Trial, append_csv, capture, heads, hopper_needed

import keel
from keel import direct, tile_parts
from keel.kernels import hopper_launch, hopper_tiles, launch

RESULTS = Path(__file__).parent / "results"

Patch = tuple[Any, str, Any]
CHEAPEST: Patch = (hopper_tiles, "are_few", lambda *_: False)
WAYS: dict[str, list[Patch]] = {
    "cheapest": [CHEAPEST],
    "whole": [(tile_parts, "WORTH_IT", float("inf"))],
    "chosen": [],
    "64": [CHEAPEST, (hopper_launch, "block_ns", lambda *_: (64,))],
    "128": [CHEAPEST, (hopper_launch, "block_ns", lambda *_: (128,))],
}


@dataclass
class Row:
    """One line of the CSV."""

    mask: str
    tokens: int
    hq: int
    hk: int
    d: int
    way: str
    ms: float
    spread: float
    faster: float
    """Than the cheapest tiles."""
    cut_tiles: int
    error: float
    gpu: str = ""
    torch: str = torch.__version__
    keel: str = keel.__version__


@contextlib.contextmanager
def patched(patches: list[Patch]) -> Iterator[None]:
    """As if Keel had been made like this; nothing is remembered from before, or after."""
    remembered = (direct._known, launch._recipes)
    with contextlib.ExitStack() as stack:
        for where, name, value in patches:
            stack.enter_context(mock.patch.object(where, name, value))
        for stage in ("before", "after"):
            for known in remembered:
                known.clear()
            hopper_tiles.few_tiles.cache_clear()
            if stage == "before":
                yield


def measure(problem: Problem, hq: int, hk: int, d: int, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    shapes = [(problem.tokens, heads, d) for heads in (hq, hk, hk)]
    qkv = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    exact = Exact(problem, qkv, None, key_head=hk - 1)
    trials, errors, cut_tiles = {}, {}, {}
    for way, patches in WAYS.items():

        def prepare() -> Callable[[], torch.Tensor]:
            return lambda: keel.flex_flash_attn_func(*qkv, problem.mask, backend="hopper")[0]

        with patched(patches):
            replay, calls, out = capture(prepare)
            tiles = hopper_launch._tiles_for(
                *(qkv[0], qkv[2], problem.mask, keel.meta.Scoring(scale=1.0), 0, None)
            )
        cut_tiles[way] = 0 if tiles.cut is None else tiles.cut.num_cut
        replay()
        first = out.clone()
        replay()
        errors[way] = exact.error("forward", [out])
        if errors[way] > TOLERANCE or not torch.equal(first, out):
            print(f"{problem.name} {problem.tokens} {way}: WRONG, {errors[way]:.2g}")
            continue
        trials[way] = Trial(replay, calls)
    for _ in range(rounds):
        for trial in trials.values():
            trial.sample()
    nan = float("nan")
    return [
        Row(
            *(problem.name, problem.tokens, hq, hk, d, way, trial.ms, trial.spread),
            faster=trials["cheapest"].ms / trial.ms if "cheapest" in trials else nan,
            cut_tiles=cut_tiles[way],
            error=errors[way],
            gpu=torch.cuda.get_device_name(),
        )
        for way, trial in trials.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--masks", nargs="+", choices=MASKS, default=["full", "causal", "vfull", "vcausal"]
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048])
    parser.add_argument("--dims", nargs="+", type=int, default=[128])
    parser.add_argument("--heads", nargs="+", type=heads, default=[(8, 8), (16, 16)])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    hopper_needed(parser)
    for d in given.dims:
        for hq, hk in given.heads:
            for tokens in given.lengths:
                for name in given.masks:
                    rows = measure(MASKS[name](tokens), hq, hk, d, given.rounds)
                    for row in rows:
                        print(
                            f"{row.mask:8} {row.tokens:6} {hq:3}:{hk:<2} d {row.d:3} {row.way:9} "
                            f"{1e3 * row.ms:8.1f} us  {row.faster:5.2f} x as fast  "
                            f"({row.cut_tiles} cut, spread {row.spread:.1%}, "
                            f"error {row.error:.4f})",
                            flush=True,
                        )
                    append_csv(rows, given.out / "few_tiles.csv")


if __name__ == "__main__":
    main()
