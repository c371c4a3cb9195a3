"""OIP over HTTP: inference, the server's probes, and all other routes of ``/v2``."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Request, Response
from fastapi.params import Depends as Dependency
from starlette.exceptions import HTTPException

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import (
    Code,
    InvalidArgument,
    ModelportError,
    PermissionDenied,
    QueueFull,
    Unauthenticated,
)
from modelport.gateway.protocols import (
    cloud_events,
    explainer,
    request_body,
    response_encoding,
)
from modelport.gateway.protocols.asgi import document
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http import DialectRoute, PathPart
from modelport.gateway.protocols.http_message import (
    Answer,
    Headers,
    HttpRequest,
    HttpResponse,
)
from modelport.gateway.protocols.http_operations import CONTROL, HEALTH, METADATA, STATISTICS
from modelport.gateway.protocols.oip import http_request, http_response, metadata
from modelport.gateway.protocols.oip import parameters as oip_parameters
from modelport.gateway.protocols.oip import schema as oip_schema
from modelport.gateway.protocols.oip.http_errors import OipErrors
from modelport.gateway.protocols.openapi import BYTES, JSON
from modelport.gateway.runtime import offload
from modelport.gateway.telemetry.logs import LOGS
from modelport.gateway.types import Deadline, InferRequest, InferResponse, finished
from modelport.gateway.wire import json_text
from modelport.gateway.wire.deadline_headers import http_deadline
from modelport.gateway.wire.raw_tensors import Buffer

Model = Annotated[str, Path(description="Model name")]
Version = Annotated[str, Path(description="Model version, a positive integer")]
_READY_BODY = {
    "type": "object",
    "required": ["ready"],
    "properties": {"ready": {"type": "boolean"}},
}
#: Responses to inference besides JSON.
_INFERRED: dict[int | str, dict[str, Any]] = {
    200: {"content": {kind: {} for kind in (BYTES, cloud_events.MEDIA_TYPE.decode())}}
}
_MODEL = re.compile(r"/v2/models/([^/]+)(?:/versions/([0-9]+))?/infer", re.ASCII)
#: Longer version numbers are left to ``parse_version``.
_DIGITS = 17
#: The JSON of a request whose tensors behind it are views of the body, and what they are not.
MAX_QUICK_BYTES = 2048
_SLOW = re.compile(rb'BYTES|BOOL|"data"|shared_memory|\\')
_LIVE, _READY = "/v2/health/live", "/v2/health/ready"
#: Bodies of the Open Inference Protocol; Triton sends none.
_PROBES = {
    (_LIVE, True): b'{"live":true}',
    (_READY, True): b'{"ready":true}',
    (_READY, False): b'{"ready":false}',
}
_INFER = """Run the model.

The body is JSON, or JSON and raw tensors (binary tensor data extension).
`Inference-Header-Content-Length` is the size of the JSON part; without it the whole
body is JSON, and with 0 the whole body is the single input's raw tensor."""
_EXPLAIN = "Run the explainer that the model's parameter `explainer` names."
#: Name and version of a model; version 0 is the newest that is READY.
Selected = tuple[str, int]
Served = Callable[..., Awaitable[Response]]


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _select(model: Model) -> Selected:
    return model, 0


def _select_version(model: Model, version: Version) -> Selected:
    if not is_number(version):
        raise HTTPException(404, "Not Found")
    return model, metadata.parse_version(version)


#: The paths of a model and of one of its versions, a suffix of their routes' names, and the
#: dependency that reads the path.
MODEL_PATHS: tuple[tuple[str, str, Callable[..., Selected]], ...] = (
    ("/v2/models/{model}", "", _select),
    ("/v2/models/{model}/versions/{version}", " of a version", _select_version),
)


PARTS = {"model": PathPart(Model), "version": PathPart(Version, "[0-9]+")}


def model_routes(
    ending: str, handler: Callable[..., Answer], description: str, **documented: Any
) -> Iterator[DialectRoute]:
    """The routes for inference with a model and with one of its versions."""
    for path, suffix, _ in MODEL_PATHS:
        said = {"name": ending + suffix, "description": description, "tags": ["inference"]}
        yield DialectRoute(
            "POST", f"{path}/{ending}", Operation.INFER, handler, {**said, **documented}, PARTS
        )


class OipHttp(OipErrors):
    """The dialect of ``/v2``."""

    segments = frozenset({"v2"})

    def __init__(self, host: DialectHost) -> None:
        self._shared = host.shared
        self._service = host.service
        self._manager = host.manager
        self._control = host.control
        self._process = host.process
        self._max_input_bytes = host.max_input_bytes
        self._max_load_bytes = host.max_input_bytes if host.loads_files else None
        self._loads_code = host.loads_code
        self._keys = host.settings.require_signature
        self.table = self._routes()

    def _routes(self) -> Sequence[DialectRoute]:
        health = {"tags": ["health"]}
        unready = {400: {"content": {JSON: {"schema": _READY_BODY}}}}
        live = {"name": "server_live", "description": "200 while the process answers.", **health}
        ready = {
            "name": "server_ready",
            "description": "200 when the server is ready, else 400.",
            "responses": unready,
            **health,
        }
        inference: dict[str, Any] = {
            "response_model": oip_schema.OipInferResponse,
            "responses": _INFERRED,
            "openapi_extra": oip_schema.INFER_BODY,
        }
        return (
            DialectRoute("GET", _LIVE, Operation.HEALTH, self._probe, live),
            DialectRoute("GET", _READY, Operation.HEALTH, self._probe, ready),
            *model_routes("infer", self._infer, _INFER, **inference),
            *model_routes("explain", self._explain, _EXPLAIN, **inference),
        )

    def refuses(self, raw_path: bytes) -> bool:
        """Ask ``InferenceService.refuses`` for a plain path of ``infer``."""
        found = _MODEL.fullmatch(raw_path.decode("ascii", "replace"))
        if found is None or len(found[2] or "") > _DIGITS:
            return False
        return self._service.refuses(found[1], int(found[2] or 0))

    async def _probe(self, request: HttpRequest) -> HttpResponse:
        path = request.path
        good = path == _LIVE or await self._control.ready()
        return HttpResponse(200 if good else 400, _PROBES[path, good])

    # -- infer ----------------------------------------------------------------------------------

    def _explain(self, name: str, version: str, request: HttpRequest) -> Answer:
        number = metadata.parse_version(version)
        return self._infer(explainer.name_of(self._manager, name, number), "", request)

    def _infer(self, name: str, version: str, request: HttpRequest) -> Answer:
        number = metadata.parse_version(version)
        served = self._manager.get(name, number)
        if served.refuses():
            served.statistics.failed(Code.UNAVAILABLE, 0)
            raise QueueFull
        deadline = http_deadline(request.fields)
        bound = served.validator.max_bytes
        if cloud_events.is_event(request.fields):
            return cloud_events.exchange(
                name, request, self._max_input_bytes, deadline, bound,
                partial(self._read, name, number, deadline),
            )  # fmt: skip
        body = request_body.take(request, self._max_input_bytes, deadline, bound)
        if isinstance(body, bytes | memoryview) and len(body) <= offload.INLINE_BYTES:
            return self._run(*self._decode(body, request.fields, name, number), deadline, request)
        return self._read(name, number, deadline, request, body)

    async def _read(
        self,
        name: str,
        number: int,
        deadline: Deadline,
        request: HttpRequest,
        body: Buffer | Awaitable[Buffer],
    ) -> HttpResponse:
        """Answer a request whose body is on its way, or large."""
        if not isinstance(body, bytes | memoryview):
            body = await body
        decode = partial(self._decode, body, request.fields, name, number)
        is_quick = len(body) <= offload.INLINE_BYTES or _holds_views(body, request.fields)
        decoded = decode() if is_quick else await offload.run(decode, deadline)
        return await finished(self._run(*decoded, deadline, request))

    def _run(
        self,
        asked: InferRequest,
        form: http_response.ResponseFormat,
        deadline: Deadline,
        request: HttpRequest,
    ) -> Answer:
        asked.trace = request.trace
        if asked.parameters:
            deadline = oip_parameters.deadline(asked, deadline)
        answer = self._service.infer(asked, deadline)
        accepted = request.fields.get(b"accept-encoding")
        if isinstance(answer, InferResponse) and not http_response.is_large(answer, form):
            encoded = http_response.encode(answer, form)
            return request_body.coded(_response(*encoded), accepted)
        return self._encode(answer, form, deadline, accepted)

    async def _encode(
        self,
        answer: InferResponse | Awaitable[InferResponse],
        form: http_response.ResponseFormat,
        deadline: Deadline,
        accepted: bytes | None,
    ) -> HttpResponse:
        response = await finished(answer)
        if http_response.is_large(response, form):
            work = partial(http_response.encode, response, form)
            encoded = await response_encoding.encode(work, response.outputs, deadline)
        else:
            encoded = http_response.encode(response, form)
        return await finished(request_body.coded(_response(*encoded), accepted))

    def _decode(
        self, body: Buffer, headers: dict[bytes, bytes], name: str, version: int
    ) -> tuple[InferRequest, http_response.ResponseFormat]:
        header_length = len(body)
        stated = headers.get(request_body.HEADER_LENGTH)
        if stated is not None:
            header_length = request_body.header_length(stated, len(body))
            if not header_length:
                validator = self._manager.get(name, version).validator
                spec, shape = validator.raw_input(len(body))
                return http_request.decode_raw(body, spec, shape, name, version)
        return http_request.decode(body, header_length, name, version, self._shared.transfer())

    # -- other routes -----------------------------------------------------------------------------

    def add_routes(self, app: FastAPI) -> None:
        manager, control = self._manager, self._control

        describe = partial(app.get, tags=["metadata"], dependencies=METADATA)

        @describe("/v2/", name="server metadata, with a slash")
        @describe("/v2", response_model=oip_schema.OipServerMetadata)
        async def server_metadata() -> Response:
            """Name, version and supported protocol extensions."""
            return document(metadata.server_metadata(self._shared.regions.allowed))

        @describe("/v2/models", response_model=oip_schema.OipModels)
        async def models() -> Response:
            """Models that are READY, as in KServe."""
            return document({"models": metadata.ready_models(manager)})

        @app.get("/v2/models/stats", tags=["statistics"], dependencies=STATISTICS)
        async def all_statistics() -> Response:
            """Statistics of every model version that has been served."""
            return document(await metadata.model_statistics(manager, control, "", 0))

        for path, suffix, select in MODEL_PATHS:
            self._add_model_routes(app, path, suffix, select)
        self._add_repository_routes(app)
        self._add_settings_routes(app)

    def _add_model_routes(
        self, app: FastAPI, path: str, suffix: str, select: Callable[..., Selected]
    ) -> None:
        """Add the routes of a model, or of one version of it; ``select`` reads the path."""
        manager, control = self._manager, self._control

        def get(
            ending: str, tag: str, name: str, operation: Sequence[Dependency], **declared: Any
        ) -> Callable[[Served], Served]:
            """Return the decorator of a route for GET."""
            return app.get(
                path + ending, tags=[tag], name=name + suffix, dependencies=operation, **declared
            )

        described = oip_schema.OipModelMetadata

        @get("", "metadata", "model metadata", METADATA, response_model=described)
        async def model_metadata(selected: Selected = Depends(select)) -> Response:
            """Versions that are READY, inputs and outputs."""
            return document(metadata.model_metadata(manager, *selected))

        @get("/ready", "health", "model ready", HEALTH)
        async def model_ready(selected: Selected = Depends(select)) -> Response:
            """200 when the model (version) is READY, else 400."""
            try:
                await control.require_ready(*selected)
            except (Unauthenticated, PermissionDenied):
                raise
            except ModelportError as error:
                return document({"error": str(error)}, 400)
            return document({"name": selected[0], "ready": True})

        @get("/config", "metadata", "model config", METADATA)
        async def model_config(selected: Selected = Depends(select)) -> Response:
            """The model configuration, completed."""
            return document(metadata.model_config(manager, *selected))

        @get("/certificate", "metadata", "model certificate", METADATA)
        async def model_certificate(selected: Selected = Depends(select)) -> Response:
            """The proof of `modelport export` about a version, and the key that signed it."""
            served = manager.get(*selected)
            work = partial(metadata.model_certificate, served, self._keys)
            return document(await offload.run(work))

        @get("/stats", "statistics", "model statistics", STATISTICS)
        async def model_statistics(selected: Selected = Depends(select)) -> Response:
            """Counts and cumulative nanoseconds (statistics extension)."""
            return document(await metadata.model_statistics(manager, control, *selected))

    def _add_repository_routes(self, app: FastAPI) -> None:
        control = self._control
        post = partial(app.post, tags=["repository"], openapi_extra=oip_schema.ANY_BODY)
        model_path = "/v2/repository/models/{model}"

        @post("/v2/repository/index", dependencies=METADATA)
        async def repository_index(request: Request) -> Response:
            """Every model version with its state and, if it is not served, the reason."""
            body = await self._json(request)
            ready = body.get("ready", False)
            if type(ready) is not bool:
                raise InvalidArgument("Invalid value for 'ready': expected a boolean")
            return document(await control.index(ready))

        @post(f"{model_path}/load", dependencies=CONTROL, response_class=Response)
        async def repository_load(model: Model, request: Request) -> Response:
            """Load or reload a model (`--model-control-mode explicit`)."""
            body = await request_body.read_control(request, self._max_load_bytes)
            given = await offload.run(partial(_load_request, model, body))
            files = given.model_files(self._loads_code)
            await control.load(model, given.config, files=files)
            return Response(media_type="application/json")

        @post(f"{model_path}/unload", dependencies=CONTROL, response_class=Response)
        async def repository_unload(model: Model, request: Request) -> Response:
            """Unload a model once its requests in flight are done."""
            parameters = (await self._json(request)).get("parameters") or {}
            await metadata.unload(control, model, parameters)
            return Response(media_type="application/json")

    def _add_settings_routes(self, app: FastAPI) -> None:
        process = self._process
        post = partial(app.post, tags=["settings"], openapi_extra=oip_schema.ANY_BODY)

        @app.get("/v2/trace/setting", tags=["settings"], dependencies=METADATA)
        async def trace_settings() -> Response:
            """The settings of traces (trace extension)."""
            return document(process.traces(""))

        @post("/v2/trace/setting", dependencies=CONTROL)
        async def update_trace_settings(request: Request) -> Response:
            """Change settings of traces; null sets one as it was at the start."""
            return document(await process.trace("", await self._json(request)))

        @app.get("/v2/models/{model}/trace/setting", tags=["settings"], dependencies=METADATA)
        async def model_trace_settings(model: Model) -> Response:
            """The settings of traces of a model."""
            return document(process.traces(model))

        @post("/v2/models/{model}/trace/setting", dependencies=CONTROL)
        async def update_model_trace_settings(model: Model, request: Request) -> Response:
            """Change settings of traces of a model; null: as for all models."""
            return document(await process.trace(model, await self._json(request)))

        @app.get("/v2/logging", tags=["settings"], dependencies=METADATA)
        async def log_settings() -> Response:
            """The settings of the log (logging extension)."""
            return document(LOGS.document())

        @post("/v2/logging", dependencies=CONTROL)
        async def update_log_settings(request: Request) -> Response:
            """Change settings of the log."""
            return document(await process.log(await self._json(request)))

    async def _json(self, request: Request) -> dict[str, Any]:
        return _object(await request_body.read_control(request))


def _object(body: bytes) -> dict[str, Any]:
    value = json_text.loads(body) if body.strip() else {}
    if type(value) is not dict:
        raise InvalidArgument("the request must be a JSON object")
    return value


def _load_request(model: str, body: bytes) -> metadata.LoadRequest:
    return metadata.load_request(model, _object(body).get("parameters") or {})


def _holds_views(body: Buffer, fields: dict[bytes, bytes]) -> bool:
    """Whether a large body is short JSON, and tensors behind it that are not copied."""
    stated = fields.get(request_body.HEADER_LENGTH)
    length = 0 if stated is None else request_body.header_length(stated, len(body))
    return 0 < length <= MAX_QUICK_BYTES and _SLOW.search(body, 0, length) is None


def _response(json: Buffer, blobs: list[Buffer]) -> HttpResponse:
    if not blobs:
        return HttpResponse(200, json)
    body, header_length = http_response.joined(json, blobs)
    if not header_length:
        return HttpResponse(200, body)
    headers: Headers = [
        (b"content-type", b"application/octet-stream"),
        (request_body.HEADER_LENGTH, b"%d" % header_length),
    ]
    return HttpResponse(200, body, headers)
