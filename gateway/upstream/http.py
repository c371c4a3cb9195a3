"""The HTTP client for other servers: sessions, bounded replies, and errors by status."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.connector import AddrInfoType
from yarl import URL

from modelport.gateway.errors import InvalidArgument, ModelportError, TimedOut
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.telemetry import spans
from modelport.gateway.types import Deadline
from modelport.gateway.upstream import connection_errors, grpc_status
from modelport.gateway.upstream.credentials import RouteAuthentication
from modelport.gateway.upstream.http2 import PONG_SECONDS
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire import deadline_headers, json_text, via_header

#: A larger body is sent in parts, so that the event loop is not blocked.
WHOLE_BYTES = 1 << 20
HEADERS = {"Accept-Encoding": "identity"}
#: Envoy's: how long the client waits, in milliseconds. Another gateway uses it as a deadline.
_TIMEOUT = deadline_headers.HTTP_TIMEOUT.decode()
_TOO_LARGE = "it is larger than the route's max_reply_bytes"

#: HTTP status → the equivalent gRPC status (google.rpc.Code, and Triton's table).
_STATUSES = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
    508: "FAILED_PRECONDITION",  # the request's Via
}


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A reply; ``headers`` ignores case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Connections:
    """The connections to one endpoint. Retired ones are closed after the last request in flight."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_socket)
        self.session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=HEADERS,
            auto_decompress=False,
        )
        self.retired = False
        self.in_flight = 0

    async def __aenter__(self) -> aiohttp.ClientSession:
        self.in_flight += 1
        return self.session

    async def __aexit__(self, *_: object) -> None:
        self.in_flight -= 1
        if self.retired and not self.in_flight:
            await self.session.close()


def _socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # for unacknowledged data
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(PONG_SECONDS))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(PONG_SECONDS))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PONG_SECONDS * 1000))
    return made


class HttpSession:
    """Connections to the endpoints of a route. Created, used and closed on the event loop."""

    def __init__(self, route: ModelRoute) -> None:
        self._scheme = "https" if route.tls else "http"
        self._authentication = RouteAuthentication(route.credentials, route.tls)
        self._max_reply_bytes = route.max_reply_bytes
        self._connect_seconds = route.connect_timeout_seconds
        self._connections: dict[str, _Connections] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def reset(self, address: str) -> None:
        """Retire the current connections to ``address``. Requests in flight continue."""
        connections = self._connections.pop(address, None)
        if connections is not None:
            connections.retired = True
            if not connections.in_flight:
                closing = asyncio.get_running_loop().create_task(connections.session.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    def _to(self, address: str) -> _Connections:
        connections = self._connections.get(address)
        if connections is None:
            connections = self._connections[address] = _Connections()
        return connections

    async def ask(
        self,
        method: str,
        address: str,
        path: str,
        limit: Deadline,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpReply:
        """Send one request and read its reply, whatever the status. ``path`` is already quoted.

        Raises:
            EndpointFailed: the server is down, or its reply is missing, incomplete, a redirect or
                larger than the route allows.
            TimedOut: ``limit`` has passed.
        """
        with _translating():
            async with (
                self._to(address) as session,
                self._request(session, method, address, path, limit, body, headers) as response,
            ):
                return HttpReply(response.status, response.headers, await self._read(response))

    async def parts(
        self,
        address: str,
        path: str,
        limit: Deadline,
        body: bytes,
        headers: Mapping[str, str],
        refuse: Callable[[HttpReply], object],
    ) -> AsyncGenerator[bytes, None]:
        """Yield the reply to a POST in the parts (chunks) that the server sends, on request.

        Closing the generator closes the connection.

        Raises:
            EndpointFailed, TimedOut: as ``ask``; a part may be as large as a reply.
            Exception: as ``refuse`` does for a reply whose status is not 200.
        """
        with _translating():
            async with (
                self._to(address) as session,
                self._request(session, "POST", address, path, limit, body, headers) as response,
            ):
                if response.status != 200:
                    body = await self._read(response)
                    refuse(HttpReply(response.status, response.headers, body))
                    return
                found = bytearray()
                async for data, complete in response.content.iter_chunks():
                    found += data
                    if len(found) > self._max_reply_bytes:
                        raise EndpointFailed(FailureKind.DAMAGED, _TOO_LARGE)
                    if complete and found:
                        part, found = bytes(found), bytearray()
                        yield part
                if found:  # a reply with a length is one part
                    yield bytes(found)

    def _request(
        self,
        session: aiohttp.ClientSession,
        method: str,
        address: str,
        path: str,
        limit: Deadline,
        body: bytes | None,
        headers: Mapping[str, str] | None,
    ) -> Any:
        """The exchange as a context manager; the server gets the rest of ``limit`` as a header."""
        url = URL(f"{self._scheme}://{address}{path}", encoded=True)
        data = io.BytesIO(body) if body is not None and len(body) > WHOLE_BYTES else body
        headers = {**(headers or {}), via_header.HEADER: via_header.onward("1.1"), **spans.onward()}
        if authorization := self._authentication.authorization:
            headers["authorization"] = authorization
        remaining = limit.remaining()
        if remaining is not None:
            if not remaining:  # aiohttp treats 0 as no limit
                raise TimedOut
            headers[_TIMEOUT] = deadline_headers.http_timeout(remaining)
        timeout = aiohttp.ClientTimeout(total=remaining, sock_connect=self._connect_seconds)
        return session.request(
            method,
            url,
            data=data,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
            ssl=self._authentication.context or True,
        )

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if 300 <= response.status < 400:
            raise EndpointFailed(FailureKind.DAMAGED, "it is a redirect")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise EndpointFailed(FailureKind.DAMAGED, "it is compressed, which was not requested")
        limit = self._max_reply_bytes
        if (response.content_length or 0) <= limit:
            parts, size = [], 0
            async for part in response.content.iter_any():
                parts.append(part)
                size += len(part)
                if size > limit:
                    break
            else:
                return parts[0] if len(parts) == 1 else b"".join(parts)
        response.close()
        raise EndpointFailed(FailureKind.DAMAGED, _TOO_LARGE)

    async def close(self) -> None:
        for connections in self._connections.values():
            await connections.session.close()
        if self._closing:
            await asyncio.wait(self._closing)


@contextlib.contextmanager
def _translating() -> Iterator[None]:
    """Translate aiohttp's exceptions."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise EndpointFailed(FailureKind.SILENT) from error
    except aiohttp.ClientConnectorError as error:
        raise EndpointFailed(FailureKind.REFUSED, connection_errors.reason(error)) from error
    except TimeoutError as error:
        raise TimedOut from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        raise EndpointFailed(FailureKind.DROPPED) from error
    except aiohttp.ClientPayloadError as error:
        raise EndpointFailed(FailureKind.DAMAGED, "it is truncated") from error
    except aiohttp.ClientError as error:
        raise EndpointFailed(FailureKind.DAMAGED, "it does not speak HTTP") from error


def meant(status: int, said: object) -> EndpointFailed | ModelportError:
    """The error for the HTTP status ``status``; ``said`` is its message, if it is text."""
    other = "INTERNAL" if status >= 500 else "ABORTED"
    message = said if isinstance(said, str) and said else f"HTTP status {status}"
    return grpc_status.meant(_STATUSES.get(status, other), message)


def read_json(
    reply: HttpReply,
    damaged: str,
    failure: Callable[[int, Mapping[str, Any]], Exception],
    size: int | None = None,
) -> Any:
    """The JSON in the first ``size`` bytes of a reply, if its status is 200.

    Raises:
        EndpointFailed: it is not JSON; ``damaged`` says so.
        Exception: the result of ``failure`` for another status and the JSON object, if it is one.
    """
    document: Any = None
    try:
        document = json_text.loads(reply.body[:size])
    except InvalidArgument as error:
        if reply.status == 200:
            raise EndpointFailed(FailureKind.DAMAGED, damaged) from error
    if reply.status != 200:
        raise failure(reply.status, document if type(document) is dict else {})
    return document
