"""Google Vertex AI's container contract: two routes whose paths the platform chooses.

It follows Triton's ``vertex_ai_server.cc``. ``AIP_PREDICT_ROUTE`` predicts with the default model;
the header ``X-Vertex-Ai-Triton-Redirect`` redirects the request to another route of the server.
Only the inference and read-only routes of ``_REDIRECTS`` are allowed.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from modelport.gateway.access.context import enter, note_refusal
from modelport.gateway.access.operations import Operation
from modelport.gateway.protocols import rollout_headers
from modelport.gateway.protocols.asgi import App, Receive, Scope, Send
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http_response import JSON, reply
from modelport.gateway.protocols.prediction.http import (
    PredictionTarget,
    RequestHeaders,
    platform_handler,
)
from modelport.gateway.protocols.sagemaker import only_model
from modelport.gateway.settings import VertexAi

MEDIA_TYPE = b"application/vnd.vertex-ai-triton"
DEFAULT_MODEL_FLAG = "--vertex-ai-default-model"
_REDIRECT = b"x-vertex-ai-triton-redirect"
_NOT_ALLOWED = "the redirect is not allowed"
_MODEL = r"v2/models/[^/]+(?:/versions/[0-9]+)?"
#: Allowed redirects and their methods.
_REDIRECTS = (
    (re.compile(rf"{_MODEL}/(?:infer|generate|generate_stream)"), "POST"),
    (re.compile(r"v2/repository/index"), "POST"),
    (re.compile(rf"{_MODEL}(?:/ready|/config|/stats)?"), "GET"),
    (re.compile(r"v2(?:/health/(?:live|ready)|/models/stats)?"), "GET"),
)


class VertexApplication:
    """Adds the two routes to ``app``."""

    def __init__(self, app: App, host: DialectHost, settings: VertexAi) -> None:
        self._app = app
        self._splits = host.service.splits
        self._manager = host.manager
        self._control = host.control
        self._settings = settings
        self._predict = platform_handler(host, MEDIA_TYPE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else None
        if path == self._settings.health_route:
            enter(Operation.HEALTH)
            allowed = scope["method"] in ("GET", "HEAD")
            status = (200 if await self._control.ready() else 400) if allowed else 405
            await reply(send, status, b"", [] if allowed else [(b"allow", b"GET, HEAD")])
        elif path == self._settings.predict_route:
            await self._redirect_or_predict(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _redirect_or_predict(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            headers = [*JSON, (b"allow", b"POST")]
            await reply(send, 405, b'{"error":"Method Not Allowed"}', headers)
            return
        wanted = [value for name, value in scope["headers"] if name == _REDIRECT]
        if not wanted:
            enter(Operation.INFER)
            if self._splits:
                send = rollout_headers.exchange(scope, send)
            await self._predict(self._find, scope, receive, send)
            return
        target = wanted[0].decode("latin-1")
        for pattern, method in _REDIRECTS:
            if len(wanted) == 1 and pattern.fullmatch(target):
                # The target is percent-encoded, and ``app`` checks it like any path.
                inner = {
                    **scope,
                    "method": method,
                    "path": "/" + unquote(target),
                    "raw_path": b"/" + wanted[0],
                    "query_string": b"",
                    "headers": [pair for pair in scope["headers"] if pair[0] != _REDIRECT],
                }
                await self._app(inner, receive, send)
                return
        note_refusal(_NOT_ALLOWED)
        await reply(send, 403, b'{"error":"%b"}' % _NOT_ALLOWED.encode(), JSON)

    def _find(self, _: RequestHeaders) -> PredictionTarget:
        default = self._settings.default_model
        return PredictionTarget(only_model(self._manager, default, DEFAULT_MODEL_FLAG))
