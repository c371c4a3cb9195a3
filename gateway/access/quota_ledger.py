"""The ledger of quotas: a table in memory that all processes of a gateway share.

A row belongs to one principal and one model. Times are those of ``time.monotonic``, which the
processes of a machine share. Each process counts its requests in flight in a cell of its own; a row
is locked while its clocks or its owner change. Nobody can choose names that share a row: the places
of rows depend on random bytes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: Rows of the table; a row that no longer holds anything is used again.
ROWS: Final = 16_384
#: Rows that are searched for a key.
_SEARCHED: Final = 32
#: Cells of a row: two of the key, the three clocks, then one for each process.
_CLOCKS, _IN_FLIGHT = 2, 5
_CELL_BYTES: Final = 8
#: Tries to lock a row, which another process holds for microseconds, or while it waits for a
#: processor. Then it is stopped, and the row is changed without the lock.
_LOCK_TRIES: Final = 200
#: Bytes after the last row on which the places of rows depend.
_SALT_BYTES: Final = 16


class QuotaLedger:
    """The table, as one process uses it.

    Args:
        processes: Number of processes that share the table.
        number: This process's number, from 0.
        descriptor: The shared file, as ``share`` made it; without it the table is this process's.
    """

    def __init__(self, processes: int = 1, number: int = 0, descriptor: int | None = None) -> None:
        self._width = _IN_FLIGHT + processes
        size = ROWS * self._width * _CELL_BYTES
        memory = mmap.mmap(-1 if descriptor is None else descriptor, size + _SALT_BYTES)
        if descriptor is None:
            memory[size:] = os.urandom(_SALT_BYTES)
        self._salt = memory[size:]
        self._clocks = memoryview(memory).cast("d")
        self._counts = memoryview(memory).cast("Q")
        self._own = _IN_FLIGHT + number
        self._descriptor = descriptor
        for row in range(ROWS):  # what a process of this number left that was killed
            self._counts[row * self._width + self._own] = 0

    @staticmethod
    def share(processes: int) -> int:
        """Make the file for ``processes``, and return its descriptor."""
        descriptor = os.memfd_create("modelport-quotas")
        size = ROWS * (_IN_FLIGHT + processes) * _CELL_BYTES
        os.pwrite(descriptor, os.urandom(_SALT_BYTES), size)
        return descriptor

    def key(self, principal: str, model: str) -> tuple[int, int]:
        """The key of a principal and a model; never (0, 0), which empty rows have."""
        text = f"{principal}\0{model}".encode()
        digest = hashlib.blake2b(text, digest_size=16, key=self._salt).digest()
        return int.from_bytes(digest[:8], "big") | 1, int.from_bytes(digest[8:], "big")

    @contextmanager
    def locked(self, row: int) -> Iterator[None]:
        """Lock ``row`` against other processes; the kernel unlocks it for one that is killed."""
        descriptor, at = self._descriptor, row * _CELL_BYTES
        if descriptor is None:
            yield
            return
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, _CELL_BYTES, at)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                os.sched_yield()
        try:
            yield
        finally:
            fcntl.lockf(descriptor, fcntl.LOCK_UN, _CELL_BYTES, at)

    def row(self, key: tuple[int, int], now: float) -> int | None:
        """Find the row of ``key``, or take one that holds nothing; None if there is no place.

        Until the row is locked and charged, another process may take it.
        """
        counts, width = self._counts, self._width
        free = None
        for step in range(_SEARCHED):
            row = (key[0] + step) % ROWS * width
            if counts[row] == key[0] and counts[row + 1] == key[1]:
                return row
            if free is None and self._is_idle(row, now):
                free = row
        if free is not None:
            with self.locked(free):
                if self._is_idle(free, now):
                    for cell in range(free + _CLOCKS, free + _IN_FLIGHT):
                        self._clocks[cell] = 0.0
                    counts[free], counts[free + 1] = key
        return free

    def belongs(self, row: int, key: tuple[int, int]) -> bool:
        """Whether ``row`` still belongs to ``key``."""
        return self._counts[row] == key[0] and self._counts[row + 1] == key[1]

    def clock(self, row: int, which: int) -> float:
        """Time at which the bucket ``which``, 0 to 2, of the row is full again."""
        return self._clocks[row + _CLOCKS + which]

    def set_clock(self, row: int, which: int, at: float) -> None:
        self._clocks[row + _CLOCKS + which] = at

    def in_flight(self, row: int) -> int:
        """The number of requests in flight in all processes."""
        return sum(self._counts[row + _IN_FLIGHT : row + self._width])

    def count_in_flight(self, row: int, change: int) -> None:
        """Add to the number of requests in flight in this process."""
        self._counts[row + self._own] = max(0, self._counts[row + self._own] + change)

    def _is_idle(self, row: int, now: float) -> bool:
        clocks = self._clocks[row + _CLOCKS : row + _IN_FLIGHT]
        return max(clocks) <= now and not self.in_flight(row)
