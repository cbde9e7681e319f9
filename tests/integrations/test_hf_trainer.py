"""The example of transformers' Trainer runs, learns and clips."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer.py"


def test_learns_and_clips() -> None:
    train = runpy.run_path(str(EXAMPLE))["train"]
    losses, clips = train(steps=40)
    assert losses[-1] < 0.6 * losses[0]
    assert clips > 0
    assert train(steps=10, tau=1e6)[1] == 0
