"""The overload guard of a model: refuse requests during an overload, and hopeless deadlines.

A request whose deadline cannot be met is refused as soon as that is known.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from modelport.gateway.errors import QueueFull
from modelport.gateway.inference.admission.controller import (
    MAX_SLOT_SECONDS,
    PROBE_SECONDS,
    AdmissionDecision,
    OverloadController,
)
from modelport.gateway.inference.admission.queue_time import WEIGHT, requests_before
from modelport.gateway.inference.batching.dynamic_batching import BatchingSettings
from modelport.gateway.types import (
    Answer,
    Deadline,
    Infer,
    InferRequest,
    InferResponse,
    Timing,
    finished,
)

#: Requests that wait before the estimate of the wait may refuse a request for its deadline.
ESTIMABLE = 16


class OverloadGuard:
    """An ``Infer`` that refuses requests beyond the limit of an ``OverloadController``.

    Only the event loop uses it.

    Args:
        inline: whether a request is answered without waiting, so that it cannot queue when nothing
            else is in flight.
        priorities: for a model with several priority levels.
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
        #: Priority level and timing of each request in flight, oldest first.
        self._in_flight: dict[asyncio.Task[object], tuple[int, Timing]] = {}
        #: Requests in flight by priority level.
        self._levels: dict[int, int] = {}
        #: Requests that are refused although they were admitted.
        self._cut: set[asyncio.Task[object]] = set()
        #: The wait that each request in front adds; 0: no request has waited yet.
        self._place_seconds = 0.0
        #: The end of the probe while requests are held: whether they are admitted.
        self._probe: asyncio.Future[bool] | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    def __call__(self, request: InferRequest, deadline: Deadline) -> Answer:
        if not self._in_flight and self._inline(request):
            return self._infer(request, deadline)
        return self._admit(request, deadline)

    def overloaded(self) -> bool:
        """Whether the model has more requests than it can compute."""
        return self._controller.overloaded

    def refuses(self) -> bool:
        """Whether the next request is refused before it is read."""
        before, controller = len(self._in_flight), self._controller
        if before < controller.limit or self._priorities is not None:
            return False
        return controller.refuses_unread(time.monotonic(), before)

    async def _admit(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        before, controller = len(self._in_flight), self._controller
        now = time.monotonic()
        if controller.arrived(now, before):
            self._shorten()
            self._look_later()
        level = 0
        if self._priorities is not None:
            level = self._priorities.level(request)
            before = requests_before(self._levels, level)
        if before >= controller.limit:
            decision = controller.judge(now, before)
            if controller.failed_probe():
                self._end_probe()
            if decision is AdmissionDecision.REFUSE:
                raise QueueFull
            if decision is AdmissionDecision.HOLD:
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
            response = await finished(self._infer(request, deadline))
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
            QueueFull: the overload continues.
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

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(MAX_SLOT_SECONDS, self._look)

    def _look(self) -> None:
        """End an overload whose clients have all gone: no arrival ends it."""
        if not self._controller.look(time.monotonic(), len(self._in_flight)):
            self._look_later()

    def _shorten(self) -> None:
        """Refuse the requests beyond the limit that have not begun to be computed.

        Requests of the lowest priority go first, then the oldest.
        """
        excess = len(self._in_flight) - self._controller.limit
        for task, (_, timing) in sorted(self._in_flight.items(), key=lambda each: -each[1][0]):
            if excess <= 0:
                break
            if not timing.queue_ns:
                self._cut.add(task)
                task.cancel()
                excess -= 1
