"""An HTTP/1.1 connection: parsed by httptools, limited in size and time, answered by an ASGI app.

- Heads are limited in size and time, and a body may not stall. A body that the application does
  not receive is not read, so that TCP slows the sender down.
- Pipelined requests are queued, and reading pauses.
- A head that repeats the one before, byte for byte, is not parsed again.
- A client that disconnects ends its request; one that half-closes still gets its response. To tell
  them apart, ``100 Continue`` is sent: a client that has gone answers it with a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

import httptools

from modelport.gateway.errors import MemoryExhausted
from modelport.gateway.runtime.request_memory import PROCESS
from modelport.gateway.runtime.timer_wheel import MovableTimer
from modelport.gateway.server import time_limits
from modelport.gateway.server.http1 import error_response, head
from modelport.gateway.server.http1.error_response import RefusedHead
from modelport.gateway.server.http1.read_buffer import HIGH_WATER_BYTES, SLICE_BYTES, ReadBuffer
from modelport.gateway.server.http1.repeated_head import MAX_MESSAGE_BYTES, RepeatedHead
from modelport.gateway.server.http1.request_cycle import CONTINUE, RequestResponseCycle
from modelport.gateway.server.http1.request_parser import (
    BETWEEN,
    BODY,
    HEAD,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    RequestParser,
)
from modelport.gateway.server.http1.server_state import HttpServerState
from modelport.gateway.server.http1.unread_timer import UnreadTimer
from modelport.gateway.server.http2.asgi import AsgiConnection
from modelport.gateway.server.listening_socket import Room, is_reset
from modelport.gateway.wire import via_header
from modelport.gateway.wire.http2.frames import PREFACE


class HttpConnection(RequestParser, asyncio.Protocol):
    """One HTTP/1.1 connection of a listener."""

    transport: asyncio.Transport

    def __init__(self, state: HttpServerState, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        self.date_header = state.date_header
        self.writing_paused = False
        self.memory = PROCESS.connection()
        self._unread = UnreadTimer(loop, self.memory)
        self._state = state
        self._scope: dict[str, Any] = {}  # what the scopes of all requests share
        self._completed: RequestResponseCycle | None = None  # the small one of this segment
        self._segment_bytes = self._head_bytes = 0  # here, and of its head in earlier segments
        self._receiving: RequestResponseCycle | None = None
        self._overloaded = False  # it is refused, and its body discarded
        self._active: RequestResponseCycle | None = None
        self._queue: deque[RequestResponseCycle] = deque()
        #: Sent after the responses that are due; nothing more is parsed.
        self._error: error_response.ErrorResponse | None = None
        self._closing = self._crowded = self._probed = self._half_closed = False
        self._fed = False  # whether this slice held any of a body
        self._writable: asyncio.Future[None] | None = None
        self._timer = MovableTimer(loop, self._expired)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._read_buffer = ReadBuffer(self.loop, transport, self._take)
        room = self._state.admit(self, transport)
        if room is Room.NONE:
            transport.write(error_response.serialize(error_response.CROWDED))
            transport.close()  # at once: lingering would hold a file descriptor
            self._closing = True
            return
        self._crowded = room is Room.HEALTH
        self._state.newcomers[self] = self.loop.time()
        self._scope = head.connection_scope(transport, self.memory)
        head_seconds = time_limits.CROWDED_SECONDS if self._crowded else time_limits.HEAD_SECONDS
        self._timer.after(head_seconds)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            self._become_http2(b"")

    def data_received(self, data: bytes) -> None:
        repeated = self._repeated
        if (
            repeated is not None
            and len(data) == repeated.message_bytes
            and data.startswith(repeated.head)
            and self._place == BETWEEN
            and not self._state.overloaded
        ):
            self._repeat(repeated, data)
        elif len(data) <= SLICE_BYTES:
            self._take(data)
        elif not self._closing:
            self._read_buffer.receive(data)

    def _take(self, data: bytes | memoryview) -> None:
        if self._closing or self._error is not None:
            return
        place, self._begun, self._fed = self._place, 0, False
        self._segment_bytes = len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            seen = PREFACE[: self._head_bytes]
            is_preface = self._parser.get_method() == b"PRI" and (seen + data).startswith(PREFACE)
            if self in self._state.newcomers and is_preface:
                self._become_http2(seen + data)
            else:
                self._reject(error_response.for_error(error))
            return
        if self._place == HEAD:
            self._bound_head(place == HEAD)
        elif self._place == BODY:
            self._await_body()
        elif self._completed is not None:
            cycle, self._completed = self._completed, None
            if place == BETWEEN and self._begun == 1 and cycle.keep_alive:
                self._keep_head(cycle.scope, bytes(data))

    def _repeat(self, repeated: RepeatedHead, data: bytes) -> None:
        """Begin a request whose head is the same as before."""
        if self._closing or self._error is not None:
            return
        cycle = RequestResponseCycle(self, repeated.scope(), True, False)
        self._begin(cycle)
        try:
            cycle.add(data[len(repeated.head) :])
        except MemoryExhausted:
            self._reject(error_response.SCARCE)
        else:
            self._complete(cycle)

    def _become_http2(self, data: bytes) -> None:
        """Hand the connection over, to a client with prior knowledge (RFC 9113, 3.3) or ALPN."""
        data += self._read_buffer.drop()
        self.connection_lost(None)
        AsgiConnection(self._state, self.loop, self._crowded).take_over(self.transport, data)

    def eof_received(self) -> bool:
        cycle = self._active
        if self._closing or cycle is None or not cycle.complete:
            return False  # closes the transport
        self._half_closed = True
        self.loop.call_later(time_limits.PROBE_SECONDS, self._probe)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._timer.close()
        self._unread.stop()
        self._state.connections.pop(self, None)
        self._state.newcomers.pop(self, None)
        if self._active is not None:
            self._active.disconnect()
        while self._queue:
            self._queue.popleft().release()
        self._read_buffer.drop()
        self.resume_writing()

    def pause_writing(self) -> None:
        self.writing_paused = True
        self._unread.pause(self.transport)

    def resume_writing(self) -> None:
        self.writing_paused = False
        self.count(0)
        if not self._closing:
            self._unread.stop()
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None
        if self._active is not None and self._active.task is None and not self._closing:
            self._start(self._active)

    def count(self, size: int) -> None:
        cycle = self._active
        self._unread.count(size, cycle.lease if cycle and cycle.complete else None)

    def _start(self, cycle: RequestResponseCycle) -> None:
        """Start the application; a client that does not read its last response waits for it."""
        if not self.writing_paused:
            self._state.start(cycle, self.loop)

    async def writable(self) -> None:
        if self._writable is None:
            self._writable = self.loop.create_future()
        await asyncio.shield(self._writable)

    def resume_reading(self) -> None:
        if self._read_buffer.held and not self._queue:
            self._read_buffer.resume()
            if self._place == BODY:
                self._timer.after(time_limits.BODY_IDLE_SECONDS)

    def _hold(self) -> None:
        self._timer.stop()  # the application is slow, not the client
        self._read_buffer.hold()

    def on_headers_complete(self) -> None:
        # Near the limit, measure: the segment that exceeds it may hold the head's end.
        if self._head_bytes + self._segment_bytes > MAX_HEAD_BYTES - SLICE_BYTES:
            self._head_bytes = 0
            if self._measured_head() > MAX_HEAD_BYTES:
                raise RefusedHead(error_response.LONG)
        parser, url = self._parser, self._url
        method, version = parser.get_method().decode(), self._checked_version()
        if len(self._headers) > MAX_HEADERS:
            raise RefusedHead(error_response.LONG)
        self._state.newcomers.pop(self, None)
        self._upgrades = parser.should_upgrade() and method != "CONNECT"
        if self._upgrades:
            return
        if self._crowded and url not in self._state.health:
            raise RefusedHead(error_response.CROWDED)
        if self._via and via_header.loops(self._via):
            raise RefusedHead(error_response.LOOP)
        state = self._state
        unqueued = self._active is None and not self.writing_paused and parser.should_keep_alive()
        if state.overloaded and unqueued and state.refuses_unread(parser.get_method(), url):
            self._place, self._overloaded = BODY, True
            return
        scope = head.scope(self._scope, method, version, url, self._headers)
        keep_alive = version == "1.1" and parser.should_keep_alive() and not self._crowded
        expects_continue = self._expects_continue and version == "1.1"
        cycle = RequestResponseCycle(self, scope, keep_alive, expects_continue)
        cycle.via = self._via
        self._begin(cycle)

    def _begin(self, cycle: RequestResponseCycle) -> None:
        """Receive the body of a request."""
        self._place, self._receiving = BODY, cycle
        if self._active is None:
            self._active = cycle
        else:
            self._queue.append(cycle)
            self._hold()

    def on_body(self, body: bytes) -> None:
        self._fed = True
        if self._receiving is not None:
            self._receiving.add(body)

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        if self._overloaded:
            self._overloaded, self._place = False, BETWEEN
            self.transport.write(error_response.TRY_AGAIN)
            self._timer.after(time_limits.KEEP_ALIVE_SECONDS)
            return
        assert self._receiving is not None
        if self._begun and self._segment_bytes <= MAX_MESSAGE_BYTES:
            self._completed = self._receiving
        self._complete(self._receiving)

    def _complete(self, cycle: RequestResponseCycle) -> None:
        """Start the application, now that the body is complete, if it is the request's turn."""
        self._place, self._receiving = BETWEEN, None
        cycle.end()
        if cycle is self._active:
            self._timer.stop()
            if cycle.task is None:
                self._start(cycle)
        elif self._active is None:  # answered before its body was complete
            self._timer.after(time_limits.KEEP_ALIVE_SECONDS)

    def leaving(self) -> bool:
        return self._state.leaving

    def response_complete(self, cycle: RequestResponseCycle) -> None:
        """Start the next queued request, or close."""
        if cycle is not self._active:
            return
        self._active = None
        if not cycle.keep_alive:
            self._close()
        elif self._queue:
            self._active = self._queue.popleft()
            self._start(self._active)
        elif self._error is not None:
            self._send_error(self._error)
        elif self._half_closed:
            self._close()
        elif self._place == BETWEEN:
            self._timer.after(time_limits.KEEP_ALIVE_SECONDS)
        if self._read_buffer.held:
            self.resume_reading()

    def warn(self) -> None:
        """Do nothing: the responses carry the warning, see ``leaving``."""

    leave = warn

    @property
    def idle(self) -> bool:
        return self._active is None and self._place == BETWEEN

    def close(self) -> None:
        if self._active is None:
            self.transport.close()
        else:
            self._active.keep_alive = False

    def _await_body(self) -> None:
        """Start the application of a request whose body is incomplete, within the limits."""
        if self._overloaded:
            self._reject(error_response.OVERLOADED)
            return
        cycle = self._receiving
        assert cycle is not None
        if cycle is self._active and cycle.task is None:
            self._start(cycle)
        # Trailers and chunk extensions are limited like a head.
        self._stray_bytes = 0 if self._fed else self._stray_bytes + self._segment_bytes
        if self._stray_bytes > MAX_HEAD_BYTES:
            self._reject(error_response.LONG)
        elif cycle.buffered > HIGH_WATER_BYTES and not cycle.done:
            self._hold()
        elif not self._read_buffer.held:
            self._timer.after(time_limits.BODY_IDLE_SECONDS)

    def _bound_head(self, was_in_head: bool) -> None:
        """Limit a head that is incomplete."""
        if not was_in_head:
            self._timer.after(time_limits.HEAD_SECONDS)
        if self._begun:  # its start is only known if it is the segment's
            self._head_bytes = self._segment_bytes if self._begun == 1 and not was_in_head else 0
        else:
            self._head_bytes += self._segment_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._reject(error_response.LONG)

    def _expired(self) -> None:
        if self._closing or (self._place == BETWEEN and self._url):
            self._unread.close(self.transport, self.loop.time() - time_limits.KEEP_ALIVE_SECONDS)
        else:
            self._reject(error_response.SLOW)

    def _probe(self) -> None:
        """Abort if a half-closed client has disconnected: data sent to it causes a reset."""
        cycle = self._active
        if cycle is None or cycle.done or self.transport.is_closing():
            return
        if self._probed or cycle.begun:
            if is_reset(self.transport):
                self.transport.abort()
                return
        elif cycle.scope["http_version"] == "1.1":
            self._probed = True
            self.transport.write(CONTINUE)
        self.loop.call_later(time_limits.PROBE_SECONDS, self._probe)

    def _reject(self, error: error_response.ErrorResponse) -> None:
        """Parse nothing more, and send ``error`` after the responses that are due."""
        self._error = error
        self._timer.stop()
        cycle, self._receiving = self._receiving, None
        if cycle is not None:
            cycle.release()
            if cycle in self._queue:
                self._queue.remove(cycle)
            else:
                self._active = None
                cycle.disconnect()
                if cycle.begun:
                    self._linger()
        if self._active is None:
            self._send_error(error)

    def _send_error(self, error: error_response.ErrorResponse) -> None:
        """Send an error response without calling the application, and close."""
        if not self._closing and not self.transport.is_closing():
            self.transport.write(error_response.serialize(error))
            self._linger()

    def _close(self) -> None:
        if self._place == BETWEEN and not self._queue:
            self._closing = True
            self._unread.close(self.transport)
        else:
            self._linger()

    def _linger(self) -> None:
        """Half-close first: closing with unread bytes resets the connection."""
        self._closing = True
        if not self.transport.is_closing():
            with contextlib.suppress(OSError):  # the client may have disconnected
                self.transport.write_eof()
            self._read_buffer.drop()
            self._read_buffer.resume()
            self.loop.call_later(time_limits.LINGER_SECONDS, self._unread.close, self.transport)
