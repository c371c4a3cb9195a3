"""Composition of the server from its settings, and the life of its process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from modelport.gateway.access.access import access_of, warn_if_exposed
from modelport.gateway.access.access_metrics import AuditCollector
from modelport.gateway.access.guards import GuardedParts, guard
from modelport.gateway.access.quota_ledger import QuotaLedger
from modelport.gateway.backends.backend_host import Host
from modelport.gateway.errors import Unavailable
from modelport.gateway.inference.shared_memory import SharedMemoryRegions
from modelport.gateway.models.control import Control, LocalControl
from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.snapshot import Snapshot
from modelport.gateway.protocols.authentication import authenticated
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.dialects import Dialects
from modelport.gateway.protocols.header_rules import ForwardingService
from modelport.gateway.protocols.http_message import Handler
from modelport.gateway.protocols.oip.shared_memory import SharedMemory
from modelport.gateway.recording.recorder import RequestRecorder
from modelport.gateway.rollout.process_group import ThisProcess
from modelport.gateway.rollout.traffic.participant import RolloutParticipant
from modelport.gateway.rollout.traffic.rollouts import Rollouts
from modelport.gateway.runtime import collector, request_memory, signals
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.runtime.malloc import keep_freed_memory
from modelport.gateway.runtime.thread_scheduling import prefer_requests
from modelport.gateway.runtime.watchdog import LoopHeartbeat, Watchdog
from modelport.gateway.server import observed_requests
from modelport.gateway.server.admin import metrics_port as metrics
from modelport.gateway.server.admin.rollout_control import RolloutControl
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.listeners import Listeners
from modelport.gateway.server.tls import certificate
from modelport.gateway.settings import ModelControlMode, Settings, request_memory_bytes
from modelport.gateway.telemetry import Statistics, native_lines
from modelport.gateway.telemetry.access_log import (
    AccessLog,
    RecentRequests,
    access_log_families,
)
from modelport.gateway.telemetry.logs import gateway_log
from modelport.gateway.telemetry.metrics import FamiliesCollector, registry
from modelport.gateway.telemetry.request_record import RequestObserver
from modelport.gateway.telemetry.tfserving_counters import TfServingRequests
from modelport.gateway.telemetry.tracer import Tracer
from modelport.gateway.types import Deadline
from modelport.gateway.wire import json_text

log = structlog.get_logger("modelport.server")

#: Time between readiness going off and the listeners closing.
LAME_DUCK_SECONDS = 1.0
#: Part of the exit timeout that is kept for cancelling requests and closing connections.
CLOSING_SECONDS = 0.1
MakeControl = Callable[[ModelManager], Control]
#: As ``Listeners`` itself; Ray Serve's replicas have no sockets, and so their own.
MakeListeners = Callable[..., Listeners]


class Ports(NamedTuple):
    """Ports of a server; ``metrics_port`` is 0 for a worker, which has none."""

    http_port: int
    grpc_port: int
    metrics_port: int


class GatewayServer:
    """One serving process, composed in the order in which a request passes its parts.

    Without ``make_control`` it is the whole gateway: it polls the repository, serves the metrics
    port and logs its state. With it, it is a worker whose parent does that. ``report`` gets the
    event loop's heartbeats, from a thread. ``ledger`` counts quotas, over all workers; ``worker``
    is the number of this one.
    """

    def __init__(
        self,
        settings: Settings,
        make_control: MakeControl | None = None,
        report: Callable[[LoopHeartbeat], None] = lambda _: None,
        make_listeners: MakeListeners | None = None,
        ledger: QuotaLedger | None = None,
        worker: int | None = None,
    ) -> None:
        keep_freed_memory()
        prefer_requests()
        request_memory.PROCESS.limit_bytes = request_memory_bytes(settings)
        json_text.NonFinite.null = settings.json_nan_as_null
        self._settings = settings
        self.watcher = FileWatcher()
        self._certificate = certificate.of_settings(settings, self.watcher)
        self._access = access_of(settings, self.watcher, ledger)
        self._alone = make_control is None
        self.manager = ModelManager(settings, make_host=self._host)
        self.control: Control = (make_control or LocalControl)(self.manager)
        self._service = InferenceService(self.manager, settings.max_request_timeout_seconds)
        self.rollouts = Rollouts(self._service)
        self.participant = RolloutParticipant(self.manager, self.rollouts)
        requests = TfServingRequests()
        self._observer = RequestObserver()
        self._tracer = Tracer(settings.traces, self._observer, worker)
        self.dialects = Dialects(self._dialect_host(requests))
        self._observer.describe = self.dialects.describe
        self._access_log: AccessLog | None = None
        if settings.access_log is not None:
            self._access_log = AccessLog(settings.access_log, worker)
            self._observer.log(self._access_log)
        self._recorder: RequestRecorder | None = None
        if settings.record is not None:
            self._recorder = RequestRecorder(settings.record, worker)
            self._observer.keep(self._recorder)
        self._requests = requests
        self._rollout_control: RolloutControl | None = None
        self._metrics: HttpListener | None = None
        if self._alone:
            self._rollout_control = RolloutControl(settings, ThisProcess(self.participant))
            api = observed_requests.observing(self.dialects.application, self._observer)
            self._metrics = metrics.listener(
                settings, self._rollout_control, self._certificate, self._access, self._scrape,
                api, self.recent_requests,
            )  # fmt: skip
        self.registry = self._metrics_of(None)
        self.handler = self._handler()
        try:
            self._listeners = (make_listeners or Listeners)(
                self.handler,
                self.dialects.grpc,
                settings,
                self.manager.overloaded,
                self.rollouts.splits,
                not self._alone,
                self._certificate,
                self._access,
                # Nothing is refused that is not authenticated.
                self.dialects.application.refuses if self._access is None else None,
                self._observer,
            )
        except Unavailable:  # a program that continues keeps no port
            if self._metrics is not None:
                self._metrics.close()
            raise
        #: Whether the listeners start when the models have loaded.
        self._opens_late = False
        self._poller: asyncio.Task[None] | None = None
        self._report = report
        #: Ends what works in the background.
        self._background = contextlib.ExitStack()
        if self._access is not None:
            self._background.callback(self._access.close)
        if self._access_log is not None:
            self._background.callback(self._access_log.file.close)
        if self._recorder is not None:
            self._background.callback(self._recorder.close)
        self._background.callback(self._tracer.close)

    def _host(self, manager: ModelManager) -> Host:
        return Host(
            loop=asyncio.get_running_loop(),
            infer=partial(self.rollouts.infer, step=True),
            config_of=lambda name, number: manager.get(name, number).config,
            stream=partial(self.rollouts.stream, step=True),
            labels_of=lambda name, number, output: manager.get(name, number).labels_of(output),
            control=self.control,
            # During a rollout, each request chooses between two versions.
            loads_of=lambda name, number: (
                None if name in self.rollouts.splits else manager.get(name, number).loads()
            ),
        )

    def _dialect_host(self, requests: TfServingRequests) -> DialectHost:
        settings = self._settings
        regions = SharedMemoryRegions(settings.allow_client_shm)
        shared = SharedMemory(regions, self.control, settings.http_max_input_bytes)
        parts = GuardedParts(self.rollouts, self.manager, self.control)
        if self._access is not None:
            parts = guard(parts, self._access.quotas)
        if settings.http_headers.forwarded or settings.grpc_headers.forwarded:
            parts = parts._replace(service=ForwardingService(parts.service))
        return DialectHost(settings, *parts, shared, requests, self._tracer, self.rollouts.splits)

    def _handler(self) -> Handler:
        """The handler of the HTTP port, behind authentication."""
        handler = self.dialects.http
        if self._settings.prometheus_path:
            handler = metrics.mount(handler, self._scrape, self._settings.prometheus_path)
        if self._access is None:
            return handler
        return authenticated(handler, self._access, self.dialects.application.refuse)

    def _metrics_of(self, model: str | None) -> CollectorRegistry:
        """The metrics of this process, with the counters of all models or only those of one."""
        source = self.manager.statistics if model is None else partial(self._statistics_of, model)
        made = registry(
            source, self._requests, self.manager, request_memory.PROCESS, self._alone,
            self._settings.metrics,
        )  # fmt: skip
        if self._access is not None and self._access.audit is not None:
            made.register(AuditCollector(self._access.audit))
        if self._access_log is not None:
            made.register(FamiliesCollector(partial(access_log_families, self._access_log)))
        if self._recorder is not None:
            made.register(FamiliesCollector(self._recorder.families))
        if self._rollout_control is not None:
            whole = (self._rollout_control, self._certificate, self._access)
            metrics.register(made, *whole, self.watcher)
        return made

    def _statistics_of(self, model: str) -> Iterator[tuple[str, int, Statistics]]:
        return (row for row in self.manager.statistics() if row[0] == model)

    async def _scrape(self, model: str | None, is_openmetrics: bool) -> metrics.Text:
        """Format the metrics of this process, or of all workers."""
        if self._alone:
            registry = self.registry if model is None else self._metrics_of(model)
            return metrics.text(registry, is_openmetrics)
        return await self.control.metrics(model, is_openmetrics)

    async def recent_requests(self) -> RecentRequests | None:
        """The latest requests of this process; None: there is no access log."""
        return None if self._access_log is None else self._access_log.recent()

    def observed(self) -> Handler:
        """The handler, for requests that no listener of this process has observed."""
        return observed_requests.observing(self.handler, self._observer)

    @property
    def ports(self) -> Ports:
        metrics_port = 0 if self._metrics is None else self._metrics.port
        return Ports(self._listeners.http_port, self._listeners.grpc_port, metrics_port)

    async def listen(self) -> None:
        """Start the listeners: the server is live, but not ready.

        With ``exit_on_error`` requests wait for ``load``, as Triton's and TensorFlow Serving's do.

        Raises:
            Unavailable: A port is taken.
        """
        if self._access is not None:
            self._access.start()
        if self._alone:
            self._follow_signals()
        if self._metrics is not None:
            await self._metrics.start()
        watchdog = Watchdog(self._report, lambda: self.manager.loading)
        self._background.callback(watchdog.close)
        self._opens_late = self._settings.exit_on_error and not self.manager.started
        if not self._opens_late:
            await self._open()

    def _follow_signals(self) -> None:
        """Watch files, and have SIGHUP and SIGUSR1 look at them and at the logs."""
        audit = None if self._access is None else self._access.audit
        log_file = None if self._access_log is None else self._access_log.file
        signals.handle(signal.SIGUSR1, [each.reopen for each in (audit, log_file) if each])
        hang_up: list[Callable[[], None]] = [] if log_file is None else [log_file.reopen]
        if self.watcher.is_needed:
            watching = asyncio.get_running_loop().create_task(self.watcher.run())
            self._background.callback(watching.cancel)
            hang_up.append(self.watcher.wake)
        signals.handle(signal.SIGHUP, hang_up)

    async def _open(self) -> None:
        await self._listeners.start()
        if self._metrics is not None:
            warn_if_exposed(self._settings)
            log.info("listening", **self.ports._asdict())

    async def load(self, others: Snapshot | None = None) -> None:
        """Load the models, or those of the snapshot ``others``, and become ready.

        Raises:
            Unavailable: A model does not load, with ``exit_on_error``, or no model that was named.
        """
        collector.exempt_modules()
        if self._rollout_control is not None:
            await self._rollout_control.begin()
        await self.manager.start(others)
        self.participant.loaded()
        broken = self.manager.broken()
        useless = others is None and self.manager.is_useless
        if useless and not broken:
            raise Unavailable("no model is served, because the model repositories hold none")
        if useless or (broken and self._settings.exit_on_error):
            reasons = {row["name"]: row.get("reason", "") for row in self.manager.index()}
            failures = [
                f"{name} ({reason})" if (reason := reasons.get(name)) else name for name in broken
            ]
            raise Unavailable(f"failed to load all models: {', '.join(failures)}")
        if self._opens_late:
            await self._open()
        if self._rollout_control is None:
            return
        self._rollout_control.run()
        if self._settings.model_control_mode is ModelControlMode.POLL:
            self._poller = asyncio.get_running_loop().create_task(self.manager.poll())
        log.info("started", ready=self.manager.ready, models=len(self.manager.index(True)))

    async def stop(self) -> None:
        """Turn readiness off, close the listeners, finish requests in flight, unload the models."""
        timeout = self._settings.exit_timeout_seconds
        deadline = Deadline.after(max(0.0, timeout - CLOSING_SECONDS))
        self.manager.draining.set()
        if self._alone:
            log.info("draining", timeout_seconds=timeout)
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller
        leaving = [self._listeners.lame_duck(min(LAME_DUCK_SECONDS, timeout / 4))]
        if self._rollout_control is not None:
            leaving.append(self._rollout_control.stop())
        await asyncio.gather(*leaving)
        self.manager.closing.set()
        await self._listeners.drain(deadline)
        ending = [asyncio.wait_for(self.manager.stop(), deadline.remaining())]
        if self._metrics is not None:
            ending.append(self._metrics.drain(deadline))
        await asyncio.gather(*ending, return_exceptions=True)
        self._background.close()
        if self._alone:
            log.info("stopped")


async def _start(server: GatewayServer) -> None:
    await server.listen()
    try:
        await server.load()
    except Unavailable:
        await server.stop()
        raise


async def serve(
    settings: Settings,
    stopping: asyncio.Event,
    started: Callable[[Ports], None] = lambda ports: None,
) -> None:
    """Serve until ``stopping`` is set; call ``started`` when the models are loaded.

    Raises:
        Unavailable: The gateway cannot start.
    """
    server = GatewayServer(settings)
    start = asyncio.ensure_future(_start(server))
    await asyncio.wait(
        {start, asyncio.ensure_future(stopping.wait())}, return_when="FIRST_COMPLETED"
    )
    if start.done():
        start.result()
        started(server.ports)
        await stopping.wait()
    else:
        start.cancel()
    await server.stop()


def run(settings: Settings) -> None:
    """Serve in this process until SIGTERM or SIGINT; a second signal ends it at once.

    Raises:
        Unavailable: The gateway cannot start.
    """

    async def main() -> None:
        stopping = asyncio.Event()

        def stop() -> None:
            if stopping.is_set():
                os._exit(1)
            stopping.set()

        for number in signals.ending():
            asyncio.get_running_loop().add_signal_handler(number, stop)
        await serve(settings, stopping)
        # Not ``sys.exit``: a run or a load that cannot be interrupted may still hold a thread.
        native_lines.end()
        os._exit(0)

    with gateway_log(settings.log_format, settings.log_verbose):
        uvloop.run(main())
