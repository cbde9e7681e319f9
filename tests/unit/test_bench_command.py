"""`keel bench`: what it chooses, starts, gathers and refuses."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from keel import cli, cli_bench, demo
from keel.bench import catalog, peers, runner

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts: plain names

import attention  # noqa: E402
import attention_masks  # noqa: E402
import attention_peers  # noqa: E402


def keel_bench(*arguments: str) -> Any:
    plain = {"FORCE_COLOR": None, "NO_COLOR": "1", "COLUMNS": "200"}
    return CliRunner().invoke(cli.build_app(), ["bench", *arguments], env=plain)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("KEEL_BENCH_FA3", raising=False)


def test_names_are_those_of_the_programs() -> None:
    assert tuple(attention_masks.MASKS) == catalog.MASKS
    assert tuple(attention_peers.PEERS) == catalog.PEERS
    assert catalog.PASSES == attention_masks.DIRECTIONS
    for benchmark in catalog.BENCHMARKS:
        assert (catalog.folder() / f"{benchmark.name}.py").exists(), benchmark.name


@pytest.mark.parametrize("benchmark", catalog.BENCHMARKS, ids=lambda x: x.name)
def test_programs_know_their_arguments(benchmark: catalog.Benchmark) -> None:
    files = (f"{benchmark.name}.py", "timing.py")  # the latter has what several take
    source = "".join((catalog.folder() / name).read_text(encoding="utf-8") for name in files)
    given = (*benchmark.quick, *(benchmark.on_cpu or ()), "--out")
    for option in (x for x in given if x.startswith("--")):
        assert f'"{option}"' in source, option


def test_the_wheel_takes_every_program() -> None:
    """Else `keel bench` would break where Keel is installed and not checked out."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    programs = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert wheel == {f"benchmarks/{name}": f"keel/benchmarks/{name}" for name in programs}


def test_programs_are_found_in_the_package_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert catalog.folder() == ROOT / "benchmarks"
    installed = tmp_path / "lib" / "site-packages" / "keel"
    monkeypatch.setattr(catalog, "__file__", str(installed / "bench" / "catalog.py"))
    with pytest.raises(FileNotFoundError, match="from a checkout"):
        catalog.folder()
    (installed / "benchmarks").mkdir(parents=True)
    (installed / "benchmarks" / "attention.py").write_text("")
    assert catalog.folder() == installed / "benchmarks"


def test_what_can_run_without_a_gpu() -> None:
    able = {
        (x.name, quick)
        for x in catalog.BENCHMARKS
        for quick in (False, True)
        if x.arguments(quick=quick, has_gpu=False) is not None
    }
    quick = {(name, True) for name in ("attention", "softmax", "muon", "balance")}
    assert able == {*quick, ("balance", False)}
    assert all(x.arguments(quick=False, has_gpu=True) == () for x in catalog.BENCHMARKS)


@pytest.mark.usefixtures("on_cpu")
def test_a_run_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run of two benchmarks; rows are those of the CSV files, which gives the page too."""
    arguments = ("--quick", "--masks", "full,tiny", "--lengths", "64", "--passes", "forward")
    result = keel_bench("attention", "balance", *arguments, "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["gate"] == {"ok": True, "backend": "blocked"}
    assert found["machine"]["gpu"] is None and found["machine"]["torch"] == torch.__version__
    by_name = {x["name"]: x for x in found["benchmarks"]}
    assert {name: x["status"] for name, x in by_name.items()} == {
        "attention": "ok",
        "balance": "ok",
    }
    rows = by_name["attention"]["rows"]
    assert {(r["mask"], r["provider"], r["direction"], r["tokens"]) for r in rows} == {
        (mask, provider, "forward", "64")
        for mask in ("full", "tiny")
        for provider in ("keel", "sdpa")
    }
    assert all(float(r["error"]) < 1e-4 and float(r["ms"]) > 0 for r in rows)
    assert all(r["gpu"].startswith("CPU") and r["torch"] == torch.__version__ for r in rows)
    with open(tmp_path / "balance.csv", newline="") as file:
        assert list(csv.DictReader(file)) == by_name["balance"]["rows"]
    page = Path(found["page"]).read_text()
    assert "## Attention" in page and "## Layouts for context parallelism" in page
    assert "## Muon" not in page
    assert (tmp_path / "attention.log").read_text().count("Keel / best peer") == 1


@pytest.mark.usefixtures("on_cpu")
def test_nothing_is_timed_where_attention_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_case = demo.run_case

    def wrong(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
        got = run_case(*args, **options)
        got["dv"][7, 0, 3] += 0.1
        return got

    monkeypatch.setattr(demo, "run_case", wrong)
    result = keel_bench("balance", "--quick", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "WRONG: dv (blocked); nothing is timed" in result.output
    assert not (tmp_path / "balance.csv").exists()


@pytest.mark.usefixtures("on_cpu")
def test_a_benchmark_that_fails_is_told_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "attention.py").write_text("print('so far'); raise SystemExit('no more')")
    (programs / "muon.py").write_text("print('fine')")
    (programs / "results_page.py").write_text("")
    monkeypatch.setattr(catalog, "folder", lambda: programs)
    monkeypatch.setattr(runner, "folder", lambda: programs)
    result = keel_bench("attention", "muon", "--quick", "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    lines = [line.split() for line in result.output.splitlines()]
    (failed,) = (line for line in lines if line[:2] == ["attention", "failed"])
    assert failed[-3:] == ["no", "more", "(attention.log)"]
    assert any(line[:2] == ["muon", "ok"] for line in lines)
    assert (tmp_path / "out" / "attention.log").read_text() == "so far\nno more\n"


def test_a_benchmark_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    child = "import time; time.sleep(60)"
    program = (
        "import subprocess, sys, time\n"
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    start, seen = time.monotonic(), []
    code, last = runner.run_process(
        [sys.executable, "-c", program], tmp_path / "log", limit_s=2, on_line=seen.append
    )
    assert code is None and time.monotonic() - start < 20
    assert seen == [last]
    while time.monotonic() - start < 20 and _is_alive(int(last)):
        time.sleep(0.05)  # signals take their time
    assert not _is_alive(int(last))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().split()[2]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"  # dead, and not yet collected


def test_rows_of_this_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that grows the new ones, of one that is written anew all."""
    (tmp_path / "grows.py").write_text(
        "import sys; open(sys.argv[2] + '/grows.csv', 'a').write('2\\n')"
    )
    (tmp_path / "anew.py").write_text(
        "import sys; open(sys.argv[2] + '/anew.csv', 'w').write('a\\n3\\n4\\n')"
    )
    monkeypatch.setattr(runner, "folder", lambda: tmp_path)
    rows = {}
    for name in ("grows", "anew"):
        (tmp_path / f"{name}.csv").write_text("a\n1\n")
        benchmark = catalog.Benchmark(name=name, about="", csv=f"{name}.csv")
        outcome = runner.run_benchmark(benchmark, (), tmp_path, limit_s=60)
        assert (outcome.status, outcome.csv) == ("ok", f"{name}.csv")
        rows[name] = [row["a"] for row in outcome.rows]
    assert rows == {"grows": ["2"], "anew": ["3", "4"]}


@pytest.mark.usefixtures("on_cpu")
def test_peers_are_found_or_missing_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda name: name == "liger_kernel" or None
    )
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda name: "1.2.3")
    found = {peer.name: peer for peer in peers.find_peers(tmp_path)}
    assert found["Liger"].found and found["Liger"].version == "1.2.3"
    assert not found["FlashAttention-3"].found
    assert found["FlashAttention-3"].version == "flash_attn_interface is not installed"
    assert found["cuDNN through torch"].version == "needs a CUDA GPU"
    assert found["torch's attention"].found and not found["torch.compile"].found
    (tmp_path / "fa3_peer.py").write_text("")
    found = {peer.name: peer for peer in peers.find_peers(tmp_path)}
    assert found["FlashAttention-3"].found
    assert found["FlashAttention-3"].version == f"{tmp_path.name}/fa3_peer.py"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "there is no benchmark 'nothing': one of attention, max_logits"),
        (("attention",), "attention needs a CUDA GPU, and torch finds none here; with --quick"),
        (("max_logits", "--quick"), "max_logits needs a CUDA GPU, and torch finds none here"),
        (("--quick", "--masks", "round"), "--masks has 'round': one of full, causal"),
        (("--quick", "--peers", "fa9"), "--peers has 'fa9': one of fa3, fa3-loop"),
        (("--quick", "--passes", "sideways"), "one of forward, backward"),
        (("--quick", "--lengths", "1k"), "--lengths wants numbers such as 64,128, got '1k'"),
        (("--quick", "--lengths", "64/32"), "--lengths wants numbers such as 64,128, got '64/32'"),
        (("--quick", "--dims", "0"), "--dims wants numbers such as 64,192/128, got '0'"),
        (("--quick", "--dims", "64/32/16"), "--dims wants numbers such as 64,192/128"),
        (("--quick", "--dims", "64/"), "--dims wants numbers such as 64,192/128"),
        (("--quick", "--heads", "6:4"), "such as 64:8, the first a multiple of the second"),
        (("--quick", "--fa3", "nowhere"), "wants a folder with fa3_peer.py, and nowhere has none"),
        (("balance", "--masks", "full"), "--masks is for attention, which is not to run"),
    ],
)
def test_bench_refuses(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    result = keel_bench(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_options_become_arguments_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "fa3_peer.py").write_text("")
    options = cli_bench._attention_options(
        "full,swa", "1024", "64,192/128", "32:32,64:8", "backward", "none", tmp_path, 90.0
    )
    args = attention.checked(attention.parser().parse_args(options))
    assert (args.masks, args.lengths) == (["full", "swa"], [1024])
    assert args.dims == [(64,), (192, 128)]
    assert (args.heads, args.passes, args.peers) == ([(32, 32), (64, 8)], ["backward"], [])
    assert (args.fa3, args.seconds) == (tmp_path, 90.0)
