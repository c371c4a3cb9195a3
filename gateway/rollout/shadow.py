"""Copies of requests for the other side of a rollout, whose answers are compared and thrown away.

A copy never harms the requests of clients. It waits for a moment in which none is in progress, one
copy runs at a time, and it has its own deadline. It takes no part in batching, caching, admission
and statistics. A copy that finds no place or no moment is dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import structlog

from modelport.gateway.errors import MemoryExhausted, ModelportError, QueueFull
from modelport.gateway.rollout import request_routing
from modelport.gateway.rollout.plan import RolloutSide
from modelport.gateway.rollout.sides import StageTraffic, addressed
from modelport.gateway.types import (
    Deadline,
    Infer,
    InferRequest,
    InferResponse,
    Tensor,
)

log = structlog.get_logger("modelport.rollout")

#: Most copies that wait, and their tensors.
MAX_COPIES = 16
MAX_BYTES = 64 * 1024 * 1024
#: Longest wait of a copy, and longest wait for a moment without requests of clients.
MAX_WAIT_SECONDS = 5.0
PATIENCE_SECONDS = 1.0
#: A copy's deadline: some time, and a multiple of the time that the client's answer took.
DEADLINE_SECONDS, DEADLINE_FACTOR = 10.0, 5.0


@dataclass(slots=True)
class ShadowCopy:
    """A request of a client, and the outputs that the client got after ``seconds``.

    ``side`` answers the copy: the candidate, or the baseline in place of a candidate's answer.
    """

    request: InferRequest
    answer: Sequence[Tensor]
    seconds: float
    side: RolloutSide
    stage: StageTraffic
    queued_at: float = 0.0
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.size_bytes = sum(each.size_bytes for each in (*self.request.inputs, *self.answer))


class CopyOutcome(Enum):
    """The ways in which a copy ends without an answer."""

    FAILED = "failed"
    DROPPED = "dropped"


class ShadowListener(Protocol):
    """Gets the outcome of every copy that a queue has accepted."""

    async def compared(self, copy: ShadowCopy, response: InferResponse) -> None: ...

    def ended(self, copy: ShadowCopy, outcome: CopyOutcome) -> None: ...


class ShadowQueue:
    """The copies of one rollout in this process. Only the event loop uses it.

    Args:
        ask: answers a copy.
        busy: whether requests of clients are in progress.
        overloaded: whether no copy may be sent at all.
    """

    def __init__(
        self,
        ask: Infer,
        listener: ShadowListener,
        busy: Callable[[], bool],
        overloaded: Callable[[], bool],
    ) -> None:
        self._ask, self._listener = ask, listener
        self._busy, self._overloaded = busy, overloaded
        self._waiting: deque[ShadowCopy] = deque()
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._moment: asyncio.Future[None] | None = None

    def offer(self, copy: ShadowCopy) -> bool:
        """Queue ``copy``, or return False: there is no place, or the gateway is overloaded."""
        size = self._bytes + copy.size_bytes
        if len(self._waiting) >= MAX_COPIES or size > MAX_BYTES or self._overloaded():
            return False
        copy.queued_at = time.monotonic()
        self._bytes = size
        self._waiting.append(copy)
        if self._task is None:
            loop = asyncio.get_running_loop()
            # A context of its own: copies belong to no request.
            self._task = loop.create_task(self._run(), context=contextvars.Context())
        return True

    def advance(self) -> None:
        """Note that a request of a client has been answered."""
        if self._moment is not None and not self._moment.done():
            self._moment.set_result(None)

    def stop(self) -> None:
        """Drop all copies, the one in progress too."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for copy in self._waiting:
            self._listener.ended(copy, CopyOutcome.DROPPED)
        self._waiting.clear()
        self._bytes = 0

    async def _run(self) -> None:
        request_routing.CURRENT.set(request_routing.RequestRouting(is_copy=True))
        while self._waiting:
            await self._quiet_moment()
            copy = self._waiting.popleft()
            self._bytes -= copy.size_bytes
            if self._overloaded() or time.monotonic() - copy.queued_at > MAX_WAIT_SECONDS:
                self._listener.ended(copy, CopyOutcome.DROPPED)
                continue
            try:
                await self._answer(copy)
            except asyncio.CancelledError:
                self._listener.ended(copy, CopyOutcome.DROPPED)
                raise
            except Exception:
                log.exception(
                    "the answer to a shadow copy was not compared", model=copy.request.model_name
                )
                self._listener.ended(copy, CopyOutcome.DROPPED)
        self._task = None

    async def _answer(self, copy: ShadowCopy) -> None:
        request = addressed(copy.request, copy.side)
        request.classification = {}
        seconds = DEADLINE_SECONDS + DEADLINE_FACTOR * copy.seconds
        try:
            response = await self._ask(request, Deadline.after(seconds))
        except (QueueFull, MemoryExhausted):
            self._listener.ended(copy, CopyOutcome.DROPPED)
        except Exception as error:
            if not isinstance(error, ModelportError):
                log.exception("a shadow copy failed", model=copy.request.model_name)
            self._listener.ended(copy, CopyOutcome.FAILED)
        else:
            await self._listener.compared(copy, response)

    async def _quiet_moment(self) -> None:
        """Wait until no request of a client is in progress, for ``PATIENCE_SECONDS`` at most."""
        loop = asyncio.get_running_loop()
        latest = loop.time() + PATIENCE_SECONDS
        await asyncio.sleep(0)  # requests that have come in the meantime are first
        while self._busy() and loop.time() < latest:
            self._moment = moment = loop.create_future()
            timer = loop.call_at(latest, self.advance)
            try:
                await moment
            finally:
                timer.cancel()
            await asyncio.sleep(0)
