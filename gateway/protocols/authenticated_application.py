"""Authentication in front of an ASGI application, before a request's body is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from modelport.gateway.access.access import Access
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
Headers = Sequence[tuple[bytes, bytes]]
#: Sends the response to a request that is refused.
Refuse = Callable[[Scope, Receive, Send, ModelportError], Awaitable[None]]
#: The field of a response with status 401 (RFC 6750).
CHALLENGE_FIELD = b"www-authenticate"
CHALLENGE = b'Bearer realm="modelport"'
_INVALID = CHALLENGE + b', error="invalid_token"'


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
        context = None
        try:
            context = self._access.authenticate(scope["headers"], _connection(scope))
            CURRENT.set(context)
            if context.caller.has_quota:
                send = with_fields(send, context)
            await self._app(scope, receive, send)
        except (Unauthenticated, PermissionDenied, Unavailable) as error:
            challenge = [(CHALLENGE_FIELD, CHALLENGE if context is not None else _INVALID)]
            fields = challenge if isinstance(error, Unauthenticated) else []
            await self._refuse(scope, receive, _adding(send, lambda: fields), error)


def with_fields(send: Send, context: AccessContext) -> Send:
    """Make a ``send`` that adds the context's fields to the response."""
    return _adding(send, lambda: context.response_headers)


def _adding(send: Send, fields: Callable[[], Headers]) -> Send:
    """Make a ``send`` that adds fields to the response; they replace those of the same name."""

    async def adding(message: Message) -> None:
        if message["type"] == "http.response.start" and (added := fields()):
            names = {name for name, _ in added}
            kept = (field for field in message.get("headers", ()) if field[0] not in names)
            message = {**message, "headers": [*kept, *added]}
        await send(message)

    return adding


def _connection(scope: Scope) -> ConnectionIdentity:
    try:
        found: ConnectionIdentity = scope["extensions"][CONNECTION]
    except KeyError:  # another server than the gateway's own
        client = scope.get("client")
        found = ConnectionIdentity(client[0] if client else "")
    return found
