"""TorchServe's management API, shared by REST and gRPC.

Models come from the repository only: ``url`` is the name of one, ``fraud`` or ``fraud.mar``. The
workers of a version are the instances of its ``instance_group``. Scaling loads the model again with
another count, until it is loaded with its own configuration.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

from modelport.gateway.errors import InvalidArgument, NotFound
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.oip import metadata as documents
from modelport.gateway.protocols.torchserve.errors import (
    ApiDisabled,
    Conflict,
    DefaultVersion,
    UrlRefused,
    WorkersNotStarted,
    not_found,
    version_number,
)
from modelport.gateway.repository import config as configuration
from modelport.gateway.settings import ModelControlMode

ARCHIVE_SUFFIX = ".mar"
ALL = "all"
MAX_PAGE = 100
#: TorchServe's runtimes. They are checked but have no effect.
RUNTIMES = frozenset({"", "python", "python3", "lsp"})
_URL = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Registration:
    """A request to register a model.

    ``startup_timeout`` in seconds limits the load if there are ``initial_workers``; without them
    TorchServe would start workers later.
    """

    url: str | None
    model_name: str = ""
    runtime: str = ""
    initial_workers: int = 0
    startup_timeout: int | None = None

    @property
    def seconds_to_start(self) -> float | None:
        bounded = self.initial_workers > 0 and self.startup_timeout is not None
        return self.startup_timeout if bounded else None


class Management:
    """TorchServe's view of the models, which may be changed under explicit control."""

    def __init__(self, host: DialectHost) -> None:
        self._manager = host.manager
        self._control = host.control
        self._explicit = host.settings.model_control_mode is ModelControlMode.EXPLICIT

    def list_models(self, limit: int = MAX_PAGE, page_token: int = 0) -> dict[str, Any]:
        """List ``limit`` of the models that are served, from number ``page_token`` on."""
        limit = limit if 0 <= limit <= MAX_PAGE else MAX_PAGE
        first = max(0, page_token)
        names = documents.ready_models(self._manager)
        page: dict[str, Any] = {}
        if first + limit <= len(names):
            page["nextPageToken"] = str(first + limit)
        rows = [{"modelName": n, "modelUrl": n + ARCHIVE_SUFFIX} for n in names[first:][:limit]]
        return {**page, "models": rows}

    async def describe(
        self, name: str, version: str, customized: bool = False
    ) -> list[dict[str, Any]]:
        """Describe the default version, a given one, or ``ALL`` that are served.

        Raises:
            ModelNotFound, VersionNotFound: There is no such version.
            Unavailable: It is not READY.
        """
        if version == ALL:
            numbers = self._manager.versions(name) or [0]
        else:
            numbers = [version_number(self._manager, name, version)]
        rows = [await self._description(self._get(name, number)) for number in numbers]
        if customized and version != ALL:
            metadata = documents.model_metadata(self._manager, name, numbers[0])
            rows[0]["customizedMetadata"] = metadata
        return rows

    async def register(self, registration: Registration) -> str:
        """Load or reload the model of the repository that the URL names.

        Raises:
            ApiDisabled: The control mode is not explicit.
            UrlRefused: The URL is not the name of a model of the repository.
            Conflict: The model is served already, without changes.
            WorkersNotStarted: It was not READY within its ``startup_timeout``.
            InvalidArgument: The URL is missing, the runtime is unknown, or the load failed.
        """
        self._require_explicit()
        url, model_name = registration.url, registration.model_name
        if url is None:
            raise InvalidArgument("Parameter url is required.")
        if not url:
            raise UrlRefused("empty url")
        if registration.runtime.lower() not in RUNTIMES:
            raise InvalidArgument(f"Invalid RuntimeType value: {registration.runtime[:64]}")
        name = _repository_name(url)
        if model_name not in ("", name):
            raise InvalidArgument(
                f"the model of the repository is '{name}'; it cannot be served as '{model_name}'"
            )
        before = [self._manager.get(name, n) for n in self._manager.versions(name)]
        seconds = registration.seconds_to_start
        if seconds is not None and seconds <= 0:
            raise WorkersNotStarted(name)
        try:
            async with asyncio.timeout(seconds):
                await self._control.load(name)
        except NotFound:
            raise UrlRefused(f"Model not found at: {url}") from None
        except TimeoutError:
            raise WorkersNotStarted(name) from None
        served = self._get(name, 0)
        after = [self._manager.get(name, n) for n in self._manager.versions(name)]
        if before and before == after:
            raise Conflict(f"Model version {served.number} is already registered for model {name}")
        workers = configuration.instance_count(served.config)
        if registration.initial_workers > 0:
            workers = await self._scale(name, registration.initial_workers)
        return f'Model "{name}" Version: {served.number} registered with {workers} initial workers'

    async def scale(self, name: str, version: str, minimum: int, maximum: int) -> str:
        """Change the number of workers to the nearest one that is asked for.

        Raises:
            ModelNotFound, VersionNotFound: There is no such version.
            ApiDisabled: The number would change, and the control mode is not explicit.
            InvalidArgument: The number is 0, or the machine or the model does not allow it.
        """
        if maximum < minimum:
            raise InvalidArgument("max_worker cannot be less than min_worker.")
        served = self._get(name, version_number(self._manager, name, version))
        workers = configuration.instance_count(served.config)
        wanted = max(minimum, min(workers, maximum))
        if wanted <= 0:
            raise InvalidArgument(
                f"model {name} cannot be scaled to {wanted} workers; DELETE unregisters the model"
            )
        if wanted != workers:
            if version and self._manager.versions(name) != [served.number]:
                raise InvalidArgument(
                    f"the versions of model {name} have the same number of workers; scale the "
                    "model without a version"
                )
            workers = await self._scale(name, wanted)
        text = f"Workers scaled to {workers} for model: {name}"
        return f"{text}, version: {version}" if version else text

    async def set_default(self, name: str, version: str) -> str:
        """Make ``version`` the default one.

        Raises:
            ApiDisabled, ModelNotFound, VersionNotFound, Unavailable: It is not possible.
        """
        self._require_explicit()
        number = version_number(self._manager, name, version)
        self._get(name, number)
        await self._control.set_default(name, number)
        return f'Default version successfully updated for model "{name}" to "{version}"'

    async def unregister(self, name: str, version: str) -> str:
        """Unload a version that is not the default, or the whole model with its only version.

        Raises:
            ApiDisabled, ModelNotFound, VersionNotFound, Unavailable: It is not possible.
            DefaultVersion: The version is the default one of several.
        """
        self._require_explicit()
        number = self._get(name, version_number(self._manager, name, version)).number
        others = [n for n in self._manager.versions(name) if n != number]
        if not others:
            await self._control.unload(name)
        elif self._get(name, 0).number == number:
            raise DefaultVersion(name)
        else:
            await self._control.unload_version(name, number)
        return f'Model "{name}" unregistered'

    async def _scale(self, name: str, workers: int) -> int:
        """Load the model again with ``workers`` instances."""
        config = self._get(name, 0).config
        if configuration.instance_count(config) == workers:
            return workers
        self._require_explicit()
        if len(config.instance_group) > 1:
            raise InvalidArgument(
                f"model {name} has {len(config.instance_group)} instance groups; set their counts "
                "in its config.pbtxt"
            )
        scaled = configuration.to_json(config)
        group = scaled["instance_group"][0] if scaled["instance_group"] else {}
        await self._control.load(
            name, json.dumps({**scaled, "instance_group": [{**group, "count": workers}]})
        )
        return workers

    def _require_explicit(self) -> None:
        if not self._explicit:
            raise ApiDisabled

    def _get(self, name: str, number: int) -> ServedVersion:
        try:
            return self._manager.get(name, number)
        except NotFound:
            raise not_found(self._manager, name, str(number or "")) from None

    async def _description(self, served: ServedVersion) -> dict[str, Any]:
        """Describe a version with TorchServe's members, except for the time-outs of workers."""
        config = served.config
        workers = configuration.instance_count(config)
        pending = await self._control.pending(served.name, served.number)
        batching = config.dynamic_batching
        takes = max(1, served.signature.max_batch_size)
        return {
            "modelName": served.name,
            "modelVersion": str(served.number),
            "modelUrl": served.name + ARCHIVE_SUFFIX,
            "runtime": config.platform or config.backend,
            "minWorkers": workers,
            "maxWorkers": workers,
            "batchSize": max(batching.preferred_batch_size, default=takes),
            "maxBatchDelay": batching.max_queue_delay_microseconds // 1000,
            "workers": [
                {
                    "id": str(index),
                    "status": "UNLOADING" if served.backend.problem else "READY",
                    "memoryUsage": 0,
                    "pid": self._control.pid,
                    "gpu": False,
                    "gpuUsage": "N/A",
                }
                for index in range(workers)
            ],
            "jobQueueStatus": {"pendingRequests": pending},
        }


def _repository_name(url: str) -> str:
    """Extract the model's name from ``url``.

    Raises:
        UrlRefused: It is an address or a path.
    """
    if ".." in url:
        raise UrlRefused(f"Relative path is not allowed in url: {url}")
    if _URL.match(url):
        raise UrlRefused(f"Given URL {url} does not match any allowed URL(s)")
    if "/" in url or "\\" in url:
        raise UrlRefused(f"Model not found at: {url}")
    return url.removesuffix(ARCHIVE_SUFFIX)
