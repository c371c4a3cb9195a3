"""The C library's allocator: what is freed is kept for the next request, not given back at once.

A body of a megabyte that is given back and asked for again costs its pages once more each time,
which is more than to copy it. glibc comes to the same thresholds by itself once something large
was freed, except that what lies at the heap's end is then still given back too soon.
"""

from __future__ import annotations

import ctypes
import os

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Larger blocks are given back when they are freed; glibc allows no more.
MMAP_BYTES = 32 * 2**20
#: What may lie free at the heap's end.
TRIM_BYTES = 2 * MMAP_BYTES


#: Where somebody has chosen thresholds, they stay: see mallopt(3).
_CHOSEN = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> None:
    """Nothing happens where the C library is another one, or is told what to keep."""
    if any(name in os.environ for name in _CHOSEN):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
