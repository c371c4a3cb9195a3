"""Requests of the HTTP port over HTTP/2, within the limits of HTTP/1.1."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from modelport.gateway.errors import MemoryExhausted
from modelport.gateway.protocols.http_message import Headers, HttpRequest, Peer
from modelport.gateway.runtime.request_memory import Lease
from modelport.gateway.server import observed_requests
from modelport.gateway.server.http1 import error_response
from modelport.gateway.server.http1.error_response import ErrorResponse
from modelport.gateway.server.http1.exchange import BODILESS, Exchange, HttpServerState
from modelport.gateway.server.http1.peer import peer_of
from modelport.gateway.server.http1.read_buffer import HIGH_WATER_BYTES
from modelport.gateway.server.http2.connection import ServerConnection, ServerStream
from modelport.gateway.wire import via_header
from modelport.gateway.wire.http2 import frames
from modelport.gateway.wire.http2.frames import ErrorCode, literal
from modelport.gateway.wire.http2.header_blocks import (
    BAD_IN_VALUE,
    CONNECTION_SPECIFIC,
    FieldSection,
)
from modelport.gateway.wire.http2.settings import STREAM_WINDOW_BYTES
from modelport.gateway.wire.raw_tensors import Buffer

_CONTINUE = literal(b":status", b"100")
_TARGET = re.compile(rb"/[!-~]*\Z")


class HttpHead(NamedTuple):
    """The head of a request, which all requests with the same head share."""

    malformed: bool
    valid_trailers: bool
    method: str = ""
    target: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    content_length: int | None = None
    via: bytes = b""
    expects_continue: bool = False


class HttpStream(ServerStream):
    """One request: the connection of its exchange."""

    __slots__ = ("exchange", "loop", "memory", "transport")
    connection: Http2ServerConnection

    def __init__(self, connection: Http2ServerConnection, number: int, head: HttpHead) -> None:
        super().__init__(connection, number, head.content_length)
        self.loop, self.transport = connection.loop, connection.transport
        self.memory = connection.memory
        self.exchange = Http2Exchange(self, head)

    # -- the exchange's connection ----------------------------------------------------------------

    @property
    def writing_paused(self) -> bool:
        return self.sent_at > 0 or self.connection.writing_paused

    async def writable(self) -> None:
        await self.drained()

    def request_lease(self) -> Lease | None:
        return self.exchange.lease

    def resume_reading(self) -> None:
        self.touched_at = self.loop.time()
        if not self.remote_closed and self.receive_window < STREAM_WINDOW_BYTES // 2:
            increment = self.replenish(STREAM_WINDOW_BYTES)
            self.connection.writer.write(frames.window_update(self.number, increment))

    def cut_off(self) -> None:
        self.connection.cancel_stream(self, ErrorCode.INTERNAL_ERROR)

    def response_complete(self, exchange: Exchange) -> None: ...

    # -- the stream -------------------------------------------------------------------------------

    def on_data(self, part: memoryview, last: bool) -> None:
        if self.local_closed or not len(part):
            return
        self.touched_at = self.loop.time()
        try:
            self.exchange.add(part)
        except MemoryExhausted:
            self.refuse(error_response.SCARCE)
            return
        if self.exchange.receiving or self.exchange.buffered < HIGH_WATER_BYTES:
            self.resume_reading()

    def on_end(self) -> None:
        self.exchange.end()

    def on_reset(self) -> None:
        self.exchange.disconnect()

    def on_sent(self) -> None:
        self.connection.complete(self, ErrorCode.NO_ERROR)

    def waits_for_client(self) -> bool:
        return not self.remote_closed and not self.local_closed and self.exchange.receiving

    def stall(self) -> None:
        self.refuse(error_response.SLOW)

    def refuse(self, error: ErrorResponse) -> None:
        """Answer without the handler."""
        self.exchange.release()
        self.exchange.record = None
        self.exchange.disconnect()
        observer, request = self.connection.state.observer, self.exchange.request
        if observer.active:
            observed_requests.refused(
                observer, request.method, request.raw_path, request.fields, request.peer, error
            )
        if self.local_closed or self.reset_code is not None:
            return
        if self.exchange.begun:
            self.cut_off()
            return
        body = error_response.body_of(error)
        fields = [(b":status", error[0][:3].encode()), (b"content-type", b"application/json")]
        if error[0].startswith("503"):
            fields.append((b"retry-after", b"1"))
        fields.append((b"content-length", b"%d" % len(body)))
        self.queue(body)
        block = b"".join(literal(*field) for field in fields)
        self.refuse_briefly(partial(self.close, head=frames.headers(self.number, block)))


class Http2Exchange(Exchange):
    """An exchange that sends frames."""

    __slots__ = ("_stream",)

    def __init__(self, stream: HttpStream, head: HttpHead) -> None:
        connection = stream.connection
        super().__init__(connection.state, stream)
        self.expects_continue = head.expects_continue
        self.length = head.content_length or 0
        self._stream = stream
        self.via = head.via
        peer, fields = connection.request_peer, list(head.headers)
        self.request = HttpRequest(head.method, head.target, fields, "2", peer, self)

    def _over(self) -> None:
        super()._over()
        del self._stream, self._connection  # the stream has this exchange

    def _send_continue(self) -> None:
        self._stream.connection.writer.write(frames.headers(self._stream.number, _CONTINUE))

    def _cut_off(self) -> None:
        self._stream.cut_off()

    def _head(self, status: int, headers: Headers, length: int | None) -> bytes:
        self._bodiless = self.request.method == "HEAD" or status in BODILESS
        if self.record is not None:
            headers = observed_requests.answered(self.record, status, headers)
        block = [b"\x88" if status == 200 else literal(b":status", b"%d" % status)]
        block.append(literal(b"date", self._state.date_header.value()))
        for name, value in headers:
            if BAD_IN_VALUE.search(value):
                raise RuntimeError("a response header holds a line break")
            if name not in CONNECTION_SPECIFIC and name != b"content-length":
                block.append(literal(name, value))
        if length is not None and status not in BODILESS:
            block.append(literal(b"content-length", b"%d" % length))
        return b"".join(block)

    def _write(self, head: bytes, body: Buffer, more: bool) -> None:
        stream, number = self._stream, self._stream.number
        if head and not body and not more:
            stream.close(tail=frames.headers(number, head, True))
            return
        head = frames.headers(number, head) if head else b""
        stream.queue(body)
        try:
            if more:
                stream.flush(head)
            else:
                stream.close(head=head)
        except MemoryExhausted:
            self.begun = stream.started
            raise


class Http2ServerConnection(ServerConnection[HttpHead, HttpStream]):
    """A connection that an HTTP listener has accepted."""

    state: HttpServerState
    request_peer: Peer

    def __init__(
        self, state: HttpServerState, loop: asyncio.AbstractEventLoop, crowded: bool
    ) -> None:
        super().__init__(state, loop, self._read_head, crowded)
        #: Requests that have begun in this segment.
        self._due: deque[Exchange] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.request_peer = peer_of(self.transport, self.memory)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        while self._due:
            self._due.popleft().start()

    def take_over(self, transport: asyncio.Transport, data: bytes) -> None:
        """Replace the protocol of ``transport``, which has received ``data``."""
        transport.pause_reading()  # uvloop chooses the way to read when it resumes
        transport.set_protocol(self)
        self.connection_made(transport)
        transport.resume_reading()
        if data:
            self.data_received(data)

    def _read_head(self, section: FieldSection) -> HttpHead:
        pseudo = section.pseudo
        hosts = {value for name, value in section.regular if name == b"host"}
        authority = pseudo.get(b":authority")
        agree = len(hosts | {authority} - {None}) <= 1
        target = pseudo.get(b":path", b"")
        if not section.valid_request or not agree or not _TARGET.match(target):
            return HttpHead(True, section.valid_trailers)
        headers = [field for field in section.regular if field[0] != b"host"]
        host = authority if authority is not None else next(iter(hosts), None)
        if host is not None:
            headers.insert(0, (b"host", host))
        by_name = dict(headers)
        return HttpHead(
            False,
            False,
            pseudo[b":method"].decode("latin-1"),
            target,
            tuple(headers),
            section.content_length,
            b", ".join(value for name, value in headers if name == b"via"),
            by_name.get(b"expect", b"").lower() == b"100-continue",
        )

    def open(self, number: int, head: HttpHead, ends: bool) -> None:
        stream = HttpStream(self, number, head)
        stream.remote_closed = ends
        self.streams[number] = stream
        method, path = head.method, stream.exchange.request.raw_path
        if self.crowded and path not in self.state.health:
            stream.refuse(error_response.CROWDED)
            self.leave()
        elif head.via and via_header.loops(head.via):
            stream.refuse(error_response.LOOP)
        elif self.state.overloaded and self.state.refuses_unread(method, path):
            stream.refuse(error_response.OVERLOADED)
        else:
            if ends:
                self.end_stream(stream)
            self._due.append(stream.exchange)
