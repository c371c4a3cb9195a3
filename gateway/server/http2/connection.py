"""The server's end of an HTTP/2 connection: its preface, its limits in time, and its drain."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol, TypeVar

from modelport.gateway.runtime.request_memory import PROCESS
from modelport.gateway.server import time_limits
from modelport.gateway.server.listener import ServerState
from modelport.gateway.server.listening_socket import Room
from modelport.gateway.wire.http2 import frames, settings
from modelport.gateway.wire.http2.connection import Http2Connection
from modelport.gateway.wire.http2.frames import PREFACE, ErrorCode, ProtocolError
from modelport.gateway.wire.http2.header_blocks import MAX_HEADER_BYTES, FieldSection
from modelport.gateway.wire.http2.settings import server_greeting
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

    __slots__ = ()

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
        self._unsent = 0  # of the transport, at the last check
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
            self.state.connections.add(self)
        self._timer = self.loop.call_later(time_limits.CHECK_SECONDS, self._tick)

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

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
        unsent, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        moves = self.writing_paused and self._unsent != unsent
        for stream in list(self.streams.values()):
            if moves:
                stream.sent_at = now  # the client reads, however slowly
            idle = now - stream.touched_at > time_limits.BODY_IDLE_SECONDS
            if idle and stream.waits_for_client():
                stream.stall()
            elif stream.to_send and now - stream.sent_at > time_limits.UNREAD_SECONDS:
                self.reset_stream(stream, ErrorCode.CANCEL)

    def warn(self) -> None:
        """Announce the end: the client opens further streams elsewhere."""
        if self.settings_received and not self._warned and not self.closing:
            self._warned = True
            self.writer.write(frames.go_away(frames.MAX_STREAM, ErrorCode.NO_ERROR))

    def close(self) -> None:
        self.leave()


def notice_dead_peers(connection: socket.socket) -> None:
    """End ``connection`` when its other end has been gone for ``DEAD_PEER_SECONDS``."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connection.setsockopt(socket.IPPROTO_TCP, option, time_limits.DEAD_PEER_SECONDS // 2)
    milliseconds = time_limits.DEAD_PEER_SECONDS * 1000
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
