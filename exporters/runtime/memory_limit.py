"""A limit on the memory that this process may take in addition."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def more_memory(most_bytes: int) -> Iterator[None]:
    """Let the block take ``most_bytes`` more; beyond that, allocations fail."""
    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    known = [limit for limit in before if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([held + most_bytes, *known]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
