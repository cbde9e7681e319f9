"""Writes docs/results.md from the CSV files of benchmarks/results. Nobody types figures there.

    python benchmarks/results_page.py                        # after new rows
    python benchmarks/results_page.py --check                # exit status 1 if the page is old
    python benchmarks/results_page.py --results DIR --page DIR/results.md

Each section is there if its CSV is. Rows say on what they were measured, and so does the page.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attention_report
import max_logits
import muon
import softmax
from attention_report import Shape

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "results.md"
Line = dict[str, str]


def make_page(results: Path, page: Path) -> str:
    """The text of the page; links are relative to where it will lie."""
    parts = [
        "# Results",
        "Made by `python benchmarks/results_page.py` from the CSV files that are linked below; not "
        "edited by hand. Ratios are made inside of one run, of results that were checked before "
        "they were timed. What a library could not "
        "do stands in the place of its figure.",
    ]
    for name, section in SECTIONS.items():
        path = results / name
        if path.exists() and (lines := _read(path)):
            parts.append(section(path, lines, page))
            parts.append(f"All rows: {_link(name, path, page)}.")
    return "\n\n".join(parts) + "\n"


def attention_section(path: Path, lines: Sequence[Line], page: Path) -> str:
    rows = attention_report.read_rows(path)
    parts = [
        "## Attention",
        "TFLOP/s (4 · area · hq · d forward, 2.5 times that backward), forward / backward. `graph` "
        "is kernel time, replayed from a CUDA graph, `eager` that of calls as programs make them; "
        "`as graph` marks calls so long that both are the same. The roof is what a large product "
        "and a large copy of the same run allow. `v` means packed documents, `swa` a causal window "
        "of 1024, `tiny` documents of 32 to 128 tokens, `video` chunks that see four chunks back. "
        "A cell is of one run: of the newest of each peer, the one where a peer comes off best.",
    ]
    for shape in sorted({Shape.of(row) for row in rows}):
        own = [row for row in rows if Shape.of(row) == shape]
        found = attention_report.latest(own)
        if not found:
            continue
        used = [row for providers in found.values() for row in providers.values()]
        parts += [f"### {shape}", _measured_on([vars(row) for row in used])]
        if commands := sorted({row.command for row in used} - {""}):
            parts.append("\n".join(f"`{command}`" for command in commands))
        parts.append(attention_report.table(own))
        if any(attention_report.ratio(providers) for providers in found.values()):
            parts.append(f"```text\n{attention_report.ratio_grid(own)}\n```")
        runs = {row.run for row in used}
        if why := attention_report.reasons(row for row in own if row.run in runs):
            parts.append("\n".join(f"- {line}" for line in why))
        parts += _pictures(path.parent, [shape.file_name], page)
    return "\n\n".join(parts)


def max_logits_section(path: Path, lines: Sequence[Line], page: Path) -> str:
    rows = list(max_logits.latest(max_logits.read_rows(path)).values())
    return "\n\n".join(
        [
            "## Max logits",
            "What `return_max_logits` adds to the forward's kernel time: the median of paired runs "
            "and the 95 % interval of that median.",
            _measured_on([vars(row) for row in rows]),
            max_logits.table(rows),
            *_pictures(path.parent, ["max_logits.png"], page),
        ]
    )


def softmax_section(path: Path, lines: Sequence[Line], page: Path) -> str:
    rows = softmax.read_rows(path)
    classic = softmax.classic_table(rows)
    shown = [classic] if classic.count("\n") > 1 else []
    shape = "x".join(map(str, softmax.CLASSIC))
    return "\n\n".join(
        [
            "## Fused softmax",
            _measured_on(lines),
            *shown,
            "Keel's rate by length, as a part of the copy rate, forward / backward:",
            _softmax_rates([row for row in rows if row.shape != shape]),
            *_pictures(path.parent, ["softmax.png"], page),
        ]
    )


def _softmax_rates(rows: Sequence[softmax.Row]) -> str:
    ours = {(int(r.sk), r.kind, r.direction): r.rate for r in rows if r.provider == "keel"}
    kinds = [kind for kind in softmax.KINDS if any(key[1] == kind for key in ours)]
    body = []
    for columns in sorted({key[0] for key in ours}):
        cells = [str(columns)]
        for kind in kinds:
            both = [ours.get((columns, kind, d)) for d in ("forward", "backward")]
            cells.append(" / ".join("–" if x is None else f"{x:.2f}" for x in both))
        body.append(cells)
    return _table(["columns", *kinds], body)


def between_section(path: Path, lines: Sequence[Line], page: Path) -> str:
    ours = [row for row in lines if row["provider"] == "keel"]
    body = []
    for kind, direction in dict.fromkeys((row["kind"], row["direction"]) for row in ours):
        rates = [
            float(row["rate"])
            for row in ours
            if (row["kind"], row["direction"]) == (kind, direction)
        ]
        figures = (min(rates), statistics.median(rates), max(rates))
        body.append([kind, direction, str(len(rates)), *(f"{x:.2f}" for x in figures)])
    head = ["softmax", "direction", "lengths", "least", "median", "most"]
    return "\n\n".join(
        [
            "## Fused softmax between powers of two",
            _measured_on(lines),
            "Keel's rate as a part of the copy rate:",
            _table(head, body),
        ]
    )


def muon_section(title: str) -> Callable[[Path, Sequence[Line], Path], str]:
    def section(path: Path, lines: Sequence[Line], page: Path) -> str:
        pictures = _pictures(path.parent, [f"{path.stem}.png"], page)
        table = muon.table(muon.read_rows(path))
        return "\n\n".join([f"## {title}", _measured_on(lines), table, *pictures])

    return section


def plain_section(
    title: str, columns: Sequence[str], *, named_by: Sequence[str] = ()
) -> Callable[[Path, Sequence[Line], Path], str]:
    """The rows of a short CSV, of these columns; where some of them say what a row is of, only the
    newest of each."""

    def section(path: Path, lines: Sequence[Line], page: Path) -> str:
        kept = [c for c in columns if c in lines[0]]
        if named_by:
            newest = {tuple(row[c] for c in named_by): row for row in lines}
            lines = list(newest.values())
        body = [[row[c] for c in kept] for row in lines]
        return "\n\n".join([f"## {title}", _measured_on(lines), _table(kept, body)])

    return section


def balance_section(path: Path, lines: Sequence[Line], page: Path) -> str:
    body = [
        [row["mask"], row["num_ranks"], row["imbalance"], row["rows_max"], row["rows_total"]]
        + [_quotient(row[c]) for c in ("of_peer", "of_ulysses", "least_of_ulysses")]
        for row in lines
        if row["strategy"] == "balanced"
    ]
    head = ["mask", "ranks", "largest / mean work", "rows of one rank", "rows of all"]
    head += ["of MagiAttention's", "of Ulysses", "least possible"]
    return "\n\n".join(
        [
            "## Layouts for context parallelism",
            "The solver's; rows are keys that a rank sees and does not hold.",
            _measured_on(lines),
            _table(head, body),
            *_pictures(path.parent, ["balance.png"], page),
        ]
    )


def overlap_section(path: Path, lines: Sequence[Line], page: Path) -> str:
    body = []
    for scenario, grid in dict.fromkeys((row["scenario"], row["grid"]) for row in lines):
        own = [row for row in lines if (row["scenario"], row["grid"]) == (scenario, grid)]
        shares = [float(row["overlap"]) for row in own if row["overlap"]]
        figures = (min(shares), statistics.median(shares), max(shares)) if shares else ()
        errors = sum(bool(row["error"]) for row in own)
        body.append(
            [
                scenario,
                grid,
                str(len(own)),
                *(f"{x:.1%}" for x in figures or [0.0] * 3),
                str(errors),
            ]
        )
    head = ["scenario", "grid", "settings", "least overlap", "median", "most", "errors"]
    return "\n\n".join(
        [
            "## Overlap of communication and attention",
            "Share of a communication kernel's time inside of the attention kernel, over all "
            "settings that `keel overlap lab` tries.",
            _measured_on(lines),
            _table(head, body),
            *_pictures(path.parent, ["overlap_lab.png"], page),
        ]
    )


SECTIONS: dict[str, Callable[[Path, Sequence[Line], Path], str]] = {
    "attention.csv": attention_section,
    "max_logits.csv": max_logits_section,
    "backward_ways.csv": plain_section(
        "The backward in other ways",
        ("mask", "tokens", "hq", "hk", "d", "terms", "way", "ms", "of_plain", "tflops", "error"),
        named_by=("mask", "tokens", "hq", "hk", "d", "terms", "way"),
    ),
    "backward_memory.csv": plain_section(
        "Device memory of the backward, beyond inputs and gradients",
        ("mask", "tokens", "hq", "hk", "d", "provider", "extra_mib", "stated_mib", "q_mib"),
        named_by=("mask", "tokens", "hq", "hk", "d", "provider"),
    ),
    "short_rows.csv": plain_section(
        "Few queries, many keys: query heads packed into tiles and apart",
        ("tq", "tk", "hq", "hk", "d", "way", "pack", "ms", "faster", "gb_per_s", "error"),
    ),
    "few_tiles.csv": plain_section(
        "Few heads, short lengths: tiles by when the last is done",
        ("mask", "tokens", "hq", "hk", "d", "way", "ms", "faster", "cut_tiles", "error"),
    ),
    "profile.csv": plain_section(
        "Below ncu, which holds clocks at 1.3 GHz: all kernels of a call",
        (
            *("cell", "who", "kernels", "clocks", "active_clocks", "instructions", "icache_misses"),
            *("tensor_pct", "no_instruction", "at_barriers", "for_data", "shared_pct", "l2_pct"),
        ),
        named_by=("cell", "who"),
    ),
    "host_cost.csv": plain_section(
        "Cost of a call on the host, microseconds",
        ("backend", "direction", "grad", "max_logits", "us", "us_least"),
    ),
    "softmax.csv": softmax_section,
    "softmax_between.csv": between_section,
    "muon.csv": muon_section("Muon"),
    "muon_forms.csv": muon_section("Muon, more shapes"),
    "qk_clip.csv": plain_section(
        "QK-Clip, milliseconds", ("what", "ms", "beside", "beside_ms", "layers", "heads", "hidden")
    ),
    "balance.csv": balance_section,
    "overlap_lab.csv": overlap_section,
}


def _read(path: Path) -> list[Line]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _measured_on(lines: Iterable[dict]) -> str:
    """Machine, versions and runs of some rows, in one line."""
    lines = list(lines)
    parts = []
    for column, label in (
        *(("gpu", ""), ("dtype", ""), ("torch", "torch "), ("triton", "Triton ")),
        *(("cuda", "CUDA "), ("numpy", "numpy "), ("keel", "Keel "), ("run", "run of ")),
    ):
        values = sorted({str(row.get(column) or "") for row in lines} - {""})
        if values:
            parts.append(label + ", ".join(values))
    return f"Measured on: {'; '.join(parts)}."


def _quotient(text: str) -> str:
    return "–" if text in ("", "nan") else f"{float(text):.2f}"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _pictures(folder: Path, names: Sequence[str], page: Path) -> list[str]:
    found = [folder / name for name in names if (folder / name).exists()]
    return [f"![{path.stem}]({_relative(path, page)})" for path in found]


def _link(text: str, target: Path, page: Path) -> str:
    return f"[{text}]({_relative(target, page)})"


def _relative(target: Path, page: Path) -> str:
    return Path(os.path.relpath(target.resolve(), page.resolve().parent)).as_posix()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args(arguments)
    if not args.results.is_dir():
        raise SystemExit(f"{args.results} is no folder: run a benchmark first, or give --results")
    text = make_page(args.results, args.page)
    if args.check:
        old = args.page.read_text(encoding="utf-8") if args.page.exists() else ""
        if old != text:
            print(f"{args.page} is not what the CSV files say: python benchmarks/results_page.py")
        return int(old != text)
    args.page.parent.mkdir(parents=True, exist_ok=True)
    args.page.write_text(text, encoding="utf-8")
    print(f"written to {args.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
