"""Headers of HTTP requests and responses while a rollout runs."""

from __future__ import annotations

from modelport.gateway.protocols.asgi import Message, Scope, Send
from modelport.gateway.rollout import request_routing
from modelport.gateway.rollout.plan import ROUTE_KEY
from modelport.gateway.rollout.request_routing import HEADER

_ROUTE_KEY = ROUTE_KEY.encode()


def exchange(scope: Scope, send: Send) -> Send:
    """Note the route key of a request; return a ``send`` that names the version in the response."""
    key = next((value for name, value in scope["headers"] if name == _ROUTE_KEY), b"")
    routing = request_routing.begin(key)

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start" and routing.answered:
            answered = (HEADER, routing.answered.encode())
            message = {**message, "headers": [*message.get("headers", ()), answered]}
        await send(message)

    return named
