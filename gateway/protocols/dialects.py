"""Composition of all dialects into one HTTP application and one table of gRPC methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fastapi import Request

from modelport.gateway.errors import Unsupported
from modelport.gateway.extensions import ExtensionTable
from modelport.gateway.inference.service import InferenceService
from modelport.gateway.models.control import Control
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.protocols.asgi import App
from modelport.gateway.protocols.cross_site_protection import Origins
from modelport.gateway.protocols.grpc_method import Methods
from modelport.gateway.protocols.http import HttpApplication, HttpDialect
from modelport.gateway.protocols.oip.grpc import OipGrpc
from modelport.gateway.protocols.oip.http import OipHttp
from modelport.gateway.protocols.oip.http_generate import GenerateHttp
from modelport.gateway.protocols.oip.http_shared_memory import SharedMemoryHttp
from modelport.gateway.protocols.oip.shared_memory import SharedMemory
from modelport.gateway.protocols.prediction.predictor import Predictor
from modelport.gateway.protocols.request_body import read as read_body
from modelport.gateway.protocols.sagemaker import SageMakerHttp
from modelport.gateway.protocols.tfserving.grpc import TfServingGrpc
from modelport.gateway.protocols.tfserving.http import TfServingHttp
from modelport.gateway.protocols.torchserve.grpc import TorchServeGrpc
from modelport.gateway.protocols.torchserve.http import TorchServeHttp
from modelport.gateway.protocols.torchserve.management import Management
from modelport.gateway.protocols.vertex import VertexApplication
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.telemetry.tfserving_counters import TfServingRequests


class DialectHost:
    """The parts of the gateway that a dialect may use.

    Attributes:
        service: answers an ``InferRequest``, validated and counted.
        manager: the models and their versions.
        control: loads and unloads models.
        settings: those of ``modelport serve``.
        shared: the shared memory that clients have registered.
        requests: the counters of TensorFlow Serving's metrics.
    """

    def __init__(
        self,
        settings: Settings,
        service: InferenceService,
        manager: ModelManager,
        control: Control,
        shared: SharedMemory,
        requests: TfServingRequests,
    ) -> None:
        self.settings, self.service, self.manager = settings, service, manager
        self.control, self.shared, self.requests = control, shared, requests
        self.max_input_bytes = settings.http_max_input_bytes
        self.predictor = Predictor(service, manager)
        explicit = settings.model_control_mode is ModelControlMode.EXPLICIT
        self.management = Management(manager, control, explicit)

    async def read(self, request: Request) -> bytes:
        """The request's body without its content coding, at most ``--http-max-input-size``.

        Raises:
            InvalidArgument: it is larger, or not in the coding that it claims.
        """
        headers = dict(request.scope["headers"])
        return await read_body(request.receive, headers, self.max_input_bytes)


class DialectDescriptor(NamedTuple):
    """A dialect.

    Attributes:
        http: makes its routes on the HTTP port.
        grpc: makes its gRPC methods.
        enabled: whether the dialect is served with these settings; an extension is served where
            ``--dialect`` names it.
    """

    name: str
    http: Callable[[DialectHost], Sequence[HttpDialect]] = lambda host: ()
    grpc: Callable[[DialectHost], Methods] = lambda host: {}
    enabled: Callable[[Settings], bool] = lambda settings: True


def _oip_http(host: DialectHost) -> Sequence[HttpDialect]:
    service, manager, limit = host.service, host.manager, host.max_input_bytes
    return (
        OipHttp(service, manager, host.control, limit, host.shared),
        SharedMemoryHttp(host.shared, limit),
        GenerateHttp(service, manager, limit),
    )


def _tfserving_http(host: DialectHost) -> Sequence[HttpDialect]:
    limit = host.max_input_bytes
    return [TfServingHttp(host.service, host.manager, host.control, limit, host.requests)]


def _torchserve_http(host: DialectHost) -> Sequence[HttpDialect]:
    models = (host.predictor, host.manager, host.control)
    return [TorchServeHttp(*models, host.management, host.max_input_bytes)]


def _sagemaker_http(host: DialectHost) -> Sequence[HttpDialect]:
    default_model = host.settings.sagemaker_default_model
    return [SageMakerHttp(host.predictor, host.manager, default_model, host.max_input_bytes)]


_BUILTIN = (
    DialectDescriptor(
        "oip",
        _oip_http,
        lambda host: OipGrpc(host.service, host.manager, host.control, host.shared).methods(),
    ),
    DialectDescriptor(
        "tfserving",
        _tfserving_http,
        lambda host: TfServingGrpc(
            host.service, host.manager, host.control, host.requests
        ).methods(),
    ),
    DialectDescriptor(
        "torchserve",
        _torchserve_http,
        lambda host: TorchServeGrpc(
            host.predictor, host.manager, host.control, host.management
        ).methods(),
    ),
    DialectDescriptor(
        "sagemaker", _sagemaker_http, enabled=lambda settings: settings.allow_sagemaker
    ),
)
#: In the order in which they are asked for a path.
DIALECTS: ExtensionTable[DialectDescriptor] = ExtensionTable(
    "modelport.dialects", DialectDescriptor, {each.name: each for each in _BUILTIN}
)


class Dialects:
    """``http`` is the application of the HTTP port, ``grpc`` the table of gRPC methods."""

    def __init__(
        self,
        settings: Settings,
        service: InferenceService,
        manager: ModelManager,
        control: Control,
        shared: SharedMemory,
        requests: TfServingRequests,
    ) -> None:
        host = DialectHost(settings, service, manager, control, shared, requests)
        served = [each for each in _BUILTIN if each.enabled(settings)]
        served += [find(name) for name in settings.dialects if name not in DIALECTS.builtin]
        http = [dialect for each in served for dialect in each.http(host)]
        self.grpc: Methods = {}
        for each in served:
            for name, methods in each.grpc(host).items():
                self.grpc.setdefault(name, methods)  # no extension replaces what is built in
        origins = Origins(settings.http_address, settings.allowed_hosts)
        [oip] = [dialect for dialect in http if isinstance(dialect, OipHttp)]
        self.http: App = HttpApplication(oip, http, origins, service.splits)
        if settings.vertex_ai is not None:
            self.http = VertexApplication(
                self.http,
                host.predictor,
                manager,
                control,
                settings.vertex_ai,
                host.max_input_bytes,
                service.splits,
            )


def find(name: str) -> DialectDescriptor:
    """The dialect called ``name``.

    Raises:
        Unsupported: there is none, or it cannot be used.
    """
    descriptor = DIALECTS.get(name)
    if descriptor is None:
        known = ", ".join(DIALECTS.names())
        raise Unsupported(f"there is no dialect '{name}'; this gateway has: {known}")
    return descriptor
