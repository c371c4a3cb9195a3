"""Memory files that carry the tensors of one direction again and again.

A new file for each frame costs its pages each time, on both sides: about 1.3 ms per MB. The sender
fills a region that is free, and the receiver copies the content out and frees it. So what the
receiver checks cannot change afterwards. Regions belong to one worker, which has had all that was
ever in them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview

#: Tensors begin at multiples of it.
ALIGNMENT = 64
#: Regions of one direction, and the largest content of one.
MAX_REGIONS, MAX_REGION_BYTES = 4, 8 * 1024 * 1024
#: The first byte of a region tells whether the receiver has to read it; the content begins here.
_BEGIN = ALIGNMENT
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def aligned(size: int) -> int:
    """The place after ``size`` bytes where the next tensor begins."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class SentRegions:
    """The regions that one side fills."""

    def __init__(self) -> None:
        self._regions: list[mmap.mmap] = []

    @property
    def unread(self) -> int:
        """The number of regions that the receiver has not read yet."""
        return sum(region[0] for region in self._regions)

    def put(self, buffers: Sequence[Buffer], size: int) -> tuple[int, int]:
        """Copy ``buffers``, ``size`` bytes with their padding, to a free region.

        Returns:
            The region's number from 1, 0 if none is free, and its descriptor if it is new, else -1.

        Raises:
            OSError: there is no memory for a new region.
        """
        if size > MAX_REGION_BYTES:
            return 0, -1
        free = next((n for n, region in enumerate(self._regions) if not region[0]), -1)
        if free < 0 and len(self._regions) == MAX_REGIONS:
            return 0, -1
        descriptor = -1
        if free < 0 or len(self._regions[free]) < _BEGIN + size:
            descriptor, region = _made(size)
            if free < 0:
                free = len(self._regions)
                self._regions.append(region)
            self._regions[free] = region
        region = self._regions[free]
        region[0] = 1
        place = _BEGIN
        for buffer in buffers:
            region[place : place + len(buffer)] = buffer
            place += aligned(len(buffer))
        return free + 1, descriptor


def _made(size: int) -> tuple[int, mmap.mmap]:
    """A new region for contents of ``size`` bytes, and of somewhat larger ones."""
    whole = _BEGIN + min(size + size // 4, MAX_REGION_BYTES)
    file = os.memfd_create("tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(file, 0, whole)  # else the lack of memory is SIGBUS
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        return file, mmap.mmap(file, whole)
    except BaseException:
        os.close(file)
        raise


class ReceivedRegions:
    """The regions that the other side fills."""

    def __init__(self) -> None:
        self._regions: dict[int, mmap.mmap] = {}

    def add(self, number: int, file: int) -> None:
        """Map a region, in place of an older one.

        Raises:
            ValueError: it can be truncated, or has a false size.
            OSError: it is no memory file.
        """
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("a region is not sealed")
        size = os.fstat(file).st_size
        if not _BEGIN < size <= _BEGIN + MAX_REGION_BYTES or not 0 < number <= MAX_REGIONS:
            raise ValueError(f"a region has {size} bytes")
        self._regions[number] = mmap.mmap(file, size)

    def take(self, number: int, size: int, writable: bool) -> bytes | bytearray:
        """Copy ``size`` bytes out of a region, and free it.

        Raises:
            ValueError: there is no such region, or it is smaller.
        """
        region = self._regions.get(number)
        if region is None or not size <= len(region) - _BEGIN:
            raise ValueError("the content of a region is not there")
        content: bytes | bytearray = (
            bytearray(memoryview(region)[_BEGIN : _BEGIN + size])
            if writable
            else region[_BEGIN : _BEGIN + size]
        )
        region[0] = 0
        return content
