"""Table of gRPC methods, independent of the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import ModelportError
from modelport.gateway.protocols.request_body import CONTROL_BYTES
from modelport.gateway.types import Deadline
from modelport.gateway.wire.protobuf import joined
from modelport.gateway.wire.raw_tensors import Buffer


class Serialized:
    """A serialized response, in parts that are not copied if they are large."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self.parts = joined(parts)

    def SerializeToString(self) -> bytes:  # noqa: N802 - as protobuf names it
        return b"".join(self.parts)


def parts_of(reply: Any) -> Sequence[Buffer]:
    """Serialize a response, in parts."""
    return reply.parts if type(reply) is Serialized else (reply.SerializeToString(),)


#: Metadata of a stream whose first error ends it, and whether the current call has it.
ERRORS_END_KEY = b"triton_grpc_error"
ERRORS_END: ContextVar[bool] = ContextVar("errors_end", default=False)


class RefusedMessage(NamedTuple):
    """A message of a stream that was not decoded; ``error`` is the response to it alone."""

    error: ModelportError


class Method(NamedTuple):
    """A gRPC method.

    Attributes:
        handler: An async function from request and deadline to response, or an async generator of
            responses. It raises ``ModelportError``.
        operation: The operation that rules of ``--access`` allow to callers.
        request_streams: Whether the request is a stream, which may hold a ``RefusedMessage``. It
            implies ``reply_streams``.
        statuses: gRPC statuses by error class, if they differ from the Open Inference Protocol's.
        refuses: Tests, under overload, whether to refuse a request by its bytes, without decoding.
        health: Whether this is a health check, which is served beyond the connection limit.
        bound: Returns the size limit of a large request by its first bytes, or None. It raises if
            there is no such model.
        glance: Decodes a large request that takes no time to decode, or returns None.
    """

    request: Any
    reply: Any
    handler: Callable[[Any, Deadline], Any]
    operation: Operation
    request_streams: bool = False
    reply_streams: bool = False
    statuses: Mapping[type[ModelportError], str] = MappingProxyType({})
    refuses: Callable[[bytes | memoryview], bool] | None = None
    health: bool = False
    bound: Callable[[Buffer], int | None] = lambda _: CONTROL_BYTES
    glance: Callable[[Buffer], Any] = lambda _: None


#: Methods of a service by name.
Rows = Mapping[str, Method]
#: Methods of all services, by service and name.
Methods = Mapping[str, Rows]
