"""Every dialect: what only inference over the Open Inference Protocol can do without.

Importing this and making it takes longer than loading a small model: no start waits for it.
"""

from __future__ import annotations

from gateway.control import Control
from gateway.dataplane import DataPlane
from gateway.lifecycle import Lifecycle
from gateway.protocols.asgi import App
from gateway.protocols.grpc_method import Rows
from gateway.protocols.oip.shared_memory import SharedMemory
from gateway.protocols.prediction.predictor import Predictor
from gateway.protocols.tfserving.grpc import TfServingGrpc
from gateway.protocols.torchserve.grpc import TorchServeGrpc
from gateway.protocols.torchserve.management import Management
from gateway.settings import ModelControlMode, Settings
from gateway.telemetry.tfserving import TfServingRequests


class Dialects:
    """``rows``: service → method → row of the gRPC services besides the protocol's own."""

    def __init__(
        self,
        settings: Settings,
        dataplane: DataPlane,
        lifecycle: Lifecycle,
        control: Control,
        shared: SharedMemory,
        requests: TfServingRequests,
    ) -> None:
        self._composed = settings, dataplane, lifecycle, control, shared, requests
        self.predictor = Predictor(dataplane, lifecycle)
        explicit = settings.model_control_mode is ModelControlMode.EXPLICIT
        self._management = Management(lifecycle, control, explicit)
        tfserving = TfServingGrpc(dataplane, lifecycle, control, requests)
        torchserve = TorchServeGrpc(self.predictor, lifecycle, control, self._management)
        self.rows: dict[str, Rows] = {**tfserving.methods(), **torchserve.methods()}

    def http(self) -> App:
        """The application of every route of the HTTP port."""
        from gateway.protocols import http_dialects  # and with it the framework: gRPC needs none

        return http_dialects.application(*self._composed, self.predictor, self._management)
