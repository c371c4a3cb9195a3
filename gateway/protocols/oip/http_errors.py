"""Error responses of the Open Inference Protocol over HTTP, which other dialects share."""

from __future__ import annotations

import orjson

from modelport.gateway.errors import Code, Decoupled, ModelportError
from modelport.gateway.protocols.http import HttpDialect
from modelport.gateway.protocols.http_message import HttpRequest, HttpResponse

STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.ALREADY_EXISTS: 400,
    Code.CANCELLED: 400,
    Code.UNKNOWN: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.QUOTA_EXCEEDED: 429,
    Code.INTERNAL: 500,
    Code.UNSUPPORTED: 501,
    Code.UNAVAILABLE: 503,
}
#: Triton's words.
_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"


class OipErrors(HttpDialect):
    """A dialect with these error responses."""

    statuses = frozenset(STATUS.values())

    def failure(self, request: HttpRequest, error: ModelportError) -> HttpResponse:
        message = _DECOUPLED if isinstance(error, Decoupled) else str(error)
        return HttpResponse(STATUS[error.code], orjson.dumps({"error": message}))
