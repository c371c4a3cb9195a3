"""Supervision of a managed server: start, watch, restart and end its process.

The process is a ``guardian`` with the server below it, so that the server never outlives the
gateway. A ``ServerLaunch`` describes the server (its command, when it is ready). The policy:

    the first start fails         the caller may retry
    the server ends               restart it after a delay that doubles up to a maximum
    the server hangs              after ``UNANSWERED_PROBES`` in a row kill it and restart it
    the server stays up           after ``SETTLED_SECONDS`` the delay is reset
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from modelport.gateway.backends.managed import guardian
from modelport.gateway.backends.managed.output import ServerOutput
from modelport.gateway.errors import ModelportError, Unavailable

log = structlog.get_logger("modelport.supervisor")

T = TypeVar("T")

#: The first and the longest delay before a restart.
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.25, 30.0
SETTLED_SECONDS = 30.0
READY_POLL_SECONDS = 0.05
PROBE_SECONDS, PROBE_TIMEOUT_SECONDS = 5.0, 5.0
UNANSWERED_PROBES = 3
#: From SIGTERM to SIGKILL; then the time the guardian may take to reap killed processes.
GRACE_SECONDS, CLEANUP_SECONDS = 5.0, 5.0


@dataclass(frozen=True, slots=True)
class ServerLaunch:
    """One start of a server.

    Attributes:
        command: the program and its arguments.
        environment: all of its variables.
        folder: its working folder; private to the server, removed when the gateway has gone.
        shared_memory: the prefix of its regions' names; empty: it has none.
        ready: whether it serves; raises ``OSError`` while it does not respond.
        alive: returns if it responds at all; raises ``OSError`` if not.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    shared_memory: str
    ready: Callable[[], Awaitable[bool]]
    alive: Callable[[], Awaitable[object]]


class ServerSupervisor:
    """Keeps a server running, on the event loop.

    Args:
        title: the server's, as in "TorchServe".
        model: name and version, for messages and the log.
        prepare: makes the next ``ServerLaunch``; blocking, in a thread.
        connected: called with each launch that is ready; blocking, in a thread.
        disconnected: frees what ``connected`` made, if anything; blocking, in a thread.
    """

    def __init__(
        self,
        title: str,
        model: tuple[str, int],
        start_timeout_seconds: float,
        prepare: Callable[[], ServerLaunch],
        connected: Callable[[ServerLaunch], None],
        disconnected: Callable[[], None],
    ) -> None:
        self._title, (self._model, version) = title, model
        self._start_timeout_seconds = start_timeout_seconds
        self._prepare = prepare
        self._connected, self._disconnected = connected, disconnected
        self._log = log.bind(server=title, model=self._model, version=version)
        # Its own thread, because all threads of the loop may be waiting for servers to start.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="managed")
        self._task: asyncio.Task[None] | None = None
        #: The running server, if any.
        self._process: ServerProcess | None = None
        #: Why the server cannot answer now; empty while it can. Only the event loop changes it.
        self.problem = "it is being started"
        #: The scopes of requests that wait for a response; they end when the server does.
        self._waiting: set[asyncio.Timeout] = set()

    async def start(self) -> None:
        """Start the server and keep it running; return when it is ready.

        Raises:
            Unavailable: the server did not start; the reason is its last message. Nothing of it is
                left.
        """
        try:
            self._process = await self._start()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """End the server in any state; return when nothing of it is left."""
        self._down("it is being unloaded")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._end()
        self._thread.shutdown(wait=False)

    async def _keep(self) -> None:
        backoff = BACKOFF_SECONDS
        while self._process is not None:
            started = time.monotonic()
            ended = await self._watch(self._process)
            self._down(f"the server of '{self._model}' {ended}; it is being restarted")
            self._log.error("a managed server is down", reason=ended)
            await self._end()
            if time.monotonic() - started >= SETTLED_SECONDS:
                backoff = BACKOFF_SECONDS
            while self._process is None:
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
                try:
                    self._process = await self._start()
                except ModelportError as error:
                    self.problem = f"{error}; it is being restarted"
                    self._log.error("a managed server did not start", reason=str(error))
                except Exception:
                    self._log.exception("a managed server did not start")

    async def _end(self) -> None:
        """End the server, if it runs, and disconnect from it."""
        if self._process is not None:
            await _finish(self._process.end())
            self._process = None
        await _finish(self._in_thread(self._disconnected))

    def _down(self, problem: str) -> None:
        self.problem = problem
        waiting, self._waiting = self._waiting, set()
        for scope in waiting:
            scope.reschedule(asyncio.get_running_loop().time())

    async def while_up(self, answer: Awaitable[T]) -> T:
        """Await ``answer``; raise ``Unavailable`` as soon as the server is down."""
        try:
            async with asyncio.timeout(None) as scope:
                self._waiting.add(scope)
                return await answer
        except TimeoutError:
            if scope.expired():
                raise Unavailable(self.problem) from None
            raise
        finally:
            self._waiting.discard(scope)

    # -- one process ----------------------------------------------------------------------------

    async def _start(self) -> ServerProcess:
        """Start a server, wait until it is ready, and connect."""
        launch = await self._in_thread(self._prepare)
        process = await self._spawn(launch)
        try:
            async with asyncio.timeout(self._start_timeout_seconds):
                await self._until_ready(launch, process)
                await _finish(self._in_thread(lambda: self._connected(launch)))
        except BaseException as error:
            await _finish(process.end())
            await _finish(self._in_thread(self._disconnected))
            if isinstance(error, TimeoutError):
                seconds = f"{self._start_timeout_seconds:g} s"
                raise self._failed(process, f"is not ready after {seconds}") from None
            raise
        self.problem = ""
        self._log.info("a managed server is ready", pid=process.pid)
        return process

    async def _spawn(self, launch: ServerLaunch) -> ServerProcess:
        command = (sys.executable, "-I", "-S", guardian.__file__, str(GRACE_SECONDS))
        spawning = asyncio.create_subprocess_exec(
            *(*command, launch.shared_memory, str(launch.folder), *launch.command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(launch.environment),
            cwd=launch.folder,
            start_new_session=True,
        )
        try:
            child, cancelled = await _done(spawning)
        except OSError as error:
            raise Unavailable(
                f"the server of '{self._model}' cannot be started: {error.strerror}"
            ) from error
        process = ServerProcess(launch, child, ServerOutput(self._title, self._log))
        if cancelled:
            await _finish(process.end())
            raise asyncio.CancelledError
        return process

    async def _until_ready(self, launch: ServerLaunch, process: ServerProcess) -> None:
        while not process.ended.done():
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                    if await launch.ready():
                        return
            await asyncio.wait({process.ended}, timeout=READY_POLL_SECONDS)
        await process.read()
        raise self._failed(process, _ended(process.ended.result()))

    def _failed(self, process: ServerProcess, what: str) -> Unavailable:
        reason = process.output.reason()
        output = f"; {self._title} said: {reason}" if reason else ""
        return Unavailable(f"the server of '{self._model}' {what}{output}")

    async def _watch(self, process: ServerProcess) -> str:
        """Wait until the server ends or hangs; describe how."""
        unanswered = 0
        while unanswered < UNANSWERED_PROBES:
            done, _ = await asyncio.wait({process.ended}, timeout=PROBE_SECONDS)
            if done:
                return _ended(process.ended.result())
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                    await process.launch.alive()
                unanswered = 0
            except (OSError, TimeoutError):
                unanswered += 1
                self._log.warning("a managed server does not respond", times=unanswered)
        process.send(signal.SIGINT)  # it would not respond to SIGTERM either
        return "does not respond"

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class ServerProcess:
    """A running guardian with a server below it."""

    def __init__(
        self, launch: ServerLaunch, child: asyncio.subprocess.Process, output: ServerOutput
    ) -> None:
        self.launch, self.output, self.pid = launch, output, child.pid
        self._child = child
        self.ended = asyncio.ensure_future(child.wait())
        assert child.stdout is not None
        self._reading = asyncio.ensure_future(output.read(child.stdout))

    def send(self, number: signal.Signals) -> None:
        """SIGTERM: end gracefully. SIGINT: at once. SIGKILL: the guardian's process group."""
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self.pid, number)
            elif not self.ended.done():
                self._child.send_signal(number)

    async def end(self) -> None:
        """End the server; return when nothing of it is left."""
        self.send(signal.SIGTERM)
        await asyncio.wait({self.ended}, timeout=GRACE_SECONDS + CLEANUP_SECONDS)
        self.send(signal.SIGKILL)
        await self.ended
        await self.read()
        if self._child.stdin is not None:
            self._child.stdin.close()
        if self.launch.shared_memory:  # again, because the guardian may have been killed
            for region in guardian.SHARED_MEMORY.glob(f"{self.launch.shared_memory}*"):
                region.unlink(missing_ok=True)

    async def read(self) -> None:
        """Read the rest of the output; an escaped process would keep it open."""
        await asyncio.wait({self._reading}, timeout=1.0)
        self._reading.cancel()


def _ended(status: int) -> str:
    if status == 0:  # TorchServe's script exits with 0 whatever ended its server
        return "ended"
    return f"ended (signal {-status})" if status < 0 else f"ended (exit status {status})"


async def _done(work: Awaitable[T]) -> tuple[T, bool]:
    """The result of ``work``, which runs to its end, and whether the caller was cancelled."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    return task.result(), cancelled


async def _finish(work: Awaitable[None]) -> None:
    """Run ``work`` to its end; then raise a cancellation that came meanwhile."""
    if (await _done(work))[1]:
        raise asyncio.CancelledError
