"""What a process and all that it started take: memory and processor time.

Memory is the proportional set size where the system tells it (Linux): a page that several processes
map, as workers do with a runtime's library, is shared out among them. The sum of resident set sizes
would count it once for each, and a server with four workers would look like four servers. Elsewhere
it is the resident set size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


def processes(pid: int) -> Iterator[psutil.Process]:
    """``pid`` and its descendants, those that are still there; none where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        yield root
        yield from root.children(recursive=True)


def memory_bytes(pid: int) -> int:
    """Memory of the whole tree; 0 where it has ended."""
    total = 0
    for process in processes(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += _memory(process)
    return total


def _memory(process: psutil.Process) -> int:
    resident = process.memory_info().rss
    with contextlib.suppress(psutil.AccessDenied):  # a process that may not be looked into
        return int(getattr(process.memory_full_info(), "pss", resident))
    return int(resident)


def cpu_seconds(pid: int) -> float:
    """Processor time of the tree since it began, of processes that have ended in it too.

    A process' ``children_*`` times are those of the children that it has waited for.
    """
    total = 0.0
    for process in processes(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
