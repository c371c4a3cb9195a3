"""One run of one client against one server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    requests_per_second: float
    failed: int
    p50_ms: float
    p99_ms: float
