"""Keel inside of other libraries, by the hooks that they offer."""
