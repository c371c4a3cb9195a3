"""Events of the requests of a rollout: errors, slow requests and wrong decisions of both sides.

A request is *slow* by a threshold: the baseline's quantile over its own earlier requests, and for
the candidate 1 + the allowed regression times as much. As long as the candidate keeps that limit, a
slow request is its own with a probability of at most its share of the requests, however slow the
moment is (``criteria``).

With sticky assignment the requests of a key are all of one side, and not independent. The first
event of each key counts, and no other: a key's side was fixed by a fair draw, once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from modelport.gateway.rollout.counts import Attribution, SideCounts, StageCounts
from modelport.gateway.rollout.plan import RolloutLimits

#: Requests of the baseline between two thresholds, and those that a threshold is the quantile of.
BLOCK, WINDOW = 500, 10_000
#: Bits of the record of keys. Keys that share a bit count as one, which costs some events.
_KEY_BITS = 1 << 20


class _SlowCriterion(NamedTuple):
    name: str
    quantile: float
    #: The candidate's threshold as a multiple of the baseline's.
    allowed: float


class _Durations:
    """One measure of time, with the thresholds from the baseline's earlier requests."""

    def __init__(self, criteria: Sequence[_SlowCriterion]) -> None:
        self.criteria = criteria
        #: None until the first ``BLOCK`` requests.
        self.thresholds: list[float] | None = None
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
        self.thresholds = [float(parted[rank]) for rank in ranks]

    def slow(self, seconds: float, *, is_candidate: bool) -> Iterator[str]:
        """Names of the criteria by which such a request is slow."""
        for each, threshold in zip(self.criteria, self.thresholds or (), strict=False):
            if seconds > (threshold * each.allowed if is_candidate else threshold):
                yield each.name


class RequestEvents:
    """Counts the requests of one rollout in one process, in one event loop.

    Only requests of clients count: neither copies for a comparison, nor requests that are the
    client's own fault.
    """

    def __init__(self, limits: RolloutLimits, generator: random.Random | None = None) -> None:
        self._random = generator or random.Random()
        self._latency = _Durations(_slow_criteria(limits, ""))
        self._first_byte = _Durations(_slow_criteria(limits, "first_byte_"))
        self._absolute = [
            (name, limit / 1e3)
            for name in ("p50_ms", "p99_ms")
            if (limit := getattr(limits, name)) is not None
        ]
        #: A bit for each key that had an event, by criterion.
        self._seen: dict[str, bytearray] = {}
        self._has_counted = False

    def answered(
        self,
        counts: StageCounts,
        *,
        is_candidate: bool,
        seconds: float,
        first_byte_seconds: float | None = None,
        key: str | None = None,
    ) -> None:
        """Count a request that was answered; ``key`` is that of a sticky assignment."""
        self._waited(self._side(counts, is_candidate), counts, is_candidate, seconds, key)
        if first_byte_seconds is not None:
            self._time(self._first_byte, counts, is_candidate, first_byte_seconds, key)

    def timed_out(
        self, counts: StageCounts, *, is_candidate: bool, seconds: float, key: str | None = None
    ) -> None:
        """Count a request that was not answered in time: an error, and slow."""
        side = self._side(counts, is_candidate)
        self._waited(side, counts, is_candidate, seconds, key)
        self._error(side, counts, is_candidate, key)

    def failed(self, counts: StageCounts, *, is_candidate: bool, key: str | None = None) -> None:
        """Count a request that failed in any other way.

        Its latency says nothing. If only the baseline's were left out, a candidate that fails less
        would have more slow requests. So the baseline's failures are slow by chance, as often as
        its other requests.
        """
        self._error(self._side(counts, is_candidate), counts, is_candidate, key)
        if is_candidate:
            return
        for durations in (self._latency, self._first_byte):
            if durations.thresholds is None:
                continue
            for each in durations.criteria:
                if self._random.random() >= each.quantile:
                    self._attribute(counts.slow, each.name, is_candidate, key)

    def abandoned(
        self, counts: StageCounts, *, is_candidate: bool, seconds: float, key: str | None = None
    ) -> None:
        """Count a request whose client left after ``seconds``: slow, if that was too long already.

        It is no request otherwise, because nobody knows how long it would have taken.
        """
        for durations in (self._latency, self._first_byte):
            for name in durations.slow(seconds, is_candidate=is_candidate):
                self._attribute(counts.slow, name, is_candidate, key)

    def wrong(
        self, counts: StageCounts, criterion: str, *, is_candidate: bool, key: str | None = None
    ) -> None:
        """Count a decision that a later label says is wrong, by "accuracy", "precision", ..."""
        self._attribute(counts.wrong, criterion, is_candidate, key)

    def _side(self, counts: StageCounts, is_candidate: bool) -> SideCounts:
        if not self._has_counted:
            self._has_counted = True
            counts.sources += 1
        side = counts.candidate if is_candidate else counts.baseline
        side.requests += 1
        return side

    def _waited(
        self,
        side: SideCounts,
        counts: StageCounts,
        is_candidate: bool,
        seconds: float,
        key: str | None,
    ) -> None:
        bucket = round(8 * math.log2(max(1e6 * seconds, 1.0)))
        side.latency[bucket] = side.latency.get(bucket, 0) + 1
        for name, limit in self._absolute:
            if seconds > limit:
                side.over_limit[name] = side.over_limit.get(name, 0) + 1
        self._time(self._latency, counts, is_candidate, seconds, key)

    def _time(
        self,
        durations: _Durations,
        counts: StageCounts,
        is_candidate: bool,
        seconds: float,
        key: str | None,
    ) -> None:
        for name in durations.slow(seconds, is_candidate=is_candidate):
            self._attribute(counts.slow, name, is_candidate, key)
        # After the comparison: a threshold is of earlier requests only.
        if durations.criteria and not is_candidate:
            durations.observe(seconds)

    def _error(
        self, side: SideCounts, counts: StageCounts, is_candidate: bool, key: str | None
    ) -> None:
        side.errors += 1
        if self._is_first("errors", key):
            counts.errors.total += 1
            counts.errors.candidate += is_candidate

    def _attribute(
        self, events: dict[str, Attribution], name: str, is_candidate: bool, key: str | None
    ) -> None:
        if self._is_first(name, key):
            attribution = events.setdefault(name, Attribution())
            attribution.total += 1
            attribution.candidate += is_candidate

    def _is_first(self, name: str, key: str | None) -> bool:
        """Whether the key had no such event before; every event without a key is a first one."""
        if key is None:
            return True
        seen = self._seen.setdefault(name, bytearray(_KEY_BITS // 8))
        # Python's hash of a text is seeded: no client can choose keys that share a bit.
        byte, bit = divmod(hash(key) % _KEY_BITS, 8)
        is_first = not seen[byte] >> bit & 1
        seen[byte] |= 1 << bit
        return is_first


def _slow_criteria(limits: RolloutLimits, prefix: str) -> list[_SlowCriterion]:
    return [
        _SlowCriterion(name, quantile, 1 + regression)
        for name, quantile in ((f"{prefix}p50", 0.5), (f"{prefix}p99", 0.99))
        if (regression := getattr(limits, f"max_{name}_regression")) is not None
    ]
