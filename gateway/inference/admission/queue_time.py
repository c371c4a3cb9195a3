"""Admission by queue time: what would wait longer than its queue policy allows is refused at once.

What a queue policy allows is a time, ``default_timeout_microseconds``. A request that waits so long
is refused by the queue in any case; but by then everyone in front of it has waited almost as long.
How long a new one will wait is known when it comes, by Little's law: the requests before it, times
the interval at which they are answered; those of a lower priority are behind it. So the queue is
never longer than what is worth waiting for, and a refusal costs the client nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from modelport.gateway.errors import QueueFull
from modelport.gateway.inference.batching.settings import BatchingSettings
from modelport.gateway.types import Deadline, Infer, InferRequest, InferResponse

#: The weight of the last interval in the running mean.
WEIGHT = 0.1


class QueueTimeLimit:
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
        before = requests_before(self._in_flight, level)
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


def requests_before(in_flight: Mapping[int, int], level: int) -> int:
    """How many requests go before one of that priority level that comes now."""
    return sum(count for other, count in in_flight.items() if other <= level)
