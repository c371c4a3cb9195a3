"""gRPC as a client of other servers: channels, and a status as what it says of whom."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from gateway.errors import (
    Internal,
    InvalidArgument,
    ModelportError,
    QueueFull,
    TimedOut,
    Unsupported,
)
from gateway.routes import Route
from gateway.types import Deadline
from gateway.upstream.pool import EndpointFailed, Failure, public

T = TypeVar("T")
#: Bytes in, bytes out.
Call = Callable[..., Any]

MAX_MESSAGE_BYTES = 2**31 - 1
#: Every gRPC server allows a ping this rarely; one more often may cost the connection.
KEEPALIVE_SECONDS = 310
RECONNECT_SECONDS = 0.1
MAX_RECONNECT_SECONDS = 1.0

#: The library gives its own failures and a server's statuses alike; only its words tell them apart.
_TRANSPORT = (
    (re.compile(r"Connection refused"), Failure.REFUSED, "connection refused"),
    (re.compile(r"^errors resolving|^DNS res"), Failure.REFUSED, "its name is unknown"),
    (re.compile(r"Failed parsing HTTP/2"), Failure.REFUSED, "it does not speak gRPC"),
    (re.compile(r"^failed to connect"), Failure.REFUSED, "it does not answer"),
    (
        re.compile(r"message larger than max"),
        Failure.DAMAGED,
        "it is larger than the route's max_reply_bytes",
    ),
    (
        re.compile(
            r"^Stream removed|Socket closed|Connection reset|GOAWAY|RST_STREAM|Broken pipe"
            r"|^recvmsg|^sendmsg|keepalive watchdog|Endpoint closing"
        ),
        Failure.DROPPED,
        "",
    ),
    (
        re.compile(r"^Received http2 header with status: (?!50[234])"),
        Failure.DAMAGED,
        "it does not speak gRPC",
    ),
)
_REQUEST = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION", "ALREADY_EXISTS"})


def channel(address: str, route: Route) -> grpc.aio.Channel:
    """A channel to one endpoint of ``route``; it connects when it is first used."""
    options = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", route.max_reply_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.initial_reconnect_backoff_ms", int(RECONNECT_SECONDS * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(MAX_RECONNECT_SECONDS * 1000)),
        # The name notwithstanding: how long a connection may take to come up.
        ("grpc.min_reconnect_backoff_ms", int(route.connect_timeout_seconds * 1000)),
        # Otherwise a new channel inherits the failures of one that is closed.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
    ]
    if route.tls:
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(), options)
    return grpc.aio.insecure_channel(address, options)


async def unary(call: Call, message: bytes, reply: Callable[[bytes], T], limit: Deadline) -> T:
    """The reply to ``message``, parsed by ``reply`` (a message class's ``FromString``).

    ``call`` is ``channel.unary_unary(method)``: it has no serializers of its own.

    Raises:
        EndpointFailed: the server is down, not ready, or its answer is damaged.
        ModelportError: what the server says of the request.
    """
    try:
        content = await call(message, timeout=limit.remaining())
    except grpc.aio.AioRpcError as error:
        raise crossed(error) from error
    try:
        return reply(content)
    except DecodeError as error:
        raise EndpointFailed(Failure.DAMAGED, "it is no message of the protocol") from error


def crossed(error: grpc.aio.AioRpcError) -> EndpointFailed | ModelportError:
    """``error`` in the words of the house: what the transport says, or else the server."""
    status, said = error.code().name, error.details() or ""
    if status == "DEADLINE_EXCEEDED":
        return TimedOut()
    for words, failure, reason in _TRANSPORT:
        if words.search(said):
            return EndpointFailed(failure, reason)
    return meant(status, said)


def meant(status: str, said: str) -> EndpointFailed | ModelportError:
    """What a server means that answers with ``status``, a gRPC status by name.

    ``NOT_FOUND`` is no fault of the request: the gateway has checked it, so the server lacks what
    it should serve.
    """
    said = public(said)
    if status in _REQUEST:
        return InvalidArgument(said)
    if status == "UNIMPLEMENTED":
        return Unsupported(said)
    if status == "RESOURCE_EXHAUSTED":
        return QueueFull()
    if status == "DEADLINE_EXCEEDED":
        return TimedOut()
    if status == "NOT_FOUND":
        return EndpointFailed(Failure.MISSING, said)
    if status in ("UNAVAILABLE", "CANCELLED"):
        lowered = said.lower()
        if "maximum queue size" in lowered:
            return QueueFull()
        if "timeout expired" in lowered:
            return TimedOut()
        return EndpointFailed(Failure.UNREADY, said)
    return Internal(said or "the server that runs the model gave no reason")
