"""Packed documents that layouts are measured on, as in benchmarks/balance.py."""

from __future__ import annotations

import math

import numpy as np
import torch

from keel import masks
from keel.masks import AttnMask


def packed_bounds(tokens: int) -> list[int]:
    """19 documents, median tokens / 24, the longest a quarter of all tokens."""
    draws, bounds = torch.Generator().manual_seed(0), [0]
    while bounds[-1] < tokens:
        length = tokens / 24 * math.exp(1.2 * float(torch.randn(1, generator=draws)))
        bounds.append(min(tokens, bounds[-1] + int(min(max(length, 16), tokens / 4))))
    return bounds


def lognormal_bounds(tokens: int) -> list[int]:
    """20 others of the same distribution."""
    rng, bounds = np.random.default_rng(0), [0]
    while bounds[-1] < tokens:
        length = int(np.clip(rng.lognormal(np.log(tokens / 24), 1.2), 16, tokens / 4))
        bounds.append(min(tokens, bounds[-1] + length))
    return bounds


def short_bounds(tokens: int, count: int | None = None) -> list[int]:
    """Documents of 524 to 1,572 tokens, or so many of lengths that differ as much."""
    count = round(tokens / 1048.576) if count is None else count
    ends = np.random.default_rng(0).uniform(0.5, 1.5, count).cumsum()
    return [0, *(ends / ends[-1] * tokens).round().astype(int).tolist()]


def document_mask(name: str, tokens: int) -> AttnMask:
    if name == "block causal":
        return masks.block_causal(4096, packed_bounds(tokens))
    if name == "full documents":
        return masks.documents(packed_bounds(tokens))
    bounds = {"packed": packed_bounds, "lognormal": lognormal_bounds, "short": short_bounds}[name]
    return masks.documents(bounds(tokens), causal=True)
