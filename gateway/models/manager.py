"""The model manager: look-ups, control mode, load and unload requests, and readiness.

The manager decides which models to serve. ``reconciler`` loads and unloads them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import structlog

from modelport.gateway.backend_registry import Versions, find_loader, find_versions
from modelport.gateway.backends import base
from modelport.gateway.backends.backend_host import Host
from modelport.gateway.backends.capabilities import RoutedBackend
from modelport.gateway.errors import (
    InvalidArgument,
    ModelportError,
    NotFound,
    Unavailable,
    closest,
)
from modelport.gateway.models import registered_names, sent_files
from modelport.gateway.models import snapshot as snapshots
from modelport.gateway.models.discovery import Discovery
from modelport.gateway.models.held_versions import HeldVersions
from modelport.gateway.models.loader import VersionLoader
from modelport.gateway.models.model import (
    UNLOADED,
    ModelRecord,
    ServedVersion,
    VersionSettings,
    VersionState,
)
from modelport.gateway.models.reconciler import Reconciler
from modelport.gateway.models.sent_files import is_sent
from modelport.gateway.models.snapshot import Snapshot
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import scan
from modelport.gateway.repository.scan import ModelEntry
from modelport.gateway.settings import ModelControlMode, Settings, usable_cores
from modelport.gateway.telemetry import Statistics

log = structlog.get_logger("modelport.models")

#: Most log lines, and rows of the index, about what is in a repository and no model.
MAX_IGNORED = 100


class ModelManager:
    """Models by name, of the repositories and routes, and handles on their versions."""

    def __init__(
        self,
        settings: Settings,
        find_backend: Callable[[str], base.BackendLoader] = find_loader,
        make_host: Callable[[ModelManager], Host] | None = None,
        find_versions: Callable[[str], Versions] = find_versions,
    ) -> None:
        self._models: dict[str, ModelRecord] = {}
        #: What is in the repositories and no model, and the reasons.
        self._beside: dict[str, str] = {}
        #: Whether the repositories have been read: until then, any model may exist.
        self._scanned = False
        self._settings = settings
        self._make_host = make_host
        cores = max(1, usable_cores() // settings.workers)
        self._loader = VersionLoader(settings, find_backend, cores)
        self._discovery = Discovery(settings, find_versions)
        self._reconciler = Reconciler(settings, self._loader, self._discovery, cores, self._models)
        #: The versions of rollouts.
        self.held = HeldVersions(self._models, self._reconciler, self._scan)
        # One scan at a time: a slow, older scan would undo what a later one found.
        self._scanning = asyncio.Lock()
        self._reloading = asyncio.Lock()  # one reload request at a time
        #: The ends of the loads of ensembles on request, and the models that they need until then.
        self._composing: dict[asyncio.Future[None], set[str]] = {}
        #: Folders of sent files that a load which may fail replaces.
        self._replaced: set[Path] = set()
        #: Folders outside of the repositories that a model was served from.
        self._dropped: set[Path] = set()
        self._looks: Mapping[str, ModelEntry] = {}
        self._missing: set[str] = set()
        #: Models that have been served, and are not in the repository any more.
        self._left: set[str] = set()
        #: What the last scan ignored, and the reasons.
        self._ignored: dict[str, str] = {}
        self.started = False
        self._unlistable = False
        #: Not empty while a model is overloaded; listeners then ask before reading a request.
        self.overloaded = self._loader.shared.overloaded
        #: No longer ready; requests are still served.
        self.draining = asyncio.Event()
        #: New requests are refused and streams end.
        self.closing = asyncio.Event()

    # -- the hot path ---------------------------------------------------------------------------

    def acquire(self, name: str, number: int = 0) -> ServedVersion:
        """Acquire a handle on a READY version; the caller releases it. ``number`` 0: the default.

        Raises:
            NotFound: no such model or version, or it is not loaded.
            Unavailable: the version is loading, or its load is retried, or the server is starting.
        """
        version = self.get(name, number)
        version.in_flight += 1
        return version

    def get(self, name: str, number: int = 0) -> ServedVersion:
        """The version that ``acquire`` returns, without a handle: for inspection, not inference."""
        model = self._models.get(name)
        if model is None:
            raise self._unknown(name)
        version = model.served.get(number) if number else model.default
        if version is not None:
            return version
        # Clients and meshes retry UNAVAILABLE, so it needs an end in sight.
        kind = Unavailable if model.is_coming(number) else NotFound
        if not number:
            raise kind(f"Request for unknown model: '{name}' has no available versions")
        known = number in model.states or number in model.left or kind is Unavailable
        state = "at ready state" if known else "found"
        raise kind(f"Request for unknown model: '{name}' version {number} is not {state}")

    def find(self, name: str, number: int = 0) -> ServedVersion | None:
        """The version that ``get`` returns; None if there is no such version."""
        model = self._models.get(name)
        if model is None:
            return None
        return model.served.get(number) if number else model.default

    # -- inspection -----------------------------------------------------------------------------

    def require_ready(self, name: str, number: int = 0) -> ServedVersion:
        """The version that ``get`` returns, if its backend can answer now.

        Raises:
            NotFound, Unavailable: as ``get``; or the backend has a problem, which is the
                message.
        """
        version = self.get(name, number)
        if version.backend.problem:
            raise Unavailable(version.backend.problem)
        return version

    def names(self) -> list[str]:
        """Every known model, served or not."""
        return sorted(self._models)

    def versions(self, name: str) -> list[int]:
        """The READY versions of a model, ascending."""
        return sorted(self._models[name].served) if name in self._models else []

    def states(self, name: str) -> list[tuple[int, VersionState, str]]:
        """Version, state and reason of a model's versions, ascending.

        Raises:
            NotFound: no such model.
        """
        return list(self._model(name).rows())

    def is_retried(self, name: str, number: int) -> bool:
        """Whether the load of a version failed and is going to be retried."""
        model = self._models.get(name)
        failure = model.failed.get(number) if model is not None else None
        return failure is not None and failure.is_retried

    def labels(self, name: str) -> Mapping[str, int]:
        """The labels of a model's served versions.

        Raises:
            NotFound: no such model.
        """
        return self._model(name).labels

    def version_of(self, name: str, label: str) -> int:
        """The version that ``label`` names.

        Raises:
            NotFound: no such model, no such label, or its version is not served.
            Unavailable: no version is served yet.
        """
        labels = self._model(name).labels
        if label not in labels:
            self.get(name)
            raise NotFound(f"Unrecognized servable version label: {label}")
        return labels[label]

    def has(self, name: str, number: int) -> bool:
        """Whether the version is in the repository, or on its server, as far as is known."""
        return name in self._models and number in self._models[name].entry.versions

    def folder(self, name: str, number: int) -> Path | None:
        """The folder of a version; None if another server has it.

        Raises:
            NotFound: there is no such model.
        """
        entry = self._model(name).entry
        found = entry.versions.get(number)
        return None if found is None or entry.remote else found.path

    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        """The rows of the repository index."""
        rows = self._rows(ready_only)
        if not ready_only:
            problem = {"version": "", "state": VersionState.UNAVAILABLE.value}
            rows += [
                {"name": name, **problem, "reason": reason}
                for name, reason in self._beside.items()
                if name not in self._models
            ]
        return sorted(rows, key=lambda row: row["name"])

    def _rows(self, ready_only: bool) -> list[dict[str, str]]:
        return [row for model in self._models.values() for row in model.index(ready_only)]

    def model_states(self) -> Iterator[tuple[str, str]]:
        """Model and state of each row of the index, except versions unloaded on request."""
        for row in self._rows(ready_only=False):
            if "state" in row and row.get("reason") != UNLOADED:
                yield row["name"], row["state"]

    def endpoints(self) -> Iterator[tuple[str, str, str, bool]]:
        """Model, version, ``host:port`` and ejection of every endpoint of a remote model."""
        for name in sorted(self._models):
            for number, served in sorted(self._models[name].served.items()):
                if isinstance(served.backend, RoutedBackend):
                    for endpoint, ejected in served.backend.endpoints():
                        yield name, str(number), endpoint, ejected

    def _model(self, name: str) -> ModelRecord:
        if name not in self._models:
            raise self._unknown(name)
        return self._models[name]

    def _unknown(self, name: str) -> ModelportError:
        if not self._scanned:
            return Unavailable("the server is starting; its models are not known yet")
        if known := self._discovery.ambiguous.get(name):
            return InvalidArgument(
                f"There are {len(known)} identifiers of model '{name}' in global map, model "
                "namespace must be provided to resolve ambiguity."
            )
        why = "has no available versions" if name in self._left else "is not found"
        return NotFound(f"Request for unknown model: '{name}' {why}")

    # -- the server's state ----------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the server is started, not draining and, if strict, every model is served."""
        if not self.started or self.draining.is_set():
            return False
        return not self._settings.strict_readiness or not self.broken()

    @property
    def loading(self) -> bool:
        """Whether a model version is being loaded."""
        return any(model.is_loading for model in self._models.values())

    @property
    def is_useless(self) -> bool:
        """Whether models have to be served, and none is or is going to be."""
        models = self._models.values()
        return self._must_serve and not any(m.served or m.is_coming(0) for m in models)

    @property
    def _must_serve(self) -> bool:
        """Whether models were named, or with ``exit_on_error`` have to be there from the start."""
        settings = self._settings
        if settings.model_control_mode is ModelControlMode.POLL:
            return False  # they may be published later
        named = settings.models or settings.model_config_file
        if named or {*settings.load_models} - {"*"}:
            return True
        loads = settings.load_models or settings.model_control_mode is ModelControlMode.NONE
        return bool(settings.exit_on_error and loads)

    def broken(self) -> list[str]:
        """Models that were requested but whose default version cannot serve."""
        broken = {name for name, model in self._models.items() if model.broken}
        return sorted(self._missing | broken)

    def statistics(self) -> Iterator[tuple[str, int, Statistics]]:
        for name, versions in sorted(self._reconciler.statistics.items()):
            for number, statistics in sorted(versions.items()):
                yield name, number, statistics

    def load_failures(self) -> Mapping[str, int]:
        """Failed loads by model, for known models."""
        return {name: model.load_failures for name, model in sorted(self._models.items())}

    # -- following the repository -----------------------------------------------------------------

    async def start(self, others: Snapshot | None = None) -> None:
        """Load the models that the control mode asks for, or those of the snapshot ``others``.

        A model that fails does not affect other models.
        """
        settings = self._settings
        self._loader.host = self._make_host(self) if self._make_host is not None else None
        await self._scan()
        self._scanned = True
        if others is not None:
            await self.restore(others)
        else:
            await self._load_first(settings)
        self.started = True

    async def _load_first(self, settings: Settings) -> None:
        explicit = settings.model_control_mode is ModelControlMode.EXPLICIT
        names = list(self._models)
        if explicit and "*" not in settings.load_models:
            known = self._models.keys() | self._discovery.ambiguous.keys()
            self._missing = {name for name in settings.load_models if name not in known}
            for name in self._missing:
                close = closest(name, self._models)
                hint = {"did_you_mean": close} if close else {}
                log.error("--load-model names no model of the repository", model=name, **hint)
            given = (self._discovery.ambiguous.get(name, [name]) for name in settings.load_models)
            names = [name for each in given for name in each if name in self._models]
        names += [name for name in self.held.names() if name in self._models and name not in names]
        for name in names:
            self._models[name].asked = True
        models = self._with_steps(names)
        await self._reconciler.reconcile_all(models)
        if settings.exit_on_error or (self._must_serve and not any(m.served for m in models)):
            await asyncio.gather(*(model.settled.wait() for model in models))

    async def poll(self) -> None:
        """Poll the repository until cancelled. A slow model does not delay others."""
        while True:
            await asyncio.sleep(self._settings.repository_poll_seconds)
            await self.follow()

    async def follow(self) -> None:
        """Scan the repository once and reconcile changed models in the background."""
        try:
            for model in await self._look():
                # A model that is being reconciled is checked again at the next poll.
                changed = model.entry.remote or model.entry != model.reconciled
                if changed and not model.lock.locked():
                    self._reconciler.reconcile_soon(model)
        except OSError as error:
            if not self._unlistable:
                log.warning("the model repository cannot be listed", reason=error.strerror)
            self._unlistable = True
        except Exception:  # the next poll may succeed
            log.exception("the model repository cannot be read")
        else:
            if self._unlistable:
                log.warning("the model repository can be listed again")
            self._unlistable = False

    def snapshot(self) -> Snapshot:
        """The state of the models, used to bring a restarted worker up to date."""
        return snapshots.describe(self._models)

    async def restore(self, others: Snapshot) -> None:
        """Serve the models of the snapshot ``others`` that are in the repository, and no others."""
        sources = {name: asked["source"] for name, asked in others.items()}
        outside = {n: Path(source) for n, source in sources.items() if source.startswith("/")}
        if outside != self._discovery.folders:
            self._discovery.folders = outside
            await self._scan()
        await snapshots.restore(
            others, self._models, self._reconciler, self._unload, self._register
        )

    async def _look(self) -> list[ModelRecord]:
        """Scan for the current models; unload removed ones."""
        for name in await self._scan():
            model = self._models.pop(name)
            if model.served:
                self._left.add(name)
            self._reconciler.in_background(self._remove(name, model))
        return list(self._models.values())

    async def _remove(self, name: str, model: ModelRecord) -> None:
        await self._reconciler.unload_all(model)
        if name not in self._models:
            self._reconciler.statistics.pop(name, None)

    async def _scan(self, only: str = "") -> list[str]:
        """Update the entry of every model, or of one; return the names of removed models."""
        async with self._scanning:
            found = self._without_ignored(await self._discovery.scan())
            found |= registered_names.entries(found, self._models)
            if self._settings.model_namespacing:
                self._rename(found)
            polling = self._settings.model_control_mode is ModelControlMode.POLL
            for name, entry in found.items():
                if only not in ("", name):
                    continue
                model = self._models.get(name)
                accepted: ModelEntry | None = entry
                if polling and self.started and not only:
                    known = model.entry if model is not None else None
                    accepted = scan.settled(entry, self._looks.get(name), known)
                if accepted is None:
                    continue
                if model is None:
                    route = self._settings.routes.get(name)
                    self._models[name] = ModelRecord(accepted, route, hold=self.held.of(name))
                else:
                    model.look(accepted)
            self._looks = self._looks if only else found
            return [name for name in self._models if name not in found]

    def _rename(self, found: Mapping[str, ModelEntry]) -> None:
        """Keep what serves of models whose names are ambiguous now, or no longer."""
        names = {entry.path: name for name, entry in found.items() if entry.namespace}
        statistics = self._reconciler.statistics
        for before, model in tuple(self._models.items()):
            name = names.get(model.entry.path, before)
            if name not in self._models:
                self._models[name] = self._models.pop(before)
                if before in statistics:
                    statistics[name] = statistics.pop(before)

    def _without_ignored(self, found: Mapping[str, ModelEntry]) -> dict[str, ModelEntry]:
        """The models of a scan; log what else there is, once."""
        beside = {name: entry.problem for name, entry in found.items() if not entry.is_model}
        ignored = beside | {
            f"{name}/{folder}": "it is not a version; versions are folders named 1, 2, ..."
            for name, entry in found.items()
            for folder in entry.ignored
        }
        new = sorted(ignored.keys() - self._ignored.keys())
        for name in new[:MAX_IGNORED]:
            log.warning("ignored in the repository", name=name, reason=ignored[name])
        if len(new) > MAX_IGNORED:
            log.warning("ignored in the repository", more=len(new) - MAX_IGNORED)
        self._ignored = ignored
        rows = [name for name in beside if not name.lower().endswith(scan.TEXT_SUFFIXES)]
        self._beside = {name: beside[name] for name in sorted(rows)[:MAX_IGNORED]}
        return {name: entry for name, entry in found.items() if entry.is_model}

    # -- control on request -----------------------------------------------------------------------

    async def load(self, name: str, override: str | None = None, source: str = "") -> None:
        """Load or reload a model; ``override`` is a JSON configuration that replaces the file's.

        It does so until the model is unloaded, or is loaded after its folder has changed. One with
        which nothing can be loaded is dropped.

        Args:
            source: the model of the repository to serve as ``name``, until that is unloaded; or the
                folder of one outside, which comes with the models beside it.

        Raises:
            Unavailable: the control mode does not allow it, or a dependency of the model is
                missing and the load is retried.
            NotFound: there is no such model.
            AlreadyExists: another model has the name, or ``source`` without changes.
            InvalidArgument: no version could be loaded; versions served before are still
                served.
        """
        self.require_explicit()
        if override is not None:
            try:
                configuration.parse_json(override)
            except InvalidArgument as error:
                raise InvalidArgument(
                    f"failed to load '{name}', invalid config override: {error}"
                ) from error
        # If the caller is cancelled, the load still completes.
        await asyncio.shield(self._reconciler.in_background(self._load(name, override, source)))

    async def _load(self, name: str, override: str | None, source: str) -> None:
        if source.startswith("/"):
            await self._load_outside(name, override, Path(source))
            return
        gone = await self._scan()
        folder = self._discovery.folders.get(name)
        if folder is not None and is_sent(folder) and name in self._discovery.hidden:
            self._place(name, None)  # as in Triton, back to the model of the repository
            gone = await self._scan()
            if name in gone:  # there it is ambiguous
                await self._unload(name)
        new = self._register(name, source) if source and source not in gone else None
        try:
            for each in self._discovery.ambiguous.get(name, [name]):
                await self._load_found(each, override, gone)
        except ModelportError:
            if new is not None and self._models.get(name) is new:
                await self._unload(name)
            raise

    async def _load_outside(self, name: str, override: str | None, folder: Path) -> None:
        folders, before = self._discovery.folders, None
        if is_sent(folder):
            before = registered_names.check_replaced(name, self._models, folders)
        else:
            registered_names.check_folder(name, folder, self._models, folders)
        model = self._models.get(name)
        overridden = None if model is None else (model.override, model.overridden)
        self._replaced |= {before} if before is not None else set()
        self._place(name, folder)
        try:
            await self._load_found(name, override, await self._scan())
        except ModelportError:
            if folders.get(name) is not folder:  # it has gone meanwhile
                raise
            if model is not None and overridden is not None and self._models.get(name) is model:
                model.override, model.overridden = overridden
                await self._put_back(model, before)
            elif name in self._models:
                await self._unload(name)
            else:
                self._place(name, None)
            raise
        finally:
            self._replaced -= {before}

    async def _put_back(self, model: ModelRecord, folder: Path | None) -> None:
        """Serve the model from ``folder``, or from the repository, as before a load that failed."""
        name = model.entry.name
        self._place(name, folder)
        await self._scan()
        if model.served:
            model.forget_failures()
            await self._reconciler.reconcile(model)
        else:
            await self._stop(model)

    def outside(self) -> set[Path]:
        """The folders outside of the repositories that models are served from."""
        return {*self._discovery.folders.values(), *self._replaced}

    def dropped(self) -> set[Path]:
        """The folders of that kind that are no longer used, each told once."""
        loading = {name for name, model in self._models.items() if model.reconciliations}
        gone = {each for each in self._dropped - self.outside() if each.name not in loading}
        self._dropped -= gone
        return gone

    def _place(self, name: str, folder: Path | None) -> Path | None:
        """Have the model in ``folder`` alone; return the one before it."""
        folders = self._discovery.folders
        before = folders.pop(name, None)
        if before is not None:
            self._dropped.add(before)
        if folder is not None:
            folders[name] = folder
        return before

    def _register(self, name: str, source: str) -> ModelRecord | None:
        """Add the model ``source`` under ``name``; None: it has that name already."""
        entry = registered_names.register(name, source, self._models)
        if entry is None:
            return None
        self._models[name] = model = ModelRecord(entry, hold=self.held.of(name))
        log.info("model is registered under another name", model=source, name=name)
        return model

    async def _load_found(self, name: str, override: str | None, gone: Collection[str]) -> None:
        model = self._models.get(name)
        if model is None or name in gone:
            reason = f": {self._beside[name]}" if name in self._beside else ""
            raise NotFound(f"failed to load '{name}', failed to poll from model repository{reason}")
        self._missing.discard(name)
        before, serving = (model.override, model.overridden), dict(model.serving)
        model.ask(VersionSettings(), override)
        steps = self._with_steps([name])[1:]
        end = asyncio.get_running_loop().create_future()
        self._composing[end] = {step.entry.name for step in steps}
        try:
            await self._reconciler.reconcile_all([step for step in steps if not step.served])
            await self._reconciler.reconcile(model)
        finally:
            del self._composing[end]
            end.set_result(None)
        if model.reconciliations:  # a later load has seen newer files: its outcome counts
            async with model.lock:
                pass
        idle = [each for each in self._ensembles_of(name) if each.asked and not each.served]
        await self._reconciler.reconcile_all(idle)
        await self._follow_names()
        try:
            await self._settled(model)
        except InvalidArgument:
            if model.override == override and model.serving.items() <= serving.items():
                model.override, model.overridden = before
            raise

    async def _follow_names(self) -> None:
        """Reconcile models that serve and have another name now, or whose steps have."""
        stale = [
            name
            for name, model in self._models.items()
            if model.served
            and model.reconciled is not None
            and (model.reconciled.name, model.reconciled.beside) != (name, model.entry.beside)
        ]
        models = self._with_steps(stale)
        await self._reconciler.reconcile_all(
            [each for each in models if each.entry.name in stale or not each.served]
        )

    def _with_steps(self, names: Iterable[str]) -> list[ModelRecord]:
        """The models ``names`` and, for ensembles, the models of their steps, as in Triton."""
        found: dict[str, ModelRecord] = {}
        todo = deque(names)
        while todo:
            model = self._models.get(name := todo.popleft())
            if model is not None and name not in found:
                found[name] = model
                todo += model.step_names()
        return list(found.values())

    async def _settled(self, model: ModelRecord) -> None:
        """Wait for pending retries, then raise the final error, if any."""
        await model.settled.wait()
        model.raise_failure()

    async def reload(self, wanted: Mapping[str, VersionSettings]) -> None:
        """Serve exactly the models of ``wanted`` and of their steps; unload all others.

        Raises:
            Unavailable: the control mode does not allow it, or as in ``load``.
            NotFound: there is no such model; nothing has changed.
            InvalidArgument: a label names a version that is not going to be served, and nothing
                has changed; or as in ``load``.
        """
        self.require_explicit()
        await asyncio.shield(self._reconciler.in_background(self._reload(dict(wanted))))

    async def _reload(self, wanted: Mapping[str, VersionSettings]) -> None:
        async with self._reloading:
            gone = await self._scan()
            for name, asked in wanted.items():
                if name not in self._models or name in gone:
                    raise NotFound(f"failed to load '{name}', failed to poll from model repository")
                await self._check_labels(self._models[name], asked)
            self.held.free(self._models.keys() - wanted.keys())
            self._missing.clear()
            for name, asked in wanted.items():
                self._models[name].ask(asked)
            models = {model.entry.name: model for model in self._with_steps(wanted)}
            loading = [m for name, m in models.items() if name in wanted or not m.served]
            results = await asyncio.gather(
                self._reconciler.reconcile_all(loading),
                *(self._unload(name) for name in self._models.keys() - models.keys()),
                return_exceptions=True,
            )
            results += await asyncio.gather(
                *(self._settled(self._models[name]) for name in wanted), return_exceptions=True
            )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _check_labels(self, model: ModelRecord, asked: VersionSettings) -> None:
        entry = model.entry
        if asked.labels:
            if entry.remote:
                entry, _ = await self._discovery.ask(entry)
            model.check_labels(asked, entry.versions)

    def _ensembles_of(self, name: str) -> list[ModelRecord]:
        models = self._models.values()
        return [each for each in models if each.is_ensemble and name in each.step_names()]

    async def unload(self, name: str, dependents: bool = False) -> None:
        """Stop serving a model and the ensembles that need it; requests in flight finish first.

        With ``dependents``, also unload the models of an ensemble's steps, except those that were
        requested by name and those that another ensemble needs.

        Raises:
            Unavailable: the control mode does not allow it.
            NotFound: no such model.
        """
        self.require_explicit(name)
        for each in self._discovery.ambiguous.get(name, [name]):
            await asyncio.shield(self._reconciler.in_background(self._unload(each, dependents)))

    async def _unload(self, name: str, dependents: bool = False) -> None:
        while loads := [end for end, names in self._composing.items() if name in names]:
            await asyncio.wait(loads)
        self._missing.discard(name)
        if name not in self._models:
            raise NotFound(f"failed to unload '{name}': the model is not found")
        model = self._models[name]
        model.asked, model.override = False, None
        if model.entry.source:
            del self._models[name]
            # A load that waits for the model's lock finds nothing to load.
            model.entry = model.entry._replace(versions={})
        outside = self._place(name, None)
        for ensemble in self._ensembles_of(name):
            await self._stop(ensemble)
        await self._stop(model)
        if name not in self._models:
            self._reconciler.statistics.pop(name, None)
        for step in model.step_names() if dependents else ():
            needed = any(ensemble.served for ensemble in self._ensembles_of(step))
            needed |= bool(self.held.of(step).versions)
            if step in self._models and not self._models[step].asked and not needed:
                await self._unload(step, dependents)
        if outside is not None:
            await self._look()  # the models beside it have gone, too

    async def _stop(self, model: ModelRecord) -> None:
        unloading = await self._reconciler.unload_all(model)
        model.problem, model.troubled = "", False
        for number, (state, _) in model.states.items():
            if state is VersionState.UNAVAILABLE:
                model.states[number] = (state, UNLOADED)
        await asyncio.gather(*unloading)

    async def unload_version(self, name: str, number: int) -> None:
        """Stop serving one version until the model is loaded again; requests in flight finish
        first.

        Raises:
            Unavailable: the control mode does not allow it, or the version is not READY.
            NotFound: no such model or version.
        """
        self.require_explicit(name)
        await asyncio.shield(self._reconciler.in_background(self._unload_version(name, number)))

    async def _unload_version(self, name: str, number: int) -> None:
        model = self._model(name)
        async with model.lock:
            self.get(name, number)
            model.withheld.add(number)
            unloading = self._reconciler.unload(model, number)
        await unloading

    def set_default(self, name: str, number: int) -> None:
        """Make ``number`` the default version, until it is unloaded.

        Raises:
            Unavailable: the control mode does not allow it, or the version is not READY.
            NotFound: no such model or version.
        """
        self.require_explicit(name)
        self.get(name, number)
        model = self._models[name]
        model.pinned = number
        model.select()

    async def stop(self) -> None:
        """Unload everything; call when no new request can arrive."""
        await self._reconciler.stop()
        for folder in filter(is_sent, self.outside() | self._dropped):
            await asyncio.to_thread(sent_files.remove, folder)

    def require_explicit(self, *names: str) -> None:
        """Raises ``Unavailable``: no changes on request, or not of these models: a rollout runs."""
        if self._settings.model_control_mode is not ModelControlMode.EXPLICIT:
            mode = self._settings.model_control_mode
            raise Unavailable(
                "explicit model load / unload is not allowed if polling is enabled, or models are "
                f"loaded at start only (--model-control-mode={mode}); start the server with "
                "--model-control-mode=explicit"
            )
        self.held.free(names)
