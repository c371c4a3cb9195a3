"""Settings of glibc's malloc: freed memory is kept for the next request.

If every request's buffers are returned to the system and mapped again, the page faults cost more
than copying the data. glibc raises its thresholds after the first large ``free``, but still trims
the end of the heap too early.
"""

from __future__ import annotations

import ctypes
import os

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Larger blocks are returned when they are freed; this is glibc's maximum.
MMAP_BYTES = 32 * 2**20
#: Free memory that is kept at the end of the heap.
TRIM_BYTES = 2 * MMAP_BYTES

#: Thresholds that the user has set are kept: see mallopt(3).
_CHOSEN = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> None:
    """Set the thresholds, unless the user has, or the C library is not glibc."""
    if any(name in os.environ for name in _CHOSEN):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
