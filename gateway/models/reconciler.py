"""The reconciler: load and unload versions until a model matches its version policy.

``version_policy.next_action`` decides; this module acts. All state belongs to the event loop; the
blocking part of a load (``loader``) runs in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Hashable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import structlog

from modelport.gateway.errors import InvalidArgument, ModelportError, NotFound, Unavailable
from modelport.gateway.models.discovery import Discovery
from modelport.gateway.models.load_threads import LoadThreads
from modelport.gateway.models.loader import VersionLoader
from modelport.gateway.models.model import (
    UNLOADED,
    LoadFailure,
    ModelRecord,
    ServedVersion,
    VersionState,
)
from modelport.gateway.models.model_config import (
    Computation,
    computation,
    copy_version_choice,
    histogram_buckets,
    resource_preserving,
)
from modelport.gateway.models.next_action import (
    LoadVersion,
    UnloadVersion,
    VersionSnapshot,
    next_action,
    wanted,
)
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.scan import VersionEntry, is_unreadable
from modelport.gateway.settings import Settings
from modelport.gateway.telemetry import Statistics

log = structlog.get_logger("modelport.models")

#: Transient failures are retried after this delay, which doubles with each failure.
FIRST_RETRY_SECONDS = 0.5
LAST_RETRY_SECONDS = 30.0
#: What "failed" if a server listed some versions but is loading more.
_LOADING = "loading"


class _VersionContent(NamedTuple):
    """The identity of a version that is loaded, or to be; ``again`` counts requests for it."""

    computation: Computation
    fingerprint: Hashable
    problem: str
    again: int


class Reconciler:
    """Reconciles one model at a time, under its lock."""

    def __init__(
        self,
        settings: Settings,
        loader: VersionLoader,
        discovery: Discovery,
        cores: int,
        models: Mapping[str, ModelRecord],
    ) -> None:
        self._settings = settings
        self._loader = loader
        self._discovery = discovery
        self._models = models
        self._threads = LoadThreads(cores)
        self._background: set[asyncio.Task[None]] = set()
        #: The background tasks that shutdown cancels, because no caller waits for them.
        self._reconciling: set[asyncio.Task[None]] = set()
        self._stopped = False
        #: The number of versions that became READY.
        self._loaded = 0
        #: By model and version.
        self.statistics: dict[str, dict[int, Statistics]] = {}

    # -- one model --------------------------------------------------------------------------------

    async def reconcile(self, model: ModelRecord, retrying: bool = False) -> None:
        """Load and unload versions until nothing is left to do. ``retrying``: only if a retry is
        due.

        Failures are recorded in the model's states, not raised.
        """
        model.reconciliations += 1
        try:
            async with model.lock:
                await self._reconcile(model, retrying)
        finally:
            model.reconciliations -= 1

    async def _reconcile(self, model: ModelRecord, retrying: bool) -> None:
        due = any(failure.due for failure in model.failures())
        if self._stopped or (retrying and not due):
            return
        try:
            if model.entry.remote and not await self._ask(model):
                return
            entry = model.entry
            try:
                model.config = model.read_config()
                model.problem = ""
                making_room = resource_preserving(
                    model.config, self._settings.aspired_version_policy
                )
            except InvalidArgument as error:
                self._refuse(model, str(error))
            else:
                await self._act(model, making_room)
            model.reconciled = entry
        finally:
            self._plan_retry(model)

    async def _ask(self, model: ModelRecord) -> bool:
        """Query the server for its versions; whether reconciliation can continue."""
        before = model.unlisted
        try:
            model.entry, loading = await self._discovery.ask(model.entry)
        except ModelportError as error:
            # The server may start later, or get the model or its other versions later.
            more = not model.served or (before is not None and before.transient)
            waits = more and isinstance(error, (Unavailable, NotFound))
            model.unlisted = failure = self._failure(None, error, before, waits)
            if not model.served:
                self._refuse(model, failure.reason)
                return False
            if not waits:
                failure.retry_at = None  # versions that are served need no retry
            if before is None or before.reason != failure.reason:
                log.warning("versions are unknown", model=model.entry.name, reason=failure.reason)
            return True
        model.unlisted = None
        if loading:
            unlisted = Unavailable("the server is loading models")
            model.unlisted = self._failure(_LOADING, unlisted, before, transient=True)
        return True

    def _refuse(self, model: ModelRecord, reason: str) -> None:
        """Record that no version of the model can be loaded; versions already served stay."""
        if reason != model.problem:
            log.error("model is not served", model=model.entry.name, reason=reason)
            model.load_failures += 1
        model.problem, model.troubled = reason, True
        for number in model.entry.versions:
            if number not in model.served:
                model.states[number] = (VersionState.UNAVAILABLE, reason)

    async def _act(self, model: ModelRecord, making_room: bool) -> None:
        assert model.config is not None
        entry = model.entry
        again = model.requests if entry.remote else 0
        computed = computation(entry, model.override)
        content: dict[int, _VersionContent] = {
            number: _VersionContent(computed, version.fingerprint, version.problem, again)
            for number, version in entry.versions.items()
            if number not in model.withheld or number in model.hold.versions
        }
        model.states = {  # drop the states of removed versions and repaired configurations
            number: state
            for number, state in model.states.items()
            if number in model.served
            or state[0] is VersionState.UNLOADING
            or (number in entry.versions and (number in model.failed or state[1] == UNLOADED))
        }
        counters = self.statistics.get(entry.name, {})
        for number in counters.keys() - model.states.keys():
            del counters[number]  # a request in flight has its own reference
        for served in model.served.values():  # without a reload
            copy_version_choice(model.config, served.config)
        model.select()  # labels may have changed
        for number in model.serving.keys() & content.keys():
            if model.serving[number] == content[number]:  # repaired, or unchanged
                model.failed.pop(number, None)
                model.states[number] = (VersionState.READY, "")
        snapshot = partial(self._snapshot, model, content, making_room)
        due = [failure for failure in model.failed.values() if failure.due]
        if due and isinstance(next_action(snapshot()), UnloadVersion):
            for failure in due:  # a retry would unload the version that serves instead
                failure.due = False
        while not self._stopped and (action := next_action(snapshot())):
            number = action.version
            if isinstance(action, LoadVersion):
                await self._load(model, entry.versions[number], content[number])
            elif making_room:
                model.displaced.add(number)
                await self.unload(model, number)
            else:
                self.unload(model, number)
        if model.served:
            if any(version in model.served for version in wanted(snapshot())):
                model.displaced.clear()
        elif not model.failed and not model.withheld & entry.versions.keys():
            model.troubled = True
            model.problem = (
                "no version is allowed by version_policy"
                if entry.versions
                else "no version directory found; versions are folders named 1, 2, ..."
            )
            log.warning("model is not served", model=entry.name, reason=model.problem)

    def _snapshot(
        self, model: ModelRecord, content: Mapping[int, _VersionContent], making_room: bool
    ) -> VersionSnapshot:
        failed = {v: failure.content for v, failure in model.failed.items() if not failure.due}
        return VersionSnapshot(
            model.policy, content, model.serving, failed, making_room, model.displaced,
            model.hold.versions,
        )  # fmt: skip

    # -- one version ------------------------------------------------------------------------------

    async def _load(
        self, model: ModelRecord, entry: VersionEntry, content: _VersionContent
    ) -> None:
        number, name = entry.number, model.entry.name
        before, failed = model.served.get(number), model.failed.get(number)
        if before is None and not (failed is not None and failed.transient):
            model.states[number] = (VersionState.LOADING, "")
        statistics = self.statistics.get(name, {}).get(number)
        loaded = self._loaded
        try:
            buckets = histogram_buckets(model.config)
            if statistics is None or [*statistics.buckets_ms] != [*buckets]:
                statistics = Statistics(buckets, self._settings.metrics.summary_latencies)
            if entry.fetch is not None and not entry.problem:
                await self._threads.run(None, entry.fetch)
            # Only a load that computes here needs a core.
            async with self._threads.core() if model.route is None else nullcontext():
                if before is not None and self._only_instances_differ(model, before, content):
                    await self._scale(before, model.config)
                    version = before
                else:
                    version = await self._threads.run(
                        self._settings.model_load_timeout_seconds,
                        self._loader.load, model.entry, entry, model.config, statistics,
                    )  # fmt: skip
        except Exception as error:
            transient = isinstance(error, Unavailable) or _may_be_readable_later(error)
            failure = self._failure(content, error, failed, transient)
            if transient and model.is_ensemble and self._loaded != loaded:
                failure.retry_at = time.monotonic()  # the model it waits for may be READY by now
            model.failed[number] = failure
            model.load_failures += 1
            model.troubled = True
            if failed is None or failed.reason != failure.reason or not failure.transient:
                log.error(
                    "model version is not served", model=name, version=number,
                    reason=failure.reason, exc_info=not isinstance(error, ModelportError),
                )  # fmt: skip
            kept = "reload failed, the previously loaded version still serves: " + failure.reason
            model.states[number] = (VersionState.READY, kept)
            if before is None:
                model.states[number] = (VersionState.UNAVAILABLE, failure.reason)
            return
        model.failed.pop(number, None)
        model.troubled = False
        self.statistics.setdefault(name, {})[number] = statistics
        statistics.namespace = model.entry.namespace
        model.served[number], model.serving[number] = version, content
        model.states[number] = (VersionState.READY, "")
        self._loaded += 1
        model.select()
        log.info("model version is ready", model=name, version=number)
        if before is not None and before is not version:
            self.in_background(_retire(before))
        for other in self._models.values():  # ensembles wait for the models of their steps
            if other.is_ensemble and other.mark_due(waiting=True):
                self.reconcile_soon(other, retrying=True)

    def _only_instances_differ(
        self, model: ModelRecord, version: ServedVersion, content: _VersionContent
    ) -> bool:
        """Whether the version that serves has the content but for its ``instance_group``."""
        before = model.serving.get(version.number)
        if model.config is None or not isinstance(before, _VersionContent):
            return False
        was, becomes = before.computation, content.computation
        if before[1:] != content[1:] or was.instances == becomes.instances:
            return False
        return version.differs_in_instances(model.config, said_so=was.content == becomes.content)

    async def _scale(self, version: ServedVersion, config: ModelConfig | None) -> None:
        assert config is not None
        task = asyncio.get_running_loop().create_task(version.scale(config))
        self._reconciling.add(task)
        task.add_done_callback(self._reconciling.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                task.cancel()
                raise
            raise Unavailable("the server is shutting down") from None

    def unload(self, model: ModelRecord, number: int) -> asyncio.Task[None]:
        """Take a version out of service at once; the returned task drains and unloads it."""
        version = model.served.pop(number)
        model.left.add(number)
        model.serving.pop(number, None)
        model.select()
        model.states[number] = unloading = (VersionState.UNLOADING, "")

        async def retire() -> None:
            await _retire(version)
            if model.states.get(number) is unloading:  # not loaded again since
                model.states[number] = (VersionState.UNAVAILABLE, UNLOADED)
                if number not in model.entry.versions:
                    del model.states[number]
            log.info("model version is unloaded", model=version.name, version=number)

        return self.in_background(retire())

    async def unload_all(self, model: ModelRecord) -> list[asyncio.Task[None]]:
        """Take all versions out of service and cancel all retries."""
        async with model.lock:
            tasks = [self.unload(model, number) for number in sorted(model.served)]
            model.forget_failures()
            model.displaced.clear()
            model.labelled.clear()
            self._plan_retry(model)
            return tasks

    # -- retries ----------------------------------------------------------------------------------

    def _failure(
        self, content: Hashable, error: Exception, before: LoadFailure | None, transient: bool
    ) -> LoadFailure:
        """Describe ``error`` and schedule a retry if there is to be one."""
        reason = str(error) if isinstance(error, ModelportError) else "failed to load"
        tries = before.tries + 1 if before is not None and before.content == content else 1
        wait: float | None = None
        if transient:
            wait = min(FIRST_RETRY_SECONDS * 2 ** min(tries - 1, 10), LAST_RETRY_SECONDS)
        elif tries <= self._settings.model_load_retry_count:
            wait = self._settings.load_retry_interval_seconds
        retry_at = None if wait is None else time.monotonic() + wait
        return LoadFailure(content, reason, transient, tries, retry_at)

    def _plan_retry(self, model: ModelRecord) -> None:
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        planned = [f.retry_at for f in model.failures() if f.retry_at is not None]
        if planned and not self._stopped:
            wait = max(0.0, min(planned) - time.monotonic())
            model.timer = asyncio.get_running_loop().call_later(wait, self._try_again, model)
        if any(f.retry_at is not None and not f.transient for f in model.failures()):
            model.settled.clear()
        else:
            model.settled.set()

    def _try_again(self, model: ModelRecord) -> None:
        model.timer = None
        if model.mark_due():
            self.reconcile_soon(model, retrying=True)
        else:
            self._plan_retry(model)

    # -- several models, and shutdown -------------------------------------------------------------

    async def reconcile_all(self, models: Collection[ModelRecord]) -> None:
        """Reconcile concurrently, but an ensemble after those of ``models`` that its steps need."""
        named = {model.entry.name: model for model in models}
        order = TopologicalSorter[str]()
        for name, model in named.items():
            model.reconciliations += 1  # an ensemble waits, and is coming
            order.add(name, *(step for step in model.step_names() if step in named))
        with suppress(CycleError):  # ensembles of a cycle come last; loading them reports it
            order.prepare()

        async def reconcile(name: str) -> None:
            model = named.pop(name)
            model.reconciliations -= 1
            await self.reconcile(model)

        async def work(name: str) -> None:
            await reconcile(name)
            order.done(name)
            await asyncio.gather(*map(work, order.get_ready()))

        try:
            await asyncio.gather(*map(work, order.get_ready()))
            await asyncio.gather(*map(reconcile, list(named)))
        finally:
            for model in named.values():
                model.reconciliations -= 1

    def reconcile_soon(self, model: ModelRecord, retrying: bool = False) -> None:
        async def work() -> None:
            try:
                await self.reconcile(model, retrying)
            except Exception:
                log.exception("a model could not be updated", model=model.entry.name)

        task = self.in_background(work())
        self._reconciling.add(task)
        task.add_done_callback(self._reconciling.discard)

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        # Callers that await the task get its error; without one it has been logged.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def stop(self) -> None:
        """Unload everything, ensembles before the models of their steps."""
        self._stopped = True
        self._threads.stop()
        for task in self._reconciling:
            task.cancel()
        ensembles = [model for model in self._models.values() if model.is_ensemble]
        others = [model for model in self._models.values() if not model.is_ensemble]
        for models in (ensembles, others):
            unloading = await asyncio.gather(*(self.unload_all(model) for model in models))
            await asyncio.gather(*(task for tasks in unloading for task in tasks))
        await asyncio.gather(*self._background, return_exceptions=True)


async def _retire(version: ServedVersion) -> None:
    try:
        await version.retire()
    except Exception:  # the version is out of service regardless
        log.exception("a backend failed to unload", model=version.name, version=version.number)


def _may_be_readable_later(error: Exception) -> bool:
    """Whether a load failed because an existing file could not be read."""
    causes = (error, error.__cause__)
    return any(is_unreadable(e) and not isinstance(e, FileNotFoundError) for e in causes)
