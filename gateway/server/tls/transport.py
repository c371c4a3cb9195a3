"""A TLS connection of a listener: it is the protocol of a socket, and the transport of another.

uvloop's TLS cannot be used here. It hides a handshake from the limit of connections, cannot
half-close, does not count what its socket has yet to send, and takes 256 KiB for each connection.
Cryptography, and the state machine of TLS, are OpenSSL's.

What is written waits unencrypted, and without a copy, until the socket takes it. This side can end
before the other; but a client that ends its side has closed the connection, as clients of TLS do.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from modelport.gateway.runtime.thread_buffer import ThreadBuffer
from modelport.gateway.runtime.timer_wheel import Timer
from modelport.gateway.server import time_limits
from modelport.gateway.server.http1 import error_response
from modelport.gateway.server.listening_socket import Room

if TYPE_CHECKING:
    from modelport.gateway.server.listener import ServerState

#: Encrypted and handed to the socket together.
CHUNK_BYTES = 64 * 1024
#: The longest plaintext of a record (RFC 8446, 5.1).
RECORD_BYTES = 16 * 1024
#: The most that may wait for a peer which demands replies of TLS itself, such as new keys.
UNREAD_REPLY_BYTES = 4 * CHUNK_BYTES
_NO_TLS = error_response.serialize(("400 Bad Request", "this port serves TLS: use https"))
_scratch = ThreadBuffer(CHUNK_BYTES)


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """One connection, whose ``protocol`` starts when the handshake is complete.

    Until then the transport itself is one of the listener's connections, so that handshakes count
    against its limit, and end with it.
    """

    def __init__(
        self, state: ServerState, context: ssl.SSLContext, protocol: asyncio.BaseProtocol
    ) -> None:
        super().__init__()
        #: The socket's.
        self.transport: asyncio.Transport
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._timer: Timer | None = None
        self._established = self._closing = False
        # The peer has ended its side; what still comes is discarded.
        self._ended = self._deaf = self._reading_paused = False
        #: What ends this side once everything is sent: the socket's ``write_eof`` or ``close``.
        self._end: Callable[[], None] | None = None
        self._close_notify_sent = False
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        # The socket takes no more; the protocol was told so.
        self._blocked = self._protocol_paused = False
        self._protocol = protocol

    # -- the handshake ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        room = self._state.admit(self, transport)
        if room is Room.NONE:
            self._deaf = True
            self.transport.close()
            return
        crowded = room is Room.HEALTH
        seconds = time_limits.CROWDED_SECONDS if crowded else time_limits.HEAD_SECONDS
        self._timer = Timer(self._loop, seconds, self.transport.abort)

    def _handshake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            return
        except ssl.SSLError as error:
            self._refuse(error.reason)
            return
        if self._tls.session_reused and _is_expired(self._tls):
            self.transport.abort()
            return
        self._send()
        self._established = True
        self._stop_timer()
        self._state.connections.pop(self, None)
        self._protocol.connection_made(self)
        self._read()

    def _refuse(self, reason: str | None) -> None:
        """Send the alert, and half-close first: closing with unread bytes would lose it."""
        self._deaf = True
        self._send()
        if reason == "HTTP_REQUEST":
            self.transport.write(_NO_TLS)
        with contextlib.suppress(OSError):  # the client may have disconnected
            self.transport.write_eof()
        self._stop_timer()
        self._timer = Timer(self._loop, time_limits.LINGER_SECONDS, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def idle(self) -> bool:
        return False

    @property
    def waiting(self) -> bool:
        return True

    def warn(self) -> None:
        """Do nothing: a handshake cannot carry the warning."""

    leave = warn

    # -- the socket's protocol --------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return _scratch.view

    def buffer_updated(self, nbytes: int) -> None:
        if self._deaf:
            return
        self._incoming.write(_scratch.view[:nbytes])
        if self._established:
            self._read()
        else:
            self._handshake()

    def eof_received(self) -> bool:
        if not self._established or self._deaf:
            return False
        self._ended = True
        self._read()
        return not self._closing  # what was paused is read first

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._state.connections.pop(self, None)
        self._closing = self._deaf = True
        self._backlog.clear()
        self._backlog_bytes = 0
        protocol = self._protocol
        self._protocol = asyncio.Protocol()  # the two refer to each other
        if self._established:
            protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._blocked = True
        if self._established and not self._protocol_paused:
            self._protocol_paused = True
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._blocked = False
        self._drain()
        if self._protocol_paused and not self._blocked:
            self._protocol_paused = False
            self._protocol.resume_writing()

    # -- reading ----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Pass on the records that have arrived."""
        try:
            while self._readable():
                if not self._read_record():
                    self._ended = True
                    break
        except ssl.SSLWantReadError:
            pass  # the record is incomplete
        except ssl.SSLError:
            self._send()  # the alert
            self.abort()
            return
        if self._outgoing.pending:
            self._send()
            if self.transport.get_write_buffer_size() > UNREAD_REPLY_BYTES:
                self.abort()
        if self._ended and not self._reading_paused:
            # ``close_notify`` is how clients close, not half-close.
            if self._backlog:
                self.abort()
            else:
                self.close()

    def _readable(self) -> bool:
        waits = self._incoming.pending or self._tls.pending()
        return bool(waits) and not (self._reading_paused or self._deaf)

    def _read_record(self) -> int:
        """Read at most one record; 0: the peer has ended its side."""
        protocol = self._protocol
        if isinstance(protocol, asyncio.BufferedProtocol):
            buffer = protocol.get_buffer(-1)
            size = cast(int, self._tls.read(len(buffer), buffer))  # type: ignore[arg-type]
            if size:
                protocol.buffer_updated(size)
            return size
        data = self._tls.read(RECORD_BYTES)
        if data:
            cast(asyncio.Protocol, protocol).data_received(data)
        return len(data)

    def is_reading(self) -> bool:
        return not self._reading_paused

    def pause_reading(self) -> None:
        self._reading_paused = True
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        self._reading_paused = False
        self.transport.resume_reading()
        if self._ended or self._readable():
            self._loop.call_soon(self._read)

    # -- writing ----------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._closing or self._end is not None:
            return
        size = len(data)
        if self._backlog or self._blocked or size > RECORD_BYTES:
            self._append(data)
            self._drain()
        elif size:
            self._tls.write(data)
            self.transport.write(self._outgoing.read())

    def writelines(self, list_of_data: Any) -> None:
        if self._closing or self._end is not None:
            return
        for data in list_of_data:
            self._append(data)
        self._drain()

    def _append(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        if len(view):
            self._backlog.append(view)
            self._backlog_bytes += len(view)

    def _drain(self) -> None:
        """Encrypt pending data as far as the socket accepts it; then close, if that is due."""
        while self._backlog and not self._blocked:
            room = CHUNK_BYTES
            while self._backlog and room > 0:
                view = self._backlog.popleft()
                sent = self._tls.write(view[:RECORD_BYTES])
                if sent < len(view):
                    self._backlog.appendleft(view[sent:])
                self._backlog_bytes -= sent
                room -= sent
            self._send()
        if self._end is not None and not self._backlog:
            if not self._close_notify_sent:
                self._close_notify_sent = True
                self._incoming.read()  # or OpenSSL would complain of it to the peer
                with contextlib.suppress(ssl.SSLError):  # the peer's close_notify is not waited for
                    self._tls.unwrap()
                self._send()
            self._end()

    def _send(self) -> None:
        data = self._outgoing.read()
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def get_write_buffer_size(self) -> int:
        return self._backlog_bytes + self.transport.get_write_buffer_size()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """End this side after the pending data; later input is discarded."""
        if not self._closing and self._end is None:
            self._deaf, self._end = True, self.transport.write_eof
            self._drain()

    # -- ends -------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._closing or self.transport.is_closing()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = self._deaf = True
        if self._established:
            self._end = self.transport.close
            self._drain()
        else:
            self.transport.abort()

    def abort(self) -> None:
        self._closing = self._deaf = True
        self.transport.abort()

    # -- the rest of a transport ------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls if name == "ssl_object" else self.transport.get_extra_info(name, default)


def _is_expired(tls: ssl.SSLObject) -> bool:
    """Return whether the client's certificate has expired, which OpenSSL does not ask again when a
    session of TLS 1.2 is resumed.
    """
    try:
        end = (tls.getpeercert() or {}).get("notAfter")
    except ValueError:
        return True
    return isinstance(end, str) and ssl.cert_time_to_seconds(end) < time.time()
