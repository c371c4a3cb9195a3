"""Google Vertex AI's container contract: two routes whose paths the platform chooses.

It follows Triton's ``vertex_ai_server.cc``. ``AIP_PREDICT_ROUTE`` predicts with the default model;
the header ``X-Vertex-Ai-Triton-Redirect`` redirects the request to another route of the server.
Only the inference and read-only routes of ``_REDIRECTS`` are allowed.
"""

from __future__ import annotations

import re
from functools import partial

from modelport.gateway.access.context import enter, note_refusal
from modelport.gateway.access.operations import Operation
from modelport.gateway.protocols import header_rules, rollout_headers
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http import HttpApplication
from modelport.gateway.protocols.http_message import JSON, Answer, HttpRequest, HttpResponse
from modelport.gateway.protocols.http_response import recovering
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
    """Adds the two routes to ``application``."""

    def __init__(self, application: HttpApplication, host: DialectHost, settings: VertexAi) -> None:
        self._application = application
        self._splits = host.splits
        self._manager = host.manager
        self._control = host.control
        self._settings, self._rules = settings, host.settings.http_headers
        handler = platform_handler(host, MEDIA_TYPE)
        self._predict = partial(handler, self._find)

    def __call__(self, request: HttpRequest) -> Answer:
        header_rules.begin(self._rules, request)
        path = request.path
        if path == self._settings.health_route:
            fail = self._application.fail
            return recovering(self._health, fail, request, Operation.HEALTH)
        if path == self._settings.predict_route:
            return recovering(self._redirect_or_predict, self._application.fail, request)
        return self._application(request)

    async def _health(self, request: HttpRequest) -> HttpResponse:
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(405, b"", [(b"allow", b"GET, HEAD")])
        return HttpResponse(200 if await self._control.ready() else 400, b"", [])

    def _redirect_or_predict(self, request: HttpRequest) -> Answer:
        if request.method != "POST":
            headers = [*JSON, (b"allow", b"POST")]
            return HttpResponse(405, b'{"error":"Method Not Allowed"}', headers)
        wanted = [value for name, value in request.headers if name == _REDIRECT]
        if not wanted:
            enter(Operation.INFER)
            if self._splits:
                return rollout_headers.exchange(request, self._predict)
            return self._predict(request)
        target = wanted[0].decode("latin-1")
        for pattern, method in _REDIRECTS:
            if len(wanted) == 1 and pattern.fullmatch(target):
                # The target is percent-encoded, and ``application`` checks it like any path.
                headers = [pair for pair in request.headers if pair[0] != _REDIRECT]
                inner = HttpRequest(
                    method, b"/" + wanted[0], headers, request.version, request.peer, request.body
                )
                return self._application(inner)
        note_refusal(_NOT_ALLOWED)
        return HttpResponse(403, b'{"error":"%b"}' % _NOT_ALLOWED.encode())

    def _find(self, _: RequestHeaders) -> PredictionTarget:
        default = self._settings.default_model
        return PredictionTarget(only_model(self._manager, default, DEFAULT_MODEL_FLAG))
