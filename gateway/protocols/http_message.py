"""Requests and responses of the HTTP port, as its handlers see them.

A handler that does not wait returns its response; one that waits returns an awaitable of it. The
server calls it in a context of its own, and makes a task only for an awaitable.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote

import httptools

from modelport.gateway.access.principal import ConnectionIdentity
from modelport.gateway.runtime.request_memory import ConnectionMemory
from modelport.gateway.wire.raw_tensors import Buffer

Headers = list[tuple[bytes, bytes]]

JSON: Headers = [(b"content-type", b"application/json")]
#: The id of a request in logs, and the bytes of it that are kept.
TRACE, MAX_TRACE = b"x-request-id", 128


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete."""


class Peer(NamedTuple):
    """The part of a connection that the handlers of its requests see.

    Attributes:
        client, server: The addresses of both ends; None on a UNIX domain socket.
        memory: The budget of the connection.
    """

    scheme: str
    client: tuple[str, int] | None
    server: tuple[str, int] | None
    identity: ConnectionIdentity
    memory: ConnectionMemory


class RequestBody(Protocol):
    """The body of a request, which may still be on its way."""

    def whole(self) -> Buffer | None:
        """Take the body; None if it is not complete, and ``read`` waits for it."""

    async def read(self, most: int) -> Buffer:
        """Wait for the whole body; of one that is longer than ``most``, for more than that.

        Raises:
            ClientDisconnected: There is no more, although the body is not complete.
        """


class _EndedBody:
    """The body of a request whose handler has ended."""

    def whole(self) -> None:
        return None

    async def read(self, most: int) -> Buffer:
        raise ClientDisconnected


ENDED: Final = _EndedBody()


class HttpRequest:
    """A request whose head is complete.

    Args:
        target: Percent-encoded, with its query.

    Attributes:
        raw_path: The path of the target.
        query: What follows the question mark of the target.
        headers: Names in lower case, in the client's order.
        fields: The headers by name; of several with one name, the last.
        version: ``1.0``, ``1.1`` or ``2``.

    Raises:
        HttpParserInvalidURLError: The target is not a URL.
    """

    __slots__ = (
        "body", "fields", "headers", "method", "peer", "query", "raw_path", "version",
    )  # fmt: skip

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        version: str,
        peer: Peer,
        body: RequestBody,
    ) -> None:
        self.method, self.headers, self.version = method, headers, version
        self.peer, self.body = peer, body
        self.fields = dict(headers)
        # ``find`` is ten times as fast as ``in``, which raises and catches an error first.
        if target.startswith(b"/") and target.find(b"#") < 0:
            self.raw_path, _, self.query = target.partition(b"?")
        else:
            parsed = httptools.parse_url(target)
            self.raw_path, self.query = parsed.path or b"/", parsed.query or b""

    @property
    def trace(self) -> str:
        """The id by which the client traces the request; empty if it gives none."""
        return self.fields.get(TRACE, b"")[:MAX_TRACE].decode("latin-1")

    @property
    def path(self) -> str:
        """The path, without percent-encoding."""
        return unquote(self.raw_path.decode("ascii"))


class HttpResponse:
    """A response. The server adds ``date`` and ``content-length``.

    With ``parts`` it is a stream that begins with ``body``. The server closes the generator, which
    has to have begun, so that it can end what it holds. An exception of it, which was logged, cuts
    the response off, so that no client takes it for complete.
    """

    __slots__ = ("body", "headers", "parts", "status")

    def __init__(
        self,
        status: int,
        body: Buffer = b"",
        headers: Headers = JSON,
        parts: AsyncGenerator[Buffer, None] | None = None,
    ) -> None:
        self.status, self.body, self.headers, self.parts = status, body, headers, parts

    def adding(self, *fields: tuple[bytes, bytes]) -> HttpResponse:
        """Return the response with fields that replace those of the same name."""
        if not fields:
            return self
        names = {name for name, _ in fields}
        kept = [field for field in self.headers if field[0] not in names]
        return HttpResponse(self.status, self.body, [*kept, *fields], self.parts)


Answer = HttpResponse | Awaitable[HttpResponse]
Handler = Callable[[HttpRequest], Answer]
