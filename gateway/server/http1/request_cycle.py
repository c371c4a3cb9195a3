"""One request and its response on an HTTP connection, in ASGI's terms."""

from __future__ import annotations

import asyncio
import http
import time
from email.utils import formatdate
from typing import Protocol

import structlog

from modelport.gateway.errors import MemoryExhausted
from modelport.gateway.protocols.asgi import App, Message, Scope
from modelport.gateway.runtime.request_memory import CURRENT, ConnectionMemory, Lease
from modelport.gateway.wire import via_header

log = structlog.get_logger("modelport.http")

#: Overhead of the object that holds one chunk of a body.
PIECE_BYTES = 64
#: Smaller requests do not count against the memory budget.
UNCOUNTED_BYTES = 4096
#: A body up to this size is joined with its head; a larger one is written without a copy.
COPIED_BYTES = 64 * 1024
STATUS_LINES = {
    int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}
#: Statuses without a body (RFC 9110, 6.4.1).
_BODILESS = (204, 304)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class DateHeader:
    """The ``date`` header, formatted once a second."""

    __slots__ = ("_line", "_until")

    def __init__(self) -> None:
        self._line, self._until = b"", -1.0

    def line(self) -> bytes:
        now = time.monotonic()
        if now >= self._until:
            self._line = f"date: {formatdate(usegmt=True)}\r\n".encode()
            self._until = now + 1.0
        return self._line

    def value(self) -> bytes:
        return self.line()[len(b"date: ") : -len(b"\r\n")]


class CycleConnection(Protocol):
    """The part of a connection, or of an HTTP/2 stream, that its cycles use."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    date_header: DateHeader
    memory: ConnectionMemory

    @property
    def writing_paused(self) -> bool:
        """Whether the transport's buffer is full."""

    async def writable(self) -> None:
        """Wait until the buffer drains, or the connection is lost."""

    def resume_reading(self) -> None: ...

    def count(self, size: int) -> None:
        """Count ``size`` bytes of the response that the client may not take at once; 0: it has.

        Raises:
            MemoryExhausted: The budget does not allow it.
        """

    def leaving(self) -> bool:
        """Whether responses ask clients to close the connection."""

    def response_complete(self, cycle: RequestResponseCycle) -> None:
        """Start the next queued request, or close."""


class RequestResponseCycle:
    """ASGI's ``receive`` and ``send`` for one request; over HTTP/2 in a subclass.

    The head of a response is held until the first part of its body, so that both are one write. If
    the client disconnects, ``receive`` returns ``http.disconnect``; an application that does not
    wait in ``receive`` is cancelled.
    """

    __slots__ = (
        "_bodiless", "_cancelled", "_chunked", "_chunks", "_connection", "_continue", "_delivered",
        "_head", "_received", "_refused", "_remaining", "_running", "_waiter", "begun", "buffered",
        "complete", "done", "gone", "keep_alive", "lease", "scope", "task", "via",
    )  # fmt: skip

    def __init__(
        self, connection: CycleConnection, scope: Scope, keep_alive: bool, expects_continue: bool
    ) -> None:
        self.scope = scope
        #: Whether another request may follow on the connection.
        self.keep_alive = keep_alive
        self.task: asyncio.Task[None] | None = None
        #: Memory that the request holds; None: nothing yet.
        self.lease: Lease | None = None
        #: The ``via`` header: gateways that the request passed through.
        self.via = b""
        self._received = 0
        #: Size of the body's chunks that wait for ``receive``, and whether the body is complete.
        self.buffered = 0
        self.complete = False
        #: Whether the response's head was sent, and whether all of it was.
        self.begun = False
        self.done = False
        #: Whether the client has disconnected.
        self.gone = False
        self._connection = connection
        self._continue = expects_continue
        self._chunks: list[bytes] = []
        self._delivered = self._running = self._cancelled = False
        self._refused = False  # there was no memory for the response
        self._waiter: asyncio.Future[None] | None = None
        self._head: bytes | None = None
        self._bodiless = self._chunked = False
        self._remaining: int | None = None  # bytes until ``content-length``

    async def run(self, app: App) -> None:
        if self.gone:
            return
        self._running = True
        CURRENT.set(self.count())
        if self.via:
            via_header.CURRENT.set(self.via.decode("latin-1"))
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
        """Append a chunk of the request's body.

        Raises:
            MemoryExhausted: The request would exceed the memory budget.
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
        """The memory that the request holds."""
        if self.lease is None:
            self.lease = self._connection.memory.lease()
        return self.lease

    def release(self) -> None:
        """Return the request's memory to the budget."""
        if self.lease is not None:
            self.lease.release()

    def end(self) -> None:
        """Mark the request's body as complete."""
        self.complete = True
        self._wake()

    def cancel(self) -> None:
        """Cancel the application; the client gets 503."""
        self._cancelled = True  # ``run`` checks it: a task cancelled before its start sends nothing
        if self._running and self.task is not None:
            self.task.cancel()

    def disconnect(self) -> None:
        """Note that the client has disconnected, and end the application."""
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
            self._send_continue()
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

    def _send_continue(self) -> None:
        self._connection.transport.write(CONTINUE)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the response ---------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        # A response that is rendered is counted at once, even if it cannot be sent yet.
        if self.begun and self._connection.writing_paused:
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
        self._note_status(status)
        lines = [STATUS_LINES[status], self._connection.date_header.line()]
        length: int | None = None
        for name, value in message.get("headers", ()):
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                if b"close" in value.lower():
                    self.keep_alive = False
                continue
            elif name == b"transfer-encoding":
                continue  # set by the connection
            lines.append(b"%b: %b\r\n" % (name, value))
        head = b"".join(lines)
        if not head.count(b"\n") == head.count(b"\r") == len(lines):
            raise RuntimeError("a response header holds a line break")
        self._remaining = length
        if length is None and not self._bodiless:
            if self.scope["http_version"] == "1.1":
                self._chunked = True
                head += b"transfer-encoding: chunked\r\n"
            else:
                self.keep_alive = False  # the body ends with the connection
            # A stream's head is sent even if its first part takes long.
            self._connection.loop.call_soon(self._flush)
        # Without 100 Continue the client may or may not send the body: the connection must close.
        if self._continue or self._connection.leaving():
            self.keep_alive = False
        self._head = head + (b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")

    def _note_status(self, status: int) -> None:
        self._bodiless = self.scope["method"] == "HEAD" or status in _BODILESS

    def _body(self, body: bytes, more: bool) -> None:
        if self._bodiless:
            body = b""
        elif self._remaining is not None:
            self._remaining -= len(body)
            if self._remaining < 0 or (self._remaining and not more):
                raise RuntimeError("the response's body differs from its content-length")
        head, self._head = self._head, None
        try:
            self._write(head or b"", body, more)
        except MemoryExhausted as error:
            if self._refused:
                self._cut_off()
                return
            self._refused = True
            self._fail(503, b'{"error":"%b"}' % str(error).encode())
            return
        self.begun = True
        if not more:
            self.done = True
            self._wake()
            self._connection.response_complete(self)

    def _write(self, before: bytes, body: bytes, more: bool) -> None:
        """Send a part of the response, ``before`` and ``body``, and its end.

        Raises:
            MemoryExhausted: The client does not read it at once, and the budget does not allow it.
        """
        after = b""
        if self._chunked:
            if body:
                before, after = b"%b%x\r\n" % (before, len(body)), b"\r\n"
            if not more:
                after += b"0\r\n\r\n"
        transport = self._connection.transport
        if len(body) > COPIED_BYTES:
            self._connection.count(len(body))
            transport.writelines((before, body, after))
            if not self._connection.writing_paused:
                self._connection.count(0)
        elif before or body or after:
            transport.write(b"".join((before, body, after)))

    def _flush(self) -> None:
        if self._head is not None and not self.gone:
            head, self._head, self.begun = self._head, None, True
            self._write(head, b"", True)

    def _cut_off(self) -> None:
        """End an incomplete response, so that the client notices."""
        self._connection.transport.close()

    def _fail(self, status: int, body: bytes) -> None:
        """Send an error response, or cut off a response that has begun."""
        if self.begun:
            self._cut_off()
            return
        self.keep_alive, self._head, self._chunked = False, None, False
        length = b"%d" % len(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        self._start({"status": status, "headers": headers})
        self._body(body, False)
