"""TorchServe's REST API: predictions, health and management.

It follows ``frontend/server`` of TorchServe 0.12. Every response has ``x-request-id``.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import Depends, FastAPI, Path, Request, Response

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import InvalidArgument, ModelportError
from modelport.gateway.protocols import explainer, request_body
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http import DialectRoute, HttpDialect, PathPart
from modelport.gateway.protocols.http_message import (
    MAX_TRACE,
    TRACE,
    Headers,
    HttpRequest,
    HttpResponse,
)
from modelport.gateway.protocols.http_operations import CONTROL, HEALTH, METADATA
from modelport.gateway.protocols.openapi import BYTES, JSON, error_schema
from modelport.gateway.protocols.prediction.http import (
    PredictionHandler,
    PredictionTarget,
    RequestHeaders,
)
from modelport.gateway.protocols.prediction.predictor import PredictionReply
from modelport.gateway.protocols.request_body import HEADER_LENGTH
from modelport.gateway.protocols.torchserve import errors
from modelport.gateway.protocols.torchserve.management import MAX_PAGE, Management, Registration
from modelport.gateway.wire import json_text

Model = Annotated[str, Path(description="Model name")]
Version = Annotated[str, Path(description="Model version: a number, or a label")]
#: Name and version of a model; the version is empty for the default one.
Selected = tuple[str, str]
_PREDICTIONS, _EXPLANATIONS, _MODELS = "/predictions/", "/explanations/", "/models/"
_NUMBER = re.compile(r"-?[0-9]{1,9}")
_NO_CACHE: Headers = [
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
]
_JSON = [(b"content-type", b"application/json"), *_NO_CACHE]
_ANY_BODY = {"requestBody": {"content": {"*/*": {"schema": {"type": "string"}}}}}


_BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {BYTES: {}}}}
_ACCEPTED: dict[int | str, dict[str, Any]] = {202: {"content": {JSON: {}}}}
_UNHEALTHY: dict[int | str, dict[str, Any]] = {
    500: {"content": {JSON: {"schema": error_schema(status="string")}}}
}


_PARTS = {"model": PathPart(Model), "version": PathPart(Version)}
_PREDICT = """Run the model, or this version of it, on an image, an OIP request, JSON or bytes.

It is the body, or the form field `body` or `data`."""
_EXPLAIN = "Run the model that the parameter `explainer` of this model names."


class TorchServeDialect:
    """TorchServe's headers, and OIP's for the size of the JSON part."""

    def header_length(self, headers: RequestHeaders, size: int) -> int | None:
        stated = headers.get(HEADER_LENGTH)
        return None if stated is None else request_body.header_length(stated, size)

    def headers(self, reply: PredictionReply, request: RequestHeaders) -> Headers:
        found = [(b"content-type", reply.content_type), _request_id(request), *_NO_CACHE]
        if reply.header_length is not None:
            found.append((HEADER_LENGTH, b"%d" % reply.header_length))
        return found


class TorchServeHttp(HttpDialect):
    """The routes of ``/predictions``, ``/explanations``, ``/ping`` and ``/models``."""

    segments = frozenset({"api-description", "explanations", "models", "ping", "predictions"})
    statuses = errors.STATUSES
    error = error_schema(code="integer", type="string", message="string")

    def __init__(self, host: DialectHost) -> None:
        self._manager = host.manager
        self._control = host.control
        self._management = Management(host)
        predictor = errors.TorchServePredictor(host.service, host.manager)
        self._predict = PredictionHandler(
            predictor, TorchServeDialect(), host.max_input_bytes, streams=True
        )
        self.table = self._routes()

    def canonical(self, path: str) -> str:
        # ``/models/?url=``, as clients write
        return path.rstrip("/") if path.startswith(_MODELS) else path

    def _routes(self) -> Sequence[DialectRoute]:
        rows = (
            (_PREDICTIONS, self._find, {"name": "predict", "description": _PREDICT}),
            (_EXPLANATIONS, self._find_explainer, {"name": "explain", "description": _EXPLAIN}),
        )
        said = {"responses": _BYTES, "openapi_extra": _ANY_BODY, "tags": ["torchserve"]}
        return [
            DialectRoute(
                method,
                prefix + model,
                Operation.INFER,
                partial(self._answer, find),
                {**named, **said},
                _PARTS,
            )
            for model in ("{model}", "{model}/{version}")
            for prefix, find, named in rows
            for method in ("POST", "PUT")
        ]

    def _answer(
        self, find: Callable[..., PredictionTarget], name: str, version: str, request: HttpRequest
    ) -> Awaitable[HttpResponse]:
        return self._predict(partial(find, name, version), request)

    def _find(self, name: str, version: str, _: RequestHeaders) -> PredictionTarget:
        """Check the model before the body, as TorchServe does."""
        number = errors.known_version(self._manager, name, version)
        return PredictionTarget(name, number, errors.label_of(version))

    def _find_explainer(self, name: str, version: str, _: RequestHeaders) -> PredictionTarget:
        number = errors.known_version(self._manager, name, version)
        return PredictionTarget(explainer.name_of(self._manager, name, number))

    def refusal(self, request: HttpRequest, status: int, message: str) -> HttpResponse:
        document = errors.refusal(status, message)
        return HttpResponse(status, _pretty(document), [*_JSON, _request_id(request.fields)])

    def failure(self, request: HttpRequest, error: ModelportError) -> HttpResponse:
        status, document = errors.document(error)
        return HttpResponse(status, _pretty(document), [*_JSON, _request_id(request.fields)])

    # -- everything but predictions --------------------------------------------------------------

    def add_routes(self, app: FastAPI) -> None:
        management = self._management

        @app.get("/ping", dependencies=HEALTH, tags=["torchserve"], responses=_UNHEALTHY)
        @app.post("/ping", dependencies=HEALTH, tags=["torchserve"], responses=_UNHEALTHY)
        async def ping(request: Request) -> Response:
            """Readiness, for TorchServe and SageMaker."""
            ready = await self._control.ready()
            health = {"status": "Healthy" if ready else "Unhealthy"}
            return _answer(health, request, 200 if ready else 500)

        @app.options("/", dependencies=METADATA, tags=["torchserve"])
        @app.get("/api-description", dependencies=METADATA, include_in_schema=False)
        async def api_description(request: Request) -> Response:
            """This API as an OpenAPI document."""
            return _answer(app.openapi(), request)

        @app.get("/models", tags=["torchserve"], dependencies=METADATA)
        async def list_models(request: Request) -> Response:
            """Models that are served; `limit` and `next_page_token` select a page."""
            limit = _number(request, "limit", MAX_PAGE)
            page = management.list_models(limit, _number(request, "next_page_token", 0))
            return _answer(page, request)

        @app.post("/models", tags=["torchserve"], dependencies=CONTROL)
        async def register_model(request: Request) -> Response:
            """Load a model of the repository (`--model-control-mode explicit`); `url` names it.

            It is served as `model_name`.
            """
            status = await management.register(await self._registration(request))
            return _answer({"status": status}, request)

        self._add_model_routes(app, "{model}", _select)
        self._add_model_routes(app, "{model}/{version}", _select_version)

        @app.put("/models/{model}/{version}/set-default", tags=["torchserve"], dependencies=CONTROL)
        async def set_default(model: Model, version: Version, request: Request) -> Response:
            """Make this version the default for requests without a version."""
            return _answer({"status": await management.set_default(model, version)}, request)

    def _add_model_routes(self, app: FastAPI, model: str, select: Callable[..., Selected]) -> None:
        """Add the routes of a model, or of one version of it; ``select`` reads the path."""
        management = self._management
        predictions, models = _PREDICTIONS + model, _MODELS + model

        @app.options(predictions, dependencies=METADATA, tags=["torchserve"])
        async def prediction_api(
            request: Request, selected: Selected = Depends(select)
        ) -> Response:
            """OpenAPI document for predictions with a served model, or with this version."""
            errors.known_version(self._manager, *selected)
            api = app.openapi()
            return _answer({**api, "paths": {predictions: api["paths"][predictions]}}, request)

        @app.get(models, tags=["torchserve"], dependencies=METADATA)
        async def describe(request: Request, selected: Selected = Depends(select)) -> Response:
            """Describe the default version, one version, or `all`.

            With `customized=true` also its inputs and outputs.
            """
            customized = _is_set(request, "customized")
            return _answer(await management.describe(*selected, customized), request)

        @app.put(models, tags=["torchserve"], dependencies=CONTROL, responses=_ACCEPTED)
        async def scale_workers(request: Request, selected: Selected = Depends(select)) -> Response:
            """Change the number of instances (`--model-control-mode explicit`)."""
            name, version = selected
            version = version or request.query_params.get("model_version", "")
            minimum = _number(request, "min_worker", 1)
            maximum = _number(request, "max_worker", minimum)
            status = await management.scale(name, version, minimum, maximum)
            if _is_set(request, "synchronous"):
                return _answer({"status": status}, request)
            return _answer({"status": "Processing worker updates..."}, request, 202)

        @app.delete(models, tags=["torchserve"], dependencies=CONTROL)
        async def unregister(request: Request, selected: Selected = Depends(select)) -> Response:
            """Unload a version that is not the default, or the model with its only version.

            It is unloaded once its requests in flight are done.
            """
            return _answer({"status": await management.unregister(*selected)}, request)

    async def _registration(self, request: Request) -> Registration:
        """Read a registration from the query or a JSON body."""
        body = await request_body.read_control(request)
        given: Any = request.query_params
        if request.headers.get("content-type", "").startswith("application/json"):
            given = json_text.loads(body)
        if not hasattr(given, "get"):
            raise InvalidArgument("the request must be a JSON object")
        texts = {key: given.get(key) for key in ("url", "model_name", "runtime", "handler")}
        for key, value in texts.items():
            if value is not None and type(value) is not str:
                raise InvalidArgument(f"Parameter {key} must be a string.")
        limits = ("startup_timeout", "batch_size", "max_batch_delay", "response_timeout")
        return Registration(
            texts["url"],
            texts["model_name"] or "",
            texts["runtime"] or "",
            _integer(given.get("initial_workers")) or 0,
            handler=texts["handler"] or "",
            **{key: _integer(given.get(key)) for key in limits},
        )


def _select(model: Model) -> Selected:
    return model, ""


def _select_version(model: Model, version: Version) -> Selected:
    return model, version


def _answer(value: Any, request: Any, status: int = 200) -> Response:
    response = Response(_pretty(value), status, media_type="application/json")
    headers = dict(request.scope["headers"]) if request else {}
    response.raw_headers += [_request_id(headers), *_NO_CACHE]
    return response


def _pretty(value: Any) -> bytes:
    """Encode JSON indented, as TorchServe does."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _request_id(headers: RequestHeaders) -> tuple[bytes, bytes]:
    return TRACE, headers.get(TRACE, b"")[:MAX_TRACE] or str(uuid.uuid4()).encode()


def _number(request: Request, key: str, default: int) -> int:
    number = _integer(request.query_params.get(key))
    return default if number is None else number


def _integer(value: Any) -> int | None:
    """Parse an integer; TorchServe ignores values that are not numbers."""
    text = str(value)
    return int(text) if _NUMBER.fullmatch(text) else None


def _is_set(request: Request, key: str) -> bool:
    return request.query_params.get(key, "").lower() == "true"
