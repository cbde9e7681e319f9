"""Layouts for context parallelism: balance of work against rows that travel. No GPU needed.

    python benchmarks/balance.py                          # all masks on 8 to 128 ranks
    python benchmarks/balance.py --ranks 8 --masks packed causal

16,384 tokens a rank, units of 128. Work is counted in tiles of 128 x 128; rows are keys that a
rank's queries see and that it does not hold (a row is one key and one value of all heads). The
time is that of a new mask, the best of several calls. "of peer" divides by the rows of
MagiAttention's own dispatch (chunks of 2,048), measured on the same documents ("short": on other
ones of the same lengths). "of Ulysses" divides the rows of the rank that receives the most by what
a rank receives there (64:8 heads of dim 128), where 64 heads suffice; "least" is below that
quotient of every layout whose work is within 1.03 of the mean, where that is known: for full
documents, and for single ones. Results go to benchmarks/results/balance.csv and .png.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from attention_masks import WINDOW, document_bounds
from timing import write_csv

import keel
from keel import masks
from keel.distributed.balance import balanced
from keel.distributed.cost import CostModel, other_schemes
from keel.distributed.layout import Layout, contiguous, zigzag
from keel.distributed.work import least_seen, rows_received, tile_work, work_of_ranks
from keel.masks import AttnMask

RESULTS = Path(__file__).parent / "results"
PER_RANK = 16384
UNIT = 128
PEER_ROWS = {
    ("packed", 8): 364_697,
    ("packed", 16): 1_576_215,
    ("packed", 32): 6_510_795,
    ("packed", 64): 26_031_582,
    ("causal", 8): 860_160,
    ("causal", 16): 3_686_400,
    ("causal", 32): 15_237_120,
    ("causal", 64): 61_931_520,
    ("short", 64): 283_091,
}
STRATEGIES: dict[str, Callable[[AttnMask, int], Layout]] = {
    "contiguous": lambda mask, num_ranks: contiguous(mask.tq, num_ranks),
    "zigzag": lambda mask, num_ranks: zigzag(mask.tq, num_ranks),
    "balanced": lambda mask, num_ranks: balanced(mask, num_ranks, unit=UNIT),
}


def packed_bounds(tokens: int) -> list[int]:
    """19 documents like those of `document_bounds`, from the generator the peer was given."""
    draws, bounds = torch.Generator().manual_seed(0), [0]
    while bounds[-1] < tokens:
        length = tokens / 24 * math.exp(1.2 * float(torch.randn(1, generator=draws)))
        bounds.append(min(tokens, bounds[-1] + int(min(max(length, 16), tokens / 4))))
    return bounds


def short_bounds(tokens: int) -> list[int]:
    """Documents of 524 to 1,572 tokens: 1,000 in a million."""
    ends = np.random.default_rng(0).uniform(0.5, 1.5, round(tokens / 1048.576)).cumsum()
    return [0, *(ends / ends[-1] * tokens).round().astype(int).tolist()]


MASKS: dict[str, Callable[[int], AttnMask]] = {
    "packed": lambda tokens: masks.documents(packed_bounds(tokens), causal=True),
    "lognormal": lambda tokens: masks.documents(document_bounds(tokens), causal=True),
    "short": lambda tokens: masks.documents(short_bounds(tokens), causal=True),
    "causal": masks.causal,
    "window": lambda tokens: masks.sliding_window(tokens, left=WINDOW, right=0),
    "full": masks.full,
    "block causal": lambda tokens: masks.block_causal(4096, packed_bounds(tokens)),
    "full documents": lambda tokens: masks.documents(packed_bounds(tokens)),
}


@dataclass
class Row:
    """One line of the CSV."""

    mask: str
    num_ranks: int
    tokens: int
    strategy: str
    imbalance: float
    """Largest over mean tiles of a rank."""
    spread: int
    """Most less fewest tokens of a rank."""
    rows_total: int
    rows_max: int
    pieces: int
    ms: float
    of_peer: float
    of_ulysses: float
    least_of_ulysses: float
    keel: str = keel.__version__
    numpy: str = np.__version__
    torch: str = torch.__version__


def measure(name: str, num_ranks: int, strategy: str, repeats: int) -> Row:
    mask = MASKS[name](PER_RANK * num_ranks)
    times = []
    for _ in range(repeats):
        fresh = AttnMask(mask.array, *mask.shape)  # nothing remembered
        tile_work.cache_clear()
        start = time.perf_counter()
        layout = STRATEGIES[strategy](fresh, num_ranks)
        times.append((time.perf_counter() - start) * 1e3)
    work, rows = work_of_ranks(mask, layout, UNIT), rows_received(mask, layout)
    return Row(
        *(name, num_ranks, mask.tq, strategy),
        imbalance=float(work.max() / work.mean()),
        spread=int(layout.rows.max() - layout.rows.min()),
        rows_total=int(rows.sum()),
        rows_max=int(rows.max()),
        pieces=len(layout.starts),
        ms=min(times),
        of_peer=int(rows.sum()) / PEER_ROWS.get((name, num_ranks), math.nan),
        of_ulysses=int(rows.max()) / ulysses_rows(mask, num_ranks),
        least_of_ulysses=least_rows(name, mask.tq, num_ranks) / ulysses_rows(mask, num_ranks),
    )


def ulysses_rows(mask: AttnMask, num_ranks: int) -> float:
    """What a rank receives there, in rows of keys and values."""
    model = CostModel()
    if num_ranks > model.num_heads:
        return math.nan
    found = next(x for x in other_schemes(mask, num_ranks, model) if x.name == "ulysses")
    return found.max_bytes / model.row_bytes


def least_rows(name: str, tokens: int, num_ranks: int) -> float:
    """Rows that the busiest rank receives in every layout with equal tokens and work."""
    if name in ("full", "causal"):  # somebody holds the last token
        return tokens - tokens / num_ranks
    if name != "full documents":
        return math.nan
    lengths = np.diff(packed_bounds(tokens))
    area = lengths.astype(float) ** 2
    most = 1.03 * float(area.sum()) / tokens
    return least_seen(lengths.astype(float), area, lengths, most) - tokens / num_ranks


def show(row: Row) -> None:
    quotients = " ".join(
        f"{x:10.3f}" if math.isfinite(x) else f"{'-':>10s}"
        for x in (row.of_peer, row.of_ulysses, row.least_of_ulysses)
    )
    print(
        f"{row.mask:14s} {row.num_ranks:5d} {row.strategy:10s} {row.imbalance:9.4f} "
        f"{row.spread:6d} {row.rows_total:13,d} {row.rows_max:11,d} {row.pieces:7d} "
        f"{row.ms:8.2f} {quotients}",
        flush=True,
    )


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.mask for row in rows))
    lines = -(-len(names) // 4)
    figure, axes = plt.subplots(
        lines, 4, figsize=(16, 3.6 * lines), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes.flat, names, strict=False):
        for strategy, marker in zip(STRATEGIES, "sd*", strict=True):
            found = [r for r in rows if (r.mask, r.strategy) == (name, strategy)]
            x, y = [max(r.rows_total, 1) for r in found], [r.imbalance for r in found]
            axis.plot(x, y, marker=marker, label=strategy, markersize=9, alpha=0.8)
            for r, place in zip(found, zip(x, y, strict=True), strict=True):
                axis.annotate(f"{r.num_ranks}", place, (4, 5), textcoords="offset points")
        axis.axhline(1.03, color="gray", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", title=name, xlabel="rows received, all ranks")
        axis.set_ylim(0.98, max(1.05, axis.get_ylim()[1]))
        axis.set_ylabel("largest / mean work")
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="upper right", ncols=3)
    title = f"{PER_RANK} tokens a rank; numbers are ranks; down and left is better"
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--masks", nargs="+", choices=list(MASKS), default=list(MASKS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    print(
        f"{'mask':14s} {'ranks':>5s} {'strategy':10s} {'max/mean':>9s} {'spread':>6s} "
        f"{'rows':>13s} {'rows of one':>11s} {'pieces':>7s} {'ms':>8s} "
        f"{'of peer':>10s} {'of Ulysses':>10s} {'least':>10s}"
    )
    rows = []
    for name in args.masks:
        for num_ranks in args.ranks:
            for strategy in STRATEGIES:
                rows.append(measure(name, num_ranks, strategy, args.repeats))
                show(rows[-1])
    write_csv(rows, args.out / "balance.csv")
    plot(rows, args.out / "balance.png")


if __name__ == "__main__":
    main()
