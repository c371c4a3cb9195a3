"""The ASGI application of the HTTP port, which dispatches to the dialects.

Dialects serve inference as plain ASGI. FastAPI carries the other routes, and documents all of them;
the page is ``GET /docs``.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Collection, Coroutine, Sequence
from functools import cache
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from modelport import __version__
from modelport.gateway.access.context import CURRENT, AccessContext, note_refusal
from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import Internal, MemoryExhausted, ModelportError
from modelport.gateway.protocols import api_pages, http_operations, openapi, rollout_headers
from modelport.gateway.protocols.asgi import Receive, Scope, Send, turn
from modelport.gateway.protocols.authenticated_application import CHALLENGE, CHALLENGE_FIELD
from modelport.gateway.protocols.cross_site_protection import Origins
from modelport.gateway.protocols.http_response import RETRY, document

_RETRY = {name.decode(): value.decode() for name, value in RETRY}
#: The one large response to a POST that carries no tensors.
_INDEX = "/v2/repository/index"
_PARAMETER = re.compile(r"\{[^{}]*\}")
_UNSAFE = re.compile(rb"[/\\\x00-\x1f\x7f]")


class HttpDialect(Protocol):
    """The routes of one protocol, and the format of its errors."""

    #: First segments of the dialect's paths.
    segments: frozenset[str]
    #: Statuses of its errors, besides those of refusals, and their schema.
    statuses: Collection[int] = (500,)
    error: openapi.Schema = openapi.ERROR

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None] | None:
        """Return the handler of an inference request, or None for other paths."""
        return None

    def operation(self, scope: Scope) -> Operation:
        """Return the operation of a request that ``serve`` answers."""
        return Operation.INFER

    def add_routes(self, app: FastAPI) -> None:
        """Add all routes to ``app``; those of ``serve`` only for their documentation.

        Each declares its operation (``http_operations``).
        """

    def refuses(self, raw_path: bytes) -> bool:
        """Whether a POST to this path is refused because of overload; if so, count it."""
        return False

    def refusal(self, status: int, message: str) -> Response:
        """Make the response to a request that has no route."""
        return document({"error": message}, status)

    def failure(self, error: ModelportError) -> Response:
        """Make the response to an error."""


class GuardedDialect:
    """``dialect`` for a gateway with ``--access``: what ``serve`` answers enters its operation."""

    def __init__(self, dialect: HttpDialect, splits: Collection[str] = ()) -> None:
        self.serve_entered, self.splits = dialect.serve, splits
        self.segments = dialect.segments
        self.statuses, self.error = dialect.statuses, dialect.error
        self.operation, self.add_routes = dialect.operation, dialect.add_routes
        self.refusal, self.failure = dialect.refusal, dialect.failure

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None] | None:
        answer, context = self.serve_entered(scope, receive, send), CURRENT.get()
        if answer is None or context is None:
            return answer
        return self._enter(context, answer, scope, receive, send)

    def serve_first(
        self, context: AccessContext, scope: Scope, receive: Receive, send: Send
    ) -> Awaitable[None] | None:
        """Serve a request with this context at once, if ``HttpApplication`` only passes it on.

        It saves the layers in between, and sets ``CURRENT`` if it returns a handler.
        """
        if self.splits or scope["raw_path"].find(b"%") >= 0:
            return None
        answer = self.serve_entered(scope, receive, send)
        if answer is None:
            return None
        entered = context.entered.get(self.operation(scope))
        if entered is None:
            return self._enter(context, answer, scope, receive, send)
        CURRENT.set(entered)
        return answer

    def _enter(
        self,
        context: AccessContext,
        answer: Awaitable[None],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> Awaitable[None]:
        """Return ``answer``, in the request's operation, or the handler of its refusal."""
        try:
            CURRENT.set(context.entering(self.operation(scope)))
        except ModelportError as error:
            if isinstance(answer, Coroutine):
                answer.close()
            return _failure(self, error)(scope, receive, send)
        return answer

    def refuses(self, raw_path: bytes) -> bool:
        """Refuse nothing that is not authenticated; the handler itself does under overload."""
        return False


class HttpApplication:
    """Dispatches requests to ``dialects``, and to ``first``, one of them, before the others.

    A path without a route gets the error of the first dialect of its first segment, or of
    ``first``. ``splits`` are the models with a rollout.
    """

    def __init__(
        self,
        first: HttpDialect,
        dialects: Sequence[HttpDialect],
        origins: Origins,
        splits: Collection[str] = (),
    ) -> None:
        self._first, self._origins = first, origins
        self._splits = splits
        self.refuses = first.refuses
        self._dialects: dict[str, list[HttpDialect]] = {}
        for dialect in dialects:
            for segment in dialect.segments:
                self._dialects.setdefault(segment, []).append(dialect)
        self._framework = self._build(dialects)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if self._splits and scope["type"] == "http":
            send = rollout_headers.exchange(scope, send)
        # ``find`` is ten times as fast as ``in``.
        if scope["type"] == "http" and scope["raw_path"].find(b"%") < 0:
            answer = self._first.serve(scope, receive, send)
            if answer is not None:
                return answer
        return self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._framework(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
        elif scope["method"] == "GET" or scope["path"] == _INDEX:
            try:
                async with turn(scope):
                    await self._dispatch(scope, receive, send)
            except MemoryExhausted as error:
                await self.refuse(scope, receive, send, error)
        else:
            await self._dispatch(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        for dialect in self._dialects_of(scope):
            answer = dialect.serve(scope, receive, send)
            if answer is not None:
                await answer
                return
        await self._framework(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the error response to a path or an origin that is not allowed, or None."""
        if b"%" in scope["raw_path"] and not _plain_segments(scope["raw_path"]):
            return self._dialect_of(scope).refusal(404, "Not Found")
        objection = self._origins.objection(scope)
        if not objection:
            return None
        note_refusal(objection)
        return self._dialect_of(scope).refusal(403, objection)

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """All routes, each with its operation; those of ``serve`` too."""
        return self._framework.routes

    def _dialect_of(self, scope: Scope) -> HttpDialect:
        """The dialect whose errors a path gets."""
        return next(iter(self._dialects_of(scope)), self._first)

    def _dialects_of(self, scope: Scope) -> Sequence[HttpDialect]:
        """The dialects of a path's first segment."""
        return self._dialects.get(scope["path"][1:].partition("/")[0], ())

    async def refuse(
        self, scope: Scope, receive: Receive, send: Send, error: ModelportError
    ) -> None:
        """Answer a request that is not served with ``error``, in the format of its dialect."""
        await self._dialect_of(scope).failure(error)(scope, receive, send)

    def _build(self, dialects: Sequence[HttpDialect]) -> FastAPI:
        app = FastAPI(
            title="modelport",
            version=__version__,
            description="The Open Inference Protocol (v2) as in Triton, and the protocols of "
            "TensorFlow Serving, TorchServe and SageMaker.",
            redirect_slashes=False,
            openapi_url=None,  # ``api_pages`` adds the pages, with their operation
        )

        @app.exception_handler(HTTPException)
        async def refuse(request: Request, error: HTTPException) -> Response:
            response = self._dialect_of(request.scope).refusal(error.status_code, str(error.detail))
            response.headers.update(error.headers or {})
            return self._naming_methods(request, response)

        @app.exception_handler(ModelportError)
        async def fail(request: Request, error: ModelportError) -> Response:
            response = _failure(self._dialect_of(request.scope), error)
            if response.status_code == 503:
                response.headers.update(_RETRY)
            return self._naming_methods(request, response)

        @app.exception_handler(Exception)
        async def internal_error(request: Request, _: Exception) -> Response:
            return self._dialect_of(request.scope).failure(Internal("internal error"))

        for each in dialects:
            each.add_routes(app)
        api_pages.add_routes(app)
        http_operations.check(app.routes)
        describe = app.openapi

        @cache
        def described() -> dict[str, Any]:
            return openapi.with_errors(
                describe(), lambda path: self._dialects_of({"path": path}) or [self._first]
            )

        app.openapi = described  # type: ignore[method-assign]
        return app

    def _naming_methods(self, request: Request, response: Response) -> Response:
        """Add ``Allow`` to a response with status 405: the other methods of the request's path.

        Of several paths that match, it is the one with the most literal text, as in OpenAPI.
        """
        if response.status_code == 405:
            methods: dict[int, set[str]] = {}
            for route in self.routes:
                if route.matches(request.scope)[0] is not Match.NONE:
                    literal = len(_PARAMETER.sub("", getattr(route, "path", "")))
                    methods.setdefault(literal, set()).update(getattr(route, "methods", ()))
            allowed = methods[max(methods)] if methods else set()
            response.headers["allow"] = ", ".join(sorted(allowed - {request.method}))
        return response


def _failure(dialect: HttpDialect, error: ModelportError) -> Response:
    """Make the response to an error; one that asks for a credential says how to send it."""
    response = dialect.failure(error)
    if response.status_code == 401:
        response.raw_headers.append((CHALLENGE_FIELD, CHALLENGE))
    return response


class Delegate(Response):
    """Response of a FastAPI route that is sent by an ASGI handler.

    ``handler`` is called with ``arguments``, scope, receive and send.
    """

    def __init__(self, handler: Any, *arguments: Any) -> None:
        super().__init__()
        self._handler, self._arguments = handler, arguments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(*self._arguments, scope, receive, send)


def _plain_segments(raw_path: bytes) -> bool:
    """Whether percent-decoding leaves each segment one segment, without control characters."""
    segments = map(unquote_to_bytes, raw_path.partition(b"?")[0].split(b"/"))
    return not any(_UNSAFE.search(segment) for segment in segments)
