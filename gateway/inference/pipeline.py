"""The pipeline of a model version: response cache, admission, batcher and backend.

Each stage is an ``Infer`` around the next one. ``build`` composes them once, when the version
loads; a stage is present only if the model's configuration asks for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from modelport.gateway.backends.capabilities import BoundInstance
from modelport.gateway.errors import Decoupled
from modelport.gateway.inference import admission, cache
from modelport.gateway.inference.admission import OverloadedModels
from modelport.gateway.inference.batching import Schedulers, dynamic_batching
from modelport.gateway.inference.batching.sequences import SequenceScheduler
from modelport.gateway.inference.cache import ResponseCache
from modelport.gateway.inference.rate_limiter import LimitedModel, RateLimiter
from modelport.gateway.inference.signatures import NamedSignatures
from modelport.gateway.inference.text.text_infer import TEXT_SIGNATURE, TextInfer, TextInterface
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.untrusted_files import Companion
from modelport.gateway.types import (
    Deadline,
    Infer,
    InferRequest,
    InferResponse,
    InferStream,
    finished,
)


@dataclass(slots=True)
class SharedState:
    """State that the pipelines of all models of this process share."""

    #: None without ``--cache-config``.
    response_cache: ResponseCache | None = None
    overloaded: OverloadedModels = field(default_factory=set)
    #: None without ``--rate-limit``.
    rate_limiter: RateLimiter | None = None

    def limit(self, config: ModelConfig) -> LimitedModel | None:
        """The limit of the executions of ``config``'s instances, if it has one; as the limiter."""
        return self.rate_limiter.limit(config) if self.rate_limiter is not None else None


def _never() -> bool:
    return False


class Pipeline(NamedTuple):
    """The entry points of a model version.

    Attributes:
        infer: answers a request with one response.
        stream: answers a request with any number of responses.
        refuses: whether admission refuses the next request regardless of its content, so that it
            need not be read.
        overloaded: whether the version has more requests than it can compute.
        sequences: the scheduler of its sequences, if it has some.
    """

    infer: Infer
    stream: InferStream
    refuses: Callable[[], bool] = _never
    overloaded: Callable[[], bool] = _never
    sequences: SequenceScheduler | None = None


def build(
    name: str,
    number: int,
    signatures: NamedSignatures,
    shared: SharedState,
    companion: Companion,
    text: TextInterface | None,
    schedulers: Schedulers,
    before: SequenceScheduler | None = None,
    removed: Sequence[BoundInstance] = (),
) -> Pipeline:
    """Compose the pipeline of version ``number`` of the model ``name``.

    ``before`` has the sequences of the same backend, which has ``removed`` instances since.

    A decoupled model gives any number of responses to a request. As in Triton, it has no cache,
    which expects one response for each request.

    Raises:
        InvalidArgument: the configuration of a stage is invalid.
    """
    backend, statistics = schedulers.backend, schedulers.statistics
    config = backend.config
    dynamic_batching.read(config)
    cache.check(name, config)
    signature = configuration.signature(config)
    stream = schedulers.streams(signature) or _single(schedulers.alone())
    sequences = schedulers.sequences(stream, companion, before, removed)
    if sequences is not None:
        stream = sequences.stream
    if config.model_transaction_policy.decoupled:
        return Pipeline(_refuse, stream, sequences=sequences)
    batched = sequences or schedulers.batched(signature)
    if text is not None:
        infer = TextInfer(text, schedulers.batched(text.tensors), name, number)
        signatures.add(TEXT_SIGNATURE, text.signature, infer)
    dispatched = signatures.before(batched)
    guarded = admission.wrap(dispatched, config, backend.execution, shared.overloaded)
    cached = cache.wrap(guarded, name, number, backend, statistics, shared.response_cache)
    if not isinstance(guarded, admission.OverloadGuard):
        return Pipeline(cached, stream, sequences=sequences)
    # Cached responses are sent under any load, so the request has to be read.
    refuses = guarded.refuses if cached is guarded else _never
    return Pipeline(cached, stream, refuses, guarded.overloaded, sequences)


def _single(infer: Infer) -> InferStream:
    """A stream of the one response of ``infer``."""

    async def stream(
        request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        yield await finished(infer(request, deadline))

    return stream


def _refuse(request: InferRequest, deadline: Deadline) -> InferResponse:
    """The ``Infer`` of a decoupled model."""
    raise Decoupled
