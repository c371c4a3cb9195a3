"""The HTTP/2 connection and its streams (RFC 9113), for either role, on the event loop.

The roles are subclasses: ``server.http2.connection`` and ``upstream.http2``. In both, a peer that
violates the protocol, or exceeds a limit, gets a GOAWAY with the error code.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from modelport.gateway.runtime.thread_buffer import ThreadBuffer
from modelport.gateway.wire.http2 import abuse_limits, frames
from modelport.gateway.wire.http2.abuse_limits import AbuseLimits
from modelport.gateway.wire.http2.flow_control import FlowControlError, FlowController
from modelport.gateway.wire.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    FRAME_BYTES,
    GOAWAY,
    HEADERS,
    MAX_DATA_BYTES,
    MAX_STREAM,
    MAX_WINDOW_BYTES,
    PADDED,
    PING,
    PRIORITISED,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    WORD,
    ErrorCode,
    ProtocolError,
)
from modelport.gateway.wire.http2.header_blocks import MAX_HEADER_BYTES, FieldSection, HeaderBlocks
from modelport.gateway.wire.http2.settings import PeerSettings
from modelport.gateway.wire.http2.stream import Http2Stream
from modelport.gateway.wire.http2.writer import FrameWriter

#: The longest time that a peer may stall within a frame, or before its settings.
HEAD_SECONDS = 10.0
#: The time that a peer has to read the last frames before the connection is aborted.
LINGER_SECONDS = 1.0

_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_CONNECTION_FRAMES = frozenset((SETTINGS, PING, GOAWAY))
_STREAM_FRAMES = frozenset((HEADERS, PRIORITY, RST_STREAM, PUSH_PROMISE))
_PRIORITY_BYTES = 5
#: The bytes of one read, and the smallest part of a body that is read straight into its place.
_READ_BYTES = 2**16
_PLACED_BYTES = 2**14
_scratch = ThreadBuffer(_READ_BYTES)

Head = TypeVar("Head")
StreamT = TypeVar("StreamT", bound=Http2Stream)


class Http2Connection(FlowController, asyncio.BufferedProtocol, Generic[Head, StreamT]):
    """One connection; ``make_head`` converts the header blocks that come.

    DATA is handed on in pieces, as it comes, and long DATA is read from the socket into its place;
    other frames are handed on whole.

    Clients open all streams, which have odd numbers: pushed streams are refused in advance.
    """

    transport: asyncio.Transport
    writer: FrameWriter

    def __init__(
        self, loop: asyncio.AbstractEventLoop, make_head: Callable[[FieldSection], Head]
    ) -> None:
        FlowController.__init__(self, frames.DEFAULT_WINDOW_BYTES, MAX_WINDOW_BYTES)
        self._scratch = _scratch.view
        self._place: memoryview | None = None
        self._rest = b""
        # The DATA frame under way: its stream, missing bytes, padding and END_STREAM.
        self._data: tuple[int, int, int, bool] | None = None
        # The header block that CONTINUATION frames complete: its stream, flags and parts.
        self._block: tuple[int, int, bytearray] | None = None
        #: Whether the peer's first SETTINGS frame has come.
        self.settings_received = False
        #: Counts complete frames, complete header blocks and pieces of DATA.
        self.progress = 0
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
        """The buffer for a stream's next data, if there is one."""
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

    def get_buffer(self, sizehint: int) -> memoryview:
        self._place = None
        if self._data is not None:
            stream, missing, padding, _ = self._data
            missing -= padding
            if missing >= _PLACED_BYTES:
                place = self.place(stream)
                if place is not None and len(place) >= _PLACED_BYTES:
                    self._place = place[:missing]
                    return self._place
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        place = self._place
        if place is None:
            self.data_received(bytes(self._scratch[:nbytes]))
            return
        self._place = None
        assert self._data is not None
        try:
            self._take(place[:nbytes], 0, *self._data)
        except ProtocolError as error:
            self.terminate(error)

    # -- reading frames ---------------------------------------------------------------------------

    @property
    def midway(self) -> bool:
        """Whether a frame or a header block is incomplete."""
        return bool(self._rest) or self._block is not None

    def feed(self, data: bytes) -> None:
        """Parse ``data`` and dispatch its frames.

        Raises:
            ProtocolError: it violates HTTP/2.
        """
        at = 0
        if self._data is not None:
            at = self._take(memoryview(data), 0, *self._data)
        elif self._rest:
            data = self._rest + data
        view = memoryview(data)
        self._rest = b""
        end = len(data)
        while end - at >= FRAME_BYTES:
            high, low, kind, flags, stream = FRAME.unpack_from(data, at)
            size = high << 8 | low
            stream &= MAX_STREAM
            start = at + FRAME_BYTES
            if kind == DATA:
                if not self.settings_received:
                    raise ProtocolError("the first frame is not SETTINGS")
                if self._block is not None:
                    raise ProtocolError("a header block is interrupted")
                if size > MAX_DATA_BYTES:
                    raise ProtocolError("a frame is too large", ErrorCode.FRAME_SIZE_ERROR)
                if stream == 0:
                    raise ProtocolError("DATA on stream 0")
                padding = extra = 0
                if flags & PADDED:
                    if end - start < 1:
                        break
                    padding = data[start] + 1
                    if padding > size:
                        raise ProtocolError("the padding is longer than the DATA frame")
                    start, size, padding, extra = start + 1, size - 1, padding - 1, 1
                last = bool(flags & END_STREAM)
                at = self._take(view, start, stream, size, padding, last, extra)
                continue
            self._check(kind, flags, stream, size)
            at = start + size
            if at > end:
                at = start - FRAME_BYTES
                break
            if kind == HEADERS:
                self._headers(stream, flags, data[start:at])
            elif kind == CONTINUATION:
                self._continue(stream, flags, data[start:at])
            else:
                self.progress += 1
                self.on_frame(kind, flags, stream, data[start:at])
        if at < end:
            self._rest = data[at:]

    def _check(self, kind: int, flags: int, stream: int, size: int) -> None:
        if not self.settings_received and (kind != SETTINGS or flags & 1):
            raise ProtocolError("the first frame is not SETTINGS")
        if (self._block is not None) != (kind == CONTINUATION):
            raise ProtocolError("a header block is interrupted, or continued before it begins")
        if size > MAX_HEADER_BYTES and kind in (HEADERS, CONTINUATION):
            raise ProtocolError("the header block is too large", ErrorCode.ENHANCE_YOUR_CALM)
        if size > MAX_HEADER_BYTES or size != _SIZES.get(kind, size):
            raise ProtocolError("the size of a frame is wrong", ErrorCode.FRAME_SIZE_ERROR)
        if kind == SETTINGS and (size % SETTING.size or (flags & 1 and size)):
            raise ProtocolError("the size of a frame is wrong", ErrorCode.FRAME_SIZE_ERROR)
        if (kind in _CONNECTION_FRAMES and stream) or (kind in _STREAM_FRAMES and not stream):
            raise ProtocolError("a frame is on the wrong stream")

    def _take(
        self,
        view: memoryview,
        at: int,
        stream: int,
        size: int,
        padding: int,
        last: bool,
        extra: int = 0,
    ) -> int:
        """Hand on the part of a DATA frame's ``size`` bytes that has come; return its end.

        ``extra``: the byte that states the length of the padding, for flow control.
        """
        part = view[at : at + size]
        got = len(part)
        missing = size - got
        self._data = (stream, missing, padding, last) if missing else None
        if padding and missing < padding:
            part = part[: max(0, got - padding + missing)]
        self.progress += 1
        self.on_data(stream, part, got + extra, last and not missing)
        return at + got

    def _headers(self, stream: int, flags: int, payload: bytes) -> None:
        self.progress += 1
        if flags & (PADDED | PRIORITISED):
            start, end = 0, len(payload)
            if flags & PADDED:
                start, end = 1, end - (payload[0] if payload else 0)
            if flags & PRIORITISED:
                start += _PRIORITY_BYTES
            if start > end:
                raise ProtocolError("the padding is longer than the HEADERS frame")
            payload = payload[start:end]
        if flags & END_HEADERS:
            self.on_headers(stream, flags, payload)
        else:
            self._block = (stream, flags, bytearray(payload))

    def _continue(self, stream: int, flags: int, payload: bytes) -> None:
        assert self._block is not None
        first, first_flags, parts = self._block
        if first != stream:
            raise ProtocolError("a header block is continued on another stream")
        parts += payload
        if len(parts) > MAX_HEADER_BYTES:
            raise ProtocolError("the header block is too large", ErrorCode.ENHANCE_YOUR_CALM)
        if flags & END_HEADERS:
            self._block = None
            self.progress += 1
            self.on_headers(stream, first_flags | END_HEADERS, bytes(parts))
        else:
            self.on_frame(CONTINUATION, flags, stream, b"")

    # -- frames -----------------------------------------------------------------------------------

    def on_headers(self, stream: int, flags: int, block: bytes) -> None:
        """Handle a whole header block."""
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
        """Handle a piece of a DATA frame that took ``size`` bytes of the window, with padding."""
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
            if self._is_idle(stream):
                raise ProtocolError("DATA on an idle stream")
            if found is not None or stream not in self._abandoned:
                raise ProtocolError("DATA on a closed stream", ErrorCode.STREAM_CLOSED)
            if last:
                del self._abandoned[stream]
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

    def _is_idle(self, stream: int) -> bool:
        return stream > self.last_stream or not stream & 1

    def on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Handle another frame, of a valid size; of a CONTINUATION only the fact."""
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
        """End the connection after a violation of the protocol."""
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
