"""Dynamic batching: run requests for the same model version as one batch."""

from __future__ import annotations

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Backend
from modelport.gateway.backends.capabilities import (
    StreamingBackend,
    StreamsTogetherBackend,
    TogetherBackend,
)
from modelport.gateway.inference.batching import dynamic_batching
from modelport.gateway.inference.batching.batcher import Batcher
from modelport.gateway.inference.batching.joining import Joiner
from modelport.gateway.inference.batching.stream_batcher import StreamBatcher
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import Infer, InferStream, ModelSignature

#: "true": batch requests for a remote server here, although the server may batch itself.
BATCH_HERE = "batch_here"


def wrap(
    backend: Backend, config: ModelConfig, signature: ModelSignature, statistics: Statistics
) -> Infer:
    """Put a batcher in front of ``backend`` if ``config`` asks for one and it does not batch
    itself.

    Raises:
        InvalidArgument: ``config`` is invalid.
    """
    here, execution = parameters.boolean(config, BATCH_HERE, False), backend.execution
    wanted = dynamic_batching.read(config)
    if wanted is None or (execution.batches and not here):
        return backend
    if not execution.joins:
        wanted = wanted.one_by_one()
    if isinstance(backend, TogetherBackend):
        joiner = _beside(config, signature)
        return Batcher(backend, execution, wanted, joiner, statistics, backend.infer_together)
    return Batcher(backend, execution, wanted, Joiner(signature, execution.parameters), statistics)


def wrap_stream(
    backend: Backend, config: ModelConfig, signature: ModelSignature, statistics: Statistics
) -> InferStream | None:
    """Put a batcher in front of the streams of ``backend``; None: it has none, or wants none.

    Raises:
        InvalidArgument: ``config`` is invalid.
    """
    wanted = dynamic_batching.read(config)
    if not isinstance(backend, StreamingBackend):
        return None
    if wanted is None or not isinstance(backend, StreamsTogetherBackend):
        return backend.stream
    joiner = _beside(config, signature)
    return StreamBatcher(backend, backend.execution, wanted, joiner, statistics).stream


def _beside(config: ModelConfig, signature: ModelSignature) -> Joiner:
    """Chooses requests that a model gets side by side."""
    ragged = frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch)
    return Joiner(signature, parameters=False, ragged=ragged)
