"""One request and its response on an HTTP connection."""

from __future__ import annotations

import asyncio
import http
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from contextvars import Context
from email.utils import formatdate
from typing import Protocol

import structlog

from modelport.gateway.errors import MemoryExhausted, ModelportError
from modelport.gateway.protocols.http_message import (
    ENDED,
    JSON,
    Answer,
    ClientDisconnected,
    Handler,
    Headers,
    HttpRequest,
    HttpResponse,
)
from modelport.gateway.runtime.request_memory import CURRENT, ConnectionMemory, Lease
from modelport.gateway.server import observed_requests
from modelport.gateway.server.http1.body_buffer import BodyBuffer
from modelport.gateway.server.listener import ServerState
from modelport.gateway.server.listening_socket import ConnectionLimit
from modelport.gateway.telemetry import request_record
from modelport.gateway.telemetry.request_record import NOBODY, RequestObserver, RequestRecord
from modelport.gateway.wire import via_header
from modelport.gateway.wire.raw_tensors import Buffer

log = structlog.get_logger("modelport.http")

#: Smaller requests do not count against the memory budget.
UNCOUNTED_BYTES = 4096
#: A body up to this size is joined with its head; a larger one is written without a copy.
COPIED_BYTES = 64 * 1024
STATUS_LINES = {
    int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}
#: Statuses without a body (RFC 9110, 6.4.1).
BODILESS = (204, 304)
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


class HttpServerState(ServerState):
    """Handler, limits and open connections of an HTTP listener."""

    def __init__(
        self,
        handler: Handler,
        limit: ConnectionLimit,
        health: Collection[bytes],
        overloaded: Collection[object],
        refuses: Callable[[bytes], bool] | None,
        observer: RequestObserver = NOBODY,
    ) -> None:
        super().__init__(limit)
        self.observer = observer
        self.handler = handler
        self.health = frozenset(health)
        self.overloaded = overloaded
        self.date_header = DateHeader()
        self._refuses = refuses

    def refuses_unread(self, method: str, raw_path: bytes) -> bool:
        """Whether to refuse a request after only its head was read.

        That is much cheaper than to have the handler refuse it.
        """
        return (
            self._refuses is not None
            and not self.leaving
            and method == "POST"
            and self._refuses(raw_path)
        )


class ExchangeConnection(Protocol):
    """The part of a connection, or of an HTTP/2 stream, that its exchanges use."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
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

    def response_complete(self, exchange: Exchange) -> None:
        """Start the next queued request, or close."""


class Exchange:
    """One request and its response over HTTP/1.1; over HTTP/2 in a subclass.

    If the client disconnects, a handler that waits for the body learns it there, and any other is
    cancelled.
    """

    __slots__ = (
        "_bodiless",
        "_body",
        "_cancelled",
        "_chunked",
        "_connection",
        "_most",
        "_parts",
        "_received",
        "_refused",
        "_running",
        "_state",
        "_waiter",
        "begun",
        "buffered",
        "complete",
        "done",
        "expects_continue",
        "gone",
        "keep_alive",
        "lease",
        "length",
        "record",
        "request",
        "started",
        "task",
        "via",
    )  # fmt: skip
    request: HttpRequest

    def __init__(self, state: HttpServerState, connection: ExchangeConnection) -> None:
        self._state, self._connection = state, connection
        #: Whether another request may follow on the connection.
        self.keep_alive = True
        #: Whether the client waits for ``100 Continue`` before it sends the body.
        self.expects_continue = False
        #: Whether the handler was called, and the task that waits for it, if it waits.
        self.started = False
        self.task: asyncio.Task[None] | None = None
        #: Memory that the request holds; None: nothing yet.
        self.lease: Lease | None = None
        #: None while nobody observes requests.
        self.record: RequestRecord | None = None
        #: The ``via`` header: gateways that the request passed through.
        self.via = b""
        self._received = 0
        #: The body as far as it waits for the handler: its only part, or its parts. Its size, the
        #: length that the client states, or 0, and whether it is complete.
        self._body = b""
        self._parts: BodyBuffer | None = None
        self.buffered = self.length = 0
        self.complete = False
        #: Whether the response's head was sent, and whether all of it was.
        self.begun = False
        self.done = False
        #: Whether the client has disconnected.
        self.gone = False
        self._running = self._cancelled = False
        self._refused = False  # there was no memory for the response
        #: Of the handler, until the body is complete or larger than this.
        self._waiter: asyncio.Future[None] | None = None
        self._most = 0
        self._bodiless = self._chunked = False

    # -- the handler ----------------------------------------------------------------------------

    def start(self) -> None:
        """Call the handler, in a context of its own: no request has anything of another."""
        self.started = True
        if self.gone:
            return
        context = Context()
        if self._state.observer.active:
            self.record = observed_requests.begin(self._state.observer, self.request)
        answer = context.run(self._call)
        if answer is None:
            self._over()
            return
        self._state.requests.add(self)
        task = self._connection.loop.create_task(self._finish(answer), context=context)
        self.task = task

    def _call(self) -> Answer | None:
        """Call the handler, and send a response that is whole; return any other answer."""
        CURRENT.set(self.count())
        if self.record is not None:
            request_record.CURRENT.set(self.record)
        if self.via:
            via_header.CURRENT.set(self.via.decode("latin-1"))
        try:
            answer = self._state.handler(self.request)
            if not isinstance(answer, HttpResponse) or answer.parts is not None:
                return answer
            self._send(answer)
        except Exception:
            self._failed()
        return None

    async def _finish(self, answer: Answer) -> None:
        self._running = True
        try:
            if self._cancelled or self.gone:  # the answer has begun, and ends what it holds
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            response = answer if isinstance(answer, HttpResponse) else await answer
            if response.parts is None:
                self._send(response)
            else:
                async with aclosing(response.parts) as parts:
                    await self._send_parts(response, parts)
        except asyncio.CancelledError:
            if not self.done and not self.gone:
                self._fail(503, b'{"error":"the server is shutting down"}')
        except ClientDisconnected:
            pass
        except ModelportError as error:  # of a stream
            log.info("a stream is cut off", error=str(error))
            self._fail(500, b"")
        except Exception:
            self._failed()
        finally:
            self._state.requests.discard(self)
            self._over()

    def _over(self) -> None:
        """Let go of what the handler has used.

        The request and its exchange would else refer to each other until a garbage collection.
        """
        self.request.body = ENDED
        self.release()

    async def _send_parts(self, response: HttpResponse, parts: AsyncIterator[Buffer]) -> None:
        if self.gone:
            return
        head = self._head(response.status, response.headers, None)
        self._write_part(head, response.body, True)
        async for part in parts:
            if self._connection.writing_paused:
                await self._connection.writable()
            if self.gone or self.done or self._connection.transport.is_closing():
                return
            self._write_part(b"", part, True)
        self._write_part(b"", b"", False)

    def _failed(self) -> None:
        log.exception("request failed")
        if not self.done and not self.gone:
            self._fail(500, b'{"error":"internal error"}')

    def cancel(self) -> None:
        """Cancel the handler; the client gets 503."""
        self._cancelled = True  # ``_finish`` checks it: before its first step nothing is cancelled
        if self._running and self.task is not None:
            self.task.cancel()

    def disconnect(self) -> None:
        """Note that the client has disconnected, and end the handler."""
        if self.done or self.gone:
            return
        self.gone = True
        if self.record is not None:
            observed_requests.abandoned(self.record, self._received)
        if self._waiter is not None:
            self._wake()
        elif self._running and self.task is not None:
            self.task.cancel()

    # -- the request ----------------------------------------------------------------------------

    def add(self, body: Buffer) -> None:
        """Append a part of the request's body.

        Raises:
            MemoryExhausted: The request would exceed the memory budget.
        """
        if self.done:
            return
        size = len(body)
        self._received += size
        if self._received > UNCOUNTED_BYTES:
            self.count().reserve(size)
        if not self.buffered:
            self._body = bytes(body)
        else:
            if self._parts is None:
                self._parts = BodyBuffer(self._body, self.length)
            self._parts.add(body)
        self.buffered += size
        if self.buffered > self._most:
            self._wake()

    def count(self) -> Lease:
        """The memory that the request holds."""
        if self.lease is None:
            self.lease = Lease(self._connection.memory)
        return self.lease

    def release(self) -> None:
        """Return the request's memory to the budget."""
        if self.lease is not None:
            self.lease.release()

    def end(self) -> None:
        """Mark the request's body as complete."""
        self.complete = True
        self._wake()

    def whole(self) -> Buffer | None:
        if not self.complete:
            return None
        self.expects_continue = False
        return self._taken()

    async def read(self, most: int) -> Buffer:
        self._most = most
        if self.expects_continue and not self.begun:
            self.expects_continue = False
            self._send_continue()
        while not (self.complete or self.buffered > most):
            if self.gone or self.done:
                raise ClientDisconnected
            self._waiter = self._connection.loop.create_future()
            self._connection.resume_reading()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.gone or self.done:
            raise ClientDisconnected
        return self._taken()

    def _taken(self) -> Buffer:
        body = self._body if self._parts is None else self._parts.content()
        self._body, self._parts, self.buffered = b"", None, 0
        return body

    @property
    def receiving(self) -> bool:
        """Whether the handler waits for the body."""
        return self._waiter is not None

    def _send_continue(self) -> None:
        self._connection.transport.write(CONTINUE)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the response ---------------------------------------------------------------------------

    def _send(self, response: HttpResponse) -> None:
        """Send a whole response."""
        if not self.gone and not self.done:
            head = self._head(response.status, response.headers, len(response.body))
            self._write_part(head, response.body, False)

    def _head(self, status: int, headers: Headers, length: int | None) -> bytes:
        """Encode the head of a response; without a ``length`` its end is not known."""
        self._bodiless = self.request.method == "HEAD" or status in BODILESS
        if self.record is not None:
            headers = observed_requests.answered(self.record, status, headers)
        lines = [STATUS_LINES[status], self._state.date_header.line()]
        for name, value in headers:
            if name == b"connection" and b"close" in value.lower():
                self.keep_alive = False
            elif name not in _OWN:
                lines.append(b"%b: %b\r\n" % (name, value))
        if length is not None:
            if status not in BODILESS:
                lines.append(b"content-length: %d\r\n" % length)
        elif not self._bodiless:
            if self.request.version == "1.1":
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False  # the body ends with the connection
        # Without 100 Continue the client may or may not send the body: the connection must close.
        if self.expects_continue or self._state.leaving:
            self.keep_alive = False
        head = b"".join(lines)
        if not head.count(b"\n") == head.count(b"\r") == len(lines):
            raise RuntimeError("a response header holds a line break")
        return head + (b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")

    def _write_part(self, head: bytes, body: Buffer, more: bool) -> None:
        if self._bodiless:
            body = b""
        try:
            self._write(head, body, more)
        except MemoryExhausted as error:
            if self._refused:
                self._cut_off()
                return
            self._refused = True
            self._fail(503, b'{"error":"%b"}' % str(error).encode())
            return
        self.begun = True
        if self.record is not None:
            observed_requests.sent(self.record, self._received, body, more)
        if not more:
            self.done = True
            self._wake()
            self._connection.response_complete(self)

    def _write(self, before: bytes, body: Buffer, more: bool) -> None:
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

    def _cut_off(self) -> None:
        """End an incomplete response, so that the client notices."""
        self._connection.transport.close()

    def _fail(self, status: int, body: bytes) -> None:
        """Send an error response, or cut off a response that has begun."""
        if self.begun:
            if self.record is not None:
                self.record.failed("the response was cut off")
            self._cut_off()
            return
        self.keep_alive, self._chunked = False, False
        headers = [*JSON, (b"retry-after", b"1")] if status == 503 else JSON
        self._write_part(self._head(status, headers, len(body)), body, False)


#: Fields that the connection sets itself.
_OWN = frozenset({b"connection", b"content-length", b"transfer-encoding"})
