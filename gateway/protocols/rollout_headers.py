"""Headers of HTTP requests and responses while a rollout runs."""

from __future__ import annotations

from collections.abc import Awaitable

from modelport.gateway.protocols.asgi import Message, Scope, Send
from modelport.gateway.rollout.plan import ROUTE_KEY
from modelport.gateway.rollout.traffic import request_routing
from modelport.gateway.rollout.traffic.request_routing import HEADER

_ROUTE_KEY = ROUTE_KEY.encode()


def exchange(scope: Scope, send: Send) -> Send:
    """Note the route key of a request; return a ``send`` that names the version in the response."""
    key = b""
    for name, value in scope["headers"]:
        if name == _ROUTE_KEY:
            key = value
            break
    routing = request_routing.begin(key)

    def named(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start" and routing.answered:
            answered = (HEADER, routing.answered.encode())
            message["headers"] = [*message.get("headers", ()), answered]
        return send(message)

    return named
