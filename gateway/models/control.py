"""What concerns every process of the gateway: looking at the models, and changing what is served.

Protocols ask a ``Control``. Where the gateway is one process it is that process's manager
(``LocalControl``); with workers every one of them is asked (``gateway.server.workers``), so that
whichever worker a client reaches answers for all.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from modelport.gateway.errors import Unsupported
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import VersionSettings, VersionState

#: Arguments and answer are JSON values: they may travel between processes.
Operation = Callable[[dict[str, Any]], Awaitable[Any]]
StateSource = Callable[[], Any]


class Control(Protocol):
    """Errors are those of ``ModelManager``'s methods of the same names."""

    #: The process that is the gateway to the outside: signals go to it.
    pid: int

    async def ready(self) -> bool: ...

    async def require_ready(self, name: str, number: int = 0) -> None: ...

    async def index(self, ready_only: bool = False) -> list[dict[str, str]]: ...

    async def states(self, name: str) -> list[tuple[int, VersionState, str]]: ...

    async def statistics(self, name: str = "", number: int = 0) -> list[dict[str, Any]]:
        """The entries of ``model_stats``: of every version that has served, or of those named."""
        ...

    async def pending(self, name: str, number: int) -> int:
        """Requests that await an answer of a version."""
        ...

    async def load(self, name: str, override: str | None = None) -> None: ...

    async def unload(self, name: str, dependents: bool = False) -> None: ...

    async def unload_version(self, name: str, number: int) -> None: ...

    async def set_default(self, name: str, number: int) -> None: ...

    async def reload(self, wanted: Mapping[str, VersionSettings]) -> None: ...

    async def metrics(self) -> tuple[str, bytes]:
        """Content type and text of the metrics of all workers."""
        ...

    def register(
        self,
        name: str,
        operation: Operation,
        state: StateSource | None = None,
        restore: Operation | None = None,
    ) -> None:
        """Make ``operation`` known for ``broadcast``; at wiring time.

        Args:
            state: what a worker that is started later has to know, as a JSON value.
            restore: gets ``{"state": ...}`` of another worker, before requests are answered, and
                again if it has changed meanwhile: afterwards both workers' states are equal.
        """
        ...

    async def broadcast(self, name: str, arguments: dict[str, Any]) -> Any:
        """Run an operation in every worker, one at a time; what it returned in this one.

        Raises:
            ModelportError: as the operation; it tells where only some of the workers failed.
        """
        ...


class Operations:
    """What was registered, by name."""

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
        """What ``restore`` takes, of every owner."""
        return {name: state() for name, (state, _) in self._states.items()}

    async def restore(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            await self._states[name][1]({"state": state})


def documents_of(manager: ModelManager, name: str = "", number: int = 0) -> list[dict[str, Any]]:
    """The entries of ``model_stats`` of this process."""
    return [
        statistics.document(model, version)
        for model, version, statistics in manager.statistics()
        if name in ("", model) and number in (0, version)
    ]


class LocalControl:
    """This process is the gateway."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager
        self.pid = os.getpid()
        operations = Operations()
        self.register, self.broadcast = operations.register, operations.run
        self.load, self.unload, self.reload = manager.load, manager.unload, manager.reload
        self.unload_version = manager.unload_version

    async def ready(self) -> bool:
        return self._manager.ready

    async def require_ready(self, name: str, number: int = 0) -> None:
        self._manager.require_ready(name, number)

    async def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        return self._manager.index(ready_only)

    async def states(self, name: str) -> list[tuple[int, VersionState, str]]:
        return self._manager.states(name)

    async def statistics(self, name: str = "", number: int = 0) -> list[dict[str, Any]]:
        return documents_of(self._manager, name, number)

    async def pending(self, name: str, number: int) -> int:
        return self._manager.get(name, number).statistics.pending

    async def metrics(self) -> tuple[str, bytes]:
        raise Unsupported("the only process has its metrics itself")

    async def set_default(self, name: str, number: int) -> None:
        self._manager.set_default(name, number)
