"""OIP over HTTP: inference and the server's probes as plain ASGI, and all routes of ``/v2``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Request, Response
from fastapi.params import Depends as Dependency
from starlette.exceptions import HTTPException

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import (
    Code,
    Decoupled,
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
from modelport.gateway.protocols.asgi import Receive, Scope, Send
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http import Delegate
from modelport.gateway.protocols.http_operations import CONTROL, HEALTH, INFER, METADATA, STATISTICS
from modelport.gateway.protocols.http_response import FAILURES, JSON, document, refuse, reply
from modelport.gateway.protocols.oip import http_request, http_response, metadata, request_template
from modelport.gateway.protocols.oip import parameters as oip_parameters
from modelport.gateway.protocols.oip import schema as oip_schema
from modelport.gateway.protocols.oip.http_errors import OipErrors, refuse_failed
from modelport.gateway.protocols.openapi import BYTES
from modelport.gateway.protocols.openapi import JSON as MEDIA_TYPE
from modelport.gateway.runtime import offload
from modelport.gateway.types import InferRequest
from modelport.gateway.wire import json_text
from modelport.gateway.wire.deadline_headers import http_deadline

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
_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
_PREFIX, _SUFFIX, _VERSIONS = "/v2/models/", "/infer", "/versions/"
#: Number of cached paths, and their maximum length.
TARGETS, KEPT_TARGET = 1024, 512
#: Longer version numbers are left to ``parse_version``.
_DIGITS = 18
#: A look-up of an enum's member calls a function.
_HEALTH, _INFER = Operation.HEALTH, Operation.INFER
_LIVE, _READY = "/v2/health/live", "/v2/health/ready"
_PROBED = frozenset({_LIVE, _READY})
#: Bodies of the Open Inference Protocol; Triton sends none.
_PROBES = {
    (_LIVE, True): b'{"live":true}',
    (_READY, True): b'{"ready":true}',
    (_READY, False): b'{"ready":false}',
}
#: Name and version of a model; version 0 is the newest that is READY.
Selected = tuple[str, int]
Route = Callable[..., Awaitable[Response]]


def _parsed(path: str) -> tuple[str, str] | None:
    """Parse the model and the version of a path of ``infer``, or return None."""
    if not path.startswith(_PREFIX) or not path.endswith(_SUFFIX):
        return None
    name, versions, version = path[len(_PREFIX) : -len(_SUFFIX)].partition(_VERSIONS)
    good = name and "/" not in name and (not versions or is_number(version))
    return (name, version) if good else None


_target = lru_cache(TARGETS)(_parsed)


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


class OipHttp(OipErrors):
    """The dialect of ``/v2``."""

    segments = frozenset({"v2"})

    def __init__(self, host: DialectHost) -> None:
        self._shared = host.shared
        self._service = host.service
        self._manager = host.manager
        self._control = host.control
        self._max_input_bytes = host.max_input_bytes

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None] | None:
        path: str = scope["path"]
        if path in _PROBED and scope["method"] == "GET":
            return self._probe(path, send)
        if scope["method"] == "POST" and path.endswith(_SUFFIX):
            target = (_target if len(path) <= KEPT_TARGET else _parsed)(path)
            if target is not None:
                return self._infer(*target, scope, receive, send)
        return None

    def operation(self, scope: Scope) -> Operation:
        return _HEALTH if scope["path"] in _PROBED else _INFER

    def refuses(self, raw_path: bytes) -> bool:
        """Ask ``InferenceService.refuses`` for a plain path of ``infer``."""
        target = _parsed(raw_path.decode("ascii", "replace"))
        if target is None:
            return False
        name, version = target
        number = int(version) if version and len(version) < _DIGITS else 0
        if version and not number:
            return False
        return self._service.refuses(name, number)

    async def _probe(self, path: str, send: Send) -> None:
        good = path == _LIVE or await self._control.ready()
        await reply(send, 200 if good else 400, _PROBES[path, good], JSON)

    # -- infer ----------------------------------------------------------------------------------

    async def _infer(
        self, name: str, version: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            number = metadata.parse_version(version)
            served = self._manager.get(name, number)
            if served.refuses():
                served.statistics.failed(Code.UNAVAILABLE, 0)
                raise QueueFull
            headers = dict(scope["headers"])
            deadline = http_deadline(headers)
            bound = served.validator.max_bytes
            if cloud_events.is_event(headers):
                receive, send = await cloud_events.exchange(
                    name, headers, receive, send, self._max_input_bytes, deadline, bound
                )
            body = await request_body.read(receive, headers, self._max_input_bytes, deadline, bound)
            if len(body) <= offload.INLINE_BYTES:
                request, form = self._decode(body, headers, name, number)
            else:
                plain = self._glance(body, headers, name, number)
                if plain is None:
                    decode = partial(self._decode, body, headers, name, number)
                    plain = await offload.run(decode, deadline)
                request, form = plain
            trace = headers.get(b"x-request-id")
            if trace:
                request.trace = trace[:128].decode("latin-1")
            deadline = oip_parameters.deadline(request, deadline)
            response = await self._service.infer(request, deadline)
            if http_response.is_large(response, form):
                work = partial(http_response.encode, response, form)
                json, blobs = await response_encoding.encode(work, response.outputs, deadline)
            else:
                json, blobs = http_response.encode(response, form)
        except Decoupled:
            await refuse(send, 501, _DECOUPLED)
        except FAILURES as failure:
            await refuse_failed(send, failure)
        else:
            reply_headers = JSON
            if blobs:
                json, header_length = http_response.joined(json, blobs)
                if header_length:
                    reply_headers = [
                        (b"content-type", b"application/octet-stream"),
                        (request_body.HEADER_LENGTH, b"%d" % header_length),
                    ]
            accepted = headers.get(b"accept-encoding")
            coding = request_body.chosen_coding(accepted, len(json)) if accepted else None
            if coding:
                json = await request_body.compress(json, coding)
                reply_headers = [*reply_headers, (b"content-encoding", coding)]
            await reply(send, 200, json, reply_headers)

    def _glance(
        self, body: bytes, headers: dict[bytes, bytes], name: str, version: int
    ) -> tuple[InferRequest, http_response.ResponseFormat] | None:
        stated = headers.get(request_body.HEADER_LENGTH)
        if stated is None:
            return None
        length = request_body.header_length(stated, len(body))
        return request_template.glance(body, length, name, version) if length else None

    def _decode(
        self, body: bytes, headers: dict[bytes, bytes], name: str, version: int
    ) -> tuple[InferRequest, http_response.ResponseFormat]:
        header_length = len(body)
        stated = headers.get(request_body.HEADER_LENGTH)
        if stated is not None:
            header_length = request_body.header_length(stated, len(body))
            if not header_length:
                validator = self._manager.get(name, version).validator
                spec, shape = validator.raw_input(len(body))
                return http_request.decode_raw(body, spec, shape, name, version)
        plain = request_template.decode(body, header_length, name, version)
        if plain is not None:
            return plain
        return http_request.decode(body, header_length, name, version, self._shared.transfer())

    # -- routes, documented --------------------------------------------------------------------

    def add_routes(self, app: FastAPI) -> None:
        manager, control = self._manager, self._control

        probe = partial(app.get, tags=["health"], dependencies=HEALTH)
        describe = partial(app.get, tags=["metadata"], dependencies=METADATA)

        @probe("/v2/health/live")
        async def server_live() -> Response:
            """200 while the process answers."""
            return document({"live": True})

        @probe(
            "/v2/health/ready", responses={400: {"content": {MEDIA_TYPE: {"schema": _READY_BODY}}}}
        )
        async def server_ready() -> Response:
            """200 when the server is ready, else 400."""
            ready = await control.ready()
            return document({"ready": ready}, 200 if ready else 400)

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

    def _add_model_routes(
        self, app: FastAPI, path: str, suffix: str, select: Callable[..., Selected]
    ) -> None:
        """Add the routes of a model, or of one version of it; ``select`` reads the path."""
        manager, control = self._manager, self._control

        def get(
            ending: str, tag: str, name: str, operation: Sequence[Dependency], **documented: Any
        ) -> Callable[[Route], Route]:
            """Return the decorator of a route for GET."""
            return app.get(
                path + ending, tags=[tag], name=name + suffix, dependencies=operation, **documented
            )

        def post(ending: str) -> Callable[[Route], Route]:
            """Return the decorator of a route for inference."""
            return app.post(
                f"{path}/{ending}",
                tags=["inference"],
                dependencies=INFER,
                name=ending + suffix,
                response_model=oip_schema.OipInferResponse,
                responses=_INFERRED,
                openapi_extra=oip_schema.INFER_BODY,
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

        @get("/stats", "statistics", "model statistics", STATISTICS)
        async def model_statistics(selected: Selected = Depends(select)) -> Response:
            """Counts and cumulative nanoseconds (statistics extension)."""
            return document(await metadata.model_statistics(manager, control, *selected))

        @post("infer")
        async def infer(selected: Selected = Depends(select)) -> Response:
            """Run the model.

            The body is JSON, or JSON and raw tensors (binary tensor data extension).
            `Inference-Header-Content-Length` is the size of the JSON part; without it the whole
            body is JSON, and with 0 the whole body is the single input's raw tensor.
            """
            name, number = selected
            return Delegate(self._infer, name, str(number or ""))

        @post("explain")
        async def explain(selected: Selected = Depends(select)) -> Response:
            """Run the explainer that the model's parameter `explainer` names."""
            return Delegate(self._infer, explainer.name_of(self._manager, *selected), "")

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
            parameters = (await self._json(request)).get("parameters") or {}
            await control.load(model, metadata.load_override(model, parameters))
            return Response(media_type="application/json")

        @post(f"{model_path}/unload", dependencies=CONTROL, response_class=Response)
        async def repository_unload(model: Model, request: Request) -> Response:
            """Unload a model once its requests in flight are done."""
            parameters = (await self._json(request)).get("parameters") or {}
            await metadata.unload(control, model, parameters)
            return Response(media_type="application/json")

    async def _json(self, request: Request) -> dict[str, Any]:
        body = await request_body.read_control(request.receive)
        value = json_text.loads(body) if body.strip() else {}
        if type(value) is not dict:
            raise InvalidArgument("the request must be a JSON object")
        return value
