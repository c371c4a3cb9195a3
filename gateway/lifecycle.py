"""Models and their versions: load, serve, reload, drain, unload.

``policy.next_action`` decides, this module acts. All state belongs to the event loop; the blocking
part of a load runs in a thread and touches none of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import nullcontext
from typing import Any

import structlog

from gateway import backends
from gateway.backends import base
from gateway.backends.base import Artifact, Host
from gateway.errors import InvalidArgument, ModelportError, NotFound, Unavailable
from gateway.model import UNLOADED, Model, ServedVersion, State, read_config
from gateway.policy import Load, Snapshot, VersionPolicy, next_action
from gateway.repository import config as configuration
from gateway.repository import manifest, scan, signing
from gateway.repository.scan import VersionEntry
from gateway.settings import ModelControlMode, Settings, usable_cores
from gateway.telemetry import Statistics

log = structlog.get_logger("modelport.lifecycle")


class Lifecycle:
    """The models of a repository, as they are served."""

    def __init__(
        self,
        settings: Settings,
        find_backend: Callable[[str], base.Load] = backends.find,
        make_host: Callable[[Lifecycle], Host] | None = None,
    ) -> None:
        self._settings = settings
        self._find_backend = find_backend
        self._make_host = make_host
        self._host: Host | None = None
        self._threads = usable_cores()
        self._models: dict[str, Model] = {}
        self._statistics: dict[tuple[str, int], Statistics] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._loads = asyncio.Semaphore(self._threads)
        # One scan at a time: an older one that ends later would bring back what has changed.
        self._scanning = asyncio.Lock()
        self._missing: set[str] = set()
        self.started = False
        #: Readiness is off, requests are still served.
        self.draining = asyncio.Event()
        #: New requests are refused, streams end.
        self.closing = asyncio.Event()

    # -- the hot path ---------------------------------------------------------------------------

    def acquire(self, name: str, number: int = 0) -> ServedVersion:
        """A handle on a READY version; the caller releases it. ``number`` 0: the newest.

        Raises:
            NotFound: no such model or version.
            Unavailable: the version is known but not READY.
        """
        version = self.get(name, number)
        version.in_flight += 1
        return version

    def get(self, name: str, number: int = 0) -> ServedVersion:
        """As ``acquire``, without a handle: for looking, not for running."""
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        version = model.served.get(number) if number else model.default
        if version is not None:
            return version
        if not number:
            raise Unavailable(f"Request for unknown model: '{name}' has no available versions")
        if number in model.states:
            raise Unavailable(
                f"Request for unknown model: '{name}' version {number} is not at ready state"
            )
        raise NotFound(f"Request for unknown model: '{name}' version {number} is not found")

    # -- looking --------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether traffic should come: started, not draining and, if strict, every model served."""
        if not self.started or self.draining.is_set():
            return False
        return not self._settings.strict_readiness or not self.broken()

    def broken(self) -> list[str]:
        """Models that were asked for and have no version that serves."""
        broken = {name for name, model in self._models.items() if model.broken}
        return sorted(self._missing | broken)

    def versions(self, name: str) -> list[int]:
        """READY versions of a model, ascending."""
        return sorted(self._models[name].served) if name in self._models else []

    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        """The rows of the repository index."""
        rows: list[dict[str, str]] = []
        for name in sorted(self._models):
            model = self._models[name]
            for number, (state, reason) in sorted(model.states.items()):
                if not ready_only or state is State.READY:
                    row = {"name": name, "version": str(number), "state": state.value}
                    rows.append({**row, "reason": reason or model.problem})
            if not model.states and not ready_only:
                row = {"name": name}
                if model.problem:
                    row |= {"version": "", "state": "UNAVAILABLE", "reason": model.problem}
                rows.append(row)
        return rows

    def statistics(self) -> Iterator[tuple[str, int, Statistics]]:
        for (name, number), statistics in sorted(self._statistics.items()):
            yield name, number, statistics

    # -- control --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load what the control mode asks for. A model that fails costs nothing but itself."""
        settings = self._settings
        self._host = self._make_host(self) if self._make_host is not None else None
        await self._scan()
        explicit = settings.model_control_mode is ModelControlMode.EXPLICIT
        names = list(self._models)
        if explicit and "*" not in settings.load_models:
            self._missing = {name for name in settings.load_models if name not in self._models}
            for name in self._missing:
                log.error("--load-model names no model of the repository", model=name)
            names = [name for name in settings.load_models if name in self._models]
        await asyncio.gather(*(self._reconcile(self._models[name]) for name in names))
        self.started = True

    async def poll(self) -> None:
        """Follow the repository until cancelled."""
        while True:
            await asyncio.sleep(self._settings.repository_poll_seconds)
            try:
                await self.refresh()
            except Exception:  # whatever it is, the next look may succeed
                log.exception("the model repository cannot be read")

    async def refresh(self) -> None:
        """One poll: load what is new, unload what was taken away, keep what fails to reload."""
        for name in await self._scan():
            await self._unload_all(self._models.pop(name))
            self._statistics = {k: v for k, v in self._statistics.items() if k[0] != name}
        await asyncio.gather(*(self._reconcile(model) for model in list(self._models.values())))

    async def load(self, name: str, override: str | None = None) -> None:
        """Load or reload one model; ``override`` is a JSON configuration in place of the file's.

        Raises:
            Unavailable: the control mode does not allow it.
            NotFound: the repository has no such model.
            InvalidArgument: no version could be loaded; what was served before still is.
        """
        self._require_explicit()
        if override is not None:
            configuration.parse_json(override)
        # A caller that gives up must not leave the model half loaded: the work goes on without it.
        await asyncio.shield(self._in_background(self._load(name, override)))

    async def _load(self, name: str, override: str | None) -> None:
        gone = await self._scan()
        model = self._models.get(name)
        if model is None or name in gone:
            raise NotFound(f"failed to load '{name}', failed to poll from model repository")
        self._missing.discard(name)
        model.override = override
        model.failed.clear()
        await self._reconcile(model)
        failures = [
            f"version {number} is at {state} state: {reason}"
            for number, (state, reason) in sorted(model.states.items())
            if number in model.failed
        ]
        if model.problem or failures:
            reasons = "; ".join(filter(None, [model.problem, *failures]))
            raise InvalidArgument(f"load failed for model '{name}': {reasons}")

    async def unload(self, name: str) -> None:
        """Stop serving a model; requests in flight finish first.

        Raises:
            Unavailable: the control mode does not allow it.
            NotFound: no such model.
        """
        self._require_explicit()
        await asyncio.shield(self._in_background(self._unload(name)))

    async def _unload(self, name: str) -> None:
        self._missing.discard(name)
        if name not in self._models:
            raise NotFound(f"failed to unload '{name}': the model is not found")
        model = self._models[name]
        unloading = await self._unload_all(model)
        model.problem, model.troubled = "", False
        model.failed.clear()
        for number, (state, _) in model.states.items():
            if state is State.UNAVAILABLE:
                model.states[number] = (state, UNLOADED)
        await asyncio.gather(*unloading)

    async def stop(self) -> None:
        """Unload everything; call when no new request can come."""
        await asyncio.gather(*(self._unload_all(model) for model in self._models.values()))
        await asyncio.gather(*self._background, return_exceptions=True)

    def _require_explicit(self) -> None:
        if self._settings.model_control_mode is not ModelControlMode.EXPLICIT:
            raise Unavailable(
                "explicit model load / unload is not allowed if polling is enabled; start the "
                "server with --model-control-mode=explicit"
            )

    # -- acting ---------------------------------------------------------------------------------

    async def _scan(self) -> list[str]:
        """Bring every model's entry up to date; returns the names that are gone from disk."""
        async with self._scanning:
            found = await asyncio.to_thread(scan.scan, self._settings.model_repositories)
            for name, entry in found.items():
                if name in self._models:
                    self._models[name].entry = entry
                else:
                    self._models[name] = Model(entry)
            return [name for name in self._models if name not in found]

    async def _reconcile(self, model: Model) -> None:
        async with model.lock:
            entry = model.entry
            try:
                model.config, model.problem = read_config(model), ""
            except InvalidArgument as error:
                model.problem, model.troubled = str(error), True
                for number in entry.versions:
                    if number not in model.served:
                        model.states[number] = (State.UNAVAILABLE, model.problem)
                log.error("model is not served", model=entry.name, reason=model.problem)
                return
            content = {
                number: (entry.config_text, model.override, version.fingerprint, version.problem)
                for number, version in entry.versions.items()
            }
            model.states = {  # what a mended configuration or a removed version left behind is gone
                number: state
                for number, state in model.states.items()
                if number in model.served
                or (number in content and (number in model.failed or state[1] == UNLOADED))
            }
            for number in model.serving.keys() & content.keys():
                if model.serving[number] == content[number]:  # repaired, or never touched
                    model.failed.pop(number, None)
                    model.states[number] = (State.READY, "")
            while action := next_action(
                Snapshot(VersionPolicy.of(model.config), content, model.serving, model.failed)
            ):
                if isinstance(action, Load):
                    number = action.version
                    await self._load_version(model, entry.versions[number], content[number])
                else:
                    self._unload_version(model, action.version)
            if not model.served and not model.failed:
                model.troubled = True
                model.problem = (
                    "no version is allowed by version_policy"
                    if entry.versions
                    else "no version directory found"
                )

    async def _load_version(self, model: Model, entry: VersionEntry, content: Hashable) -> None:
        number, name = entry.number, model.entry.name
        before = model.served.get(number)
        if before is None:
            model.states[number] = (State.LOADING, "")
        statistics = self._statistics.get((name, number)) or Statistics()
        try:
            async with self._loads:
                version = await asyncio.to_thread(self._load_blocking, model, entry, statistics)
        except Exception as error:
            reason = str(error) if isinstance(error, ModelportError) else "failed to load"
            log.error(
                "model version is not served", model=name, version=number, reason=reason,
                exc_info=not isinstance(error, ModelportError),
            )  # fmt: skip
            model.failed[number] = content
            model.troubled = True
            kept = "reload failed, the version loaded before still serves: "
            model.states[number] = (
                (State.UNAVAILABLE, reason) if before is None else (State.READY, kept + reason)
            )
            return
        model.failed.pop(number, None)
        model.troubled = False
        self._statistics[name, number] = statistics
        model.served[number], model.serving[number] = version, content
        model.states[number] = (State.READY, "")
        model.select_default()
        log.info("model version is ready", model=name, version=number)
        if before is not None:
            self._in_background(before.retire())

    def _load_blocking(
        self, model: Model, entry: VersionEntry, statistics: Statistics
    ) -> ServedVersion:
        """Blocking: verify, then load. Runs in a thread and only reads ``model``."""
        name, number = model.entry.name, entry.number
        if entry.problem:
            raise InvalidArgument(entry.problem)
        keys = self._settings.require_signature
        if not manifest.verify(entry.path):
            if self._settings.require_manifest:
                raise InvalidArgument(
                    "no manifest.json, and --require-manifest is set; publish the version with "
                    "'modelport export'"
                )
            if not keys:
                log.warning("no manifest.json: served unverified", model=name, version=number)
        assert model.config is not None
        load = self._find_backend(model.config.backend)
        with (
            signing.verified_copy(entry.path, name, keys)
            if keys
            else nullcontext(entry.path) as path
        ):
            route = self._settings.routes.models.get(name)
            artifact = Artifact(name, number, path, model.config, self._threads, route, self._host)
            return ServedVersion(model.entry, number, load(artifact), statistics)

    def _unload_version(self, model: Model, number: int) -> asyncio.Task[None]:
        """Out of service at once; drained and unloaded by the task, which nobody need await."""
        version = model.served.pop(number)
        model.serving.pop(number, None)
        model.select_default()
        model.states[number] = unloading = (State.UNLOADING, "")

        async def finish() -> None:
            await version.retire()
            if model.states.get(number) is unloading:  # not loaded again meanwhile
                model.states[number] = (State.UNAVAILABLE, UNLOADED)
            log.info("model version is unloaded", model=version.name, version=number)

        return self._in_background(finish())

    async def _unload_all(self, model: Model) -> list[asyncio.Task[None]]:
        async with model.lock:
            return [self._unload_version(model, number) for number in sorted(model.served)]

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        # Its error belongs to whoever awaits it; where nobody does any more, it has been logged.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task
