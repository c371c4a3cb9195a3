"""Composition of all dialects into one HTTP application and one table of gRPC methods."""

from __future__ import annotations

from modelport.gateway.inference.service import InferenceService
from modelport.gateway.models.control import Control
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.protocols.asgi import App
from modelport.gateway.protocols.grpc_method import Methods
from modelport.gateway.protocols.http import HttpApplication, HttpDialect
from modelport.gateway.protocols.oip.generate import GenerateHttp
from modelport.gateway.protocols.oip.grpc import OipGrpc
from modelport.gateway.protocols.oip.http import OipHttp
from modelport.gateway.protocols.oip.shared_memory import SharedMemory
from modelport.gateway.protocols.oip.shared_memory_api import SharedMemoryHttp
from modelport.gateway.protocols.origins import Origins
from modelport.gateway.protocols.prediction.predictor import Predictor
from modelport.gateway.protocols.sagemaker import SageMakerHttp
from modelport.gateway.protocols.tfserving.grpc import TfServingGrpc
from modelport.gateway.protocols.tfserving.http import TfServingHttp
from modelport.gateway.protocols.torchserve.grpc import TorchServeGrpc
from modelport.gateway.protocols.torchserve.http import TorchServeHttp
from modelport.gateway.protocols.torchserve.management import Management
from modelport.gateway.protocols.vertex import VertexApplication
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.telemetry.tfserving import TfServingRequests


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
        limit = settings.http_max_input_bytes
        predictor = Predictor(service, manager)
        explicit = settings.model_control_mode is ModelControlMode.EXPLICIT
        management = Management(manager, control, explicit)
        self.grpc: Methods = {
            **OipGrpc(service, manager, control, shared).methods(),
            **TfServingGrpc(service, manager, control, requests).methods(),
            **TorchServeGrpc(predictor, manager, control, management).methods(),
        }
        oip = OipHttp(service, manager, control, limit, shared)
        dialects: list[HttpDialect] = [
            oip,
            SharedMemoryHttp(shared, limit),
            GenerateHttp(service, manager, limit),
            TfServingHttp(service, manager, control, limit, requests),
            TorchServeHttp(predictor, manager, control, management, limit),
        ]
        if settings.allow_sagemaker:
            default_model = settings.sagemaker_default_model
            dialects.append(SageMakerHttp(predictor, manager, default_model, limit))
        origins = Origins(settings.http_address, settings.allowed_hosts)
        self.http: App = HttpApplication(oip, dialects, origins)
        if settings.vertex_ai is not None:
            self.http = VertexApplication(
                self.http, predictor, manager, control, settings.vertex_ai, limit
            )
