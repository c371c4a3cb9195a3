"""Ragged batches: requests of different shapes in one run, as Triton's ``allow_ragged_batch``.

The elements of a ragged input are joined in one dimension. ``batch_input`` tells the model where
each request begins and ends, and ``batch_output`` splits an output by the shapes of an input.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded.embedded_backend import EmbeddedBackend, ModelSession
from modelport.gateway.errors import Internal
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import scheduler_tensors
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import (
    NO_DEADLINE,
    NUMPY_DTYPES,
    Array,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
    fits,
)
from modelport.gateway.wire.proto import model_config_pb2 as pb

Shape = tuple[int, ...]


class RaggedBatch(InferRequest):
    """The request of a batch, as the model takes it."""

    __slots__ = ()


class RaggedBackend(EmbeddedBackend):
    """An ``EmbeddedBackend`` whose requests are joined here; a ``TogetherBackend``."""

    def __init__(self, artifact: Artifact, session: ModelSession, config: ModelConfig) -> None:
        self._layout = RaggedLayout(config)
        super().__init__(artifact, session, config)

    def adopt(self, config: ModelConfig) -> None:
        super().adopt(config)
        self._layout = RaggedLayout(config)

    async def infer_together(
        self,
        requests: Sequence[InferRequest],
        deadlines: Sequence[Deadline],
        replies: Sequence[asyncio.Future[InferResponse]],
    ) -> Sequence[InferResponse]:
        """Run ``requests`` as one batch; each enforces its own deadline."""
        batch = self._layout.join(requests)
        response = await finished(self._infer(batch, NO_DEADLINE))
        for request in requests:
            request.timing.compute_infer_ns += batch.timing.compute_infer_ns
        return self._layout.split(response, requests)

    def _run(self, request: InferRequest) -> InferResponse:
        if isinstance(request, RaggedBatch) or request.signature:
            return super()._run(request)
        batch = self._layout.join([request])
        batch.timing = request.timing
        return self._layout.split(super()._run(batch), [request])[0]


class RaggedLayout:
    """The layout of requests in a batch, and of responses in its response."""

    def __init__(self, config: ModelConfig) -> None:
        self._ragged = scheduler_tensors.ragged_inputs(config)
        self._batch_inputs = tuple(config.batch_input)
        self._made = {name for each in config.batch_input for name in each.target_name}
        self._scattered = {
            name: each.source_input[0] for each in config.batch_output for name in each.target_name
        }
        signature = configuration.signature(scheduler_tensors.declared(config))
        self._dims = {spec.name: (-1, *spec.model_dims) for spec in signature.outputs}

    def join(self, requests: Sequence[InferRequest]) -> RaggedBatch:
        """The batch of ``requests``, which have the same inputs."""
        first = requests[0]
        columns = [{tensor.name: tensor.data for tensor in each.inputs} for each in requests]
        inputs = []
        for tensor in first.inputs:
            if tensor.name in self._made:  # a warm-up's, of no meaning
                continue
            arrays = [column[tensor.name] for column in columns]
            if tensor.name in self._ragged:
                arrays = [array.reshape(-1) for array in arrays]
            data = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
            inputs.append(Tensor(tensor.name, tensor.datatype, data))
        for batch in self._batch_inputs:
            shapes = [column[batch.source_input[0]].shape for column in columns]
            datatype = configuration.datatype(batch.data_type, "batch input")
            data = _batch_input(batch.kind, shapes).astype(NUMPY_DTYPES[datatype])
            inputs += [Tensor(name, datatype, data) for name in batch.target_name]
        asked = [request.outputs for request in requests]
        outputs = tuple(dict.fromkeys(chain(*asked))) if all(asked) else ()
        return RaggedBatch(first.model_name, inputs, outputs, first.model_version)

    def split(
        self, response: InferResponse, requests: Sequence[InferRequest]
    ) -> list[InferResponse]:
        """The response of each of ``requests``, as views.

        Raises:
            Internal: an output has another shape than its parts need.
        """
        shapes = [{tensor.name: tensor.data.shape for tensor in r.inputs} for r in requests]
        rows = [next(iter(each.values()), (1,))[0] for each in shapes]
        parts = {}
        for tensor in response.outputs:
            dims, source = self._dims[tensor.name], self._scattered.get(tensor.name)
            if source is None:
                split = _rows(tensor, rows, dims)
            else:
                split = _scattered(tensor, [each[source] for each in shapes], dims)
            parts[tensor.name] = [Tensor(tensor.name, tensor.datatype, data) for data in split]
        name, version = response.model_name, response.model_version
        return [
            InferResponse(name, version, [parts[n][index] for n in request.outputs or parts])
            for index, request in enumerate(requests)
        ]


def _batch_input(kind: int, shapes: Sequence[Shape]) -> Array:
    """The values of a batch input for a source input with these ``shapes``, one a request."""
    counts = [math.prod(shape) for shape in shapes]
    kinds: Any = pb.BatchInput
    if kind == kinds.BATCH_ELEMENT_COUNT:
        return np.array(counts)
    if kind == kinds.BATCH_ACCUMULATED_ELEMENT_COUNT:
        return np.cumsum(counts)
    if kind == kinds.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
        return np.cumsum([0, *counts])
    if kind == kinds.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE:
        return np.zeros(max(counts))
    items = np.array([shape[1:] for shape in shapes for _ in range(shape[0])])
    return items if kind == kinds.BATCH_ITEM_SHAPE else items.reshape(-1)


def _rows(tensor: Tensor, rows: Sequence[int], dims: Shape) -> list[Array]:
    """The rows of each request."""
    data = tensor.data
    if not fits(data.shape, dims) or data.shape[0] != sum(rows):
        raise Internal(
            f"output '{tensor.name}' has shape {list(data.shape)} for a batch of {sum(rows)}, and "
            f"must have {list(dims)}"
        )
    ends = np.cumsum(rows)
    return [data[end - count : end] for end, count in zip(ends, rows, strict=True)]


def _scattered(tensor: Tensor, shapes: Sequence[Shape], dims: Shape) -> list[Array]:
    """The elements of each request, whose dynamic dimensions are those of its input."""
    wanted = [
        tuple(shape[i] if size == -1 and i < len(shape) else size for i, size in enumerate(dims))
        for shape in shapes
    ]
    flat, counts = tensor.data.reshape(-1), [math.prod(shape) for shape in wanted]
    if min(counts) < 0 or flat.size != sum(counts):
        raise Internal(
            f"output '{tensor.name}' has {flat.size} elements, but the requests of the batch have "
            f"inputs of {sum(counts)}"
        )
    ends = np.cumsum(counts)
    return [
        flat[end - count : end].reshape(shape)
        for end, count, shape in zip(ends, counts, wanted, strict=True)
    ]
