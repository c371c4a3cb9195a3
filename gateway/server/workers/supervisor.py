"""The parent at work: which workers have started, which have ended, and the end of all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from modelport.gateway.errors import ModelportError, Unavailable
from modelport.gateway.runtime import signals, startup
from modelport.gateway.server.admin import metrics
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.workers.aggregated_metrics import ProcessesCollector
from modelport.gateway.server.workers.channel import Channel
from modelport.gateway.server.workers.coordinator import Hub, Member
from modelport.gateway.server.workers.merge import Told
from modelport.gateway.server.workers.process import WorkerProcess
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.telemetry import configure_logging
from modelport.gateway.types import Deadline

log = structlog.get_logger("modelport.workers")

#: A worker that ends so often before all have started for the first time is not tried again.
START_TRIES = 3
#: How long the workers have to hear that the end has come.
TOLD_SECONDS = 1.0
#: The place of every worker that ends is taken by a spare, which has all its imports done.
SPARE = -1
#: A spare that ended is not started again at once.
SPARE_SECONDS = 10.0
#: How long after the exit timeout a worker is killed.
KILL_SECONDS = 0.5


def run(settings: Settings, workers: Sequence[WorkerProcess], ports: Mapping[str, int]) -> None:
    """Watch over ``workers``, which have been started, until SIGTERM or SIGINT.

    Raises:
        Unavailable: they do not start.
    """
    configure_logging(settings.log_format, settings.log_verbose)
    startup.settle()
    asyncio.run(Supervisor(settings, workers, ports).serve())


class Supervisor:
    def __init__(
        self, settings: Settings, workers: Sequence[WorkerProcess], ports: Mapping[str, int]
    ) -> None:
        self._settings = settings
        self._workers = {worker.number: worker for worker in workers}
        self._ports = ports
        self._spare = workers[0].spare(SPARE)
        self._spare_timer: asyncio.TimerHandle | None = None
        self._hub = Hub(len(workers), self._scrape)
        self._told = Told()
        #: What each worker said when it had loaded.
        self._started: dict[int, Mapping[str, Any]] = {}
        self._listening: set[int] = set()
        #: Why a worker has said that it ends, and why the gateway does.
        self._reasons: dict[int, str] = {}
        self._failure = ""
        self._stopping = asyncio.Event()
        #: Set whenever a worker has ended.
        self._ended = asyncio.Event()
        self._restarts: dict[int, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in signals.ending():
            loop.add_signal_handler(number, self._stop_or_end)
        settings = self._settings
        self._metrics = HttpListener(
            metrics.application(self._scrape),
            settings.metrics_address,
            settings.metrics_port,
            "--metrics-port",
            most=metrics.CONNECTIONS,
        )
        await self._metrics.start()
        for worker in self._workers.values():
            self._in_background(self._talk(worker))
        self._in_background(self._hub.watch())
        if settings.model_control_mode is ModelControlMode.POLL:
            self._in_background(self._hub.follow(settings.repository_poll_seconds))
        self._reap()  # those that ended before anybody looked
        await self._stopping.wait()
        await self._stop()
        for task in self._tasks:
            task.cancel()
        if self._failure:
            raise Unavailable(self._failure)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- metrics ----------------------------------------------------------------------------------

    async def _scrape(self) -> metrics.Text:
        await self._hub.look()
        self._told.families = self._hub.counts.families()
        return metrics.text(self._registry)

    @property
    def _registry(self) -> CollectorRegistry:
        registry = CollectorRegistry()
        registry.register(self._told)
        registry.register(ProcessesCollector(self._pids, _ended_cpu_seconds))
        return registry

    def _pids(self) -> list[int]:
        pids = [worker.pid for worker in (self._spare, *self._workers.values())]
        return [os.getpid(), *(pid for pid in pids if pid is not None)]

    # -- what workers say -------------------------------------------------------------------------

    async def _talk(self, worker: WorkerProcess) -> None:
        """With one process that has been spawned, until it says nothing any more."""
        pid = worker.pid
        hub, worker.hub = worker.hub, None
        handlers: dict[str, Any] = {}
        beats, worker.beats = worker.beats, None
        assert beats is not None
        channel = Channel(*await asyncio.open_connection(sock=hub), handlers)
        member = Member(worker.number, channel)
        asyncio.get_running_loop().add_reader(beats, member.heard, beats)
        handlers.update(self._hub.handlers(member))

        async def hello(_: dict[str, Any]) -> dict[str, Any]:
            self._hub.members[member.number] = member
            return self._hub.standing()

        async def join(arguments: dict[str, Any]) -> dict[str, Any]:
            return await self._hub.join(member, arguments["revision"])

        async def listening(_: dict[str, Any]) -> None:
            self._on_listening(member)

        async def started(arguments: dict[str, Any]) -> None:
            await self._on_started(member.number, arguments)

        async def failed(arguments: dict[str, Any]) -> None:
            self._reasons[member.number] = arguments["reason"]

        handlers.update({each.__name__: each for each in (hello, join, listening, started, failed)})
        try:
            await channel.serve()
        finally:
            asyncio.get_running_loop().remove_reader(beats)
            beats.close()
        self._hub.lost(member)
        # Whoever says nothing any more is of no use; the next one may be there already.
        if not self._stopping.is_set() and worker.pid == pid:
            worker.kill()

    def _on_listening(self, member: Member) -> None:
        before = len(self._listening)
        self._listening.add(member.number)
        member.joined = True
        if before < len(self._listening) == len(self._workers):
            named = {f"{name}_port": port for name, port in self._ports.items()}
            log.info("listening", **named, metrics_port=self._metrics.port)

    async def _on_started(self, number: int, said: Mapping[str, Any]) -> None:
        first = not self._all_started
        self._started[number] = said
        last = first and self._all_started  # the next one may come during the look
        await self._hub.look()  # what is known of it, should it never be heard of again
        if last:
            await self._hub.remember()
            ready = all(worker["ready"] for worker in self._started.values())
            models = max(worker["models"] for worker in self._started.values())
            log.info("started", ready=ready, models=models, workers=len(self._workers))
        elif not first:
            log.info("worker started again", worker=number)
        if self._all_started:
            self._keep_spare()

    @property
    def _all_started(self) -> bool:
        """Once, at least: a worker that ended since and is starting again has started."""
        return len(self._started) == len(self._workers)

    # -- ends -------------------------------------------------------------------------------------

    def _keep_spare(self) -> None:
        """Start a spare, if there is none."""
        self._spare_timer = None
        if self._spare.pid is None and not self._stopping.is_set():
            try:
                self._spare.spawn(spare=True)
            except OSError as error:
                log.warning("no spare worker can be started", error=str(error))
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
                "what it wrote before this line has the reason"
            )
            self._stopping.set()
            return
        log.error(
            "a worker has ended and is started again", worker=number, how=how,
            in_seconds=worker.wait_seconds, **({"reason": reason} if reason else {}),
        )  # fmt: skip
        self._restarts[number] = asyncio.get_running_loop().call_later(
            worker.wait_seconds, self._start_again, worker
        )

    def _start_again(self, worker: WorkerProcess) -> None:
        try:
            if self._spare.pid is None:
                worker.spawn(restarted=True)
            else:
                worker.adopt(self._spare)
        except OSError as error:
            worker.failures += 1
            self._replace(worker, "not started", str(error))
            return
        self._in_background(self._talk(worker))

    def _stop_or_end(self) -> None:
        if self._stopping.is_set():
            for worker in (self._spare, *self._workers.values()):
                worker.kill()
            os._exit(1)
        self._stopping.set()

    async def _stop(self) -> None:
        """Every worker drains at the same time; who does not end is killed."""
        timeout = self._settings.exit_timeout_seconds
        deadline = Deadline.after(timeout + KILL_SECONDS)
        self._hub.draining = True
        self._spare.kill()
        if self._spare_timer is not None:
            self._spare_timer.cancel()
        for restart in self._restarts.values():
            restart.cancel()
        connected = self._hub.members
        for number, worker in self._workers.items():
            if number not in connected:  # it serves nobody
                worker.kill()
        told = (member.channel.request("drain") for member in connected.values())
        with contextlib.suppress(TimeoutError, ModelportError):
            async with asyncio.timeout(min(TOLD_SECONDS, timeout)):
                await asyncio.gather(*told, return_exceptions=True)
        log.info("draining", timeout_seconds=timeout)
        await self._until_all_ended(deadline)
        for worker in self._workers.values():
            if worker.pid is not None:
                log.warning("a worker did not end in time and is killed", worker=worker.number)
                worker.kill()
        await self._until_all_ended(Deadline.after(TOLD_SECONDS))
        await self._metrics.drain(Deadline.after(0.0))
        log.info("stopped")

    async def _until_all_ended(self, deadline: Deadline) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline.remaining()):
                while any(worker.pid is not None for worker in self._workers.values()):
                    self._ended.clear()
                    await self._ended.wait()


def _ended_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
