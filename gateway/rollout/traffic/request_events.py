"""Events of the requests of a rollout: errors, slow requests and wrong decisions of both sides.

A request is *slow* by a threshold: the baseline's quantile over its own earlier requests, and for
the candidate 1 + the allowed regression times as much, or ``min_regression_ms`` more. As long as
the candidate keeps that limit, a slow request is its own with a probability of at most its share of
the requests, however slow the moment is (``criteria``).

With sticky assignment the requests of a key are all of one side, and not independent. So in each
stage a key counts once for each criterion, and only if the baseline had it in the stage before: the
side of such a key is a fair draw, whatever was seen of it. A key that is the candidate's already
tells nothing new, as it keeps its side (``RolloutPlan.new_share``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from modelport.gateway.rollout.plan import AssignmentKind, RolloutLimits, RolloutPlan
from modelport.gateway.rollout.statistics.counts import Attribution, SideCounts, latency_bucket
from modelport.gateway.rollout.traffic.assignment import position
from modelport.gateway.rollout.traffic.sides import StageTraffic

#: Requests of the baseline between two thresholds, and those that a threshold is the quantile of.
BLOCK, WINDOW = 500, 10_000
#: Bits of the record of keys. Keys that share a bit count as one, which costs some events.
_KEY_BITS = 1 << 20


class AssignedRequest(NamedTuple):
    """A client's request, its stage and its side; ``key`` is that of a sticky assignment."""

    stage: StageTraffic
    is_candidate: bool
    key: bytes = b""


class _SlowCriterion(NamedTuple):
    name: str
    quantile: float
    #: The candidate's threshold as a multiple of the baseline's.
    allowed: float


class _Durations:
    """One measure of time, with the thresholds from the baseline's earlier requests."""

    def __init__(self, criteria: Sequence[_SlowCriterion], limits: RolloutLimits) -> None:
        self.criteria = criteria
        self._least_difference = limits.min_regression_ms / 1e3
        #: Criteria with the thresholds of the baseline, and of the candidate; none until the first
        #: ``BLOCK`` requests.
        self._slow: list[list[tuple[str, float]]] = [[], []]
        self._block: list[float] = []
        self._window = np.empty(WINDOW)
        self._size = self._at = 0

    def observe(self, seconds: float) -> None:
        """Add a request of the baseline."""
        self._block.append(seconds)
        if len(self._block) < BLOCK:
            return
        self._window[self._at : self._at + BLOCK] = self._block
        self._block.clear()
        self._at = (self._at + BLOCK) % WINDOW
        self._size = min(self._size + BLOCK, WINDOW)
        ranks = [math.ceil(each.quantile * self._size) - 1 for each in self.criteria]
        parted = np.partition(self._window[: self._size], ranks)
        self._slow = [[], []]
        for each, threshold in zip(self.criteria, map(float, parted[ranks]), strict=True):
            allowed = max(threshold * each.allowed, threshold + self._least_difference)
            self._slow[False].append((each.name, threshold))
            self._slow[True].append((each.name, allowed))

    def slow(self, seconds: float, *, is_candidate: bool) -> list[str]:
        """Names of the criteria by which such a request is slow."""
        return [name for name, threshold in self._slow[is_candidate] if seconds > threshold]


class _CountedKeys:
    """Chooses the events of a sticky assignment that count."""

    def __init__(self, plan: RolloutPlan, generator: random.Random) -> None:
        self._id = plan.id
        self._random = generator
        self._shares = plan.canary_shares_before
        self._number = 0
        #: A bit for each key that had an event in this stage, by criterion.
        self._seen: dict[str, bytearray] = {}

    def counts(self, criterion: str, request: AssignedRequest) -> bool:
        """Whether an event of the request counts for ``criterion``; the next one will not."""
        stage, key = request.stage, request.key
        if stage.number > self._number:
            self._number = stage.number
            self._seen.clear()
        if stage.number < self._number:
            return False
        before = self._shares[stage.number]
        if not key:
            # Like a key of its own, whose position is drawn now.
            share = stage.canary_share
            return not (request.is_candidate and self._random.random() * share < before)
        if position(self._id, key) < before:
            return False
        seen = self._seen.setdefault(criterion, bytearray(_KEY_BITS // 8))
        # Python's hash of bytes is seeded: no client can choose keys that share a bit.
        byte, bit = divmod(hash(key) % _KEY_BITS, 8)
        is_first = not seen[byte] >> bit & 1
        seen[byte] |= 1 << bit
        return is_first


class RequestEvents:
    """Counts the requests of one rollout in one process, in one event loop.

    Only requests of clients count: neither copies for a comparison, nor requests that are the
    client's own fault.
    """

    def __init__(self, plan: RolloutPlan, generator: random.Random | None = None) -> None:
        limits = plan.limits
        self._latency = _Durations(_slow_criteria(limits, ""), limits)
        self._first_byte = _Durations(_slow_criteria(limits, "first_byte_"), limits)
        self._absolute = [
            (name, limit / 1e3)
            for name in ("p50_ms", "p99_ms")
            if (limit := getattr(plan.limits, name)) is not None
        ]
        is_sticky = plan.assignment is not AssignmentKind.REQUEST
        self._keys = _CountedKeys(plan, generator or random.Random()) if is_sticky else None
        self._has_counted = False
        #: Whether the baseline's last request was answered, or timed out.
        self._baseline_answers = True

    def answered(
        self, request: AssignedRequest, seconds: float, first_byte_seconds: float | None = None
    ) -> None:
        """Count a request that was answered."""
        self._waited(request, self._side(request), seconds)
        if first_byte_seconds is not None:
            self._time(self._first_byte, request, first_byte_seconds)

    def timed_out(self, request: AssignedRequest, seconds: float) -> None:
        """Count a request that was not answered in time: an error, and slow."""
        side = self._side(request)
        self._waited(request, side, seconds)
        self._error(request, side)

    def failed(self, request: AssignedRequest) -> None:
        """Count a request that failed in any other way. Its latency says nothing.

        If only that were left out, a candidate that fails less than the baseline would have more
        slow requests. So the candidate's slow requests do not count from a failure of the baseline
        to its next answer: both sides lose the same moments.
        """
        self._error(request, self._side(request))
        if not request.is_candidate:
            self._baseline_answers = False

    def abandoned(self, request: AssignedRequest, seconds: float) -> None:
        """Count a request whose client left after ``seconds``: slow, if that was too long already.

        It is not a request otherwise, because nobody knows how long it would have taken.
        """
        for durations in (self._latency, self._first_byte):
            self._slow(durations, request, seconds)

    def wrong(self, request: AssignedRequest, criterion: str) -> None:
        """Count a decision that a later label says is wrong, by "accuracy", "precision", ..."""
        self._attribute(request, request.stage.counts.wrong, criterion)

    def _side(self, request: AssignedRequest) -> SideCounts:
        counts = request.stage.counts
        if not self._has_counted:
            self._has_counted = True
            counts.sources += 1
        side = counts.candidate if request.is_candidate else counts.baseline
        side.requests += 1
        return side

    def _waited(self, request: AssignedRequest, side: SideCounts, seconds: float) -> None:
        if not request.is_candidate:
            self._baseline_answers = True
        bucket = latency_bucket(seconds)
        side.latency[bucket] = side.latency.get(bucket, 0) + 1
        for name, limit in self._absolute:
            if seconds > limit:
                side.over_limit[name] = side.over_limit.get(name, 0) + 1
        self._time(self._latency, request, seconds)

    def _time(self, durations: _Durations, request: AssignedRequest, seconds: float) -> None:
        if not durations.criteria:
            return
        self._slow(durations, request, seconds)
        # After the comparison: a threshold is of earlier requests only.
        if not request.is_candidate:
            durations.observe(seconds)

    def _slow(self, durations: _Durations, request: AssignedRequest, seconds: float) -> None:
        if self._baseline_answers or not request.is_candidate:
            for name in durations.slow(seconds, is_candidate=request.is_candidate):
                self._attribute(request, request.stage.counts.slow, name)

    def _error(self, request: AssignedRequest, side: SideCounts) -> None:
        side.errors += 1
        if self._keys is None or self._keys.counts("errors", request):
            counts = request.stage.counts
            counts.errors += Attribution(int(request.is_candidate), 1)

    def _attribute(
        self, request: AssignedRequest, events: dict[str, Attribution], name: str
    ) -> None:
        if self._keys is None or self._keys.counts(name, request):
            attribution = events.get(name)
            if attribution is None:
                attribution = events[name] = Attribution()
            attribution.total += 1
            attribution.candidate += request.is_candidate


def _slow_criteria(limits: RolloutLimits, prefix: str) -> list[_SlowCriterion]:
    return [
        _SlowCriterion(name, quantile, 1 + regression)
        for name, quantile in ((f"{prefix}p50", 0.5), (f"{prefix}p99", 0.99))
        if (regression := getattr(limits, f"max_{name}_regression")) is not None
    ]
