"""Counts of a rollout, per stage. Every process counts by itself; counts add up.

Latency and errors are counted as *attributions*: of the events that hit either side, those that hit
the candidate. A burst hits both sides in proportion to their shares, so that it cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from modelport.gateway.errors import InvalidArgument

K = TypeVar("K")
V = TypeVar("V", int, "Attribution")
#: Counts stay exact in JSON up to here.
MAX_COUNT = 2**53
#: Most keys of a table of counts in a document.
MAX_KEYS = 4096


def latency_bucket(seconds: float) -> int:
    """The key of a latency in ``SideCounts.latency``: eighths of a doubling of a microsecond."""
    return round(8 * math.log2(max(1e6 * seconds, 1.0)))


@dataclass(slots=True)
class Attribution:
    """Events of both sides, and those of the candidate."""

    candidate: int = 0
    total: int = 0

    def __add__(self, other: Attribution) -> Attribution:
        return Attribution(self.candidate + other.candidate, self.total + other.total)


@dataclass(slots=True)
class SideCounts:
    """Requests that were assigned to one side, without copies for a comparison.

    Neither requests that both sides find invalid nor those whose client has gone are counted.
    """

    requests: int = 0
    #: Of the requests: those that failed, also if the baseline answered in the candidate's place.
    errors: int = 0
    #: Requests slower than the absolute limits of the plan, by limit ("p50_ms", "p99_ms").
    over_limit: dict[str, int] = field(default_factory=dict)
    #: Requests by latency; the key is their ``latency_bucket``. For people only.
    latency: dict[int, int] = field(default_factory=dict)
    #: Scores of the answers by twentieths of their range, for a retrained candidate. For people.
    scores: dict[int, int] = field(default_factory=dict)

    def __add__(self, other: SideCounts) -> SideCounts:
        return SideCounts(
            self.requests + other.requests,
            self.errors + other.errors,
            _sum(self.over_limit, other.over_limit),
            _sum(self.latency, other.latency),
            _sum(self.scores, other.scores),
        )


@dataclass(slots=True)
class StageCounts:
    """Everything that is counted in one stage."""

    baseline: SideCounts = field(default_factory=SideCounts)
    candidate: SideCounts = field(default_factory=SideCounts)
    #: Pairs of answers that were compared, and those that disagree.
    compared: int = 0
    disagreed: int = 0
    #: Of the pairs: candidates with a missing, misshapen or non-finite output where the baseline
    #: has none such; each disagrees, too.
    invalid: int = 0
    #: Of the pairs: the candidate failed where the baseline answered. Not among ``compared``.
    failed: int = 0
    #: Copies that were not sent, because the gateway was busy.
    dropped: int = 0
    #: Slow requests by criterion: "p50", "p99", "first_byte_p50", "first_byte_p99".
    slow: dict[str, Attribution] = field(default_factory=dict)
    #: Wrong decisions by later labels: "accuracy", "precision", "recall".
    wrong: dict[str, Attribution] = field(default_factory=dict)
    #: Failed requests. Sticky assignment counts one per key, as it does in ``slow`` and ``wrong``.
    errors: Attribution = field(default_factory=Attribution)
    #: Processes whose first count was in this stage. Each may have counted events of the same key.
    sources: int = 0

    def __add__(self, other: StageCounts) -> StageCounts:
        return StageCounts(
            self.baseline + other.baseline,
            self.candidate + other.candidate,
            self.compared + other.compared,
            self.disagreed + other.disagreed,
            self.invalid + other.invalid,
            self.failed + other.failed,
            self.dropped + other.dropped,
            _sum(self.slow, other.slow),
            _sum(self.wrong, other.wrong),
            self.errors + other.errors,
            self.sources + other.sources,
        )

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON values."""
        return {
            "baseline": _side_json(self.baseline),
            "candidate": _side_json(self.candidate),
            "compared": self.compared,
            "disagreed": self.disagreed,
            "invalid": self.invalid,
            "failed": self.failed,
            "dropped": self.dropped,
            "slow": {key: [each.candidate, each.total] for key, each in self.slow.items()},
            "wrong": {key: [each.candidate, each.total] for key, each in self.wrong.items()},
            "errors": [self.errors.candidate, self.errors.total],
            "sources": self.sources,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StageCounts:
        """The counts of ``to_json``'s document.

        Raises:
            InvalidArgument: it is not one.
        """
        try:
            return cls._from_json(document)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"counts of a rollout are malformed: {error}") from error

    @classmethod
    def _from_json(cls, document: Mapping[str, Any]) -> StageCounts:
        found = cls(
            _side(document["baseline"]),
            _side(document["candidate"]),
            compared=_count(document["compared"]),
            disagreed=_count(document["disagreed"]),
            invalid=_count(document["invalid"]),
            failed=_count(document["failed"]),
            dropped=_count(document["dropped"]),
            slow=_attributions(document["slow"]),
            wrong=_attributions(document["wrong"]),
            errors=_attribution(document["errors"]),
            sources=_count(document["sources"]),
        )
        if max(found.disagreed, found.invalid) > found.compared:
            raise ValueError("more disagreements than compared answers")
        return found


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError("a count is not a number of at least 0")
    return value


def _keyed(document: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    if len(document) > MAX_KEYS:
        raise ValueError("a table of counts is too large")
    return document.items()


def _attributions(document: Mapping[str, Any]) -> dict[str, Attribution]:
    return {key: _attribution(pair) for key, pair in _keyed(document)}


def _attribution(pair: Iterable[Any]) -> Attribution:
    found = Attribution(*map(_count, pair))
    if found.candidate > found.total:
        raise ValueError("more events of the candidate than of both sides")
    return found


def _sum(one: Mapping[K, V], other: Mapping[K, V]) -> dict[K, V]:
    return {
        **one,
        **{key: one[key] + value if key in one else value for key, value in other.items()},
    }


def _side_json(side: SideCounts) -> dict[str, Any]:
    return {
        "requests": side.requests,
        "errors": side.errors,
        "over_limit": side.over_limit,
        "latency": {str(key): value for key, value in side.latency.items()},
        "scores": {str(key): value for key, value in side.scores.items()},
    }


def _side(document: Mapping[str, Any]) -> SideCounts:
    found = SideCounts(
        _count(document["requests"]),
        _count(document["errors"]),
        {key: _count(value) for key, value in _keyed(document["over_limit"])},
        {int(key): _count(value) for key, value in _keyed(document["latency"])},
        {int(key): _count(value) for key, value in _keyed(document["scores"])},
    )
    if max((found.errors, *found.over_limit.values())) > found.requests:
        raise ValueError("more errors or slow requests than requests")
    return found
