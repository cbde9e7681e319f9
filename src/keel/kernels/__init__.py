"""Backends: device code and its launchers, one operation a file. Nothing here knows the oracle."""
