"""The contract between the gateway and its backends: a ``BackendLoader`` makes a ``Backend``.

A backend is an ``Infer`` that knows its model's configuration. Requests are already validated
against that configuration; the response has its outputs in the requested order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes import ModelRoute, Program
from modelport.gateway.types import (
    Deadline,
    Infer,
    InferRequest,
    InferResponse,
    InferStream,
    ModelSignature,
)


class Host(NamedTuple):
    """The parts of the gateway that a backend may use.

    Attributes:
        loop: the gateway's event loop. Backends are called on it, and create their clients on it.
        infer: sends a request to any READY model, with its own validation and statistics.
        stream: the same for a decoupled model.
        config_of: the completed configuration of a READY model, by name and version (0: newest);
            raises ``NotFound`` or ``Unavailable``.
        labels_of: the class labels of a READY model's output, by model, version and output; raises
            the same errors.
        program: the settings for starting the named server.
    """

    loop: asyncio.AbstractEventLoop
    infer: Infer
    config_of: Callable[[str, int], ModelConfig]
    program: Callable[[str], Program]
    stream: InferStream
    labels_of: Callable[[str, int, str], tuple[str, ...]]


class Artifact(NamedTuple):
    """The argument of a loader.

    ``config`` may lack inputs and outputs; the loader then reads them from the artifact. ``path``
    may be a copy that is removed after loading; for a model that only a route names, it is the
    current folder. ``host`` is None only in tests of embedded runtimes.

    ``native``: the artifact may run native code, and operators that access files, because its
    signature was verified or ``--allow-native-code`` is set. Even then it may not unpickle objects.
    """

    model_name: str
    version: int
    path: Path
    config: ModelConfig
    threads: int
    route: ModelRoute | None = None
    host: Host | None = None
    native: bool = False


def _awaits(_: InferRequest) -> bool:
    return False


class Execution(NamedTuple):
    """The properties of a backend's execution that a batcher needs.

    Attributes:
        batches: the backend forms batches itself, or passes requests to a server that may.
        interruptible: cancelling a call stops its computation; otherwise it runs to the end.
        parameters: a response may depend on the request's parameters.
        inline: whether a call with this request, made now, returns without awaiting anything and is
            so short that batching would cost more.
        queues: requests wait in the backend for an instance, and ``Timing.queue_ns`` is 0 until
            then.
        ahead: the number of calls the backend accepts beyond those running, so that it can start
            the next at once. A call that is cancelled before it begins is not computed.
    """

    batches: bool = True
    interruptible: bool = True
    parameters: bool = True
    inline: Callable[[InferRequest], bool] = _awaits
    queues: bool = False
    ahead: int = 0


#: For a backend that passes requests on.
ELSEWHERE = Execution()


class Backend(Protocol):
    """A loaded model version."""

    #: The complete model configuration, with the inputs and outputs of the artifact.
    config: ModelConfig
    execution: Execution

    @property
    def problem(self) -> str:
        """The public reason why the backend cannot answer now, such as a server being restarted.

        Empty while it can. Only the event loop changes it. Meanwhile the backend answers requests
        with ``Unavailable``.
        """

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse: ...

    def unload(self) -> None:
        """Free all resources; called once, when no request is in flight."""


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
class SignatureBackend(Protocol):
    """A ``Backend`` whose artifact has named signatures, like a SavedModel.

    ``InferRequest.signature`` names one; tensors have the model's own shapes.
    """

    #: The served signatures.
    signatures: Mapping[str, ModelSignature]
    #: All signatures of the artifact, as a serialized ``tensorflow.serving.SignatureDefMap``.
    signature_defs: bytes


class BackendLoader(Protocol):
    """Loads an artifact. Blocking, called in a thread. The returned backend is warm.

    Raises:
        Unavailable: a dependency is not available yet; the load is retried until it succeeds.
        ModelportError: the artifact cannot be served; the message is a public reason.
    """

    def __call__(self, artifact: Artifact) -> Backend: ...
