"""``Control`` in a worker: queries and changes go through the coordinator to all workers."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from modelport.gateway.models.control import LocalControl, Operation, Operations
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import VersionSettings, VersionState
from modelport.gateway.models.sent_files import SentFiles
from modelport.gateway.models.snapshot import wanted as wanted_of
from modelport.gateway.models.snapshot import wanted_json
from modelport.gateway.server.workers.channel import MessageChannel
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.types import ModelFiles

#: The operation that carries the models' state.
MODELS = "load"


def plain(function: Callable[..., Awaitable[Any]]) -> Operation:
    """Make an operation of a function, whose parameters are its arguments."""

    async def operation(arguments: dict[str, Any]) -> Any:
        return await function(**arguments)

    return operation


class CoordinatedControl:
    """Control of the models of all workers, from one of them."""

    def __init__(self, manager: ModelManager, channel: MessageChannel, settings: Settings) -> None:
        self._manager = manager
        self._channel = channel
        self._settings = settings
        self.pid = os.getppid()
        self.local = LocalControl(manager)
        self._sent = SentFiles(manager.outside, manager.dropped)
        self.operations = Operations()
        self.register = self.operations.register
        self._register_models()

    # -- queries ----------------------------------------------------------------------------------

    async def ready(self) -> bool:
        if not self._manager.ready:
            return False
        return bool(await self._channel.request("ready"))

    async def require_ready(self, name: str, number: int = 0) -> None:
        self._manager.require_ready(name, number)
        await self._channel.request("require_ready", name=name, number=number)

    async def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        rows: list[dict[str, str]] = await self._channel.request("index")
        return [row for row in rows if not ready_only or row.get("state") == VersionState.READY]

    async def states(self, name: str) -> list[tuple[int, VersionState, str]]:
        self._manager.states(name)
        return [
            (int(row["version"]), VersionState(row["state"]), row.get("reason", ""))
            for row in await self.index()
            if row["name"] == name and row.get("version")
        ]

    async def statistics(self, name: str = "", number: int = 0) -> list[dict[str, Any]]:
        documents: list[dict[str, Any]] = await self._channel.request(
            "statistics", name=name, number=number
        )
        return documents

    async def pending(self, name: str, number: int) -> int:
        return int(await self._channel.request("pending", name=name, number=number))

    async def metrics(self, model: str | None, is_openmetrics: bool) -> tuple[str, bytes]:
        asked = {"model": model, "openmetrics": is_openmetrics}
        content_type, text = await self._channel.request("metrics", **asked)
        return content_type, text.encode()

    # -- changes ---------------------------------------------------------------------------------

    async def load(
        self,
        name: str,
        override: str | None = None,
        source: str = "",
        files: ModelFiles | None = None,
    ) -> None:
        self._manager.require_explicit()

        async def load(folder: str) -> None:
            await self._change("load", name=name, override=override, source=folder or source)

        await self._sent.completed(load, name, override, files)

    async def unload(self, name: str, dependents: bool = False) -> None:
        unload = partial(self._change, "unload", name=name, dependents=dependents)
        await self._sent.completed(lambda _: unload())

    async def unload_version(self, name: str, number: int) -> None:
        await self._change("unload_version", name=name, number=number)

    async def set_default(self, name: str, number: int) -> None:
        await self._change("set_default", name=name, number=number)

    async def reload(self, wanted: Mapping[str, VersionSettings]) -> None:
        asked = {name: wanted_json(each) for name, each in wanted.items()}
        await self._sent.completed(lambda _: self._change("reload", wanted=asked))

    async def _change(self, operation: str, **arguments: Any) -> None:
        self._manager.require_explicit()
        await self.broadcast(operation, arguments)

    async def broadcast(self, name: str, arguments: dict[str, Any]) -> Any:
        return await self._channel.request("broadcast", name=name, arguments=arguments)

    def _register_models(self) -> None:
        manager = self._manager

        async def reload(arguments: dict[str, Any]) -> None:
            asked = arguments["wanted"].items()
            await manager.reload({name: wanted_of(each) for name, each in asked})

        async def restore(arguments: dict[str, Any]) -> None:
            await manager.restore(arguments["state"])

        # With polling, the repository decides, not the other workers.
        polls = self._settings.model_control_mode is ModelControlMode.POLL
        self.register(MODELS, plain(manager.load), None if polls else manager.snapshot, restore)
        self.register("unload", plain(manager.unload))
        self.register("unload_version", plain(manager.unload_version))
        self.register("set_default", plain(self.local.set_default))
        self.register("reload", reload)
