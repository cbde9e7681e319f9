"""What two runs show: logits without and with the clip, losses, and the checks of both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.training.config import RUNS, TrainConfig

EXPLODED = 5.0
"""Times tau that the largest logit must pass without the clip."""
HELD = 1.1
"""Times tau that no layer may pass with it."""
LAST = 20
"""Steps whose mean is the final loss."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    text: str
    """The numbers."""
    ok: bool


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run's history; see `TrainingRun.history`."""

    name: str
    loss: Floats
    """(steps,)."""
    seen: Floats
    """(steps, layers, heads)."""
    gamma: Floats
    """(steps, layers, heads)."""
    left: Floats
    """(steps, layers); NaN without a clip."""
    digest: str

    @property
    def final_loss(self) -> float:
        return float(self.loss[-LAST:].mean())

    @property
    def by_layer(self) -> Floats:
        """(steps, layers): the largest logit of each layer in each step's forward."""
        top: Floats = self.seen.max(-1)
        return top

    @property
    def clips(self) -> int:
        """Heads past tau, over all steps."""
        return int((self.gamma < 1).sum())


@dataclass(frozen=True, slots=True)
class Comparison:
    config: TrainConfig
    muon: RunRecord
    muon_clip: RunRecord
    checks: tuple[Check, ...]

    @property
    def runs(self) -> tuple[RunRecord, RunRecord]:
        return self.muon, self.muon_clip

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types; a number that is not finite becomes None."""
        return {
            "ok": self.ok,
            "settings": self.config.as_dict(),
            "checks": [{"check": c.name, "seen": c.text, "ok": c.ok} for c in self.checks],
            "runs": {
                run.name: {
                    "final_loss": _finite(run.final_loss),
                    "max_logits": [_finite(x) for x in run.by_layer.max(0)],
                    "max_logits_left": [_finite(x) for x in run.left.max(0)],  # None: no clip
                    "heads_past_tau": run.clips,
                    "digest": run.digest,
                }
                for run in self.runs
            },
        }


def compare_runs(config: TrainConfig, results: dict[str, dict[str, Any]]) -> Comparison:
    """Judges what `train` returned. NaN passes no check."""
    muon, clipped = (
        RunRecord(name, **results[name]["history"], digest=results[name]["digest"]) for name in RUNS
    )
    tau = config.tau
    top, left = float(muon.seen.max()), float(clipped.left.max())
    losses = muon.final_loss, clipped.final_loss
    no_worse = math.isfinite(losses[1]) and not losses[1] > losses[0]  # NaN is worse than any
    return Comparison(
        config,
        muon,
        clipped,
        (
            Check(
                f"without the clip the largest logit passes {EXPLODED:g} tau",
                f"{top:.1f} = {top / tau:.2f} tau",
                top > EXPLODED * tau or not math.isfinite(top),
            ),
            Check(
                f"with it every layer stays within {HELD:g} tau after each step's clip",
                f"{left:.1f} = {left / tau:.2f} tau",
                left <= HELD * tau,
            ),
            Check(
                "with it the final loss is no worse",
                f"{losses[1]:.3f}, without {losses[0]:.3f}",
                no_worse,
            ),
        ),
    )


def _finite(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None
