"""FastAPI beside the handlers: its application as one of them, and the responses of its routes."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import orjson
import structlog
from fastapi import Response

from modelport.gateway.protocols.http_message import (
    ClientDisconnected,
    HttpRequest,
    HttpResponse,
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Key of the ``HttpRequest`` in the scope.
REQUEST: Final = "modelport.request"

log = structlog.get_logger("modelport.http")


def handler_of(app: App) -> Callable[[HttpRequest, str], Awaitable[HttpResponse]]:
    """Make a handler of ``app``, which is told the request's path.

    Its responses are short: they are sent once they are whole.
    """

    async def handle(request: HttpRequest, path: str) -> HttpResponse:
        start: Message = {}
        parts: list[bytes] = []

        async def receive() -> Message:
            try:
                return {"type": "http.request", "body": bytes(await request.body.read(sys.maxsize))}
            except ClientDisconnected:
                return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                parts.append(message.get("body", b""))

        try:
            await app(scope_of(request, path), receive, send)
        except ClientDisconnected:
            raise
        except Exception:  # Starlette raises it again after its response
            log.exception("request failed")
            if not start:
                raise
        headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
        return HttpResponse(start["status"], b"".join(parts), headers)

    return handle


def scope_of(request: HttpRequest, path: str) -> Scope:
    """Make the ASGI scope of a request for ``path``."""
    peer = request.peer
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.version,
        "method": request.method,
        "scheme": peer.scheme,
        "path": path,
        "raw_path": request.raw_path,
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": peer.client,
        "server": peer.server,
        REQUEST: request,
    }


def document(value: Any, status: int = 200, headers: Any = None) -> Response:
    """Make the JSON response of a FastAPI route."""
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


def framed(response: HttpResponse) -> Response:
    """Make the response of a FastAPI route."""
    made = Response(bytes(response.body), response.status)
    made.raw_headers += response.headers
    return made
