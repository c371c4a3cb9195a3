"""The guard of a model: in an overload, what cannot be answered soon is refused at once.

A request with a deadline is refused as soon as it is known that it cannot be met.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from modelport.gateway.errors import QueueFull
from modelport.gateway.inference.admission.controller import (
    PROBE_SECONDS,
    AdmissionDecision,
    OverloadController,
)
from modelport.gateway.inference.admission.queue_time import WEIGHT, requests_before
from modelport.gateway.inference.batching.settings import BatchingSettings
from modelport.gateway.types import Deadline, Infer, InferRequest, InferResponse, Timing

#: Requests that wait, until an estimate of how long is worth refusing one for its deadline.
ESTIMABLE = 16


class OverloadGuard:
    """Refuses what an overload brings beyond what can be answered soon.

    ``inline``: a request that is answered without waiting for anything, when nothing else is in
    flight, cannot queue. ``priorities``: where there are several. Only the event loop touches
    anything here.
    """

    def __init__(
        self,
        infer: Infer,
        controller: OverloadController,
        inline: Callable[[InferRequest], bool],
        priorities: BatchingSettings | None = None,
    ) -> None:
        self._infer = infer
        self._controller = controller
        self._inline = inline
        self._priorities = priorities
        #: The priority level of each request in flight, and what it has gone through, oldest first.
        self._in_flight: dict[asyncio.Task[object], tuple[int, Timing]] = {}
        #: With priorities: how many of them each level has.
        self._levels: dict[int, int] = {}
        #: Those that are refused though they were let in.
        self._cut: set[asyncio.Task[object]] = set()
        #: How much each request in front adds to a wait; 0: none has waited yet.
        self._place_seconds = 0.0
        #: While requests are held: its end, and whether they are let in.
        self._probe: asyncio.Future[bool] | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    def __call__(self, request: InferRequest, deadline: Deadline) -> Awaitable[InferResponse]:
        if not self._in_flight and self._inline(request):
            return self._infer(request, deadline)
        return self._admit(request, deadline)

    @property
    def wait_seconds(self) -> float:
        """How long the last of all is going to wait, at a guess that is rather too low."""
        return len(self._in_flight) * self._place_seconds

    def refuses(self) -> bool:
        """Whether one that has come, and of which nothing is known yet, is refused."""
        before, controller = len(self._in_flight), self._controller
        if before < controller.limit or self._priorities is not None:
            return False
        return controller.refuses_unread(time.monotonic(), before)

    async def _admit(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        before, controller = len(self._in_flight), self._controller
        now = time.monotonic()
        if controller.arrived(now, before):
            self._shorten()
        level = 0
        if self._priorities is not None:
            level = self._priorities.level(request)
            before = requests_before(self._levels, level)
        if before >= controller.limit:
            verdict = controller.judge(now, before)
            if controller.failed_probe():
                self._end_probe()
            if verdict is AdmissionDecision.REFUSE:
                raise QueueFull
            if verdict is AdmissionDecision.HOLD:
                await self._hold()
        remaining = deadline.remaining()
        late = remaining is not None and before * self._place_seconds > remaining
        if late and before >= ESTIMABLE:
            raise QueueFull
        task = asyncio.current_task()
        assert task is not None
        timing = request.timing
        self._in_flight[task] = level, timing
        if self._priorities is not None:
            self._levels[level] = self._levels.get(level, 0) + 1
        try:
            response = await self._infer(request, deadline)
        except asyncio.CancelledError:
            if task in self._cut and not task.uncancel():
                raise QueueFull from None
            raise
        finally:
            del self._in_flight[task]
            if self._priorities is not None:
                self._levels[level] -= 1
            self._cut.discard(task)
        controller.answered(timing.compute_infer_ns / 1e9)
        if before:
            place_seconds = timing.queue_ns / 1e9 / before
            self._place_seconds += WEIGHT * (place_seconds - self._place_seconds)
        return response

    async def _hold(self) -> None:
        """Wait for the end of the probe.

        Raises:
            QueueFull: the overload has not ended.
        """
        if self._probe is None:
            loop = asyncio.get_running_loop()
            self._probe = loop.create_future()
            self._probe_timer = loop.call_later(PROBE_SECONDS, self._end_probe)
        self._controller.held += 1
        try:
            ended = await asyncio.shield(self._probe)
        finally:
            self._controller.held -= 1
        if not ended:
            raise QueueFull

    def _end_probe(self) -> None:
        ended = self._controller.end_probe(time.monotonic(), len(self._in_flight))
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        if self._probe is not None:
            self._probe.set_result(ended)
        self._probe = self._probe_timer = None

    def _shorten(self) -> None:
        """Refuse those that have waited longest, and of which none has begun to be computed.

        Those of the lowest priority go first.
        """
        excess = len(self._in_flight) - self._controller.limit
        for task, (_, timing) in sorted(self._in_flight.items(), key=lambda each: -each[1][0]):
            if excess <= 0:
                break
            if not timing.queue_ns:
                self._cut.add(task)
                task.cancel()
                excess -= 1
