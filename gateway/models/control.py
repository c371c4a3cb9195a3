"""Model control across all processes of the gateway: inspect models and change what is served.

Protocols use a ``Control``. In a single process it is a ``LocalControl`` around the manager. With
workers it asks all of them (``gateway.server.workers``), so that any worker answers for all.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

from modelport.gateway.backends.backend_host import ModelControl
from modelport.gateway.backends.capabilities import CheckedBackend
from modelport.gateway.errors import Unsupported
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import VersionSettings, VersionState
from modelport.gateway.models.sent_files import SentFiles
from modelport.gateway.types import ModelFiles

#: Arguments and result are JSON values, because they may travel between processes.
Operation = Callable[[dict[str, Any]], Awaitable[Any]]
StateSource = Callable[[], Any]


class Control(ModelControl, Protocol):
    """Methods raise the errors of the ``ModelManager`` methods of the same name."""

    #: The gateway's main process, which receives signals.
    pid: int

    async def ready(self) -> bool: ...

    async def index(self, ready_only: bool = False) -> list[dict[str, str]]: ...

    async def states(self, name: str) -> list[tuple[int, VersionState, str]]: ...

    async def statistics(self, name: str = "", number: int = 0) -> list[dict[str, Any]]:
        """The entries of ``model_stats``: every version that has served, or the named ones."""
        ...

    async def pending(self, name: str, number: int) -> int:
        """The number of requests that wait for a response from a version."""
        ...

    async def unload_version(self, name: str, number: int) -> None: ...

    async def set_default(self, name: str, number: int) -> None: ...

    async def reload(self, wanted: Mapping[str, VersionSettings]) -> None: ...

    async def metrics(self, model: str | None, is_openmetrics: bool) -> tuple[str, bytes]:
        """Content type and text of the metrics of all workers together.

        Args:
            model: The model whose counters are wanted; None for those of all.
        """
        ...

    def register(
        self,
        name: str,
        operation: Operation,
        state: StateSource | None = None,
        restore: Operation | None = None,
    ) -> None:
        """Register ``operation`` for ``broadcast``; at start-up.

        Args:
            state: returns the state that a restarted worker needs, as a JSON value.
            restore: takes ``{"state": ...}`` from another worker before requests are served,
                and again if it has changed since; afterwards both workers have equal state.
        """
        ...

    async def broadcast(self, name: str, arguments: dict[str, Any]) -> Any:
        """Run an operation in every worker, one after the other; return this worker's result.

        Raises:
            ModelportError: as the operation raises; the message says if only some workers
                failed.
        """
        ...


class Operations:
    """Registered operations by name."""

    def __init__(self) -> None:
        self._operations: dict[str, Operation] = {}
        self._states: dict[str, tuple[StateSource, Operation]] = {}

    def register(
        self,
        name: str,
        operation: Operation,
        state: StateSource | None = None,
        restore: Operation | None = None,
    ) -> None:
        if name in self._operations:
            raise ValueError(f"operation '{name}' is registered twice")
        self._operations[name] = operation
        if state is not None and restore is not None:
            self._states[name] = (state, restore)

    async def run(self, name: str, arguments: dict[str, Any]) -> Any:
        return await self._operations[name](arguments)

    def states(self) -> dict[str, Any]:
        """The state of every owner, as ``restore`` takes it."""
        return {name: state() for name, (state, _) in self._states.items()}

    async def restore(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            await self._states[name][1]({"state": state})


def documents_of(manager: ModelManager, name: str = "", number: int = 0) -> list[dict[str, Any]]:
    """The entries of ``model_stats`` for this process."""
    return [
        statistics.document(model, version)
        for model, version, statistics in manager.statistics()
        if name in ("", model) and number in (0, version)
    ]


class LocalControl:
    """The control of a gateway that is a single process."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager
        self.pid = os.getpid()
        operations = Operations()
        self.register, self.broadcast = operations.register, operations.run
        self.unload_version = manager.unload_version
        self._sent = SentFiles(manager.outside, manager.dropped)

    async def load(
        self,
        name: str,
        override: str | None = None,
        source: str = "",
        files: ModelFiles | None = None,
    ) -> None:
        self._manager.require_explicit()
        loading = partial(self._manager.load, name, override)
        await self._sent.completed(lambda folder: loading(folder or source), name, override, files)

    async def unload(self, name: str, dependents: bool = False) -> None:
        await self._sent.completed(lambda _: self._manager.unload(name, dependents))

    async def reload(self, wanted: Mapping[str, VersionSettings]) -> None:
        await self._sent.completed(lambda _: self._manager.reload(wanted))

    async def ready(self) -> bool:
        return self._manager.ready

    async def require_ready(self, name: str, number: int = 0) -> None:
        version = self._manager.require_ready(name, number)
        if isinstance(version.backend, CheckedBackend):
            await version.backend.check_ready()

    async def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        return self._manager.index(ready_only)

    async def states(self, name: str) -> list[tuple[int, VersionState, str]]:
        return self._manager.states(name)

    async def statistics(self, name: str = "", number: int = 0) -> list[dict[str, Any]]:
        return documents_of(self._manager, name, number)

    async def pending(self, name: str, number: int) -> int:
        return self._manager.get(name, number).statistics.pending

    async def metrics(self, model: str | None, is_openmetrics: bool) -> tuple[str, bytes]:
        raise Unsupported("a single process serves its own metrics")

    async def set_default(self, name: str, number: int) -> None:
        self._manager.set_default(name, number)
