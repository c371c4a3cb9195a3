"""The function that the servers of ``benchmarks.decorated_functions`` share."""

from __future__ import annotations

from typing import Any


def increment(x: Any) -> Any:
    """Add 1 to each value of an array."""
    return x + 1
