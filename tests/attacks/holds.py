"""The times for which some work keeps the interpreter lock.

Another thread gets the lock between two instructions of Python, and not before a call into C ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

#: The first may import modules and fault pages in, and a busy machine may take time away.
RUNS = 3


#: A piece is at least this many times shorter than the whole.
PIECES = 5


class KeptLock(NamedTuple):
    """The longest time for which some work keeps the lock, in CPU seconds, and its line."""

    seconds: float
    line: str

    def __str__(self) -> str:
        return f"{self.line}: {self.seconds * 1000:.2f} ms"


def in_pieces(pieces: Callable[[], object], whole: Callable[[], object]) -> str:
    """The line that keeps the lock too long, if ``pieces`` is hardly better than ``whole``.

    The two are compared with each other, since clocks and processors differ. The least of several
    runs counts.
    """
    found, bad = (min(_longest(work) for _ in range(RUNS)) for work in (pieces, whole))
    return "" if found.seconds * PIECES <= bad.seconds else f"{found}; as one piece: {bad}"


def _longest(work: Callable[[], object]) -> KeptLock:
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
    return KeptLock(most / 1e9, at)
