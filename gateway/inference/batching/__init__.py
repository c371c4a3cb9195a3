"""Schedulers: run requests for the same model version as one batch, and those of a sequence in
order."""

from __future__ import annotations

from collections.abc import Sequence

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Backend
from modelport.gateway.backends.capabilities import (
    BoundInstance,
    StatefulBackend,
    StreamingBackend,
    StreamsTogetherBackend,
    Together,
    TogetherBackend,
)
from modelport.gateway.inference.batching import dynamic_batching, sequence_batching
from modelport.gateway.inference.batching.batcher import Batcher
from modelport.gateway.inference.batching.execution import BatchRunner
from modelport.gateway.inference.batching.joining import Joiner
from modelport.gateway.inference.batching.sequence_tensors import SequenceTensors
from modelport.gateway.inference.batching.sequences import SequenceScheduler, SlotOwner
from modelport.gateway.inference.batching.slots import DirectSlots, OldestSlots, StreamedSlots
from modelport.gateway.inference.batching.stream_batcher import StreamBatcher
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import scheduler_tensors
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.untrusted_files import Companion
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
    joiner, together = _joiner(backend, config, signature)
    return Batcher(backend, execution, wanted, joiner, statistics, together)


def _joiner(
    backend: Backend, config: ModelConfig, signature: ModelSignature
) -> tuple[Joiner, Together | None]:
    """Join requests, or let the backend run them side by side."""
    if isinstance(backend, TogetherBackend):
        ragged = scheduler_tensors.ragged_inputs(config)
        return Joiner(signature, parameters=False, ragged=ragged), backend.infer_together
    return Joiner(signature, backend.execution.parameters), None


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
    joiner, _ = _joiner(backend, config, signature)
    return StreamBatcher(backend, backend.execution, wanted, joiner, statistics).stream


def schedule_sequences(
    backend: Backend,
    stream: InferStream,
    statistics: Statistics,
    companion: Companion,
    before: SequenceScheduler | None = None,
    removed: Sequence[BoundInstance] = (),
) -> SequenceScheduler | None:
    """Put a sequence scheduler in front of ``backend`` if its configuration asks for one, and it
    runs here.

    Args:
        before: the scheduler of the same backend, which has ``removed`` instances since.

    Raises:
        InvalidArgument: the configuration is invalid.
    """
    config, execution = backend.config, backend.execution
    settings = sequence_batching.read(config)
    if settings is None or execution.batches:
        return None
    tensors = SequenceTensors(config, companion)
    scheduler = before or SequenceScheduler(config.name, settings, tensors)
    signature = configuration.signature(scheduler_tensors.declared(config))
    joiner, together = _joiner(backend, config, signature)
    bounds = [BoundInstance(backend, stream, together)] * settings.instances
    if isinstance(backend, StatefulBackend):
        known = [owner.bound for owner in scheduler.owners.values()]
        bounds = [bound for bound in backend.bound_instances() if bound not in known]
    owners: list[SlotOwner]
    if config.model_transaction_policy.decoupled:
        owners = [StreamedSlots(scheduler, bound) for bound in bounds]
    elif settings.oldest is None:
        owners = [
            DirectSlots(
                scheduler, bound, settings, tensors,
                BatchRunner(bound.infer, joiner, statistics, bound.together), joiner,
            )
            for bound in bounds
        ]  # fmt: skip
    else:
        alone = execution._replace(inline=lambda _: False) if together else execution
        owners = [
            OldestSlots(
                scheduler, bound,
                Batcher(bound.infer, alone, settings.oldest, joiner, statistics, bound.together),
            )
            for bound in bounds
        ]  # fmt: skip
    scheduler.adopt(owners, removed)
    return scheduler
