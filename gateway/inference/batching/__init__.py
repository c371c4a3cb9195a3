"""Schedulers: run requests for the same model version as one batch, and those of a sequence in
order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Backend, Execution
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
from modelport.gateway.inference.rate_limiter import LimitedModel
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import scheduler_tensors
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.untrusted_files import Companion
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import Infer, InferStream, ModelSignature

#: "true": batch requests for a remote server here, although the server may batch itself.
BATCH_HERE = "batch_here"


def wrap(
    backend: Backend,
    config: ModelConfig,
    signature: ModelSignature,
    statistics: Statistics,
    limit: LimitedModel | None = None,
) -> Infer:
    """Put a batcher in front of ``backend`` if ``config`` asks for one and it does not batch
    itself.

    Its executions are limited by ``limit``.

    Raises:
        InvalidArgument: ``config`` is invalid.
    """
    here, execution = parameters.boolean(config, BATCH_HERE, False), backend.execution
    wanted = dynamic_batching.read(config)
    if wanted is None or (execution.batches and not here):
        return alone(backend, limit)
    if not execution.joins:
        wanted = wanted.one_by_one()
    joiner, together = _joiner(backend, config, signature)
    infer, together, execution = _limited(limit, backend, together, execution)
    return Batcher(infer, execution, wanted, joiner, statistics, together)


def alone(backend: Backend, limit: LimitedModel | None) -> Infer:
    """Call ``backend`` for each request by itself, within ``limit``."""
    return backend if limit is None else limit.infer(backend, backend.execution)


def _limited(
    limit: LimitedModel | None, infer: Infer, together: Together | None, execution: Execution
) -> tuple[Infer, Together | None, Execution]:
    """Limit the callables of a batcher. Its execution then waits for the limit."""
    if limit is None:
        return infer, together, execution
    if together is not None:
        together = limit.together(together, execution)
    waits = execution._replace(inline=lambda _: False, ahead=0)
    return limit.infer(infer, execution), together, waits


def _joiner(
    backend: Backend, config: ModelConfig, signature: ModelSignature
) -> tuple[Joiner, Together | None]:
    """Join requests, or let the backend run them side by side."""
    if isinstance(backend, TogetherBackend):
        ragged = scheduler_tensors.ragged_inputs(config)
        return Joiner(signature, parameters=False, ragged=ragged), backend.infer_together
    return Joiner(signature, backend.execution.parameters), None


def wrap_stream(
    backend: Backend,
    config: ModelConfig,
    signature: ModelSignature,
    statistics: Statistics,
    limit: LimitedModel | None = None,
) -> InferStream | None:
    """Put a batcher in front of the streams of ``backend``; None: it has none, or wants none.

    Raises:
        InvalidArgument: ``config`` is invalid.
    """
    wanted = dynamic_batching.read(config)
    if not isinstance(backend, StreamingBackend):
        return None
    if not isinstance(backend, StreamsTogetherBackend) or (wanted is None and limit is None):
        return backend.stream
    wanted = wanted or dynamic_batching.settings(config).one_by_one()
    joiner, _ = _joiner(backend, config, signature)
    limited = partial(_limited, limit)
    return StreamBatcher(backend, backend.execution, wanted, joiner, statistics, limited).stream


def schedule_sequences(
    backend: Backend,
    stream: InferStream,
    statistics: Statistics,
    companion: Companion,
    limit: LimitedModel | None = None,
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
    else:
        if together:
            execution = execution._replace(inline=lambda _: False)
        owners = []
        for bound in bounds:
            infer, beside, waits = _limited(limit, bound.infer, bound.together, execution)
            if settings.oldest is None:
                runner = BatchRunner(infer, joiner, statistics, beside)
                owners.append(DirectSlots(scheduler, bound, settings, tensors, runner, joiner))
            else:
                batcher = Batcher(infer, waits, settings.oldest, joiner, statistics, beside)
                owners.append(OldestSlots(scheduler, bound, batcher))
    scheduler.adopt(owners, removed)
    return scheduler
