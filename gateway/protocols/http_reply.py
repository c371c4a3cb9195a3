"""Replies of plain ASGI handlers, and documents of FastAPI's routes."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Response

from gateway.protocols.asgi import Send

Headers = list[tuple[bytes, bytes]]

JSON: Headers = [(b"content-type", b"application/json")]
#: Beside every 503: try again in a second.
RETRY: Headers = [(b"retry-after", b"1")]


async def reply(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def document(value: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")
