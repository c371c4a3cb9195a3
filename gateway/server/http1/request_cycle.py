"""One request and its answer on an HTTP/1.1 connection, as an ASGI application sees them."""

from __future__ import annotations

import asyncio
import http
import time
from typing import Protocol

import structlog

from modelport.gateway.protocols.asgi import App, Message, Scope
from modelport.gateway.runtime.request_memory import CURRENT, ConnectionMemory, Lease
from modelport.gateway.wire import hops

log = structlog.get_logger("modelport.front")

#: A piece of a body is an object, which takes memory besides its bytes.
PIECE_BYTES = 64
#: A small request is not counted as held memory.
UNCOUNTED_BYTES = 4096
#: Up to this an answer is copied behind its head; past it the two are written one after the other.
COPIED_BYTES = 64 * 1024
STATUS_LINES = {
    int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}
#: Of these statuses there is no body (RFC 9110, 6.4.1).
_BODILESS = (204, 304)
#: In English, whatever the locale (RFC 9110, 5.6.7).
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Clock:
    """The ``date`` of answers, written out once a second."""

    __slots__ = ("_line", "_until")

    def __init__(self) -> None:
        self._line, self._until = b"", -1.0

    def line(self) -> bytes:
        now = time.monotonic()
        if now >= self._until:
            at = time.gmtime()
            day, month = _DAYS[at.tm_wday], _MONTHS[at.tm_mon - 1]
            date = f"{day}, {at.tm_mday:02} {month} {at.tm_year}"
            self._line = f"date: {date} {time.strftime('%H:%M:%S', at)} GMT\r\n".encode()
            self._until = now + 1.0
        return self._line


class Connection(Protocol):
    """What an exchange needs of the connection it is on."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    clock: Clock
    memory: ConnectionMemory
    #: The transport has enough to write; ``writable`` waits until it takes more, or is lost.
    writing_paused: bool

    async def writable(self) -> None: ...

    def resume_reading(self) -> None: ...

    def leaving(self) -> bool:
        """Whether clients are to leave their connections."""

    def answered(self, exchange: Exchange) -> None:
        """The answer is complete."""


class Exchange:
    """ASGI's ``receive`` and ``send`` for one request.

    An answer's head waits for the body's first part, so that both are one write. A client that goes
    cancels the application, unless that waits in ``receive``, where it is told.
    """

    __slots__ = (
        "_bodiless", "_cancelled", "_chunked", "_chunks", "_connection", "_continue", "_delivered",
        "_head", "_received", "_remaining", "_running", "_waiter", "begun", "buffered", "complete",
        "done", "gone", "keep_alive", "lease", "scope", "task", "via",
    )  # fmt: skip

    def __init__(
        self, connection: Connection, scope: Scope, keep_alive: bool, expects_continue: bool
    ) -> None:
        self.scope = scope
        #: Whether another request may follow on the connection.
        self.keep_alive = keep_alive
        self.task: asyncio.Task[None] | None = None
        #: The memory that the request holds; None: it is not worth counting.
        self.lease: Lease | None = None
        #: The gateways that it has come through.
        self.via = b""
        self._received = 0
        #: The request's body: what has come and is not received yet, with what each piece of it
        #: takes besides, and whether that is all.
        self.buffered = 0
        self.complete = False
        #: Of the answer: whether its head is out, whether it is all out.
        self.begun = False
        self.done = False
        #: The client is.
        self.gone = False
        self._connection = connection
        self._continue = expects_continue
        self._chunks: list[bytes] = []
        self._delivered = self._running = self._cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self._head: bytes | None = None
        self._bodiless = self._chunked = False
        self._remaining: int | None = None  # of a body of a stated length

    async def run(self, app: App) -> None:
        if self.gone:
            return
        self._running = True
        if not self.complete:
            self.count()
        if self.lease is not None:
            CURRENT.set(self.lease)
        if self.via:
            hops.CURRENT.set(self.via.decode("latin-1"))
        try:
            if self._cancelled:
                raise asyncio.CancelledError
            await app(self.scope, self.receive, self.send)
            if not self.done and not self.gone:
                raise RuntimeError("the application returned before its response was complete")
        except asyncio.CancelledError:
            if not self.done and not self.gone:
                self._fail(503, b'{"error":"the server is shutting down"}')
        except Exception:
            log.exception("request failed")
            if not self.done and not self.gone:
                self._fail(500, b'{"error":"internal error"}')

    # -- the request ----------------------------------------------------------------------------

    def add(self, body: bytes) -> None:
        """More of the request's body.

        Raises:
            MemoryExhausted: requests hold all that they may.
        """
        if not self.done:
            size = len(body) + PIECE_BYTES
            self._received += size
            if self._received > UNCOUNTED_BYTES:
                self.count().reserve(size)
            self._chunks.append(body)
            self.buffered += size
            self._wake()

    def count(self) -> Lease:
        """Count the memory that the request holds, from now on."""
        if self.lease is None:
            self.lease = self._connection.memory.lease()
        return self.lease

    def release(self) -> None:
        """Give back the memory that the request holds."""
        if self.lease is not None:
            self.lease.release()

    def end(self) -> None:
        """The request's body is complete."""
        self.complete = True
        self._wake()

    def cancel(self) -> None:
        """Cut the application off; the client is told."""
        self._cancelled = True  # should it not have begun: a task that never runs says nothing
        if self._running and self.task is not None:
            self.task.cancel()

    def disconnect(self) -> None:
        """The client is gone, and with it the need for an answer."""
        if self.done or self.gone:
            return
        self.gone = True
        if self._waiter is not None:
            self._wake()
        elif self._running and self.task is not None:
            self.task.cancel()

    async def receive(self) -> Message:
        if self._continue and not self.begun:
            self._continue = False
            self._connection.transport.write(CONTINUE)
        while not (self.gone or self.done or (self.complete and not self._delivered)):
            if self._chunks:
                break
            self._connection.resume_reading()
            self._waiter = self._connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.gone or self.done:
            return {"type": "http.disconnect"}
        chunks, self._chunks, self.buffered = self._chunks, [], 0
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._delivered = self.complete
        return {"type": "http.request", "body": body, "more_body": not self.complete}

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the answer -----------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        if self._connection.writing_paused:
            await self._connection.writable()
        if self.gone:
            return
        kind = message["type"]
        if kind == "http.response.body" and not self.done and (self._head or self.begun):
            self._body(message.get("body", b""), message.get("more_body", False))
        elif kind == "http.response.start" and self._head is None and not self.begun:
            self._start(message)
        else:
            raise RuntimeError(f"unexpected ASGI message '{kind}'")

    def _start(self, message: Message) -> None:
        status = message["status"]
        lines = [STATUS_LINES[status], self._connection.clock.line()]
        length: int | None = None
        for name, value in message.get("headers", ()):
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                if b"close" in value.lower():
                    self.keep_alive = False
                continue
            elif name == b"transfer-encoding":
                continue  # the connection's matter
            lines.append(b"%b: %b\r\n" % (name, value))
        head = b"".join(lines)
        if not head.count(b"\n") == head.count(b"\r") == len(lines):
            raise RuntimeError("a response header holds a line break")
        self._bodiless = self.scope["method"] == "HEAD" or status in _BODILESS
        self._remaining = length
        if length is None and not self._bodiless:
            if self.scope["http_version"] == "1.1":
                self._chunked = True
                head += b"transfer-encoding: chunked\r\n"
            else:
                self.keep_alive = False  # the end of the connection is the body's
            # Whoever waits for the first part of a stream gets its head meanwhile.
            self._connection.loop.call_soon(self._flush)
        # Whether a body follows that was not asked for, nobody can tell.
        if self._continue or self._connection.leaving():
            self.keep_alive = False
        self._head = head + (b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")

    def _body(self, body: bytes, more: bool) -> None:
        before = after = b""
        if self._bodiless:
            body = b""
        elif self._chunked:
            if body:
                before, after = b"%x\r\n" % len(body), b"\r\n"
            if not more:
                after += b"0\r\n\r\n"
        elif self._remaining is not None:
            self._remaining -= len(body)
            if self._remaining < 0 or (self._remaining and not more):
                raise RuntimeError("the response's body is not of its content-length")
        transport, head = self._connection.transport, self._head
        if head is not None:
            self._head, self.begun = None, True
            before = head + before
        if len(body) > COPIED_BYTES:
            transport.writelines((before, body, after))
        elif before or body or after:
            transport.write(b"".join((before, body, after)))
        if not more:
            self.done = True
            self._wake()
            self._connection.answered(self)

    def _flush(self) -> None:
        if self._head is not None and not self.gone:
            self._connection.transport.write(self._head)
            self._head, self.begun = None, True

    def _fail(self, status: int, body: bytes) -> None:
        """Say so if nothing has been said yet; else what has been said is left without an end."""
        if self.begun:
            self._connection.transport.close()
            return
        self.keep_alive, self._head, self._chunked = False, None, False
        length = b"%d" % len(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        self._start({"status": status, "headers": headers})
        self._body(body, False)
