"""The parent's side of the hub: asks all workers, and makes one answer of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

from modelport.gateway.errors import ModelportError, Unavailable
from modelport.gateway.runtime.watchdog import Beat
from modelport.gateway.server.workers import merge
from modelport.gateway.server.workers.aggregated_metrics import Counts
from modelport.gateway.server.workers.channel import Channel, Gone

log = structlog.get_logger("modelport.workers")

#: An answer is not held up for longer by a worker that hangs.
ANSWER_SECONDS = 2.0
#: A worker that changes its models and says nothing else for so long hangs.
SILENT_SECONDS = 10.0
#: One is replaced whose watchdog says nothing, or whose event loop waits, for so long; ...
HUNG_SECONDS = 7.0
#: ... but where it computes, or loads a model, this long: libraries hold the interpreter meanwhile.
BUSY_SECONDS = 60.0
#: How often every worker is asked what it has counted: so much may be lost with it.
LOOK_SECONDS = 1.0

_Failure = ModelportError | TimeoutError


class Member:
    """A worker that is connected. It is one of those that are asked once it has ``joined``:
    when it listens."""

    def __init__(self, number: int, channel: Channel) -> None:
        self.number = number
        self.channel = channel
        self.joined = False
        #: The last that it said of its models, for when it says nothing any more.
        self.index: list[merge.Row] = []
        #: What its watchdog said last, and when; it need not say anything before it has joined.
        self._beat = Beat(0.0, False)
        self._beat_at = time.monotonic()
        #: When the question was asked that it has not answered in time.
        self.silent_since: float | None = None

    def heard(self, beats: socket.socket) -> None:
        """Its watchdog has said something; the last of it counts."""
        with contextlib.suppress(BlockingIOError):
            while content := beats.recv(64):
                self._beat, self._beat_at = Beat.unpacked(content), time.monotonic()

    def excuse(self) -> None:
        """What was not heard until now is no sign: this process stood still, or it is new."""
        self._beat_at = time.monotonic()

    def hangs(self) -> str:
        """Why it is of no use any more; empty: it is."""
        limit = BUSY_SECONDS if self._beat.computing else HUNG_SECONDS
        if time.monotonic() - self._beat_at > limit:
            return "it does not run"
        return "its event loop is blocked" if self._beat.blocked_seconds > limit else ""

    @property
    def silent_seconds(self) -> float | None:
        """How long it has owed an answer for; None where it owes none that is late."""
        since = self.silent_since
        if since is not None and self.channel.heard_at > since:
            self.silent_since = since = None
        return None if since is None else time.monotonic() - since


class Hub:
    """Called from the parent's event loop alone."""

    def __init__(self, workers: int, scrape: Callable[[], Awaitable[tuple[str, bytes]]]) -> None:
        self._workers = workers
        self._scrape = scrape
        self.members: dict[int, Member] = {}
        self.counts = Counts()
        self.draining = False
        # One change at a time, in every worker.
        self._changing = asyncio.Lock()
        #: How often the workers' state was changed, and what it is since.
        self.revision = 0
        self.states: dict[str, Any] | None = None

    def handlers(self, member: Member) -> Mapping[str, Any]:
        """What a worker may ask."""

        async def broadcast(arguments: dict[str, Any]) -> Any:
            return await self._broadcast(member, **arguments)

        return {
            "ready": self._ready,
            "require_ready": self._require_ready,
            "index": self._index,
            "statistics": self._statistics,
            "pending": self._pending,
            "metrics": self._metrics,
            "broadcast": broadcast,
        }

    def joined(self) -> list[Member]:
        return [member for _, member in sorted(self.members.items()) if member.joined]

    def lost(self, member: Member) -> None:
        """Its process is gone, or it does not talk any more."""
        if self.members.get(member.number) is member:
            del self.members[member.number]
            self.counts.lost(member.number)

    # -- asking all -------------------------------------------------------------------------------

    async def _ask(self, method: str, **arguments: Any) -> list[tuple[Member, Any]]:
        """What every worker answers, or the error; one that is gone meanwhile is left out."""

        async def ask(member: Member) -> Any:
            if member.silent_seconds is not None:
                return TimeoutError()
            asked = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await member.channel.request(method, **arguments)
            except TimeoutError as error:
                member.silent_since = asked
                log.warning("a worker does not answer", worker=member.number)
                return error
            except ModelportError as error:
                return error

        members = self.joined()
        answers = await asyncio.gather(*(ask(member) for member in members))
        pairs = zip(members, answers, strict=True)
        return [(member, answer) for member, answer in pairs if not isinstance(answer, Gone)]

    async def _ready(self, _: dict[str, Any]) -> bool:
        if self.draining:
            return False
        answers = await self._ask("ready")
        return len(answers) == self._workers and all(answer is True for _, answer in answers)

    async def _require_ready(self, arguments: dict[str, Any]) -> None:
        for member, answer in await self._ask("require_ready", **arguments):
            if isinstance(answer, TimeoutError):
                raise Unavailable(f"worker {member.number} does not answer")
            if isinstance(answer, ModelportError):
                raise answer

    async def _index(self, _: dict[str, Any]) -> list[merge.Row]:
        rows = []
        for member, answer in await self._ask("index"):
            if isinstance(answer, _Failure):
                reason = f"worker {member.number} does not answer"
                rows.append(merge.silent(member.index, reason))
            else:
                rows.append(answer)
        return merge.index(rows)

    async def _statistics(self, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        await self.look()
        name, number = arguments["name"], str(arguments["number"])
        return [
            entry
            for entry in self.counts.documents()
            if name in ("", entry["name"]) and number in ("0", entry["version"])
        ]

    async def _pending(self, arguments: dict[str, Any]) -> int:
        answers = await self._ask("pending", **arguments)
        return sum(answer for _, answer in answers if isinstance(answer, int))

    async def _metrics(self, _: dict[str, Any]) -> tuple[str, str]:
        content_type, text = await self._scrape()
        return content_type, text.decode()

    async def look(self) -> None:
        """Have every worker tell what it has counted."""
        answers = await self._ask("telemetry")
        for member, answer in answers:
            if not isinstance(answer, _Failure) and self.members.get(member.number) is member:
                self.counts.heard(member.number, answer)
                member.index = answer["index"]
        if len(answers) == self._workers:
            self.counts.forget()

    # -- changing all -----------------------------------------------------------------------------

    async def _broadcast(self, asker: Member, name: str, arguments: dict[str, Any]) -> Any:
        """Run an operation in every worker; what it returned in the one that asks."""

        async def run(member: Member) -> Any:
            try:
                return await self._until_hung(member, "run", name=name, arguments=arguments)
            except ModelportError as error:
                return error

        async with self._changing:
            members = self.joined()
            answers = await asyncio.gather(*(run(member) for member in members))
            self.revision += 1
            await self.remember()
        pairs = dict(zip(members, answers, strict=True))
        failed = {m: e for m, e in pairs.items() if isinstance(e, ModelportError)}
        alive = {m: e for m, e in failed.items() if not isinstance(e, Gone)}
        if len(alive) == len(pairs) and len({str(e) for e in alive.values()}) == 1:
            raise next(iter(alive.values()))
        for member, error in alive.items():
            raise type(error)(f"{error} (in worker {member.number} of {len(members)} workers)")
        answer = pairs[asker]
        if isinstance(answer, Gone):
            raise answer
        return answer

    async def remember(self) -> None:
        """Keep what the workers were asked for, for one that takes another's place."""
        for member in self.joined():
            try:
                self.states = await self._until_hung(member, "states")
                return
            except ModelportError:
                continue

    async def _until_hung(self, member: Member, method: str, **arguments: Any) -> Any:
        """As ``Channel.request``: it may take long, but the worker must be heard of.

        Raises:
            Unavailable: it is not.
        """
        asked = asyncio.ensure_future(member.channel.request(method, **arguments))
        since = time.monotonic()
        while True:
            done, _ = await asyncio.wait({asked}, timeout=LOOK_SECONDS)
            if done:
                return asked.result()
            if time.monotonic() - max(since, member.channel.heard_at) > SILENT_SECONDS:
                asked.cancel()
                raise Unavailable(f"worker {member.number} does not answer")

    async def join(self, member: Member, revision: int) -> dict[str, Any]:
        """A worker that has loaded what stood at ``revision`` becomes one of all, if it still does.

        Else what stands now comes back, to be restored first.
        """
        async with self._changing:
            if revision != self.revision:
                return {"joined": False, **self.standing()}
            member.joined = True
            member.excuse()
            return {"joined": True}

    def standing(self) -> dict[str, Any]:
        return {"revision": self.revision, "states": self.states}

    async def watch(self) -> None:
        """Ask around, for ever."""
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)
            late = time.monotonic() - slept_at > 2 * LOOK_SECONDS
            await self.look()
            for member in self.joined():
                if late:
                    member.excuse()
                elif reason := member.hangs():
                    log.error("a worker hangs and is killed", worker=member.number, reason=reason)
                    member.channel.close()  # whoever says nothing any more is killed

    async def follow(self, seconds: float) -> None:
        """Have all workers look at the repository at the same time, for ever."""
        while True:
            await asyncio.sleep(seconds)
            await self._ask("follow")
