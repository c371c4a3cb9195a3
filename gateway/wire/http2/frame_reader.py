"""A parser of HTTP/2 frames, for either end of a connection."""

from __future__ import annotations

from modelport.gateway.runtime.thread_buffer import ThreadBuffer
from modelport.gateway.wire.http2.frames import (
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
    PADDED,
    PING,
    PRIORITISED,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    ProtocolError,
)
from modelport.gateway.wire.http2.header_blocks import MAX_HEADER_BYTES

_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_CONNECTION_FRAMES = frozenset((SETTINGS, PING, GOAWAY))
_STREAM_FRAMES = frozenset((HEADERS, PRIORITY, RST_STREAM, PUSH_PROMISE))
_PRIORITY_BYTES = 5
#: The bytes of one read, and the smallest part of a body that is read straight into its place.
_READ_BYTES = 2**16
_PLACED_BYTES = 2**14
_scratch = ThreadBuffer(_READ_BYTES)


class FrameReader:
    """``feed`` it; it calls ``on_data``, ``on_headers`` and ``on_frame``.

    DATA is handed on in pieces, as it comes; other frames are handed on whole. With
    ``asyncio.BufferedProtocol`` beside it, long DATA is read from the socket into its place.
    """

    def __init__(self) -> None:
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

    def on_data(self, stream: int, part: memoryview, size: int, last: bool) -> None:
        """A piece of a DATA frame that took ``size`` bytes of the window, padding included."""
        raise NotImplementedError

    def on_headers(self, stream: int, flags: int, block: bytes) -> None:
        """A whole header block."""
        raise NotImplementedError

    def on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """A frame of another type, of a valid size; of a CONTINUATION only the fact."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        """Process a read: ``feed``, and ``terminate`` after an error."""
        raise NotImplementedError

    def terminate(self, error: ProtocolError) -> None:
        """End the connection after a violation of the protocol."""
        raise NotImplementedError

    def place(self, stream: int) -> memoryview | None:
        """The buffer for a stream's next data, if there is one."""
        return None

    # -- asyncio.BufferedProtocol -----------------------------------------------------------------

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

    # -- frames -----------------------------------------------------------------------------------

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
                self._check_data(stream, size)
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

    def _check_data(self, stream: int, size: int) -> None:
        if not self.settings_received:
            raise ProtocolError("the first frame is not SETTINGS")
        if self._block is not None:
            raise ProtocolError("a header block is interrupted")
        if size > MAX_DATA_BYTES:
            raise ProtocolError("a frame is too large", ErrorCode.FRAME_SIZE_ERROR)
        if stream == 0:
            raise ProtocolError("DATA on stream 0")

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
