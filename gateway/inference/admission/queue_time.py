"""Admission by queue time: refuse a request at once if it would exceed its queue policy's timeout.

The queue itself refuses a request only when its ``default_timeout_microseconds`` have passed; by
then every request in front of it has waited almost as long. By Little's law the wait is known on
arrival: the number of requests in front, of the same or a higher priority, times the interval
between responses. So the queue never exceeds the timeout, and a refusal costs the client no time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from modelport.gateway.errors import QueueFull
from modelport.gateway.inference.batching.dynamic_batching import BatchingSettings
from modelport.gateway.types import Deadline, Infer, InferRequest, InferResponse, finished

#: The weight of the last interval in the running mean.
WEIGHT = 0.1


class QueueTimeLimit:
    """An ``Infer`` that refuses requests with too long a wait. Only the event loop uses it."""

    def __init__(self, infer: Infer, settings: BatchingSettings) -> None:
        self._infer = infer
        self._settings = settings
        #: Requests in flight by priority level.
        self._in_flight: dict[int, int] = {}
        #: Seconds between responses while there is work; 0: unknown yet.
        self._interval_seconds = 0.0
        #: The time of the last response, or of the first request after a pause.
        self._last = 0.0

    def wait_seconds(self, level: int) -> float:
        """The expected wait of a new request of the priority ``level``."""
        before = requests_before(self._in_flight, level)
        # The last free instance takes a request at once.
        return max(0, before - self._settings.instances + 1) * self._interval_seconds

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        level, in_flight = self._settings.level(request), self._in_flight
        policy = self._settings.policy(level)
        if not policy.delays and self.wait_seconds(level) > policy.timeout(request):
            raise QueueFull
        entered = time.monotonic()
        if not in_flight:
            self._last = entered
        in_flight[level] = in_flight.get(level, 0) + 1
        try:
            response = await finished(self._infer(request, deadline))
        finally:
            in_flight[level] -= 1
            if not in_flight[level]:
                del in_flight[level]
        self._count(entered + request.timing.queue_ns / 1e9)
        return response

    def _count(self, begun: float) -> None:
        """Count a response, whose request left the queue at ``begun``."""
        now = time.monotonic()
        # Until then it may have waited for others to make up its batch, which is no overload.
        interval = now - max(self._last, begun)
        self._last = now
        known = self._interval_seconds
        self._interval_seconds = known + WEIGHT * (interval - known) if known else interval


def requests_before(in_flight: Mapping[int, int], level: int) -> int:
    """The number of requests that run before a new one of the priority ``level``."""
    return sum(count for other, count in in_flight.items() if other <= level)
