"""HTTP responses of ASGI handlers and of FastAPI's routes."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import structlog
from fastapi import Response

from modelport.gateway.errors import Internal, ModelportError, Unavailable
from modelport.gateway.protocols.asgi import Send
from modelport.gateway.protocols.request_body import ClientDisconnected
from modelport.gateway.wire.raw_tensors import Buffer

Headers = list[tuple[bytes, bytes]]

log = structlog.get_logger("modelport.http")

JSON: Headers = [(b"content-type", b"application/json")]
#: Sent with errors that may pass within a second: a full queue, a model that is not READY.
RETRY: Headers = [(b"retry-after", b"1")]
TRY_AGAIN = (429, 503)
#: Whatever may end the handler of a request.
FAILURES = (Exception, asyncio.CancelledError)


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


def error_of(failure: BaseException) -> ModelportError | None:
    """Return the error to send for ``failure``, one of ``FAILURES``; None if the client is gone.

    Call it where the failure is caught: an unexpected one is logged.
    """
    if isinstance(failure, ModelportError):
        return failure
    if isinstance(failure, ClientDisconnected):
        return None
    if isinstance(failure, asyncio.CancelledError):  # at the end of the exit timeout
        return Unavailable("the server is shutting down")
    log.exception("request failed")
    return Internal("internal error")
