"""Memory and CPU time of a process and all of its descendants.

Memory is the proportional set size if the system reports it (Linux): a page that several processes
map, as workers do with a runtime's library, is divided among them. A sum of resident set sizes
would count it once per process, and a server with four workers would look like four servers. On
other systems it is the resident set size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


def processes(pid: int) -> Iterator[psutil.Process]:
    """Yield ``pid`` and its living descendants; nothing if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        yield root
        yield from root.children(recursive=True)


def memory_bytes(pid: int) -> int:
    """Memory of the whole tree; 0 if it has ended."""
    total = 0
    for process in processes(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += _memory(process)
    return total


def _memory(process: psutil.Process) -> int:
    resident = process.memory_info().rss
    with contextlib.suppress(psutil.AccessDenied):  # a process that may not be inspected
        return int(getattr(process.memory_full_info(), "pss", resident))
    return int(resident)


def cpu_seconds(pid: int) -> float:
    """CPU time of the tree since its start, including ended processes.

    A process' ``children_*`` times are those of the children that it has waited for.
    """
    total = 0.0
    for process in processes(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
