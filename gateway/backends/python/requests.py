"""Requests at a Python model, from their arrival to their last response."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from modelport.gateway.errors import ModelportError
from modelport.gateway.runtime.thread_reply import settle
from modelport.gateway.types import Deadline, InferRequest, InferResponse

if TYPE_CHECKING:
    from modelport.gateway.backends.python.instance import Instance

Outcome = InferResponse | ModelportError


class PendingRequest:
    """A request that has no response yet. Awaiting it waits for that; cancelling it withdraws it.

    It is awaited at once, so it needs no coroutine and no task.
    """

    __slots__ = (
        "abandon", "abandoned_at", "bound", "context", "deadline", "instance", "number", "queued",
        "queued_ns", "reply", "request", "sent_at", "stream",
    )  # fmt: skip

    def __init__(
        self,
        request: InferRequest,
        deadline: Deadline,
        reply: asyncio.Future[InferResponse],
        abandon: Callable[[PendingRequest], None],
    ) -> None:
        #: ``reply`` of a decoupled model has no response; it is done when the instance is free.
        self.request, self.deadline, self.reply, self.abandon = request, deadline, reply, abandon
        #: That of the request, for those to other models that it leads to.
        self.context = contextvars.copy_context()
        self.queued_ns = time.perf_counter_ns()
        self.number = 0
        #: Whether it counts as one that waits for an instance.
        self.queued = False
        #: Where it runs; None: it waits.
        self.instance: Instance | None = None
        #: It can run nowhere else.
        self.bound = False
        self.sent_at = 0.0
        #: Since when nobody waits for it; 0: somebody does.
        self.abandoned_at = 0.0
        #: Of a decoupled model.
        self.stream: ResponseStream | None = None

    def __await__(self) -> Generator[object, None, InferResponse]:
        try:
            return (yield from self.reply)
        except asyncio.CancelledError:
            self.abandon(self)
            raise

    def settle(self, outcome: Outcome | None, final: bool) -> None:
        """Take a response, an error, or the end of the responses (None)."""
        if self.stream is not None:
            self.stream.put(outcome, final)
            if isinstance(outcome, ModelportError):
                self.executed()
        elif outcome is not None:
            settle(self.reply, outcome)

    def executed(self) -> None:
        """Note that the request of a decoupled model does not hold its instance any more."""
        if self.stream is not None and not self.reply.done():
            self.reply.set_result(InferResponse("", 0, []))


class ResponseStream:
    """Responses of a decoupled model that its client has not taken yet."""

    def __init__(self) -> None:
        self._found: deque[Outcome] = deque()
        self._finished = False
        self._arrived = asyncio.Event()

    def put(self, outcome: Outcome | None, final: bool) -> None:
        """Add a response or an error; an error ends the stream."""
        if self._finished:
            return
        if isinstance(outcome, InferResponse):
            outcome.final = final
        if outcome is not None:
            self._found.append(outcome)
        self._finished = final or isinstance(outcome, ModelportError)
        self._arrived.set()

    async def get(self) -> Outcome | None:
        """The next response, or the error; None: there is no more."""
        while not self._found:
            if self._finished:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return self._found.popleft()

    def __len__(self) -> int:
        return len(self._found)


class RunningBatch:
    """Requests that one call of ``execute`` gets."""

    __slots__ = ("members", "sent_at", "started_at")

    def __init__(self, members: list[PendingRequest], now: float) -> None:
        self.members = members
        #: When it was sent, and when it became the first of those that the instance has.
        self.sent_at = self.started_at = now
