"""A backend without a runtime: it answers every request with its inputs, or with zeros.

It ships, as httpx's ``MockTransport`` does: for trying clients, for load tests that measure the
gateway alone, and for tests that need a slow or failing model. Config ``parameters``:
``delay_seconds`` before each answer, ``error`` a message to fail with.
"""

from __future__ import annotations

import asyncio

import numpy as np

from gateway.backends.base import Artifact
from gateway.errors import Internal
from gateway.repository import config as configuration
from gateway.types import (
    NUMPY_DTYPES,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    TensorSpec,
)


def load(artifact: Artifact) -> FakeBackend:
    """Needs no file: the signature is the configuration's."""
    return FakeBackend(artifact)


class FakeBackend:
    problem = ""

    def __init__(self, artifact: Artifact) -> None:
        self.config = artifact.config
        self._name, self._version = artifact.model_name, artifact.version
        self._signature = configuration.signature(self.config)
        parameters = self.config.parameters
        self._delay_seconds = (
            float(parameters["delay_seconds"].string_value)
            if "delay_seconds" in parameters
            else 0.0
        )
        self._error = parameters["error"].string_value if "error" in parameters else ""

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        if self._delay_seconds:
            await asyncio.sleep(self._delay_seconds)
        if self._error:
            raise Internal(self._error)
        wanted = request.outputs or tuple(spec.name for spec in self._signature.outputs)
        specs = {spec.name: (index, spec) for index, spec in enumerate(self._signature.outputs)}
        outputs = [self._output(request, *specs[name]) for name in wanted]
        return InferResponse(self._name, self._version, outputs)

    def _output(self, request: InferRequest, index: int, spec: TensorSpec) -> Tensor:
        if index < len(request.inputs) and request.inputs[index].datatype is spec.datatype:
            return Tensor(spec.name, spec.datatype, request.inputs[index].data)
        batch = request.inputs[0].data.shape[:1] if self._signature.max_batch_size else ()
        shape = (*batch, *(max(1, d) for d in spec.wire_dims))
        return Tensor(spec.name, spec.datatype, np.zeros(shape, NUMPY_DTYPES[spec.datatype]))

    def unload(self) -> None:
        """Nothing is held."""
