"""What there is to serve: the models of the repositories, and those that only a route names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from gateway.backends import Versions
from gateway.errors import InvalidArgument, ModelportError, Unavailable
from gateway.repository import scan
from gateway.repository.scan import MAX_CONFIG_BYTES, MAX_VERSION, ModelEntry, VersionEntry
from gateway.routes import Route
from gateway.settings import Settings

log = structlog.get_logger("modelport.lifecycle")

#: What a server may take to tell its versions, besides the time for connecting.
ANSWER_SECONDS = 5.0


class Discovery:
    """Looks; changes nothing."""

    def __init__(self, settings: Settings, find_versions: Callable[[str], Versions]) -> None:
        self._repositories = settings.model_repositories
        self._routes = settings.routes.models
        self._find_versions = find_versions

    async def scan(self) -> dict[str, ModelEntry]:
        """Every model by name. Those of other servers have no versions yet: ``ask`` tells them.

        Raises:
            Unavailable: a repository cannot be listed.
        """
        try:
            return await asyncio.to_thread(self._scan)
        except OSError as error:
            reason = error.strerror or "unreadable"
            raise Unavailable(f"a model repository cannot be read: {reason}") from error

    def _scan(self) -> dict[str, ModelEntry]:
        found = scan.scan(self._repositories)
        for name, route in self._routes.items():
            if name not in found:
                found[name] = _entry(name, route)
        return found

    async def ask(self, entry: ModelEntry) -> ModelEntry:
        """The remote model ``entry`` with the versions that its server has READY.

        Raises:
            Unavailable: the server cannot be reached, or has no version READY.
            ModelportError: it has no such model, or this gateway no such backend.
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
            raise Unavailable(f"the server of model '{entry.name}' does not answer") from None
        except Exception as error:
            log.exception("a server's versions cannot be read", model=entry.name)
            raise Unavailable(
                f"the server of model '{entry.name}' cannot tell its versions"
            ) from error
        numbers = [number for number in found if 0 < number <= MAX_VERSION]  # 0 is no version
        if not numbers:
            raise Unavailable(f"the server of model '{entry.name}' has no version of it READY")
        versions = {number: VersionEntry(number, Path(), ()) for number in numbers}
        return replace(entry, versions=versions)


def _entry(name: str, route: Route) -> ModelEntry:
    problem, text = "", None
    if route.managed:
        problem = f"model '{name}' is to be managed, but no model repository holds it"
    elif route.config is not None:
        try:
            with route.config.open(encoding="utf-8") as file:
                text = file.read(MAX_CONFIG_BYTES)
        except (OSError, ValueError):
            problem = f"the configuration that the route of model '{name}' names cannot be read"
    return ModelEntry(name, Path(), text, problem=problem, remote=True)
