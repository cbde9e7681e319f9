"""The Hopper forward for few queries and many keys, query heads packed into tiles and apart.

    python benchmarks/short_rows.py
    python benchmarks/short_rows.py --queries 1 16 --keys 65536 --heads 64:8 32:2 --dims 64 128

bf16 on a Hopper GPU; every query sees every key. Each way is captured in a CUDA graph, replayed and
checked against fp64; what is wrong, or not the same at each replay, is not timed. Ways take turns,
the median counts: `apart` is never packed, `packed` always, `chosen` what Keel does by itself. The
rate is that of keys and values, each read once. Rows are added to results/short_rows.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from exact import TOLERANCE, worst_error
from few_tiles import Patch, patched
from timing import Trial, append_csv, capture, heads, hopper_needed

import keel
from keel import masks
from keel.kernels import hopper_launch, hopper_tiles

RESULTS = Path(__file__).parent / "results"

WAYS: dict[str, list[Patch]] = {
    "apart": [(hopper_tiles, "LEAST_GAIN", float("inf"))],
    "packed": [(hopper_tiles, name, 0) for name in ("LEAST_SAVING", "LEAST_GAIN", "LONG_ROW")],
    "chosen": [],
}


@dataclass
class Row:
    """One line of the CSV."""

    tq: int
    tk: int
    hq: int
    hk: int
    d: int
    way: str
    pack: int
    tiles: int
    """Of one head, parts of them counted."""
    cut_tiles: int
    ms: float
    spread: float
    faster: float
    """Than heads that are apart."""
    gb_per_s: float
    error: float
    gpu: str = ""
    torch: str = torch.__version__
    keel: str = keel.__version__


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in fp64, one key head after the other."""
    group = q.shape[1] // k.shape[1]
    outs = []
    for head in range(k.shape[1]):
        mine = q[:, head * group : (head + 1) * group].double()
        scores = torch.einsum("qgd,kd->qgk", mine, k[:, head].double()) * q.shape[2] ** -0.5
        outs.append(torch.einsum("qgk,kd->qgd", scores.softmax(-1), v[:, head].double()))
    return torch.cat(outs, 1)


def measure(tq: int, tk: int, hq: int, hk: int, d: int, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    shapes = [(tq, hq, d), (tk, hk, d), (tk, hk, d)]
    qkv = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    mask, reference = masks.full(tq, tk), exact(*qkv)
    trials, errors, tiles = {}, {}, {}
    for way, patches in WAYS.items():

        def prepare() -> Callable[[], torch.Tensor]:
            return lambda: keel.flex_flash_attn_func(*qkv, mask, backend="hopper")[0]

        with patched(patches):
            replay, calls, out = capture(prepare)
            tiles[way] = hopper_launch._tiles_for(
                *(qkv[0], qkv[2], mask, keel.meta.Scoring(scale=1.0), 0, None)
            )
        replay()
        first = out.clone()
        replay()
        errors[way] = worst_error([out], [reference])
        if not errors[way] <= TOLERANCE or not torch.equal(first, out):
            print(f"{tq} x {tk} {way}: WRONG, {errors[way]:.2g}")
            continue
        trials[way] = Trial(replay, calls)
    for _ in range(rounds):
        for trial in trials.values():
            trial.sample()
    read = sum(x.nbytes for x in qkv[1:])
    return [
        Row(
            *(tq, tk, hq, hk, d, way, tiles[way].pack, len(tiles[way].records.tiles)),
            cut_tiles=0 if (cut := tiles[way].cut) is None else cut.num_cut,
            ms=trial.ms,
            spread=trial.spread,
            faster=trials["apart"].ms / trial.ms if "apart" in trials else float("nan"),
            gb_per_s=read / trial.ms / 1e6,
            error=errors[way],
            gpu=torch.cuda.get_device_name(),
        )
        for way, trial in trials.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--queries", nargs="+", type=int, default=[1, 16, 64, 128])
    parser.add_argument("--keys", nargs="+", type=int, default=[4096, 65536])
    parser.add_argument("--dims", nargs="+", type=int, default=[128])
    parser.add_argument("--heads", nargs="+", type=heads, default=[(64, 8)])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    hopper_needed(parser)
    for d in given.dims:
        for hq, hk in given.heads:
            for tk in given.keys:
                for tq in given.queries:
                    rows = measure(tq, tk, hq, hk, d, given.rounds)
                    for row in rows:
                        print(
                            f"{row.tq:4} x {row.tk:6} {hq:3}:{hk:<2} d {row.d:3} {row.way:7} "
                            f"{1e3 * row.ms:8.1f} us  {row.faster:5.2f} x as fast  "
                            f"{row.gb_per_s:6.0f} GB/s  ({row.pack} heads a tile, {row.tiles} "
                            f"tiles, spread {row.spread:.1%}, error {row.error:.4f})",
                            flush=True,
                        )
                    append_csv(rows, given.out / "short_rows.csv")


if __name__ == "__main__":
    main()
