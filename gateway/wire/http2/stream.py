"""A stream of an HTTP/2 connection: its state, and the data that waits for its windows."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from modelport.gateway.wire.http2.abuse_limits import MESSAGE_BITS
from modelport.gateway.wire.http2.flow_control import FlowController
from modelport.gateway.wire.http2.frames import DATA, END_STREAM, FRAME, frame
from modelport.gateway.wire.http2.writer import COPIED_BYTES
from modelport.gateway.wire.raw_tensors import Buffer

if TYPE_CHECKING:
    from modelport.gateway.wire.http2.connection import Http2Connection

#: The most bytes of one stream in one write.
GATHERED_BYTES = 1024 * 1024


class Http2Stream(FlowController):
    """One stream: its state, its windows, and the data that waits for them.

    ``remote_closed`` and ``local_closed`` are the two half-closed states; a stream that is closed
    has left the connection's ``streams``.
    """

    #: Whether this is a server's stream. Its headers wait for a transport that is full, as data
    #: does; a client's do not, because it must not reset a stream that it has not opened yet.
    answers = False

    __slots__ = (
        "_head", "_room", "_tail", "connection", "content_length", "local_closed", "number",
        "opened_at", "received", "remote_closed", "reset_code", "sent_at", "started", "to_send",
        "touched_at", "unsent",
    )  # fmt: skip

    def __init__(
        self,
        connection: Http2Connection[Any, Any],
        number: int,
        receive_window: int,
        content_length: int | None = None,
    ) -> None:
        self.send_window = connection.peer.initial_window
        self.receive_window = receive_window
        self.connection = connection
        self.number = number
        #: The bytes of data that were received, and those announced.
        self.received = 0
        self.content_length = content_length
        self.remote_closed = self.local_closed = False
        #: Whether this side has sent headers that answer the peer's, or the peer has.
        self.started = False
        #: The error code if the stream was closed early, by either side or with the connection.
        self.reset_code: int | None = None
        #: The data that waits, and its size; the frames before and behind it.
        self.to_send: deque[memoryview] = deque()
        self.unsent = 0
        self._head = self._tail = b""
        self._room: asyncio.Future[None] | None = None
        #: When it was opened, when the peer last sent data, and since when frames wait; 0: none do.
        self.opened_at = self.touched_at = connection.loop.time()
        self.sent_at = 0.0

    # -- events -----------------------------------------------------------------------------------

    def on_data(self, part: memoryview, last: bool) -> None:
        """Receive a piece of the body."""
        raise NotImplementedError

    def on_end(self) -> None:
        """The peer has closed its side in good order."""
        raise NotImplementedError

    def on_reset(self) -> None:
        """The stream has been closed early, see ``reset_code``."""
        raise NotImplementedError

    def place(self) -> memoryview | None:
        """The buffer for the data that comes next, if there is one."""
        return None

    # -- sending ----------------------------------------------------------------------------------

    def queue(self, *parts: Buffer) -> None:
        """Queue data for ``flush``."""
        for part in parts:
            size = len(part)
            if size:
                self.to_send.append(memoryview(part))
                self.unsent += size

    def discard(self) -> None:
        """Drop the frames that wait."""
        self.to_send.clear()
        self.unsent = 0
        self._head = self._tail = b""

    def count(self, size: int) -> None:
        """Count ``size`` bytes that the peer does not take at once; 0: all is sent."""

    def close(self, tail: bytes = b"", head: bytes = b"") -> None:
        """End this side: send ``head``, the queued data, and the frames of ``tail``."""
        self.local_closed = True
        if not tail and not self.to_send:
            tail = frame(DATA, END_STREAM, self.number)
        self._tail = tail
        self.flush(head)

    def flush(self, head: bytes = b"") -> None:
        """Send ``head``, and the queued data that the windows and the transport allow."""
        connection, waiting = self.connection, self.to_send
        if head:
            self._head += head
        held = connection.writing_paused and self.answers
        counted = (
            self.sent_at
            or held
            or self.unsent > COPIED_BYTES
            or self.unsent > min(connection.send_window, self.send_window)
        )
        if counted:
            self.count(self.unsent + len(self._head) + len(self._tail))
        out: list[Buffer] = []
        if self._head and not held:
            out, self._head = [self._head], b""
            self.started = self.started or self.answers
        while waiting and not connection.writing_paused:
            gathered = 0
            while waiting and gathered < GATHERED_BYTES:
                limit = min(connection.peer.max_frame, connection.send_window, self.send_window)
                if limit <= 0:
                    break
                parts, size = take(waiting, limit)
                connection.send_window -= size
                self.send_window -= size
                gathered += size
                flags = END_STREAM if self.local_closed and not (waiting or self._tail) else 0
                out += (FRAME.pack(size >> 8, size & 255, DATA, flags, self.number), *parts)
            if not gathered:
                break
            self.unsent -= gathered
            connection.sent_bytes += gathered
            if connection.limits.idle_frames:
                connection.limits.advanced(gathered >> MESSAGE_BITS)
            self.sent_at = 0.0
            if gathered > COPIED_BYTES:
                connection.writer.write_parts(out, gathered)
            elif self.local_closed and not waiting and len(connection.streams) > 1:
                connection.writer.reply(b"".join(out), False)
            else:
                connection.writer.write(b"".join(out))
            out = []
        if out:
            connection.writer.write(b"".join(out))
        held = connection.writing_paused and self.answers
        if waiting or (held and (self._head or self._tail)):
            self.sent_at = self.sent_at or connection.loop.time()
            self.count(self.unsent + len(self._head) + len(self._tail))
            if self.send_window > 0 or held:
                connection.blocked[self.number] = self
            else:  # it waits for its own window
                connection.blocked.pop(self.number, None)
            return
        self.sent_at = 0.0
        if connection.blocked:
            connection.blocked.pop(self.number, None)
        if counted:
            self.count(0)
        if self.local_closed:
            if self._tail:
                connection.writer.write(self._tail)
            self.on_sent()
        if self._room is not None:
            self.wake()

    @property
    def begun(self) -> bool:
        """Whether this side has sent headers, or queued them."""
        return self.started or bool(self._head)

    @property
    def needs_window(self) -> bool:
        """Whether the connection's window holds it up: no header comes first."""
        return bool(self.to_send) and not self._head

    def on_sent(self) -> None:
        """This side is closed, and all is sent."""

    async def drained(self) -> None:
        """Wait until nothing is queued, and the transport takes more; or until the stream ends."""
        connection = self.connection
        while self.to_send or self._head or connection.writing_paused:
            if self.reset_code is not None or self.local_closed:
                return
            if connection.writing_paused:
                connection.blocked[self.number] = self
            self._room = connection.loop.create_future()
            await self._room

    def wake(self) -> None:
        """Resume ``drained``."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


def take(waiting: deque[memoryview], limit: int) -> tuple[list[memoryview], int]:
    """Remove up to ``limit`` bytes from the front of ``waiting``; return them and their number."""
    taken, size = [], 0
    while waiting and size < limit:
        part = waiting[0]
        if len(part) <= limit - size:
            waiting.popleft()
        else:
            waiting[0] = part[limit - size :]
            part = part[: limit - size]
        taken.append(part)
        size += len(part)
    return taken, size
