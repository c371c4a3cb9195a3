"""HTTP/1.1 on one connection: httptools parses, limits hold, and an ASGI application answers.

- A request's head is limited in size and in time, and a body may not stand still, so that slow or
  endless senders hold nothing. A body that is not received is not read: TCP holds it back.
- Requests that come before their turn wait for it, unread as far as may be.
- An offer to upgrade is ignored, as RFC 9110 (7.8) allows; ``curl --http2`` makes one with every
  request.
- A client that goes ends its request. One that only ends its own side still gets its answer: a
  ``100 Continue``, which any request may be sent, tells the two apart, since who is gone resets it.
- What is no HTTP is refused in this API's form.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from typing import Any

import httptools

from modelport.gateway.runtime.request_memory import PROCESS
from modelport.gateway.server.expiry import Expiry
from modelport.gateway.server.http1 import error_response, head
from modelport.gateway.server.http1.error_response import Crowded, Looping, Refusal
from modelport.gateway.server.http1.head import MAX_HEAD_BYTES, MAX_HEADERS, LongHead
from modelport.gateway.server.http1.request_cycle import CONTINUE, Exchange
from modelport.gateway.server.http1.server_state import Shared
from modelport.gateway.server.intake import SLICE_BYTES, Intake
from modelport.gateway.server.listening import Room
from modelport.gateway.wire import hops

HEAD_SECONDS = 10.0
#: As long where there is no room but for questions about health.
CROWDED_SECONDS = 1.0
#: A body may take long, but not stand still for longer than this.
BODY_IDLE_SECONDS = 30.0
#: nginx's default. A client that reuses a connection just as it is closed sees an error.
KEEP_ALIVE_SECONDS = 75.0
LINGER_SECONDS = 1.0
#: How soon after a client's end of sending, and how often, it is looked whether it is there.
PROBE_SECONDS = 0.1
#: Of a body, waiting to be received.
HIGH_WATER_BYTES = 256 * 1024
#: Where the parser is.
_BETWEEN, _HEAD, _BODY = range(3)
#: Headers that matter here.
_NOTED = frozenset({b"via", b"content-encoding", b"expect"})


class HttpConnection(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self, shared: Shared, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.clock = shared.clock
        self.writing_paused = False
        self.memory = PROCESS.connection()
        self._shared = shared
        self._scope: dict[str, Any] = {}  # what the requests' have in common
        self._parser = httptools.HttpRequestParser(self)
        # The request being parsed.
        self._place = _BETWEEN
        self._url = self._via = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._encoded = self._expects_continue = self._upgrades = False
        self._begun = 0  # requests in the segment at hand
        self._segment_bytes = 0
        self._head_bytes = 0  # of a head without end, in the segments until now
        self._receiving: Exchange | None = None
        self._overloaded = False  # it is refused: nobody receives it
        # The request being answered, and those whose turn comes.
        self._answering: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        #: What is said once nothing is left to answer; nothing more is parsed.
        self._refusal: Refusal | None = None
        self._closing = self._crowded = self._probed = False
        self._ended = False  # the client has ended its side
        self._intake = Intake(loop, self._take)
        # Whether the slice at hand brought any of a body, and what came since that brought none.
        self._fed = False
        self._stray_bytes = 0
        self._writable: asyncio.Future[None] | None = None
        self._expiry = Expiry(loop, self._expired)

    # -- asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._intake.open(transport)
        number = transport.get_extra_info("socket").fileno()
        room = self._shared.limit.room(len(self._shared.connections), number)
        if room is Room.NONE:
            transport.write(error_response.whole(error_response.CROWDED))
            transport.close()  # at once: to linger takes a file
            self._closing = True
            return
        self._crowded = room is Room.HEALTH
        self._shared.connections.add(self)
        client, server = (transport.get_extra_info(key) for key in ("peername", "sockname"))
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "http",
            "root_path": "",
            "client": client[:2] if client else None,
            "server": server[:2] if server else None,
        }
        self._expiry.after(CROWDED_SECONDS if self._crowded else HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        if len(data) <= SLICE_BYTES:
            self._take(data)
        elif not self._closing:
            self._intake.receive(data)

    def _take(self, data: bytes | memoryview) -> None:
        if self._closing or self._refusal is not None:
            return
        was_in_head, self._begun, self._fed = self._place == _HEAD, 0, False
        self._segment_bytes = len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._reject(error_response.of(error))
            return
        if self._place == _HEAD:
            self._bound_head(was_in_head)
        elif self._place == _BODY:
            self._await_body()

    def eof_received(self) -> bool:
        exchange = self._answering
        if self._closing or exchange is None or not exchange.complete:
            return False  # closes the transport
        self._ended = True
        self.loop.call_later(PROBE_SECONDS, self._probe)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._expiry.close()
        self._shared.connections.discard(self)
        if self._answering is not None:
            self._answering.disconnect()
        for exchange in self._queue:
            exchange.release()
        self._queue.clear()
        self._intake.drop()
        self.resume_writing()

    def pause_writing(self) -> None:
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.writing_paused = False
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    async def writable(self) -> None:
        if self._writable is None:
            self._writable = self.loop.create_future()
        await asyncio.shield(self._writable)

    def resume_reading(self) -> None:
        if self._intake.held and not self._queue:
            self._intake.resume()
            if self._place == _BODY:
                self._expiry.after(BODY_IDLE_SECONDS)

    def _hold(self) -> None:
        self._expiry.stop()  # it is not the client that is slow
        self._intake.hold()

    # -- httptools ------------------------------------------------------------------------------

    def _feed(self, data: bytes | memoryview) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as error:
                if not self._upgrades:
                    return  # CONNECT: what follows is not for us
                # The parser leaves the body to the other protocol: once more, without the offer.
                parser, rest = self._parser, bytes(data[error.args[0] :])
                method, version = parser.get_method(), parser.get_http_version()
                data = head.without_offer(method, version, self._url, self._headers) + rest
                self._parser = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None:
        self._place, self._stray_bytes = _HEAD, 0
        self._begun += 1
        self._url, self._via, self._headers = b"", b"", []
        self._encoded = self._expects_continue = self._upgrades = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._place == _HEAD:  # else a trailer
            name = name.lower()
            if name in _NOTED:
                self._note(name, value)
            self._headers.append((name, value))

    def _note(self, name: bytes, value: bytes) -> None:
        if name == b"via":
            self._via += b", " + value if self._via else value
        elif name == b"content-encoding":
            self._encoded = True
        elif value.lower() == b"100-continue":
            self._expects_continue = True

    def on_headers_complete(self) -> None:
        # Where in its slices the head begins is not always known: near the limit it is measured.
        if self._head_bytes + self._segment_bytes > MAX_HEAD_BYTES - SLICE_BYTES:
            self._head_bytes = 0
            head.bound(self._url, self._headers)
        parser, url = self._parser, self._url
        method, version = parser.get_method().decode(), parser.get_http_version()
        if len(self._headers) > MAX_HEADERS:
            raise LongHead
        self._upgrades = parser.should_upgrade() and method != "CONNECT"
        if self._upgrades:
            return
        if self._crowded and url not in self._shared.health:
            raise Crowded
        if self._via and hops.loops(self._via):
            raise Looping
        shared = self._shared
        if shared.overloaded and self._answering is None and shared.refuses_unread(parser, url):
            self._place, self._overloaded = _BODY, True
            return
        scope = head.scope(self._scope, method, version, url, self._headers)
        keep_alive = version == "1.1" and parser.should_keep_alive() and not self._crowded
        exchange = Exchange(self, scope, keep_alive, self._expects_continue and version == "1.1")
        exchange.via = self._via
        if self._encoded:
            exchange.count()  # it becomes larger than it came
        self._place, self._receiving = _BODY, exchange
        if self._answering is None:
            self._answering = exchange
        else:
            self._queue.append(exchange)
            self._hold()

    def on_body(self, body: bytes) -> None:
        self._fed = True
        if self._receiving is not None:
            self._receiving.add(body)

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        if self._overloaded:
            self._overloaded, self._place = False, _BETWEEN
            self.transport.write(error_response.TRY_AGAIN)
            self._expiry.after(KEEP_ALIVE_SECONDS)
            return
        assert self._receiving is not None
        exchange, self._receiving = self._receiving, None
        self._place = _BETWEEN
        exchange.end()
        if exchange is self._answering:
            self._expiry.stop()
            if exchange.task is None:
                self._start(exchange)
        elif self._answering is None:  # it was answered before its body was complete
            self._expiry.after(KEEP_ALIVE_SECONDS)

    # -- requests in turn -----------------------------------------------------------------------

    def leaving(self) -> bool:
        return self._shared.leaving

    def _start(self, exchange: Exchange) -> None:
        shared = self._shared
        shared.exchanges.add(exchange)
        exchange.task = self.loop.create_task(self._run(exchange))

    async def _run(self, exchange: Exchange) -> None:
        try:
            await exchange.run(self._shared.app)
        finally:
            self._shared.exchanges.discard(exchange)
            exchange.release()

    def answered(self, exchange: Exchange) -> None:
        """The next one's turn, or the connection's end."""
        if exchange is not self._answering:
            return
        self._answering = None
        if not exchange.keep_alive:
            self._close()
        elif self._queue:
            following = self._queue.popleft()
            self._answering = following
            self._start(following)
        elif self._refusal is not None:
            self._refuse(self._refusal)
        elif self._ended:
            self._close()
        elif self._place == _BETWEEN:
            self._expiry.after(KEEP_ALIVE_SECONDS)
        if self._intake.held:
            self.resume_reading()

    def leave(self) -> None:
        """Close, now or behind the answer under way."""
        if self._answering is None:
            self.transport.close()
        else:
            self._answering.keep_alive = False

    def _await_body(self) -> None:
        """More of a request's body is to come; its application may begin."""
        if self._overloaded:
            self._reject(error_response.OVERLOADED)
            return
        exchange = self._receiving
        assert exchange is not None
        if exchange is self._answering and exchange.task is None:
            self._start(exchange)
        # Trailers, and extensions of a chunk, are bounded as a head is.
        self._stray_bytes = 0 if self._fed else self._stray_bytes + self._segment_bytes
        if self._stray_bytes > MAX_HEAD_BYTES:
            self._reject(error_response.LONG)
        elif exchange.buffered > HIGH_WATER_BYTES and not exchange.done:
            self._hold()
        elif not self._intake.held:
            self._expiry.after(BODY_IDLE_SECONDS)

    def _bound_head(self, was_in_head: bool) -> None:
        """Of a head that has no end yet."""
        if not was_in_head:
            self._expiry.after(HEAD_SECONDS)
        if self._begun:  # where in the segment is not known, unless it is all of it
            self._head_bytes = self._segment_bytes if self._begun == 1 and not was_in_head else 0
        else:
            self._head_bytes += self._segment_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._reject(error_response.LONG)

    # -- ends -----------------------------------------------------------------------------------

    def _expired(self) -> None:
        if self._closing or (self._place == _BETWEEN and self._url):
            self.transport.close()
        else:
            self._reject(error_response.SLOW)

    def _probe(self) -> None:
        """Whether the client that has ended its side is gone: then it resets what it is sent."""
        exchange = self._answering
        if exchange is None or exchange.done or self.transport.is_closing():
            return
        if self._probed or exchange.begun:
            connection: socket.socket = self.transport.get_extra_info("socket")
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.transport.abort()
                return
        elif exchange.scope["http_version"] == "1.1":
            self._probed = True
            self.transport.write(CONTINUE)
        self.loop.call_later(PROBE_SECONDS, self._probe)

    def _reject(self, refusal: Refusal) -> None:
        """Take nothing more, and say why once what came before is answered."""
        self._refusal = refusal
        self._expiry.stop()
        broken, self._receiving = self._receiving, None
        if broken is not None:
            broken.release()
        if broken is not None and broken in self._queue:
            self._queue.remove(broken)
        elif broken is not None:
            self._answering = None
            broken.disconnect()
            if broken.begun:
                self._linger()
        if self._answering is None:
            self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> None:
        """Answer in one piece and close; no application is involved."""
        if not self._closing and not self.transport.is_closing():
            self.transport.write(error_response.whole(refusal))
            self._linger()

    def _close(self) -> None:
        if self._place == _BETWEEN and not self._queue:
            self._closing = True
            self.transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Closing with bytes unread would reset the connection before the answer is seen."""
        self._closing = True
        if not self.transport.is_closing():
            with contextlib.suppress(OSError):  # the client has gone meanwhile
                self.transport.write_eof()
            self._intake.drop()
            self._intake.resume()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
