"""Priority of threads whose work nobody waits for.

A thread that wakes for a request must preempt such a thread at once. Until Linux 6.6, a high nice
value did that. Since then a running thread keeps its core until the end of its slice, whatever its
nice value; only a thread with a shorter slice preempts it (Linux 6.12, sched_setattr(2)).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import threading

#: A much larger value would let other processes delay the event loop, while such a thread holds the
#: interpreter lock.
BACKGROUND_NICE = 10
#: Longer than the default of any machine, which is 3 ms at most; not much longer, for the same
#: reason.
SLICE_NS = 4_000_000
#: The number of the system call, which glibc has no function for before 2.41.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_OTHER = 0
#: The first version of ``struct sched_attr``: size, policy, flags, nice value, priority, slice
#: ("runtime"), deadline and period.
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def lower_priority() -> None:
    """Lower the priority of this thread, where threads have one of their own."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICE)
        _lengthen_slice()


def _lengthen_slice() -> None:
    """Request slices of ``SLICE_NS``; an older kernel ignores that."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None and platform.system() == "Linux":
        attributes = _ATTRIBUTES.pack(
            _ATTRIBUTES.size, _SCHED_OTHER, 0, BACKGROUND_NICE, 0, SLICE_NS, 0, 0
        )
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)
