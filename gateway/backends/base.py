"""The contract between the gateway and its backends: a ``BackendLoader`` makes a ``Backend``.

A backend is an ``Infer`` that knows its model's configuration. Requests are already validated
against it; the response has its outputs in the requested order. ``capabilities`` has what a backend
may offer besides, ``backend_host`` what it may use, ``backend_registry`` the list of backends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from modelport.gateway.types import Answer, Deadline, InferRequest

if TYPE_CHECKING:
    from modelport.gateway.backends.backend_host import Host
    from modelport.gateway.repository.config import ModelConfig
    from modelport.gateway.repository.routes_file import ModelRoute
    from modelport.gateway.settings import PythonModels


class Artifact(NamedTuple):
    """The argument of a loader.

    ``config`` may lack inputs and outputs; the loader then reads them from the artifact. ``path``
    may be a copy that is removed after loading (``copied``); for a model that only a route names,
    it is the current folder. ``host`` is None only in tests of embedded runtimes. ``native``: it
    may run native code, and operators that access files (verified, or ``--allow-native-code``), but
    may unpickle nothing. ``python``: the limits of Python models; None: it may not be one.
    """

    model_name: str
    version: int
    path: Path
    config: ModelConfig
    threads: int
    route: ModelRoute | None = None
    host: Host | None = None
    native: bool = False
    python: PythonModels | None = None
    copied: bool = False


class Execution(NamedTuple):
    """The properties of a backend's execution that a batcher needs.

    Attributes:
        batches: the backend forms batches, or passes requests to a server that may.
        interruptible: cancelling a call stops its computation.
        parameters: a response may depend on the request's parameters.
        inline: whether a call with this request now returns the response itself, soon.
        queues: requests wait in the backend, and ``Timing.queue_ns`` is 0 until their turn.
        joins: requests may be computed as one batch.
        ahead: the number of calls accepted beyond those running; not computed if cancelled before.
    """

    batches: bool = True
    interruptible: bool = True
    parameters: bool = True
    inline: Callable[[InferRequest], bool] = lambda _: False
    queues: bool = False
    joins: bool = True
    ahead: int = 0


ELSEWHERE = Execution()  #: For a backend that passes requests on.


class Backend(Protocol):
    """A loaded model version."""

    #: The complete model configuration, with the inputs and outputs of the artifact.
    config: ModelConfig
    execution: Execution

    @property
    def problem(self) -> str:
        """The public reason why the backend cannot answer now, such as no endpoint being reachable.

        Empty while it can. Only the event loop changes it. Meanwhile the backend answers requests
        with ``Unavailable``.
        """

    def __call__(self, request: InferRequest, deadline: Deadline) -> Answer: ...

    def unload(self) -> None:
        """Free all resources; called once, when no request is in flight."""


class BackendLoader(Protocol):
    """Loads an artifact. Blocking, called in a thread. The returned backend is warm.

    Raises:
        Unavailable: a dependency is not available yet; the load is retried until it succeeds.
        ModelportError: the artifact cannot be served; the message is a public reason.
    """

    def __call__(self, artifact: Artifact) -> Backend: ...
