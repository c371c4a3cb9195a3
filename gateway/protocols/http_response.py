"""Responses to errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import orjson
import structlog

from modelport.gateway.access.context import enter
from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import Internal, ModelportError, Unavailable
from modelport.gateway.protocols.http_message import (
    JSON,
    Answer,
    ClientDisconnected,
    Handler,
    Headers,
    HttpRequest,
    HttpResponse,
)

log = structlog.get_logger("modelport.http")

#: Sent with errors that may pass within a second: a full queue, a model that is not READY.
RETRY: Headers = [(b"retry-after", b"1")]
TRY_AGAIN = (429, 503)
#: Makes the response to an error.
Recover = Callable[[HttpRequest, ModelportError], HttpResponse]


def refusal(status: int, message: str) -> HttpResponse:
    """Make ``{"error": message}``, as the Open Inference Protocol and TensorFlow Serving do."""
    headers = [*JSON, *RETRY] if status in TRY_AGAIN else JSON
    return HttpResponse(status, orjson.dumps({"error": message}), headers)


def recovering(
    handler: Handler, recover: Recover, request: HttpRequest, operation: Operation | None = None
) -> Answer:
    """Call ``handler``, and make the response to the error that it raises, at once or later.

    Args:
        operation: The request's, if the handler does not enter it itself.
    """
    try:
        if operation is not None:
            enter(operation)
        found = handler(request)
    except Exception as failure:
        return recover(request, error_of(failure))
    return found if isinstance(found, HttpResponse) else _recovering(found, recover, request)


async def _recovering(
    answer: Awaitable[HttpResponse], recover: Recover, request: HttpRequest
) -> HttpResponse:
    try:
        return await answer
    except (Exception, asyncio.CancelledError) as failure:
        return recover(request, error_of(failure))


def error_of(failure: BaseException) -> ModelportError:
    """Return the error to send for ``failure``.

    Call it where the failure is caught: an unexpected one is logged.

    Raises:
        ClientDisconnected: Nobody takes a response.
    """
    if isinstance(failure, ModelportError):
        return failure
    if isinstance(failure, ClientDisconnected):
        raise failure
    if isinstance(failure, asyncio.CancelledError):  # at the end of the exit timeout
        return Unavailable("the server is shutting down")
    log.exception("request failed")
    return Internal("internal error")
