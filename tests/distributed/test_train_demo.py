"""Training that is killed goes on to the same bits; and what it refuses."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import train_cases

from keel.training import RUNS, checkpoint
from keel.training.corpus import NO_TARGET, Corpus, standard_library

PROGRAM = [sys.executable, str(Path(__file__).with_name("train_cases.py"))]


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return out.split("\n")


def kill_at_random(process: subprocess.Popen[str], dice: random.Random, *, whole: bool) -> str:
    """After one to three more steps and a moment; only the parent, or its ranks with it."""
    assert process.stdout is not None
    line = ""
    for _ in range(dice.randint(1, 3)):
        line = process.stdout.readline()
    time.sleep(dice.random() * 0.2)
    if whole:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.stdout.close()
    process.wait()
    return line.strip()


def assert_same(x: Any, y: Any, path: str) -> None:
    assert type(x) is type(y), path
    if isinstance(x, torch.Tensor):
        assert x.dtype == y.dtype, path
        assert x.numpy().tobytes() == y.numpy().tobytes(), path  # NaNs as well
    elif isinstance(x, dict):
        assert x.keys() == y.keys(), path
        for key in x:
            assert_same(x[key], y[key], f"{path}/{key}")
    elif isinstance(x, list):
        assert len(x) == len(y), path
        for n, (a, b) in enumerate(zip(x, y, strict=True)):
            assert_same(a, b, f"{path}/{n}")
    else:
        assert x == y, path


def test_killed_at_any_moment_it_ends_bit_identical(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # shown where the test fails
    dice = random.Random(seed)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    baseline = start(undisturbed)
    for number in range(3):
        seen = kill_at_random(start(killed), dice, whole=number == 1)
        assert seen.split()[0] in RUNS, seen
    (killed / "muon.pt.tmp").write_bytes(b"PK\x03\x04 half of a checkpoint")
    last = finish(start(killed))
    assert "finished" in last
    assert "muon 1" not in last  # it went on, and did not start over
    assert finish(baseline)[0] == "muon 1"
    for name in RUNS:
        states = [checkpoint.load(folder / f"{name}.pt") for folder in (undisturbed, killed)]
        assert_same(*states, name)
        assert states[0] is not None
        files = [(folder / f"{name}.pt").read_bytes() for folder in (undisturbed, killed)]
        assert files[0] == files[1], name
        assert states[0]["step"] == train_cases.CONFIG.steps
        history = states[0]["history"]
        assert not any(x.isnan().any() for key, x in history.items() if key != "left")
        assert bool(history["left"].isnan().any()) == (name == "muon")
        assert (history["gamma"] < 1).any()  # so that a clip was there to be repeated
    assert {x.name for x in killed.iterdir()} == {"muon.pt", "muon_clip.pt", ".lock"}


def test_a_save_that_is_cut_off_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.pt"
    checkpoint.save({"step": 1, "x": torch.arange(3)}, path)

    def cut_off(state: Any, file: Any) -> None:
        file.write(b"PK\x03\x04 half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", cut_off)
        checkpoint.save({"step": 2}, path)
    assert checkpoint.temporary(path).exists()
    found = checkpoint.load(path)
    assert found is not None and found["step"] == 1 and found["x"].tolist() == [0, 1, 2]
    checkpoint.save({"step": 3}, path)
    assert checkpoint.load(path) == {"step": 3}
    assert not checkpoint.temporary(path).exists()


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    assert checkpoint.load(path) is None
    for content in (b"", b"PK\x03\x04 half of a checkpoint", b"text"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"run.pt .*start over with --fresh"):
            checkpoint.load(path)
    with pytest.raises(ValueError, match=r"lr was 0.1 and is 0.2; tau was None and is 3\. Give it"):
        checkpoint.refuse_other_settings(
            {"lr": 0.1, "seed": 1}, {"lr": 0.2, "seed": 1, "tau": 3}, path
        )


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with (
        checkpoint.only_writer(tmp_path),
        pytest.raises(ValueError, match="another run is writing to"),
        checkpoint.only_writer(tmp_path, patience=0.1),
    ):
        pass
    with checkpoint.only_writer(tmp_path, patience=0.1):
        pass  # it was let go


def test_batches_are_the_text_in_order_without_gaps() -> None:
    files = [bytes(range(40)) * 60, b"", b"short"]
    corpus = Corpus(files, seed=3)
    assert len(corpus) == 2405
    batches = [corpus.batch(step, num_tokens=600) for step in range(4)]
    joined = torch.cat([b.tokens for b in batches])
    assert sorted(joined.tolist() + [0] * 5) != joined.tolist()
    for batch in batches:
        assert batch.bounds[0] == 0 and batch.bounds[-1] == 600
        assert batch.bounds == sorted(set(batch.bounds))
        for first, end in zip(batch.bounds, batch.bounds[1:], strict=False):
            assert batch.targets[end - 1] == NO_TARGET
            assert torch.equal(batch.targets[first : end - 1], batch.tokens[first + 1 : end])
        assert batch.num_targets == 600 - (len(batch.bounds) - 1)
    again = Corpus(files, seed=3).batch(2, num_tokens=600)
    assert torch.equal(again.tokens, batches[2].tokens) and again.bounds == batches[2].bounds
    assert Corpus(files, seed=4).digest != corpus.digest
    with pytest.raises(ValueError, match=r"ends at byte 3,000, but there are only 2,405"):
        corpus.batch(4, num_tokens=600)
    with pytest.raises(ValueError, match="all files are empty"):
        Corpus([b""], seed=0)


def test_the_standard_library_is_enough_for_the_demo() -> None:
    corpus = standard_library(seed=0)
    assert len(corpus) > 2_000_000
    assert corpus.digest == standard_library(seed=0).digest
