"""One HTTP/2 connection as a client of unary calls: RFC 9113, on the event loop, no thread between.

Only what a call needs that is one request body and one reply body: no push, no priorities. Header
blocks go out as literals, made once for each method; those that come are ``hpack``'s to decode.
Replies are bounded by their size, not by flow control: the window is as large as it can be.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import cast

import hpack

from gateway.upstream.header_blocks import HEADER_LIMIT_BYTES, HeaderBlocks, Headers

Buffer = bytes | memoryview

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME = struct.Struct(">HBBBI")  # length as 16 and 8 bits, type, flags, stream
_FRAME_BYTES = 9
_WORD = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE = 0, 1, 3, 4, 5
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 2, 3, 4, 5
REFUSED_STREAM, CANCEL = 7, 8
WINDOW = 65_535
MAX_WINDOW = 2**31 - 1
#: What is received until the connection's window is opened again.
REFILL_BYTES = 2**30
FRAME_BYTES = 16_384
MAX_DATA_BYTES = 2**22
#: Answers to pings and settings that the peer leaves unread.
UNREAD_LIMIT_BYTES = 2**24
#: How long a peer may leave a ping, or data, unacknowledged.
PONG_SECONDS = 20.0
#: Smaller pieces of a reply are gathered, so that many cost no more memory than their bytes.
PIECE_BYTES = 512
LAST_STREAM = 2**31 - 1
_GREETING = PREFACE + b"".join(
    (
        _FRAME.pack(0, 3 * _SETTING.size, SETTINGS, 0, 0),
        _SETTING.pack(ENABLE_PUSH, 0) + _SETTING.pack(INITIAL_WINDOW_SIZE, MAX_WINDOW),
        _SETTING.pack(MAX_FRAME_SIZE, MAX_DATA_BYTES),
        _FRAME.pack(0, 4, WINDOW_UPDATE, 0, 0) + _WORD.pack(MAX_WINDOW - WINDOW),
    )
)


class Broken(Exception):
    """The connection ended, or the peer broke the protocol. ``foreign``: it never spoke it."""

    def __init__(self, reason: str, foreign: bool = False) -> None:
        super().__init__(reason)
        self.foreign = foreign


class Reset(Exception):
    """The peer gave this stream up; ``code`` is HTTP/2's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the stream was reset with code {code}")
        self.code = code


class TooLarge(Exception):
    """The reply exceeds its limit."""


class Reply:
    """What has come of one stream. ``trailers`` are the headers where nothing came between."""

    __slots__ = ("done", "headers", "limit", "parts", "size", "to_send", "trailers", "window")

    def __init__(self, done: asyncio.Future[None], limit: int, window: int) -> None:
        self.done = done
        self.limit = limit
        #: What may still be sent, and what waits for that.
        self.window = window
        self.to_send: deque[memoryview] = deque()
        self.headers: Headers | None = None
        self.trailers: Headers | None = None
        self.parts: list[memoryview | bytearray] = []
        self.size = 0

    def add(self, part: memoryview) -> None:
        if len(part) >= PIECE_BYTES:
            self.parts.append(part)
        elif self.parts and isinstance(last := self.parts[-1], bytearray):
            last += part
        else:
            self.parts.append(bytearray(part))


class Connection(asyncio.Protocol):
    """Used on its event loop only. ``usable`` until the peer says that it ends, or it breaks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        #: The peer's settings have come: it speaks HTTP/2.
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.greeted.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.usable = True
        self._replies: dict[int, Reply] = {}
        self._next = 1
        self._rest = b""
        # A DATA frame that is not here whole: its stream, what is missing, padding and its end.
        self._data: tuple[int, int, int, bool] | None = None
        # A header block that goes on in CONTINUATION frames: its stream, its flags, its parts.
        self._block: tuple[int, int, bytearray] | None = None
        self._blocks = HeaderBlocks()
        self._received = 0
        self._window = self._stream_window = WINDOW
        self._max_frame = FRAME_BYTES
        self._max_streams = MAX_WINDOW
        self._pinged = False

    # -- calls ------------------------------------------------------------------------------------

    @property
    def free(self) -> bool:
        """Whether it takes another call."""
        return self.usable and len(self._replies) < self._max_streams

    async def call(self, block: bytes, body: Sequence[Buffer], limit: int) -> Reply:
        """Send ``block`` (a header block) and ``body``; its parts are sent as they are.

        Raises:
            Broken, Reset, TooLarge: there will be no reply. Cancelled, it resets the stream.
        """
        if not self.usable:  # it ended between being chosen and being used
            raise Broken("the connection has ended")
        stream = self._next
        self._next += 2
        if self._next > LAST_STREAM:
            self.usable = False
        reply = Reply(self._loop.create_future(), limit, self._stream_window)
        self._replies[stream] = reply
        head = _FRAME.pack(len(block) >> 8, len(block) & 255, HEADERS, END_HEADERS, stream) + block
        reply.to_send.extend(memoryview(part) for part in body if len(part))
        try:
            self._send(stream, reply, head)
            await reply.done
            if reply.to_send:  # answered before it was asked all of it
                self._control(RST_STREAM, 0, stream, _WORD.pack(CANCEL))
            return reply
        except (asyncio.CancelledError, TooLarge):
            self._control(RST_STREAM, 0, stream, _WORD.pack(CANCEL))
            raise
        finally:
            self._replies.pop(stream, None)
            if not self.usable and not self._replies:
                self.close()

    def _send(self, stream: int, reply: Reply, head: bytes = b"") -> None:
        """As much of the body as the windows allow, in one write."""
        out: list[Buffer] = [head] if head else []
        waiting = reply.to_send
        while waiting:
            part = waiting[0]
            size = min(len(part), self._max_frame, self._window, reply.window)
            if size <= 0:
                break
            if size == len(part):
                waiting.popleft()
            else:
                waiting[0] = part[size:]
            self._window -= size
            reply.window -= size
            flags = 0 if waiting else END_STREAM
            out += (_FRAME.pack(size >> 8, size & 255, DATA, flags, stream), part[:size])
        if out and self._transport is not None:
            if len(out) <= 3 and sum(map(len, out)) < FRAME_BYTES:
                self._transport.write(b"".join(out))
            else:
                self._transport.writelines(out)

    def _send_waiting(self) -> None:
        for stream, reply in list(self._replies.items()):
            if reply.to_send:
                self._send(stream, reply)

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > UNREAD_LIMIT_BYTES and kind in (PING, SETTINGS):
            self._break(Broken("it does not read what it asks for"))
            return
        transport.write(_FRAME.pack(0, len(payload), kind, flags, stream) + payload)

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._pinged = True
        self._control(PING, 0, 0, bytes(8))

    def check_pong(self) -> None:
        """Drop the connection if the last ping has no answer yet."""
        if self._pinged:
            self._break(Broken("it does not answer pings"))

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # for what is sent and never acknowledged
            option = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PONG_SECONDS * 1000))
            transport.get_extra_info("socket").setsockopt(*option)
        self._transport.write(_GREETING)

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(Broken("connection lost", not self.greeted.done()))

    def data_received(self, data: bytes) -> None:
        try:
            self._parse(data)
        except (Broken, hpack.HPACKError, ValueError, IndexError, struct.error) as error:
            foreign = not self.greeted.done()
            self._break(error if isinstance(error, Broken) else Broken(str(error), foreign))

    def _break(self, error: Broken) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()
        if not self.greeted.done():
            self.greeted.set_exception(error)
        for reply in self._replies.values():
            _fail(reply, error)

    # -- what comes -----------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        view = memoryview(data)
        at = 0
        if self._data is not None:
            at = self._take(view, 0, *self._data)
        elif self._rest:
            data = self._rest + data
            view = memoryview(data)
        self._rest = b""
        end = len(data)
        while end - at >= _FRAME_BYTES:
            high, low, kind, flags, stream = _FRAME.unpack_from(data, at)
            size = high << 8 | low
            limit = MAX_DATA_BYTES if kind == DATA else HEADER_LIMIT_BYTES
            if size > limit or not (self.greeted.done() or kind == SETTINGS):
                raise Broken("it does not speak HTTP/2", not self.greeted.done())
            if self._block is not None and kind != CONTINUATION:
                raise Broken("a header block is interrupted")
            start = at + _FRAME_BYTES
            if kind == DATA:
                padding = 0
                if flags & PADDED:
                    if end - start < 1:
                        break
                    padding, start, size = data[start], start + 1, size - 1
                    self._received += 1
                    if padding > size:
                        raise Broken("more padding than data")
                at = self._take(view, start, stream, size, padding, bool(flags & END_STREAM))
                continue
            if end - start < size:
                break
            at = start + size
            self._frame(kind, flags, stream & LAST_STREAM, data[start:at])
        if at < end:
            self._rest = data[at:]

    def _take(
        self, view: memoryview, at: int, stream: int, size: int, padding: int, last: bool
    ) -> int:
        """As much of a DATA frame's ``size`` bytes as is here; returns where it ends."""
        part = view[at : at + size]
        missing = size - len(part)
        self._data = (stream, missing, padding, last) if missing else None
        self._received += len(part)
        if self._received >= REFILL_BYTES:
            self._control(WINDOW_UPDATE, 0, 0, _WORD.pack(self._received))
            self._received = 0
        reply = self._replies.get(stream)
        if reply is not None:
            if padding and missing < padding:
                part = part[: max(0, len(part) - padding + missing)]
            reply.size += len(part)
            if reply.size > reply.limit:
                _fail(reply, TooLarge())
            else:
                reply.add(part)
            if last and not missing:
                self._end(reply)
        return at + size - missing

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == HEADERS:
            start, end = 0, len(payload)
            if flags & PADDED:
                start, end = 1, end - payload[0]
            if flags & PRIORITY:
                start += 5
            self._headers(stream, flags, payload[start:end])
        elif kind == CONTINUATION:
            if self._block is None or self._block[0] != stream:
                raise Broken("a header block goes on that has not begun")
            _, first_flags, parts = self._block
            self._block = None
            self._headers(stream, first_flags | flags & END_HEADERS, bytes(parts) + payload)
        elif kind == RST_STREAM:
            reply = self._replies.get(stream)
            (code,) = _WORD.unpack(payload)
            # NO_ERROR after the whole reply: the peer wants no more of the request (8.1).
            if reply is not None and not reply.done.done():
                _fail(reply, Reset(code))
        elif kind == SETTINGS:
            if not flags & ACK:
                self._settings(payload)
        elif kind == PING:
            if flags & ACK:
                self._pinged = False
            else:
                self._control(PING, ACK, 0, payload)
        elif kind == GOAWAY:
            self.usable = False
            (last,) = _WORD.unpack_from(payload)
            for number, reply in self._replies.items():
                if number > last & LAST_STREAM:
                    _fail(reply, Reset(REFUSED_STREAM))
            if not self._replies:
                self.close()
        elif kind == WINDOW_UPDATE:
            (size,) = _WORD.unpack(payload)
            if stream == 0:
                self._window += size
                self._send_waiting()
            elif stream in self._replies:
                reply = self._replies[stream]
                reply.window += size
                self._send(stream, reply)
        elif kind == PUSH_PROMISE:
            raise Broken("it pushes, which was forbidden")

    def _headers(self, stream: int, flags: int, block: bytes) -> None:
        if not flags & END_HEADERS:
            if len(block) > HEADER_LIMIT_BYTES:
                raise Broken("its headers are too large")
            self._block = (stream, flags, bytearray(block))
            return
        headers = self._blocks.decode(block)
        reply = self._replies.get(stream)
        if reply is None or reply.done.done():
            return
        if reply.headers is None and headers.get(":status", "")[:1] == "1":
            return  # informational
        if reply.headers is None:
            reply.headers = headers
        reply.trailers = headers
        if flags & END_STREAM:
            self._end(reply)

    def _end(self, reply: Reply) -> None:
        if not reply.done.done():
            reply.done.set_result(None)

    def _settings(self, payload: bytes) -> None:
        for number, value in _SETTING.iter_unpack(payload):
            if number == MAX_CONCURRENT_STREAMS:
                self._max_streams = value
            elif number == MAX_FRAME_SIZE:
                self._max_frame = value
            elif number == INITIAL_WINDOW_SIZE:
                for reply in self._replies.values():
                    reply.window += value - self._stream_window
                self._stream_window = value
        self._control(SETTINGS, ACK, 0, b"")
        if not self.greeted.done():
            self.greeted.set_result(None)
        self._send_waiting()


def _fail(reply: Reply, error: Exception) -> None:
    if not reply.done.done():
        reply.done.set_exception(error)
