"""Memory budgets for requests and responses: one for the process, and one for each connection.

A server reserves from both while it receives a body, decoders reserve more for its decoded form,
and the server releases everything at the end of the request:

    connection = PROCESS.connection()      # with the connection
    lease = Lease(connection)              # with the request, in the task that answers it
    CURRENT.set(lease)
    lease.reserve(len(part))               # raises MemoryExhausted: 503, RESOURCE_EXHAUSTED
    ...
    lease.release()                        # in a ``finally``

Any thread may reserve. Reservations are estimates; actual allocations are not measured.

A response that its client does not take at once is an ``UnreadResponse``. Where a budget is used
up, those that have waited longest without progress are cut off first.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

from modelport.gateway.errors import MemoryExhausted

#: Limit until the server sets it.
DEFAULT_BYTES = 1 << 30
#: A connection may hold 1/2 of the process's budget: proxies send all traffic over one.
CONNECTION_SHARE = 2
#: An unread response may be cut off for others if its client takes less than ``MOVED_BYTES`` of it
#: in this time.
STALLED_SECONDS = 2.0
MOVED_BYTES = 64 * 1024
#: The objects of a request whose response waits, and of one that waits to be served.
RESPONSE_BYTES, WAITING_BYTES = 2048, 8192
#: Unread responses of a connection; a further request whose response may be much larger than
#: itself is served when one of them is taken.
MOST_UNREAD = 8


class RequestMemory:
    """The budget of the process."""

    def __init__(self, limit_bytes: int = DEFAULT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        #: Number of refused reservations.
        self.refused = 0
        #: In the order of their last progress. Only the event loop, in ``_loop_thread``, uses it.
        self.unread: dict[UnreadResponse, None] = {}
        #: Number of responses that are made, or wait to be sent.
        self.rendering = 0
        self._loop_thread = 0
        #: Guards the counts of the process, its connections and their leases.
        self.lock = threading.Lock()

    def connection(self) -> ConnectionMemory:
        """Make the budget of a new connection."""
        return ConnectionMemory(self)

    def move(self, connection: ConnectionMemory, size: int, exceed: bool = False) -> None:
        """Take ``size`` bytes from both budgets, or return them if ``size`` is negative.

        Args:
            exceed: take them even if a budget is exceeded.

        Raises:
            MemoryExhausted: A budget is exceeded; nothing is taken.
        """
        while True:
            with self.lock:
                used, used_there = self.used_bytes + size, connection.used_bytes + size
                scarce = used > self.limit_bytes
                scarce_there = used_there > self.limit_bytes // CONNECTION_SHARE
                if size <= 0 or not (scarce or scarce_there):
                    self.used_bytes, connection.used_bytes = used, used_there
                    return
            if self._cut_off_stalled(self.unread if scarce else connection.unread):
                continue
            with self.lock:
                if not exceed:
                    self.refused += 1
                    raise MemoryExhausted
                self.used_bytes += size
                connection.used_bytes += size
                return

    def _cut_off_stalled(self, unread: dict[UnreadResponse, None]) -> bool:
        """Cut off the response that has made no progress for longest, if it has stalled."""
        if not unread or threading.get_ident() != self._loop_thread:
            return False
        first = next(iter(unread))
        if time.monotonic() - first.moved_at < STALLED_SECONDS:
            return False
        first.release()
        first.cut_off()
        return True

    def add(self, response: UnreadResponse) -> None:
        """Add a response, or move it behind the others after progress."""
        self._loop_thread = threading.get_ident()
        for unread in (self.unread, response.connection.unread):
            unread.pop(response, None)
            unread[response] = None


class ConnectionMemory:
    """The budget of one connection: a share of the process's."""

    __slots__ = ("_turns", "_turns_taken", "process", "unread", "used_bytes")

    def __init__(self, process: RequestMemory) -> None:
        self.process = process
        self.used_bytes = 0
        #: As the process's.
        self.unread: dict[UnreadResponse, None] = {}
        #: Requests that wait for their turn.
        self._turns: deque[asyncio.Future[None]] = deque()
        self._turns_taken = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait while ``MOST_UNREAD`` responses are unread, or made by another turn.

        Raises:
            MemoryExhausted: Too many requests wait.
        """
        if self._is_full():
            lease = Lease(self)
            lease.reserve(WAITING_BYTES)
            try:
                while self._is_full():
                    turn = asyncio.get_running_loop().create_future()
                    self._turns.append(turn)
                    await turn
            except asyncio.CancelledError:
                self.next_turn()  # which was this request's
                raise
            finally:
                lease.release()
        self._turns_taken += 1
        try:
            yield
        finally:
            self._turns_taken -= 1
            self.next_turn()

    def _is_full(self) -> bool:
        return len(self.unread) + self._turns_taken >= MOST_UNREAD

    def next_turn(self) -> None:
        """Let one of the requests that wait look again."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return


class UnreadResponse:
    """The part of a response, or of a connection's, that its client has not taken yet.

    It belongs to the event loop. ``cut_off`` drops it and tells the client, if it can.
    """

    __slots__ = ("_mark", "connection", "cut_off", "moved_at", "size")

    def __init__(self, connection: ConnectionMemory, cut_off: Callable[[], None]) -> None:
        self.connection = connection
        self.cut_off = cut_off
        #: The bytes that are counted; 0: nothing waits.
        self.size = 0
        #: When the client last took ``MOVED_BYTES``, and what was unread then.
        self.moved_at = 0.0
        self._mark = 0

    def hold(self, size: int, request: Lease | None = None, exceed: bool = False) -> None:
        """Count ``size`` bytes as unread, in place of those counted before and of ``request``'s.

        The only unread response of the process is held however large it is.

        Raises:
            MemoryExhausted: A budget is exceeded; nothing has changed.
        """
        size += RESPONSE_BYTES
        process = self.connection.process
        grown = size - self.size - (0 if request is None else request.size)
        alone = not process.rendering and len(process.unread) == (self.size > 0)
        process.move(self.connection, grown, exceed or alone)
        if request is not None:
            request.size = 0
        begins, self.size = not self.size, size
        if begins:
            self._mark = size
            self.touch()
        else:
            self.look(size)

    def look(self, unread: int) -> None:
        """Note the client's progress: this number of bytes is unread now."""
        moved = self._mark - unread
        if moved < 0 or moved >= MOVED_BYTES:
            self._mark = unread
        if moved >= MOVED_BYTES:
            self.touch()

    def touch(self) -> None:
        """Note that the client makes progress."""
        if self.size:
            self.moved_at = time.monotonic()
            self.connection.process.add(self)

    def release(self) -> None:
        """Return everything to the budgets: it was taken, or dropped."""
        size, self.size = self.size, 0
        if size:
            connection = self.connection
            del connection.unread[self], connection.process.unread[self]
            connection.process.move(connection, -size)
            connection.next_turn()


class Lease:
    """The bytes that one request of a connection holds."""

    __slots__ = ("_connection", "_released", "_responses", "size")

    def __init__(self, connection: ConnectionMemory) -> None:
        self._connection = connection
        self.size = 0
        #: Work for a client that has gone may still reserve: nobody would return it.
        self._released = False
        #: Of ``reserve_response``.
        self._responses = 0

    def sibling(self) -> Lease:
        """Make another lease of the same connection."""
        return Lease(self._connection)

    def reserve(self, size: int) -> None:
        """Reserve ``size`` more bytes.

        Raises:
            MemoryExhausted: A budget is exceeded, and the request must be refused.
        """
        self._connection.process.move(self._connection, size)
        self._add(size)

    def _add(self, size: int) -> bool:
        """Add bytes that were taken; return them instead if the request has ended."""
        process = self._connection.process
        with process.lock:
            kept = not self._released
            if kept:
                self.size += size
        if not kept:
            process.move(self._connection, -size)
        return kept

    def give_back(self, size: int) -> None:
        """Return up to ``size`` bytes to the budgets."""
        size = min(size, self.size)
        if size:
            self.size -= size
            self._connection.process.move(self._connection, -size)

    def reserve_response(self, size: int) -> None:
        """Reserve ``size`` bytes for a response that is not sent yet.

        Raises:
            MemoryExhausted: A budget is exceeded, and there are other responses.
        """
        process = self._connection.process
        process.move(self._connection, size, not process.rendering and not process.unread)
        if self._add(size):
            process.rendering += 1
            self._responses += 1

    def return_response(self, size: int) -> None:
        """Return what ``reserve_response`` took."""
        if self._responses:
            self._responses -= 1
            self._connection.process.rendering -= 1
            self.give_back(size)

    def release(self) -> None:
        """Return everything to the budgets. May be called more than once."""
        with self._connection.process.lock:
            size, self.size, self._released = self.size, 0, True
        if self._responses:
            self._connection.process.rendering -= self._responses
            self._responses = 0
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
def rendering(size: int) -> Iterator[None]:
    """Reserve ``size`` bytes for a response while the block makes it.

    The only one that is made or unread may be larger than the budgets.

    Raises:
        MemoryExhausted: A budget is exceeded.
    """
    lease = CURRENT.get()
    if lease is None:
        yield
        return
    lease.reserve_response(size)
    try:
        yield
    finally:
        lease.return_response(size)


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
