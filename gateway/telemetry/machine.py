"""Triton's metrics of the machine's processors and memory, where it has ``/proc``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_STAT, _MEMORY = Path("/proc/stat"), Path("/proc/meminfo")
#: Positions of idle and iowait in the first line of ``/proc/stat``; guests count as users.
_IDLE, _FIELDS = (3, 4), 8
#: Sandboxes hide these files, or empty them.
_UNREADABLE = (OSError, ValueError, LookupError)


class MachineCollector(Collector):
    """The utilization since the last scrape, and the memory; nothing where they cannot be read."""

    def __init__(self) -> None:
        self._before = (0, 0)
        self._utilization = 0.0
        with contextlib.suppress(*_UNREADABLE):
            self._before = _ticks()

    def collect(self) -> Iterator[Metric]:
        with contextlib.suppress(*_UNREADABLE):
            now, (total_bytes, available) = _ticks(), _memory()
            busy, ticks = (after - before for after, before in zip(now, self._before, strict=True))
            if ticks > 0:
                self._before, self._utilization = now, min(1.0, max(0.0, busy / ticks))
            for name, text, value in (
                ("utilization", "CPU utilization rate [0.0 - 1.0]", round(self._utilization, 4)),
                ("memory_total_bytes", "CPU total memory (RAM)", total_bytes),
                ("memory_used_bytes", "CPU used memory (RAM)", total_bytes - available),
            ):
                yield GaugeMetricFamily(f"nv_cpu_{name}", text, value)


def _ticks() -> tuple[int, int]:
    """The busy ticks of all processors, and all of them."""
    with _STAT.open() as file:
        ticks = [int(text) for text in file.readline().split()[1 : _FIELDS + 1]]
    total = sum(ticks)
    return total - sum(ticks[place] for place in _IDLE), total


def _memory() -> tuple[int, int]:
    """The bytes of memory, and those of them that are available."""
    rows = (line.split() for line in _MEMORY.read_text().splitlines())
    kibibytes = {row[0]: int(row[1]) for row in rows}
    return kibibytes["MemTotal:"] * 1024, kibibytes["MemAvailable:"] * 1024


#: A gateway with workers makes a new registry for each scrape.
MACHINE = MachineCollector()
