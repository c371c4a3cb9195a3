"""The longest time for which some work keeps the interpreter lock.

Another thread gets the lock between two instructions of Python, and not before a call into C ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any


def longest(work: Callable[[], object]) -> tuple[float, str]:
    """The most CPU seconds between two instructions of ``work``, and the line.

    The smaller of two runs counts: a first one may import modules and fault pages in.
    """
    return min(_longest(work), _longest(work))


def _longest(work: Callable[[], object]) -> tuple[float, str]:
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
