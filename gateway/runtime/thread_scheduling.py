"""Scheduling of threads on Linux: a thread that wakes for a request should run at once.

Since Linux 6.6, a thread that runs keeps its core until the end of its time slice, whatever its
nice value, even if another wakes. Only a thread with a shorter slice preempts it (Linux 6.12,
sched_setattr(2)). Older kernels ignore slices, and go by nice values.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import threading

#: Slices of threads that serve requests. The kernel's own are 0.7 to 3 ms, by the number of cores.
SLICE_NS = 500_000
#: Nice value of threads for whose work nobody waits. A much larger one would let other processes
#: delay the event loop, while such a thread holds the interpreter lock.
BACKGROUND_NICE = 10
#: The number of the system call, which glibc has no function for before 2.41.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_OTHER = 0
#: The first version of ``struct sched_attr``: size, policy, flags, nice value, priority, slice
#: ("runtime"), deadline and period.
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def prefer_requests() -> None:
    """Give short slices to this thread, and to those that it starts."""
    _set_slice(SLICE_NS)


def lower_priority() -> None:
    """Lower the priority of this thread."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICE)
        _set_slice(0)  # the kernel's own


def _set_slice(nanoseconds: int) -> None:
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, _SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)
