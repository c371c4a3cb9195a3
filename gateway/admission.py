"""Admission: a request that would wait too long is refused at once, not after the wait.

What a queue policy allows is a time, ``default_timeout_microseconds``. A request that waits so long
is refused by the queue in any case; but by then everyone in front of it has waited almost as long.
How long a new one will wait is known when it comes, by Little's law: the requests before it, times
the interval at which they are answered; those of a lower priority are behind it. So the queue is
never longer than what is worth waiting for, and a refusal costs the client nothing.

Where no policy bounds the queue, nothing is refused until there is an overload (``overload``): then
the queue is cut to what keeps the model busy, and what comes beyond that is refused. A request with
a deadline is refused as soon as it is known that it cannot be met.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping

from gateway.backends import parameters
from gateway.backends.base import ELSEWHERE, Execution
from gateway.batching import settings as batching
from gateway.batching.settings import BatchingSettings, QueuePolicy
from gateway.errors import InvalidArgument, QueueFull
from gateway.overload import Detector
from gateway.repository import config as configuration
from gateway.repository.config import ModelConfig
from gateway.types import Deadline, Infer, InferRequest, InferResponse, Timing

#: The weight of the last interval in the running mean.
WEIGHT = 0.1
#: With "false", a model's queue is bounded by its policy alone, in any case by its size; with
#: "true" there is admission control beside a policy.
ADMISSION_CONTROL = "admission_control"
#: So many requests in flight are no overload, however fast they came.
MIN_PENDING_REQUESTS = "admission_control_min_pending_requests"
DEFAULT_MIN_PENDING_REQUESTS = 256
#: Requests that wait, until an estimate of how long is worth refusing one for its deadline.
ESTIMABLE = 16


def wrap(infer: Infer, config: ModelConfig, execution: Execution = ELSEWHERE) -> Infer:
    """``infer`` behind an admission, where a queue policy of ``config`` bounds the wait, or where
    requests wait for an instance and no policy bounds their queue.

    Raises:
        InvalidArgument: ``config`` asks for what cannot be.
    """
    own, batches, wanted = False, config.HasField("dynamic_batching"), None
    if batches:
        wanted = batching.read(config)
        policies = (wanted.default_policy, *wanted.policies.values())
        if any(_bounds(policy) for policy in policies):
            infer = Admission(infer, wanted)
        own = config.dynamic_batching.HasField("default_queue_policy") or bool(wanted.policies)
    queues = execution.queues or (batches and not execution.batches)
    least = parameters.integer(config, MIN_PENDING_REQUESTS, DEFAULT_MIN_PENDING_REQUESTS, 1)
    if not parameters.boolean(config, ADMISSION_CONTROL, queues and not own):
        return infer
    if not queues:
        raise InvalidArgument(
            f"parameter '{ADMISSION_CONTROL}' is for models that wait for an instance here, and "
            f"'{config.name}' runs elsewhere; bound the queue of the server that runs it"
        )
    delays = batches and config.dynamic_batching.max_queue_delay_microseconds
    inline = ELSEWHERE.inline if delays else execution.inline
    detector = Detector(configuration.instance_count(config), least)
    return Guard(infer, detector, inline, wanted if wanted and wanted.levels > 1 else None)


def _bounds(policy: QueuePolicy) -> bool:
    bounded = policy.allow_override or policy.timeout_seconds != math.inf
    return bounded and not policy.delays


class Admission:
    """Only the event loop touches anything here."""

    def __init__(self, infer: Infer, settings: BatchingSettings) -> None:
        self._infer = infer
        self._settings = settings
        #: By priority level, those that have any.
        self._in_flight: dict[int, int] = {}
        #: Seconds from one answer to the next while there is work; 0: not known yet.
        self._interval_seconds = 0.0
        #: When the last answer came, or work after none.
        self._last = 0.0

    def wait_seconds(self, level: int) -> float:
        """How long one of that priority ``level`` that comes now is going to wait."""
        before = _before(self._in_flight, level)
        # The last instance that is free takes it at once.
        return max(0, before - self._settings.instances + 1) * self._interval_seconds

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        level, in_flight = self._settings.level(request), self._in_flight
        policy = self._settings.policy(level)
        if not policy.delays and self.wait_seconds(level) > policy.timeout(request):
            raise QueueFull
        if not in_flight:
            self._last = time.monotonic()
        in_flight[level] = in_flight.get(level, 0) + 1
        answered = False
        try:
            response = await self._infer(request, deadline)
            answered = True
            return response
        finally:
            in_flight[level] -= 1
            if not in_flight[level]:
                del in_flight[level]
            if answered:
                self._count()

    def _count(self) -> None:
        now = time.monotonic()
        interval = now - self._last
        self._last = now
        known = self._interval_seconds
        self._interval_seconds = known + WEIGHT * (interval - known) if known else interval


class Guard:
    """Refuses what an overload brings beyond what can be answered soon.

    ``inline``: a request that is answered without waiting for anything, when nothing else is in
    flight, cannot queue. ``priorities``: where there are several. Only the event loop touches
    anything here.
    """

    def __init__(
        self,
        infer: Infer,
        detector: Detector,
        inline: Callable[[InferRequest], bool],
        priorities: BatchingSettings | None = None,
    ) -> None:
        self._infer = infer
        self._detector = detector
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
        before = len(self._in_flight)
        if before < self._detector.limit or self._priorities is not None:
            return False
        self._detector.arrived(time.monotonic(), before)
        return before >= self._detector.limit

    async def _admit(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        before, detector = len(self._in_flight), self._detector
        if detector.arrived(time.monotonic(), before):
            self._shorten()
        level = 0
        if self._priorities is not None:
            level = self._priorities.level(request)
            before = _before(self._levels, level)
        if before >= detector.limit:
            raise QueueFull
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
        detector.answered(timing.compute_infer_ns / 1e9)
        if before:
            place_seconds = timing.queue_ns / 1e9 / before
            self._place_seconds += WEIGHT * (place_seconds - self._place_seconds)
        return response

    def _shorten(self) -> None:
        """Refuse those that have waited longest, and of which none has begun to be computed.

        Those of the lowest priority go first.
        """
        excess = len(self._in_flight) - self._detector.limit
        for task, (_, timing) in sorted(self._in_flight.items(), key=lambda each: -each[1][0]):
            if excess <= 0:
                break
            if not timing.queue_ns:
                self._cut.add(task)
                task.cancel()
                excess -= 1


def _before(in_flight: Mapping[int, int], level: int) -> int:
    """How many requests go before one of that priority level that comes now."""
    return sum(count for other, count in in_flight.items() if other <= level)
