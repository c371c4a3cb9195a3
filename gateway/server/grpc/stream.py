"""One call on an HTTP/2 connection: what has come of it, and what is to be sent."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from modelport.gateway.errors import MemoryExhausted
from modelport.gateway.runtime.request_memory import CURRENT, ConnectionMemory, Lease
from modelport.gateway.runtime.timer_wheel import Timer
from modelport.gateway.server.grpc import framing
from modelport.gateway.server.grpc.framing import Frames, MalformedFrame
from modelport.gateway.server.grpc.head import Head
from modelport.gateway.server.grpc.limits import MESSAGE_BITS, AbuseLimits
from modelport.gateway.server.grpc.output import STREAM_WINDOW_BYTES, Output, block_of
from modelport.gateway.server.grpc.service import CLOSING, LATE, OK, STALLED, Ending, Gone
from modelport.gateway.server.grpc.status import Status
from modelport.gateway.types import NO_DEADLINE, Deadline
from modelport.gateway.wire import hops
from modelport.gateway.wire.body import Body
from modelport.gateway.wire.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    HEADERS,
    MAX_WINDOW_BYTES,
    frame,
    headers,
    literal,
    take,
    window_update,
)
from modelport.gateway.wire.http2_settings import PeerSettings
from modelport.gateway.wire.raw import Buffer

#: A request that comes whole and small is not counted as held memory.
UNCOUNTED_BYTES = 4096
#: After the client's own deadline: whoever observes it has answered by then.
GRACE_SECONDS = 0.05
#: Up to this, what goes out is copied into one piece; and so much is handed on at once.
COPIED_BYTES = 64 * 1024
GATHERED_BYTES = 1024 * 1024
#: An HTTP status is answered in words too.
_NO_GRPC = b'{"error":"this port serves gRPC: POST, content-type application/grpc, HTTP/2"}'
#: ":status: 200" of the static table, and a literal: whoever reads it needs to keep nothing.
_HEAD = b"\x88" + literal(b"content-type", b"application/grpc")
_OK = literal(b"grpc-status", b"0")
# A reply in one piece: its head, the frame and the prefix of its message; behind it the trailers.
_reply = struct.Struct(f">HBBBI{len(_HEAD)}sHBBBIBI")
_trailers = struct.Struct(f">HBBBI{len(_OK)}s")


class Connection(Protocol):
    """What a call needs of the connection it is on."""

    transport: asyncio.Transport
    output: Output
    loop: asyncio.AbstractEventLoop
    limits: AbuseLimits
    #: The largest message of a request, in bytes.
    max_message: int
    memory: ConnectionMemory
    peer: PeerSettings
    #: What may be sent, of all calls.
    window: int
    #: Calls that wait for that, or for the transport.
    blocked: dict[int, Stream]
    #: The transport has enough to write.
    writing_paused: bool

    @property
    def single(self) -> bool:
        """Whether there is one call on it."""

    def finished(self, stream: Stream) -> None:
        """All is sent."""


class Stream:
    """``Call`` for the gRPC service. ``number`` is HTTP/2's."""

    __slots__ = (
        "_body", "_connection", "_expired", "_frames", "_gathered", "_method", "_room", "_running",
        "_tail", "_timer", "_waiter", "begun_at", "complete", "credit", "deadline", "ended", "gone",
        "head", "lease", "number", "received", "sent_at", "stalled", "started", "task", "to_send",
        "touched_at", "window",
    )  # fmt: skip

    def __init__(self, connection: Connection, number: int, head: Head, window: int) -> None:
        self.number, self.head = number, head
        self._connection = connection
        self._method = head.target.method
        self.deadline: Deadline = NO_DEADLINE
        self.task: asyncio.Task[None] | None = None
        self._running = False  # the task has taken its first step
        self.begun_at = self.touched_at = connection.loop.time()
        #: The memory that the request holds, if it is worth counting.
        self.lease: Lease | None = None
        # Of the request: what has come, what the client may still send, whether that is all.
        self.received = 0
        self.credit = STREAM_WINDOW_BYTES
        self.complete = False
        self._body: bytes | memoryview = b""
        self._gathered: Body | None = None
        self._frames: Frames | None = None
        self._waiter: asyncio.Future[None] | None = None
        # Of the answer: what the client takes, what waits for that, and what comes last.
        self.window = window
        self.to_send: deque[memoryview] = deque()
        #: When the client last made room for some of that.
        self.sent_at = self.begun_at
        self._tail = b""
        self._room: asyncio.Future[None] | None = None
        #: Whether its head is out, and whether nothing can be added.
        self.started = self.ended = False
        #: Nobody waits for it; the body stood still; its time is over.
        self.gone = self.stalled = self._expired = False
        self._timer: Timer | None = None

    def begin(self) -> None:
        """Start the clock of the client's own deadline."""
        seconds = self.head.target.timeout_seconds
        if seconds is not None:
            self.deadline = Deadline.after(seconds)
            self._timer = Timer(self._connection.loop, seconds + GRACE_SECONDS, self._expire)

    def _expire(self) -> None:
        self._expired = True
        self.cancel()

    def stall(self) -> None:
        self.stalled = True
        self.cancel()

    def cancel(self) -> None:
        """Cut the handler off; it says why. If it has not begun, that is said here."""
        if self.task is not None:
            self.task.cancel()
        if not self._running:
            self.end(self.cut_off())

    def leave(self) -> None:
        """The client has gone, or the stream is reset: nobody is answered."""
        self.gone = True
        self.to_send.clear()
        self.close()
        if self.task is not None:
            self.task.cancel()

    def close(self) -> None:
        """All that will be is sent."""
        if self.lease is not None:
            self.lease.release()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the request ----------------------------------------------------------------------------

    def add(self, part: memoryview, last: bool) -> None:
        """More of the body; ``last``: and that is all."""
        self.received += len(part)
        self.complete = last
        if self.ended or self.head.http_status is not None:
            return  # nobody reads it
        if not last or len(part) > UNCOUNTED_BYTES:
            try:
                self._counted().reserve(len(part))
            except MemoryExhausted as error:
                self.end(Ending(Status.RESOURCE_EXHAUSTED, str(error)))
                return
        if self._frames is not None:
            self._frames.buffer += part
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        elif last and self._gathered is None:
            self._body = bytes(part)
        else:
            self._gather(part)
        if not last and self.credit < STREAM_WINDOW_BYTES // 2:
            self._grant()

    def _counted(self) -> Lease:
        if self.lease is None:
            self.lease = self._connection.memory.lease()
        return self.lease

    def _gather(self, part: memoryview) -> None:
        if self._gathered is None:
            self._gathered = Body()
        body = self._gathered
        body.add(part)
        if self._method is None or self._method.request_streams or not body.expected:
            return
        length = body.expected - framing.PREFIX_BYTES
        limit = self._connection.max_message
        if length > limit:
            self.end(Ending(Status.RESOURCE_EXHAUSTED, str(framing.too_large(length, limit))))
        elif body.size > body.expected:
            self.end(Ending(Status.INTERNAL, str(framing.not_one_message())))

    def place(self) -> memoryview | None:
        """Where the rest of a message goes that is under way; None: nowhere yet."""
        if self.ended or self._gathered is None or self.head.http_status is not None:
            return None
        return self._gathered.place()

    def _grant(self) -> None:
        """Let the client send on: a message whole, and as much as is read ahead."""
        held, missing = 0, 0
        if self._frames is not None:
            held, missing = len(self._frames), self._frames.missing()
        elif self._gathered is not None:
            missing = self._gathered.expected - self._gathered.size
        room = max(STREAM_WINDOW_BYTES - held, missing)
        more = min(room, MAX_WINDOW_BYTES) - self.credit
        if more > 0 and not self.complete and not self.ended:
            self.credit += more
            self._connection.output.write(window_update(self.number, more))

    def come(self) -> bytes | memoryview:
        """Of the body, before anyone has taken it."""
        return self._body if self._gathered is None else self._gathered.view()

    def waits_for_client(self) -> bool:
        """Whether a message is still to come that the handler cannot begin, or go on, without."""
        if self.complete or self.ended or self._method is None:
            return False
        if not self._method.request_streams:
            return True
        return self._frames is not None and len(self._frames) > 0 and self._frames.missing() > 0

    # -- the service's call -----------------------------------------------------------------------

    def running(self) -> None:
        self._running = True
        target = self.head.target
        if self.lease is not None or target.encoding != framing.IDENTITY:
            CURRENT.set(self._counted())
        if target.via:
            hops.CURRENT.set(target.via)

    def body(self) -> bytes | memoryview:
        body = self.come()
        self._body, self._gathered = b"", None
        return body

    def messages(self, frames: Frames) -> Stream:
        frames.buffer += self.come()
        self._body, self._gathered, self._frames = b"", None, frames
        return self

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> bytes:
        frames = self._frames
        assert frames is not None
        while (content := frames.take()) is None:
            if self.complete:
                if len(frames):
                    raise MalformedFrame("the stream ends within a message")
                raise StopAsyncIteration
            self._waiter = self._connection.loop.create_future()
            await self._waiter
        if self.lease is not None:
            self.lease.give_back(len(content) + framing.PREFIX_BYTES)
        self._connection.limits.advanced()
        if self.credit < STREAM_WINDOW_BYTES // 2:
            self._grant()
        return content

    def only(self, content: Sequence[Buffer]) -> None:
        if self.gone or self.ended:
            return
        connection, number = self._connection, self.number
        size = sum(map(len, content))
        body = size + framing.PREFIX_BYTES
        room = connection.window if connection.window < self.window else self.window
        whole = body <= room and body <= connection.peer.max_frame
        if not whole or connection.writing_paused:
            self._push(content, size)
            self.end(OK)
            return
        self.ended = True
        connection.window -= body
        head = _reply.pack(
            0, len(_HEAD), HEADERS, END_HEADERS, number, _HEAD,
            body >> 8, body & 255, DATA, 0, number, 0, size,
        )  # fmt: skip
        flags = END_HEADERS | END_STREAM
        tail = _trailers.pack(0, len(_OK), HEADERS, flags, number, _OK)
        if body <= COPIED_BYTES:
            connection.output.reply(b"".join((head, *content, tail)), connection.single)
        else:
            connection.output.write_parts((head, *content, tail))
        connection.finished(self)

    async def message(self, content: bytes) -> None:
        if self.gone or self.ended:
            raise Gone
        self._connection.limits.advanced()
        self._push((content,), len(content))
        self.flush()
        while self.to_send or self._connection.writing_paused:
            if self._connection.writing_paused:
                self._connection.blocked[self.number] = self
            self._room = self._connection.loop.create_future()
            await self._room
            if self.gone or self.ended:
                raise Gone

    def end(self, ending: Ending) -> None:
        if self.gone or self.ended:
            return
        self.ended = True
        fields = block_of(ending)
        block = fields if self.started else _HEAD + fields
        self._tail = headers(self.number, block, True)
        self._gathered = None
        self.flush()

    def refuse(self, http_status: int) -> None:
        """What is no gRPC at all."""
        self.ended = True
        fields = ((b":status", b"%d" % http_status), (b"content-type", b"application/json"))
        head = headers(self.number, b"".join(literal(*field) for field in fields))
        self._connection.output.write(head)
        self._queue(_NO_GRPC)
        self._tail = frame(DATA, END_STREAM, self.number)
        self.flush()

    # -- what is sent -----------------------------------------------------------------------------

    def _push(self, content: Sequence[Buffer], size: int) -> None:
        """A message behind those that wait, and its head before the first."""
        if not self.started:
            self.started = True
            self._connection.output.write(headers(self.number, _HEAD))
        parts = (framing.prefix(size), *content)
        if size <= COPIED_BYTES:
            parts = (b"".join(parts),)
        self._queue(*parts)

    def _queue(self, *parts: Buffer) -> None:
        if not self.to_send:
            self.sent_at = self._connection.loop.time()
        self.to_send.extend(memoryview(part) for part in parts if len(part))

    def flush(self) -> None:
        """Send what the windows and the transport allow."""
        connection, waiting = self._connection, self.to_send
        while waiting and not connection.writing_paused:
            out: list[Buffer] = []
            gathered = 0
            while waiting and gathered < GATHERED_BYTES:
                limit = min(connection.peer.max_frame, connection.window, self.window)
                if limit <= 0:
                    break
                parts, size = take(waiting, limit)
                connection.window -= size
                self.window -= size
                gathered += size
                out += (FRAME.pack(size >> 8, size & 255, DATA, 0, self.number), *parts)
            if not out:
                break
            connection.limits.advanced(gathered >> MESSAGE_BITS)
            self.sent_at = connection.loop.time()
            if gathered <= COPIED_BYTES:
                connection.output.write(b"".join(out))
            else:
                connection.output.write_parts(out)
        if waiting:
            if self.window > 0:
                connection.blocked[self.number] = self
            else:  # its own window is what it waits for
                connection.blocked.pop(self.number, None)
            return
        if connection.blocked:
            connection.blocked.pop(self.number, None)
        if self.ended:
            connection.output.write(self._tail)
            connection.finished(self)
        self.wake()

    def wake(self) -> None:
        """The handler may go on to its next message."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def cut_off(self) -> Ending:
        if self._expired:
            return LATE
        return STALLED if self.stalled else CLOSING
