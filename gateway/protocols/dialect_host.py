"""The parts of the gateway that a dialect may use, as one object."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from modelport.gateway.models.control import Control
from modelport.gateway.models.inference_service import SupportsInference
from modelport.gateway.models.model_view import ModelView
from modelport.gateway.protocols.http_message import HttpRequest
from modelport.gateway.protocols.oip.process_settings import ProcessSettings
from modelport.gateway.protocols.oip.shared_memory import SharedMemory
from modelport.gateway.protocols.prediction.predictor import Predictor
from modelport.gateway.protocols.request_body import read as read_body
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.telemetry.tfserving_counters import TfServingRequests
from modelport.gateway.telemetry.tracer import Tracer


@dataclass(eq=False)
class DialectHost:
    """The parts of the gateway that a dialect may use.

    Attributes:
        service: answers an ``InferRequest``, validated and counted.
        manager: the models and their versions.
        control: loads and unloads models.
        settings: those of ``modelport serve``.
        shared: the shared memory that clients have registered.
        requests: the counters of TensorFlow Serving's metrics.
        tracer: has the settings of traces.
        splits: the models with a rollout.
    """

    settings: Settings
    service: SupportsInference
    manager: ModelView
    control: Control
    shared: SharedMemory
    requests: TfServingRequests
    tracer: Tracer
    splits: Collection[str] = ()

    def __post_init__(self) -> None:
        self.max_input_bytes = self.settings.http_max_input_bytes
        #: Whether a load request may have the files of a model.
        self.loads_files = self.settings.model_control_mode is ModelControlMode.EXPLICIT
        guarded = self.settings.access is not None
        #: Whether these may be code: not where anybody may send them.
        self.loads_code = guarded
        self.process = ProcessSettings(self.control, self.manager, self.tracer, guarded)
        self.predictor = Predictor(self.service, self.manager)

    async def read(self, request: HttpRequest) -> bytes:
        """The request's body without its content coding, at most ``--http-max-input-size``.

        Raises:
            InvalidArgument: it is larger, or not in the coding that it claims.
        """
        return await read_body(request, self.max_input_bytes)
