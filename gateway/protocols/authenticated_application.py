"""Authentication in front of an ASGI application, before a request's body is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from modelport.gateway.access.access import Access
from modelport.gateway.access.context import CURRENT, AccessContext
from modelport.gateway.access.credential_headers import fields
from modelport.gateway.access.principal import ConnectionIdentity
from modelport.gateway.errors import (
    ModelportError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from modelport.gateway.protocols.asgi import (
    HEAD_NOTES,
    App,
    Message,
    Receive,
    Scope,
    Send,
    as_method,
)

#: Key of the ``ConnectionIdentity`` in the scope's extensions.
CONNECTION = "modelport.connection"
Headers = Sequence[tuple[bytes, bytes]]
#: Sends the response to a request that is refused.
Refuse = Callable[[Scope, Receive, Send, ModelportError], Awaitable[None]]
#: The field of a response with status 401 (RFC 6750).
CHALLENGE_FIELD = b"www-authenticate"
CHALLENGE = b'Bearer realm="modelport"'
_INVALID = CHALLENGE + b', error="invalid_token"'


class FirstDialect(Protocol):
    """The part of ``GuardedDialect`` that serves requests which need not pass all layers."""

    splits: Collection[str]

    def serve_first(
        self, context: AccessContext, scope: Scope, receive: Receive, send: Send
    ) -> Awaitable[None] | None: ...

    def serve_entered(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None] | None:
        """Serve a request whose context has entered its operation."""


class _HeadDecision(NamedTuple):
    """The decision about a head, which holds while its ``credential`` is kept with ``context``."""

    credential: tuple[bytes, ...]
    context: AccessContext
    #: The context in the request's operation, and what serves the request.
    entered: AccessContext
    serve: Callable[[Scope, Receive, Send], Awaitable[None] | None]


#: Key of a ``_HeadDecision`` in the notes of a head.
_DECISION = "access"


def authenticated(
    app: App, access: Access, refuse: Refuse, first: FirstDialect | None = None
) -> App:
    """Make an application that sets ``context.CURRENT`` in the task of each request of ``app``.

    Args:
        refuse: Answers a request whose credential is wrong.
        first: Serves the requests that need not pass through ``app``.
    """
    app, kept, is_audited = as_method(app), access.kept, access.audit is not None
    splits: Collection[str] = () if first is None else first.splits

    def authenticating(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return app(scope, receive, send)
        notes = scope.get(HEAD_NOTES)
        if notes and not splits:
            decision: _HeadDecision = notes[_DECISION]
            known, known_context, entered, serve = decision
            if kept.get(known) is known_context:
                CURRENT.set(entered)
                answer = serve(scope, receive, send)
                if answer is not None:
                    return answer
        headers = scope["headers"]
        credential = fields(headers)
        context = kept.get(credential)
        if context is None or context.caller.has_quota or is_audited:
            try:
                context = access.authenticate(headers, _connection(scope), credential)
            except (Unauthenticated, Unavailable) as error:
                more = [(CHALLENGE_FIELD, _INVALID)] if isinstance(error, Unauthenticated) else []
                return refuse(scope, receive, _adding(send, lambda: more), error)
            if context.caller.has_quota and context.record is not None:
                record = context.record
                send = _adding(send, lambda: record.response_headers)
        if first is not None:
            answer = first.serve_first(context, scope, receive, send)
            if answer is not None:
                if notes is not None:
                    _note(notes, credential, context, first)
                return answer
        CURRENT.set(context)
        return app(scope, receive, send)

    return authenticating


def _note(
    notes: dict[str, object],
    credential: tuple[bytes, ...],
    context: AccessContext,
    first: FirstDialect,
) -> None:
    """Note the decision about the current request, if the next one with its head shares it."""
    entered = CURRENT.get()
    if entered is not None and entered in context.entered.values():
        notes[_DECISION] = _HeadDecision(credential, context, entered, first.serve_entered)


def _connection(scope: Scope) -> ConnectionIdentity:
    """The identity of a request's connection, also on another server than the gateway's own."""
    known: ConnectionIdentity | None = scope.get("extensions", {}).get(CONNECTION)
    client = scope.get("client")
    return known or ConnectionIdentity(client[0] if client else "")


def answering_refusals(app: App, refuse: Refuse) -> App:
    """Wrap ``app`` so that ``refuse`` answers what the caller may not do."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except (Unauthenticated, PermissionDenied) as error:
            fields = [(CHALLENGE_FIELD, CHALLENGE)] if isinstance(error, Unauthenticated) else []
            await refuse(scope, receive, _adding(send, lambda: fields), error)

    return answering


def _adding(send: Send, fields: Callable[[], Headers]) -> Send:
    """Make a ``send`` that adds fields to the response; they replace those of the same name."""

    async def adding(message: Message) -> None:
        if message["type"] == "http.response.start" and (added := fields()):
            names = {name for name, _ in added}
            kept = (field for field in message.get("headers", ()) if field[0] not in names)
            message = {**message, "headers": [*kept, *added]}
        await send(message)

    return adding
