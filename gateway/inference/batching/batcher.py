"""The batcher of a model version: the one place where requests wait for a free instance.

A free instance runs the queued requests; while all instances are busy, requests gather. An instance
is busy until its execution has ended. If the backend accepts work early, submit a full batch while
an instance is still busy; withdraw it if a member is cancelled first. Only the event loop uses it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence

from modelport.gateway.backends.base import Execution
from modelport.gateway.backends.capabilities import Outcome, Together
from modelport.gateway.errors import TimedOut, Unavailable
from modelport.gateway.inference.batching.dynamic_batching import BatchingSettings, QueuePolicy
from modelport.gateway.inference.batching.execution import BatchRunner
from modelport.gateway.inference.batching.joining import Joiner
from modelport.gateway.inference.batching.queue import (
    Batch,
    QueuedRequest,
    RequestQueue,
    next_batch_length,
)
from modelport.gateway.runtime.thread_reply import settle
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import (
    Answer,
    Deadline,
    Infer,
    InferRequest,
    InferResponse,
)


class Batcher:
    """An ``Infer`` around one that runs ``settings.instances`` calls at a time."""

    def __init__(
        self,
        infer: Infer,
        execution: Execution,
        settings: BatchingSettings,
        joiner: Joiner,
        statistics: Statistics,
        together: Together | None = None,
    ) -> None:
        self._infer = infer
        self._runner = BatchRunner(infer, joiner, statistics, together)
        self._execution = execution
        self._settings = settings
        self._joiner = joiner
        self._queue = RequestQueue(settings)
        self._running: set[Batch] = set()
        #: Batches submitted early that have not begun, in order. One may have begun if the end of
        #: its predecessor has not been reported yet.
        self._next: deque[Batch] = deque()
        # Priorities, and policies that limit the wait or the queue, need every request to stay
        # queued.
        simple = settings.levels < 2 and settings.default_policy == QueuePolicy()
        self._ahead = execution.ahead if simple else 0
        self._full = max(settings.preferred_sizes)
        #: No request waits for later ones.
        self._prompt = not settings.delay_seconds
        self._ordering = settings.preserve_ordering
        #: With ``preserve_ordering``: unanswered requests in order of arrival.
        self._order: deque[QueuedRequest] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def __call__(self, request: InferRequest, deadline: Deadline) -> Answer:
        if deadline.expired:
            raise TimedOut
        alone = self._prompt and not self._queue and len(self._running) < self._settings.instances
        if alone and not self._order and self._execution.inline(request):
            return self._infer(request, deadline)
        return self._queued(request, deadline)

    async def _queued(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        reply: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        bucket, size = self._joiner.bucket(request), self._joiner.size(request)
        now_ns = time.monotonic_ns()
        waiting = QueuedRequest(request, deadline, reply, bucket, size, now_ns, now_ns / 1e9)
        self._queue.put(waiting)
        if self._ordering:
            self._order.append(waiting)
        self._dispatch()
        try:
            return await reply
        except asyncio.CancelledError:
            self._leave(waiting)
            raise

    def _leave(self, waiting: QueuedRequest) -> None:
        """Drop a request whose client has gone."""
        batch = waiting.batch
        if not waiting.reply.cancelled():
            waiting.reply.exception()  # the response came at the same moment; mark it as retrieved
        elif waiting.queued:
            self._queue.remove(waiting)
            self._wake()
        elif batch is not None:
            batch.wanted -= 1
            if batch in self._next and batch.task is not None:
                batch.recalled = True
                batch.task.cancel()
            elif not batch.wanted and self._execution.interruptible and batch.task is not None:
                batch.task.cancel()
        self._answer_in_order()

    # -- forming batches --------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Start every batch that can start, and set the timer for the next change."""
        while self._queue:
            now = time.monotonic()
            for refused in self._queue.expire(now):
                settle(refused.reply, TimedOut())
            free = self._settings.instances - len(self._running)
            if free <= -self._ahead or not self._start_one(now, ahead=free <= 0):
                break
        self._answer_in_order()
        self._wake()

    def _start_one(self, now: float, ahead: bool) -> bool:
        """Take one batch from the queue and start it; whether there was one.

        ``ahead`` of a free instance, only start a batch that cannot become larger.
        """
        buckets = list(self._queue.buckets())
        for bucket in buckets:
            waited_seconds = 0.0
            if self._settings.delay_seconds:
                # As in Triton, a request that cannot join a batch ends its wait.
                first = min(w.queued_at for w in bucket[: self._settings.max_size])
                waited_seconds = now - first if bucket is buckets[-1] else math.inf
            count = next_batch_length((w.size for w in bucket), waited_seconds, self._settings)
            if ahead and sum(waiting.size for waiting in bucket[:count]) < self._full:
                continue
            if count:
                self._start(self._queue.take(bucket, count), ahead)
                return True
        return False

    def _start(self, taken: Sequence[QueuedRequest], ahead: bool) -> None:
        members = []
        for waiting in taken:
            # The timer of an expired deadline may fire after the request's turn.
            if waiting.deadline.expired:
                settle(waiting.reply, TimedOut())
            elif not waiting.reply.done():  # else cancelled, but ``_leave`` has not run yet
                members.append(waiting)
        if not members:
            return
        batch = Batch(members, len(members))
        for waiting in members:
            waiting.batch = batch
        self._running.add(batch)
        if ahead:
            self._next.append(batch)
        batch.task = asyncio.get_running_loop().create_task(self._run(batch))

    def _wake(self) -> None:
        """Call ``_dispatch`` again when a timeout or the queue delay of a request ends."""
        at = self._queue.expires_at
        delay_seconds = self._settings.delay_seconds
        if delay_seconds and self._queue and len(self._running) < self._settings.instances:
            at = min(at, delay_seconds + min(w.queued_at for b in self._queue.buckets() for w in b))
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, at
        if at != math.inf:
            after_seconds = max(0.0, at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(after_seconds, self._on_time)

    def _on_time(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._dispatch()

    # -- running them -----------------------------------------------------------------------------

    async def _run(self, batch: Batch) -> None:
        members = batch.members
        outcomes: Sequence[Outcome]
        try:
            outcomes = await self._runner.run(members)
        except asyncio.CancelledError:  # every client has gone, or the backend cancelled itself
            if batch.recalled:
                self._put_back(batch)
                return
            outcomes = [Unavailable("the execution was cancelled") for _ in members]
        self._running.discard(batch)
        if batch in self._next:
            self._next.remove(batch)
        elif self._next:
            self._next.popleft()
        try:
            self._dispatch()  # before the responses are delivered, because the instance is idle
        finally:
            for waiting, outcome in zip(members, outcomes, strict=True):
                if self._ordering:
                    waiting.outcome = outcome
                    self._answer_in_order()
                else:
                    settle(waiting.reply, outcome)

    def _put_back(self, batch: Batch) -> None:
        """Put the remaining requests of a withdrawn batch back in their places."""
        self._running.discard(batch)
        if batch in self._next:
            self._next.remove(batch)
        for waiting in batch.members:
            if not waiting.reply.done():
                waiting.batch = None
                waiting.queued_ns = time.monotonic_ns()  # the wait until now is already counted
                self._queue.put_back(waiting)
        self._dispatch()

    # -- answers ----------------------------------------------------------------------------------

    def _answer_in_order(self) -> None:
        order = self._order
        while order and (order[0].reply.done() or order[0].outcome is not None):
            waiting = order.popleft()
            if waiting.outcome is not None:
                settle(waiting.reply, waiting.outcome)
