"""A table of what `one_call.py` did below ncu: Keel beside a peer, all kernels of a call together.

    ncu --profile-from-start off --page raw --csv --section SpeedOfLight --section WarpStateStats \
        --section ComputeWorkloadAnalysis --section SchedulerStats --metrics $(python \
        benchmarks/profile_table.py --metrics) python benchmarks/one_call.py CELL ... > raw.csv
    python benchmarks/profile_table.py raw.csv

Which kernels are whose follows from their order and names. Rows are added to
benchmarks/results/profile.csv.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from timing import append_csv

import keel

HERE = Path(__file__).parent
KERNELS = Path(keel.__file__).parent / "kernels"
CLOCKS = "gpc__cycles_elapsed.max"
SUMS = {
    "clocks": CLOCKS,
    "active_clocks": "sm__cycles_active.avg",
    "instructions": "smsp__inst_executed.sum",
    "icache_requests": "sm__icc_requests.sum",
    "icache_misses": "sm__icc_requests_lookup_miss.sum",
}
"""Column of the CSV: metric, added up over the kernels of a call; and"""
MEANS = {
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "no_instruction": "smsp__average_warps_issue_stalled_no_instruction_per_issue_active.ratio",
    "at_barriers": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "for_data": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "shared_pct": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "exponentials_pct": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "issue_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}
"""those of which the mean counts, each kernel for as long as it takes."""
ASKED = ("instructions", "icache_requests", "icache_misses")
"""No section has these."""
GPU = "device__attribute_display_name"

Kernel = dict[str, str]


@dataclass
class Row:
    """One line of the CSV: all kernels of one call."""

    cell: str
    who: str
    kernels: int
    clocks: int
    active_clocks: int
    instructions: int
    icache_requests: int
    icache_misses: int
    tensor_pct: float
    no_instruction: float
    at_barriers: float
    for_data: float
    shared_pct: float
    l2_pct: float
    exponentials_pct: float
    issue_pct: float
    gpu: str
    torch: str
    triton: str


def read(path: Path) -> list[Row]:
    """Rows of Keel and of the peer in turn, from what ncu and the program below it printed."""
    if not path.is_file():
        raise SystemExit(f"{path} is no file: have ncu print to it, see {Path(__file__).name}")
    lines = path.read_text(errors="replace").splitlines()
    cells = [m for x in lines if (m := re.match(r"(.+): keel, then (\S+); they differ", x))]
    kernels = [x for x in csv.DictReader(x for x in lines if x.startswith('"')) if x.get("ID")]
    if not cells or not kernels:
        raise SystemExit(f"{path} has no cells of one_call.py or no kernels of ncu's raw page")
    if missing := [m for m in (*SUMS.values(), *MEANS.values(), GPU) if m not in kernels[0]]:
        raise SystemExit(
            f"{path} lacks {', '.join(missing)}: call ncu with the sections and metrics that "
            f"{Path(__file__).name} begins with"
        )
    peer = cells[0][2]
    calls = list(calls_of(kernels, len(cells), peer))
    if len(calls) != 2 * len(cells):
        raise SystemExit(f"{path}: {len(cells)} cells, but kernels of {len(calls)} calls")
    versions = next((x for x in lines if x.startswith("torch ")), "torch , triton ")
    torch, triton = re.findall(r"\w+ ([^,\s]*)", versions)
    names = [(cell[1], who) for cell in cells for who in ("keel", peer)]
    return [row(*name, call, torch, triton) for name, call in zip(names, calls, strict=True)]


def calls_of(kernels: list[Kernel], cells: int, peer: str) -> Iterator[list[Kernel]]:
    """Kernels of a call after the other."""
    if peer.startswith("keel"):  # names do not tell, but both launch as many
        each = max(1, len(kernels) // (2 * cells))
        yield from (kernels[at : at + each] for at in range(0, len(kernels), each))
        return
    source = "".join(path.read_text() for path in KERNELS.glob("*.py"))
    own = set(re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE))
    for _, call in itertools.groupby(kernels, key=lambda x: x["Kernel Name"] in own):
        yield list(call)


def row(cell: str, who: str, call: list[Kernel], torch: str, triton: str) -> Row:
    def numbers(metric: str) -> list[float]:
        try:
            return [float(kernel[metric].replace(",", "")) for kernel in call]
        except ValueError as error:
            raise SystemExit(
                f"{metric} of {cell}, {who}, is no number ({error}): this GPU may not count it"
            ) from None

    clocks = numbers(CLOCKS)
    sums = {name: round(sum(numbers(metric))) for name, metric in SUMS.items()}
    means = {
        name: sum(x * n for x, n in zip(numbers(metric), clocks, strict=True)) / sum(clocks)
        for name, metric in MEANS.items()
    }
    return Row(cell, who, len(call), **sums, **means, gpu=call[0][GPU], torch=torch, triton=triton)


def table(rows: Sequence[Row]) -> str:
    """Markdown, Keel / the peer."""
    head = [
        *("cell", "clocks", "tensor pipe busy", "instructions", "without an instruction"),
        *("instruction cache misses", "idle SMs", "shared memory", "L2"),
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for own, other in zip(rows[::2], rows[1::2], strict=True):

        def both(show: str, of: Sequence[float], end: str = "") -> str:
            return " / ".join(format(x, show) for x in of) + end

        pair = (own, other)
        misses = [100 * x.icache_misses / x.icache_requests for x in pair]
        idle = [100 * (1 - x.active_clocks / x.clocks) for x in pair]
        fields = [
            own.cell,
            format(own.clocks / other.clocks, ".3f"),
            both(".1f", [x.tensor_pct for x in pair], " %"),
            format(own.instructions / other.instructions, ".2f"),
            both(".2f", [x.no_instruction for x in pair]),
            both(".1f", misses, " %"),
            both(".1f", idle, " %"),
            both(".0f", [x.shared_pct for x in pair], " %"),
            both(".0f", [x.l2_pct for x in pair], " %"),
        ]
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="raw.csv")
    parser.add_argument("--metrics", action="store_true", help="print what ncu has to be asked for")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args(arguments)
    if args.metrics:
        print(",".join(SUMS[name] for name in ASKED))
    elif not args.files:
        parser.error("no file: what ncu printed, see above")
    for path in args.files:
        rows = read(path)
        print(table(rows))
        append_csv(rows, args.out / "profile.csv")


if __name__ == "__main__":
    main()
