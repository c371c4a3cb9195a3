"""Authentication in front of an ASGI application, before a request's body is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from modelport.gateway.access.access import Access
from modelport.gateway.access.authentication import combined
from modelport.gateway.access.context import CURRENT, AccessContext
from modelport.gateway.access.principal import ConnectionIdentity
from modelport.gateway.errors import (
    ModelportError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from modelport.gateway.protocols.asgi import App, Message, Receive, Scope, Send

#: Key of the ``ConnectionIdentity`` in the scope's extensions.
CONNECTION = "modelport.connection"
#: Sends the response to a request that is refused.
Refuse = Callable[[Scope, Receive, Send, ModelportError], Awaitable[None]]
_AUTHENTICATE = b"www-authenticate"
_CHALLENGE = b'Bearer realm="modelport"'
_INVALID = _CHALLENGE + b', error="invalid_token"'


class AuthenticatedApplication:
    """Sets ``context.CURRENT`` in the task of each request of ``app``.

    ``refuse`` answers what is refused here, and what ``app`` refuses when it enters an operation.
    """

    def __init__(self, app: App, access: Access, refuse: Refuse) -> None:
        self._app, self._access, self._refuse = app, access, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        response = _AccessResponse(send)
        try:
            headers = combined(scope["headers"])
            response.context = self._access.authenticate(headers, _connection(scope))
            CURRENT.set(response.context)
            await self._app(scope, receive, response.send)
        except (Unauthenticated, PermissionDenied, Unavailable) as error:
            await self._refuse(scope, receive, response.send, error)


class _AccessResponse:
    """Adds the context's fields to a response, and the challenge to one with status 401."""

    __slots__ = ("_send", "context")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.context: AccessContext | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            added = [] if self.context is None else self.context.response_headers
            if message["status"] == 401:
                invalid = self.context is None
                added = [*added, (_AUTHENTICATE, _INVALID if invalid else _CHALLENGE)]
            if added:
                names = {name for name, _ in added}
                kept = (field for field in message.get("headers", ()) if field[0] not in names)
                message = {**message, "headers": [*kept, *added]}
        await self._send(message)


def _connection(scope: Scope) -> ConnectionIdentity:
    found = scope.get("extensions", {}).get(CONNECTION)
    if isinstance(found, ConnectionIdentity):
        return found
    client = scope.get("client")
    return ConnectionIdentity(client[0] if client else "")
