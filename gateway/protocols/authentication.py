"""Authentication in front of a handler, before a request's body is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from modelport.gateway.access.access import Access
from modelport.gateway.access.context import CURRENT, AccessRecord
from modelport.gateway.access.credential_headers import fields
from modelport.gateway.errors import ModelportError, Unauthenticated, Unavailable
from modelport.gateway.protocols.http_message import Answer, Handler, HttpRequest, HttpResponse
from modelport.gateway.telemetry import request_record

#: Makes the response to a request that is refused.
Refuse = Callable[[HttpRequest, ModelportError], HttpResponse]
#: The field of a response with status 401 (RFC 6750).
CHALLENGE_FIELD = b"www-authenticate"
CHALLENGE = b'Bearer realm="modelport"'
_INVALID = CHALLENGE + b', error="invalid_token"'


def authenticated(handler: Handler, access: Access, refuse: Refuse) -> Handler:
    """Make a handler that sets ``context.CURRENT`` for each request of ``handler``.

    Args:
        refuse: Answers a request whose credential is wrong.
    """
    kept, is_audited = access.kept, access.audit is not None

    def authenticating(request: HttpRequest) -> Answer:
        headers = request.headers
        credential = fields(headers)
        context = kept.get(credential)
        if context is None or context.caller.has_quota or is_audited:
            try:
                context = access.authenticate(headers, request.peer.identity, credential)
            except Unauthenticated as error:
                return refuse(request, error).adding((CHALLENGE_FIELD, _INVALID))
            except Unavailable as error:
                return refuse(request, error)
        CURRENT.set(context)
        observed = request_record.CURRENT.get()
        if observed is not None:
            observed.caller = context.principal.name
        answer = handler(request)
        record = context.record
        if record is None or not context.caller.has_quota:
            return answer
        if isinstance(answer, HttpResponse):
            return answer.adding(*record.response_headers)
        return _adding(answer, record)

    return authenticating


def challenging(response: HttpResponse) -> HttpResponse:
    """Have a response with status 401 say how to send a credential."""
    if response.status != 401:
        return response
    return response.adding((CHALLENGE_FIELD, CHALLENGE))


async def _adding(answer: Awaitable[HttpResponse], record: AccessRecord) -> HttpResponse:
    return (await answer).adding(*record.response_headers)
