"""Amazon SageMaker's container contract: ``/invocations``, and ``/models/NAME/invoke``.

It follows Triton's ``sagemaker_server.cc`` and accepts every body of ``prediction``; ``/ping`` is
TorchServe's, and so is ``/models``, except at a multi-model endpoint (``sagemaker_models``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Path

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import AlreadyExists, InvalidArgument, ModelportError
from modelport.gateway.models.model_view import ModelView
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http import DialectRoute, PathPart, Route
from modelport.gateway.protocols.http_message import JSON, Answer, HttpRequest, HttpResponse
from modelport.gateway.protocols.oip.http_errors import OipErrors
from modelport.gateway.protocols.oip.http_generate import GenerateHttp
from modelport.gateway.protocols.oip.metadata import ready_models
from modelport.gateway.protocols.oip.schema import INFER_BODY
from modelport.gateway.protocols.openapi import BYTES
from modelport.gateway.protocols.prediction.http import (
    JSON_HEADER_SIZE,
    PredictionTarget,
    RequestHeaders,
    platform_handler,
)
from modelport.gateway.protocols.sagemaker_models import MultiModelEndpoint, out_of_memory

DEFAULT_MODEL_VARIABLE = "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
MEDIA_TYPE = b"application/vnd.sagemaker-triton"
_MODELS, _INVOKE = "/models/", "/invoke"
_TARGET_MODEL = b"x-amzn-sagemaker-target-model"
_ARCHIVE = ".tar.gz"
_WRONG_METHOD = b'{"error":"Method Not Allowed"}'


_PARTS = {"model": PathPart(Annotated[str, Path(description="Model name")])}


class SageMakerHttp(OipErrors):
    """The routes of SageMaker; ``/models`` is shared with TorchServe."""

    segments = frozenset({"invocations", "models"})

    def __init__(self, host: DialectHost) -> None:
        self._manager = host.manager
        self._default_model = host.settings.sagemaker_default_model
        self._predict = platform_handler(host, MEDIA_TYPE)
        #: Of ``/invocations`` in place of ``_predict``.
        self._generate = GenerateHttp(host).handlers.get(host.settings.sagemaker_inference_type)
        self._models = MultiModelEndpoint(host) if host.settings.sagemaker_models else None
        self.table = self._routes()

    def add_routes(self, app: FastAPI) -> None:
        if self._models is not None:
            self._models.add_routes(app)

    def failure(self, request: HttpRequest, error: ModelportError) -> HttpResponse:
        response = super().failure(request, error)
        if self._models is not None and out_of_memory(error):
            response.status = 507
        elif self._models is not None and isinstance(error, AlreadyExists):
            response.status = 409
        return response

    def _routes(self) -> Sequence[DialectRoute]:
        kinds = (BYTES, f"{MEDIA_TYPE.decode()}{JSON_HEADER_SIZE.partition(b';')[0].decode()}")
        documented: dict[str, Any] = {
            "responses": {200: {"content": {kind: {} for kind in kinds}}},
            "openapi_extra": INFER_BODY,
            "tags": ["sagemaker"],
        }
        default = "Run the default model, or the one in `X-Amzn-SageMaker-Target-Model`."
        one = "Run this model of a multi-model endpoint."
        rows = (
            ("/invocations", "invocations", default),
            (f"{_MODELS}{{model}}{_INVOKE}", "invoke", one),
        )
        return [
            DialectRoute(
                "POST",
                path,
                Operation.INFER,
                self._invoke,
                {"name": name, "description": text, **documented},
                _PARTS,
            )
            for path, name, text in rows
        ]

    def route(self, method: str, path: str) -> Route | None:
        if method != "POST" and path.startswith(_MODELS) and path.endswith(_INVOKE):
            # no version of TorchServe's is called so
            return Route(Operation.INFER, _wrong_method)
        return super().route(method, path)

    def _invoke(self, name: str, request: HttpRequest) -> Answer:
        if self._generate is not None and not name:
            return self._generate(self._find(request.fields).name, "", request)
        return self._predict((lambda _: PredictionTarget(name)) if name else self._find, request)

    def _find(self, headers: RequestHeaders) -> PredictionTarget:
        target = headers.get(_TARGET_MODEL, b"").decode(errors="replace").removesuffix(_ARCHIVE)
        return PredictionTarget(
            target or only_model(self._manager, self._default_model, DEFAULT_MODEL_VARIABLE)
        )


def _wrong_method(_: HttpRequest) -> HttpResponse:
    return HttpResponse(405, _WRONG_METHOD, [*JSON, (b"allow", b"POST")])


def only_model(manager: ModelView, default: str, remedy: str) -> str:
    """Return ``default``, or the only model that is served.

    Raises:
        InvalidArgument: There is not exactly one; ``remedy`` is the setting for the default.
    """
    if default:
        return default
    names = ready_models(manager)
    if len(names) != 1:
        raise InvalidArgument(f"{len(names)} models are served; name the default one with {remedy}")
    return names[0]
