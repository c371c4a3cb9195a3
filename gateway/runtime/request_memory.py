"""Memory budgets for requests: one for the process, and one for each connection.

A server reserves from both while it receives a body, decoders reserve more for its decoded form,
and the server releases everything at the end of the request:

    connection = PROCESS.connection()      # with the connection
    lease = connection.lease()             # with the request, in the task that answers it
    CURRENT.set(lease)
    lease.reserve(len(part))               # raises MemoryExhausted: 503, RESOURCE_EXHAUSTED
    ...
    lease.release()                        # in a ``finally``

Any thread may reserve. Reservations are estimates; actual allocations are not measured.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from modelport.gateway.errors import MemoryExhausted

#: Limit until the server sets it.
DEFAULT_BYTES = 1 << 30
#: A connection may hold 1/2 of the process's budget: proxies send all traffic over one.
CONNECTION_SHARE = 2


class RequestMemory:
    """The budget of the process."""

    def __init__(self, limit_bytes: int = DEFAULT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        #: Number of refused reservations.
        self.refused = 0
        self._lock = threading.Lock()

    def connection(self) -> ConnectionMemory:
        """Make the budget of a new connection."""
        return ConnectionMemory(self)

    def move(self, connection: ConnectionMemory, size: int) -> None:
        """Take ``size`` bytes from both budgets, or return them if ``size`` is negative.

        Raises:
            MemoryExhausted: A budget is exceeded; nothing is taken.
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
        """Make the lease of a new request."""
        return Lease(self)


class Lease:
    """The bytes that one request holds."""

    __slots__ = ("_connection", "size")

    def __init__(self, connection: ConnectionMemory) -> None:
        self._connection = connection
        self.size = 0

    def sibling(self) -> Lease:
        """Make another lease of the same connection."""
        return Lease(self._connection)

    def reserve(self, size: int) -> None:
        """Reserve ``size`` more bytes.

        Raises:
            MemoryExhausted: A budget is exceeded, and the request must be refused.
        """
        self._connection.process.move(self._connection, size)
        self.size += size

    def give_back(self, size: int) -> None:
        """Return up to ``size`` bytes to the budgets."""
        size = min(size, self.size)
        if size:
            self.size -= size
            self._connection.process.move(self._connection, -size)

    def release(self) -> None:
        """Return everything to the budgets. May be called more than once."""
        size, self.size = self.size, 0
        if size:
            self._connection.process.move(self._connection, -size)


#: Budget of this process.
PROCESS = RequestMemory()
#: Lease of the request that the current task serves; None if it is not counted.
CURRENT: ContextVar[Lease | None] = ContextVar("lease", default=None)


def reserve(size: int) -> None:
    """Reserve ``size`` more bytes for the request that the current task serves.

    Raises:
        MemoryExhausted: A budget is exceeded.
    """
    lease = CURRENT.get()
    if lease is not None and size > 0:
        lease.reserve(size)


@contextmanager
def reserved(size: int) -> Iterator[None]:
    """Reserve ``size`` more bytes for the duration of the block.

    Raises:
        MemoryExhausted: A budget is exceeded.
    """
    reserve(size)
    try:
        yield
    finally:
        lease = CURRENT.get()
        if lease is not None:
            lease.give_back(size)


@contextmanager
def own_lease() -> Iterator[None]:
    """Release what the block reserves at its end, although the request continues."""
    lease = CURRENT.get()
    if lease is None:
        yield
        return
    own = lease.sibling()
    token = CURRENT.set(own)
    try:
        yield
    finally:
        CURRENT.reset(token)
        own.release()
