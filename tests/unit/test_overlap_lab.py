"""The lab without its GPU: what is run, what rows mean, and what happens to trials that fail."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from keel.overlap import lab, lab_command, lab_verdict
from keel.overlap.lab import Bench, Row, Setting, overlap_of, read_csv, run, settings, shared_sms
from keel.overlap.lab_plot import plot_lab
from keel.overlap.lab_verdict import verdicts


def record(*blocks: tuple[int, int, int]) -> np.ndarray:
    return np.array([(*block, 0) for block in blocks])


ATTENTION = record((100, 900, 0), (110, 1000, 1))


@pytest.mark.parametrize(
    ("traffic", "share", "shared"),
    [
        (record((200, 300, 2), (250, 350, 3)), 1.0, 0),  # beside
        (record((1000, 1100, 0), (1005, 1105, 1)), 0.0, 0),  # behind
        (record((0, 100, 0)), 0.0, 0),  # before
        (record((950, 1050, 0), (1000, 1100, 1)), 0.25, 0),  # in the tail, on an SM that is done
        (record((200, 300, 0), (2000, 2300, 0)), 0.25, 1),  # on one SM with it
    ],
)
def test_overlap_is_time_between_begin_and_end(traffic, share, shared):
    assert overlap_of(traffic, ATTENTION) == share
    assert shared_sms(traffic, ATTENTION) == shared


def test_every_lever_is_tried():
    todo = settings()
    assert len(set(todo)) == len(todo)
    behind = {x for x in todo if x.scenario == "behind"}
    assert len(behind) == 3 * (8 + 1) * 3 * 2 * 2
    for levers in (
        {"sm_margin": 32, "cluster": 4, "priority": True, "barrier": True, "connections": 32},
        {"grid": "tiles", "priority": True, "connections": 1},
    ):
        assert Setting(**levers) in behind
    assert not [x for x in todo if x.grid == "tiles" and x.sm_margin]
    chains = [x for x in todo if x.scenario == "chain"]
    assert [x.connections for x in chains] == list(lab.CONNECTIONS)


def seen(setting: Setting) -> Row:
    """A GPU on which a margin helps from 4, clusters need 16, and priority works on tiles."""
    overlap = 0.02
    if setting.barrier or (setting.grid == "tiles" and setting.priority):
        overlap = 0.99
    if setting.sm_margin >= (4 if setting.cluster == 1 else 16):
        overlap = 0.98
    if setting.scenario == "race":
        overlap = 1.0 if setting.connections == 1 else 0.03
    if setting.scenario == "chain":
        overlap = 0.0 if setting.connections == 1 else 1.0
    slowdown = setting.sm_margin / 132 + 0.01
    return {
        **asdict(setting),
        **asdict(Bench()),
        **{"overlap": overlap, "overlap_min": overlap, "overlap_max": overlap},
        **{"attention_ms": 4 * (1 + slowdown), "alone_ms": 4.0, "library_ms": 4.0, "base_ms": 4.0},
        **{"slowdown": slowdown, "comm_ms": 2.0, "comm_alone_ms": 0.5, "moved_gb_per_s": 50.0},
        **{"started_us": -3.0 if overlap > 0.9 else 4100.0, "comm_sms": 16, "shared_sms": 0},
        **{"misses": 0, "fits_beside": False, "gpu": "a GPU", "sms": 132},
    }


ROWS = [seen(x) for x in settings()]


def test_verdicts_name_the_margin_and_its_price():
    lines = verdicts(ROWS)
    assert lines[0].startswith("Recommended: sm_margin=4 overlaps 98.0 %; attention is +4.0 %")
    assert "within margin / SMs + 2 % = 5.0 %" in lines[0] and "4.0 times" in lines[0]
    assert (
        lines[1] == "Without any lever, launched behind attention: persistent 2.0 %, tiles 2.0 %."
    )
    assert lines[2].startswith(
        "With the barrier and no margin: persistent 99.0 % (attention +1.0 %"
    )
    slow = [{**row, "slowdown": 0.2} for row in ROWS]
    assert "ABOVE margin / SMs + 2 %" in verdicts(slow)[0]


def test_claims_are_answered_by_the_numbers():
    margin, clusters, priority, connections = verdicts(ROWS)[3:7]
    assert "It holds here (4: 98.0 %" in margin
    assert "It holds here (of 2: 16 SMs for 16 blocks; of 4: 16 SMs for 16 blocks)" in clusters
    assert "Here it helps them (2.0 % to 99.0 %" in priority and ": reliable)" in priority
    assert "It holds here (1: launched before attention it starts first, 100.0 %" in connections
    other = [
        {
            **row,
            "overlap": 0.5 if row["sm_margin"] == 8 else 1.0,
            "overlap_min": 0.4,
            "started_us": 1.0,
        }
        for row in ROWS
    ]
    margin, clusters, priority, connections = verdicts(other)[3:7]
    assert "It does not hold here (4: 100.0 %" in margin
    assert "It holds here (of 2: 16 SMs" in clusters  # from 16 on; 8 is not enough
    assert "does not help" in priority and "not reliable" in priority
    assert "It does not hold here (1: launched before attention it starts behind" in connections
    low = [row | {"overlap": 1.0 if row["sm_margin"] >= 2 else 0.0} for row in ROWS]
    assert "It does not hold here (of 2: 2 SMs for 16 blocks" in verdicts(low)[4]


def test_a_margin_counts_only_if_all_larger_ones_do():
    rows = [row | {"overlap": 0.1} if row["sm_margin"] == 8 else row for row in ROWS]
    assert lab_verdict.smallest_margin(rows)["sm_margin"] == 16


def test_failed_settings_are_named_and_nothing_is_made_of_them():
    rows = [{**asdict(x), **asdict(Bench()), "error": "OutOfMemory: no"} for x in settings([8])]
    lines = verdicts(rows)
    assert lines == [f"{len(rows)} of {len(rows)} settings failed, as first: OutOfMemory: no"]
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_lab(rows, "unused.png")
    rows = [row | {"overlap": 0.5} for row in ROWS]
    assert verdicts(rows)[0].startswith("No margin made communication overlap fully")


def fake_child(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    real = lab.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        assert command[1:3] == ["-m", "keel.overlap.lab_trial"]
        return real([sys.executable, "-c", program, command[3]], **options)

    monkeypatch.setattr(lab.subprocess, "Popen", start)


def test_rows_are_written_as_they_come(monkeypatch, tmp_path):
    """Also where a process prints other things, fails at a setting, or dies with work to do."""
    fake_child(
        monkeypatch,
        "import json, os, sys\n"
        "work = json.loads(sys.argv[1])\n"
        "number = os.environ['CUDA_DEVICE_MAX_CONNECTIONS']\n"
        "for n, setting in enumerate(work['settings']):\n"
        "    row = {**setting, **work['bench'], 'overlap': 0.5, 'gpu': 'GPU of ' + number}\n"
        "    if n == 1: row = {**setting, **work['bench'], 'error': 'ValueError: no'}\n"
        "    if n == 2 and number == '1': sys.exit('it died')\n"
        "    print('a line of noise'); print('ROW ' + json.dumps(row), flush=True)\n",
    )
    todo = [x for x in settings([8, 1], [0, 4], [1]) if x.scenario == "behind"]
    path, shown = tmp_path / "deep" / "lab.csv", []

    def look(row: Row) -> None:
        shown.append(row)
        assert len(path.read_text().splitlines()) == 1 + len(shown)  # with a header

    rows = run(Bench(), todo, csv_path=path, progress=look)
    assert rows == shown and [Setting(**{k: r[k] for k in asdict(todo[0])}) for r in rows] == todo
    first, second = rows[: len(todo) // 2], rows[len(todo) // 2 :]
    assert [x.get("error") for x in first] == [None, "ValueError: no"] + [None] * (len(first) - 2)
    assert {x["gpu"] for x in first if "gpu" in x} == {"GPU of 8"} and second[0][
        "gpu"
    ] == "GPU of 1"
    for row in second[2:]:
        assert row["error"].startswith("its process ended with status 1: ")
        assert row["error"].endswith("it died")
    back = read_csv(path)
    for row, again in zip(rows, back, strict=True):
        assert {k: v for k, v in again.items() if v is not None} == row


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    fake_child(monkeypatch, "import time\ntime.sleep(60)")
    rows = run(Bench(), settings([8], [0], [1])[:2], limit_s=0.5)
    assert len(rows) == 2 and all("status -9" in row["error"] for row in rows)


def test_a_trial_that_fails_does_not_end_the_others(monkeypatch, capsys):
    """And three in a row end the process: the device is gone."""
    trial = pytest.importorskip("keel.overlap.lab_trial")
    pytest.importorskip("triton")

    class Trials:
        def __init__(self, bench: Bench) -> None: ...

        def observe(self, setting: Setting) -> Row:
            if setting.sm_margin in (1, 8, 16, 24):
                raise RuntimeError(f"no SM {setting.sm_margin}")
            return {"overlap": 0.5}

    class Chip:
        name, multi_processor_count = "a GPU", 132

    monkeypatch.setattr(trial, "Trials", Trials)
    monkeypatch.setattr(trial.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(trial.torch.cuda, "get_device_properties", lambda device: Chip)
    work = {
        "bench": asdict(Bench()),
        "settings": [asdict(Setting(sm_margin=m)) for m in lab.MARGINS],
    }
    with pytest.raises(SystemExit, match="too many failures"):
        trial.main(json.dumps(work))
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith(lab.ROW)]
    rows = [json.loads(x.removeprefix(lab.ROW)) for x in lines]
    assert [x.get("error") for x in rows] == [
        *(None, "RuntimeError: no SM 1", None, None),
        *(f"RuntimeError: no SM {m}" for m in (8, 16, 24)),
    ]
    assert all(x["gpu"] == "a GPU" and x["sms"] == 132 for x in rows)


class Books:
    """A GPU on paper: attention takes 4 ms, traffic 0.5 ms, in the order of the launches.

    One after the other, except on a grid with a margin, or with a barrier, where the traffic is
    there first.
    """

    def __init__(self) -> None:
        self.now, self.waiting = 1_000_000, False
        self.beside: int | None = None
        """When an attention began that leaves room."""


BOOKS = Books()


class FakeKernel:
    n_regs, metadata = 200, SimpleNamespace(num_warps=8, shared=200_000)

    def __init__(self, *args: Any, **options: Any) -> None:
        self.options = options
        self.record = torch.zeros(2, 4, dtype=torch.int64)
        self.span = int(1000 * options.get("span_us", 4000))

    def bytes_moved(self) -> int:
        return 100_000_000

    def __call__(self) -> FakeKernel:
        begin = BOOKS.now
        if "span_us" not in self.options:
            BOOKS.beside = begin if self.options["sm_margin"] or BOOKS.waiting else None
            BOOKS.waiting = False
        elif BOOKS.beside is not None and self.options["gb_per_s"] > 100:
            begin, BOOKS.beside = BOOKS.beside + 100_000, None
        end = begin + self.span
        self.record[:, 0], self.record[:, 1] = begin, end
        self.record[:, 2] = torch.arange(2) + (50 if "span_us" in self.options else 0)
        BOOKS.now = max(BOOKS.now, end)
        return self


class FakeBarrier:
    def __init__(self, target: int, **_: Any) -> None:
        self.flag = torch.zeros(4, dtype=torch.int64)

    def wait(self) -> None:
        BOOKS.waiting = True

    def misses(self) -> int:
        return 7


def test_what_a_trial_makes_of_records(monkeypatch):
    trial = pytest.importorskip("keel.overlap.lab_trial")
    cuda = {
        "current_device": lambda: 0,
        "synchronize": lambda: None,
        "Stream": lambda *_, **options: SimpleNamespace(
            **options, record_event=lambda: None, wait_event=lambda event: None
        ),
        "stream": lambda stream: contextlib.nullcontext(),
        "get_device_properties": lambda device: SimpleNamespace(
            regs_per_multiprocessor=65_536,
            max_threads_per_multi_processor=2048,
            shared_memory_per_multiprocessor=233_472,
        ),
    }
    for name, fake in cuda.items():
        monkeypatch.setattr(trial.torch.cuda, name, fake)
    monkeypatch.setattr(trial.torch, "randn", lambda *_, **__: None)
    monkeypatch.setattr(trial, "KernelBarrier", FakeBarrier)
    kernels = SimpleNamespace(ObservedAttention=FakeKernel, Traffic=FakeKernel)
    monkeypatch.setitem(sys.modules, "keel.kernels.lab", kernels)
    monkeypatch.setattr(trial.Trials, "_check", lambda *_: None)
    monkeypatch.setattr(trial.Trials, "library_ms", lambda *_: 4.1)
    trials = trial.Trials(Bench(repeats=2))
    row = trials.observe(Setting())
    assert row["overlap"] == 0 and row["attention_ms"] == row["base_ms"] == row["alone_ms"] == 4
    assert row["comm_ms"] == row["comm_alone_ms"] == 0.5 and row["started_us"] == 4000
    assert row["slowdown"] == 0 and row["moved_gb_per_s"] == 200 and row["fits_beside"] is False
    assert row["misses"] == 0 and row["shared_sms"] == 0 and row["comm_sms"] == 2
    beside = [trials.observe(Setting(**x)) for x in ({"sm_margin": 4}, {"barrier": True})]
    assert [x["overlap"] for x in beside] == [1, 1] and beside[0]["started_us"] == 100
    assert trials.observe(Setting(scenario="race"))["overlap"] == 0
    assert trials.observe(Setting(scenario="chain"))["overlap"] == 0
    assert set(beside[0]) | {"gpu", "sms", "torch", "triton", "error"} == set(lab.COLUMNS)


def test_the_command_shows_and_keeps_everything(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from keel.cli import build_app

    failing: list[bool] = []

    def fake(bench: Bench, todo: list[Setting], **options: Any) -> list[Row]:
        rows = [seen(x) for x in todo]
        for row in rows:
            options["progress"](row)
        if failing:
            rows[3] = {**asdict(todo[3]), **asdict(bench), "error": "CudaError: gone"}
        return rows

    monkeypatch.setattr(lab_command, "run", fake)
    monkeypatch.setattr(lab_command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(lab_command.torch.cuda, "get_device_capability", lambda: (9, 0))
    out = ["overlap", "lab", "--out", str(tmp_path)]
    result = CliRunner().invoke(build_app(), out, env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    assert "Recommended: sm_margin=4" in result.output and "98.0 %" in result.output
    assert (tmp_path / "overlap_lab.png").read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(build_app(), [*out, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["rows"]) > 10 and found["out"] == str(tmp_path)
    assert any("sm_margin=4" in text for text in found["verdicts"])
    failing.append(True)
    result = CliRunner().invoke(build_app(), out, env={"COLUMNS": "140"})
    assert result.exit_code == 1 and "CudaError: gone" in result.output
    result = CliRunner().invoke(build_app(), [*out, "--blocks", "6"])
    assert result.exit_code == 2 and "multiple of 4" in result.output


def test_without_a_gpu_the_command_says_so(monkeypatch):
    from typer.testing import CliRunner

    from keel.cli import build_app

    monkeypatch.setattr(lab_command.torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(build_app(), ["overlap", "lab"])
    assert result.exit_code == 2 and "needs a CUDA GPU" in result.output
