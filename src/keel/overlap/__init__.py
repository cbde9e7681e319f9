"""Overlap of communication and attention: how to set it."""

from keel.overlap.control import Lever, OverlapConfig, advise, levers

__all__ = ["Lever", "OverlapConfig", "advise", "levers"]
