"""TensorFlow Serving's three methods past the wire, REST's and gRPC's alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.service import InferenceService
from modelport.gateway.models.control import Control
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.protocols import response_encoding
from modelport.gateway.protocols.image_decoding import decode_for
from modelport.gateway.protocols.response_encoding import PROTOBUF_BYTES
from modelport.gateway.protocols.tfserving import examples as tfserving_examples
from modelport.gateway.protocols.tfserving.results import Classes
from modelport.gateway.protocols.tfserving.servable import (
    Decoded,
    Selected,
    Servable,
    ServableVersion,
    UnknownSignature,
)
from modelport.gateway.protocols.tfserving.servables import Servables
from modelport.gateway.runtime import offload
from modelport.gateway.telemetry.tfserving import TfServingRequests
from modelport.gateway.types import Array, Deadline, Tensor
from modelport.gateway.wire.proto import serving_pb2 as pb

Written = TypeVar("Written")


@dataclass(frozen=True, slots=True)
class Call:
    """One request: which version it wants, and what the data plane wants to know."""

    selected: Selected
    deadline: Deadline
    trace: str = ""


class Inference:
    """Decode for the version that serves now, infer, and give the model's shapes back."""

    def __init__(
        self,
        service: InferenceService,
        manager: ModelManager,
        control: Control,
        requests: TfServingRequests,
    ) -> None:
        self._service = service
        self._manager = manager
        self._requests = requests
        self.servables = Servables(manager, control)

    async def predict(
        self, call: Call, decode: Callable[[ServableVersion], Decoded], pictures: bool, size: int
    ) -> tuple[Decoded, list[Tensor]]:
        """What ``decode`` made of the request for the version that serves now, and the outputs.

        Args:
            pictures: the request may hold some; they are decoded in a thread.
            size: the request's, in bytes; a large one is decoded in a thread too.

        Raises:
            ModelportError: from ``decode``, or in inference.
        """
        large = size > offload.INLINE_BYTES
        _, decoded = await decode_for(
            lambda: self.servables.version(call.selected),
            lambda version: large or (pictures and version.has_pictures),
            decode,
            call.deadline,
        )
        servable = decoded.servable
        request = servable.request(decoded.inputs, decoded.wanted, call.trace)
        response = await self._service.infer(request, call.deadline)
        return decoded, servable.answered(request, response)

    async def classify(
        self, call: Call, message: pb.Input, write: Callable[[Servable, Classes], Written]
    ) -> Written:
        """What ``write`` makes of the classes of every example.

        Raises:
            ModelportError: as ``predict``, or the model's outputs are no classes.
        """
        servable, outputs = await self._run(
            call, message, tfserving_examples.classification_outputs
        )
        examples = len(tfserving_examples.examples_of(message))

        def work() -> Written:
            return write(servable, tfserving_examples.classify(outputs, servable, examples))

        return await response_encoding.encode(work, outputs, call.deadline, PROTOBUF_BYTES)

    async def regress(
        self, call: Call, message: pb.Input, write: Callable[[Servable, Array], Written]
    ) -> Written:
        """What ``write`` makes of the value of every example.

        Raises:
            ModelportError: as ``predict``, or the model's output is no such value.
        """
        servable, outputs = await self._run(call, message, tfserving_examples.regression_output)
        examples = len(tfserving_examples.examples_of(message))

        def work() -> Written:
            return write(servable, tfserving_examples.regress(outputs, examples))

        return await response_encoding.encode(work, outputs, call.deadline, PROTOBUF_BYTES)

    async def _run(
        self, call: Call, message: pb.Input, outputs_of: Callable[[Servable], tuple[str, ...]]
    ) -> tuple[Servable, Sequence[Tensor]]:
        def decode(version: ServableVersion) -> Decoded:
            try:
                servable = version.servable(call.selected.signature)
            except UnknownSignature as error:
                name = error.name
                raise InvalidArgument(f"No signature was found with the name: {name}") from error
            wanted = outputs_of(servable)
            return Decoded(servable, tfserving_examples.decode(message, servable), wanted)

        decoded, outputs = await self.predict(call, decode, True, message.ByteSize())
        return decoded.servable, outputs

    def record(self, name: str, api: str, entrypoint: str, status: str, started_ns: int) -> None:
        """Count a request that began at ``started_ns`` of ``time.perf_counter_ns``."""
        known = name if self._manager.versions(name) else ""
        elapsed = time.perf_counter_ns() - started_ns
        self._requests.record(known, api, entrypoint, status, elapsed)
