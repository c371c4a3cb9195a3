"""Streams of responses: which models have them, and what stands for one where there is none.

A model is *decoupled* where its configuration says so (``model_transaction_policy``): it gives any
number of responses to a request, and cannot be asked for one. Batcher and response cache, which
know a request by its one answer, are not in front of it, as in Triton.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from modelport.gateway.backends.base import Backend, StreamingBackend
from modelport.gateway.errors import Decoupled
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import Deadline, Infer, InferRequest, InferResponse, InferStream


def is_decoupled(config: ModelConfig) -> bool:
    """Whether the model gives any number of responses."""
    decoupled: bool = config.model_transaction_policy.decoupled
    return decoupled


def of(backend: Backend) -> InferStream:
    """The responses of a decoupled model."""
    return backend.stream if isinstance(backend, StreamingBackend) else single(backend)


def single(infer: Infer) -> InferStream:
    """A stream of the one response that ``infer`` gives."""

    async def stream(
        request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        yield await infer(request, deadline)

    return stream


async def refuse(request: InferRequest, deadline: Deadline) -> InferResponse:
    """The ``Infer`` of a decoupled model.

    Raises:
        Decoupled: always.
    """
    raise Decoupled
