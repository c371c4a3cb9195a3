"""HTTP/2 on one connection, as gRPC's server: RFC 9113 on the event loop, no thread between.

- A call's handler starts when its request is complete, or at once where requests are streams.
- What a client may cost is bounded: ``modelport.gateway.server.grpc.limits``.
- A client that resets a call, or goes, cancels its handler.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

from modelport.gateway.runtime.request_memory import PROCESS
from modelport.gateway.server.grpc import head, limits
from modelport.gateway.server.grpc.head import Head
from modelport.gateway.server.grpc.limits import AbuseLimits
from modelport.gateway.server.grpc.output import GREETING, NO_HTTP1, Output
from modelport.gateway.server.grpc.server_state import Shared
from modelport.gateway.server.grpc.service import BUSY, CROWDED
from modelport.gateway.server.grpc.stream import Stream
from modelport.gateway.server.listening import Room
from modelport.gateway.wire import http2
from modelport.gateway.wire.header_blocks import HeaderBlocks
from modelport.gateway.wire.http2 import ACK, END_STREAM, MAX_WINDOW_BYTES, PREFACE, WORD
from modelport.gateway.wire.http2_reader import Broken, Reader, widened
from modelport.gateway.wire.http2_settings import PeerSettings


class GrpcConnection(Reader, asyncio.BufferedProtocol):
    transport: asyncio.Transport
    output: Output

    def __init__(self, shared: Shared, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        self._shared = shared
        self._service = service = shared.service
        self.max_message = service.max_message
        self._blocks: HeaderBlocks[Head] = HeaderBlocks(lambda fields: head.read(service, fields))
        self._streams: dict[int, Stream] = {}
        self._abandoned: dict[int, None] = {}
        self._last = 0
        # What may be sent on the connection, and what the client has announced of streams.
        self.window = http2.WINDOW_BYTES
        self.peer = PeerSettings()
        self.writing_paused = False
        # Streams that wait for the connection's window, or the transport.
        self.blocked: dict[int, Stream] = {}
        self._unsent = 0  # of the transport, when it was last looked at
        # What the client may send.
        self._credit = MAX_WINDOW_BYTES
        self.limits = AbuseLimits()
        self.memory = PROCESS.connection()
        # The preface, as far as it has come.
        self._preface: bytes | None = b""
        # Since when nothing has come to its end, or there is no call; and what had come by then.
        self._midway_since = self._idle_since = loop.time()
        self._progress = self._seen = 0
        # There is room for questions about health alone; it was told of the end; no further call is
        # taken; nothing more is read.
        self._crowded = self._warned = self._leaving = self._closing = False

    # -- asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self.output = Output(self.transport, self.loop)
        limits.notice_dead_peers(transport.get_extra_info("socket"))
        number = transport.get_extra_info("socket").fileno()
        room = self._shared.limit.room(len(self._shared.connections), number)
        self._crowded = room is Room.HEALTH
        if room is Room.NONE:
            said = http2.go_away(0, http2.ENHANCE_YOUR_CALM, b"too many connections")
            self.transport.write(http2.settings() + said)
            self.transport.close()  # at once: to linger takes a file
            self._closing = True
            return
        self._shared.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._preface is not None:
            data = self._greet(self._preface + data)
        try:
            self.feed(data)
        except Broken as error:
            self.broken(error)

    def place(self, stream: int) -> memoryview | None:
        call = self._streams.get(stream)
        return None if call is None or self._closing else call.place()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._shared.connections.discard(self)
        self._drop_all()

    def pause_writing(self) -> None:
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.writing_paused = False
        self._flush_blocked()

    def _greet(self, data: bytes) -> bytes:
        """What follows the preface in ``data``."""
        size = len(PREFACE)
        if data[:size] == PREFACE:
            self._preface = None
            self.output.write(GREETING)
            return data[size:]
        if PREFACE.startswith(data):
            self._preface = data
        else:
            foreign = http2.settings() + http2.go_away(0, http2.PROTOCOL_ERROR)
            self.output.write(NO_HTTP1 if b" HTTP/1." in data else foreign)
            self._linger()
        return b""

    # -- frames ---------------------------------------------------------------------------------

    def on_headers(self, stream: int, flags: int, block: bytes) -> None:
        read = self._blocks.decode(block)
        ends = bool(flags & END_STREAM)
        if stream <= self._last:
            self._trailers(stream, read, ends)
            return
        if not stream & 1:
            raise Broken("a client's streams have odd numbers")
        self._last = stream
        if read.malformed or len(self._streams) >= limits.MAX_STREAMS:
            self.limits.idle_frame()
            self._abandon(stream, ends)
            code = http2.PROTOCOL_ERROR if read.malformed else http2.REFUSED_STREAM
            self.output.write(http2.reset(stream, code))
            return
        if self._leaving:  # after the GOAWAY: it knows that this is not looked at
            self._abandon(stream, ends)
            return
        call = Stream(self, stream, read, self.peer.initial_window)
        call.complete = ends
        self._streams[stream] = call
        self._shared.calls.add(call)
        target = read.target
        if read.http_status is not None:
            if ends:
                self._completed(call)
        elif target.method is None:
            call.end(target.refusal)
        elif self._crowded and not target.method.health:
            call.end(CROWDED)
            self.leave()
        else:
            call.begin()
            if ends:
                self._completed(call)
            elif target.method.request_streams:
                self._start(call)

    def _trailers(self, stream: int, read: Head, ends: bool) -> None:
        call = self._streams.get(stream)
        if call is None and stream in self._abandoned:
            if ends:
                del self._abandoned[stream]
        elif call is None or call.complete:
            raise Broken("headers on a stream that has ended", http2.STREAM_CLOSED)
        elif not ends or not read.trailers:
            self._fail(call, http2.PROTOCOL_ERROR)
        else:
            call.add(memoryview(b""), True)
            self._completed(call)

    def on_data(self, stream: int, part: memoryview, size: int, last: bool) -> None:
        self._credit -= size
        if self._credit < 0:
            raise Broken("more data than the connection's window", http2.FLOW_CONTROL_ERROR)
        if self._credit < MAX_WINDOW_BYTES // 2:
            self.output.write(http2.window_update(0, MAX_WINDOW_BYTES - self._credit))
            self._credit = MAX_WINDOW_BYTES
        if not size and not last:
            self.limits.idle_frame()
        call = self._streams.get(stream)
        if call is None or call.complete:
            self._stray_data(stream, call, last)
            return
        call.credit -= size
        if call.credit < 0:
            self._fail(call, http2.FLOW_CONTROL_ERROR)
            return
        call.touched_at = self.loop.time()
        call.add(part, last)
        if last:
            self._completed(call)

    def _stray_data(self, stream: int, call: Stream | None, last: bool) -> None:
        if stream > self._last:
            raise Broken("data on a stream that has not begun")
        if call is not None or stream not in self._abandoned:
            raise Broken("data on a stream that has ended", http2.STREAM_CLOSED)
        if last:
            del self._abandoned[stream]

    def on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.limits.idle_frame()
        if kind == http2.WINDOW_UPDATE:
            self._widen(stream, WORD.unpack(payload)[0] & MAX_WINDOW_BYTES)
        elif kind == http2.RST_STREAM:
            if stream > self._last:
                raise Broken("a reset of a stream that has not begun")
            self._abandoned.pop(stream, None)
            call = self._streams.get(stream)
            if call is not None:
                call.complete = True
                if not call.started:
                    self.limits.reset(self.loop.time() - call.begun_at)
                self._drop(call)
        elif kind == http2.PING:
            if not flags & ACK:
                self._answer(http2.frame(http2.PING, ACK, 0, payload))
        elif kind == http2.SETTINGS:
            if not flags & ACK:
                self._settings(payload)
        elif kind == http2.GOAWAY:
            self.leave()
        elif kind == http2.PUSH_PROMISE:
            raise Broken("a client does not push")

    def _widen(self, stream: int, size: int) -> None:
        if stream == 0:
            if not size:
                raise Broken("a window is opened by nothing")
            self.window = widened(self.window, size)
            self._flush_blocked()
            return
        if stream > self._last:
            raise Broken("a window of a stream that has not begun")
        call = self._streams.get(stream)
        if call is None:
            return
        if not size:
            self._fail(call, http2.PROTOCOL_ERROR)
        elif call.window + size > MAX_WINDOW_BYTES:
            self._fail(call, http2.FLOW_CONTROL_ERROR)
        else:
            call.window += size
            if call.to_send:
                call.flush()

    def _settings(self, payload: bytes) -> None:
        change = self.peer.update(payload)
        self.settled = True
        self._answer(http2.frame(http2.SETTINGS, ACK, 0))
        if change:
            self.limits.idle_frame(len(self._streams))
            for call in list(self._streams.values()):
                call.window = widened(call.window, change)
                if call.to_send and change > 0:
                    call.flush()

    # -- calls ------------------------------------------------------------------------------------

    def _completed(self, call: Stream) -> None:
        expected = call.head.content_length
        if expected is not None and expected != call.received:
            self._fail(call, http2.PROTOCOL_ERROR)
        elif call.head.http_status is not None:
            call.refuse(call.head.http_status)
        elif call.task is None and not call.ended:
            self._start(call)

    def _start(self, call: Stream) -> None:
        service = self._service
        if service.overloaded and call.complete and service.refuses(call.head.target, call.come()):
            call.end(BUSY)
            return
        call.task = self.loop.create_task(self._service.serve(call.head.target, call))

    @property
    def single(self) -> bool:
        return len(self._streams) == 1

    def finished(self, stream: Stream) -> None:
        self.limits.answered()
        stream.close()
        self._forget(stream)
        if not stream.complete:
            self._abandon(stream.number, False)
            self.output.write(http2.reset(stream.number, http2.NO_ERROR))
        if self._leaving and not self._streams:
            self._linger()

    def _fail(self, call: Stream, code: int) -> None:
        """The stream is at fault, the connection is not."""
        self.limits.reset(self.loop.time() - call.begun_at)
        self._abandon(call.number, call.complete)
        self.output.write(http2.reset(call.number, code))
        self._drop(call)

    def _drop(self, call: Stream) -> None:
        self._forget(call)
        call.leave()
        if self._leaving and not self._streams:
            self._linger()

    def _drop_all(self) -> None:
        for call in list(self._streams.values()):
            self._forget(call)
            call.leave()

    def _forget(self, call: Stream) -> None:
        del self._streams[call.number]
        if self.blocked:
            self.blocked.pop(call.number, None)
        self._shared.calls.discard(call)

    def _abandon(self, stream: int, ended: bool) -> None:
        """Whatever more comes of it is no fault: it was on its way."""
        if not ended:
            self._abandoned[stream] = None
            if len(self._abandoned) > limits.MAX_ABANDONED:
                del self._abandoned[next(iter(self._abandoned))]

    def _flush_blocked(self) -> None:
        for call in list(self.blocked.values()):
            if self.writing_paused or self.window <= 0:
                return
            call.flush()

    # -- bounds ---------------------------------------------------------------------------------

    def _answer(self, content: bytes) -> None:
        if self.transport.get_write_buffer_size() > limits.UNREAD_BYTES:
            raise Broken("it does not read what it asks for", http2.ENHANCE_YOUR_CALM)
        self.output.write(content)

    def check(self, now: float) -> None:
        """Once a second: is anything slower than it may be?"""
        if self._closing:
            return
        self.limits.second_passed()
        if (self.settled and not self.midway) or self.progress != self._progress:
            self._midway_since, self._progress = now, self.progress
        elif now - self._midway_since > limits.HEAD_SECONDS:
            self.broken(Broken("it stands still within a frame"))
        if self._streams or self._last != self._seen:
            self._idle_since, self._seen = now, self._last
        elif now - self._idle_since > limits.IDLE_SECONDS:
            self.leave()
        unsent, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        moves = self.writing_paused and self._unsent != unsent
        for call in list(self._streams.values()):
            if moves:
                call.sent_at = now  # the client reads, however slowly
            if now - call.touched_at > limits.BODY_IDLE_SECONDS and call.waits_for_client():
                call.stall()
            elif call.to_send and now - call.sent_at > limits.UNREAD_SECONDS:
                self._fail(call, http2.CANCEL)

    # -- ends -----------------------------------------------------------------------------------

    def warn(self) -> None:
        """Tell the client to take further calls elsewhere; those on their way are taken."""
        if self.settled and not self._warned and not self._closing:
            self._warned = True
            self.output.write(http2.go_away(http2.MAX_STREAM, http2.NO_ERROR))

    def leave(self) -> None:
        """Take no further call, and close when those that there are have ended."""
        if self._leaving or self._closing:
            return
        self._leaving = True
        if self._preface is None:
            self.output.write(http2.go_away(self._last, http2.NO_ERROR))
        if not self._streams:
            self._linger()

    def broken(self, error: Broken) -> None:
        if self._closing:
            return
        if self._preface is None:
            self.output.write(http2.go_away(self._last, error.code, str(error).encode()))
        self._closing = True
        self._drop_all()
        self._linger()

    def _linger(self) -> None:
        """Closing with bytes unread would reset the connection before the end is seen."""
        self._closing = True
        # The segment at hand may hold what is still answered.
        self.loop.call_soon(self._end_sending)
        self.loop.call_later(limits.LINGER_SECONDS, self.transport.abort)

    def _end_sending(self) -> None:
        self.output.send()
        if not self.transport.is_closing():
            with contextlib.suppress(OSError):  # the client has gone meanwhile
                self.transport.write_eof()
