"""benchmarks/one_call.py: who computes below a profiler, and that only equals are compared."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts: plain names

import one_call


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_cells_are_read():
    direction, case = one_call.cell("backward:causal:256:4:2:64")
    assert direction == "backward"
    assert (case.problem.name, case.problem.tokens) == ("causal", 256)
    assert (case.hq, case.hk, case.d) == (4, 2, 64)


@pytest.mark.parametrize(
    "text",
    [
        *("foo", "forward", "forward:full:256", "sideways:full:9:4:2:8", "forward:odd:9:4:2:8"),
        *("forward:full:x:4:2:8", "forward:full:-9:4:2:8", "forward:full:0:4:2:8"),
    ],
)
def test_what_is_no_cell_is_told_how_one_looks(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"as in forward:causal:8192:64:8:128"):
        one_call.cell(text)


def test_each_computes_before_and_below_the_profiler(monkeypatch, capsys):
    made = []

    def maker(name, folder):
        return lambda problem: lambda q, k, v: made.append(name) or q * 1.0

    monkeypatch.setattr(one_call, "maker", maker)
    one_call.main(["--peer", "sdpa", "forward:full:128:2:2:16"])
    assert made == ["keel", "sdpa", "keel", "sdpa"]
    assert "keel, then sdpa; they differ by 0" in capsys.readouterr().out


def test_a_peer_that_computes_something_else_is_an_error(monkeypatch):
    def maker(name, folder):
        return lambda problem: lambda q, k, v: q * (1.0 if name == "keel" else 1.1)

    monkeypatch.setattr(one_call, "maker", maker)
    with pytest.raises(SystemExit, match=r"forward of full 128.* differ by 0\.09"):
        one_call.main(["--peer", "sdpa", "forward:full:128:2:2:16"])


@pytest.mark.parametrize("peer", ["sdpa", "keel-plain"])
def test_gradients_are_compared(peer, capsys):
    one_call.main(["--peer", peer, "backward:causal:96:4:2:16"])
    assert f"backward of causal 96, 4:2 heads, d 16: keel, then {peer}" in capsys.readouterr().out


def test_a_peer_that_cannot_says_why():
    with pytest.raises(SystemExit, match=r"flash cannot do swa 128.*full and causal masks alone"):
        one_call.main(["--peer", "flash", "forward:swa:128:2:2:16"])
