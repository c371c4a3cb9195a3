"""The HTTP/2 connection and its streams (RFC 9113), for either role, on the event loop.

The roles are subclasses: ``server.http2.connection`` and ``upstream.http2``. In both, a peer that
violates the protocol, or exceeds a limit, gets a GOAWAY with the error code.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from modelport.gateway.wire.http2 import abuse_limits, frames
from modelport.gateway.wire.http2.abuse_limits import AbuseLimits
from modelport.gateway.wire.http2.flow_control import FlowControlError, FlowController
from modelport.gateway.wire.http2.frame_reader import FrameReader
from modelport.gateway.wire.http2.frames import (
    ACK,
    END_STREAM,
    MAX_WINDOW_BYTES,
    WORD,
    ErrorCode,
    ProtocolError,
)
from modelport.gateway.wire.http2.header_blocks import FieldSection, HeaderBlocks
from modelport.gateway.wire.http2.settings import PeerSettings
from modelport.gateway.wire.http2.stream import Http2Stream
from modelport.gateway.wire.http2.writer import FrameWriter

#: The longest time that a peer may stall within a frame, or before its settings.
HEAD_SECONDS = 10.0
#: The time that a peer has to read the last frames before the connection is aborted.
LINGER_SECONDS = 1.0

Head = TypeVar("Head")
StreamT = TypeVar("StreamT", bound=Http2Stream)


class Http2Connection(
    FrameReader, FlowController, asyncio.BufferedProtocol, Generic[Head, StreamT]
):
    """One connection; ``make_head`` converts the header blocks that come.

    Clients open all streams, which have odd numbers: pushed streams are refused in advance.
    """

    transport: asyncio.Transport
    writer: FrameWriter

    def __init__(
        self, loop: asyncio.AbstractEventLoop, make_head: Callable[[FieldSection], Head]
    ) -> None:
        FrameReader.__init__(self)
        FlowController.__init__(self, frames.DEFAULT_WINDOW_BYTES, MAX_WINDOW_BYTES)
        self.loop = loop
        self._blocks: HeaderBlocks[Head] = HeaderBlocks(make_head)
        self.peer = PeerSettings()
        self.streams: dict[int, StreamT] = {}
        #: Streams that were closed early. What still comes of them was on its way.
        self._abandoned: dict[int, None] = {}
        #: Streams that wait for the connection's window, or the transport.
        self.blocked: dict[int, Http2Stream] = {}
        self.writing_paused = False
        #: The data that was written, for a look at the peer's progress.
        self.sent_bytes = 0
        #: The highest stream that was opened.
        self.last_stream = 0
        self.limits = AbuseLimits(loop.time)
        #: This side has sent its preface; no more streams are opened; nothing more is read.
        self.greeted = self.leaving = self.closing = False
        self._midway_since, self._progress = loop.time(), 0

    # -- roles ------------------------------------------------------------------------------------

    def on_stream(self, number: int, head: Head, ends: bool) -> None:
        """The peer opens a stream."""
        raise ProtocolError("a server opens no streams")

    def on_preface(self, data: bytes) -> bytes:
        """Read the client's preface; return the bytes behind it."""
        raise NotImplementedError

    def on_section(self, stream: StreamT, head: Head, ends: bool) -> None:
        """Receive a header section on a stream that is open: trailers, or a response."""
        raise NotImplementedError

    def on_pong(self) -> None:
        """The peer has answered a ping."""

    def on_go_away(self, last_stream: int) -> None:
        """The peer opens no more streams, and takes none past ``last_stream``."""
        self.leave()

    # -- asyncio ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self.writer = FrameWriter(self.transport, self.loop)

    def data_received(self, data: bytes) -> None:
        if self.closing:
            return
        if not self.greeted:
            data = self.on_preface(data)
        try:
            self.feed(data)
        except ProtocolError as error:
            self.terminate(error)

    def place(self, stream: int) -> memoryview | None:
        found = self.streams.get(stream)
        return None if found is None or self.closing else found.place()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self._drop_all()

    def pause_writing(self) -> None:
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.writing_paused = False
        self._flush_all_blocked()

    # -- frames -----------------------------------------------------------------------------------

    def on_headers(self, stream: int, flags: int, block: bytes) -> None:
        head = self._blocks.decode(block)
        ends = bool(flags & END_STREAM)
        found = self.streams.get(stream)
        if found is not None and not found.remote_closed:
            self.on_section(found, head, ends)
        elif stream > self.last_stream:
            self.on_stream(stream, head, ends)
        elif stream in self._abandoned:
            self.limits.idle_frame()
            if ends:
                del self._abandoned[stream]
        else:
            raise ProtocolError("HEADERS on a closed stream", ErrorCode.STREAM_CLOSED)

    def on_data(self, stream: int, part: memoryview, size: int, last: bool) -> None:
        self.receive_window -= size
        if self.receive_window < MAX_WINDOW_BYTES // 2:
            if self.receive_window < 0:
                raise FlowControlError("the peer sent more data than the connection's window")
            increment = self.replenish(MAX_WINDOW_BYTES)
            self.writer.write(frames.window_update(0, increment))
        got = len(part)
        if not got and not last:
            self.limits.idle_frame()
        found = self.streams.get(stream)
        if found is None or found.remote_closed:
            self._stray_data(stream, found, last)
            return
        found.receive_window -= size
        if found.receive_window < 0:
            self.reset_stream(found, ErrorCode.FLOW_CONTROL_ERROR)
            return
        found.received += got
        found.remote_closed = last
        found.on_data(part, last)
        if last:
            self.end_stream(found)

    def end_stream(self, stream: StreamT) -> None:
        """Handle the end of the peer's side: END_STREAM."""
        stream.remote_closed = True
        if stream.content_length is not None and stream.content_length != stream.received:
            self.reset_stream(stream, ErrorCode.PROTOCOL_ERROR)
        elif stream.reset_code is None:
            stream.on_end()

    def _stray_data(self, stream: int, found: StreamT | None, last: bool) -> None:
        if self._is_idle(stream):
            raise ProtocolError("DATA on an idle stream")
        if found is not None or stream not in self._abandoned:
            raise ProtocolError("DATA on a closed stream", ErrorCode.STREAM_CLOSED)
        if last:
            del self._abandoned[stream]

    def _is_idle(self, stream: int) -> bool:
        return stream > self.last_stream or not stream & 1

    def on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.limits.idle_frame()
        if kind == frames.WINDOW_UPDATE:
            self._widen(stream, WORD.unpack(payload)[0] & MAX_WINDOW_BYTES)
        elif kind == frames.RST_STREAM:
            self._reset(stream, WORD.unpack(payload)[0])
        elif kind == frames.PING:
            if flags & ACK:
                self.on_pong()
            else:
                self._answer(frames.frame(frames.PING, ACK, 0, payload))
        elif kind == frames.SETTINGS:
            if not flags & ACK:
                self.on_settings(payload)
        elif kind == frames.GOAWAY:
            if len(payload) < 2 * WORD.size:
                raise ProtocolError("GOAWAY is truncated", ErrorCode.FRAME_SIZE_ERROR)
            self.on_go_away(WORD.unpack_from(payload)[0] & frames.MAX_STREAM)
        elif kind == frames.PUSH_PROMISE:
            raise ProtocolError("PUSH_PROMISE is not allowed")

    def _widen(self, stream: int, size: int) -> None:
        if stream == 0:
            if not size:
                raise ProtocolError("WINDOW_UPDATE with an increment of 0")
            self.widen(size)
            self._flush_blocked()
            return
        if self._is_idle(stream):
            raise ProtocolError("WINDOW_UPDATE on an idle stream")
        found = self.streams.get(stream)
        if found is None:
            return
        if not size:
            self.reset_stream(found, ErrorCode.PROTOCOL_ERROR)
            return
        try:
            found.widen(size)
        except FlowControlError as error:
            self.reset_stream(found, error.code)
            return
        if found.to_send:
            found.flush()

    def _reset(self, stream: int, code: int) -> None:
        if self._is_idle(stream):
            raise ProtocolError("RST_STREAM on an idle stream")
        self._abandoned.pop(stream, None)
        found = self.streams.get(stream)
        if found is not None:
            found.remote_closed = True
            self.drop(found, code)
            if not found.started:
                self.limits.reset(self.loop.time() - found.opened_at)

    def on_settings(self, payload: bytes) -> None:
        """Apply the peer's settings and acknowledge them."""
        change = self.peer.update(payload)
        self.settings_received = True
        self._answer(frames.frame(frames.SETTINGS, ACK, 0))
        if change:
            self.limits.idle_frame(len(self.streams))
            for stream in list(self.streams.values()):
                stream.widen(change)
                if stream.to_send and change > 0:
                    stream.flush()

    def _answer(self, content: bytes) -> None:
        if self.transport.get_write_buffer_size() > abuse_limits.UNREAD_BYTES:
            raise ProtocolError("the peer does not read", ErrorCode.ENHANCE_YOUR_CALM)
        self.writer.write(content)

    # -- streams ----------------------------------------------------------------------------------

    def complete(self, stream: StreamT, code: int) -> None:
        """Close a stream whose response is complete; ``code`` is for a side that is still open."""
        self.limits.completed()
        del self.streams[stream.number]
        if self.blocked:
            self.blocked.pop(stream.number, None)
        if not stream.remote_closed or not stream.local_closed or stream.to_send:
            self.abandon(stream.number, stream.remote_closed)
            self.writer.write(frames.reset(stream.number, code))
        if self.leaving:
            self._close_if_done()

    def reset_stream(self, stream: StreamT, code: int) -> None:
        """Close a stream for a fault of the peer; the connection continues."""
        self.cancel_stream(stream, code)
        self.limits.reset(self.loop.time() - stream.opened_at)

    def cancel_stream(self, stream: StreamT, code: int) -> None:
        """Close a stream early."""
        if stream.number not in self.streams:
            return
        self.abandon(stream.number, stream.remote_closed)
        self.writer.write(frames.reset(stream.number, code))
        self.drop(stream, code)

    def drop(self, stream: StreamT, code: int) -> None:
        """Forget a stream that ends early."""
        del self.streams[stream.number]
        self.blocked.pop(stream.number, None)
        stream.reset_code = code
        stream.discard()
        stream.on_reset()
        stream.wake()
        self._close_if_done()

    def _drop_all(self) -> None:
        for stream in list(self.streams.values()):
            self.drop(stream, ErrorCode.CANCEL)

    def abandon(self, stream: int, ended: bool) -> None:
        """Ignore further frames of a stream that was closed early, unless the peer ``ended`` it."""
        if not ended:
            self._abandoned[stream] = None
            if len(self._abandoned) > abuse_limits.MAX_ABANDONED:
                del self._abandoned[next(iter(self._abandoned))]

    def _flush_blocked(self) -> None:
        for stream in list(self.blocked.values()):
            if self.writing_paused or self.send_window <= 0:
                return
            stream.flush()

    def _flush_all_blocked(self) -> None:
        """Also send headers, which need no window."""
        for stream in list(self.blocked.values()):
            if self.writing_paused:
                return
            if self.send_window > 0 or not stream.needs_window:
                stream.flush()

    # -- ends -------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """End the connection if the peer has stalled within a frame. Call it once a second."""
        if (self.settings_received and not self.midway) or self.progress != self._progress:
            self._midway_since, self._progress = now, self.progress
        elif now - self._midway_since > HEAD_SECONDS:
            self.terminate(ProtocolError("the peer has stalled within a frame"))

    def leave(self) -> None:
        """Open no more streams, and close the connection when those there are have ended."""
        if self.leaving or self.closing:
            return
        self.leaving = True
        if self.greeted:
            self.writer.write(frames.go_away(self.last_peer_stream, ErrorCode.NO_ERROR))
        self._close_if_done()

    @property
    def last_peer_stream(self) -> int:
        """The highest stream that the peer has opened."""
        return self.last_stream

    def terminate(self, error: ProtocolError) -> None:
        if self.closing:
            return
        if self.greeted:
            reason = str(error).encode()
            self.writer.write(frames.go_away(self.last_peer_stream, error.code, reason))
        self.closing = True
        self._drop_all()
        self.linger()

    def _close_if_done(self) -> None:
        if self.leaving and not self.streams and not self.closing:
            self.linger()

    def linger(self) -> None:
        """Close once the peer can have read the last frames: a close with bytes unread resets."""
        self.closing = True
        # The segment at hand may hold requests that are still answered.
        self.loop.call_soon(self._end_sending)
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _end_sending(self) -> None:
        self.writer.send()
        if not self.transport.is_closing():
            with contextlib.suppress(OSError):  # the peer has gone meanwhile
                if self.transport.can_write_eof():
                    self.transport.write_eof()
                else:
                    self.transport.close()
