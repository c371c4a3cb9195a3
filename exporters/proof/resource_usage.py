"""Time and peak memory of a block of code."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5)


@dataclass(slots=True)
class Usage:
    """Time and peak memory, filled in when the block ends."""

    seconds: float = 0.0
    peak_memory_bytes: int = 0


@contextlib.contextmanager
def measured() -> Iterator[Usage]:
    """Measure the block.

    On Linux the peak is the block's own; elsewhere it is the peak since the process started.
    """
    with contextlib.suppress(OSError):
        _CLEAR.write_text(_RESET_PEAK)
    usage, started = Usage(), time.perf_counter()
    try:
        yield usage
    finally:
        usage.seconds = time.perf_counter() - started
        usage.peak_memory_bytes = _peak()


def _peak() -> int:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = _STATUS.read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
