"""Admission: a request that would wait too long is refused at once, not after the wait.

What a queue policy allows is a time, ``default_timeout_microseconds``. A request that waits so long
is refused by the queue in any case; but by then everyone in front of it has waited almost as long.
How long a new one will wait is known when it comes, by Little's law: the requests before it, times
the interval at which they are answered. So the queue is never longer than what is worth waiting
for, and a refusal costs the client nothing.
"""

from __future__ import annotations

import math
import time

from gateway.batching import settings as batching
from gateway.batching.settings import BatchingSettings, QueuePolicy
from gateway.errors import QueueFull
from gateway.repository.config import ModelConfig
from gateway.types import Deadline, Infer, InferRequest, InferResponse

#: The weight of the last interval in the running mean.
WEIGHT = 0.1


def wrap(infer: Infer, config: ModelConfig) -> Infer:
    """``infer`` behind an admission, where a queue policy of ``config`` bounds the wait.

    Raises:
        InvalidArgument: ``config`` asks for what cannot be.
    """
    if not config.HasField("dynamic_batching"):
        return infer
    wanted = batching.read(config)
    policies = (wanted.default_policy, *wanted.policies.values())
    if any(_bounds(policy) for policy in policies):
        return Admission(infer, wanted)
    return infer


def _bounds(policy: QueuePolicy) -> bool:
    bounded = policy.allow_override or policy.timeout_seconds != math.inf
    return bounded and not policy.delays


class Admission:
    """Only the event loop touches anything here."""

    def __init__(self, infer: Infer, settings: BatchingSettings) -> None:
        self._infer = infer
        self._settings = settings
        self._in_flight = 0
        #: Seconds from one answer to the next while there is work; 0: not known yet.
        self._interval_seconds = 0.0
        #: When the last answer came, or work after none.
        self._last = 0.0

    @property
    def wait_seconds(self) -> float:
        """How long one that comes now is going to wait."""
        return self._in_flight * self._interval_seconds

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        policy = self._settings.policy(self._settings.level(request))
        if not policy.delays and self.wait_seconds > policy.timeout(request):
            raise QueueFull
        if not self._in_flight:
            self._last = time.monotonic()
        self._in_flight += 1
        answered = False
        try:
            response = await self._infer(request, deadline)
            answered = True
            return response
        finally:
            self._in_flight -= 1
            if answered:
                self._count()

    def _count(self) -> None:
        now = time.monotonic()
        interval = now - self._last
        self._last = now
        known = self._interval_seconds
        self._interval_seconds = known + WEIGHT * (interval - known) if known else interval
