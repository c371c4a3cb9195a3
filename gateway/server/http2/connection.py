"""The server's end of an HTTP/2 connection: its preface, its limits in time, and its drain."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from modelport.gateway.errors import MemoryExhausted
from modelport.gateway.runtime.request_memory import (
    MOVED_BYTES,
    PROCESS,
    Lease,
    UnreadResponse,
)
from modelport.gateway.server import time_limits
from modelport.gateway.server.listener import ServerState
from modelport.gateway.server.listening_socket import Room, untaken_bytes
from modelport.gateway.wire.http2 import frames, settings
from modelport.gateway.wire.http2.connection import Http2Connection
from modelport.gateway.wire.http2.frames import PREFACE, ErrorCode, ProtocolError
from modelport.gateway.wire.http2.header_blocks import MAX_HEADER_BYTES, FieldSection
from modelport.gateway.wire.http2.settings import STREAM_WINDOW_BYTES, server_greeting
from modelport.gateway.wire.http2.stream import Http2Stream

_GREETING = server_greeting(MAX_HEADER_BYTES)


class RequestHead(Protocol):
    """A header section of a client."""

    @property
    def malformed(self) -> bool:
        """Whether it is not a request (RFC 9113, 8.1.1)."""

    @property
    def valid_trailers(self) -> bool:
        """Whether it may end a request."""


class ServerStream(Http2Stream):
    """A request and its response."""

    __slots__ = ("_response",)
    answers = True
    connection: ServerConnection[Any, Any]

    def __init__(
        self, connection: ServerConnection[Any, Any], number: int, content_length: int | None
    ) -> None:
        super().__init__(connection, number, STREAM_WINDOW_BYTES, content_length)
        self._response: UnreadResponse | None = None

    def request_lease(self) -> Lease | None:
        """The memory of the request, for which its complete response needs no more."""
        raise NotImplementedError

    def count(self, size: int) -> None:
        """Count the unread part of the response against the budget.

        Raises:
            MemoryExhausted: The budget is exceeded; the response is dropped.
        """
        response = self._response
        if not size:
            if response is not None:
                response.release()
            return
        if response is None:
            response = self._response = UnreadResponse(self.connection.memory, self._cut_off)
        try:
            response.hold(size, self.request_lease() if self.local_closed else None)
        except MemoryExhausted:
            self.discard()
            self.local_closed = False
            raise

    def _cut_off(self) -> None:
        self.connection.cancel_stream(self, ErrorCode.ENHANCE_YOUR_CALM)

    def discard(self) -> None:
        super().discard()
        self.count(0)

    def refuse_briefly(self, close: Callable[[], None]) -> None:
        """Send a short error with ``close``, or reset the stream where not even that is read."""
        try:
            close()
        except MemoryExhausted:
            self._cut_off()

    def touch(self) -> None:
        """Note that the client reads the connection, and that it will come to this response."""
        if self._response is not None:
            self._response.touch()

    def waits_for_client(self) -> bool:
        """Whether the handler cannot continue without more of the body."""
        raise NotImplementedError

    def stall(self) -> None:
        """Answer a request whose body has stalled."""
        raise NotImplementedError


HeadT = TypeVar("HeadT", bound=RequestHead)
ServerStreamT = TypeVar("ServerStreamT", bound=ServerStream)


class ServerConnection(Http2Connection[HeadT, ServerStreamT]):
    """A connection of a listener with ``state``.

    ``crowded``: there is room for health checks only; None: that is to be found out.
    """

    def __init__(
        self,
        state: ServerState,
        loop: asyncio.AbstractEventLoop,
        make_head: Callable[[FieldSection], HeadT],
        crowded: bool | None = None,
    ) -> None:
        super().__init__(loop, make_head)
        self.state = state
        self.crowded = crowded
        self.memory = PROCESS.connection()
        self._preface = b""
        self._warned = False
        # Since when there is no stream, and the last one by then.
        self._idle_since, self._seen = loop.time(), 0
        # What the transport holds, what the client has not taken of it, and the data sent, at the
        # last check.
        self._held: UnreadResponse | None = None
        self._untaken = self._sent = 0
        self._timer: asyncio.TimerHandle | None = None

    # -- roles ------------------------------------------------------------------------------------

    def open(self, number: int, head: HeadT, ends: bool) -> None:
        """Begin a request that is well-formed; ``ends``: it has no body."""
        raise NotImplementedError

    def refuse_preface(self, data: bytes) -> bytes:
        """The answer to a client of another protocol, which sent ``data``."""
        return frames.settings() + frames.go_away(0, ErrorCode.PROTOCOL_ERROR)

    # -- asyncio ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family != socket.AF_UNIX:
            notice_dead_peers(connection)
        if self.crowded is None:
            room = self.state.admit(self, transport)
            if room is Room.NONE:
                reason = b"too many connections"
                self.transport.write(
                    frames.settings() + frames.go_away(0, ErrorCode.ENHANCE_YOUR_CALM, reason)
                )
                self.transport.close()  # at once: to linger takes a file
                self.closing = True
                return
            self.crowded = room is Room.HEALTH
        else:
            self.state.connections[self] = None
        self._timer = self.loop.call_later(time_limits.CHECK_SECONDS, self._tick)

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.connections.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._held is not None:
            self._held.release()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._held is None:
            self._held = UnreadResponse(self.memory, self.transport.abort)
        self._held.hold(self.transport.get_write_buffer_size(), exceed=True)

    def resume_writing(self) -> None:
        if self._held is not None:
            self._held.release()
        super().resume_writing()

    def on_preface(self, data: bytes) -> bytes:
        data = self._preface + data
        if data.startswith(PREFACE):
            self.greeted = True
            self.writer.write(_GREETING)
            return data[len(PREFACE) :]
        if PREFACE.startswith(data):
            self._preface = data
        else:
            self.writer.write(self.refuse_preface(data))
            self.linger()
        return b""

    # -- streams ----------------------------------------------------------------------------------

    def on_stream(self, number: int, head: HeadT, ends: bool) -> None:
        if not number & 1:
            raise ProtocolError("a client's streams must have odd numbers")
        self.last_stream = number
        if head.malformed or len(self.streams) >= settings.MAX_STREAMS:
            self.limits.idle_frame()
            self.abandon(number, ends)
            code = ErrorCode.PROTOCOL_ERROR if head.malformed else ErrorCode.REFUSED_STREAM
            self.writer.write(frames.reset(number, code))
        elif self.leaving:  # the GOAWAY has told the client that this is not processed
            self.abandon(number, ends)
        else:
            self.open(number, head, ends)

    def on_section(self, stream: ServerStreamT, head: HeadT, ends: bool) -> None:
        if not ends or not head.valid_trailers:
            self.reset_stream(stream, ErrorCode.PROTOCOL_ERROR)
        else:
            stream.remote_closed = True
            stream.on_data(memoryview(b""), True)
            self.end_stream(stream)

    # -- limits in time, and ends -----------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self.loop.call_later(time_limits.CHECK_SECONDS, self._tick)
        self.check(self.loop.time())

    def check(self, now: float) -> None:
        super().check(now)
        if self.closing:
            return
        if self.streams or self.last_stream != self._seen:
            self._idle_since, self._seen = now, self.last_stream
        elif now - self._idle_since > time_limits.KEEP_ALIVE_SECONDS:
            self.leave()
        moves = self._reads()
        for stream in list(self.streams.values()):
            if moves and stream.sent_at and (self.writing_paused or stream.number in self.blocked):
                stream.sent_at = now  # the client reads, however slowly
            idle = now - stream.touched_at > time_limits.BODY_IDLE_SECONDS
            if idle and stream.waits_for_client():
                stream.stall()
            elif stream.sent_at and now - stream.sent_at > time_limits.UNREAD_SECONDS:
                self.reset_stream(stream, ErrorCode.CANCEL)

    def _reads(self) -> bool:
        """Whether the client has taken anything since the last check."""
        if not self.writing_paused and not self.blocked:
            return False
        sent, self._sent = self.sent_bytes - self._sent, self.sent_bytes
        before, self._untaken = self._untaken, untaken_bytes(self.transport)
        taken = sent + before - self._untaken
        if taken >= MOVED_BYTES:
            for number in list(self.blocked):
                self.streams[number].touch()
            if self._held is not None:
                self._held.touch()
        return taken > 0

    def warn(self) -> None:
        """Announce the end: the client opens further streams elsewhere."""
        if self.settings_received and not self._warned and not self.closing:
            self._warned = True
            self.writer.write(frames.go_away(frames.MAX_STREAM, ErrorCode.NO_ERROR))

    @property
    def idle(self) -> bool:
        return not self.streams

    @property
    def waiting(self) -> bool:
        streams = self.streams.values()
        return self.writing_paused or all(s.sent_at or s.waits_for_client() for s in streams)

    def close(self) -> None:
        self.leave()


def notice_dead_peers(connection: socket.socket) -> None:
    """End ``connection`` when its other end has been gone for ``DEAD_PEER_SECONDS``."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connection.setsockopt(socket.IPPROTO_TCP, option, time_limits.DEAD_PEER_SECONDS // 2)
    milliseconds = time_limits.DEAD_PEER_SECONDS * 1000
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
