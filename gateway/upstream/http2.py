"""The client's end of an HTTP/2 connection: calls with one request, and one reply or several.

Header blocks are sent as literals, made once for each method. A single reply is bounded by its
size, not by flow control: the windows are as large as they can be. Of several replies the server
sends no more than ``STREAM_WINDOW_BYTES`` ahead.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import NamedTuple

from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire.grpc_body import PREFIX_BYTES, Body
from modelport.gateway.wire.http2 import frames
from modelport.gateway.wire.http2.connection import Http2Connection
from modelport.gateway.wire.http2.frames import MAX_WINDOW_BYTES, ErrorCode, ProtocolError
from modelport.gateway.wire.http2.header_blocks import MAX_HEADER_BYTES, FieldSection
from modelport.gateway.wire.http2.stream import Http2Stream
from modelport.gateway.wire.raw_tensors import Buffer

Headers = dict[str, str]

#: The longest time that a peer may leave a ping, or data, unacknowledged.
PONG_SECONDS = 5.0
#: A peer that sends nothing for this long, with calls in flight, is pinged.
SILENCE_SECONDS = 1.0


def _too_large() -> EndpointFailed:
    return EndpointFailed(FailureKind.DAMAGED, "it is larger than the route's max_reply_bytes")


class ResponseHead(NamedTuple):
    """A header section of a server: its fields by name, a repeated one by its last value."""

    fields: Headers
    valid: bool
    informational: bool
    valid_trailers: bool
    content_length: int | None


def read_head(section: FieldSection) -> ResponseHead:
    rows = (*section.pseudo.items(), *section.regular)
    fields = {name.decode("latin-1"): value.decode("utf-8", "replace") for name, value in rows}
    informational = fields.get(":status", "")[:1] == "1"
    valid, trailers = section.valid_response, section.valid_trailers
    return ResponseHead(fields, valid, informational, trailers, section.content_length)


class GrpcReply(Http2Stream):
    """The reply to one call. Without a body, ``trailers`` are the headers."""

    __slots__ = ("body", "done", "headers", "limit", "trailers")
    connection: ClientConnection

    def __init__(self, connection: ClientConnection, number: int, limit: int) -> None:
        super().__init__(connection, number, connection.window)
        self.done: asyncio.Future[None] = connection.loop.create_future()
        self.limit = limit
        self.headers: Headers | None = None
        self.trailers: Headers | None = None
        self.body = Body()

    def on_data(self, part: memoryview, last: bool) -> None:
        if self.headers is None:
            self.connection.reset_stream(self, ErrorCode.PROTOCOL_ERROR)
        elif self.body.size + len(part) <= self.limit:
            self.body.add(part)
        elif not self.done.done():
            self.done.set_exception(_too_large())

    def place(self) -> memoryview | None:
        return None if self.done.done() or self.headers is None else self.body.place()

    def on_end(self) -> None:
        self.connection.complete(self, ErrorCode.CANCEL)
        if not self.done.done():
            self.done.set_result(None)

    def on_reset(self) -> None:
        if not self.done.done():
            self.done.set_exception(EndpointFailed(FailureKind.DROPPED))


class GrpcReplies(GrpcReply):
    """The replies to one call, which are taken one at a time.

    The server's window is opened again while one is awaited, so that a slow caller slows it down.
    """

    __slots__ = ("_arrived", "_content")

    def __init__(self, connection: ClientConnection, number: int, limit: int) -> None:
        super().__init__(connection, number, limit)
        self._content = bytearray()
        self._arrived = asyncio.Event()

    def on_data(self, part: memoryview, last: bool) -> None:
        if self.headers is None:
            self.connection.reset_stream(self, ErrorCode.PROTOCOL_ERROR)
        self._content += part
        self._arrived.set()

    def place(self) -> memoryview | None:
        return None

    def on_end(self) -> None:
        super().on_end()
        self._arrived.set()

    def on_reset(self) -> None:
        super().on_reset()
        self.done.exception()  # it may be that no one asks for it
        self._arrived.set()

    async def take(self) -> bytes:
        """The next message, with its prefix; empty: there are no more.

        Raises:
            EndpointFailed: the stream was reset, or the message is too large.
        """
        content, window = self._content, self.connection.window
        while True:
            size = PREFIX_BYTES + int.from_bytes(content[1:PREFIX_BYTES])
            if len(content) >= PREFIX_BYTES and size > self.limit:
                raise _too_large()
            if len(content) >= size:
                break
            if self.done.done():
                self.done.result()
                break
            if self.receive_window < window // 2:
                increment = self.replenish(window)
                self.connection.writer.write(frames.window_update(self.number, increment))
            self._arrived.clear()
            await self._arrived.wait()
        message = bytes(content[:size])
        del content[:size]
        return message


class ClientConnection(Http2Connection[ResponseHead, GrpcReply]):
    """A connection that is ``usable`` until the server ends it, or breaks the protocol."""

    def __init__(self, loop: asyncio.AbstractEventLoop, window: int = MAX_WINDOW_BYTES) -> None:
        """``window``: what the server may send on a stream without being asked for more."""
        super().__init__(loop, read_head)
        self.window = window
        self.last_stream = -1
        #: Done when the server's settings have come: it speaks HTTP/2.
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        #: When it was pinged, until it answers; 0: it was not.
        self._pinged_at = 0.0
        #: ``progress`` at the last check for silence, and whether there was a ping since.
        self._heard = 0
        self._pinged_in_silence = False

    @property
    def established(self) -> bool:
        ready = self.ready
        return ready.done() and not ready.cancelled() and ready.exception() is None

    @property
    def usable(self) -> bool:
        return not self.leaving and not self.closing

    @property
    def busy(self) -> bool:
        """Whether calls are in flight."""
        return bool(self.streams)

    @property
    def free(self) -> bool:
        """Whether it accepts another call."""
        return self.usable and len(self.streams) < self.peer.max_streams

    @property
    def last_peer_stream(self) -> int:
        return 0

    # -- calls ------------------------------------------------------------------------------------

    async def call(
        self,
        block: bytes,
        body: Sequence[Buffer],
        limit: int,
        kind: type[GrpcReply] = GrpcReply,
    ) -> GrpcReply:
        """Send the header block ``block`` and the parts of ``body``; return the reply.

        Args:
            kind: ``GrpcReplies`` are returned at once.

        Raises:
            EndpointFailed: there will be no reply. Cancelled, it resets the stream.
        """
        if not self.usable:  # it ended between being chosen and being used
            raise EndpointFailed(FailureKind.DROPPED)
        if not self.streams:
            self._heard = -1
        self.last_stream = number = self.last_stream + 2
        self.leaving = number == frames.MAX_STREAM
        reply = self.streams[number] = kind(self, number, limit)
        reply.queue(*body)
        try:
            reply.close(head=frames.frame(frames.HEADERS, frames.END_HEADERS, number, block))
            if kind is GrpcReply:
                await reply.done
            return reply
        except (asyncio.CancelledError, EndpointFailed):
            self.cancel_stream(reply, ErrorCode.CANCEL)
            raise

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._pinged_at = self.loop.time()
        self.writer.write(frames.frame(frames.PING, 0, 0, bytes(8)))

    def check_pong(self) -> None:
        """Drop the connection if the last ping has no answer yet."""
        if self._pinged_at:
            self.terminate(ProtocolError("the peer does not respond to pings"))

    def check_silence(self) -> None:
        """Ping a peer that leaves calls unanswered and sends nothing else.

        Once in each silence: gRPC servers end a connection on which pings come often, unless they
        send data or headers in between.
        """
        now = self.loop.time()
        self.check(now)
        if self._pinged_at and now - self._pinged_at >= PONG_SECONDS:
            self.check_pong()
        heard, self._heard = self._heard != self.progress, self.progress
        if heard or not self.streams:
            self._pinged_in_silence = False
        elif not self._pinged_in_silence:
            self._pinged_in_silence = True
            self.ping()

    def abort(self) -> None:
        self.closing = True
        if hasattr(self, "transport"):
            self.transport.abort()

    def close(self) -> None:
        self.closing = True
        if self.transport.get_extra_info("ssl_object") is None:
            self.transport.close()
        else:
            self.transport.abort()  # to close waits for the server's side

    # -- events -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # for what is sent and never acknowledged
            option = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PONG_SECONDS * 1000))
            transport.get_extra_info("socket").setsockopt(*option)
        self.greeted = True
        settings = frames.settings(
            (frames.ENABLE_PUSH, 0),
            (frames.INITIAL_WINDOW_SIZE, self.window),
            (frames.MAX_FRAME_SIZE, frames.MAX_DATA_BYTES),
            (frames.MAX_HEADER_LIST_SIZE, MAX_HEADER_BYTES),
        )
        widened = frames.window_update(0, MAX_WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES)
        self.transport.write(frames.PREFACE + settings + widened)

    def connection_lost(self, exc: Exception | None) -> None:
        lost = ProtocolError("the connection was lost")
        lost.__cause__ = exc
        self._end(lost)
        super().connection_lost(exc)

    def terminate(self, error: ProtocolError) -> None:
        self._end(error)
        super().terminate(error)

    def _end(self, error: ProtocolError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)

    def on_settings(self, payload: bytes) -> None:
        super().on_settings(payload)
        if not self.ready.done():
            self.ready.set_result(None)

    def _answer(self, content: bytes) -> None:
        super()._answer(content)
        self._heard += 1  # pings and settings do not end the silence

    def on_pong(self) -> None:
        self._pinged_at = 0.0
        self._heard += 1  # an answer does not end the silence

    def on_section(self, stream: GrpcReply, head: ResponseHead, ends: bool) -> None:
        if stream.headers is None and head.valid:
            if head.informational and not ends:
                self.limits.idle_frame()
                return
            stream.headers = head.fields
            stream.started = True
            stream.content_length = head.content_length
        elif stream.headers is None or not ends or not head.valid_trailers:
            self.reset_stream(stream, ErrorCode.PROTOCOL_ERROR)
            return
        stream.trailers = head.fields
        if ends:
            self.end_stream(stream)

    def on_go_away(self, last_stream: int) -> None:
        self.leaving = True
        for number, reply in list(self.streams.items()):
            if number > last_stream:
                self.drop(reply, ErrorCode.REFUSED_STREAM)
        if not self.streams:
            self.close()
