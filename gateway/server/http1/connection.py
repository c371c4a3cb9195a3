"""An HTTP/1.1 connection: parsed by httptools, limited in size and time.

- Heads are limited in size and time, and a body may not stall. A body that the handler does not
  take is not read, so that TCP slows the sender down.
- A request is handled once its body is complete, or with as much of it as a segment brings.
- Pipelined requests are queued, and reading pauses.
- ``Upgrade`` is ignored, as RFC 9110 (7.8) allows; ``curl --http2`` sends it with every request.
- A client that disconnects ends its request; one that half-closes still gets its response. To tell
  them apart, ``100 Continue`` is sent: a client that has gone answers it with a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque

import httptools

from modelport.gateway.errors import MemoryExhausted
from modelport.gateway.protocols.http_message import Headers, HttpRequest
from modelport.gateway.runtime.request_memory import PROCESS
from modelport.gateway.runtime.timer_wheel import MovableTimer
from modelport.gateway.server import observed_requests, time_limits
from modelport.gateway.server.http1 import error_response
from modelport.gateway.server.http1.error_response import RefusedHead
from modelport.gateway.server.http1.exchange import CONTINUE, Exchange, HttpServerState
from modelport.gateway.server.http1.peer import peer_of
from modelport.gateway.server.http1.read_buffer import HIGH_WATER_BYTES, SLICE_BYTES, ReadBuffer
from modelport.gateway.server.http1.unread_timer import UnreadTimer
from modelport.gateway.server.http2.http import Http2ServerConnection
from modelport.gateway.server.listening_socket import Room, is_reset
from modelport.gateway.wire import via_header
from modelport.gateway.wire.http2.frames import PREFACE

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 1000
#: Of a body, unless they are larger than this on average: each costs time (Triton's limit).
MAX_CHUNKS, CHUNK_BYTES = 65_536, 256
#: The parser's position: between requests, in a head, in a body.
BETWEEN, HEAD, BODY = range(3)
#: ``uri-host [ ":" port ]`` (RFC 9110, 7.2); the host of an HTTP URI is not empty (4.2.1).
_HOST = re.compile(
    rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+)(?::[0-9]{0,5})?"
)


class HttpConnection(asyncio.Protocol):
    """One HTTP/1.1 connection of a listener."""

    transport: asyncio.Transport

    def __init__(self, state: HttpServerState, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.writing_paused = False
        self.memory = PROCESS.connection()
        self._unread = UnreadTimer(loop, self.memory)
        self._state = state
        # The request being parsed.
        self._parser = httptools.HttpRequestParser(self)
        self._place = BETWEEN
        self._url = b""
        self._headers: Headers = []
        self._upgrades = False
        self._host: bytes | None = None  # the last valid Host of the connection
        self._begun = 0  # requests that begin in this segment
        self._stray_bytes = 0  # since its head, or the last byte of its body
        self._left = 0  # of a body of known length, behind the segment of its head
        self._segment_bytes = self._head_bytes = 0  # here, and of its head in earlier segments
        self._chunks = self._chunk_bytes = 0  # of the body until now
        self._receiving: Exchange | None = None
        self._overloaded = False  # it is refused, and its body discarded
        self._active: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        #: Sent after the responses that are due; nothing more is parsed.
        self._error: error_response.ErrorResponse | None = None
        self._closing = self._crowded = self._probed = self._half_closed = False
        self._fed = False  # whether this slice held any of a body
        self._writable: asyncio.Future[None] | None = None
        self._timer = MovableTimer(loop, self._expired)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._read_buffer = ReadBuffer(self.loop, transport, self.data_received)
        room = self._state.admit(self, transport)
        if room is Room.NONE:
            transport.write(error_response.serialize(error_response.CROWDED))
            transport.close()  # at once: lingering would hold a file descriptor
            self._closing = True
            return
        self._crowded = room is Room.HEALTH
        self._state.newcomers[self] = self.loop.time()
        self._peer = peer_of(transport, self.memory)
        head_seconds = time_limits.CROWDED_SECONDS if self._crowded else time_limits.HEAD_SECONDS
        self._timer.after(head_seconds)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            self._become_http2(b"")

    def data_received(self, data: bytes | memoryview) -> None:
        if self._closing:
            return
        if self._left and self._error is None:
            data = self._receive_body(data)
            if not data:
                return
        if len(data) > SLICE_BYTES:
            self._read_buffer.receive(data)
            return
        if self._error is not None:
            return
        place, self._begun, self._fed = self._place, 0, False
        self._segment_bytes = len(data)
        try:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._feed_on(data, upgrade.args[0])
        except httptools.HttpParserError as error:
            seen = PREFACE[: self._head_bytes]
            is_preface = self._parser.get_method() == b"PRI" and (seen + data).startswith(PREFACE)
            if self in self._state.newcomers and is_preface:
                self._become_http2(seen + data)
                return
            self._reject(error_response.for_error(error))
        else:
            if self._place == HEAD:
                self._bound_head(place == HEAD)
            elif self._place == BODY:
                self._await_body()
        # Not within the parser, which hides what is raised; and one request of a segment only, so
        # that the event loop serves other connections before the next one.
        self._start_next()

    def _receive_body(self, data: bytes | memoryview) -> bytes | memoryview:
        """Take what belongs to the body, which the parser need not see; return the rest."""
        assert self._receiving is not None
        rest = data[self._left :]
        try:
            self._receiving.add(data if not rest else data[: self._left])
        except MemoryExhausted:
            self._reject(error_response.SCARCE)
            return b""
        self._left -= len(data) - len(rest)
        self._fed = True
        if self._left:
            self._await_body()
        else:
            self._parser = httptools.HttpRequestParser(self)  # the other waits for the body's end
            self.on_message_complete()
        if not rest:
            self._start_next()
        return rest

    def _become_http2(self, data: bytes) -> None:
        """Hand the connection over, to a client with prior knowledge (RFC 9113, 3.3) or ALPN."""
        data += self._read_buffer.drop()
        self.connection_lost(None)
        Http2ServerConnection(self._state, self.loop, self._crowded).take_over(self.transport, data)

    def eof_received(self) -> bool:
        exchange = self._active
        if self._closing or exchange is None or not exchange.complete:
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
        self._start_next()

    def count(self, size: int) -> None:
        exchange = self._active
        self._unread.count(size, exchange.lease if exchange and exchange.complete else None)

    def _start_next(self) -> None:
        """Call the handler of the request whose turn it is.

        A client that does not read its last response waits for it.
        """
        exchange = self._active
        if exchange is None or exchange.started or self._closing or self.writing_paused:
            return
        exchange.start()

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
        self._timer.stop()  # the handler is slow, not the client
        self._read_buffer.hold()

    def response_complete(self, exchange: Exchange) -> None:
        """Start the next queued request, or close."""
        if exchange is not self._active:
            return
        self._active = None
        if not exchange.keep_alive:
            self._close()
        elif self._queue:
            self._active = self._queue.popleft()
            # Not here: a handler that does not wait would be called by the one before it.
            self.loop.call_soon(self._start_next)
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

    @property
    def waiting(self) -> bool:
        return self._active in (None, self._receiving) or self.writing_paused

    def close(self) -> None:
        if self._active is None:
            self.transport.close()
        else:
            self._active.keep_alive = False

    def _await_body(self) -> None:
        """Bound a request whose body is incomplete."""
        if self._overloaded:
            self._reject(error_response.OVERLOADED)
            return
        exchange = self._receiving
        assert exchange is not None
        # Trailers and chunk extensions are limited like a head.
        self._stray_bytes = 0 if self._fed else self._stray_bytes + self._segment_bytes
        if self._stray_bytes > MAX_HEAD_BYTES:
            self._reject(error_response.LONG)
        elif exchange.buffered > HIGH_WATER_BYTES and not (exchange.done or exchange.receiving):
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
        exchange = self._active
        if exchange is None or exchange.done or self.transport.is_closing():
            return
        if self._probed or exchange.begun:
            if is_reset(self.transport):
                self.transport.abort()
                return
        elif exchange.request.version == "1.1":
            self._probed = True
            self.transport.write(CONTINUE)
        self.loop.call_later(time_limits.PROBE_SECONDS, self._probe)

    def _reject(self, error: error_response.ErrorResponse) -> None:
        """Parse nothing more, and send ``error`` after the responses that are due."""
        self._error = error
        self._timer.stop()
        exchange, self._receiving = self._receiving, None
        if exchange is not None:
            exchange.release()
            exchange.record = None  # ``_send_error`` has one
            if exchange in self._queue:
                self._queue.remove(exchange)
            else:
                self._active = None
                exchange.disconnect()
                if exchange.begun:
                    self._linger()
        if self._active is None:
            self._send_error(error)

    def _send_error(self, error: error_response.ErrorResponse) -> None:
        """Send an error response without calling the handler, and close."""
        if not self._closing and not self.transport.is_closing():
            self._observe(error)
            self.transport.write(error_response.serialize(error))
            self._linger()

    def _observe(self, error: error_response.ErrorResponse) -> None:
        """Tell the observer of a request that ``error`` answers without the handler."""
        observer = self._state.observer
        if observer.active:
            method = self._parser.get_method().decode("latin-1")
            fields = dict(self._headers)
            observed_requests.refused(observer, method, self._url, fields, self._peer, error)

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

    # -- the parser ------------------------------------------------------------------------------

    def _feed_on(self, data: bytes | memoryview, end: int) -> None:
        """Parse on where the parser has stopped, at the end of a head that asks for an upgrade."""
        while self._upgrades:  # or else it is CONNECT, and a tunnel's bytes follow
            # The parser stops at the upgrade: parse the head again without it.
            data = self._without_upgrade() + bytes(data[end:])
            self._parser = httptools.HttpRequestParser(self)
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                end = upgrade.args[0]

    def _without_upgrade(self) -> bytes:
        """Rebuild the head without its ``Upgrade`` header."""
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, version)]
        lines += [b"%b: %b" % header for header in self._headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        self._place, self._stray_bytes = HEAD, 0
        self._chunks = self._chunk_bytes = 0
        self._begun += 1
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._place == HEAD:  # trailers are dropped
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        # Near the limit, measure: the segment that exceeds it may hold the head's end.
        if self._head_bytes + self._segment_bytes > MAX_HEAD_BYTES - SLICE_BYTES:
            self._head_bytes = 0
            size = sum(len(name) + len(value) + 4 for name, value in self._headers)
            if len(self._url) + size > MAX_HEAD_BYTES:
                raise RefusedHead(error_response.LONG)
        parser, state, headers = self._parser, self._state, self._headers
        if len(headers) > MAX_HEADERS:
            raise RefusedHead(error_response.LONG)
        version, goes_on = parser.get_http_version(), parser.should_keep_alive()
        exchange = Exchange(state, self)
        exchange.request = request = HttpRequest(
            parser.get_method().decode(), self._url, headers, version, self._peer, exchange
        )
        fields = request.fields
        if len(fields) != len(headers):  # of what a list holds, all counts
            fields = _joined(headers)
        # RFC 9112, 2.3, 3.2 and 6.1.
        host, coding = fields.get(b"host"), fields.get(b"transfer-encoding")
        if version != "1.1" and (version != "1.0" or coding):
            raise RefusedHead(error_response.VERSION)
        if host is None:
            if version == "1.1":
                raise RefusedHead(error_response.HOST)
        elif host != self._host:
            if _HOST.fullmatch(host) is None:
                raise RefusedHead(error_response.HOST)
            self._host = host
        if coding and coding.lower() != b"chunked":
            raise RefusedHead(error_response.CODING)
        if self in state.newcomers:
            del state.newcomers[self]
        self._upgrades = parser.should_upgrade() and request.method != "CONNECT"
        if self._upgrades:
            return
        if self._crowded and self._url not in state.health:
            raise RefusedHead(error_response.CROWDED)
        via = fields.get(b"via")
        if via:
            if via_header.loops(via):
                raise RefusedHead(error_response.LOOP)
            exchange.via = via
        unqueued = self._active is None and not self.writing_paused and goes_on
        if state.overloaded and unqueued and state.refuses_unread(request.method, self._url):
            self._place, self._overloaded = BODY, True
            return
        exchange.keep_alive = version == "1.1" and goes_on and not self._crowded
        if version == "1.1" and fields.get(b"expect", b"").lower() == b"100-continue":
            exchange.expects_continue = True
        length = fields.get(b"content-length")
        if length and not coding:
            self._left = exchange.length = int(length)
        self._place, self._receiving = BODY, exchange
        if self._active is None:
            self._active = exchange
        else:
            self._queue.append(exchange)
            self._hold()

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_body(self, body: bytes) -> None:
        self._fed = True
        if self._left:
            self._left -= len(body)
        if self._chunks:
            self._chunk_bytes += len(body)
            # Not with the header: an empty chunk ends the body.
            if self._chunks > MAX_CHUNKS and self._chunk_bytes < self._chunks * CHUNK_BYTES:
                raise RefusedHead(error_response.CHUNKS)
        if self._receiving is not None:
            self._receiving.add(body)

    def on_message_complete(self) -> None:
        self._left = 0
        if self._upgrades:
            return
        if self._overloaded:
            self._overloaded, self._place = False, BETWEEN
            self._observe(error_response.OVERLOADED)
            self.transport.write(error_response.TRY_AGAIN)
            self._timer.after(time_limits.KEEP_ALIVE_SECONDS)
            return
        exchange = self._receiving
        assert exchange is not None
        self._place, self._receiving = BETWEEN, None
        exchange.end()
        if exchange is self._active:
            self._timer.stop()
        elif self._active is None:  # answered before its body was complete
            self._timer.after(time_limits.KEEP_ALIVE_SECONDS)


def _joined(headers: Headers) -> dict[bytes, bytes]:
    """The headers by name; several of one name are one list (RFC 9110, 5.3)."""
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        fields[name] = b"%b, %b" % (fields[name], value) if name in fields else value
    return fields
