"""A gRPC client for other servers: channels, and calls with one request.

Calls go over HTTP/2 on this event loop (``gateway.upstream.http2``): through ``grpc.aio`` a call
costs two more threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import unquote

from google.protobuf.message import DecodeError

from modelport.gateway.errors import InvalidArgument, TimedOut
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.telemetry import spans
from modelport.gateway.types import Deadline
from modelport.gateway.upstream.background import is_cancelled
from modelport.gateway.upstream.credentials import RouteAuthentication
from modelport.gateway.upstream.grpc_status import STATUSES, meant
from modelport.gateway.upstream.http2 import (
    PONG_SECONDS,
    SILENCE_SECONDS,
    ClientConnection,
    GrpcReplies,
    GrpcReply,
)
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire import deadline_headers, via_header
from modelport.gateway.wire.http2.frames import (
    MAX_WINDOW_BYTES,
    ErrorCode,
    ProtocolError,
    literal,
)
from modelport.gateway.wire.protobuf import joined
from modelport.gateway.wire.raw_tensors import Buffer

T = TypeVar("T")
_VIA = via_header.HEADER.encode()

MAX_MESSAGE_BYTES = 2**31 - 1
#: Every gRPC server allows a ping this rarely; one more often may cost the connection.
KEEPALIVE_SECONDS = 310
#: Where gRPC's own clients look for the roots they trust, before the system's.
ROOTS_VARIABLE = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
_PREFIX = struct.Struct(">BI")  # not compressed, length


class GrpcChannel:
    """Connections to one endpoint of a route, made when they are needed."""

    def __init__(
        self,
        address: str,
        route: ModelRoute,
        tls: ssl.SSLContext | None = None,
        window: int = MAX_WINDOW_BYTES,
    ) -> None:
        """Prepare the connection.

        Args:
            tls: used instead of a context of the route's files.
            window: ``STREAM_WINDOW_BYTES`` for ``replies``.

        Raises:
            InvalidArgument: a file of the route's credentials cannot be used.
        """
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._address = address
        self._connect_seconds = route.connect_timeout_seconds
        self._scheme = "https" if route.tls else "http"
        self._tls, self._window = tls, window
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        self.authentication = RouteAuthentication(
            route.credentials, route.tls and tls is None, os.environ.get(ROOTS_VARIABLE), "h2"
        )
        self.max_reply_bytes = route.max_reply_bytes
        #: More than one where a server limits the calls of each.
        self._connections: list[ClientConnection] = []
        self._connecting: asyncio.Task[ClientConnection] | None = None
        self._keepalive: asyncio.TimerHandle | None = None
        self.watching: asyncio.TimerHandle | None = None

    def method(self, path: str, metadata: Mapping[str, str] | None = None) -> GrpcMethod:
        """Make the method at ``path``, ``/package.Service/Method``."""
        fields = {
            ":method": "POST",
            ":scheme": self._scheme,
            ":path": path,
            ":authority": self._address,
            "te": "trailers",
            "content-type": "application/grpc",
            "user-agent": "modelport",
            **(metadata or {}),
        }
        return GrpcMethod(
            self, b"".join(literal(name.encode(), v.encode()) for name, v in fields.items())
        )

    def open(self) -> ClientConnection | None:
        """A connection that takes a call now."""
        for connection in self._connections:
            if connection.free:
                return connection
        return None

    async def connect(self) -> ClientConnection:
        """A new connection, or one that others are waiting for already.

        Raises:
            EndpointFailed: the endpoint cannot be reached, or does not speak HTTP/2.
        """
        while True:
            connecting = self._connecting
            if connecting is None:
                connecting = asyncio.get_running_loop().create_task(self._connect())
                # Where everyone has given up nobody asks for its exception.
                connecting.add_done_callback(lambda done: done.cancelled() or done.exception())
                self._connecting = connecting
            try:
                # One that gives up must not take the connection from the others.
                made = await asyncio.shield(connecting)
            except asyncio.CancelledError:
                if connecting.cancelled() and not is_cancelled():
                    raise EndpointFailed(FailureKind.SILENT) from None
                raise
            if made.free or not made.usable:
                return made

    async def _connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        connection = ClientConnection(loop, self._window)
        try:
            async with asyncio.timeout(self._connect_seconds):
                await loop.create_connection(
                    lambda: connection,
                    self._host,
                    self._port,
                    ssl=self._tls or self.authentication.context,
                )
                await connection.ready
        except ProtocolError as error:
            raise EndpointFailed(FailureKind.REFUSED, "it does not speak gRPC") from error
        except (socket.gaierror, UnicodeError) as error:
            raise EndpointFailed(FailureKind.REFUSED, "its name cannot be resolved") from error
        except ssl.SSLError as error:
            raise EndpointFailed(FailureKind.REFUSED, "the TLS handshake failed") from error
        except ConnectionRefusedError as error:
            raise EndpointFailed(FailureKind.REFUSED, "connection refused") from error
        except TimeoutError as error:
            raise EndpointFailed(FailureKind.SILENT) from error
        except OSError as error:
            raise EndpointFailed(FailureKind.REFUSED, "no connection can be made") from error
        finally:
            if self._connecting is asyncio.current_task():
                self._connecting = None
            if not connection.established:
                connection.abort()
        if connection.usable and not connection.free:  # another one would allow no more
            connection.close()
            raise EndpointFailed(FailureKind.REFUSED, "it allows no streams")
        # Calls may be in flight on those that are being left.
        self._connections = [c for c in self._connections if c.usable or c.busy]
        self._connections.append(connection)
        if self._keepalive is None:
            self._keepalive = loop.call_later(KEEPALIVE_SECONDS, self._ping)
        return connection

    def watch(self) -> None:
        """Look for connections that are silent, for as long as there are calls in flight."""
        if self.watching is None:
            loop = asyncio.get_running_loop()
            self.watching = loop.call_later(SILENCE_SECONDS, self._check_silence)

    def _check_silence(self) -> None:
        self.watching = None
        for connection in self._connections:
            connection.check_silence()
        if any(connection.busy for connection in self._connections):
            self.watch()

    def reset(self) -> None:
        """Use no connection again that there is now. Calls in flight go on."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        for connection in self._connections:
            connection.leave()
        self._connections = [c for c in self._connections if c.busy]

    def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in self._connections:
            connection.ping()
            loop.call_later(PONG_SECONDS, connection.check_pong)
        self._keepalive = loop.call_later(KEEPALIVE_SECONDS, self._ping)

    async def close(self) -> None:
        for timer in (self._keepalive, self.watching):
            if timer is not None:
                timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError, EndpointFailed):
                await self._connecting
        for connection in self._connections:
            connection.close()


@dataclass(frozen=True, slots=True)
class GrpcMethod:
    """A method of an endpoint; ``block`` is the part of its headers that never changes."""

    channel: GrpcChannel
    block: bytes


async def unary(
    call: GrpcMethod,
    message: bytes | Sequence[Buffer],
    reply: Callable[[memoryview], T],
    limit: Deadline,
) -> T:
    """The reply to ``message``, parsed by ``reply`` (a message class's ``FromString``),
    which may keep it.

    ``message`` may come in parts, which are sent as they are. The caller cancels when ``limit``
    has passed, which resets the stream.

    Raises:
        EndpointFailed: the server is down, not ready, or its answer is damaged.
        ModelportError: what the server says of the request.
    """
    content = message_of(await exchange(call, message, limit, _onward()))
    try:
        return reply(content)
    except DecodeError as error:
        raise EndpointFailed(FailureKind.DAMAGED, "it is not a valid message") from error


def _onward() -> bytes:
    """The header fields of a client's request that is passed on."""
    fields = [literal(_VIA, via_header.onward("2").encode("latin-1"))]
    fields += [literal(name.encode(), value.encode()) for name, value in spans.onward().items()]
    return b"".join(fields)


async def replies(
    call: GrpcMethod,
    message: bytes | Sequence[Buffer],
    reply: Callable[[memoryview], T],
    limit: Deadline,
    failure: Callable[[str, str], Exception] = meant,
    onward: bool = True,
) -> AsyncGenerator[T, None]:
    """The replies to ``message``, the only one sent, each parsed by ``reply``.

    They are read as the caller asks for them. Closing the generator resets the stream. ``failure``
    makes the error of a status; ``onward``: the request is another client's.

    Raises:
        EndpointFailed, ModelportError: as ``unary``.
    """
    got = await exchange(call, message, limit, _onward() if onward else b"", GrpcReplies)
    assert isinstance(got, GrpcReplies)
    try:
        while content := await got.take():
            _check_head(got, failure)
            yield reply(_unframed(memoryview(content)))
    except DecodeError as error:
        raise EndpointFailed(FailureKind.DAMAGED, "it is not a valid message") from error
    except EndpointFailed as error:
        if error.failure is FailureKind.DROPPED and limit.expired:  # servers reset it then
            raise TimedOut from error
        if got.headers is not None:
            _check_head(got, failure)
        raise
    finally:
        got.connection.cancel_stream(got, ErrorCode.CANCEL)
    _check_status(got, failure)


async def exchange(
    call: GrpcMethod,
    message: bytes | Sequence[Buffer],
    limit: Deadline,
    fields: bytes = b"",
    kind: type[GrpcReply] = GrpcReply,
) -> GrpcReply:
    """The reply to ``message``, whatever its status; ``fields`` are further header fields.

    Args:
        kind: ``GrpcReplies`` are returned as soon as ``message`` is sent.

    Raises:
        EndpointFailed: the server is down, or its reply is incomplete or too large.
        InvalidArgument: ``message`` is too large.
        TimedOut: ``limit`` had passed before.
    """
    parts = (message,) if isinstance(message, bytes) else message
    size = sum(map(len, parts))
    if size > MAX_MESSAGE_BYTES:
        raise InvalidArgument("the request exceeds gRPC's limit of 2 GiB")
    prefix = _PREFIX.pack(0, size)
    block = call.block + fields
    remaining = limit.remaining()
    if remaining is not None:
        if not remaining:
            raise TimedOut
        block += literal(deadline_headers.GRPC_TIMEOUT, deadline_headers.grpc_timeout(remaining))
    channel = call.channel
    if authorization := channel.authentication.authorization:
        block += literal(b"authorization", authorization.encode())
    connection = channel.open() or await channel.connect()
    if channel.watching is None:
        channel.watch()
    body = joined((prefix, *parts))
    return await connection.call(block, body, channel.max_reply_bytes + _PREFIX.size, kind)


def message_of(got: GrpcReply, failure: Callable[[str, str], Exception] = meant) -> memoryview:
    """The message of a reply whose status is OK.

    Raises:
        EndpointFailed: the reply is damaged.
        Exception: the result of ``failure`` for another status and its text.
    """
    _check_status(got, failure)
    return _unframed(got.body.view())


def _check_status(got: GrpcReply, failure: Callable[[str, str], Exception]) -> None:
    _check_head(got, failure)
    trailers = got.trailers or {}
    status = STATUSES.get(trailers.get("grpc-status", ""), "UNKNOWN")
    if status != "OK":
        raise failure(status, unquote(trailers.get("grpc-message", "")))


def _check_head(got: GrpcReply, failure: Callable[[str, str], Exception]) -> None:
    headers = got.headers or {}
    code = headers.get(":status")
    if code != "200" or not headers.get("content-type", "").startswith("application/grpc"):
        if code in ("429", "502", "503", "504"):
            raise failure("UNAVAILABLE", f"HTTP status {code}")
        raise EndpointFailed(FailureKind.DAMAGED, "it does not speak gRPC")


def _unframed(body: memoryview) -> memoryview:
    """The message in ``body``."""
    if len(body) < _PREFIX.size:
        raise EndpointFailed(FailureKind.DAMAGED, "it is truncated")
    compressed, length = _PREFIX.unpack_from(body)
    if compressed or length != len(body) - _PREFIX.size:
        raise EndpointFailed(FailureKind.DAMAGED, "it is not exactly one uncompressed message")
    return body[_PREFIX.size :]
