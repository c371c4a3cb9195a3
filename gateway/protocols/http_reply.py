"""Replies of plain ASGI handlers."""

from __future__ import annotations

import orjson
import structlog

from modelport.gateway.protocols.asgi import Send
from modelport.gateway.wire.raw import Buffer

Headers = list[tuple[bytes, bytes]]

log = structlog.get_logger("modelport.http")

JSON: Headers = [(b"content-type", b"application/json")]
#: Beside what may well be answered in a second: a full queue, a model that is not READY.
RETRY: Headers = [(b"retry-after", b"1")]
TRY_AGAIN = (429, 503)


async def reply(send: Send, status: int, body: Buffer, headers: Headers) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, status: int, message: str) -> None:
    """``{"error": message}``: the form of the Open Inference Protocol and of TensorFlow Serving."""
    log.debug("request failed", status=status, error=message)
    headers = [*JSON, *RETRY] if status in TRY_AGAIN else JSON
    await reply(send, status, orjson.dumps({"error": message}), headers)
