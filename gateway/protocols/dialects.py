"""Every dialect: the application of the HTTP port, and the table of gRPC methods."""

from __future__ import annotations

from gateway.control import Control
from gateway.dataplane import DataPlane
from gateway.lifecycle import Lifecycle
from gateway.protocols.asgi import App
from gateway.protocols.grpc_method import Methods
from gateway.protocols.http import HttpApplication, HttpDialect
from gateway.protocols.oip.generate import GenerateHttp
from gateway.protocols.oip.grpc import OipGrpc
from gateway.protocols.oip.http import OipHttp
from gateway.protocols.oip.regions import RegionsHttp
from gateway.protocols.oip.shared_memory import SharedMemory
from gateway.protocols.origins import Origins
from gateway.protocols.prediction.predictor import Predictor
from gateway.protocols.sagemaker import SageMakerHttp
from gateway.protocols.tfserving.grpc import TfServingGrpc
from gateway.protocols.tfserving.http import TfServingHttp
from gateway.protocols.torchserve.grpc import TorchServeGrpc
from gateway.protocols.torchserve.http import TorchServeHttp
from gateway.protocols.torchserve.management import Management
from gateway.protocols.vertex import VertexApplication
from gateway.settings import ModelControlMode, Settings
from gateway.telemetry.tfserving import TfServingRequests


class Dialects:
    """``http`` answers every route of the HTTP port, ``grpc`` is the table of methods."""

    def __init__(
        self,
        settings: Settings,
        dataplane: DataPlane,
        lifecycle: Lifecycle,
        control: Control,
        shared: SharedMemory,
        requests: TfServingRequests,
    ) -> None:
        limit = settings.http_max_input_bytes
        predictor = Predictor(dataplane, lifecycle)
        explicit = settings.model_control_mode is ModelControlMode.EXPLICIT
        management = Management(lifecycle, control, explicit)
        self.grpc: Methods = {
            **OipGrpc(dataplane, lifecycle, control, shared).methods(),
            **TfServingGrpc(dataplane, lifecycle, control, requests).methods(),
            **TorchServeGrpc(predictor, lifecycle, control, management).methods(),
        }
        oip = OipHttp(dataplane, lifecycle, control, limit, shared)
        dialects: list[HttpDialect] = [
            oip,
            RegionsHttp(shared, limit),
            GenerateHttp(dataplane, lifecycle, limit),
            TfServingHttp(dataplane, lifecycle, control, limit, requests),
            TorchServeHttp(predictor, lifecycle, control, management, limit),
        ]
        if settings.allow_sagemaker:
            default_model = settings.sagemaker_default_model
            dialects.append(SageMakerHttp(predictor, lifecycle, default_model, limit))
        origins = Origins(settings.http_address, settings.allowed_hosts)
        self.http: App = HttpApplication(oip, dialects, origins)
        if settings.vertex_ai is not None:
            self.http = VertexApplication(
                self.http, predictor, lifecycle, control, settings.vertex_ai, limit
            )
