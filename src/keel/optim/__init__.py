"""Optimizers: Muon on whole and on sharded parameters."""
