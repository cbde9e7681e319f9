"""What the lab's rows mean: a recommendation, and answers to claims that people repeat."""

from __future__ import annotations

from collections.abc import Sequence

from keel.overlap.lab import CONNECTIONS, Row

ENOUGH = 0.95
"""Overlap that counts as full."""
SLACK = 0.02
"""What attention may lose beside the SMs that it leaves free."""


def find(rows: Sequence[Row], **levers: object) -> Row | None:
    """The row of a setting; levers that are not named stand where they stand by default."""
    wanted = {
        **{"scenario": "behind", "connections": CONNECTIONS[0], "grid": "persistent"},
        **{"sm_margin": 0, "cluster": 1, "priority": False, "barrier": False, **levers},
    }
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()):
            return None if row.get("error") or row.get("overlap") is None else row
    return None


def smallest_margin(rows: Sequence[Row], **levers: object) -> Row | None:
    """The row of the smallest margin from which on all overlap fully."""
    best = None
    margins = sorted({int(row["sm_margin"]) for row in rows if row.get("grid") == "persistent"})
    for margin in reversed(margins):
        row = find(rows, sm_margin=margin, **levers)
        if row is None or row["overlap"] < ENOUGH:
            break
        best = row
    return best


def verdicts(rows: Sequence[Row]) -> list[str]:
    """The recommendation, then the claims; only what was seen."""
    lines = [_recommended(rows), _unlucky(rows), _barrier(rows)]
    lines += [_margin_is_enough(rows), _clusters(rows), _priority(rows), _connections(rows)]
    beside = [row for row in rows if row.get("shared_sms")]
    if beside:
        lines.append(
            f"{len(beside)} settings had communication and attention on one SM at a time: their "
            "blocks fit beside each other, so overlap needs no lever there."
        )
    failed = [row for row in rows if row.get("error")]
    if failed:
        lines.append(
            f"{len(failed)} of {len(rows)} settings failed, as first: {failed[0]['error']}"
        )
    return [line for line in lines if line]


def _recommended(rows: Sequence[Row]) -> str:
    best = smallest_margin(rows)
    if find(rows) is None:
        return ""
    if best is None:
        return "No margin made communication overlap fully: see the barrier."
    bound = best["sm_margin"] / best["sms"] + SLACK
    kept = "within" if best["slowdown"] <= bound else "ABOVE"
    return (
        f"Recommended: sm_margin={best['sm_margin']} overlaps {_share(best)}; attention is "
        f"{100 * best['slowdown']:+.1f} % ({kept} margin / SMs + 2 % = {100 * bound:.1f} %), "
        f"communication {_stretch(best)}."
    )


def _unlucky(rows: Sequence[Row]) -> str:
    seen = [(name, find(rows, grid=name)) for name in ("persistent", "tiles")]
    text = ", ".join(f"{name} {_share(row)}" for name, row in seen if row is not None)
    return f"Without any lever, launched behind attention: {text}." if text else ""


def _barrier(rows: Sequence[Row]) -> str:
    parts = []
    for grid in ("persistent", "tiles"):
        row = find(rows, grid=grid, barrier=True)
        if row is not None:
            cost = f"attention {100 * row['slowdown']:+.1f} %, {row['misses']} misses"
            parts.append(f"{grid} {_share(row)} ({cost})")
    return f"With the barrier and no margin: {', '.join(parts)}." if parts else ""


def _margin_is_enough(rows: Sequence[Row]) -> str:
    seen = [row for row in (find(rows, sm_margin=m) for m in (4, 8)) if row is not None]
    if not seen:
        return ""
    holds = all(row["overlap"] >= ENOUGH for row in seen)
    text = ", ".join(f"{row['sm_margin']}: {_share(row)}, {_stretch(row)}" for row in seen)
    return f"Claim: a margin of 4 to 8 is enough without clusters. {_says(holds)} ({text})."


def _clusters(rows: Sequence[Row]) -> str:
    parts, holds = [], True
    for cluster in sorted({int(row.get("cluster", 1)) for row in rows} - {1}):
        best = smallest_margin(rows, cluster=cluster)
        if find(rows, cluster=cluster) is None:
            continue
        if best is None:
            parts.append(f"of {cluster}: no margin was enough")
            continue
        holds = holds and best["sm_margin"] >= best["blocks"]
        parts.append(f"of {cluster}: {best['sm_margin']} SMs for {best['blocks']} blocks")
    text = "Claim: clusters need a margin of as many SMs as they use."
    return f"{text} {_says(holds)} ({'; '.join(parts)})." if parts else ""


def _priority(rows: Sequence[Row]) -> str:
    off, on = (find(rows, grid="tiles", priority=p) for p in (False, True))
    held = find(rows, priority=True)
    if off is None or on is None or held is None:
        return ""
    helps = on["overlap"] > off["overlap"] + 0.1
    reliable = on["overlap_min"] >= ENOUGH
    found = "helps" if helps else "does not help"
    return (
        "Claim: priority helps kernels that are not persistent, though not reliably on Hopper. "
        f"Here it {found} them ({_share(off)} to {_share(on)}, in single launches "
        f"{100 * on['overlap_min']:.0f} to {100 * on['overlap_max']:.0f} %: "
        f"{'reliable' if reliable else 'not reliable'}); persistent ones {_share(held)}."
    )


def _connections(rows: Sequence[Row]) -> str:
    parts = []
    for number in sorted({int(row["connections"]) for row in rows}):
        race = find(rows, scenario="race", connections=number)
        chain = find(rows, scenario="chain", connections=number)
        if race is not None and chain is not None:
            first = "first" if race["started_us"] <= 0 else "behind"
            parts.append(
                f"{number}: launched before attention it starts {first}, {_share(race)}; beside a "
                f"waiting stream {_share(chain)}"
            )
    if not parts:
        return ""
    one, many = (
        [find(rows, scenario=s, connections=n) for s in ("race", "chain")]
        for n in (1, CONNECTIONS[0])
    )
    answer = ""
    if all(one) and all(many):
        orders = one[0]["overlap"] >= ENOUGH  # type: ignore[index]
        serial = one[1]["overlap"] < 0.1 <= many[1]["overlap"]  # type: ignore[index]
        answer = f"{_says(orders and serial)} "
    return f"Claim: one connection keeps the order, but serialises. {answer}({'; '.join(parts)})."


def _share(row: Row) -> str:
    return f"{100 * row['overlap']:.1f} %"


def _stretch(row: Row) -> str:
    return f"takes {row['comm_ms'] / row['comm_alone_ms']:.1f} times its time alone"


def _says(holds: bool) -> str:
    return "It holds here" if holds else "It does not hold here"
