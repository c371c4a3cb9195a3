"""HTTP responses of ASGI handlers and of FastAPI's routes."""

from __future__ import annotations

from typing import Any

import orjson
import structlog
from fastapi import Response

from modelport.gateway.protocols.asgi import Send
from modelport.gateway.wire.raw_tensors import Buffer

Headers = list[tuple[bytes, bytes]]

log = structlog.get_logger("modelport.http")

JSON: Headers = [(b"content-type", b"application/json")]
#: Sent with errors that may pass within a second: a full queue, a model that is not READY.
RETRY: Headers = [(b"retry-after", b"1")]
TRY_AGAIN = (429, 503)


def document(value: Any, status: int = 200, headers: Any = None) -> Response:
    """Make the JSON response of a FastAPI route."""
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


async def reply(send: Send, status: int, body: Buffer, headers: Headers) -> None:
    """Send a complete response."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, status: int, message: str) -> None:
    """Send ``{"error": message}``, as the Open Inference Protocol and TensorFlow Serving do."""
    log.debug("request failed", status=status, error=message)
    headers = [*JSON, *RETRY] if status in TRY_AGAIN else JSON
    await reply(send, status, orjson.dumps({"error": message}), headers)
