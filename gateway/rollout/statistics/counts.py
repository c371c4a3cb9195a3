"""Counts of a rollout, per stage. Every process counts by itself; counts add up.

Latency and errors are counted as *attributions*: of the events that hit either side, those that hit
the candidate. A burst hits both sides in proportion to their shares, so that it cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar

from modelport.gateway.errors import InvalidArgument

V = TypeVar("V")
#: Counts stay exact in JSON up to here.
MAX_COUNT = 2**53
#: Ranks of latencies (``latency_ranks``).
RANKS = 15
#: Classes that are told apart, and parts of the range of scores.
CLASSES, SCORE_BINS = 16, 20
#: Most keys of a table of counts in a document.
MAX_KEYS = 4096
#: The fields of ``StageCounts`` that are numbers.
_NUMBERS = ("compared", "disagreed", "invalid", "failed", "dropped", "sources")


def latency_bucket(seconds: float) -> int:
    """The key of a latency in ``SideCounts.latency``: eighths of a doubling of a microsecond."""
    return round(8 * math.log2(max(1e6 * seconds, 1.0)))


@dataclass(slots=True)
class _Counts:
    """Counts that add up field by field, and tables of counts by key."""

    def __add__(self, other: Self) -> Self:
        names = [each.name for each in fields(self)]
        return type(self)(*(_sum(getattr(self, name), getattr(other, name)) for name in names))

    def to_json(self) -> Any:
        """The counts as JSON values."""
        return {each.name: _json(getattr(self, each.name)) for each in fields(self)}


@dataclass(slots=True)
class Attribution(_Counts):
    """Events of both sides, and those of the candidate."""

    candidate: int = 0
    total: int = 0

    def to_json(self) -> list[int]:
        return [self.candidate, self.total]


@dataclass(slots=True)
class SideCounts(_Counts):
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


@dataclass(slots=True)
class StageCounts(_Counts):
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
    #: Requests by the rank of their latency among the baseline's (``latency_ranks``).
    ranks: dict[int, Attribution] = field(default_factory=dict)
    #: Wrong decisions by later labels: "accuracy", "precision", "recall".
    wrong: dict[str, Attribution] = field(default_factory=dict)
    #: Failed requests. Sticky assignment counts one per key, as it does in ``ranks`` and ``wrong``.
    errors: Attribution = field(default_factory=Attribution)
    #: Processes whose first count was in this stage. Each may have counted events of the same key.
    sources: int = 0
    #: Pairs by the decisions, and by the scores, of both sides (``retrained``).
    class_pairs: dict[int, int] = field(default_factory=dict)
    score_pairs: dict[int, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StageCounts:
        """The counts of ``to_json``'s document.

        Raises:
            InvalidArgument: it is not one.
        """
        try:
            found = cls(
                _side(document["baseline"]),
                _side(document["candidate"]),
                ranks=_ranks(document),
                wrong=_table(document["wrong"], _attribution),
                errors=_attribution(document["errors"]),
                class_pairs=_pairs(document.get("class_pairs", {}), CLASSES),
                score_pairs=_pairs(document.get("score_pairs", {}), SCORE_BINS),
                **{name: _count(document[name]) for name in _NUMBERS},
            )
            if max(found.disagreed, found.invalid) > found.compared:
                raise ValueError("more disagreements than compared answers")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"counts of a rollout are malformed: {error}") from error
        return found


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError("a count is not a number of at least 0")
    return value


def _table(
    document: Mapping[str, Any], read: Callable[[Any], V], key: Callable[[str], Any] = str
) -> dict[Any, V]:
    if len(document) > MAX_KEYS:
        raise ValueError("a table of counts is too large")
    return {key(name): read(value) for name, value in document.items()}


def _pairs(document: Mapping[str, Any], base: int) -> dict[int, int]:
    found: dict[int, int] = _table(document, _count, int)
    if not all(0 <= key < base**2 for key in found):
        raise ValueError("there is no such pair of answers")
    return found


def _ranks(document: Mapping[str, Any]) -> dict[int, Attribution]:
    """The requests by rank. Older versions counted ``slow`` ones, which have none."""
    if "ranks" not in document and "slow" in document:
        return {}
    found: dict[int, Attribution] = _table(document["ranks"], _attribution, int)
    if not all(0 <= rank < RANKS for rank in found):
        raise ValueError("there is no such rank of latencies")
    return found


def _attribution(pair: Iterable[Any]) -> Attribution:
    found = Attribution(*map(_count, pair))
    if found.candidate > found.total:
        raise ValueError("more events of the candidate than of both sides")
    return found


def _side(document: Mapping[str, Any]) -> SideCounts:
    found = SideCounts(
        _count(document["requests"]),
        _count(document["errors"]),
        _table(document["over_limit"], _count),
        _table(document["latency"], _count, int),
        _table(document["scores"], _count, int),
    )
    if max((found.errors, *found.over_limit.values())) > found.requests:
        raise ValueError("more errors or slow requests than requests")
    return found


def _sum(one: Any, other: Any) -> Any:
    if not isinstance(one, dict):
        return one + other
    return one | {key: one[key] + each if key in one else each for key, each in other.items()}


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json(each) for key, each in value.items()}
    return value.to_json() if isinstance(value, _Counts) else value
