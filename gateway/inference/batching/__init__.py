"""Schedulers: run requests for the same model version as one batch, and those of a sequence in
order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
from modelport.gateway.repository.untrusted_files import Companion
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import Infer, InferStream, ModelSignature

#: "true": batch requests for a remote server here, although the server may batch itself.
BATCH_HERE = "batch_here"


class Schedulers(NamedTuple):
    """Makes the schedulers of the requests for a backend, by its configuration.

    Attributes:
        statistics: of its version.
        limit: of its executions; None: they are not limited.
    """

    backend: Backend
    statistics: Statistics
    limit: LimitedModel | None = None

    def batched(self, signature: ModelSignature) -> Infer:
        """Put a batcher in front of the backend if it asks for one and does not batch itself.

        Raises:
            InvalidArgument: the configuration is invalid.
        """
        config, execution = self.backend.config, self.backend.execution
        here, wanted = parameters.boolean(config, BATCH_HERE, False), dynamic_batching.read(config)
        if wanted is None or (execution.batches and not here):
            return self.alone()
        if not execution.joins:
            wanted = wanted.one_by_one()
        joiner, together = self._joiner(signature)
        infer, together, execution = self._limited(self.backend, together, execution)
        return Batcher(infer, execution, wanted, joiner, self.statistics, together)

    def alone(self) -> Infer:
        """Call the backend for each request by itself."""
        infer, _, _ = self._limited(self.backend, None, self.backend.execution)
        return infer

    def streams(self, signature: ModelSignature) -> InferStream | None:
        """Put a batcher in front of the backend's streams; None: it has none.

        Raises:
            InvalidArgument: the configuration is invalid.
        """
        backend = self.backend
        wanted = dynamic_batching.read(backend.config)
        if not isinstance(backend, StreamingBackend):
            return None
        if not isinstance(backend, StreamsTogetherBackend) or (
            wanted is None and self.limit is None
        ):
            return backend.stream
        wanted = wanted or dynamic_batching.settings(backend.config).one_by_one()
        joiner, _ = self._joiner(signature)
        return StreamBatcher(
            backend, backend.execution, wanted, joiner, self.statistics, self._limited
        ).stream

    def sequences(
        self,
        stream: InferStream,
        companion: Companion,
        before: SequenceScheduler | None = None,
        removed: Sequence[BoundInstance] = (),
    ) -> SequenceScheduler | None:
        """Put a sequence scheduler in front of the backend if its configuration asks for one, and
        it runs here.

        Args:
            before: the scheduler of the same backend, which has ``removed`` instances since.

        Raises:
            InvalidArgument: the configuration is invalid.
        """
        backend, config, execution = self.backend, self.backend.config, self.backend.execution
        settings = sequence_batching.read(config)
        if settings is None or execution.batches:
            return None
        tensors = SequenceTensors(config, companion)
        scheduler = before or SequenceScheduler(config.name, settings, tensors)
        joiner, together = self._joiner(configuration.signature(scheduler_tensors.declared(config)))
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
                infer, beside, waits = self._limited(bound.infer, bound.together, execution)
                if settings.oldest is None:
                    runner = BatchRunner(infer, joiner, self.statistics, beside)
                    owners.append(DirectSlots(scheduler, bound, settings, tensors, runner, joiner))
                else:
                    oldest = settings.oldest
                    batcher = Batcher(infer, waits, oldest, joiner, self.statistics, beside)
                    owners.append(OldestSlots(scheduler, bound, batcher))
        scheduler.adopt(owners, removed)
        return scheduler

    def _limited(
        self, infer: Infer, together: Together | None, execution: Execution
    ) -> tuple[Infer, Together | None, Execution]:
        """Limit the callables of a batcher. Its execution then waits for the limit."""
        if self.limit is None:
            return infer, together, execution
        if together is not None:
            together = self.limit.together(together, execution)
        waits = execution._replace(inline=lambda _: False, ahead=0)
        return self.limit.infer(infer, execution), together, waits

    def _joiner(self, signature: ModelSignature) -> tuple[Joiner, Together | None]:
        """Join requests, or let the backend run them side by side."""
        backend = self.backend
        if isinstance(backend, TogetherBackend):
            ragged = scheduler_tensors.ragged_inputs(backend.config)
            return Joiner(signature, parameters=False, ragged=ragged), backend.infer_together
        return Joiner(signature, backend.execution.parameters), None
