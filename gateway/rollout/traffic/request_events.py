"""Events of the requests of a rollout: errors, latencies and wrong decisions of both sides.

A latency is counted by its *rank*: the number of thresholds that it exceeds. They are the
baseline's quantiles over its own earlier requests, and for the candidate's 1 + the allowed
regression times as long, or ``min_regression_ms`` longer. As long as the candidate keeps that
limit, a request of any rank or higher is its own with a probability of at most its share of the
requests, however slow the moment is (``latency_ranks``).

With sticky assignment the requests of a key are all of one side, and not independent. So in each
stage a key counts once for each criterion, and only if the baseline had it in the stage before: the
side of such a key is a fair draw, whatever was seen of it. A key that is the candidate's already
tells nothing new, as it keeps its side (``RolloutPlan.new_share``).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from typing import NamedTuple, TypeVar

import numpy as np

from modelport.gateway.rollout.plan import AssignmentKind, RolloutLimits, RolloutPlan
from modelport.gateway.rollout.statistics.counts import Attribution, SideCounts, latency_bucket
from modelport.gateway.rollout.statistics.latency_ranks import LEVELS, allowed_regressions
from modelport.gateway.rollout.statistics.sequential_tests import Floats
from modelport.gateway.rollout.traffic.assignment import position
from modelport.gateway.rollout.traffic.sides import StageTraffic

K = TypeVar("K", int, str)

#: Requests of the baseline between two thresholds, and those that a threshold is the quantile of.
BLOCK, WINDOW = 500, 10_000
#: Bits of the record of keys. Keys that share a bit count as one, which costs some events.
_KEY_BITS = 1 << 20


class AssignedRequest(NamedTuple):
    """A client's request, its stage and its side; ``key`` is that of a sticky assignment."""

    stage: StageTraffic
    is_candidate: bool
    key: bytes = b""


class _Thresholds:
    """The thresholds of both sides, from the baseline's earlier requests."""

    def __init__(self, allowed: Floats, limits: RolloutLimits) -> None:
        self._allowed = 1 + allowed
        self._least_difference = limits.min_regression_ms / 1e3
        self._quantiles = np.array(LEVELS)
        #: Those of the baseline, and of the candidate; none until the first ``BLOCK`` requests.
        self._sides: list[list[float]] = [[], []]
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
        ranks = np.ceil(self._quantiles * self._size).astype(int) - 1
        found = np.partition(self._window[: self._size], ranks)[ranks]
        allowed = np.maximum(found * self._allowed, found + self._least_difference)
        # A level without a limit is never exceeded, or always if a higher one has a limit.
        off = np.isinf(allowed)
        never = off & (np.arange(len(off)) > np.flatnonzero(~off)[-1])
        found[off], allowed[off] = -math.inf, -math.inf
        found[never], allowed[never] = math.inf, math.inf
        self._sides = [found.tolist(), np.maximum.accumulate(allowed).tolist()]

    def rank(self, seconds: float, *, is_candidate: bool) -> int | None:
        """The number of thresholds that such a request exceeds; None without thresholds."""
        thresholds = self._sides[is_candidate]
        return bisect_left(thresholds, seconds) if thresholds else None


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
        allowed = allowed_regressions(limits)
        self._thresholds = None if allowed is None else _Thresholds(allowed, limits)
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

    def answered(self, request: AssignedRequest, seconds: float) -> None:
        """Count a request that was answered."""
        self._waited(request, self._side(request), seconds)

    def timed_out(self, request: AssignedRequest, seconds: float) -> None:
        """Count a request that was not answered in time: an error, and slow."""
        side = self._side(request)
        self._waited(request, side, seconds)
        self._error(request, side)

    def failed(self, request: AssignedRequest) -> None:
        """Count a request that failed in any other way. Its latency says nothing.

        If that were left out on both sides, a candidate that fails less than the baseline would
        have more slow requests, and one that fails more fewer quick ones. So the candidate's
        requests do not count from a failure of the baseline to its next answer, as both sides lose
        the same moments; and a failure of the candidate counts as a quick request.
        """
        self._error(request, self._side(request))
        if request.is_candidate:
            self._rank(request, 0.0)
        else:
            self._baseline_answers = False

    def abandoned(self, request: AssignedRequest, seconds: float) -> None:
        """Count a request whose client left: it would have taken at least ``seconds``.

        It is not a request otherwise, because nobody knows how long it would have taken.
        """
        self._rank(request, seconds)

    def wrong(self, request: AssignedRequest, criterion: str) -> None:
        """Count a decision that a later label says is wrong, by "accuracy", "precision", ..."""
        self._attribute(request, request.stage.counts.wrong, criterion, criterion)

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
        self._rank(request, seconds)
        # After the comparison: a threshold is of earlier requests only.
        if self._thresholds is not None and not request.is_candidate:
            self._thresholds.observe(seconds)

    def _rank(self, request: AssignedRequest, seconds: float) -> None:
        if self._thresholds is None or (request.is_candidate and not self._baseline_answers):
            return
        rank = self._thresholds.rank(seconds, is_candidate=request.is_candidate)
        if rank is not None:
            self._attribute(request, request.stage.counts.ranks, rank, "latency")

    def _error(self, request: AssignedRequest, side: SideCounts) -> None:
        side.errors += 1
        if self._keys is None or self._keys.counts("errors", request):
            counts = request.stage.counts
            counts.errors += Attribution(int(request.is_candidate), 1)

    def _attribute(
        self, request: AssignedRequest, events: dict[K, Attribution], key: K, criterion: str
    ) -> None:
        if self._keys is None or self._keys.counts(criterion, request):
            attribution = events.get(key)
            if attribution is None:
                attribution = events[key] = Attribution()
            attribution.total += 1
            attribution.candidate += request.is_candidate
