"""Model discovery: the models of the repositories, and models that only a route names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import structlog

from modelport.gateway.backend_registry import Versions
from modelport.gateway.errors import InvalidArgument, ModelportError, Unavailable
from modelport.gateway.models.sent_files import is_sent
from modelport.gateway.repository import scan, standalone_model, untrusted_files
from modelport.gateway.repository.model_server_config import ModelServerConfigFile
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.repository.scan import (
    MAX_VERSION,
    ModelEntry,
    VersionEntry,
)
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.settings import ModelControlMode, Settings

log = structlog.get_logger("modelport.models")

#: The time a server has to list its versions, besides the time to connect.
ANSWER_SECONDS = 5.0
#: The delay after the first failed look at an object store; it doubles with each failure.
FIRST_WAIT_SECONDS = 0.5
LAST_WAIT_SECONDS = 60.0
#: Extra looks while an object may still be being written.
SETTLING_LOOKS = 5


class StorageRepository:
    """A repository in object storage, and the models last found in it.

    If the object store is unreachable, keep the last listing and log it once.
    """

    def __init__(self, location: Location, settings: Settings) -> None:
        # Lazy: only object storage needs these slow imports.
        from modelport.gateway.repository.storage.complete_versions import SETTLE_SECONDS
        from modelport.gateway.repository.storage.mirror import Mirror, default_cache

        self._settle_seconds = SETTLE_SECONDS
        self._mirror = Mirror(location, settings.repository_cache or default_cache())
        self._location = str(location)
        self._polling = settings.model_control_mode is ModelControlMode.POLL
        self.found: dict[str, ModelEntry] | None = None
        self._reason = ""
        self._failures = 0
        self._retry_at = 0.0

    async def look(self) -> None:
        """Update ``found``; the first time, wait until the object store answers.

        Raises:
            ModelportError: the first look failed in a way that waiting cannot repair, or a load
                request needs the listing and the store does not respond.
        """
        first = self.found is None
        if not first and self._polling and time.monotonic() < self._retry_at:
            return
        while not await self._try(first):
            if not first:
                return
            await asyncio.sleep(self._retry_at - time.monotonic())
        for _ in range(SETTLING_LOOKS):
            if not self._mirror.unsettled or not (first or not self._polling):
                return
            await asyncio.sleep(self._settle_seconds)
            if not await self._try(first):
                return

    async def _try(self, first: bool) -> bool:
        try:
            self.found = await asyncio.to_thread(self._mirror.look)
        except ModelportError as error:
            if first and not isinstance(error, Unavailable):
                raise type(error)(f"{self._location}: {error}") from None
            self._failed(str(error))
            if not first and not self._polling:
                raise Unavailable(f"a model repository cannot be read: {error}") from None
            return False
        if self._failures:
            log.info("object storage is reachable again", repository=self._location)
        self._failures, self._reason = 0, ""
        return True

    def _failed(self, reason: str) -> None:
        wait = min(FIRST_WAIT_SECONDS * 2 ** min(self._failures, 10), LAST_WAIT_SECONDS)
        self._failures += 1
        self._retry_at = time.monotonic() + wait
        if reason != self._reason:
            self._reason = reason
            log.error(
                "object storage cannot be read; retrying",
                repository=self._location, reason=reason,
            )  # fmt: skip


def _distinct(places: Iterable[Path | Location]) -> list[Path | Location]:
    """``places`` without repeated folders, even by another path."""
    return list(
        {each.resolve() if isinstance(each, Path) else each: each for each in places}.values()
    )


class Discovery:
    """Finds models; changes nothing."""

    def __init__(self, settings: Settings, find_versions: Callable[[str], Versions]) -> None:
        self._repositories = [
            each if isinstance(each, Path) else StorageRepository(each, settings)
            for each in _distinct(settings.model_repositories)
        ]
        #: Those of ``_repositories``; empty without ``--model-namespacing``.
        self._namespaces = [
            str(each)
            for each in _distinct(settings.model_repositories)
            if settings.model_namespacing
        ]
        #: Names that several repositories have, with those that their models are known by.
        self.ambiguous: dict[str, list[str]] = {}
        self._standalone = settings.models
        self._config_name = settings.model_config_name
        self._config_file = (
            ModelServerConfigFile(settings.model_config_file, settings.model_config_poll_seconds)
            if settings.model_config_file is not None
            else None
        )
        self._routes = settings.routes
        self._needs_config = settings.disable_auto_complete_config
        self._find_versions = find_versions
        #: Folders of models outside of the repositories, by the names that requests gave them.
        self.folders: dict[str, Path] = {}
        #: Names of ``folders`` that a model of the repositories has, too, as of the last scan.
        self.hidden: set[str] = set()

    async def scan(self) -> dict[str, ModelEntry]:
        """Every model by name. Remote models have no versions yet; ``ask`` queries them.

        Raises:
            Unavailable: a repository cannot be listed.
            ModelportError: an object store refuses access.
        """
        storages = [each for each in self._repositories if isinstance(each, StorageRepository)]
        await asyncio.gather(*(storage.look() for storage in storages))
        try:
            return await asyncio.to_thread(self._scan)
        except OSError as error:
            reason = error.strerror or "unreadable"
            raise Unavailable(f"a model repository cannot be read: {reason}") from error

    def _scan(self) -> dict[str, ModelEntry]:
        repositories: list[Mapping[str, ModelEntry]] = [
            scan.scan_folder(each, self._config_name)
            if isinstance(each, Path)
            else each.found or {}
            for each in self._repositories
        ]
        ambiguous: dict[str, list[str]] = {}
        if self._namespaces:
            spaces = dict(zip(self._namespaces, repositories, strict=True))
            models, ambiguous = scan.namespaced(spaces)
            repositories = [models]
        alone = [standalone_model.scan(path, name) for name, path in self._standalone]
        alone += self._config_file.scan() if self._config_file is not None else []
        found = scan.together([*repositories, *({entry.name: entry} for entry in alone)])
        folders = tuple(self.folders.items())  # others change it meanwhile
        known = ambiguous.keys() | {name for name, entry in found.items() if entry.is_model}
        self.hidden = {name for name, _ in folders if name in known}
        self.ambiguous = {n: names for n, names in ambiguous.items() if n not in self.hidden}
        for name, folder in folders:
            self._add_folder(found, name, folder)
        if self._needs_config:
            found |= {
                name: _unconfigured(entry)
                for name, entry in found.items()
                if self._lacks_config(entry)
            }
        for name, route in self._routes.items():
            if name not in found or not found[name].is_model:
                found[name] = _entry(name, route)
        return found

    def _lacks_config(self, entry: ModelEntry) -> bool:
        if not entry.is_model or entry.problem or entry.name in self._routes:
            return False
        described = any(version.pipeline for version in entry.versions.values())
        return entry.config_text is None and not described and not is_sent(entry.path)

    def _add_folder(self, found: dict[str, ModelEntry], name: str, folder: Path) -> None:
        """Add the model of ``folder`` as ``name``, and the models beside it, its steps."""
        try:
            beside = scan.scan_folder(folder.parent, self._config_name)
            entry = beside.pop(folder.name)._replace(name=name, source=str(folder))
        except (OSError, KeyError):  # it has gone; what serves stays
            return
        found[name] = entry
        steps = {each: step for each, step in beside.items() if step.is_model}
        for each, step in steps.items():
            if found.get(each, step).path != step.path:
                problem = f"'{each}' beside it has the name of another model"
                found[name] = ModelEntry(name, entry.path, problem=problem, source=entry.source)
                return
        found |= steps

    async def ask(self, entry: ModelEntry) -> tuple[ModelEntry, bool]:
        """The remote model ``entry`` with the READY versions of its server, and whether that is
        loading more.

        Raises:
            Unavailable: the server cannot be reached, or has no READY version.
            ModelportError: there is no such model on the server, or no such backend here.
        """
        route = self._routes[entry.name]
        if entry.problem:
            raise InvalidArgument(entry.problem)
        try:
            find = await asyncio.to_thread(self._find_versions, route.backend)
            async with asyncio.timeout(route.connect_timeout_seconds + ANSWER_SECONDS):
                found = await find(route, entry.name)
        except ModelportError:
            raise
        except TimeoutError:
            raise Unavailable(f"the server of model '{entry.name}' does not respond") from None
        except Exception as error:
            log.exception("a server's versions cannot be read", model=entry.name)
            raise Unavailable(
                f"the server of model '{entry.name}' did not list its versions"
            ) from error
        # 0 is not a version.
        numbers = [number for number in found.numbers if 0 < number <= MAX_VERSION]
        if not numbers:
            raise Unavailable(f"the server of model '{entry.name}' has no READY version of it")
        versions = {number: VersionEntry(number, Path(), ()) for number in numbers}
        return entry._replace(versions=versions), found.loading


def _unconfigured(entry: ModelEntry) -> ModelEntry:
    problem = "it has no config.pbtxt, and --disable-auto-complete-config is set"
    return ModelEntry(entry.name, entry.path, problem=problem, is_model=False)


def _entry(name: str, route: ModelRoute) -> ModelEntry:
    problem, text = "", None
    if route.config is not None:
        try:
            with route.config.open(encoding="utf-8") as file:
                text = file.read(untrusted_files.MAX_CONFIG_BYTES)
        except (OSError, ValueError):
            problem = f"the config file of the route of model '{name}' cannot be read"
    return ModelEntry(name, Path(), text, problem=problem, remote=True)
