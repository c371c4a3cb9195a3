"""Every dialect of the HTTP port in one application. Importing this imports the framework."""

from __future__ import annotations

from gateway.control import Control
from gateway.dataplane import DataPlane
from gateway.lifecycle import Lifecycle
from gateway.protocols.http import HttpApplication, HttpDialect
from gateway.protocols.oip.generate import GenerateHttp
from gateway.protocols.oip.http import OipHttp
from gateway.protocols.oip.regions import RegionsHttp
from gateway.protocols.oip.shared_memory import SharedMemory
from gateway.protocols.prediction.predictor import Predictor
from gateway.protocols.sagemaker import SageMakerHttp
from gateway.protocols.tfserving.http import TfServingHttp
from gateway.protocols.torchserve.http import TorchServeHttp
from gateway.protocols.torchserve.management import Management
from gateway.settings import Settings
from gateway.telemetry.tfserving import TfServingRequests


def application(
    settings: Settings,
    dataplane: DataPlane,
    lifecycle: Lifecycle,
    control: Control,
    shared: SharedMemory,
    requests: TfServingRequests,
    predictor: Predictor,
    management: Management,
) -> HttpApplication:
    limit = settings.http_max_input_bytes
    dialects: list[HttpDialect] = [
        OipHttp(dataplane, lifecycle, control, limit, shared),
        RegionsHttp(shared, limit),
        GenerateHttp(dataplane, lifecycle, limit),
        TfServingHttp(dataplane, lifecycle, control, limit, requests),
        TorchServeHttp(predictor, lifecycle, control, management, limit),
    ]
    if settings.allow_sagemaker:
        default_model = settings.sagemaker_default_model
        dialects.append(SageMakerHttp(predictor, lifecycle, default_model, limit))
    return HttpApplication(dialects)
