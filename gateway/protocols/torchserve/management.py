"""TorchServe's management API, shared by REST and gRPC.

Models come from the repository only: ``url`` is the name of one, ``fraud`` or ``fraud.mar``, and
``model_name`` may give it another. The workers of a version are the instances of its
``instance_group``. Scaling loads the model again with another count, until it is loaded with its
own configuration; so does a registration with settings of batches.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from modelport.gateway.errors import InvalidArgument, ModelportError, NotFound
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
#: TorchServe's ``max_batch_delay`` if there is only a ``batch_size``.
DEFAULT_DELAY_MILLISECONDS = 100
NO_RESPONSE_TIMEOUT = "response_timeout has no effect, because each request has its own deadline"
_URL = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Registration:
    """A request to register a model.

    ``startup_timeout`` in seconds limits the load if there are ``initial_workers``; without them
    TorchServe would start workers later. ``max_batch_delay`` is in milliseconds.
    """

    url: str | None
    model_name: str = ""
    runtime: str = ""
    initial_workers: int = 0
    startup_timeout: int | None = None
    batch_size: int | None = None
    max_batch_delay: int | None = None
    handler: str = ""
    response_timeout: int | None = None

    def check(self) -> None:
        """Check what does not depend on the model.

        Raises:
            UrlRefused, InvalidArgument: A parameter is missing or invalid, or cannot be obeyed.
        """
        if self.url is None:
            raise InvalidArgument("Parameter url is required.")
        if not self.url:
            raise UrlRefused("empty url")
        if self.runtime.lower() not in RUNTIMES:
            raise InvalidArgument(f"Invalid RuntimeType value: {self.runtime[:64]}")
        if self.handler:
            raise InvalidArgument(
                "Parameter handler must be empty, because no handler is run; import the archive "
                "with 'modelport migrate torchserve', which reports what its handler did"
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise InvalidArgument(f"batch_size must be at least 1, not {self.batch_size}")
        if self.max_batch_delay is not None and self.max_batch_delay < 0:
            raise InvalidArgument(f"max_batch_delay must not be negative: {self.max_batch_delay}")

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
        known = set(self._manager.names())
        served = [(name, self._manager.find(name)) for name in names[first:][:limit]]
        rows = [
            {"modelName": name, "modelUrl": _url(name, found.source if found else "", known)}
            for name, found in served
        ]
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
        """Load or reload the model of the repository that the URL names, as ``model_name``.

        A first registration that fails leaves the model unloaded.

        Raises:
            ApiDisabled: The control mode is not explicit.
            UrlRefused: The URL is not the name of a model of the repository.
            Conflict: The model is served already, without changes.
            AlreadyExists: Another model has the name.
            WorkersNotStarted: It was not READY within its ``startup_timeout``.
            InvalidArgument: A parameter is invalid or cannot be obeyed, or the load failed.
        """
        self._require_explicit()
        registration.check()
        url = registration.url or ""
        source = _repository_name(url)
        name = registration.model_name or source
        before = [self._manager.get(name, n) for n in self._manager.versions(name)]
        seconds = registration.seconds_to_start
        if seconds is not None and seconds <= 0:
            raise WorkersNotStarted(name)
        try:
            async with asyncio.timeout(seconds):
                await self._control.load(name, source=source if source != name else "")
        except NotFound:
            raise UrlRefused(f"Model not found at: {url}") from None
        except TimeoutError:
            raise WorkersNotStarted(name) from None
        served = self._get(name, 0)
        after = [self._manager.get(name, n) for n in self._manager.versions(name)]
        if before and before == after:
            raise Conflict(f"Model version {served.number} is already registered for model {name}")
        workers = registration.initial_workers
        if workers <= 0:
            workers = configuration.instance_count(served.config)
        try:
            await self._configure(name, workers, _batching(served, registration))
        except ModelportError:
            if not before:
                await self._control.unload(name)
            raise
        text = f'Model "{name}" Version: {served.number} registered with {workers} initial workers'
        given = registration.response_timeout is not None
        return f"{text}; {NO_RESPONSE_TIMEOUT}" if given else text

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
            await self._configure(name, wanted, {})
            workers = wanted
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

    async def _configure(self, name: str, workers: int, batching: Mapping[str, object]) -> None:
        """Load the model again with ``workers`` instances and with settings of dynamic batching."""
        config = self._get(name, 0).config
        changed = before = configuration.to_json(config)
        if batching:
            batching = {**before.get("dynamic_batching", {}), **batching}
            changed = {**before, "dynamic_batching": batching}
        if configuration.instance_count(config) != workers:
            self._require_explicit()
            if len(config.instance_group) > 1:
                raise InvalidArgument(
                    f"model {name} has {len(config.instance_group)} instance groups; set their "
                    "counts in its config.pbtxt"
                )
            group = before["instance_group"][0] if before["instance_group"] else {}
            changed = {**changed, "instance_group": [{**group, "count": workers}]}
        if changed != before:
            await self._control.load(name, json.dumps(changed))

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
            "modelUrl": _url(served.name, served.source, self._manager.names()),
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


def _url(name: str, source: str, known: Collection[str]) -> str:
    """The archive's name, unless the caller may not see the model of the repository."""
    return (source if source in known else name) + ARCHIVE_SUFFIX


def _batching(served: ServedVersion, registration: Registration) -> dict[str, object]:
    """Make the fields of ``dynamic_batching`` that the registration sets.

    Raises:
        InvalidArgument: The model takes no such batches, or another server makes them.
    """
    size, delay = registration.batch_size, registration.max_batch_delay
    most = max(1, served.signature.max_batch_size)
    if size is not None and size > most:
        raise InvalidArgument(
            f"batch_size {size} is more than the largest batch of model {served.name}, {most}; "
            "set max_batch_size in its config.pbtxt"
        )
    if served.signature.max_batch_size == 0 or (size is None and delay is None):
        return {}  # TorchServe's default is one request in a batch, which waits for no other
    if served.backend.execution.batches:
        raise InvalidArgument(
            f"model {served.name} runs elsewhere, where its batches are made; set batch_size and "
            "max_batch_delay there"
        )
    if size is not None and delay is None:
        delay = DEFAULT_DELAY_MILLISECONDS
    fields: dict[str, object] = {"max_queue_delay_microseconds": (delay or 0) * 1000}
    return fields if size is None else {**fields, "preferred_batch_size": [size]}


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
