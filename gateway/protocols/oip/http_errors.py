"""Error responses of the Open Inference Protocol over HTTP, which other dialects share."""

from __future__ import annotations

from fastapi import Response

from modelport.gateway.errors import Code, ModelportError
from modelport.gateway.protocols.asgi import Send
from modelport.gateway.protocols.http import HttpDialect
from modelport.gateway.protocols.http_response import document, error_of, refuse

STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.ALREADY_EXISTS: 400,
    Code.CANCELLED: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.QUOTA_EXCEEDED: 429,
    Code.INTERNAL: 500,
    Code.UNSUPPORTED: 501,
    Code.UNAVAILABLE: 503,
}


class OipErrors(HttpDialect):
    """A dialect with these error responses."""

    statuses = frozenset(STATUS.values())

    def failure(self, error: ModelportError) -> Response:
        return document({"error": str(error)}, STATUS[error.code])


async def refuse_failed(send: Send, failure: BaseException) -> None:
    """Send the error response to a request whose handler failed."""
    error = error_of(failure)
    if error is not None:
        await refuse(send, STATUS[error.code], str(error))
