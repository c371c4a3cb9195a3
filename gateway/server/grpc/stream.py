"""One gRPC call on an HTTP/2 connection."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from modelport.gateway.access.context import AccessContext
from modelport.gateway.errors import MemoryExhausted
from modelport.gateway.runtime.request_memory import CURRENT, Lease
from modelport.gateway.runtime.timer_wheel import Timer
from modelport.gateway.server import observed_requests
from modelport.gateway.server.grpc import framing
from modelport.gateway.server.grpc.framing import Frames, MalformedFrame
from modelport.gateway.server.grpc.service import (
    CLOSING,
    GONE,
    LATE,
    OK,
    STALLED,
    CallTarget,
    ClientGone,
    Ending,
)
from modelport.gateway.server.grpc.status import StatusCode
from modelport.gateway.server.http2.connection import ServerStream
from modelport.gateway.telemetry import request_record
from modelport.gateway.telemetry.request_record import RequestRecord
from modelport.gateway.types import NO_DEADLINE, Deadline
from modelport.gateway.wire import via_header
from modelport.gateway.wire.grpc_body import Body
from modelport.gateway.wire.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    ErrorCode,
    headers,
    literal,
    window_update,
)
from modelport.gateway.wire.http2.settings import STREAM_WINDOW_BYTES
from modelport.gateway.wire.http2.writer import COPIED_BYTES
from modelport.gateway.wire.raw_tensors import Buffer

if TYPE_CHECKING:
    from modelport.gateway.server.grpc.connection import GrpcConnection

#: A request that comes whole and small is not counted as held memory.
UNCOUNTED_BYTES = 4096
#: After the client's own deadline: a handler that observes it has answered by then.
GRACE_SECONDS = 0.05
#: Messages of a stream that are taken one after the other, before the event loop does other work.
TURN_MESSAGES = 64
#: The header blocks of endings that are kept: in an overload most are alike.
KEPT_ENDINGS = 64
#: The body of a response with an HTTP status.
_NO_GRPC = b'{"error":"this port serves gRPC: POST, content-type application/grpc, HTTP/2"}'
#: ":status: 200" of the static table, and a literal: neither changes the client's table.
_HEAD = b"\x88" + literal(b"content-type", b"application/grpc")
_OK = literal(b"grpc-status", b"0")
# A reply in one piece: its head, the frame and the prefix of its message; behind it the trailers.
_reply = struct.Struct(f">HBBBI{len(_HEAD)}sHBBBIBI")
_trailers = struct.Struct(f">HBBBI{len(_OK)}s")


def _block(ending: Ending) -> bytes:
    """The header block of ``ending``."""
    return _made_block(ending) if ending.headers else _kept_block(ending)


def _made_block(ending: Ending) -> bytes:
    return b"".join(literal(*field) for field in ending.fields())


_kept_block = lru_cache(KEPT_ENDINGS)(_made_block)


class GrpcStream(ServerStream):
    """One call. Messages to a client that has disconnected are dropped."""

    __slots__ = (
        "_body", "_cancelled", "_expired", "_frames", "_gathered", "_http_status", "_method",
        "_running", "_taken", "_timer", "_waiter", "access", "deadline", "lease", "record",
        "stalled", "target", "task",
    )  # fmt: skip
    connection: GrpcConnection

    def __init__(
        self,
        connection: GrpcConnection,
        number: int,
        target: CallTarget,
        content_length: int | None,
        http_status: int | None,
    ) -> None:
        super().__init__(connection, number, content_length)
        self.target = target
        #: The caller, with ``--access``.
        self.access: AccessContext | None = None
        #: None while nobody observes calls.
        self.record: RequestRecord | None = None
        self._method = target.method
        self._http_status = http_status
        self.deadline: Deadline = NO_DEADLINE
        self.task: asyncio.Task[None] | None = None
        self._running = False  # the task has taken its first step
        self._cancelled = False  # that step is to cancel it
        #: The memory that the request holds, if it is worth counting.
        self.lease: Lease | None = None
        # The body: whole, or as far as it has come, or as messages.
        self._body: bytes | memoryview = b""
        self._gathered: Body | None = None
        self._frames: Frames | None = None
        self._taken = 0
        self._waiter: asyncio.Future[None] | None = None
        #: Whether the body stood still, and whether the call's time is over.
        self.stalled = self._expired = False
        self._timer: Timer | None = None

    def begin(self) -> None:
        """Start the clock of the client's own deadline."""
        seconds = self.target.timeout_seconds
        if seconds is not None:
            self.deadline = Deadline.after(seconds)
            self._timer = Timer(self.connection.loop, seconds + GRACE_SECONDS, self._expire)

    def _expire(self) -> None:
        self._expired = True
        self.cancel()

    def stall(self) -> None:
        self.stalled = True
        self.cancel()

    def cancel(self) -> None:
        """Cancel the handler, which then answers. If it was not called, answer here."""
        if self.task is None:
            self.end(self.cut_off())
        else:
            self._cancel()

    def _cancel(self) -> None:
        self._cancelled = True
        if self._running and self.task is not None:
            self.task.cancel()

    def on_reset(self) -> None:
        if self.record is not None:
            observed_requests.end_call(self.record, GONE)
        self._release()
        self._cancel()

    def on_end(self) -> None:
        if self._http_status is not None:
            self._refuse(self._http_status)
        elif self.task is None and not self.local_closed:
            self.connection.start(self)

    def on_sent(self) -> None:
        self._release()
        self.connection.complete(self, ErrorCode.NO_ERROR)

    def _release(self) -> None:
        self.connection.state.requests.discard(self)
        if self.lease is not None:
            self.lease.release()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the request ----------------------------------------------------------------------------

    def on_data(self, part: memoryview, last: bool) -> None:
        if self.local_closed or self._http_status is not None:
            return  # nobody reads it
        if not last and len(part):
            self.touched_at = self.connection.loop.time()
        if not last or len(part) > UNCOUNTED_BYTES:
            try:
                self._counted().reserve(len(part))
            except MemoryExhausted as error:
                self.end(Ending(StatusCode.RESOURCE_EXHAUSTED, str(error)))
                return
        if self._frames is not None:
            self._frames.buffer += part
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        elif last and self._gathered is None:
            self._body = bytes(part)
        else:
            self._gather(part)
        if not last and self.receive_window < STREAM_WINDOW_BYTES // 2:
            self._grant()

    def _counted(self) -> Lease:
        if self.lease is None:
            self.lease = Lease(self.connection.memory)
        return self.lease

    def _gather(self, part: memoryview) -> None:
        if self._gathered is None:
            self._gathered = Body()
        body = self._gathered
        body.add(part)
        if self._method is None or self._method.request_streams or not body.expected:
            return
        length = body.expected - framing.PREFIX_BYTES
        limit = self.connection.service.max_message
        if length > limit:
            self.end(Ending(StatusCode.RESOURCE_EXHAUSTED, str(framing.too_large(length, limit))))
        elif body.size > body.expected:
            self.end(Ending(StatusCode.INTERNAL, str(framing.not_one_message())))

    def place(self) -> memoryview | None:
        if self.local_closed or self._gathered is None or self._http_status is not None:
            return None
        return self._gathered.place()

    def _grant(self) -> None:
        """Let the client send the rest of a message, and as much as is read ahead."""
        held, missing = 0, 0
        if self._frames is not None:
            held, missing = len(self._frames), self._frames.missing()
        elif self._gathered is not None:
            missing = self._gathered.expected - self._gathered.size
        if not self.remote_closed and not self.local_closed:
            increment = self.replenish(max(STREAM_WINDOW_BYTES - held, missing))
            if increment:
                self.connection.writer.write(window_update(self.number, increment))

    def request_lease(self) -> Lease | None:
        return self.lease

    def unread(self) -> bytes | memoryview:
        """The part of the body that has come and was not taken yet."""
        return self._body if self._gathered is None else self._gathered.view()

    def waits_for_client(self) -> bool:
        if self.remote_closed or self.local_closed or self._method is None:
            return False
        if not self._method.request_streams:
            return True
        return self._frames is not None and len(self._frames) > 0 and self._frames.missing() > 0

    # -- the service's call -----------------------------------------------------------------------

    def wait(self) -> None:
        """The task that waits for the reply takes its first step: it can be cancelled from now on.

        Before, the answer had begun, and nothing would have ended what it holds.
        """
        self._running = True
        if self._cancelled and self.task is not None:
            self.task.cancel()

    def enter(self) -> None:
        """Have the context of the handler know the request."""
        target = self.target
        CURRENT.set(self._counted())
        if self.record is not None:
            request_record.CURRENT.set(self.record)
        if target.via:
            via_header.CURRENT.set(target.via)

    def body(self) -> bytes | memoryview:
        """All of the request's body; the call is not served before it has come."""
        body = self.unread()
        self._body, self._gathered = b"", None
        if self.record is not None:
            observed_requests.received(self.record, body)
        return body

    def messages(self, frames: Frames) -> GrpcStream:
        """The request's messages, as ``frames`` cuts them; read a little ahead.

        So the end of the request, and of the client, is seen at once.
        """
        frames.buffer += self.unread()
        self._body, self._gathered, self._frames = b"", None, frames
        return self

    def __aiter__(self) -> GrpcStream:
        return self

    async def __anext__(self) -> bytes:
        frames = self._frames
        assert frames is not None
        if self._taken == TURN_MESSAGES:
            self._taken = 0
            await asyncio.sleep(0)
        while (content := frames.take()) is None:
            if self.remote_closed:
                if len(frames):
                    raise MalformedFrame("the stream ends within a message")
                raise StopAsyncIteration
            self._waiter = self.connection.loop.create_future()
            await self._waiter
            self._taken = 0
        self._taken += 1
        if self.record is not None:
            observed_requests.received_message(self.record, content)
        if self.lease is not None:
            self.lease.give_back(len(content) + framing.PREFIX_BYTES)
        self.connection.limits.advanced()
        if self.receive_window < STREAM_WINDOW_BYTES // 2:
            self._grant()
        return content

    def only(self, content: Sequence[Buffer], ending: Ending = OK) -> None:
        """Send the one reply, in parts, and the end."""
        if self.reset_code is not None or self.local_closed:
            return
        connection, number = self.connection, self.number
        size = sum(map(len, content))
        if self.record is not None:
            observed_requests.sent_message(self.record, content)
            ending = observed_requests.end_call(self.record, ending)
        body = size + framing.PREFIX_BYTES
        room = min(connection.send_window, self.send_window)
        whole = body <= room and body <= connection.peer.max_frame
        if not whole or connection.writing_paused or ending is not OK:
            self._queue_message(content, size)
            trailers = headers(number, _block(ending), True)
            self.close(trailers, b"" if self.begun else headers(number, _HEAD))
            return
        self.local_closed = True
        if body > COPIED_BYTES:
            self.count(body)  # the transport takes all of it, and the socket perhaps not
        connection.send_window -= body
        head = _reply.pack(
            0, len(_HEAD), HEADERS, END_HEADERS, number, _HEAD,
            body >> 8, body & 255, DATA, 0, number, 0, size,
        )  # fmt: skip
        flags = END_HEADERS | END_STREAM
        tail = _trailers.pack(0, len(_OK), HEADERS, flags, number, _OK)
        if body <= COPIED_BYTES:
            last = len(connection.streams) == 1
            connection.writer.reply(b"".join((head, *content, tail)), last)
        else:
            connection.writer.write_parts((head, *content, tail), body)
            self.count(0)
        self.on_sent()

    async def message(self, content: bytes) -> None:
        """Send one of several replies; return when there is room for another.

        Raises:
            ClientGone: nobody takes it.
        """
        if self.reset_code is not None or self.local_closed:
            raise ClientGone
        self.connection.limits.advanced()
        if self.record is not None:
            observed_requests.sent_message(self.record, (content,))
        self._queue_message((content,), len(content))
        self.flush(b"" if self.begun else headers(self.number, _HEAD))
        await self.drained()
        if self.reset_code is not None or self.local_closed:
            raise ClientGone

    def end(self, ending: Ending) -> None:
        if self.reset_code is not None or self.local_closed:
            return
        self._gathered = None
        if self.record is not None:
            ending = observed_requests.end_call(self.record, ending)
        self.refuse_briefly(partial(self._end, ending))

    def _end(self, ending: Ending) -> None:
        block = _block(ending) if self.begun else _HEAD + _block(ending)
        self.close(headers(self.number, block, True))

    def _refuse(self, http_status: int) -> None:
        """Answer a request that is not gRPC."""
        if self.record is not None:
            self.record.end(http_status, is_failure=True)
        fields = ((b":status", b"%d" % http_status), (b"content-type", b"application/json"))
        self.queue(_NO_GRPC)
        head = headers(self.number, b"".join(literal(*field) for field in fields))
        self.refuse_briefly(partial(self.close, head=head))

    def _queue_message(self, content: Sequence[Buffer], size: int) -> None:
        parts = (framing.prefix(size), *content)
        self.queue(*((b"".join(parts),) if size <= COPIED_BYTES else parts))

    def cut_off(self) -> Ending:
        """The ending for a handler that was cancelled."""
        if self._expired:
            return LATE
        return STALLED if self.stalled else CLOSING
