"""Outlier detection as pure functions: choose the next endpoint of a route, and eject endpoints.

The terms are Envoy's. An endpoint is *ejected* for consecutive failures, for failing much more
often than the other endpoints, or for responding much more slowly. Each consecutive ejection lasts
twice as long. An endpoint that returns is on *trial*: it gets one request at a time, and one
failure ejects it again. The numbers, and their defaults, are ``OutlierDetection`` in
``repository.routes_file``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from modelport.gateway.errors import Internal, ModelportError
from modelport.gateway.repository.routes_file import OutlierDetection
from modelport.gateway.runtime.timer_wheel import TimeLimit

#: Consecutive failures that eject, for failures reported by the network.
CONNECT_FAILURES = 1
DROPPED_CONNECTIONS = 2  # a single one may be an expired idle connection
#: A response is slow if it exceeds ``latency_factor`` times the others' latency by this much.
SLOWER_SECONDS = 0.1
#: The most requests in the counts, which are halved then, and those as a multiple of the requests
#: needed to compare. So a long time without failures does not hide those of the last moment.
RECENT_REQUESTS, RECENT_FACTOR = 200, 2
#: The weight of the last response in an endpoint's mean latency.
WEIGHT = 0.1


class FailureKind(Enum):
    """The failure of an endpoint; the value is the message for clients, without the reason."""

    REFUSED = "cannot be reached"
    DROPPED = "closed the connection before the response was complete"
    UNREADY = "is not ready"
    MISSING = "does not have the model"
    DAMAGED = "returned an invalid response"
    SILENT = "does not respond"
    HUNG = "did not respond in time"
    ERRORED = "failed"
    FULL = "has a full queue"
    SLOW = "responds much more slowly than the others"


#: These eject even the last endpoint. Other failures may be caused by one client: then a probe
#: decides, and must find one of these.
UNREACHABLE = frozenset({FailureKind.REFUSED, FailureKind.SILENT, FailureKind.DROPPED})


class ServerError(Internal):
    """An error of the server itself: INTERNAL, UNKNOWN, HTTP status 500."""


class EndpointFailed(Exception):
    """An attempt failed because of the endpoint. ``reason`` is public, and may be empty.

    It never leaves the pool. ``error``: the client's error if no other endpoint answers.
    """

    def __init__(
        self, failure: FailureKind, reason: str = "", error: ModelportError | None = None
    ) -> None:
        super().__init__(f"{failure.value}: {reason}" if reason else failure.value)
        self.failure = failure
        self.error = error


@dataclass(slots=True, eq=False)
class Endpoint:
    """``host:port`` and its health. Only the pool changes it, on the event loop."""

    address: str
    #: Start times of the attempts in flight, oldest first.
    waiting: dict[TimeLimit, float] = field(default_factory=dict)
    #: Consecutive failures since the last response; the time of the first.
    failures: int = 0
    failing_since: float = 0.0
    #: Consecutive responses slower than ``slow_seconds``.
    slow: int = 0
    slow_seconds: float = float("inf")
    #: Recent successful and failed attempts; the numbers decay.
    answered: float = 0.0
    failed: float = 0.0
    #: Mean latency; 0: no response yet.
    latency_seconds: float = 0.0
    last_answer: float = 0.0
    ejected: bool = False
    #: Consecutive ejections; each doubles the duration.
    ejections: int = 0
    returned_at: float = 0.0
    #: Returned from ejection, and no response since.
    trial: bool = False
    #: A probe will decide on an ejection.
    suspected: bool = False

    def count_answer(self, now: float, seconds: float, settings: OutlierDetection) -> None:
        self.failures = 0
        self.answered += 1
        self.last_answer = now
        known = self.latency_seconds
        self.latency_seconds = known + WEIGHT * (seconds - known) if known else seconds
        self._keep_recent(settings)

    def count_failure(self, now: float, settings: OutlierDetection) -> None:
        if not self.failures:
            self.failing_since = now
        self.failures += 1
        self.failed += 1
        self._keep_recent(settings)

    def _keep_recent(self, settings: OutlierDetection) -> None:
        """Halve the counts if they hold too many requests."""
        most = RECENT_FACTOR * settings.failure_percentage_request_volume
        if self.answered + self.failed > max(RECENT_REQUESTS, most):
            self.halve_counts()

    def halve_counts(self) -> None:
        self.answered /= 2
        self.failed /= 2

    def readmit(self, now: float) -> None:
        self.ejected, self.trial = False, True
        self.failures = self.slow = 0
        self.answered = self.failed = 0.0
        self.returned_at = self.last_answer = now


def choose(endpoints: Sequence[Endpoint], turn: int, tried: Endpoint | None) -> Endpoint | None:
    """The endpoint with the fewest attempts in flight, in turn; None: all are ejected.

    ``tried`` has just failed and is excluded. An endpoint on trial gets a second request only if
    no other is left.
    """
    best: Endpoint | None = None
    least = 0.0
    for index in range(len(endpoints)):
        endpoint = endpoints[(turn + index) % len(endpoints)]
        if endpoint.ejected or endpoint is tried:
            continue
        in_flight: float = len(endpoint.waiting)
        if endpoint.trial and in_flight:
            in_flight = float("inf")
        if best is None or in_flight < least:
            best, least = endpoint, in_flight
    return best


def is_outlier(
    endpoint: Endpoint, failure: FailureKind, others: Sequence[Endpoint], settings: OutlierDetection
) -> bool:
    """Whether ``endpoint``, which has just failed, has failed too often."""
    if endpoint.trial:
        return True
    consecutive = _consecutive(failure, settings)
    if consecutive and endpoint.failures >= consecutive:
        return True
    return _fails_more_often(endpoint, others, settings)


def _consecutive(failure: FailureKind, settings: OutlierDetection) -> int:
    """The consecutive failures, the last of this kind, that eject an endpoint; 0: none do."""
    if failure in (FailureKind.REFUSED, FailureKind.SILENT):
        return CONNECT_FAILURES
    if failure is FailureKind.DROPPED:
        return DROPPED_CONNECTIONS
    if failure is FailureKind.ERRORED:
        return settings.consecutive_5xx
    # A full queue is a fault only if the other endpoints' queues are not full.
    return 0 if failure is FailureKind.FULL else settings.consecutive_gateway_failure


def _fails_more_often(
    endpoint: Endpoint, others: Sequence[Endpoint], settings: OutlierDetection
) -> bool:
    total = endpoint.answered + endpoint.failed
    threshold = settings.failure_percentage_threshold
    if not threshold or total < settings.failure_percentage_request_volume:
        return False
    failed = sum(each.failed for each in others)
    elsewhere = sum(each.answered for each in others) + failed
    share = failed / elsewhere if elsewhere else 0.0
    return 100 * (endpoint.failed / total - share) >= threshold


def is_stalled(
    endpoint: Endpoint, now: float, longest_seconds: float, settings: OutlierDetection
) -> bool:
    """Whether enough requests have waited for longer, without any response meanwhile."""
    enough = 1 if endpoint.trial else settings.consecutive_gateway_failure
    oldest = list(islice(endpoint.waiting.values(), enough))
    if not enough or len(oldest) < enough:
        return False
    return now - max(oldest[-1], endpoint.last_answer) > longest_seconds


def may_eject(
    failure: FailureKind, endpoints: Sequence[Endpoint], settings: OutlierDetection
) -> bool:
    """Whether enough of ``endpoints`` remain if one more is ejected.

    An unreachable endpoint is always ejected. For any other failure one endpoint stays, and at most
    ``max_ejection_percent`` are ejected, but always one may be.
    """
    if failure in UNREACHABLE:
        return True
    ejected = sum(each.ejected for each in endpoints)
    if ejected + 1 >= len(endpoints):
        return False
    return not ejected or (ejected + 1) * 100 <= len(endpoints) * settings.max_ejection_percent


def slow_seconds(
    endpoint: Endpoint, endpoints: Sequence[Endpoint], settings: OutlierDetection
) -> float:
    """The time after which a response of ``endpoint`` counts as slow."""
    others = [
        each.latency_seconds
        for each in endpoints
        if each is not endpoint and not each.ejected and each.latency_seconds
    ]
    if not others or not settings.latency_factor:
        return float("inf")
    return settings.latency_factor * sum(others) / len(others) + SLOWER_SECONDS


def ejection_seconds(ejections: int, settings: OutlierDetection) -> float:
    """The duration of the ``ejections``-th consecutive ejection, counted from 1."""
    seconds = settings.base_ejection_time_seconds * 2.0 ** min(ejections - 1, 30)
    return min(settings.max_ejection_time_seconds, seconds)
