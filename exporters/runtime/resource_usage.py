"""Time and peak memory of an export."""

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
    """The time of a conversion, filled in when its block ends, and the peak memory of the process
    that reads, converts and proves the model."""

    seconds: float = 0.0
    peak_memory_bytes: int = 0


def forget_peak() -> None:
    """Begin to measure the peak memory, which is the process' since its start except on Linux."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text(_RESET_PEAK)


@contextlib.contextmanager
def measured() -> Iterator[Usage]:
    """Measure the time of the block."""
    usage, started = Usage(), time.perf_counter()
    try:
        yield usage
    finally:
        usage.seconds = time.perf_counter() - started


def peak_memory_bytes() -> int:
    """The peak since ``forget_peak``."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = _STATUS.read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """The memory that this process holds now; 0 except on Linux."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def available_bytes() -> int:
    """The memory that the machine has left; a very large number except on Linux."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(x for x in lines if x.startswith("MemAvailable:")).split()[1]) * 1024
    return sys.maxsize
