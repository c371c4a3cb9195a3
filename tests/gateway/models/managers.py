"""A manager in this process, over empty folders and backends that obey the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from modelport.gateway.backend_registry import RemoteVersions, Versions
from modelport.gateway.backends.backend_host import Host
from modelport.gateway.backends.base import ELSEWHERE, Artifact, BackendLoader
from modelport.gateway.errors import Unavailable
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.types import Deadline, InferRequest, InferResponse
from tests.polling import WAIT_SECONDS

CONFIG = """
backend: "obedient"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
"""


class Obedient:
    """A backend that computes nothing and is up or down as the test says."""

    execution = ELSEWHERE

    def __init__(self, world: World, artifact: Artifact) -> None:
        self.config = artifact.config
        self.artifact = artifact
        self.problem = ""
        self.requests: list[InferRequest] = []
        self._world = world

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        if self.problem:
            raise Unavailable(self.problem)
        self.requests.append(request)
        self._world.obey(request)
        return InferResponse(self.artifact.model_name, self.artifact.version, [])

    def unload(self) -> None:
        self._world.events.append(("unload", self.artifact.version))


class World:
    """The repository, what loads and what does not, and what happened."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[tuple[str, int]] = []
        #: version → the errors of its next loads, or one for all of them.
        self.errors: dict[int, list[Exception] | Exception] = {}
        #: What ``versions`` of a server elsewhere answers.
        self.remote: list[int] | Exception = []
        self.remote_loading = False
        self.found: list[str] = []
        self.asked = 0
        #: Loads of the version ``gated`` wait for it.
        self.gated = 1
        self.gate = threading.Event()
        self.gate.set()
        #: Looks at every request, and may raise.
        self.obey: Callable[[InferRequest], object] = lambda request: None

    def publish(self, *numbers: int, config: str = "", model: str = "m") -> None:
        for number in numbers:
            (self.root / model / str(number)).mkdir(parents=True, exist_ok=True)
        self.configure(config, model)

    def configure(self, config: str, model: str = "m") -> None:
        (self.root / model).mkdir(parents=True, exist_ok=True)
        (self.root / model / "config.pbtxt").write_text(CONFIG + config)

    def find(self, backend: str) -> BackendLoader:
        self.found.append(backend)

        def load(artifact: Artifact) -> Obedient:
            errors = self.errors.get(artifact.version)
            self.events.append(("load", artifact.version))
            if artifact.version == self.gated:
                assert self.gate.wait(WAIT_SECONDS)
            if isinstance(errors, Exception):
                raise errors
            if errors:
                raise errors.pop(0)
            if not artifact.config.input:
                artifact.config.MergeFrom(type(artifact.config).FromString(WIRE))
            return Obedient(self, artifact)

        return load

    def find_versions(self, backend: str) -> Versions:
        async def versions(route: ModelRoute, name: str) -> RemoteVersions:
            self.asked += 1
            if isinstance(self.remote, Exception):
                raise self.remote
            return RemoteVersions(self.remote, self.remote_loading)

        return versions

    def settings(
        self,
        mode: ModelControlMode = ModelControlMode.EXPLICIT,
        routes: dict[str, ModelRoute] | None = None,
        load: str = "*",
        **settings: Any,
    ) -> Settings:
        return Settings(
            (self.root,),
            mode,
            load_models=(load,) if load and mode is ModelControlMode.EXPLICIT else (),
            routes=routes or {},
            **settings,
        )

    async def serve(
        self,
        mode: ModelControlMode = ModelControlMode.EXPLICIT,
        routes: dict[str, ModelRoute] | None = None,
        load: str = "*",
        **settings: Any,
    ) -> ModelManager:
        """A started manager that serves ``load``."""
        manager = ModelManager(
            self.settings(mode, routes, load, **settings),
            self.find,
            make_host=host,
            find_versions=self.find_versions,
        )
        await manager.start()
        return manager


def host(_: ModelManager) -> Host:
    """A host that has an event loop alone."""
    return cast(Host, SimpleNamespace(loop=asyncio.get_running_loop()))


def _wire() -> bytes:
    from modelport.gateway.repository import config

    tensors = CONFIG.partition("max_batch_size")[2].partition("\n")[2]
    serialized: bytes = config.parse(tensors).SerializeToString()
    return serialized


WIRE = _wire()


def served(manager: ModelManager, name: str = "m") -> Obedient:
    backend = manager.get(name).backend
    assert isinstance(backend, Obedient)
    return backend


async def refresh(manager: ModelManager) -> None:
    """Poll once: load new models, unload removed ones, keep those that fail to reload."""
    await manager._reconciler.reconcile_all(await manager._look())
