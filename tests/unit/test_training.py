"""What two runs show, as records: the checks can fail, and the picture is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.training import TrainConfig, compare_runs
from keel.training.picture import draw

CONFIG = TrainConfig(steps=40, num_layers=2, hidden_size=32, num_heads=2, tau=10.0)


def results(**changes: Any) -> dict[str, dict[str, Any]]:
    """Of two runs that pass: logits to 6 tau without clip, to 1.05 tau behind each clip."""
    seen = np.linspace(1, 60, 40, dtype=np.float32)[:, None, None] * np.ones((2, 2), np.float32)
    loss = np.linspace(5, 2, 40, dtype=np.float32)
    gamma = np.minimum(1, 10 / seen)
    muon = {"loss": loss + 0.1, "seen": seen, "gamma": gamma, "left": np.full((40, 2), np.nan)}
    clipped = {
        "loss": loss,
        "seen": np.minimum(seen, 11.5),
        "gamma": gamma,
        "left": np.minimum(seen.max(-1), 10.5),
    }
    for name, value in changes.items():
        run, key = name.split("__")
        {"muon": muon, "clip": clipped}[run][key] = value
    return {
        "muon": {"history": muon, "digest": "a"},
        "muon_clip": {"history": clipped, "digest": "b"},
    }


def verdicts(**changes: Any) -> list[bool]:
    return [check.ok for check in compare_runs(CONFIG, results(**changes)).checks]


def test_checks() -> None:
    assert verdicts() == [True, True, True]
    low = results()["muon"]["history"]["seen"] * 0.8
    assert verdicts(muon__seen=low) == [False, True, True]
    assert verdicts(clip__left=np.full((40, 2), 11.1)) == [True, False, True]
    one = np.full((40, 2), 10.0)
    one[7, 1] = 11.2  # a single layer at a single step
    assert verdicts(clip__left=one) == [True, False, True]
    one[7, 1] = np.nan
    assert verdicts(clip__left=one) == [True, False, True]
    worse = results()["muon"]["history"]["loss"].copy()
    worse[-20:] += 0.01
    assert verdicts(clip__loss=worse) == [True, True, False]
    nan = np.full(40, np.nan)
    assert verdicts(clip__loss=nan) == [True, True, False]
    assert verdicts(muon__loss=nan) == [True, True, True]  # any loss is better than none


def test_as_dict_and_picture(tmp_path: Path) -> None:
    comparison = compare_runs(CONFIG, results())
    found = comparison.as_dict()
    assert found["ok"] and found["settings"]["tau"] == 10.0
    assert found["runs"]["muon"]["max_logits"] == [60.0, 60.0]
    assert found["runs"]["muon"]["max_logits_left"] == [None, None]
    assert found["runs"]["muon_clip"]["max_logits_left"] == [10.5, 10.5]
    pytest.importorskip("matplotlib")
    draw(comparison, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_rates() -> None:
    config = TrainConfig(steps=20, warmup=4, cooldown=5)
    rates = [config.rate(step) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[14:] == [1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
