"""benchmarks/trees.py: who is asked when, what is told, and a tree that is slower on purpose."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts: plain names

import trees

SLOWER = """

import time

_quick = flex_flash_attn_func


def flex_flash_attn_func(*args, **options):
    time.sleep(1)
    return _quick(*args, **options)
"""


class Told:
    """A tree that answers with numbers given before, and notes when it was asked."""

    def __init__(self, name: str, times: list[float], asked: list[str]) -> None:
        self.name, self.times, self.asked = name, iter(times), asked

    def ask(self, cell: trees.Cell) -> None:
        self.asked.append(self.name)

    def answer(self) -> float:
        return next(self.times)


def test_turns_alternate_and_the_first_answer_does_not_count():
    asked: list[str] = []
    both = [Told("a", [9, 1, 2, 4], asked), Told("b", [9, 2, 2, 2], asked)]
    found = trees.in_turns(both, {}, 3)
    assert asked == [*"ab", *"ab", *"ba", *"ab"]
    assert found == [[1, 2, 4], [2, 2, 2]]
    assert trees.gains(found) == [1.0]  # of 2, 1 and 0.5


def test_a_slower_tree_is_seen(tmp_path, capsys):
    """Each process has its own: a second a call more is more than twice what a call takes here."""
    shutil.copytree(trees.HERE / "src", tmp_path / "src")
    with (tmp_path / "src/keel/attention.py").open("a") as file:
        file.write(SLOWER)
    cell = ["--masks", "causal", "--lengths", "64", "--heads", "1:1", "--dims", "16/8"]
    trees.main([str(tmp_path), *cell, "--passes", "forward", "--rounds", "1"])
    assert float(capsys.readouterr().out.split()[-1]) > 3


def test_what_it_cannot_compare(tmp_path):
    with pytest.raises(SystemExit, match="no other tree"):
        trees.main([])
    with pytest.raises(SystemExit, match="--rounds must be at least 1, got 0"):
        trees.main([str(tmp_path), "--rounds", "0"])
    with pytest.raises(SystemExit, match=r"holds no src/keel: give the top folder"):
        trees.main([str(tmp_path)])
    (tmp_path / "src/keel").mkdir(parents=True)
    (tmp_path / "src/keel/__init__.py").write_text("raise ImportError('on purpose')")
    with pytest.raises(SystemExit, match="a worker has ended with 1"):
        trees.main([str(tmp_path), "--lengths", "64"])
