"""The seam between the gateway and whatever computes: a loader makes a ``Backend``.

A backend is an ``Infer`` that knows its own configuration. It gets requests that are already valid
against that signature and answers with outputs in the order asked for.
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
    """What a backend may use of the gateway it is loaded into.

    Attributes:
        loop: the gateway's event loop, on which backends are called; clients of remote servers are
            made there.
        infer: a request to any model that is READY, with its own handle, checks and statistics.
        stream: the same of a decoupled model.
        config_of: the completed configuration of a READY model, by name and version (0: newest);
            raises ``NotFound`` or ``Unavailable``.
        labels_of: the class labels of a READY model's output, by model, version and output; raises
            the same.
        package: writes the artifact as the named server wants it (``torchserve``, ``tfserving``,
            ``triton``) to a path that is not there yet.
        program: how to start the named server.
    """

    loop: asyncio.AbstractEventLoop
    infer: Infer
    config_of: Callable[[str, int], ModelConfig]
    package: Callable[[Artifact, str, Path], None]
    program: Callable[[str], Program]
    stream: InferStream
    labels_of: Callable[[str, int, str], tuple[str, ...]]


class Artifact(NamedTuple):
    """What a loader gets.

    ``config`` may lack inputs and outputs: the artifact then tells them. ``path`` may be a copy
    that is there while it loads and no longer; a model that only a route names has none of its own,
    and ``path`` is then the current folder. ``host`` is None in tests of embedded runtimes only.

    ``native``: the artifact may run native code, and operators that reach files: its signature was
    verified, or ``--allow-native-code`` says so. It may not unpickle objects even then.
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
    """How a backend executes: what a batcher in front of it has to know.

    Attributes:
        batches: it gathers requests itself, or hands them to a server that may.
        interruptible: a call that is cancelled stops computing; otherwise it computes to its end.
        parameters: an answer may depend on the request's parameters.
        inline: whether a call with this request, made now, answers without awaiting anything: it
            takes so little that waiting for others would cost more.
        queues: requests wait in it for an instance, and ``Timing.queue_ns`` is 0 until then.
        ahead: so many calls it may be given beside those that run, so that it has the next when one
            ends. A call that is cancelled before it has begun is not computed.
    """

    batches: bool = True
    interruptible: bool = True
    parameters: bool = True
    inline: Callable[[InferRequest], bool] = _awaits
    queues: bool = False
    ahead: int = 0


#: Of a backend that hands requests on.
ELSEWHERE = Execution()


class Backend(Protocol):
    """One loaded model version."""

    #: The model's configuration, complete: inputs and outputs are those of the artifact.
    config: ModelConfig
    execution: Execution

    @property
    def problem(self) -> str:
        """Why it cannot answer just now, as a public reason: a server is down, or being restarted.

        Empty while it can. The event loop alone changes it. Requests that come meanwhile get
        ``Unavailable`` from the backend itself.
        """

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse: ...

    def unload(self) -> None:
        """Free everything; called once, when no request is in flight."""


@runtime_checkable
class RoutedBackend(Protocol):
    """A ``Backend`` that asks other servers."""

    def endpoints(self) -> Iterable[tuple[str, bool]]:
        """``host:port`` of each, and whether it is ejected."""


@runtime_checkable
class LabelledBackend(Protocol):
    """A ``Backend`` whose outputs have class labels that are not its configuration's."""

    def labels_of(self, output: str) -> tuple[str, ...]:
        """Empty where the output has none.

        Raises:
            Unavailable: a model that has them is not there.
        """


@runtime_checkable
class StreamingBackend(Protocol):
    """A ``Backend`` that can answer a request any number of times (Triton's *decoupled* models).

    It is asked so where the configuration says ``model_transaction_policy { decoupled: true }``;
    any other backend gives its one response there.
    """

    def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        """An ``InferStream``: a response is made when it is asked for, or bounded ahead of that.

        Closing it, or cancelling whoever waits for the next response, stops the work. It ends by
        itself when the deadline passes (``TimedOut``) only where the backend can tell; the data
        plane watches over it.
        """


@runtime_checkable
class SignatureBackend(Protocol):
    """A ``Backend`` whose artifact has named signatures of its own, as a SavedModel has.

    It is asked for one by ``InferRequest.signature``, in the shapes of the model.
    """

    #: Those that it serves.
    signatures: Mapping[str, ModelSignature]
    #: All that the artifact has, as a serialized ``tensorflow.serving.SignatureDefMap``.
    signature_defs: bytes


class BackendLoader(Protocol):
    """Blocking, called in a thread. The backend it returns is warm.

    Raises:
        Unavailable: it cannot be served yet, because something it needs is down or not READY; the
            load is tried again by itself until it succeeds.
        ModelportError: with a public reason why the artifact cannot be served.
    """

    def __call__(self, artifact: Artifact) -> Backend: ...
