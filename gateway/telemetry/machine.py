"""Triton's metrics of the machine's processors and memory, where it has ``/proc``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_STAT, _MEMORY = Path("/proc/stat"), Path("/proc/meminfo")
#: Positions of idle and iowait in the first line of ``/proc/stat``; guests count as users.
_IDLE, _FIELDS = (3, 4), 8


class MachineCollector(Collector):
    """The utilization since the last scrape, and the memory."""

    def __init__(self) -> None:
        self._before = _ticks() if _STAT.exists() else (0, 0)
        self._utilization = 0.0

    def collect(self) -> Iterator[Metric]:
        if not _STAT.exists() or not _MEMORY.exists():
            return
        now = _ticks()
        busy, total = (after - before for after, before in zip(now, self._before, strict=True))
        if total > 0:
            self._before, self._utilization = now, min(1.0, max(0.0, busy / total))
        yield GaugeMetricFamily(
            "nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", round(self._utilization, 4)
        )
        rows = (line.split() for line in _MEMORY.read_text().splitlines())
        kibibytes = {row[0]: int(row[1]) for row in rows}
        total_bytes = kibibytes["MemTotal:"] * 1024
        used = total_bytes - kibibytes["MemAvailable:"] * 1024
        yield GaugeMetricFamily("nv_cpu_memory_total_bytes", "CPU total memory (RAM)", total_bytes)
        yield GaugeMetricFamily("nv_cpu_memory_used_bytes", "CPU used memory (RAM)", used)


def _ticks() -> tuple[int, int]:
    """The busy ticks of all processors, and all of them."""
    with _STAT.open() as file:
        ticks = [int(text) for text in file.readline().split()[1 : _FIELDS + 1]]
    total = sum(ticks)
    return total - sum(ticks[place] for place in _IDLE), total


#: A gateway with workers makes a new registry for each scrape.
MACHINE = MachineCollector()
