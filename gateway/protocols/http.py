"""The ASGI application of the HTTP port: every dialect, told apart by a path's first segment.

What is hot a dialect serves itself, as plain ASGI, ahead of the framework. FastAPI carries the rest
and documents all of it; ``GET /docs`` is the page.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from modelport import __version__
from modelport.gateway.errors import Internal, ModelportError
from modelport.gateway.protocols.asgi import Receive, Scope, Send
from modelport.gateway.protocols.http_reply import RETRY
from modelport.gateway.protocols.origins import Origins

_RETRY = {name.decode(): value.decode() for name, value in RETRY}
_UNSAFE = re.compile(rb"[/\\\x00-\x1f\x7f]")


class HttpDialect(Protocol):
    """One family of paths and the form of its errors."""

    #: The first segments of its paths.
    segments: frozenset[str]

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None] | None:
        """What answers, if the path is one of the hot ones."""

    def add_routes(self, app: FastAPI) -> None:
        """Every route, the hot ones included: they are documented like the others."""

    def refusal(self, status: int, message: str) -> Response:
        """What says no before any model is concerned: no such path, wrong method."""

    def failure(self, error: ModelportError) -> Response:
        """``error`` with its status, in the dialect's form."""


class Hot(HttpDialect, Protocol):
    """A dialect whose requests may be refused unread."""

    def refuses(self, raw_path: bytes) -> bool:
        """Whether a POST to this path is refused for an overload; it is then counted."""


class HttpApplication:
    """``first``, one of ``dialects``, is asked ahead of all; its errors answer for other paths.

    Of dialects that share a first segment the first one's errors answer for paths that are no
    route.
    """

    def __init__(self, first: Hot, dialects: Sequence[HttpDialect], origins: Origins) -> None:
        self._first, self._origins = first, origins
        self.refuses = first.refuses
        self._dialects: dict[str, list[HttpDialect]] = {}
        for dialect in dialects:
            for segment in dialect.segments:
                self._dialects.setdefault(segment, []).append(dialect)
        self._framework = self._build(dialects)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # ``find``: ``in`` takes ten times as long.
        if scope["type"] == "http" and scope["raw_path"].find(b"%") < 0:
            answer = self._first.serve(scope, receive, send)
            if answer is not None:
                return answer
        return self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            dialects = self._dialects.get(scope["path"][1:].partition("/")[0], ())
            refusal = self._refusal(scope, dialects[0] if dialects else self._first)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
            for dialect in dialects:
                answer = dialect.serve(scope, receive, send)
                if answer is not None:
                    await answer
                    return
        await self._framework(scope, receive, send)

    def _refusal(self, scope: Scope, dialect: HttpDialect) -> Response | None:
        """What says no before any route is looked up."""
        if b"%" in scope["raw_path"] and not _plain_segments(scope["raw_path"]):
            return dialect.refusal(404, "Not Found")
        objection = self._origins.objection(scope)
        return dialect.refusal(403, objection) if objection else None

    def _build(self, dialects: Sequence[HttpDialect]) -> FastAPI:
        app = FastAPI(
            title="modelport",
            version=__version__,
            description="The Open Inference Protocol (v2) as Triton speaks it, and the dialects of "
            "TensorFlow Serving, TorchServe and SageMaker.",
            redirect_slashes=False,
        )

        def dialect(request: Request) -> HttpDialect:
            segment = request.scope["path"][1:].partition("/")[0]
            return next(iter(self._dialects.get(segment, ())), self._first)

        @app.exception_handler(HTTPException)
        async def refuse(request: Request, error: HTTPException) -> Response:
            response = dialect(request).refusal(error.status_code, str(error.detail))
            response.headers.update(error.headers or {})
            return response

        @app.exception_handler(ModelportError)
        async def fail(request: Request, error: ModelportError) -> Response:
            response = dialect(request).failure(error)
            if response.status_code == 503:
                response.headers.update(_RETRY)
            return response

        @app.exception_handler(Exception)
        async def break_down(request: Request, _: Exception) -> Response:
            return dialect(request).failure(Internal("internal error"))

        for each in dialects:
            each.add_routes(app)
        describe = app.openapi

        def openapi() -> dict[str, Any]:
            """FastAPI's description without its own 422, which this API never answers."""
            schema = describe()
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            return schema

        app.openapi = openapi  # type: ignore[method-assign]
        return app


class Delegate(Response):
    """Lets a documented FastAPI route answer through a plain ASGI handler.

    ``handler`` is called with ``arguments`` and then the scope, receive and send.
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
