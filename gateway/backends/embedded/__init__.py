"""Backends with a runtime in this process; ``runtime`` is common to all."""
