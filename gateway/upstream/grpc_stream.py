"""Streams of a gRPC server's replies. They are rare and long, so the client is ``grpcio``'s.

It is not in the base installation, and imported with the first route that has streams.

Replies are read as the caller asks for them: with a slow caller the connection's window fills, and
the server waits.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError

from modelport.gateway.cli.errors import missing_extra
from modelport.gateway.errors import ModelportError, TimedOut
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.types import Deadline
from modelport.gateway.upstream.credentials import RouteAuthentication
from modelport.gateway.upstream.grpc import KEEPALIVE_SECONDS, MAX_MESSAGE_BYTES, meant
from modelport.gateway.upstream.http2 import PONG_SECONDS
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire import via_header
from modelport.gateway.wire.raw_tensors import Buffer

if TYPE_CHECKING:
    import grpc

T = TypeVar("T")

RECONNECT_SECONDS = 0.1
MAX_RECONNECT_SECONDS = 1.0
#: The library gives its own failures and a server's statuses alike; only its words tell them apart.
_TRANSPORT = (
    (re.compile(r"Connection refused"), FailureKind.REFUSED, "connection refused"),
    (re.compile(r"^errors resolving|^DNS res"), FailureKind.REFUSED, "its name cannot be resolved"),
    (re.compile(r"Failed parsing HTTP/2"), FailureKind.REFUSED, "it does not speak gRPC"),
    (re.compile(r"^failed to connect"), FailureKind.REFUSED, "no connection can be made"),
    (
        re.compile(r"message larger than max"),
        FailureKind.DAMAGED,
        "it is larger than the route's max_reply_bytes",
    ),
    (
        re.compile(
            r"^Stream removed|Socket closed|Connection reset|GOAWAY|RST_STREAM|Broken pipe"
            r"|^recvmsg|^sendmsg|keepalive watchdog|Endpoint closing"
        ),
        FailureKind.DROPPED,
        "",
    ),
    (
        re.compile(r"^Received http2 header with status: (?!50[234])"),
        FailureKind.DAMAGED,
        "it does not speak gRPC",
    ),
)


class StreamChannel:
    """One endpoint of ``route``. It connects when it is first used, on the event loop."""

    def __init__(self, address: str, route: ModelRoute) -> None:
        """Prepare the connection.

        Raises:
            Unsupported: ``grpcio`` is not installed.
        """
        try:
            import grpc
        except ImportError as error:
            raise missing_extra(error) from error
        self._aio = grpc.aio
        self._grpc, self._route = grpc, route
        self._authentication = RouteAuthentication(route.credentials, route.tls)
        options = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", route.max_reply_bytes),
            ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
            ("grpc.keepalive_timeout_ms", int(PONG_SECONDS * 1000)),  # TCP_USER_TIMEOUT, too
            ("grpc.initial_reconnect_backoff_ms", int(RECONNECT_SECONDS * 1000)),
            ("grpc.max_reconnect_backoff_ms", int(MAX_RECONNECT_SECONDS * 1000)),
            # The name notwithstanding: how long a connection may take to come up.
            ("grpc.min_reconnect_backoff_ms", int(route.connect_timeout_seconds * 1000)),
            # Otherwise a new channel inherits the failures of one that is closed.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
        ]
        self._address, self._options = address, options
        self._grace_seconds = route.timeout_seconds
        self._closing: set[asyncio.Task[None]] = set()
        self._channel = self._open()

    def _open(self) -> grpc.aio.Channel:
        if self._route.tls:
            credentials = self._grpc.ssl_channel_credentials(*self._authentication.pem)
            return self._aio.secure_channel(self._address, credentials, self._options)
        return self._aio.insecure_channel(self._address, self._options)

    def reset(self) -> None:
        """Use the connection no more that there is now. Calls in flight go on."""
        old, self._channel = self._channel, self._open()
        closing = asyncio.get_running_loop().create_task(old.close(self._grace_seconds))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def replies(
        self,
        method: str,
        message: bytes | Sequence[Buffer],
        reply: Callable[[bytes], T],
        deadline: Deadline,
    ) -> AsyncGenerator[T, None]:
        """The replies to ``message``, the only one sent, each parsed by ``reply``.

        ``message`` may come in parts. Closing the generator cancels the call.

        Raises:
            EndpointFailed: the server is down, not ready, or an answer is damaged.
            ModelportError: what the server says of the request.
        """
        if deadline.expired:
            raise TimedOut
        content = message if isinstance(message, bytes) else b"".join(message)
        open_call: Any = self._channel.stream_stream
        metadata = [(via_header.HEADER, via_header.onward("2"))]
        if authorization := self._authentication.authorization:
            metadata.append(("authorization", authorization))
        call = open_call(method)(_once(content), timeout=deadline.remaining(), metadata=metadata)
        try:
            async for part in call:
                yield reply(part)
        except self._aio.AioRpcError as error:
            raise _translated(error) from error
        except DecodeError as error:
            raise EndpointFailed(FailureKind.DAMAGED, "it is not a valid message") from error
        finally:
            call.cancel()

    async def close(self) -> None:
        for closing in self._closing:
            closing.cancel()
        await self._channel.close(None)


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


def _translated(error: grpc.aio.AioRpcError) -> EndpointFailed | ModelportError:
    """Convert ``error``, a failure of the transport or a server's status."""
    status, details = error.code().name, error.details() or ""
    if status == "DEADLINE_EXCEEDED":
        return TimedOut()
    for words, failure, reason in _TRANSPORT:
        if words.search(details):
            return EndpointFailed(failure, reason)
    return meant(status, details)
