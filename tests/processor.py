"""Limits on processor time that hold on slow processors, too."""

from __future__ import annotations

import time

#: Processor time of ``_work`` where a limit holds as it is written; slower ones may take longer.
_WORK_SECONDS = 0.006
_RUNS = 3


def seconds_since(started: float) -> float:
    """Return what this process's time since ``started`` would be on a processor of known speed.

    Args:
        started: A time by ``time.process_time``.
    """
    return scaled(time.process_time() - started)


def scaled(seconds: float) -> float:
    """Return what ``seconds`` of this processor would be on one of known speed."""
    return seconds / max(1.0, min(_seconds_of_work() for _ in range(_RUNS)) / _WORK_SECONDS)


def _seconds_of_work() -> float:
    started = time.process_time()
    _work()
    return time.process_time() - started


def _work() -> int:
    """Do a little of what servers do in Python: cut bytes, look names up, add."""
    data, seen = bytes(range(256)) * 4, dict[bytes, int]()
    for number in range(40_000):
        part = data[number % 900 :][:8]
        seen[part] = seen.get(part, 0) + len(part)
    return sum(seen.values())
