"""The decision about a rollout: a pure function of the plan and the counts.

It may be asked at every moment, after every request. A candidate that keeps all limits is rolled
back with a probability of at most ``1 - confidence``, over all criteria and stages together.
A stage ends when it has its least requests and time, would have found the harm that it is meant to
find (``harms``), and no criterion is suspect. To prove that a limit is *kept* takes far more
requests than most stages have. No stage waits for it; the reason names the limits that are proven
to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from modelport.gateway.rollout.plan import RolloutPlan, StageKind
from modelport.gateway.rollout.statistics import harms
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.rollout.statistics.evidence import (
    CriterionEvidence,
    CriterionStatus,
    criteria_of,
)

#: Criteria as a sentence about the candidate, for a person.
_CLAIMS = {
    "disagreement": "its answers disagree with the baseline's",
    "invalid": "its outputs are missing, misshapen or not finite",
    "errors": "it fails more often than the baseline",
    "error_share": "it fails too often",
    "class_changes": "too many of its decisions of a class are others",
    "class_shares": "the shares of its decisions differ from the baseline's",
    "scores": "its scores are shifted",
    "latency": "it is slower than the baseline",
    "p50_ms": "its p50 latency is above the limit",
    "p99_ms": "its p99 latency is above the limit",
    "accuracy": "its decisions are wrong more often than the baseline's",
    "precision": "its positive decisions are wrong more often than the baseline's",
    "recall": "it misses more positives than the baseline",
}


class RolloutVerdict(StrEnum):
    """Next steps of a rollout."""

    #: Continue the stage.
    HOLD = "hold"
    #: Begin the next stage.
    ADVANCE = "advance"
    #: The longest time has passed, and a person must decide.
    PAUSE = "pause"
    #: The candidate broke a limit.
    ROLLBACK = "rollback"
    #: The candidate takes the place of the baseline.
    PROMOTE = "promote"


@dataclass(frozen=True, slots=True)
class RolloutDecision:
    """A verdict with its grounds."""

    verdict: RolloutVerdict
    reason: str
    criteria: tuple[CriterionEvidence, ...] = ()
    #: Conditions of the stage that are not met, such as "42 more compared requests".
    missing: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The decision as JSON values."""
        return {
            "verdict": str(self.verdict),
            "reason": self.reason,
            "criteria": [each.to_json() for each in self.criteria],
            "missing": list(self.missing),
        }


def decide(
    plan: RolloutPlan, stage: int, counts: Sequence[StageCounts], seconds_in_stage: float
) -> RolloutDecision:
    """Decide about the rollout in its ``stage``, an index of ``plan.stages``.

    Args:
        counts: the counts of each stage from the first on; a stage without counts may be left out.
        seconds_in_stage: without the time in which the rollout was paused.
    """
    criteria = criteria_of(plan, counts[: stage + 1])
    broken = [each for each in criteria if each.status is CriterionStatus.BROKEN]
    if broken:
        reasons = (f"{each.name}: {_CLAIMS[each.name]} ({_observed(each)})" for each in broken)
        return RolloutDecision(RolloutVerdict.ROLLBACK, "; ".join(reasons), criteria)
    missing = tuple(_missing(plan, stage, counts, seconds_in_stage, criteria))
    if missing and seconds_in_stage >= plan.max_seconds:
        reason = f"{plan.max_seconds:g} s have passed, and the stage lacks {'; '.join(missing)}"
        return RolloutDecision(RolloutVerdict.PAUSE, reason, criteria, missing)
    if missing:
        reason = f"the stage lacks {'; '.join(missing)}"
        return RolloutDecision(RolloutVerdict.HOLD, reason, criteria, missing)
    evidence = _no_harm(criteria)
    if plan.manual:
        missing = ("promoted by a person",)
        reason = f"{evidence}; the stage waits for 'promote'"
        return RolloutDecision(RolloutVerdict.HOLD, reason, criteria, missing)
    is_last = stage + 1 == len(plan.stages)
    verdict = RolloutVerdict.PROMOTE if is_last else RolloutVerdict.ADVANCE
    return RolloutDecision(verdict, evidence, criteria)


def _missing(
    plan: RolloutPlan,
    number: int,
    counts: Sequence[StageCounts],
    seconds: float,
    criteria: Sequence[CriterionEvidence],
) -> list[str]:
    here = counts[number] if number < len(counts) else StageCounts()
    is_shadow = plan.stages[number].kind is StageKind.SHADOW
    had = here.compared if is_shadow else here.candidate.requests
    found = []
    if had < plan.min_requests:
        found.append(f"{plan.min_requests - had:,} more {_KINDS[is_shadow]}")
    if seconds < plan.min_seconds:
        found.append(f"{math.ceil(plan.min_seconds - seconds)} more seconds")
    if not found:
        found += _powerless(plan, number, counts)
    found += [
        f"certainty on whether {_CLAIMS[each.name]} ({_e_values(each)})"
        for each in criteria
        if each.status is CriterionStatus.SUSPECT
    ]
    return found


#: Requests by whether they are compared.
_KINDS = ("requests answered by the candidate", "compared requests")


def _powerless(plan: RolloutPlan, number: int, counts: Sequence[StageCounts]) -> Iterator[str]:
    """The requests without which harm would be found with less than the plan's ``power``."""
    lacking = sorted(harms.missing(plan, number, counts), key=lambda each: -each.requests)
    for compared in (True, False):
        these = [each for each in lacking if each.compared is compared]
        if these:
            names = ", ".join(dict.fromkeys(each.criterion for each in these))
            aim = f"to find harm with a probability of {100 * plan.power:g} % ({names})"
            yield f"{these[0].requests:,} more {_KINDS[compared]} {aim}"


def _observed(each: CriterionEvidence) -> str:
    if each.relative:
        estimate = each.interval.estimate
        shown = [] if estimate is None else [f"{estimate:.3g} times as often"]
        events = f"requests above the baseline's {each.part}" if each.part else "events"
        counted = f"{each.events:,} of {each.trials:,} {events} are the candidate's"
        return ", ".join([*shown, f"limit {each.limit:g}", counted, _e_values(each)])
    part = f" ({each.part})" if each.part else ""
    counted = f"{each.events:,} of {each.trials:,} requests{part}"
    return ", ".join([f"{counted}, limit {100 * each.limit:g} %", _e_values(each)])


def _e_values(each: CriterionEvidence) -> str:
    value = f"{math.exp(each.log_e_value):.3g}" if each.log_e_value < 700 else "beyond 1e+300"
    return f"e-value {value} of {1 / each.alpha:.3g}"


def _no_harm(criteria: Sequence[CriterionEvidence]) -> str:
    """The absence of harm, and the criteria whose limits are proven to be kept."""
    if not criteria:
        return "no criterion is enabled"
    kept = [each.name for each in criteria if each.status is CriterionStatus.KEPT]
    if len(kept) == len(criteria):
        return "every limit is proven to hold"
    return f"no limit is broken; proven to hold: {', '.join(kept) or 'none'}"
