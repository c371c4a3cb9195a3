"""OIP over HTTP: all routes of ``/v2``, documented."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any

import structlog
from fastapi import Depends, FastAPI, Path, Request, Response
from fastapi.params import Depends as Dependency
from starlette.exceptions import HTTPException

from modelport.gateway.errors import (
    InvalidArgument,
    ModelportError,
    PermissionDenied,
    Unauthenticated,
)
from modelport.gateway.protocols import cloud_events, explainer, request_body
from modelport.gateway.protocols.http import Delegate
from modelport.gateway.protocols.http_operations import CONTROL, HEALTH, INFER, METADATA, STATISTICS
from modelport.gateway.protocols.http_response import document
from modelport.gateway.protocols.oip import metadata
from modelport.gateway.protocols.oip import schema as oip_schema
from modelport.gateway.protocols.oip.http_infer import OipInfer, is_number
from modelport.gateway.protocols.openapi import BYTES, JSON
from modelport.gateway.wire import json_text

log = structlog.get_logger("modelport.http")

Model = Annotated[str, Path(description="Model name")]
Version = Annotated[str, Path(description="Model version, a positive integer")]
_READY = {"type": "object", "required": ["ready"], "properties": {"ready": {"type": "boolean"}}}
#: Responses to inference besides JSON.
_INFERRED: dict[int | str, dict[str, Any]] = {
    200: {"content": {kind: {} for kind in (BYTES, cloud_events.MEDIA_TYPE.decode())}}
}
#: Name and version of a model; version 0 is the newest that is READY.
Selected = tuple[str, int]
Route = Callable[..., Awaitable[Response]]


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


class OipHttp(OipInfer):
    """The dialect of ``/v2``."""

    segments = frozenset({"v2"})

    # -- everything else ------------------------------------------------------------------------

    def add_routes(self, app: FastAPI) -> None:
        manager, control = self._manager, self._control

        probe = partial(app.get, tags=["health"], dependencies=HEALTH)
        describe = partial(app.get, tags=["metadata"], dependencies=METADATA)

        @probe("/v2/health/live")
        async def server_live() -> Response:
            """200 while the process answers."""
            return document({"live": True})

        @probe("/v2/health/ready", responses={400: {"content": {JSON: {"schema": _READY}}}})
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
