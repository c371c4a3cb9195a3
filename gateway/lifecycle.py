"""Models and their versions: load, serve, reload, drain, unload.

``policy.next_action`` decides, this module acts. All state belongs to the event loop; the blocking
part of a load runs in a thread and touches none of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import structlog

from gateway import backends
from gateway.backends import base
from gateway.backends.base import Artifact, Backend
from gateway.errors import InvalidArgument, ModelportError, NotFound, Unavailable
from gateway.policy import Load, Snapshot, VersionPolicy, next_action
from gateway.repository import config as configuration
from gateway.repository import manifest, scan
from gateway.repository.config import ModelConfig
from gateway.repository.scan import ModelEntry, VersionEntry
from gateway.settings import ModelControlMode, Settings, usable_cores
from gateway.telemetry import Statistics
from gateway.types import ModelSignature
from gateway.validation import Validator

log = structlog.get_logger("modelport.lifecycle")


#: The reason Triton gives for a version that was unloaded on purpose.
UNLOADED = "unloaded"


class State(StrEnum):
    """The states of the repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class ServedVersion:
    """A loaded version and its counted handles. Nothing of it changes but the counts."""

    __slots__ = (
        "_drained", "backend", "config", "in_flight", "labels", "name", "number", "signature",
        "statistics", "validator",
    )  # fmt: skip

    def __init__(
        self, entry: ModelEntry, number: int, backend: Backend, statistics: Statistics
    ) -> None:
        self.name = entry.name
        self.number = number
        self.backend = backend
        self.config = backend.config
        self.signature: ModelSignature = configuration.signature(backend.config)
        self.validator = Validator(entry.name, self.signature)
        self.labels = _labels(entry, backend.config)
        self.statistics = statistics
        self.in_flight = 0
        self._drained: asyncio.Event | None = None

    def release(self) -> None:
        self.in_flight -= 1
        if self._drained is not None and not self.in_flight:
            self._drained.set()

    async def drain(self) -> None:
        """Wait until the last handle is released; nobody can acquire one any more."""
        if self.in_flight:
            self._drained = asyncio.Event()
            await self._drained.wait()


@dataclass(slots=True)
class Model:
    """One model's state. Changed by the lifecycle alone, under ``lock`` across awaits."""

    entry: ModelEntry
    config: ModelConfig | None = None
    override: str | None = None
    problem: str = ""
    served: dict[int, ServedVersion] = field(default_factory=dict)
    serving: dict[int, Hashable] = field(default_factory=dict)
    failed: dict[int, Hashable] = field(default_factory=dict)
    states: dict[int, tuple[State, str]] = field(default_factory=dict)
    #: The version that a request without a version gets: the newest that is READY.
    default: ServedVersion | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def broken(self) -> bool:
        """Asked for, and no version of it could be served."""
        failed = (s is State.UNAVAILABLE and why != UNLOADED for s, why in self.states.values())
        return not self.served and (bool(self.problem) or any(failed))

    def select_default(self) -> None:
        self.default = self.served[max(self.served)] if self.served else None


class Lifecycle:
    """The models of a repository, as they are served."""

    def __init__(
        self, settings: Settings, find_backend: Callable[[str], base.Load] = backends.find
    ) -> None:
        self._settings = settings
        self._find_backend = find_backend
        self._threads = usable_cores()
        self._models: dict[str, Model] = {}
        self._statistics: dict[tuple[str, int], Statistics] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._loads = asyncio.Semaphore(self._threads)
        self._missing: list[str] = []
        self.started = False
        #: Readiness is off, requests are still served.
        self.draining = False
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
        if not self.started or self.draining:
            return False
        return not self._settings.strict_readiness or not self.broken()

    def broken(self) -> list[str]:
        """Models that were asked for and have no version that serves."""
        return self._missing + [name for name, model in self._models.items() if model.broken]

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
        await self._scan()
        explicit = settings.model_control_mode is ModelControlMode.EXPLICIT
        names = list(self._models)
        if explicit and "*" not in settings.load_models:
            self._missing = [name for name in settings.load_models if name not in self._models]
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
            except OSError as error:
                log.error("the model repository cannot be read", error=error.strerror)

    async def refresh(self) -> None:
        """One poll: load what is new, unload what was taken away, keep what fails to reload."""
        for name in await self._scan():
            await self._unload_all(self._models.pop(name))
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
        gone = await self._scan()
        model = self._models.get(name)
        if model is None or name in gone:
            raise NotFound(f"failed to load '{name}', failed to poll from model repository")
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
        if not model.served:
            raise InvalidArgument(f"failed to load '{name}', no version is available")

    async def unload(self, name: str) -> None:
        """Stop serving a model; requests in flight finish first.

        Raises:
            Unavailable: the control mode does not allow it.
            NotFound: no such model.
        """
        self._require_explicit()
        if name not in self._models:
            raise NotFound(f"failed to unload '{name}': the model is not found")
        model = self._models[name]
        unloading = await self._unload_all(model)
        model.problem = ""
        model.failed.clear()
        for number, (state, _) in model.states.items():
            if state is State.UNAVAILABLE:
                model.states[number] = (state, UNLOADED)
        await asyncio.gather(*unloading)

    async def stop(self) -> None:
        """Unload everything; call when no new request can come."""
        await asyncio.gather(*(self._unload_all(model) for model in self._models.values()))
        await asyncio.gather(*self._background)

    def _require_explicit(self) -> None:
        if self._settings.model_control_mode is not ModelControlMode.EXPLICIT:
            raise Unavailable(
                "explicit model load / unload is not allowed if polling is enabled; start the "
                "server with --model-control-mode=explicit"
            )

    # -- acting ---------------------------------------------------------------------------------

    async def _scan(self) -> list[str]:
        """Bring every model's entry up to date; returns the names that are gone from disk."""
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
                model.config, model.problem = _config(model), ""
            except InvalidArgument as error:
                model.problem = str(error)
                for number in entry.versions:
                    if number not in model.served:
                        model.states[number] = (State.UNAVAILABLE, model.problem)
                log.error("model is not served", model=entry.name, reason=model.problem)
                return
            content = {
                number: (entry.config_text, model.override, version.fingerprint, version.problem)
                for number, version in entry.versions.items()
            }
            model.states = {
                n: state for n, state in model.states.items() if n in content or n in model.served
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
            if not entry.versions and not model.served:
                model.problem = "no version directory found"

    async def _load_version(self, model: Model, entry: VersionEntry, content: Hashable) -> None:
        number, name = entry.number, model.entry.name
        before = model.served.get(number)
        if before is None:
            model.states[number] = (State.LOADING, "")
        statistics = self._statistics.setdefault((name, number), Statistics())
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
            kept = "reload failed, the version loaded before still serves: "
            model.states[number] = (
                (State.UNAVAILABLE, reason) if before is None else (State.READY, kept + reason)
            )
            return
        model.failed.pop(number, None)
        model.served[number], model.serving[number] = version, content
        model.states[number] = (State.READY, "")
        model.select_default()
        log.info("model version is ready", model=name, version=number)
        if before is not None:
            self._in_background(_retire(before))

    def _load_blocking(
        self, model: Model, entry: VersionEntry, statistics: Statistics
    ) -> ServedVersion:
        """Blocking: verify, then load. Runs in a thread and only reads ``model``."""
        name = model.entry.name
        if entry.problem:
            raise InvalidArgument(entry.problem)
        if not manifest.verify(entry.path):
            if self._settings.require_manifest:
                raise InvalidArgument(
                    "no manifest.json, and --require-manifest is set; publish the version with "
                    "'modelport export'"
                )
            log.warning("no manifest.json: served unverified", model=name, version=entry.number)
        assert model.config is not None
        load = self._find_backend(model.config.backend)
        artifact = Artifact(name, entry.number, entry.path, model.config, self._threads)
        return ServedVersion(model.entry, entry.number, load(artifact), statistics)

    def _unload_version(self, model: Model, number: int) -> asyncio.Task[None]:
        """Out of service at once; drained and unloaded by the task, which nobody need await."""
        version = model.served.pop(number)
        model.serving.pop(number, None)
        model.select_default()
        model.states[number] = unloading = (State.UNLOADING, "")

        async def finish() -> None:
            await _retire(version)
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
        return task


async def _retire(version: ServedVersion) -> None:
    await version.drain()
    await asyncio.to_thread(version.backend.unload)


def _config(model: Model) -> ModelConfig:
    entry = model.entry
    if entry.problem:
        raise InvalidArgument(entry.problem)
    if model.override is not None:
        config = configuration.parse_json(model.override)
    else:
        config = configuration.parse(entry.config_text or "")
    if not (config.platform or config.backend or config.default_model_filename):
        _derive_backend(entry, config)
    return configuration.complete(config, entry.name)


def _derive_backend(entry: ModelEntry, config: ModelConfig) -> None:
    """Without a configuration the default file names the backend, as Triton has it."""
    files = {name for v in entry.versions.values() for name, *_ in v.fingerprint}
    for known in configuration.PLATFORMS:
        if any(f.split("/")[0] == known.default_filename for f in files):
            config.backend, config.platform = known.backend, known.platform
            config.default_model_filename = known.default_filename
            return
    if entry.versions:
        expected = ", ".join(known.default_filename for known in configuration.PLATFORMS)
        raise InvalidArgument(
            f"must specify 'platform' or 'backend' for '{entry.name}': no version holds one of "
            f"{expected}"
        )


def _labels(entry: ModelEntry, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    labels = {}
    for output in config.output:
        if output.label_filename:
            try:
                labels[output.name] = entry.labels(output.label_filename)
            except (OSError, ValueError) as error:
                raise InvalidArgument(
                    f"label file '{output.label_filename}' of output '{output.name}' cannot be read"
                ) from error
    return labels
