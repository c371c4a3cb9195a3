"""The parent process: it reserves the ports, starts and replaces the workers, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Mapping, Sequence
from itertools import chain
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from modelport.gateway.access.access import access_of, warn_if_exposed
from modelport.gateway.access.quota_ledger import QuotaLedger
from modelport.gateway.errors import ModelportError, Unavailable, plain_reason
from modelport.gateway.runtime import signals
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.server import unix_socket
from modelport.gateway.server.admin import metrics_port
from modelport.gateway.server.admin.rollout_control import RolloutControl
from modelport.gateway.server.listening_socket import reserve
from modelport.gateway.server.tls import certificate
from modelport.gateway.server.tls.certificate import ServerCertificate
from modelport.gateway.server.unix_socket import UnixSocket
from modelport.gateway.server.workers import merged_answers
from modelport.gateway.server.workers.aggregated_metrics import process_families
from modelport.gateway.server.workers.channel import MessageChannel
from modelport.gateway.server.workers.coordinator import (
    ConnectedWorker,
    Coordinator,
    PublishedFiles,
)
from modelport.gateway.server.workers.forwarded_requests import ForwardedRequests
from modelport.gateway.server.workers.process import Assignment, WorkerProcess
from modelport.gateway.server.workers.worker_members import WorkerMembers
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.telemetry.logs import gateway_log
from modelport.gateway.telemetry.metrics import FamiliesCollector
from modelport.gateway.types import Deadline
from modelport.gateway.upstream import credentials

log = structlog.get_logger("modelport.workers")

#: Start attempts of a worker before all have started once; then the gateway gives up.
START_TRIES = 3
#: Time for the workers to acknowledge the drain.
DRAIN_REQUEST_SECONDS = 1.0
#: Number of the spare worker, which has done its imports and replaces the next one that ends.
SPARE = -1
#: Wait before a spare that ended is started again.
SPARE_SECONDS = 10.0
#: Time between the exit timeout and SIGKILL.
KILL_SECONDS = 0.5


def run(settings: Settings, arguments: Sequence[str], entry_point: str) -> None:
    """Serve with ``settings.workers`` processes until SIGTERM or SIGINT.

    Args:
        arguments: The command line of ``modelport serve`` that gave ``settings``.
        entry_point: The module whose ``main`` is a worker's program.

    Raises:
        Unavailable: A port is taken, or the workers do not start.
    """
    with gateway_log(settings.log_format, settings.log_verbose):
        _run(settings, arguments, entry_point)


def _run(settings: Settings, arguments: Sequence[str], entry_point: str) -> None:
    watcher = FileWatcher()
    tls = certificate.of_settings(settings, watcher)
    credentials.follow(settings.routes.values(), watcher)
    http = reserve(settings.http_address, settings.http_port, "--http-port")
    grpc = reserve(settings.grpc_address, settings.grpc_port, "--grpc-port")
    # A metrics port that is taken is reported before any worker starts.
    reserve(settings.metrics_address, settings.metrics_port, "--metrics-port").close()
    ports = {"http": http.getsockname()[1], "grpc": grpc.getsockname()[1]}
    sockets = unix_socket.listen_all(settings)
    descriptors = {name: each.socket.fileno() for name, each in sockets.items()}
    ledger = -1 if settings.access is None else QuotaLedger.share(settings.workers)
    workers: list[WorkerProcess] = []
    try:
        for number in range(settings.workers):
            assignment = Assignment(
                number,
                ports["http"],
                ports["grpc"],
                tuple(arguments),
                http_socket=descriptors.get("http_socket", -1),
                grpc_socket=descriptors.get("grpc_socket", -1),
                ledger=ledger,
            )
            workers.append(WorkerProcess(assignment, entry_point))
            workers[-1].spawn()
        supervisor = WorkerSupervisor(settings, workers, ports, watcher, tls, sockets)
        asyncio.run(supervisor.serve())
    finally:
        for worker in workers:
            worker.kill()
        http.close()
        grpc.close()
        for unix in sockets.values():
            unix.close()


class WorkerSupervisor:
    """The parent's event loop: channels to the workers, restarts, metrics and the drain."""

    def __init__(
        self,
        settings: Settings,
        workers: Sequence[WorkerProcess],
        ports: Mapping[str, int],
        watcher: FileWatcher,
        tls: ServerCertificate | None,
        sockets: Mapping[str, UnixSocket],
    ) -> None:
        self._settings = settings
        self._sockets = sockets
        self._watcher, self._certificate = watcher, tls
        self._workers = {worker.number: worker for worker in workers}
        self._ports = ports
        self._spare = workers[0].spare(SPARE)
        self._spare_timer: asyncio.TimerHandle | None = None
        self._coordinator = Coordinator(len(workers), self._scrape)
        self._files = PublishedFiles(watcher)
        self._rollouts = RolloutControl(settings, WorkerMembers(self._coordinator))
        self._access = access_of(settings, watcher)
        #: Each worker's ``started`` message, sent after it loaded.
        self._started: dict[int, Mapping[str, Any]] = {}
        self._listening: set[int] = set()
        #: Reasons that workers gave before they ended, and the gateway's own.
        self._reasons: dict[int, str] = {}
        self._failure = ""
        self._stopping = asyncio.Event()
        #: Set whenever a worker has ended.
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in signals.ending():
            loop.add_signal_handler(number, self._stop_or_end)
        settings = self._settings
        whole = (self._rollouts, self._certificate, self._access)
        api = ForwardedRequests(self._coordinator)
        recent = self._coordinator.recent_requests
        self._metrics = metrics_port.listener(settings, *whole, self._scrape, api, recent)
        if self._access is not None:
            self._access.start()
        await self._metrics.start()
        if self._watcher.is_needed:
            self._in_background(self._watcher.run())
        self._follow_signals()
        await self._rollouts.begin()
        for worker in self._workers.values():
            self._in_background(self._serve_channel(worker))
        self._in_background(self._coordinator.watch())
        if settings.model_control_mode is ModelControlMode.POLL:
            self._in_background(self._coordinator.follow(settings.repository_poll_seconds))
        self._reap()  # workers that ended before the signal handler was installed
        await self._stopping.wait()
        await self._stop()
        for task in self._tasks:
            task.cancel()
        if self._failure:
            raise Unavailable(self._failure)

    def _follow_signals(self) -> None:
        """Have SIGHUP and SIGUSR1 look at files and logs; workers look at theirs by themselves."""
        audit = None if self._access is None else self._access.audit
        has_log = self._settings.access_log is not None
        wakes = [self._watcher.wake] if self._watcher.is_needed or has_log else []
        signals.handle(signal.SIGHUP, wakes)
        signals.handle(signal.SIGUSR1, [audit.reopen] if audit is not None else wakes * has_log)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- metrics ----------------------------------------------------------------------------------

    async def _scrape(self, model: str | None, is_openmetrics: bool) -> metrics_port.Text:
        await self._coordinator.look()
        registry = CollectorRegistry()
        families = self._coordinator.counts.families(model)
        registry.register(FamiliesCollector(lambda: merged_answers.metrics(families)))
        registry.register(FamiliesCollector(lambda: process_families(self._pids())))
        whole = (self._rollouts, self._certificate, self._access)
        metrics_port.register(registry, *whole, self._watcher)
        return metrics_port.text(registry, is_openmetrics)

    def _pids(self) -> list[int]:
        pids = [worker.pid for worker in (self._spare, *self._workers.values())]
        return [os.getpid(), *(pid for pid in pids if pid is not None)]

    # -- messages of workers ---------------------------------------------------------------------

    async def _serve_channel(self, worker: WorkerProcess) -> None:
        """Serve the channel of a process that has been spawned, until it closes."""
        pid = worker.pid
        stream, worker.channel = worker.channel, None
        handlers: dict[str, Any] = {}
        heartbeats, worker.heartbeats = worker.heartbeats, None
        assert heartbeats is not None
        channel = MessageChannel(*await asyncio.open_connection(sock=stream), handlers)
        self._files.begin(channel, worker.number)
        connected = ConnectedWorker(worker.number, channel)
        asyncio.get_running_loop().add_reader(heartbeats, connected.heard, heartbeats)
        handlers.update(self._coordinator.handlers(connected))

        async def hello(_: dict[str, Any]) -> dict[str, Any]:
            self._coordinator.members[connected.number] = connected
            return self._coordinator.snapshot()

        async def join(arguments: dict[str, Any]) -> dict[str, Any]:
            return await self._coordinator.join(connected, arguments["revision"])

        async def listening(_: dict[str, Any]) -> list[dict[str, Any]]:
            before = len(self._listening)
            self._listening.add(connected.number)
            connected.join()
            if before < len(self._listening) == len(self._workers):
                warn_if_exposed(self._settings)
                named = {f"{name}_port": port for name, port in self._ports.items()}
                log.info("listening", **named, metrics_port=self._metrics.port)
            return self._coordinator.routings

        async def started(arguments: dict[str, Any]) -> None:
            await self._on_started(connected.number, arguments)

        async def failed(arguments: dict[str, Any]) -> None:
            self._reasons[connected.number] = arguments["reason"]

        handlers.update({each.__name__: each for each in (hello, join, listening, started, failed)})
        try:
            await channel.serve()
        finally:
            asyncio.get_running_loop().remove_reader(heartbeats)
            heartbeats.close()
        self._files.end(channel)
        self._coordinator.lost(connected)
        # A process without a channel is useless; its successor may have been spawned already.
        if not self._stopping.is_set() and worker.pid == pid:
            worker.kill()

    async def _on_started(self, number: int, report: Mapping[str, Any]) -> None:
        first = not self._all_started
        self._started[number] = report
        last = first and self._all_started  # another may start during ``look``
        await self._coordinator.look()  # its index is reported if it stops answering
        if last:
            await self._coordinator.remember()
            ready = all(worker["ready"] for worker in self._started.values())
            models = max(worker["models"] for worker in self._started.values())
            log.info("started", ready=ready, models=models, workers=len(self._workers))
            self._rollouts.run()
        elif not first:
            log.info("worker restarted", worker=number)
        if self._all_started:
            self._keep_spare()

    @property
    def _all_started(self) -> bool:
        """Whether every worker has started at least once."""
        return len(self._started) == len(self._workers)

    # -- ends -------------------------------------------------------------------------------------

    def _keep_spare(self) -> None:
        """Start a spare if none is running."""
        self._spare_timer = None
        if self._spare.pid is None and not self._stopping.is_set():
            try:
                used = (each["backends"] for each in self._started.values())
                self._spare.spawn(spare=True, backends=sorted({*chain.from_iterable(used)}))
            except OSError as error:
                log.warning("no spare worker can be started", error=plain_reason(error))
                self._keep_spare_later()

    def _keep_spare_later(self) -> None:
        if self._spare_timer is None:
            loop = asyncio.get_running_loop()
            self._spare_timer = loop.call_later(SPARE_SECONDS, self._keep_spare)

    def _reap(self) -> None:
        if self._spare.ended():
            self._keep_spare_later()
        for number, worker in self._workers.items():
            how = worker.ended()
            if how:
                self._ended.set()
                if not self._stopping.is_set():
                    self._replace(worker, how, self._reasons.pop(number, ""))

    def _replace(self, worker: WorkerProcess, how: str, reason: str) -> None:
        number = worker.number
        if not self._all_started and (reason or worker.failures >= START_TRIES):
            self._failure = reason or (
                f"worker {number} ended {worker.failures} times ({how}) before it had started; "
                "its output before this line has the reason"
            )
            self._stopping.set()
            return
        log.error(
            "a worker has ended and is restarted", worker=number, how=how,
            in_seconds=worker.wait_seconds, **({"reason": reason} if reason else {}),
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        loop.call_later(worker.wait_seconds, self._start_again, worker)

    def _start_again(self, worker: WorkerProcess) -> None:
        if self._stopping.is_set():
            return
        try:
            if self._spare.pid is None:
                worker.spawn(restarted=True)
            else:
                worker.adopt(self._spare)
        except OSError as error:
            worker.failures += 1
            self._replace(worker, "not started", plain_reason(error))
            return
        self._in_background(self._serve_channel(worker))

    def _stop_or_end(self) -> None:
        if self._stopping.is_set():
            for worker in (self._spare, *self._workers.values()):
                worker.kill()
            os._exit(1)
        self._stopping.set()

    async def _stop(self) -> None:
        """Drain all workers at the same time, and kill those that do not end."""
        timeout = self._settings.exit_timeout_seconds
        deadline = Deadline.after(timeout + KILL_SECONDS)
        self._coordinator.draining = True
        for unix in self._sockets.values():
            unix.remove()  # the workers accept those who have found it
        await self._rollouts.stop()
        self._spare.kill()
        connected = self._coordinator.members
        for number, worker in self._workers.items():
            if number not in connected:  # it does not serve yet
                worker.kill()
        drained = (worker.channel.request("drain") for worker in connected.values())
        with contextlib.suppress(TimeoutError, ModelportError):
            async with asyncio.timeout(min(DRAIN_REQUEST_SECONDS, timeout)):
                await asyncio.gather(*drained, return_exceptions=True)
        log.info("draining", timeout_seconds=timeout)
        await self._until_all_ended(deadline)
        for worker in self._workers.values():
            if worker.pid is not None:
                log.warning("a worker did not end in time and is killed", worker=worker.number)
                worker.kill()
        await self._until_all_ended(Deadline.after(DRAIN_REQUEST_SECONDS))
        await self._metrics.drain(Deadline.after(0.0))
        log.info("stopped")

    async def _until_all_ended(self, deadline: Deadline) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline.remaining()):
                while any(worker.pid is not None for worker in self._workers.values()):
                    self._ended.clear()
                    await self._ended.wait()
