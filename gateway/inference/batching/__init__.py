"""Dynamic batching: run requests for the same model version as one batch."""

from __future__ import annotations

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Backend
from modelport.gateway.inference.batching import dynamic_batching
from modelport.gateway.inference.batching.batcher import Batcher
from modelport.gateway.inference.batching.joining import Joiner
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import Infer, ModelSignature

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
    joiner = Joiner(signature, execution.parameters)
    return Batcher(backend, execution, wanted, joiner, statistics)
