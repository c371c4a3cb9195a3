"""A backend without a runtime: it answers every request with its inputs, or with zeros.

Like httpx's ``MockTransport`` it ships with the product: for trying clients, for load tests of the
gateway alone, and for tests that need a slow or failing model. ``parameters``: ``delay_seconds``
delays each response, ``error`` is a message to fail with. A decoupled model gives ``responses``
responses (1; a request's own parameter ``responses`` overrides it), then fails if there is an
``error``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import numpy as np

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Artifact, Execution
from modelport.gateway.errors import Internal, InvalidArgument
from modelport.gateway.repository import config as configuration
from modelport.gateway.types import (
    NUMPY_DTYPES,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    TensorSpec,
)

RESPONSES = "responses"


def load(artifact: Artifact) -> FakeBackend:
    """Load the model from its configuration alone."""
    return FakeBackend(artifact)


class FakeBackend:
    """An ``Infer`` that returns its inputs, or zeros."""

    problem = ""

    def __init__(self, artifact: Artifact) -> None:
        self.config = artifact.config
        self._name, self._version = artifact.model_name, artifact.version
        self._signature = configuration.signature(self.config)
        self._specs = {spec.name: (i, spec) for i, spec in enumerate(self._signature.outputs)}
        delay = float(parameters.text(self.config, "delay_seconds", "0"))
        self._delay_seconds = delay
        self._error = parameters.text(self.config, "error")
        self.execution = Execution(batches=False, parameters=False, inline=lambda _: not delay)
        self._responses = int(parameters.text(self.config, RESPONSES, "1"))

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        request.timing.begun = True
        if self._delay_seconds:
            await asyncio.sleep(self._delay_seconds)
        if self._error:
            raise Internal(self._error)
        return self._answer(request)

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        request.timing.begun = True
        count = request.parameters.get(RESPONSES, self._responses)
        if type(count) is not int:
            raise InvalidArgument(f"parameter '{RESPONSES}' must be an integer")
        for _ in range(count):
            await asyncio.sleep(self._delay_seconds)  # also if 0, to let other tasks run
            yield self._answer(request)
        if self._error:
            raise Internal(self._error)

    def _answer(self, request: InferRequest) -> InferResponse:
        wanted = request.outputs or self._specs
        outputs = [self._output(request, *self._specs[name]) for name in wanted]
        return InferResponse(self._name, self._version, outputs)

    def _output(self, request: InferRequest, index: int, spec: TensorSpec) -> Tensor:
        if index < len(request.inputs) and request.inputs[index].datatype is spec.datatype:
            return Tensor(spec.name, spec.datatype, request.inputs[index].data)
        batch = request.inputs[0].data.shape[:1] if self._signature.max_batch_size else ()
        shape = (*batch, *(max(1, d) for d in spec.wire_dims))
        zero = b"" if spec.datatype is Datatype.BYTES else 0
        data = np.full(shape, zero, NUMPY_DTYPES[spec.datatype])
        return Tensor(spec.name, spec.datatype, data)

    def unload(self) -> None:
        """Nothing to free."""
