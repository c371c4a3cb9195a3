"""The parent's coordinator: it asks every worker and merges their answers into one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

from modelport.gateway.errors import ModelportError, Unavailable
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.server.workers import merged_answers
from modelport.gateway.server.workers.aggregated_metrics import AggregatedMetrics
from modelport.gateway.server.workers.channel import ChannelClosed, MessageChannel
from modelport.gateway.server.workers.hang_detection import SILENT_SECONDS, HangDetector
from modelport.gateway.telemetry import access_log

log = structlog.get_logger("modelport.workers")

#: Longest wait for one worker's answer; a worker that hangs delays the others no longer.
ANSWER_SECONDS = 2.0
#: Interval at which workers report their counts; a worker that ends loses at most that much.
LOOK_SECONDS = 1.0

_FAILURES = (ModelportError, TimeoutError)


class ConnectedWorker(HangDetector):
    """A worker with an open channel. It is asked once it has ``joined``, which it does when it
    listens."""

    def __init__(self, number: int, channel: MessageChannel) -> None:
        super().__init__()
        self.number = number
        self.channel = channel
        self.joined = False
        #: Its last repository index, reported while it does not respond.
        self.index: list[merged_answers.Row] = []
        #: When the request was sent that it has not answered in time.
        self.silent_since: float | None = None

    def join(self) -> None:
        """Ask it from now on. Its start may have taken longer than a silence may last."""
        self.joined = True
        self.excuse()

    @property
    def silent_seconds(self) -> float | None:
        """Seconds since it failed to answer in time; None if no answer is overdue."""
        since = self.silent_since
        if since is not None and self.channel.heard_at > since:
            self.silent_since = since = None
        return None if since is None else time.monotonic() - since


class PublishedFiles:
    """The files in use by the parent, and the channels of the workers that follow them.

    They go over the channel alone, because they have private keys and tokens.
    """

    def __init__(self, watcher: FileWatcher) -> None:
        self._watcher = watcher
        self._channels: set[MessageChannel] = set()
        watcher.publish = self._publish

    def begin(self, channel: MessageChannel, number: int) -> None:
        """Send a worker that starts its number and the files, first of all, then all changes."""
        channel.send([number, self._watcher.rows()])
        self._channels.add(channel)

    def end(self, channel: MessageChannel) -> None:
        """Forget a worker whose channel has closed."""
        self._channels.discard(channel)

    async def _publish(self) -> None:
        """Have all workers use the files, and wait until they do, but not for one that hangs."""
        rows = self._watcher.rows()

        async def notify(channel: MessageChannel) -> None:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await channel.request("use_files", rows=rows)
            except _FAILURES:
                pass  # it reads the message before it serves the next request, or it has ended

        await asyncio.gather(*map(notify, self._channels))


class Coordinator:
    """Connected workers and what they have in common; only the parent's event loop uses it."""

    def __init__(
        self, workers: int, scrape: Callable[[str | None, bool], Awaitable[tuple[str, bytes]]]
    ) -> None:
        self._workers = workers
        self._scrape = scrape
        self.members: dict[int, ConnectedWorker] = {}
        self.counts = AggregatedMetrics()
        self.draining = False
        # All workers apply one change at a time.
        self._changing = asyncio.Lock()
        #: The number of changes so far, and the state after the last one.
        self.revision = 0
        self.states: dict[str, Any] | None = None
        #: The routings of rollouts.
        self.routings: list[dict[str, Any]] = []

    def handlers(self, worker: ConnectedWorker) -> Mapping[str, Any]:
        """Handlers of the requests that a worker may send."""

        async def broadcast(arguments: dict[str, Any]) -> Any:
            return await self._broadcast(worker, **arguments)

        return {
            "ready": self._ready,
            "require_ready": self._require_ready,
            "index": self._index,
            "statistics": self._statistics,
            "pending": self._pending,
            "metrics": self._metrics,
            "broadcast": broadcast,
        }

    def joined(self) -> list[ConnectedWorker]:
        return [worker for _, worker in sorted(self.members.items()) if worker.joined]

    def lost(self, worker: ConnectedWorker) -> None:
        """Forget a worker whose channel has closed."""
        if self.members.get(worker.number) is worker:
            del self.members[worker.number]
            self.counts.lost(worker.number)

    # -- asking all -------------------------------------------------------------------------------

    async def ask(self, method: str, **arguments: Any) -> list[tuple[ConnectedWorker, Any]]:
        """Return each worker's answer or error, without those that ended meanwhile."""

        async def ask(worker: ConnectedWorker) -> Any:
            if worker.silent_seconds is not None:
                return TimeoutError()
            asked = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await worker.channel.request(method, **arguments)
            except TimeoutError as error:
                worker.silent_since = asked
                log.warning("a worker does not respond", worker=worker.number)
                return error
            except ModelportError as error:
                return error

        members = self.joined()
        answers = await asyncio.gather(*(ask(worker) for worker in members))
        pairs = zip(members, answers, strict=True)
        return [
            (worker, answer) for worker, answer in pairs if not isinstance(answer, ChannelClosed)
        ]

    async def ask_patiently(
        self, method: str, **arguments: Any
    ) -> list[tuple[ConnectedWorker, Any]]:
        """Return each worker's answer or error; wait as long as it sends other messages."""

        async def ask(worker: ConnectedWorker) -> Any:
            try:
                return await self.until_hung(worker, method, **arguments)
            except ModelportError as error:
                return error

        members = self.joined()
        answers = await asyncio.gather(*map(ask, members))
        return list(zip(members, answers, strict=True))

    async def _ready(self, _: dict[str, Any]) -> bool:
        if self.draining:
            return False
        answers = await self.ask("ready")
        return len(answers) == self._workers and all(answer is True for _, answer in answers)

    async def _require_ready(self, arguments: dict[str, Any]) -> None:
        for worker, answer in await self.ask("require_ready", **arguments):
            if isinstance(answer, TimeoutError):
                raise Unavailable(f"worker {worker.number} does not respond")
            if isinstance(answer, ModelportError):
                raise answer

    async def _index(self, _: dict[str, Any]) -> list[merged_answers.Row]:
        rows = []
        for worker, answer in await self.ask("index"):
            if isinstance(answer, _FAILURES):
                reason = f"worker {worker.number} does not respond"
                rows.append(merged_answers.silent(worker.index, reason))
            else:
                rows.append(answer)
        return merged_answers.index(rows)

    async def _statistics(self, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        await self.look()
        name, number = arguments["name"], str(arguments["number"])
        return [
            entry
            for entry in self.counts.documents()
            if name in ("", entry["name"]) and number in ("0", entry["version"])
        ]

    async def _pending(self, arguments: dict[str, Any]) -> int:
        answers = await self.ask("pending", **arguments)
        return sum(answer for _, answer in answers if isinstance(answer, int))

    async def _metrics(self, arguments: dict[str, Any]) -> tuple[str, str]:
        content_type, text = await self._scrape(arguments["model"], arguments["openmetrics"])
        return content_type, text.decode()

    async def recent_requests(self) -> access_log.RecentRequests | None:
        """The latest requests of all workers; None: there is no access log."""
        answers = [answer for _, answer in await self.ask("recent_requests")]
        kept = [each for each in answers if isinstance(each, dict)]
        return access_log.merged(kept) if kept else None

    async def look(self) -> None:
        """Collect the counts of every worker."""
        answers = await self.ask("telemetry")
        for worker, answer in answers:
            if not isinstance(answer, _FAILURES) and self.members.get(worker.number) is worker:
                self.counts.heard(worker.number, answer)
                worker.index = answer["index"]
        if len(answers) == self._workers:
            self.counts.forget()

    # -- changing all -----------------------------------------------------------------------------

    async def _broadcast(self, asker: ConnectedWorker, name: str, arguments: dict[str, Any]) -> Any:
        """Run an operation in every worker, and return the result of the one that asked."""
        async with self._changing:
            pairs = dict(await self.ask_patiently("run", name=name, arguments=arguments))
            self.revision += 1
            await self.remember()
        failed = {m: e for m, e in pairs.items() if isinstance(e, ModelportError)}
        alive = {m: e for m, e in failed.items() if not isinstance(e, ChannelClosed)}
        if len(alive) == len(pairs) and len({str(e) for e in alive.values()}) == 1:
            raise next(iter(alive.values()))
        for worker, error in alive.items():
            raise type(error)(f"{error} (in worker {worker.number} of {len(pairs)} workers)")
        answer = pairs[asker]
        if isinstance(answer, ChannelClosed):
            raise answer
        return answer

    async def remember(self) -> None:
        """Keep the state of one worker, for the next one that is started again."""
        for worker in self.joined():
            try:
                self.states = await self.until_hung(worker, "states")
                return
            except ModelportError:
                continue

    async def until_hung(self, worker: ConnectedWorker, method: str, **arguments: Any) -> Any:
        """Send a request that may take long, as long as the worker sends other messages.

        Raises:
            Unavailable: The worker is silent.
        """
        asked = asyncio.ensure_future(worker.channel.request(method, **arguments))
        since = time.monotonic()
        try:
            while True:
                done, _ = await asyncio.wait({asked}, timeout=LOOK_SECONDS)
                if done:
                    return asked.result()
                if time.monotonic() - max(since, worker.channel.heard_at) > SILENT_SECONDS:
                    raise Unavailable(f"worker {worker.number} does not respond")
        finally:
            asked.cancel()

    async def join(self, worker: ConnectedWorker, revision: int) -> dict[str, Any]:
        """Admit a worker that has restored the state of ``revision``.

        If the state has changed since, return the current one, to be restored first.
        """
        async with self._changing:
            if revision != self.revision:
                return {"joined": False, **self.snapshot()}
            worker.join()
            return {"joined": True}

    def snapshot(self) -> dict[str, Any]:
        return {"revision": self.revision, "states": self.states, "routings": self.routings}

    def route(self, routings: list[dict[str, Any]]) -> None:
        """Have workers that join from now on begin with these routings of rollouts."""
        self.routings = routings
        self.revision += 1

    async def watch(self) -> None:
        """Collect counts and kill workers that hang, until cancelled."""
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)
            late = time.monotonic() - slept_at > 2 * LOOK_SECONDS
            await self.look()
            for worker in self.joined():
                if late:
                    worker.excuse()
                elif reason := worker.hang_reason():
                    log.error("a worker hangs and is killed", worker=worker.number, reason=reason)
                    worker.channel.close()  # the supervisor kills a process whose channel is closed

    async def follow(self, seconds: float) -> None:
        """Have all workers scan the repository at the same time, until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            await self.ask("follow")
