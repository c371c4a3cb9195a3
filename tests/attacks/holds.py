"""The times for which some work keeps the interpreter lock.

Another thread gets the lock between two instructions of Python, and not before a call into C ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

#: The first may import modules and fault pages in, and a busy machine may take time away.
RUNS = 5


def longer_than(seconds: float, work: Callable[[], object]) -> str:
    """The line that keeps the lock for more CPU ``seconds`` in every run of ``work``, if any."""
    found = ""
    for _ in range(RUNS):
        spent, found = longest(work)
        if spent <= seconds:
            return ""
    return f"{found}: {spent * 1000:.1f} ms"


def longest(work: Callable[[], object]) -> tuple[float, str]:
    """The most CPU seconds between two instructions of ``work``, and the line."""
    clock, most, at = time.thread_time_ns, 0, ""
    before, line = clock(), ""

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal before, line, most, at
        spent = clock() - before
        if spent > most:
            most, at = spent, line
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame.f_trace_opcodes = True
        before = clock()
        return trace

    traced = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(traced)
    return most / 1e9, at
