"""Optional features of backends, besides the contract of ``base``; ``isinstance`` finds them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from modelport.gateway.errors import ModelportError
from modelport.gateway.types import (
    Deadline,
    Infer,
    InferRequest,
    InferResponse,
    InferStream,
    ModelSignature,
)

if TYPE_CHECKING:
    from modelport.gateway.backends.backend_host import Loads
    from modelport.gateway.repository.config import ModelConfig

Outcome = InferResponse | BaseException
#: Runs requests as one batch, each with an outcome of its own.
Together = Callable[
    [Sequence[InferRequest], Sequence[Deadline], Sequence[asyncio.Future[InferResponse]]],
    Awaitable[Sequence[Outcome]],
]
#: Computes the response to a request in the calling thread.
BlockingInfer = Callable[[InferRequest], InferResponse]
#: Work of a background thread, which computes by this function.
BackgroundWork = Callable[[BlockingInfer], None]


@runtime_checkable
class RoutedBackend(Protocol):
    """A ``Backend`` that sends requests to other servers."""

    def endpoints(self) -> Iterable[tuple[str, bool]]:
        """``host:port`` of each endpoint, and whether it is ejected."""


@runtime_checkable
class LabelledBackend(Protocol):
    """A ``Backend`` whose outputs have class labels besides those of its configuration."""

    def labels_of(self, output: str) -> tuple[str, ...]:
        """The labels of ``output``; empty if it has none.

        Raises:
            Unavailable: the model that has the labels is not available.
        """


@runtime_checkable
class ComposedBackend(Protocol):
    """A ``Backend`` whose responses other models of this gateway compute."""

    def step_loads(self) -> Loads | None:
        """The loads of the versions that compute them now; None: they vary by request."""


@runtime_checkable
class StreamingBackend(Protocol):
    """A ``Backend`` that can give several responses to a request (Triton's *decoupled* models).

    It is used if the configuration says ``model_transaction_policy { decoupled: true }``; then any
    other backend gives a stream of its one response.
    """

    def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        """Compute each response when it is requested, or a bounded number ahead.

        Closing the generator, or cancelling the task that awaits the next response, stops the work.
        The caller enforces the deadline; a backend may also raise ``TimedOut`` itself.
        """


@runtime_checkable
class CheckedBackend(Protocol):
    """A ``Backend`` whose model has a check of its own."""

    async def check_ready(self) -> None:
        """Ask the model; raises ``Unavailable`` if it is not ready, or does not say so in time."""


@runtime_checkable
class TogetherBackend(Protocol):
    """A ``Backend`` whose batches are requests side by side, not one request with all rows."""

    async def infer_together(
        self,
        requests: Sequence[InferRequest],
        deadlines: Sequence[Deadline],
        replies: Sequence[asyncio.Future[InferResponse]],
    ) -> Sequence[InferResponse | ModelportError]:
        """Run ``requests`` as one batch; each has an outcome of its own.

        Args:
            replies: those that the clients wait for; a cancelled one withdraws its request.
        """


class OpenedStream(Protocol):
    """The responses to one request, which need not have been executed yet."""

    def settle(self, outcome: ModelportError, final: bool) -> None:
        """End the responses by an error."""


@runtime_checkable
class StreamsTogetherBackend(Protocol):
    """A ``StreamingBackend`` whose batches are requests side by side."""

    def open(self, request: InferRequest, deadline: Deadline) -> Any:
        """Open the stream of a request that ``execute_together`` gets later.

        Returns:
            An ``OpenedStream`` of the backend's own type.
        """

    def responses(self, opened: Any) -> AsyncGenerator[InferResponse, None]:
        """The responses, as of ``StreamingBackend.stream``; closing it withdraws the request."""

    async def execute_together(self, opened: Sequence[Any]) -> None:
        """Run requests as one batch; return when their instance can execute the next one."""


class BoundInstance(NamedTuple):
    """One instance of a model, for the requests of a sequence.

    Attributes:
        together: as of a ``TogetherBackend``; None: it has none.
        generation: changes when the instance has lost what it had kept.
        retire: called after the last request to an instance that ``ScalableBackend.scale`` removed;
            done when it has ended.
    """

    infer: Infer
    stream: InferStream
    together: Together | None = None
    generation: Callable[[], int] = lambda: 0
    retire: Callable[[], asyncio.Future[None]] | None = None


@runtime_checkable
class StatefulBackend(Protocol):
    """A ``Backend`` whose instances keep what earlier requests have told them."""

    def bound_instances(self) -> Sequence[BoundInstance]:
        """The instances, in order."""


@runtime_checkable
class ScalableBackend(StatefulBackend, Protocol):
    """A ``Backend`` whose instances come and go while others stay."""

    async def scale(self, config: ModelConfig) -> Sequence[BoundInstance]:
        """Serve with the ``instance_group`` of ``config``, which differs in nothing else.

        Returns:
            The instances that get no more requests, but those of their sequences; the caller
            retires them.

        Raises:
            ModelportError: an instance does not start; nothing has changed.
        """


@runtime_checkable
class SignatureBackend(Protocol):
    """A ``Backend`` whose artifact has named signatures, like a SavedModel.

    ``InferRequest.signature`` names one; tensors have the model's own shapes.
    """

    #: The served signatures.
    signatures: Mapping[str, ModelSignature]
    #: All signatures of the artifact, as a serialized ``tensorflow.serving.SignatureDefMap``.
    signature_defs: bytes


@runtime_checkable
class BackgroundBackend(Protocol):
    """A ``Backend`` that computes on this machine, and can do so at a lower priority."""

    def in_background(self, work: BackgroundWork) -> None:
        """Call ``work`` in a thread of lower priority, after the work before it.

        ``work`` must not raise. It is dropped if the backend is unloaded.
        """
