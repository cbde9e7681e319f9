"""`keel overlap`, as a user and a CI job meet it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.overlap_traces import TraceBuilder, compute_only, hidden, partial, serial
from typer.testing import CliRunner

from keel import cli


def overlap(*arguments: object) -> Any:
    plain = {"FORCE_COLOR": None, "NO_COLOR": "1", "COLUMNS": "100"}
    return CliRunner().invoke(cli.build_app(), ["overlap", *map(str, arguments)], env=plain)


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    built = (hidden(), partial().add("keel stage 0", 0, 70, cat="gpu_user_annotation", stream=24))
    return [trace.write(tmp_path / f"rank{n}.json") for n, trace in enumerate(built)]


def test_report(traces: list[Path]) -> None:
    result = overlap("report", *traces)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert [
        "0",
        "0.100",
        "0.100",
        "0.070",
        "0.070",
        "0.000",
        "0.000",
        "0.000",
        "100.0",
        "%",
    ] in lines
    assert [
        "1",
        "0.110",
        "0.040",
        "0.070",
        "0.030",
        "0.040",
        "0.000",
        "0.030",
        "42.9",
        "%",
    ] in lines
    assert "Stages of rank 1" in result.output
    assert "rank 1 hides 42.9 %" in result.output
    assert overlap("report", traces[0].parent).output == result.output


def test_json(traces: list[Path]) -> None:
    seen = json.loads(overlap("report", "--json", *traces).output)
    assert seen["schema"] == "keel.overlap/1"
    assert (seen["worst_rank"], len(seen["ranks"])) == (1, 2)
    assert seen["overlap_ratio"] == pytest.approx(3 / 7)
    rank = seen["ranks"][1]
    parts = ("compute_ms", "exposed_ms", "exposed_copies_ms", "idle_ms")
    assert sum(rank[name] for name in parts) == pytest.approx(rank["span_ms"])
    assert rank["stages"][0]["overlap_ratio"] == pytest.approx(0.5)


@pytest.mark.parametrize(("least", "status"), [("0.42", 0), ("0.43", 1)])
def test_exit_status_for_ci(least: str, status: int, traces: list[Path]) -> None:
    result = overlap("report", *traces, "--min-overlap", least)
    assert result.exit_code == status
    assert ("is below 43.0 %" in result.stderr) == bool(status)


def test_no_communication_does_not_pass(tmp_path: Path) -> None:
    result = overlap("report", compute_only().write(tmp_path / "a.json"), "--min-overlap", "0")
    assert result.exit_code == 1
    assert "n/a" in result.stderr


def test_patterns(tmp_path: Path) -> None:
    trace = TraceBuilder().gemm(0, 10).add("my_ring", 5, 15, stream=9)
    path = trace.write(tmp_path / "a.json")
    seen = json.loads(overlap("report", path, "--json", "--communication", "my_ring").output)
    assert seen["overlap_ratio"] == pytest.approx(0.5)
    seen = json.loads(overlap("report", path, "--json", "--ignore", "my_ring").output)
    assert seen["ranks"][0]["span_ms"] == pytest.approx(0.01)


def test_plot(traces: list[Path], tmp_path: Path) -> None:
    """Exposed communication is in the picture where there is some, and only there."""
    image = pytest.importorskip("matplotlib.image")

    def red(path: Path) -> int:
        out = tmp_path / "out.png"
        assert overlap("report", path, "--plot", out).exit_code == 0
        body = image.imread(out)[:, :, :3][60:]  # below the legend
        return int(((abs(body - (0.894, 0.341, 0.337))).max(-1) < 0.02).sum())

    assert red(traces[0]) == 0
    assert red(traces[1]) > 1000
    result = overlap("report", traces[0], "--plot", tmp_path / "none" / "out.png")
    assert result.exit_code == 2
    assert "cannot write" in result.output


def test_compare(tmp_path: Path) -> None:
    a = TraceBuilder().gemm(0, 100).nccl(100, 160).write(tmp_path / "a.json")
    b = TraceBuilder().gemm(0, 110).nccl(50, 115).write(tmp_path / "b.json")
    text = overlap("compare", a, b).output
    assert "1.391x" in text
    assert "75.0 % of what overlap could save" in text
    seen = json.loads(overlap("compare", a, b, "--json").output)
    assert seen["efficiency"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "is empty"), ("{", "no list of"), (TraceBuilder().operator(0, 1).text(), "no GPU work")],
)
def test_bad_traces(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(content, encoding="utf-8")
    for command in (("report", path), ("compare", path, path)):
        result = overlap(*command)
        assert result.exit_code == 2
        assert words in " ".join(result.output.replace("│", " ").split())
    assert overlap("report", tmp_path / "gone.json").exit_code == 2
    good = serial().write(path)
    assert "does not compile" in overlap("report", good, "--stages", "(").output
    assert "does not compile" in overlap("report", good, "--ignore", "(").output


def test_advice_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("MAGI_ATTENTION_FFA_FORWARD_SM_MARGIN", "8")
    result = overlap("advise", "--json")
    assert result.exit_code == 0, result.output
    found = {x["name"]: x for x in json.loads(result.output)["levers"]}
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"]["value"] == "1"
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"]["harmful"] is True
    margin = found["MAGI_ATTENTION_FFA_FORWARD_SM_MARGIN"]
    assert (margin["value"], margin["harmful"]) == ("8", False)
    assert "leaves 8 SMs free" in margin["meaning"]
