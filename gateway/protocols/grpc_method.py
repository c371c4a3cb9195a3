"""A row of the table of gRPC methods, which any front can put on a socket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from modelport.gateway.errors import ModelportError
from modelport.gateway.types import Deadline
from modelport.gateway.wire.protobuf import joined
from modelport.gateway.wire.raw import Buffer


class Serialized:
    """A reply whose bytes are there, in parts; those that are large lie where they were."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Buffer) -> None:
        self.parts = joined(parts)

    def SerializeToString(self) -> bytes:  # noqa: N802 - as protobuf names it
        return b"".join(self.parts)


def _whole(reply: Any) -> Sequence[Buffer]:
    return reply.parts if type(reply) is Serialized else (reply.SerializeToString(),)


#: The most bytes of a request that carries no tensors: to load a model, to list them.
CONTROL_BYTES = 256 * 1024


def _control(_: Buffer) -> int:
    return CONTROL_BYTES


def _no_glance(_: Buffer) -> None:
    return None


class RefusedMessage(NamedTuple):
    """A message of a client's stream that was not decoded: ``error`` is the answer to it alone."""

    error: ModelportError


class Method(NamedTuple):
    """``handler`` is an async function from a request to a reply, or an async generator of replies.

    It raises ``ModelportError``. ``request_streams`` implies ``reply_streams``: both sides are
    streams, or only the reply is; a request's stream may hold a ``RefusedMessage``. ``statuses``
    names the gRPC status of an error's class where the dialect's differs from the Open Inference
    Protocol's. ``refuses`` is asked in an overload, of a
    request's bytes: whether they need not be read, since it is refused whatever it holds.
    ``parts`` are the bytes of a reply. ``health``: it tells whether the server is live and ready,
    and is answered where there is no room for other calls.

    ``bound`` is asked of a large request by its beginning: how large a valid one may be; None: as
    large as any. It raises where there is no such model.
    """

    request: Any
    reply: Any
    handler: Callable[[Any, Deadline], Any]
    request_streams: bool = False
    reply_streams: bool = False
    statuses: Mapping[type[ModelportError], str] = MappingProxyType({})
    refuses: Callable[[bytes | memoryview], bool] | None = None
    parts: Callable[[Any], Sequence[Buffer]] = _whole
    health: bool = False
    bound: Callable[[Buffer], int | None] = _control
    glance: Callable[[Buffer], Any] = _no_glance


#: method → row
Rows = Mapping[str, Method]
#: service → its rows
Methods = Mapping[str, Rows]
