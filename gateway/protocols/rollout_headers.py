"""Headers of HTTP requests and responses while a rollout runs."""

from __future__ import annotations

from collections.abc import Awaitable

from modelport.gateway.protocols.http_message import Answer, Handler, HttpRequest, HttpResponse
from modelport.gateway.rollout.plan import ROUTE_KEY
from modelport.gateway.rollout.traffic import request_routing
from modelport.gateway.rollout.traffic.request_routing import HEADER, RequestRouting

_ROUTE_KEY = ROUTE_KEY.encode()


def exchange(request: HttpRequest, handler: Handler) -> Answer:
    """Note the route key of a request, and name the version that answered in the response."""
    routing = request_routing.begin(request.fields.get(_ROUTE_KEY, b""))
    answer = handler(request)
    return _named(answer, routing) if isinstance(answer, HttpResponse) else _later(answer, routing)


async def _later(answer: Awaitable[HttpResponse], routing: RequestRouting) -> HttpResponse:
    return _named(await answer, routing)


def _named(response: HttpResponse, routing: RequestRouting) -> HttpResponse:
    if not routing.answered:
        return response
    return response.adding((HEADER, routing.answered.encode()))
