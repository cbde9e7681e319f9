"""The keel command, as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import keel
from keel import cli, cli_demo, demo, masks

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
    result = keel_command("demo", "attention", *SMALL, "--out", str(tmp_path / "new" / "folder"))
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
    result = keel_command("demo", "attention", *SMALL, "--out", str(tmp_path), "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["ok"] and all(check["ok"] for check in report["checks"])
    assert sum(report["documents"]) == 40 and len(report["max_logits"]) == 4
    assert report["forward_ms"] > 0 and report["backward_ms"] > 0


class _Trained:
    """In the place of minutes of training."""

    ok = True

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "runs": {"muon": {"final_loss": 2.5}}}


def test_both_demos_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def train(config: Any, out: Path, console: Any, **options: Any) -> _Trained:
        asked.append((out, options["fresh"], options["quiet"]))
        return _Trained()

    monkeypatch.setattr(cli_demo, "_train_with_bars", train)
    result = keel_command("demo", "--json", "--fresh", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"] and found["training"]["runs"]["muon"]["final_loss"] == 2.5
    assert sum(found["attention"]["documents"]) == 768
    assert asked == [(tmp_path, True, True)]
    monkeypatch.setattr(_Trained, "ok", False)
    result = keel_command("demo", "--json", "--out", str(tmp_path))
    assert result.exit_code == 1 and json.loads(result.stdout)["ok"] is False


@pytest.mark.usefixtures("wrong_gradient")
def test_both_demos_as_json_stop_at_a_wrong_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_demo, "_train_with_bars", None)
    result = keel_command("demo", "--json", "--out", str(tmp_path))
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["ok"] and found["training"] is None
    assert [x["tensor"] for x in found["attention"]["checks"] if not x["ok"]] == ["dk"]


@pytest.mark.usefixtures("on_cpu")
def test_warmup_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compile_kernels(*sizes: int, **options: Any) -> None:
        asked.append((sizes, options))

    monkeypatch.setattr(cli, "compile_kernels", compile_kernels)
    shape = ("--heads", "8", "--kv-heads", "2", "--head-dim", "64")
    result = keel_command("warmup", *shape, "--dtype", "fp16", "--forward-only", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {name: found[name] for name in ("backend", "device", "dtype", "backward")} == {
        "backend": "blocked",
        "device": "cpu",
        "dtype": "fp16",
        "backward": False,
    }
    assert (found["heads"], found["kv_heads"], found["head_dim"]) == (8, 2, 64)
    assert 0 <= found["seconds"] < 10
    cpu = torch.device("cpu")
    assert asked == [((8, 2, 64), {"dtype": torch.float16, "device": cpu, "backward": False})]


@pytest.mark.usefixtures("on_cpu")
def test_warmup_runs_and_says_that_nothing_was_compiled() -> None:
    result = keel_command("warmup", "--heads", "2", "--head-dim", "16", "--dtype", "fp32")
    assert result.exit_code == 0, result.output
    assert "blocked on cpu, fp32: ready in" in result.stdout
    assert "nothing was compiled: CPU tensors" in result.stdout


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dtype", "int8"), "--dtype wants one of bf16, fp16, fp32, fp64, got 'int8'"),
        (("--device", "gpu"), "--device wants cuda, cuda:1 or cpu, got 'gpu'"),
        (("--device", "cuda"), "--device cuda: torch finds no such GPU here"),
        (("--kv-heads", "3"), "multiple of key heads"),
    ],
)
def test_warmup_refuses(arguments: tuple[str, ...], words: str) -> None:
    result = keel_command("warmup", "--heads", "8", "--head-dim", "64", *arguments)
    assert result.exit_code == 2
    assert words in _plain(result.output)


def test_tiles_as_json(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "mask.png"
    documents = ("--documents", "100,300,50", "--causal", "--block", "128x64")
    result = keel_command("plan", *documents, "--draw", str(picture), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    area = sum(n * (n + 1) // 2 for n in (100, 300, 50))
    assert found["mask"] == {"tq": 450, "tk": 450, "num_slices": 3, "area": area}
    tiles = found["tiles"]
    assert (tiles["block"], tiles["all"]) == ([128, 64], 4 * 8)
    # Rows 0..127 see keys of 0 and 1, 128..255 of 1 to 3, ...: blocks with any pair inside.
    dense = masks.documents([0, 100, 400, 450], causal=True).to_dense()
    blocks = [dense[i : i + 128, j : j + 64] for i in range(0, 450, 128) for j in range(0, 450, 64)]
    assert tiles["full"] == sum(bool(x.all()) for x in blocks)
    assert tiles["partial"] == sum(bool(x.any()) and not bool(x.all()) for x in blocks)
    assert found["picture"] == str(picture) and picture.exists()


def test_demo_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = keel_command("demo", "attention", *SMALL, "--out", str(tmp_path))
    assert result.exit_code == 0
    assert "pip install 'keel-attn[viz]'" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("wrong_gradient")
def test_demo_fails_when_a_result_is_wrong(tmp_path: Path) -> None:
    result = keel_command("demo", "attention", *SMALL, "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "WRONG: dk\n" in result.stdout


@pytest.mark.usefixtures("wrong_gradient")
def test_demo_as_json_fails_when_a_result_is_wrong(tmp_path: Path) -> None:
    result = keel_command("demo", "attention", *SMALL, "--out", str(tmp_path), "--json")
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
    result = keel_command("demo", "attention", *SMALL, "--out", str(tmp_path), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["max_logits"] == [None] * 4
    assert keel_command("demo", "attention", *SMALL, "--out", str(tmp_path)).exit_code == 1


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
    result = keel_command("demo", "attention", *arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert words in _plain(result.output)
    assert not (tmp_path / "out").exists()


def test_demo_refuses_a_file_as_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    for out in (tmp_path / "taken", tmp_path / "taken" / "below"):
        assert keel_command("demo", "attention", *SMALL, "--out", str(out)).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--heads", "3"), "not a multiple of num_heads=3"),
        (("train", "--tau", "0"), "tau must be positive and finite, got 0.0"),
        (("train", "--lr", "nan"), "lr must be positive and finite, got nan"),
        (("train", "--tokens", "3"), "3 tokens are too few for 2 ranks"),
        (("train", "--ranks", "65"), "at most 64"),
        (("train", "--steps", "0"), "--steps"),
        (("--fresh", "train"), "options of train come behind its name"),
        (("--json", "train"), "options of train come behind its name"),
    ],
)
def test_training_demo_refuses(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out")) if arguments[0] == "train" else ()
    result = keel_command("demo", *arguments, *out)
    assert result.exit_code == 2
    assert words in _plain(result.output)
    assert not (tmp_path / "out").exists()


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


RANKS = ("plan", "--documents", "3x100,212", "--causal", "--ranks", "4", "--heads", "8:2")
RANKS_MASK = keel.masks.documents([0, 100, 200, 300, 512], causal=True)


def test_plan_over_ranks_as_json() -> None:
    result = keel_command(*RANKS, "--head-dim", "16", "--balance", "zigzag", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["mask"] == {"tq": 512, "tk": 512, "num_slices": 4, "area": RANKS_MASK.area()}
    assert found["num_ranks"] == 4 and found["balance"] == "zigzag" and found["picture"] is None
    dense = RANKS_MASK.to_dense().numpy()
    for rank, row in enumerate(found["ranks"]):
        tokens = [
            *range(64 * rank, 64 * (rank + 1)),
            *range(64 * (7 - rank), 64 * (8 - rank)),
        ]
        seen = dense[tokens].any(0)
        seen[tokens] = False
        assert row["area"] == dense[tokens].sum()
        assert sum(row["forward"]["bytes_in"]) == seen.sum() * 2 * 32 * 2
        assert row["pieces"] == (2 if rank < 3 else 1)
    zigzag = found["strategies"][1]
    assert zigzag["name"] == "zigzag" and zigzag["degree"] == found["degree"]
    assert zigzag["forward_ms"] == max(row["forward"]["ms"] for row in found["ranks"])
    assert [x["name"] for x in found["strategies"][4:]] == ["ring", "all-gather", "ulysses"]
    assert found["strategies"][4]["balance"] is None


def test_plan_over_ranks_as_tables() -> None:
    result = keel_command(*RANKS, "--degree", "2")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines()[3:])) <= 80
    for words in (
        f"area: {RANKS_MASK.area()} of 262144 pairs",
        "solver on 4 ranks; stages of remote keys: 2 forward, 2 backward; 8:2 heads of dim 128",
    ):
        assert words in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    first = [line[0] for line in lines if line]
    ranks = [line for line in lines if len(line) == 12 and line[0].isdigit()]
    assert [line[:2] for line in ranks] == [[str(n), "128"] for n in range(4)]
    assert first.count("forward") == first.count("backward") == 3
    assert first[-7:-3] == ["contiguous", "zigzag", "solver", "traffic"]
    assert first[-3:] == ["ring", "all-gather", "ulysses"]
    assert "min" not in first and "..." not in first


def test_plan_over_many_ranks_is_collapsed() -> None:
    result = keel_command("plan", "--documents", "4096", "--causal", "--ranks", "33")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    first = [line[0] for line in lines if len(line) == 12 or line == ["..."]]
    shown = [*range(8), "...", *range(25, 33), "min", "mean", "max"]
    assert first[first.index("0") :] == [str(x) for x in shown]
    assert "..." not in keel_command("plan", "--documents", "64", "--ranks", "32").stdout


def test_plan_over_ranks_of_a_mask_file(tmp_path: Path) -> None:
    file = tmp_path / "mask.json"
    content = {
        "q_ranges": [[0, 40], [40, 64]],
        "k_ranges": [[0, 40], [0, 48]],
        "attn_type_map": [1, 0],
        "total_seqlen_q": 64,
        "total_seqlen_k": 48,
    }
    file.write_text(json.dumps(content))
    area = 40 * 41 // 2 + 24 * 48
    result = keel_command("plan", "--mask-file", str(file), "--ranks", "2", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["mask"] == {"tq": 64, "tk": 48, "num_slices": 2, "area": area}
    result = keel_command("plan", "--mask-file", str(file))
    assert result.exit_code == 0
    assert f"area: {area} of 3072 pairs" in result.stdout and "█" in result.stdout
    content = {**content, "k_ranges": [[0, 40], [0, 64]], "attn_type_map": ["causal", "full"]}
    del content["total_seqlen_k"]
    file.write_text(json.dumps(content))
    result = keel_command("plan", "--mask-file", str(file), "--ranks", "2", "--json")
    assert json.loads(result.stdout)["mask"]["tk"] == 64


def test_plan_says_that_slices_overlap(tmp_path: Path) -> None:
    file = tmp_path / "mask.json"
    ranges = "[[0, 8], [0, 8]]"
    file.write_text(
        f'{{"q_ranges": {ranges}, "k_ranges": {ranges}, "attn_type_map": [0, 1], '
        '"total_seqlen_q": 8}'
    )
    result = keel_command("plan", "--mask-file", str(file), "--ranks", "2")
    assert result.exit_code == 0, result.output
    assert "area: 64 of 64 pairs" in result.stdout and "slices overlap" in result.stdout
    assert "slices overlap" not in keel_command(*RANKS).stdout


GOOD_MASK: dict[str, Any] = {
    "q_ranges": [[0, 4]],
    "k_ranges": [[0, 4]],
    "attn_type_map": [0],
    "total_seqlen_q": 4,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_ranges": None}, "q_ranges of {} must be a list"),
        ({"q_ranges": [[0, 1, 2]]}, "q_ranges must have shape (n, 2)"),
        ({"k_ranges": [[0, "4"]]}, "k_ranges must hold integers"),
        ({"k_ranges": [[0, 5]]}, "k_range [0, 5) ends after the last of 4 tokens"),
        ({"k_ranges": []}, "must have the same length, got 1 and 0"),
        ({"attn_type_map": [7]}, "unknown mask type 7"),
        ({"attn_type_map": [None]}, "{}: "),
        ({"attn_type_map": [0, 0]}, "attn_type_map must have shape (1,)"),
        ({"total_seqlen_q": "4"}, "total_seqlen_q of {} must be in 0..16777216, got '4'"),
        ({"total_seqlen_q": True}, "total_seqlen_q of {} must be in"),
        ({"total_seqlen_k": 1 << 25}, "total_seqlen_k of {} must be in"),
        ({"causal": True}, "{} has 'causal', which is no part of a mask"),
    ],
)
def test_plan_refuses_mask_files(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "m"
    file.write_text(json.dumps({**GOOD_MASK, **change}))
    result = keel_command("plan", "--mask-file", str(file), "--ranks", "2")
    assert result.exit_code == 2
    # Paths have no blanks to break at, so the frame may break them anywhere.
    squeezed = words.format(file).replace(" ", "")
    assert squeezed in _plain(result.output).replace(" ", "")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\xff", "is not JSON"),
        (b"[1]", "must hold an object with q_ranges, k_ranges"),
        (b'{"q_ranges": [], "total_seqlen_q": 4}', "lacks k_ranges, attn_type_map"),
        (b'{"q_ranges": %s}' % (b"[" * 100_000), "is not JSON"),
    ],
)
def test_plan_refuses_what_is_no_mask_file(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "m"
    if content is not None:
        file.write_bytes(content)
    result = keel_command("plan", "--mask-file", str(file))
    assert result.exit_code == 2
    assert words.replace(" ", "") in _plain(result.output).replace(" ", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "2"), "Missing option '--documents' or '--mask-file'"),
        (("--documents", "10", "--mask-file", "m", "--ranks", "2"), "both give a mask"),
        (("--mask-file", "m", "--causal"), "--causal is for --documents"),
        (("--mask-file", "m", "--window", "1,0"), "--window is for --documents"),
        (("--documents", "10", "--ranks", "0"), "--ranks"),
        (("--documents", "10", "--ranks", "4097"), "--ranks"),
        (("--documents", "16777217", "--ranks", "2"), "plans up to 16777216"),
        (("--documents", "16777217x1", "--ranks", "2"), "plans up to 16777216"),
        (("--documents", "2000000x1", "--ranks", "2"), "plans up to 1048576"),
        (("--documents", "9999999x0", "--ranks", "2"), "plans up to 1048576"),
        (("--documents", "2x", "--ranks", "2"), "such as 100,300,50 or 1000x1049,500, got '2x'"),
        (("--documents", "2x3x4", "--ranks", "2"), "wants lengths"),
        (("--documents", "2x3"), "wants lengths such as 100,300,50, got '2x3'"),
        (("--documents", "10", "--ranks", "2", "--balance", "best"), "got 'best'"),
        (("--documents", "10", "--ranks", "2", "--degree", "65"), "wants auto or 0..64, got '65'"),
        (("--documents", "10", "--ranks", "2", "--degree", "-1"), "wants auto or 0..64"),
        (("--documents", "10", "--ranks", "2", "--heads", "64"), "such as 64:8, got '64'"),
        (("--documents", "10", "--ranks", "2", "--heads", "6:4"), "multiple of key heads"),
        (("--documents", "10", "--ranks", "2", "--head-dim", "0"), "--head-dim"),
        (("--documents", "10", "--ranks", "2", "--block", "64x64"), "leave it out with --ranks"),
        (("--documents", "10", "--balance", "zigzag"), "--balance is for a plan over ranks"),
    ],
)
def test_plan_over_ranks_refuses(arguments: tuple[str, ...], words: str) -> None:
    result = keel_command("plan", *arguments)
    assert result.exit_code == 2
    assert words in _plain(result.output)


def test_plan_draws_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    result = keel_command(*RANKS, "--draw", str(picture), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["picture"] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    result = keel_command(*RANKS, "--draw", str(tmp_path / "nowhere" / "plan.png"))
    assert result.exit_code == 2 and "cannot write" in _plain(result.output)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = keel_command(*RANKS, "--draw", str(picture))
    assert result.exit_code == 2 and "needs matplotlib" in _plain(result.output)


def test_plan_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.distributed.report.MAX_PLAN_SIZE", 3)
    result = keel_command(*RANKS)
    assert result.exit_code == 2 and "too large to make here" in _plain(result.output)


@pytest.mark.parametrize(
    "documents", ["16777216", "15993x1049,559", "9000000,2000x3000,1777216", "1048576x16"]
)
def test_plan_over_a_thousand_ranks_takes_seconds(documents: str) -> None:
    begin = time.process_time()  # of one core, whatever else the machine does
    result = keel_command("plan", "--documents", documents, "--causal", "--ranks", "1024")
    assert time.process_time() - begin < 10
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    ranks = [line[0] for line in lines if len(line) == 12 and line[0].isdigit()]
    assert ranks == [str(n) for n in (*range(8), *range(1016, 1024))]


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
