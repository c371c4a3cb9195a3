"""The handler of the HTTP port, which dispatches to the dialects.

A dialect is a table of routes for inference. FastAPI carries the other routes, and documents all of
them; the page is ``GET /docs``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from inspect import Parameter, Signature
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, unquote_to_bytes

import structlog
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from modelport import __version__
from modelport.gateway.access.context import note_refusal
from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import Internal, ModelportError
from modelport.gateway.protocols import (
    api_pages,
    header_rules,
    http_operations,
    openapi,
    rollout_headers,
)
from modelport.gateway.protocols.asgi import REQUEST, framed, handler_of
from modelport.gateway.protocols.authentication import challenging
from modelport.gateway.protocols.cross_site_protection import Origins
from modelport.gateway.protocols.http_message import (
    Answer,
    Handler,
    HttpRequest,
    HttpResponse,
)
from modelport.gateway.protocols.http_response import (
    RETRY,
    TRY_AGAIN,
    Recover,
    recovering,
    refusal,
)
from modelport.gateway.settings import NO_HEADER_RULES, HeaderRules
from modelport.gateway.telemetry import request_record

log = structlog.get_logger("modelport.http")

#: The one large response to a POST that carries no tensors.
_INDEX = "/v2/repository/index"
_PARAMETER = re.compile(r"\{[^{}]*\}")
_UNSAFE = re.compile(rb"[/\\\x00-\x1f\x7f]")
#: Number of cached routes, and the maximum length of their targets.
ROUTES, KEPT_TARGET = 4096, 512


class Route(NamedTuple):
    """The handler of the requests for a method and a path, and its operation."""

    operation: Operation
    handler: Handler


class PathPart(NamedTuple):
    """A part of a path: its type as FastAPI documents it, and the texts that it may be."""

    hint: Any = str
    pattern: str = "[^/]+"


@dataclass(frozen=True)
class DialectRoute:
    """A row of a dialect's table: what answers a method of a path, and how it is documented.

    Attributes:
        path: as in OpenAPI, such as ``/v2/models/{model}/infer``.
        handler: called with the ``parts``, decoded, and the request. A part that the path lacks is
            an empty string.
        documented: keywords of FastAPI's routes: ``name``, ``description``, ``tags`` ...; empty for
            one that is not documented.
    """

    method: str
    path: str
    operation: Operation
    handler: Callable[..., Answer]
    documented: Mapping[str, Any]
    parts: Mapping[str, PathPart] = field(default_factory=dict)
    flags: re.RegexFlag = re.NOFLAG

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        groups = {name: f"(?P<{name}>{part.pattern})" for name, part in self.parts.items()}
        return re.compile(self.path.format_map(groups), self.flags)

    def find(self, path: str) -> Route | None:
        """Return the route of a percent-encoded path; None if the path is of another kind."""
        found = self._pattern.fullmatch(path)
        if found is None:
            return None
        texts = found.groupdict()
        parts = [unquote(texts.get(name, "")) for name in self.parts]
        return Route(self.operation, partial(self.handler, *parts) if parts else self.handler)

    def document(self, app: FastAPI) -> None:
        """Add the route to FastAPI's table, which the OpenAPI document is made of."""

        async def stub(**_: str) -> Response:  # for a path that ``find`` refuses
            raise HTTPException(404, "Not Found")

        parts = [
            Parameter(name, Parameter.KEYWORD_ONLY, annotation=part.hint)
            for name, part in self.parts.items()
            if f"{{{name}}}" in self.path
        ]
        stub.__signature__ = Signature(parts)  # type: ignore[attr-defined]
        operation = http_operations.declares(self.operation)
        app.add_api_route(
            self.path, stub, methods=[self.method], dependencies=operation, **self.documented
        )


class HttpDialect(Protocol):
    """The routes of one protocol, and the format of its errors."""

    #: First segments of the dialect's paths.
    segments: frozenset[str]
    #: Its routes of inference, and others that FastAPI does not serve.
    table: Sequence[DialectRoute] = ()
    #: Statuses of its errors, besides those of refusals, and their schema.
    statuses: Collection[int] = (500,)
    error: openapi.Schema = openapi.ERROR

    def route(self, method: str, path: str) -> Route | None:
        """Return the route of the table for a request; ``path`` is percent-encoded."""
        rows = (row.find(path) for row in self.table if row.method == method)
        return next((found for found in rows if found is not None), None)

    def canonical(self, path: str) -> str:
        """Return the path of a request as the routes have it."""
        return path

    def add_routes(self, app: FastAPI) -> None:
        """Add the other routes to ``app``; each declares its operation (``http_operations``)."""
        return

    def refuses(self, raw_path: bytes) -> bool:
        """Whether a POST to this path is refused because of overload; if so, count it."""
        return False

    def refusal(self, request: HttpRequest, status: int, message: str) -> HttpResponse:
        """Make the response to a request that has no route."""
        return refusal(status, message)

    def failure(self, request: HttpRequest, error: ModelportError) -> HttpResponse:
        """Make the response to an error."""


class HttpApplication:
    """Dispatches requests to ``dialects``.

    A path without a route gets the error of the first dialect of its first segment, or of the first
    of all. ``splits`` are the models with a rollout, ``rules`` those about header fields.
    """

    def __init__(
        self,
        dialects: Sequence[HttpDialect],
        origins: Origins,
        splits: Collection[str] = (),
        rules: HeaderRules = NO_HEADER_RULES,
    ) -> None:
        self._first, self._origins = dialects[0], origins
        self._rules = rules if any(rules) else None
        self._splits = splits
        self._dialects: dict[str, list[HttpDialect]] = {}
        for dialect in dialects:
            for segment in dialect.segments:
                self._dialects.setdefault(segment, []).append(dialect)
        self._api = self._build(dialects)
        self._framework = handler_of(self._api)
        self._kept_route = lru_cache(ROUTES)(self._route)

    def __call__(self, request: HttpRequest) -> Answer:
        """Answer ``request``."""
        if self._rules is not None:
            header_rules.begin(self._rules, request)
        if self._splits:
            return rollout_headers.exchange(request, self._answer)
        return self._answer(request)

    def _answer(self, request: HttpRequest) -> Answer:
        target = request.raw_path
        route = self._kept_route if len(target) <= KEPT_TARGET else self._route
        operation, handler, recover = route(request.method, target)
        return recovering(handler, recover, request, operation)

    def _route(self, method: str, target: bytes) -> tuple[Operation | None, Handler, Recover]:
        """Return what answers a request, and what makes the response to an error.

        FastAPI's routes enter their operation themselves.
        """
        path = target.decode("ascii")
        dialects = self._dialects_of(unquote(path)) or [self._first]
        for dialect in dialects:
            path = dialect.canonical(path)
        if target.find(b"%") >= 0 and not _plain_segments(target):
            return None, partial(_not_found, dialects[0]), partial(_failed, dialects[0])
        for dialect in dialects:
            route = dialect.route(method, path)
            if route is not None:
                return *route, partial(_failed, dialect)
        serve = partial(self._serve, dialects[0], unquote(path))
        return None, serve, partial(_failed, dialects[0])

    async def _serve(self, dialect: HttpDialect, path: str, request: HttpRequest) -> HttpResponse:
        """Have FastAPI answer, which knows the request's path as ``path``."""
        objection = self._origins.objection(request)
        if objection:
            note_refusal(objection)
            return dialect.refusal(request, 403, objection)
        if request.method != "GET" and path != _INDEX:
            return await self._framework(request, path)
        async with request.peer.memory.turn():
            return await self._framework(request, path)

    def refuses(self, raw_path: bytes) -> bool:
        """Whether a POST to this path is refused because of overload; if so, count it."""
        return self._first.refuses(raw_path)

    def refuse(self, request: HttpRequest, error: ModelportError) -> HttpResponse:
        """Make the response to a request that is not served, in the format of its dialect."""
        return _failed(self._dialect_of(request.path), request, error)

    def row(self, method: str, target: bytes) -> tuple[HttpDialect, DialectRoute | None]:
        """The dialect of a request, and the row of its table; None: FastAPI serves it."""
        path = target.decode("latin-1")
        dialects = self._dialects_of(unquote(path)) or [self._first]
        for dialect in dialects:
            path = dialect.canonical(path)
        for dialect in dialects:
            for row in dialect.table:
                if row.method == method and row.find(path) is not None:
                    return dialect, row
        return dialects[0], None

    def fail(self, request: HttpRequest, error: ModelportError) -> HttpResponse:
        """Make the response to an error on a path that is no dialect's, in the first one's format.

        A platform may choose a path that a dialect has, too.
        """
        return _failed(self._first, request, error)

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """All routes, each with its operation; those of the dialects too."""
        return self._api.routes

    def _dialect_of(self, path: str) -> HttpDialect:
        """The dialect whose errors a path gets."""
        return next(iter(self._dialects_of(path)), self._first)

    def _dialects_of(self, path: str) -> Sequence[HttpDialect]:
        """The dialects of a path's first segment."""
        return self._dialects.get(path[1:].partition("/")[0], ())

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
            dialect = self._dialect_of(request.url.path)
            found = dialect.refusal(request.scope[REQUEST], error.status_code, str(error.detail))
            response = framed(found)
            response.headers.update(error.headers or {})
            return self._naming_methods(request, response)

        @app.exception_handler(ModelportError)
        async def fail(request: Request, error: ModelportError) -> Response:
            dialect = self._dialect_of(request.url.path)
            response = framed(_failed(dialect, request.scope[REQUEST], error))
            return self._naming_methods(request, response)

        @app.exception_handler(Exception)
        async def internal_error(request: Request, _: Exception) -> Response:
            dialect, error = self._dialect_of(request.url.path), Internal("internal error")
            return framed(_failed(dialect, request.scope[REQUEST], error))

        for each in dialects:
            for row in each.table:
                if row.documented:
                    row.document(app)
            each.add_routes(app)
        api_pages.add_routes(app)
        http_operations.check(app.routes)
        describe = app.openapi

        @cache
        def described() -> dict[str, Any]:
            return openapi.with_errors(
                describe(), lambda path: self._dialects_of(path) or [self._first]
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


def _not_found(dialect: HttpDialect, request: HttpRequest) -> HttpResponse:
    return dialect.refusal(request, 404, "Not Found")


def _failed(dialect: HttpDialect, request: HttpRequest, error: ModelportError) -> HttpResponse:
    """Make the response to an error; it says how to send a credential, and when to try again."""
    response = dialect.failure(request, error)
    record = request_record.CURRENT.get()
    if record is not None:
        record.failed(str(error))
    log.debug("request failed", status=response.status, error=str(error))
    return challenging(response.adding(*RETRY) if response.status in TRY_AGAIN else response)


def _plain_segments(target: bytes) -> bool:
    """Whether percent-decoding leaves each segment one segment, without control characters."""
    return not any(_UNSAFE.search(unquote_to_bytes(segment)) for segment in target.split(b"/"))
