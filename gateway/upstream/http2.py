"""One HTTP/2 connection as a client of unary calls: RFC 9113, on the event loop, no thread between.

Only what a call needs that is one request body and one reply body: no push, no priorities. Header
blocks go out as literals, made once for each method; those that come are ``hpack``'s to decode.
Replies are bounded by their size, not by flow control: the window is as large as it can be.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from typing import cast

from modelport.gateway.wire import http2
from modelport.gateway.wire.body import Body
from modelport.gateway.wire.header_blocks import HeaderBlocks, text
from modelport.gateway.wire.http2 import (
    ACK,
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    MAX_STREAM,
    MAX_WINDOW_BYTES,
    PING,
    PREFACE,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW_BYTES,
    WINDOW_UPDATE,
    WORD,
)
from modelport.gateway.wire.http2_reader import MAX_DATA_BYTES, Broken, Reader, widened
from modelport.gateway.wire.http2_settings import PeerSettings
from modelport.gateway.wire.protobuf import joined
from modelport.gateway.wire.raw import Buffer

Headers = dict[str, str]

#: What is received until the connection's window is opened again.
REFILL_BYTES = 2**30
#: Answers to pings and settings that the peer leaves unread.
UNREAD_LIMIT_BYTES = 2**24
#: How long a peer may leave a ping, or data, unacknowledged.
PONG_SECONDS = 5.0
#: A peer that sends nothing for so long, with calls in flight, is pinged.
SILENCE_SECONDS = 1.0
_GREETING = b"".join(
    (
        PREFACE,
        http2.settings(
            (http2.ENABLE_PUSH, 0),
            (http2.INITIAL_WINDOW_SIZE, MAX_WINDOW_BYTES),
            (http2.MAX_FRAME_SIZE, MAX_DATA_BYTES),
        ),
        http2.window_update(0, MAX_WINDOW_BYTES - WINDOW_BYTES),
    )
)


class Reset(Exception):
    """The peer gave this stream up; ``code`` is HTTP/2's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the stream was reset with code {code}")
        self.code = code


class TooLarge(Exception):
    """The reply exceeds its limit."""


class Reply:
    """What has come of one stream. ``trailers`` are the headers where nothing came between."""

    __slots__ = ("body", "done", "headers", "limit", "to_send", "trailers", "window")

    def __init__(self, done: asyncio.Future[None], limit: int, window: int) -> None:
        self.done = done
        self.limit = limit
        #: What may still be sent, and what waits for that.
        self.window = window
        self.to_send: deque[memoryview] = deque()
        self.headers: Headers | None = None
        self.trailers: Headers | None = None
        self.body = Body()


class Connection(Reader, asyncio.BufferedProtocol):
    """Used on its event loop only. ``usable`` until the peer says that it ends, or it breaks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        #: The peer's settings have come: it speaks HTTP/2.
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.greeted.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.usable = True
        self._replies: dict[int, Reply] = {}
        self._next = 1
        self._blocks = HeaderBlocks(text)
        self._received = 0
        self._window = WINDOW_BYTES
        self._peer = PeerSettings()
        #: When it was pinged, until it answers; 0: it was not.
        self._pinged_at = 0.0
        #: Something came, or a first call began, since the last look; and it was pinged since.
        self._heard = False
        self._pinged_in_silence = False

    @property
    def established(self) -> bool:
        greeted = self.greeted
        return greeted.done() and not greeted.cancelled() and greeted.exception() is None

    @property
    def busy(self) -> bool:
        """Whether calls are in flight."""
        return bool(self._replies)

    # -- calls ------------------------------------------------------------------------------------

    @property
    def free(self) -> bool:
        """Whether it takes another call."""
        return self.usable and len(self._replies) < self._peer.max_streams

    async def call(self, block: bytes, body: Sequence[Buffer], limit: int) -> Reply:
        """Send ``block`` (a header block) and ``body``; its parts are sent as they are.

        Raises:
            Broken, Reset, TooLarge: there will be no reply. Cancelled, it resets the stream.
        """
        if not self.usable:  # it ended between being chosen and being used
            raise Broken("the connection has ended")
        if not self._replies:
            self._heard = True
        stream = self._next
        self._next += 2
        if self._next > MAX_STREAM:
            self.usable = False
        reply = Reply(self._loop.create_future(), limit, self._peer.initial_window)
        self._replies[stream] = reply
        head = http2.frame(HEADERS, END_HEADERS, stream, block)
        reply.to_send.extend(memoryview(part) for part in body if len(part))
        try:
            self._send(stream, reply, head)
            await reply.done
            if reply.to_send:  # answered before it was asked all of it
                self._write(http2.reset(stream, CANCEL))
            return reply
        except (asyncio.CancelledError, TooLarge):
            self._write(http2.reset(stream, CANCEL))
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
            limit = min(self._peer.max_frame, self._window, reply.window)
            if limit <= 0:
                break
            parts, size = http2.take(waiting, limit)
            self._window -= size
            reply.window -= size
            flags = 0 if waiting else END_STREAM
            out += (FRAME.pack(size >> 8, size & 255, DATA, flags, stream), *parts)
        if out and self._transport is not None:
            self._transport.writelines(joined(out))

    def _send_waiting(self) -> None:
        for stream, reply in list(self._replies.items()):
            if reply.to_send:
                self._send(stream, reply)

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def _answer(self, frame: bytes) -> None:
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() > UNREAD_LIMIT_BYTES:
            raise Broken("it does not read what it asks for")
        self._write(frame)

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._pinged_at = self._loop.time()
        self._write(http2.frame(PING, 0, 0, bytes(8)))

    def check_pong(self) -> None:
        """Drop the connection if the last ping has no answer yet."""
        if self._pinged_at:
            self.broken(Broken("it does not answer pings"))

    def check_silence(self) -> None:
        """Ping a peer that leaves calls unanswered and sends nothing else.

        Once in each silence: gRPC servers end a connection on which pings come often.
        """
        if self._pinged_at and self._loop.time() - self._pinged_at >= PONG_SECONDS:
            self.check_pong()
        if self._heard or not self._replies:
            self._heard = self._pinged_in_silence = False
        elif not self._pinged_in_silence:
            self._pinged_in_silence = True
            self.ping()

    def retire(self) -> None:
        """Take no more calls, and close when those in flight have ended."""
        self.usable = False
        if not self._replies:
            self.close()

    def abort(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.BufferedProtocol ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # for what is sent and never acknowledged
            option = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PONG_SECONDS * 1000))
            transport.get_extra_info("socket").setsockopt(*option)
        self._transport.write(_GREETING)

    def connection_lost(self, exc: Exception | None) -> None:
        self.broken(Broken("connection lost"))

    def data_received(self, data: bytes) -> None:
        try:
            self.feed(data)
        except Broken as error:
            self.broken(error)

    def broken(self, error: Broken) -> None:
        error.foreign = not self.greeted.done()
        self.usable = False
        if self._transport is not None:
            self._transport.abort()
        if not self.greeted.done():
            self.greeted.set_exception(error)
        for reply in self._replies.values():
            _fail(reply, error)

    # -- what comes -----------------------------------------------------------------------------

    def on_data(self, stream: int, part: memoryview, size: int, last: bool) -> None:
        self._heard = True
        self._received += size
        if self._received >= REFILL_BYTES:
            self._write(http2.window_update(0, self._received))
            self._received = 0
        reply = self._replies.get(stream)
        if reply is not None:
            if reply.body.size + len(part) > reply.limit:
                _fail(reply, TooLarge())
            else:
                reply.body.add(part)
            if last:
                self._end(reply)

    def place(self, stream: int) -> memoryview | None:
        reply = self._replies.get(stream)
        return None if reply is None or reply.done.done() else reply.body.place()

    def on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == PING and flags & ACK:
            self._pinged_at = 0.0
            return
        self._heard = True
        if kind == RST_STREAM:
            reply = self._replies.get(stream)
            (code,) = WORD.unpack(payload)
            # NO_ERROR after the whole reply: the peer wants no more of the request (8.1).
            if reply is not None and not reply.done.done():
                _fail(reply, Reset(code))
        elif kind == SETTINGS:
            if not flags & ACK:
                self._settings(payload)
        elif kind == PING:
            self._answer(http2.frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            self.usable = False
            if len(payload) < 2 * WORD.size:
                raise Broken("a GOAWAY that is cut off", FRAME_SIZE_ERROR)
            (last,) = WORD.unpack_from(payload)
            for number, reply in self._replies.items():
                if number > last & MAX_STREAM:
                    _fail(reply, Reset(REFUSED_STREAM))
            if not self._replies:
                self.close()
        elif kind == WINDOW_UPDATE:
            (size,) = WORD.unpack(payload)
            if stream == 0:
                self._window = widened(self._window, size)
                self._send_waiting()
            elif stream in self._replies:
                reply = self._replies[stream]
                reply.window = widened(reply.window, size)
                self._send(stream, reply)
        elif kind == PUSH_PROMISE:
            raise Broken("it pushes, which was forbidden")

    def on_headers(self, stream: int, flags: int, block: bytes) -> None:
        self._heard = True
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
        change = self._peer.update(payload)
        for reply in self._replies.values() if change else ():
            reply.window = widened(reply.window, change)
        self.settled = True
        self._answer(http2.frame(SETTINGS, ACK, 0))
        if not self.greeted.done():
            self.greeted.set_result(None)
        self._send_waiting()


def _fail(reply: Reply, error: Exception) -> None:
    if not reply.done.done():
        reply.done.set_exception(error)
