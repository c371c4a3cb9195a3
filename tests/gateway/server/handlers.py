"""Handlers for tests of the HTTP server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable

import httpx

from modelport.gateway.access.principal import UNKNOWN_CONNECTION
from modelport.gateway.protocols.http_message import (
    Answer,
    Handler,
    Headers,
    HttpRequest,
    HttpResponse,
    Peer,
    RequestBody,
)
from modelport.gateway.runtime.request_memory import PROCESS
from modelport.gateway.types import finished

Respond = Callable[[HttpRequest, bytes], HttpResponse]


async def body_of(request: HttpRequest) -> bytes:
    """Wait for the whole body."""
    return await request.body.read(sys.maxsize)


def on_body(respond: Respond) -> Handler:
    """Make a handler that responds at once if the body is complete, and else waits for it."""

    async def wait(request: HttpRequest) -> HttpResponse:
        return respond(request, await body_of(request))

    def handle(request: HttpRequest) -> Answer:
        body = request.body.whole()
        return wait(request) if body is None else respond(request, body)

    return handle


@on_body
def echo(request: HttpRequest, body: bytes) -> HttpResponse:
    """Answer with the method, the path, whether an upgrade is offered, and the body."""
    offered = any(name == b"upgrade" for name, _ in request.headers)
    return HttpResponse(200, f"{request.method} {request.path} {offered} ".encode() + body)


@on_body
def echo_body(request: HttpRequest, body: bytes) -> HttpResponse:
    return HttpResponse(200, body)


class WholeBody:
    """A body that is complete."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def whole(self) -> bytes | None:
        return self._content

    async def read(self, most: int) -> bytes:
        return self._content


class ArrivingBody:
    """A body whose parts a handler waits for."""

    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts

    def whole(self) -> bytes | None:
        return None

    async def read(self, most: int) -> bytes:
        body = b""
        async for part in self._parts:
            body += part
            if len(body) > most:
                break
        return body


def request_of(method: str, target: str, headers: Headers, body: RequestBody) -> HttpRequest:
    """Make a request of a connection that is not known."""
    peer = Peer("http", None, None, UNKNOWN_CONNECTION, PROCESS.connection())
    return HttpRequest(method, target.encode(), headers, "1.1", peer, body)


class HandlerTransport(httpx.AsyncBaseTransport):
    """Has a handler answer the requests of an httpx client, without sockets."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        headers = [(name.lower(), value) for name, value in request.headers.raw]
        body = ArrivingBody(aiter(request.stream))
        asked = request_of(request.method, request.url.raw_path.decode(), headers, body)
        found = await finished(self._handler(asked))
        content = bytes(found.body)
        if found.parts is not None:
            content += b"".join([bytes(part) async for part in found.parts])
        return httpx.Response(found.status, headers=found.headers, content=content)
