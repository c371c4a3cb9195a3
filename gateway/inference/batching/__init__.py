"""Dynamic batching: requests that wait for the same model version run as one."""

from __future__ import annotations

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Backend
from modelport.gateway.inference.batching import settings
from modelport.gateway.inference.batching.batcher import Batcher
from modelport.gateway.inference.batching.joining import Joiner
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import Infer, ModelSignature

#: With "true", requests to a server that may batch itself are gathered here already.
BATCH_HERE = "batch_here"


def check(config: ModelConfig) -> None:
    """Raise where ``dynamic_batching`` cannot be, whether or not it has an effect here.

    Raises:
        InvalidArgument: a size, a level or a policy that cannot be.
    """
    if config.HasField("dynamic_batching"):
        settings.read(config)


def wrap(
    backend: Backend, config: ModelConfig, signature: ModelSignature, statistics: Statistics
) -> Infer:
    """``backend`` behind a batcher, where ``config`` asks for one and it does not batch itself.

    Raises:
        InvalidArgument: ``config`` asks for what cannot be.
    """
    here = parameters.boolean(config, BATCH_HERE, False)
    if not config.HasField("dynamic_batching"):
        return backend
    execution = backend.execution
    if execution.batches and not here:
        return backend
    wanted = settings.read(config)
    joiner = Joiner(signature, execution.parameters)
    return Batcher(backend, execution, wanted, joiner, statistics)
