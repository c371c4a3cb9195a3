"""The HTTP API of rollouts, on the listener of the metrics port.

    GET  /v2/rollouts                     the statuses of all rollouts
    POST /v2/rollouts/MODEL               start one: ``rollout_request.RolloutRequest``
    GET  /v2/rollouts/MODEL               the status of the latest one
    POST /v2/rollouts/MODEL/COMMAND       pause, resume, promote or rollback: ``{"reason": ...}``
    GET  /v2/rollouts/MODEL/history       the ended ones
    GET  /v2/rollouts/MODEL/examples      requests with disagreeing answers
    POST /v2/rollouts/MODEL/feedback      labels by request id: ``{"rows": [...]}``

A web page of another origin may change nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from modelport.gateway.access.context import audited, enter, note_refusal
from modelport.gateway.access.guarded_models import (
    AllowedTarget,
    may_see_rollouts,
    rollout_target,
)
from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import Code, ModelportError, NotFound
from modelport.gateway.protocols import request_body
from modelport.gateway.protocols.authentication import challenging
from modelport.gateway.protocols.cross_site_protection import Origins
from modelport.gateway.protocols.http_message import Answer as HttpAnswer
from modelport.gateway.protocols.http_message import HttpRequest, HttpResponse
from modelport.gateway.protocols.http_response import recovering, refusal
from modelport.gateway.repository.scan import is_model_name
from modelport.gateway.rollout.rollout_service import RolloutService
from modelport.gateway.rollout.shared_state.transitions import RolloutCommand

#: Size limit of feedback; other bodies are ``request_body.CONTROL_BYTES`` at most.
FEEDBACK_BYTES = 8 * 1024 * 1024
_STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: 404,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.ALREADY_EXISTS: 409,
    Code.QUOTA_EXCEEDED: 429,
    Code.UNSUPPORTED: 400,
    Code.UNAVAILABLE: 503,
}
#: Takes the model and the body of a request.
Answer = Callable[[str, bytes], Awaitable[Any]]


class RolloutApi:
    """The handler of requests about rollouts."""

    def __init__(self, service: RolloutService, origins: Origins) -> None:
        self._service = service
        self._origins = origins
        self._reads: dict[str, Answer] = {
            "": self._status,
            "history": lambda model, _: service.history(model),
            "examples": lambda model, _: service.examples(model),
        }
        self._commands: dict[str, Answer] = {
            "": service.start,
            "feedback": service.feedback,
            **{each: functools.partial(self._command, each) for each in RolloutCommand},
        }

    def __call__(self, request: HttpRequest) -> HttpAnswer:
        return recovering(self._serve, _failed, request)

    async def _serve(self, request: HttpRequest) -> HttpResponse:
        path, is_command = request.path, request.method == "POST"
        enter(Operation.ROLLOUT)
        answer = self._handler(request.method, *path.split("/")[2:])
        if answer is None:
            text = f"{request.method} is not a method of {path}"
            allow = b", ".join(self._methods(*path.split("/")[3:]))
            return refusal(405, text).adding((b"allow", allow))
        body = b""
        if is_command:
            objection = self._objection(request)
            if objection is not None:
                return refusal(*objection)
            feedback = path.endswith("/feedback")
            limit = FEEDBACK_BYTES if feedback else request_body.CONTROL_BYTES
            body = await request_body.read(request, sys.maxsize, bound=limit)
        document = await (_audited(path, answer, body) if is_command else answer(body))
        return HttpResponse(200, orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS))

    def _objection(self, request: HttpRequest) -> tuple[int, str] | None:
        """The reason why a request may change nothing: a web page may have sent it."""
        objection = self._origins.objection(request)
        if objection:
            note_refusal(objection)
            return 403, objection
        kind = request.fields.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            return 415, "the request needs the header 'content-type: application/json'"
        return None

    def _handler(
        self, method: str, root: str, model: str = "", action: str = "", *more: str
    ) -> Callable[[bytes], Awaitable[Any]] | None:
        """The handler of a request, which takes its body; None: another method.

        Raises:
            NotFound: there is no such route.
        """
        is_known = action in self._reads or action in self._commands
        if root != "rollouts" or more or not is_known or (action and not model):
            raise NotFound("Not Found")
        if not model:
            return self._statuses if method == "GET" else None
        if not is_model_name(model):
            raise NotFound("Not Found")
        target = rollout_target(model)
        if method == "POST":
            answer = self._commands.get(action)
        else:
            answer = self._reads.get(action) if method in ("GET", "HEAD") else None
        return None if answer is None else functools.partial(_stated, target, answer)

    def _methods(self, model: str = "", action: str = "") -> list[bytes]:
        """The methods of a path that ``_handler`` knows."""
        reads = [b"GET", b"HEAD"] if model else [b"GET"]
        return [
            *(reads if action in self._reads else ()),
            *([b"POST"] if model and action in self._commands else ()),
        ]

    async def _statuses(self, _: bytes) -> list[dict[str, Any]]:
        statuses = self._service.statuses()
        return [status for status in statuses if may_see_rollouts(status["plan"]["model"])]

    async def _status(self, model: str, _: bytes) -> dict[str, Any]:
        return self._service.status(model)

    async def _command(self, command: RolloutCommand, model: str, body: bytes) -> dict[str, Any]:
        return await self._service.command(model, command, body)


def _failed(request: HttpRequest, error: ModelportError) -> HttpResponse:
    return challenging(refusal(_STATUS.get(error.code, 500), str(error)))


async def _audited(path: str, answer: Callable[[bytes], Awaitable[Any]], body: bytes) -> Any:
    """Perform a command and write it to the audit log."""
    model, _, action = path.removeprefix("/v2/rollouts/").partition("/")
    with audited(f"rollout {action or 'start'}", model):
        return await answer(body)


async def _stated(target: AllowedTarget, answer: Answer, body: bytes) -> Any:
    with target.stated():
        return await answer(target.name, body)
