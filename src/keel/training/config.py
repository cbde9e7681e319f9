"""Settings of the training demo. The defaults are chosen such that Muon's logits explode."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from keel.nn import GPTConfig
from keel.training.corpus import VOCABULARY

RUNS = ("muon", "muon_clip")
"""The same training twice: as it is, and with QK-Clip."""
MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Sizes and rates of a run; wrong ones are refused here, before any work.

    >>> TrainConfig(steps=10, warmup=2, cooldown=4).rate(0)
    0.5
    """

    steps: int = 500
    tokens: int = 512
    """Of a step, over all ranks."""
    num_layers: int = 3
    hidden_size: int = 64
    num_heads: int = 2
    lr: float = 0.024
    """Of Muon, for all hidden matrices, without weight decay."""
    aux_lr: float = 3e-3
    """Of AdamW, for embedding, head and norms."""
    tau: float = 15.0
    warmup: int = 10
    """Steps in which rates grow to their full value."""
    cooldown: int = 50
    """Steps at the end in which they fall to 0."""
    seed: int = 0
    num_ranks: int = 2
    """Ranks that share the tokens of a step: context parallelism."""

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "num_ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_ranks > MAX_RANKS:
            raise ValueError(f"num_ranks must be at most {MAX_RANKS}, got {self.num_ranks}")
        if self.tokens < 2 * self.num_ranks:
            raise ValueError(
                f"{self.tokens} tokens are too few for {self.num_ranks} ranks: take at least "
                f"{2 * self.num_ranks}"
            )
        for name in ("lr", "aux_lr", "tau"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("warmup", "cooldown", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        self.model_config()

    def model_config(self) -> GPTConfig:
        return GPTConfig(
            vocab_size=VOCABULARY,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
        )

    def rate(self, step: int) -> float:
        """What learning rates are multiplied with at a step."""
        up = (step + 1) / self.warmup if step < self.warmup else 1.0
        left = self.steps - step
        return up * (left / self.cooldown if left < self.cooldown else 1.0)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
