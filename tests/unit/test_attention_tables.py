"""benchmarks/attention_tables.py: what it asks of attention.py, and what it does on failure."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts, which import by name

import attention
import attention_tables
from attention_tables import TABLES


@pytest.mark.parametrize("table", TABLES)
def test_attention_understands_what_it_is_asked(table: str) -> None:
    given = attention_tables.parser().parse_args(["--fa3", "peers", "--seconds", "30"])
    arguments = attention_tables.arguments_of(table, given)
    asked = attention.checked(attention.parser().parse_args(arguments))
    assert (asked.fa3, asked.seconds, asked.no_plots) == (Path("peers"), 30, True)
    assert "keel" not in asked.peers and asked.peers, "ratios need somebody beside Keel"
    passes, _, _ = table.partition("-")
    assert asked.passes == ([passes] if passes in ("forward", "backward") else asked.passes)
    assert len(asked.timing) == 1
    found = attention.cases(asked)
    assert found and len(found) == len(set(map(str, found)))


def test_bars_have_their_cells() -> None:
    """Every mask and length of heads of 128 in both passes, and 64 and 256 on plain masks, all of
    them beside FlexAttention and those that can do the mask otherwise."""
    seen = set()
    for text in TABLES.values():
        asked = attention.checked(attention.parser().parse_args(text.split()))
        if not {"fa3", "fa3-loop"} & set(asked.peers) or "flex" not in asked.peers:
            continue
        for case in attention.cases(asked):
            p = case.problem
            seen |= {(way, asked.timing[0], case.d, p.name, p.tokens) for way in asked.passes or ()}
    for way in ("forward", "backward"):
        for tokens in attention.LENGTHS:
            masks = set(attention.MASKS) - ({"video"} if tokens > 32768 else set())
            wanted = {(128, name) for name in masks} | set(product((64, 256), ("full", "causal")))
            assert {(way, "graph", *cell, tokens) for cell in wanted} <= seen


def test_one_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(arguments: list[str]) -> int:
        ran.append(arguments)
        if "64" in arguments:
            raise RuntimeError("out of memory")
        return int("256" in arguments)

    monkeypatch.setattr(attention, "main", run)
    tables = ["forward-64", "forward-256", "forward-tiny"]
    assert attention_tables.main([*tables, "--out", str(tmp_path)]) == 1
    assert [x[x.index("--dims") + 1] for x in ran] == ["64", "256", "128"]
    assert all(x[x.index("--out") + 1] == str(tmp_path) for x in ran)
    said = capsys.readouterr().err
    assert "forward-64 failed: out of memory" in said
    assert said.endswith("failed: forward-64, forward-256\n")
    assert attention_tables.main(["forward-tiny"]) == 0


def test_list_runs_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(attention, "main", lambda arguments: pytest.fail("it ran"))
    assert attention_tables.main(["latent", "--list"]) == 0
    assert "python benchmarks/attention.py --timing graph --heads 32:32" in capsys.readouterr().out


def test_unknown_tables_are_told() -> None:
    with pytest.raises(SystemExit, match=r"unknown table 'forwards': one of forward-plain, "):
        attention_tables.main(["forwards"])
