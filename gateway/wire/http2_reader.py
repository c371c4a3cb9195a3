"""Cuts HTTP/2 frames out of the bytes of a connection, for either end of it."""

from __future__ import annotations

import threading

from modelport.gateway.wire.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_BYTES,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    MAX_HEADER_BYTES,
    MAX_STREAM,
    MAX_WINDOW_BYTES,
    PADDED,
    PING,
    PRIORITISED,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
)

#: The largest DATA frame that is taken.
MAX_DATA_BYTES = 2**22
_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_OF_THE_CONNECTION = frozenset((SETTINGS, PING, GOAWAY))
_OF_A_STREAM = frozenset((HEADERS, PRIORITY, RST_STREAM, PUSH_PROMISE))
_PRIORITY_BYTES = 5
#: What is read from a socket at once, and of what is still to come read straight into its place.
_READ_BYTES = 2**16
_PLACED_BYTES = 2**14


class _Scratch(threading.local):
    """For one read at a time: those of an event loop, which is a thread's."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_READ_BYTES))


_scratch = _Scratch()


class Broken(Exception):
    """The connection ended, or the peer broke the protocol; ``code`` is HTTP/2's word for how.

    ``foreign``: it never spoke it.
    """

    def __init__(self, reason: str, code: int = PROTOCOL_ERROR, foreign: bool = False) -> None:
        super().__init__(reason)
        self.code, self.foreign = code, foreign


class Reader:
    """``feed`` it; it calls ``on_data``, ``on_headers`` and ``on_frame``, which raise ``Broken``.

    DATA is handed on as it comes, in pieces; of other frames only whole ones. With
    ``asyncio.BufferedProtocol`` beside it, long DATA is read from the socket into its place.
    """

    def __init__(self) -> None:
        self._scratch = _scratch.view
        self._place: memoryview | None = None
        self._rest = b""
        # A DATA frame that is not here whole: its stream, what is missing, padding and its end.
        self._data: tuple[int, int, int, bool] | None = None
        # A header block that goes on in CONTINUATION frames: its stream, its flags, its parts.
        self._block: tuple[int, int, bytearray] | None = None
        #: The peer's settings have come.
        self.settled = False
        #: Grows with all that comes, save what is not yet a whole frame or header block.
        self.progress = 0

    def on_data(self, stream: int, part: memoryview, size: int, last: bool) -> None:
        """A piece of a DATA frame that took ``size`` bytes of the window, padding included."""
        raise NotImplementedError

    def on_headers(self, stream: int, flags: int, block: bytes) -> None:
        raise NotImplementedError

    def on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Any other; its size is right."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        """``data`` came."""
        raise NotImplementedError

    def broken(self, error: Broken) -> None:
        """What came is not what HTTP/2 allows here."""
        raise NotImplementedError

    def place(self, stream: int) -> memoryview | None:
        """Where more of a stream's data goes; None: nowhere yet."""
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
        except Broken as error:
            self.broken(error)

    # -- frames -----------------------------------------------------------------------------------

    @property
    def midway(self) -> bool:
        """Whether a frame or a header block has begun to come and is not complete."""
        return bool(self._rest) or self._block is not None

    def feed(self, data: bytes) -> None:
        """Take ``data``.

        Raises:
            Broken: it is not what HTTP/2 allows here.
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
                padding = 0
                if flags & PADDED:
                    if end - start < 1:
                        break
                    padding = data[start] + 1
                    if padding > size:
                        raise Broken("more padding than data")
                    self.on_data(stream, view[:0], 1, False)
                    start, size, padding = start + 1, size - 1, padding - 1
                at = self._take(view, start, stream, size, padding, bool(flags & END_STREAM))
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
        if not self.settled:
            raise Broken("it does not speak HTTP/2")
        if self._block is not None:
            raise Broken("a header block is interrupted")
        if size > MAX_DATA_BYTES:
            raise Broken("a frame is too large", FRAME_SIZE_ERROR)
        if stream == 0:
            raise Broken("data is on no stream")

    def _check(self, kind: int, flags: int, stream: int, size: int) -> None:
        if not self.settled and (kind != SETTINGS or flags & 1):
            raise Broken("it does not speak HTTP/2")
        if (self._block is not None) != (kind == CONTINUATION):
            raise Broken("a header block is interrupted or goes on that has not begun")
        if size > MAX_HEADER_BYTES and kind in (HEADERS, CONTINUATION):
            raise Broken("its headers are too large", ENHANCE_YOUR_CALM)
        if size > MAX_HEADER_BYTES or size != _SIZES.get(kind, size):
            raise Broken("a frame is not of its size", FRAME_SIZE_ERROR)
        if kind == SETTINGS and (size % SETTING.size or (flags & 1 and size)):
            raise Broken("a frame is not of its size", FRAME_SIZE_ERROR)
        if (kind in _OF_THE_CONNECTION and stream) or (kind in _OF_A_STREAM and not stream):
            raise Broken("a frame is on the wrong stream")

    def _take(
        self, view: memoryview, at: int, stream: int, size: int, padding: int, last: bool
    ) -> int:
        """As much of a DATA frame's ``size`` bytes as is here; returns where it ends."""
        part = view[at : at + size]
        got = len(part)
        missing = size - got
        self._data = (stream, missing, padding, last) if missing else None
        if padding and missing < padding:
            part = part[: max(0, got - padding + missing)]
        self.progress += 1
        self.on_data(stream, part, got, last and not missing)
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
                raise Broken("more padding than headers")
            payload = payload[start:end]
        if flags & END_HEADERS:
            self.on_headers(stream, flags, payload)
        else:
            self._block = (stream, flags, bytearray(payload))

    def _continue(self, stream: int, flags: int, payload: bytes) -> None:
        assert self._block is not None
        first, first_flags, parts = self._block
        if first != stream:
            raise Broken("a header block goes on that has not begun")
        parts += payload
        if len(parts) > MAX_HEADER_BYTES:
            raise Broken("its headers are too large", ENHANCE_YOUR_CALM)
        if flags & END_HEADERS:
            self._block = None
            self.progress += 1
            self.on_headers(stream, first_flags | END_HEADERS, bytes(parts))
        else:
            self.on_frame(CONTINUATION, flags, stream, b"")


def widened(window: int, size: int) -> int:
    """A window with so many bytes more.

    Raises:
        Broken: it would be larger than windows may be.
    """
    window += size
    if window > MAX_WINDOW_BYTES:
        raise Broken("a window is larger than windows may be", FLOW_CONTROL_ERROR)
    return window
