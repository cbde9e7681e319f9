"""The keel command, as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import keel
from keel import cli, demo

SMALL = ("--tokens", "40", "--heads", "4", "--head-dim", "16")


def keel_command(*arguments: str) -> Any:
    # As into a file, whatever the tests themselves run in.
    plain = {"FORCE_COLOR": None, "NO_COLOR": "1", "COLUMNS": "80"}
    return CliRunner().invoke(cli.build_app(), [*arguments], env=plain)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend gets dk wrong in one element."""

    def run_case(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
        got = demo_run_case(*args, **options)
        got["dk"][3, 0, 5] += 0.1
        return got

    demo_run_case = demo.run_case
    monkeypatch.setattr(demo, "run_case", run_case)


@pytest.mark.usefixtures("on_cpu")
def test_env_as_json() -> None:
    result = keel_command("env", "--json")
    assert result.exit_code == 0
    seen = json.loads(result.stdout)
    assert seen["keel"] == keel.__version__
    assert seen["torch"] == torch.__version__
    assert seen["gpus"] == [] and seen["device"] == "cpu" and not seen["triton_runs"]
    assert {name: choice["backend"] for name, choice in seen["backends"].items()} == dict.fromkeys(
        ("bf16", "fp16", "fp32", "fp64"), "blocked"
    )
    assert all(choice["why"] for choice in seen["backends"].values())


@pytest.mark.usefixtures("on_cpu")
def test_env_as_table() -> None:
    result = keel_command("env")
    assert result.exit_code == 0
    for words in ("none that torch can use", "backend='auto' on cpu", "fp64", "blocked"):
        assert words in result.stdout


def test_env_names_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, multi_processor_count, total_memory = "Board", 8, 6, 84, 24 << 30

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    result = keel_command("env")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "cuda:0 Board, compute capability 8.6, 84 SMs, 24.0 GiB" in text


def test_demo_shows_what_it_did(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = keel_command("demo", *SMALL, "--out", str(tmp_path / "new" / "folder"))
    assert result.exit_code == 0, result.output
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if "│" in line]
    errors = [[cell.strip() for cell in row] for row in rows if len(row) == 5]
    assert [row[0] for row in errors] == ["out", "lse", "max_logits", "dq", "dk", "dv"]
    assert {row[-1] for row in errors} == {"yes"}
    assert [row[0].strip() for row in rows if len(row) == 3] == ["0", "1", "2", "3"]
    for words in ("40 x 40", "backend ", "forward ", "all tensors are right"):
        assert words in result.stdout
    picture = tmp_path / "new" / "folder" / "mask.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_as_json(tmp_path: Path) -> None:
    result = keel_command("demo", *SMALL, "--out", str(tmp_path), "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["ok"] and all(check["ok"] for check in report["checks"])
    assert sum(report["documents"]) == 40 and len(report["max_logits"]) == 4
    assert report["forward_ms"] > 0 and report["backward_ms"] > 0


def test_demo_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = keel_command("demo", *SMALL, "--out", str(tmp_path))
    assert result.exit_code == 0
    assert "pip install 'keel-attn[viz]'" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("wrong_gradient")
def test_demo_fails_when_a_result_is_wrong(tmp_path: Path) -> None:
    result = keel_command("demo", *SMALL, "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "WRONG: dk\n" in result.stdout


@pytest.mark.usefixtures("wrong_gradient")
def test_demo_as_json_fails_when_a_result_is_wrong(tmp_path: Path) -> None:
    result = keel_command("demo", *SMALL, "--out", str(tmp_path), "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert not report["ok"]
    assert [check["tensor"] for check in report["checks"] if not check["ok"]] == ["dk"]


def test_demo_with_a_nan_is_still_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_case = demo.run_case

    def with_nan(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
        got = run_case(*args, **options)
        return {**got, "max_logits": got["max_logits"] * torch.nan}

    monkeypatch.setattr(demo, "run_case", with_nan)
    result = keel_command("demo", *SMALL, "--out", str(tmp_path), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["max_logits"] == [None] * 4
    assert keel_command("demo", *SMALL, "--out", str(tmp_path)).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--heads", "3"), "multiple of key heads"),
        (("--head-dim", "12"), "multiple of 8"),
        (("--tokens", "0"), "--tokens"),
        (("--tokens", "1000000"), "with 8 heads take at most"),
    ],
)
def test_demo_refuses(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    result = keel_command("demo", *arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert words in _plain(result.output)
    assert not (tmp_path / "out").exists()


def test_demo_refuses_a_file_as_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    for out in (tmp_path / "taken", tmp_path / "taken" / "below"):
        assert keel_command("demo", *SMALL, "--out", str(out)).exit_code == 2


def test_plan(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "mask.png"
    result = keel_command(
        *("plan", "--documents", "100,300,50", "--causal", "--block", "64x32"),
        *("--draw", str(picture)),
    )
    assert result.exit_code == 0, result.output
    area = 100 * 101 // 2 + 300 * 301 // 2 + 50 * 51 // 2
    assert f"area: {area} of 202500 pairs" in result.stdout
    mask = keel.masks.documents([0, 100, 400, 450], causal=True)
    assert keel.tiling.plan_tiles(mask, 64, 32).describe() in result.stdout
    assert "█" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plan_with_window() -> None:
    result = keel_command("plan", "--documents", "64", "--window", "3,1")
    area = keel.masks.sliding_window(64, left=3, right=1).area()
    assert result.exit_code == 0
    assert f"area: {area} of 4096 pairs" in result.stdout
    same = keel_command("plan", "--documents", "64", "--causal", "--window", "-1,0")
    assert f"area: {64 * 65 // 2} " in same.stdout


def test_plan_of_nothing() -> None:
    result = keel_command("plan", "--documents", "0")
    assert result.exit_code == 0
    assert "area: 0\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing option '--documents'"),
        (("--documents", "10,,20"), "wants lengths such as 100,300,50, got '10,,20'"),
        (("--documents", "-5"), "wants lengths"),
        (("--documents", "99999999999"), "plans up to"),
        (("--documents", "10", "--window", "5"), "wants L,R such as 128,0"),
        (("--documents", "10", "--causal", "--window", "5,5"), "--causal sees nothing"),
        (("--documents", "10", "--block", "128"), "such as 128x64, got '128'"),
        (("--documents", "10", "--block", "0x64"), "such as 128x64"),
    ],
)
def test_plan_refuses(arguments: tuple[str, ...], words: str) -> None:
    result = keel_command("plan", *arguments)
    assert result.exit_code == 2
    assert words in _plain(result.output)


def test_plan_cannot_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    lost = str(tmp_path / "nowhere" / "mask.png")
    result = keel_command("plan", "--documents", "10", "--draw", lost)
    assert result.exit_code == 2 and "cannot write" in _plain(result.output)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = keel_command("plan", "--documents", "10", "--draw", str(tmp_path / "mask.png"))
    assert result.exit_code == 2 and "needs matplotlib" in _plain(result.output)


def test_says_what_to_install() -> None:
    program = "import sys; sys.modules['typer'] = None; from keel.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'keel-attn[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_art_in_a_plain_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-m", "keel", "plan", "--documents", "5", "--causal"],
        capture_output=True,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert b"3 ####." in done.stdout


def _plain(output: str) -> str:
    """Without colours and the frame that typer draws around errors, which breaks lines anywhere."""
    return " ".join(re.sub("\x1b\\[[0-9;]*m", "", output).replace("│", " ").split())
