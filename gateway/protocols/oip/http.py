"""OIP over HTTP: routes. The infer route is the hot one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import structlog
from fastapi import Depends, FastAPI, Path, Request, Response
from starlette.exceptions import HTTPException

from gateway.dataplane import DataPlane
from gateway.errors import Code, InvalidArgument, ModelportError
from gateway.lifecycle import Lifecycle
from gateway.protocols import http_body
from gateway.protocols.asgi import Receive, Scope, Send
from gateway.protocols.http import Delegate
from gateway.protocols.http_reply import JSON, document, refuse, reply
from gateway.protocols.oip import documents
from gateway.protocols.oip import json as oip_json
from gateway.protocols.oip import parameters as oip_parameters
from gateway.protocols.oip import schema as oip_schema
from gateway.types import NO_DEADLINE, InferRequest
from gateway.wire import json_text

log = structlog.get_logger("modelport.http")

STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.ALREADY_EXISTS: 400,
    Code.CANCELLED: 400,
    Code.NOT_FOUND: 404,
    Code.INTERNAL: 500,
    Code.UNSUPPORTED: 501,
    Code.UNAVAILABLE: 503,
}
Model = Annotated[str, Path(description="Model name")]
Version = Annotated[str, Path(description="Model version, a positive integer")]
#: A model's name and version; version 0: the newest that is READY.
Selected = tuple[str, int]
_PREFIX, _SUFFIX, _VERSIONS = "/v2/models/", "/infer", "/versions/"


class OipHttp:
    """The dialect of ``/v2``."""

    segments = frozenset({"v2"})

    def __init__(self, dataplane: DataPlane, lifecycle: Lifecycle, max_input_bytes: int) -> None:
        self._dataplane = dataplane
        self._lifecycle = lifecycle
        self._max_input_bytes = max_input_bytes

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None] | None:
        path: str = scope["path"]
        if scope["method"] == "POST" and path.endswith(_SUFFIX) and path.startswith(_PREFIX):
            name, versions, version = path[len(_PREFIX) : -len(_SUFFIX)].partition(_VERSIONS)
            if name and "/" not in name and (not versions or _is_number(version)):
                return self._infer(name, version, scope, receive, send)
        return None

    def refusal(self, status: int, message: str) -> Response:
        return document({"error": message}, status)

    def failure(self, error: ModelportError) -> Response:
        return document({"error": str(error)}, STATUS[error.code])

    # -- infer ----------------------------------------------------------------------------------

    async def _infer(
        self, name: str, version: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            headers = dict(scope["headers"])
            encoding = headers.get(b"content-encoding", b"")
            body = await http_body.read(receive, self._max_input_bytes, encoding)
            request, form = self._decode(body, headers, name, documents.parse_version(version))
            trace = headers.get(b"x-request-id")
            if trace:
                request.trace = trace[:128].decode("latin-1")
            deadline = oip_parameters.deadline(request, NO_DEADLINE)
            response = await self._dataplane.infer(request, deadline)
            json, blobs = oip_json.encode(response, form)
        except ModelportError as error:
            await refuse(send, STATUS[error.code], str(error))
        except http_body.Disconnected:
            pass
        except asyncio.CancelledError:  # the front does it at the end of the exit timeout
            await refuse(send, 503, "the server is shutting down")
        except Exception:
            log.exception("request failed")
            await refuse(send, 500, "internal error")
        else:
            reply_headers = JSON
            if any(map(len, blobs)):
                reply_headers = [
                    (b"content-type", b"application/octet-stream"),
                    (b"inference-header-content-length", b"%d" % len(json)),
                ]
                json = b"".join((json, *blobs))
            coding = http_body.chosen_coding(headers.get(b"accept-encoding"), len(json))
            if coding:
                json = http_body.compress(json, coding)
                reply_headers = [*reply_headers, (b"content-encoding", coding)]
            await reply(send, 200, json, reply_headers)

    def _decode(
        self, body: bytes, headers: dict[bytes, bytes], name: str, version: int
    ) -> tuple[InferRequest, oip_json.ReplyForm]:
        header_length = len(body)
        stated = headers.get(b"inference-header-content-length")
        if stated is not None:
            header_length = http_body.header_length(stated, len(body))
            if not header_length:
                validator = self._lifecycle.get(name, version).validator
                spec, shape = validator.raw_input(len(body))
                return oip_json.decode_raw(body, spec, shape, name, version)
        return oip_json.decode(body, header_length, name, version)

    # -- everything else ------------------------------------------------------------------------

    def add_routes(self, app: FastAPI) -> None:
        lifecycle = self._lifecycle

        @app.get("/v2/health/live", tags=["health"], response_class=Response)
        async def server_live() -> Response:
            """200 while the process answers."""
            return Response()

        @app.get("/v2/health/ready", tags=["health"], responses={400: {}}, response_class=Response)
        async def server_ready() -> Response:
            """200 when traffic may come, else 400."""
            return Response(status_code=200 if lifecycle.ready else 400)

        @app.get("/v2", tags=["metadata"], response_model=oip_schema.ServerMetadata)
        async def server_metadata() -> Response:
            """Name, version and the protocol extensions that work."""
            return document(documents.server_metadata())

        @app.get("/v2/models/stats", tags=["statistics"])
        async def all_statistics() -> Response:
            """Statistics of every model version that has been served."""
            return document(documents.model_statistics(lifecycle, "", 0))

        model = "/v2/models/{model}"
        self._add_model_routes(app, model, "", _select)
        versioned = model + "/versions/{version}"
        self._add_model_routes(app, versioned, " of a version", _select_version)
        self._add_repository_routes(app)

    def _add_model_routes(
        self, app: FastAPI, path: str, suffix: str, select: Callable[..., Selected]
    ) -> None:
        """The routes of a model, or of one version of it; ``select`` reads which."""
        lifecycle = self._lifecycle
        failures: dict[int | str, dict[str, Any]] = {
            code: {"model": oip_schema.Error} for code in (400, 404, 503)
        }

        @app.get(
            path,
            tags=["metadata"],
            name=f"model metadata{suffix}",
            response_model=oip_schema.ModelMetadata,
            responses=failures,
        )
        async def model_metadata(selected: Selected = Depends(select)) -> Response:
            """Versions that are READY, inputs and outputs."""
            return document(documents.model_metadata(lifecycle, *selected))

        @app.get(
            f"{path}/ready",
            tags=["health"],
            name=f"model ready{suffix}",
            responses={400: {"model": oip_schema.Error}},
        )
        async def model_ready(selected: Selected = Depends(select)) -> Response:
            """200 when the model (version) is READY, else 400."""
            try:
                lifecycle.require_ready(*selected)
            except ModelportError as error:
                return document({"error": str(error)}, 400)
            return Response()

        @app.get(
            f"{path}/config", tags=["metadata"], name=f"model config{suffix}", responses=failures
        )
        async def model_config(selected: Selected = Depends(select)) -> Response:
            """The model configuration, completed."""
            return document(documents.model_config(lifecycle, *selected))

        @app.get(
            f"{path}/stats",
            tags=["statistics"],
            name=f"model statistics{suffix}",
            responses=failures,
        )
        async def model_statistics(selected: Selected = Depends(select)) -> Response:
            """Counts and cumulative nanoseconds (statistics extension)."""
            return document(documents.model_statistics(lifecycle, *selected))

        @app.post(
            f"{path}/infer",
            tags=["inference"],
            name=f"infer{suffix}",
            response_model=oip_schema.InferReply,
            responses=failures,
            openapi_extra=oip_schema.INFER_BODY,
        )
        async def infer(selected: Selected = Depends(select)) -> Response:
            """Run the model. JSON, or JSON followed by raw tensors (binary tensor data extension).

            `Inference-Header-Content-Length` is the size of the JSON part; without it the whole
            body is JSON, and with 0 the whole body is the single input's raw tensor.
            """
            name, number = selected
            return Delegate(self._infer, name, str(number or ""))

    def _add_repository_routes(self, app: FastAPI) -> None:
        lifecycle = self._lifecycle

        @app.post("/v2/repository/index", tags=["repository"], openapi_extra=oip_schema.ANY_BODY)
        async def repository_index(request: Request) -> Response:
            """Every model version with its state and, if it is not served, the reason."""
            body = await self._json(request)
            ready = body.get("ready", False)
            if type(ready) is not bool:
                raise InvalidArgument("Unable to parse 'ready': it must be true or false")
            return document(lifecycle.index(ready_only=ready))

        @app.post(
            "/v2/repository/models/{model}/load",
            tags=["repository"],
            openapi_extra=oip_schema.ANY_BODY,
        )
        async def repository_load(model: Model, request: Request) -> Response:
            """Load or reload a model (`--model-control-mode explicit`)."""
            parameters = (await self._json(request)).get("parameters") or {}
            await lifecycle.load(model, documents.load_override(parameters))
            return Response(media_type="application/json")

        @app.post(
            "/v2/repository/models/{model}/unload",
            tags=["repository"],
            openapi_extra=oip_schema.ANY_BODY,
        )
        async def repository_unload(model: Model, request: Request) -> Response:
            """Unload a model once its requests in flight are done."""
            await self._json(request)
            await lifecycle.unload(model)
            return Response(media_type="application/json")

    async def _json(self, request: Request) -> dict[str, Any]:
        body = await http_body.read(request.receive, self._max_input_bytes)
        value = json_text.loads(body) if body.strip() else {}
        if type(value) is not dict:
            raise InvalidArgument("the request must be a JSON object")
        return value


def _select(model: Model) -> Selected:
    return model, 0


def _select_version(model: Model, version: Version) -> Selected:
    if not _is_number(version):
        raise HTTPException(404, "Not Found")
    return model, documents.parse_version(version)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
