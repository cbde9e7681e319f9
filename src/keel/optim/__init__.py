"""Optimizers: Muon on whole and on sharded parameters."""

from keel.optim.muon import Muon
from keel.optim.newton_schulz import orthogonalize

__all__ = ["Muon", "orthogonalize"]
