"""The memory that requests may hold: one budget for the process, one for each connection.

A front leases from both while a body comes in, decoders lease more for what they make of it, and
the front gives all of it back with the request:

    connection = PROCESS.connection()      # with the connection
    lease = connection.lease()             # with the request, in the task that answers it
    CURRENT.set(lease)
    lease.reserve(len(part))               # raises MemoryExhausted: 503, RESOURCE_EXHAUSTED
    ...
    lease.release()                        # in a ``finally``

Any thread may reserve. What is reserved is an estimate of what is allocated: nothing is measured.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from modelport.gateway.errors import MemoryExhausted

#: Until the settings say otherwise.
DEFAULT_BYTES = 1 << 30
#: One connection may hold this part of the process's budget: proxies send all traffic over one.
CONNECTION_SHARE = 2


class RequestMemory:
    """The budget of the process."""

    __slots__ = ("_lock", "limit_bytes", "refused", "used_bytes")

    def __init__(self, limit_bytes: int = DEFAULT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        #: Counts the requests that were refused for want of memory.
        self.refused = 0
        self._lock = threading.Lock()

    def connection(self) -> ConnectionMemory:
        """The budget of a new connection."""
        return ConnectionMemory(self)

    def move(self, connection: ConnectionMemory, size: int) -> None:
        """Take ``size`` bytes from both budgets; negative: give them back.

        Raises:
            MemoryExhausted: there are not so many left; none are taken.
        """
        with self._lock:
            used, used_there = self.used_bytes + size, connection.used_bytes + size
            scarce = used > self.limit_bytes or used_there > self.limit_bytes // CONNECTION_SHARE
            if size > 0 and scarce:
                self.refused += 1
            else:
                self.used_bytes, connection.used_bytes = used, used_there
                return
        raise MemoryExhausted


class ConnectionMemory:
    """The budget of one connection: a share of the process's."""

    __slots__ = ("process", "used_bytes")

    def __init__(self, process: RequestMemory) -> None:
        self.process = process
        self.used_bytes = 0

    def lease(self) -> Lease:
        """For a new request; it holds nothing yet."""
        return Lease(self)


class Lease:
    """The bytes that one request holds."""

    __slots__ = ("_connection", "size")

    def __init__(self, connection: ConnectionMemory) -> None:
        self._connection = connection
        self.size = 0

    def reserve(self, size: int) -> None:
        """Hold ``size`` more bytes.

        Raises:
            MemoryExhausted: there are not so many left. The request is to be refused.
        """
        self._connection.process.move(self._connection, size)
        self.size += size

    def give_back(self, size: int) -> None:
        """Hold ``size`` bytes less, of those that are held."""
        size = min(size, self.size)
        if size:
            self.size -= size
            self._connection.process.move(self._connection, -size)

    def release(self) -> None:
        """Give everything back; a second time there is nothing to give."""
        size, self.size = self.size, 0
        if size:
            self._connection.process.move(self._connection, -size)


#: Of this process; the server sets its limit.
PROCESS = RequestMemory()
#: The lease of the request that the running task answers. None: nobody counts.
CURRENT: ContextVar[Lease | None] = ContextVar("lease", default=None)


def reserve(size: int) -> None:
    """Hold ``size`` more bytes for the request that the running task answers.

    Raises:
        MemoryExhausted: there are not so many left.
    """
    lease = CURRENT.get()
    if lease is not None and size > 0:
        lease.reserve(size)


@contextmanager
def reserved(size: int) -> Iterator[None]:
    """Hold ``size`` more bytes as long as the block runs.

    Raises:
        MemoryExhausted: there are not so many left.
    """
    reserve(size)
    try:
        yield
    finally:
        lease = CURRENT.get()
        if lease is not None:
            lease.give_back(size)
