"""An ASGI application over HTTP/2, within the limits of HTTP/1.1."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any, NamedTuple

from modelport.gateway.errors import MemoryExhausted
from modelport.gateway.protocols.asgi import Message
from modelport.gateway.runtime.request_memory import Lease
from modelport.gateway.server.http1 import error_response
from modelport.gateway.server.http1.error_response import ErrorResponse
from modelport.gateway.server.http1.head import connection_scope, scope
from modelport.gateway.server.http1.read_buffer import HIGH_WATER_BYTES
from modelport.gateway.server.http1.request_cycle import RequestResponseCycle
from modelport.gateway.server.http1.server_state import HttpServerState
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

_CONTINUE = literal(b":status", b"100")
_TARGET = re.compile(rb"/[!-~]*\Z")


class AsgiHead(NamedTuple):
    """The head of a request; ``scope`` is that of all requests with the same head."""

    malformed: bool
    valid_trailers: bool
    scope: dict[str, Any]
    content_length: int | None = None
    via: bytes = b""
    expects_continue: bool = False


class AsgiStream(ServerStream):
    """One request: the connection of its cycle."""

    __slots__ = ("cycle", "date_header", "loop", "memory", "transport")
    connection: AsgiConnection

    def __init__(self, connection: AsgiConnection, number: int, head: AsgiHead) -> None:
        super().__init__(connection, number, head.content_length)
        self.loop, self.transport = connection.loop, connection.transport
        self.memory = connection.memory
        self.date_header = connection.state.date_header
        self.cycle = Http2Cycle(self, head)

    # -- the cycle's connection -------------------------------------------------------------------

    @property
    def writing_paused(self) -> bool:
        return self.sent_at > 0 or self.connection.writing_paused

    async def writable(self) -> None:
        await self.drained()

    def request_lease(self) -> Lease | None:
        return self.cycle.lease

    def resume_reading(self) -> None:
        self.touched_at = self.loop.time()
        if not self.remote_closed and self.receive_window < STREAM_WINDOW_BYTES // 2:
            increment = self.replenish(STREAM_WINDOW_BYTES)
            self.connection.writer.write(frames.window_update(self.number, increment))

    def leaving(self) -> bool:
        return False

    def cut_off(self) -> None:
        self.connection.cancel_stream(self, ErrorCode.INTERNAL_ERROR)

    def response_complete(self, cycle: RequestResponseCycle) -> None: ...

    # -- the stream -------------------------------------------------------------------------------

    def on_data(self, part: memoryview, last: bool) -> None:
        if self.local_closed or not len(part):
            return
        self.touched_at = self.loop.time()
        try:
            self.cycle.add(bytes(part))
        except MemoryExhausted:
            self.refuse(error_response.SCARCE)
            return
        if self.cycle.buffered < HIGH_WATER_BYTES:
            self.resume_reading()

    def on_end(self) -> None:
        self.cycle.end()

    def on_reset(self) -> None:
        self.cycle.disconnect()

    def on_sent(self) -> None:
        self.connection.complete(self, ErrorCode.NO_ERROR)

    def waits_for_client(self) -> bool:
        return not self.remote_closed and not self.local_closed and self.cycle.receiving

    def stall(self) -> None:
        self.refuse(error_response.SLOW)

    def refuse(self, error: ErrorResponse) -> None:
        """Answer without the application."""
        self.cycle.release()
        self.cycle.disconnect()
        if self.local_closed or self.reset_code is not None:
            return
        if self.cycle.begun:
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


class Http2Cycle(RequestResponseCycle):
    """A cycle that sends frames."""

    __slots__ = ("_stream",)

    def __init__(self, stream: AsgiStream, head: AsgiHead) -> None:
        super().__init__(stream, head.scope.copy(), True, head.expects_continue)
        self._stream = stream
        self.via = head.via

    @property
    def receiving(self) -> bool:
        """Whether the application waits for the body."""
        return self._waiter is not None

    def _send_continue(self) -> None:
        self._stream.connection.writer.write(frames.headers(self._stream.number, _CONTINUE))

    def _cut_off(self) -> None:
        self._stream.cut_off()

    def _start(self, message: Message) -> None:
        status = message["status"]
        self._note_status(status)
        block = [b"\x88" if status == 200 else literal(b":status", b"%d" % status)]
        block.append(literal(b"date", self._connection.date_header.value()))
        for name, value in message.get("headers", ()):
            if BAD_IN_VALUE.search(value):
                raise RuntimeError("a response header holds a line break")
            if name == b"content-length":
                self._remaining = int(value)
            if name not in CONNECTION_SPECIFIC:
                block.append(literal(name, value))
        self._head = b"".join(block)
        if self._remaining is None and not self._bodiless:
            # A stream's head is sent even if its first part takes long.
            self._stream.loop.call_soon(self._flush)

    def _write(self, head: bytes, body: bytes, more: bool) -> None:
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


class AsgiConnection(ServerConnection[AsgiHead, AsgiStream]):
    """A connection that an HTTP listener has accepted."""

    state: HttpServerState

    def __init__(
        self, state: HttpServerState, loop: asyncio.AbstractEventLoop, crowded: bool
    ) -> None:
        super().__init__(state, loop, self._read_head, crowded)
        self._scope: dict[str, Any] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._scope = connection_scope(self.transport, self.memory)

    def take_over(self, transport: asyncio.Transport, data: bytes) -> None:
        """Replace the protocol of ``transport``, which has received ``data``."""
        transport.pause_reading()  # uvloop chooses the way to read when it resumes
        transport.set_protocol(self)
        self.connection_made(transport)
        transport.resume_reading()
        if data:
            self.data_received(data)

    def _read_head(self, section: FieldSection) -> AsgiHead:
        pseudo = section.pseudo
        hosts = {value for name, value in section.regular if name == b"host"}
        authority = pseudo.get(b":authority")
        agree = len(hosts | {authority} - {None}) <= 1
        target = pseudo.get(b":path", b"")
        if not section.valid_request or not agree or not _TARGET.match(target):
            return AsgiHead(True, section.valid_trailers, {})
        headers = [field for field in section.regular if field[0] != b"host"]
        host = authority if authority is not None else next(iter(hosts), None)
        if host is not None:
            headers.insert(0, (b"host", host))
        by_name = dict(headers)
        method = pseudo[b":method"].decode("latin-1")
        return AsgiHead(
            False,
            False,
            scope(self._scope, method, "2", target, headers),
            section.content_length,
            b", ".join(value for name, value in headers if name == b"via"),
            by_name.get(b"expect", b"").lower() == b"100-continue",
        )

    def open(self, number: int, head: AsgiHead, ends: bool) -> None:
        stream = AsgiStream(self, number, head)
        stream.remote_closed = ends
        self.streams[number] = stream
        method, path = head.scope["method"], head.scope["raw_path"]
        if self.crowded and path not in self.state.health:
            stream.refuse(error_response.CROWDED)
            self.leave()
        elif head.via and via_header.loops(head.via):
            stream.refuse(error_response.LOOP)
        elif self.state.overloaded and self.state.refuses_unread(method.encode("latin-1"), path):
            stream.refuse(error_response.OVERLOADED)
        else:
            self.state.start(stream.cycle, self.loop)
            if ends:
                self.end_stream(stream)
