"""Predict, Classify and Regress, shared by REST and gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols import response_encoding
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.encoded_inputs import decode_for
from modelport.gateway.protocols.response_encoding import PROTOBUF_BYTES
from modelport.gateway.protocols.tfserving import examples as tfserving_examples
from modelport.gateway.protocols.tfserving.servable_lookup import Servables
from modelport.gateway.protocols.tfserving.servable_signatures import (
    Decoded,
    Selected,
    ServableSignature,
    ServableVersion,
    UnknownSignature,
)
from modelport.gateway.runtime import offload
from modelport.gateway.types import Deadline, Tensor, finished
from modelport.gateway.wire.proto import serving_pb2 as pb

Written = TypeVar("Written")


@dataclass(frozen=True, slots=True)
class TfServingCall:
    """The selected version of a request, its deadline, its trace id and its size in bytes."""

    selected: Selected
    deadline: Deadline
    trace: str = ""
    size: int = 0


class ExampleMethod(NamedTuple):
    """Classify or Regress: the outputs that it asks for, and their results for each example."""

    outputs: Callable[[ServableSignature], tuple[str, ...]]
    results: Callable[[Sequence[Tensor], ServableSignature, int], Any]


CLASSIFY = ExampleMethod(tfserving_examples.classification_outputs, tfserving_examples.classify)
REGRESS = ExampleMethod(tfserving_examples.regression_output, tfserving_examples.regress)


class Inference:
    """Decodes requests, runs them, and converts outputs to the model's shapes."""

    def __init__(self, host: DialectHost) -> None:
        self._service = host.service
        self._manager = host.manager
        self._requests = host.requests
        self.servables = Servables(host.manager, host.control)

    async def predict(
        self,
        call: TfServingCall,
        decode: Callable[[ServableVersion], Decoded],
        images: bool,
    ) -> tuple[Decoded, list[Tensor]]:
        """Decode and run a request; return the decoded request and the outputs.

        The signature of the returned request is that of the version that answered.

        Args:
            images: Whether the request may hold images, which are decoded in a thread, as large
                requests are.

        Raises:
            ModelportError: ``decode`` or the inference failed.
        """
        large = call.size > offload.INLINE_BYTES
        decoded = await decode_for(
            lambda: self.servables.version(call.selected),
            lambda version: large or (images and version.has_images),
            decode,
            call.deadline,
        )
        servable = decoded.servable
        request = servable.request(decoded.inputs, decoded.wanted, call.trace)
        request.label = call.selected.request_label
        response = await finished(self._service.infer(request, call.deadline))
        outputs = servable.outputs_of(request, response)
        if request.label is not None:
            servable = servable.answered_by(response.model_version)
        return decoded._replace(servable=servable), outputs

    async def run_examples(
        self,
        call: TfServingCall,
        message: pb.Input,
        method: ExampleMethod,
        write: Callable[[ServableSignature, Any], Written],
    ) -> Written:
        """Run a request, and pass the results of its examples to ``write``.

        Raises:
            ModelportError: As ``predict``, or the model's outputs are no results of ``method``.
        """

        def decode(version: ServableVersion) -> Decoded:
            try:
                servable = version.servable(call.selected.signature)
            except UnknownSignature as error:
                name = error.name
                raise InvalidArgument(f"No signature was found with the name: {name}") from error
            wanted = method.outputs(servable)
            inputs = tfserving_examples.decode(message, servable, call.size)
            return Decoded(servable, inputs, wanted)

        decoded, outputs = await self.predict(call, decode, True)
        servable = decoded.servable
        examples = len(tfserving_examples.examples_of(message))

        def work() -> Written:
            return write(servable, method.results(outputs, servable, examples))

        return await response_encoding.encode(work, outputs, call.deadline, PROTOBUF_BYTES)

    def record(self, name: str, api: str, entrypoint: str, status: str, started_ns: int) -> None:
        """Count a request that began at ``started_ns`` of ``time.perf_counter_ns``."""
        known = name if self._manager.versions(name) else ""
        elapsed = time.perf_counter_ns() - started_ns
        self._requests.record(known, api, entrypoint, status, elapsed)
