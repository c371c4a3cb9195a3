"""The decision about a rollout: a pure function of the plan and the counts.

It may be asked at every moment, after every request. A candidate that keeps all limits is rolled
back with a probability of at most ``1 - confidence``, over all criteria and stages together.
A stage ends when it has its least requests and time, and no criterion is suspect. To prove that a
limit is *kept* takes far more requests than most stages have. No stage waits for it; the reason
names the limits that are proven to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from modelport.gateway.rollout.plan import RolloutPlan, RolloutStage, StageKind
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.rollout.statistics.criteria import (
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
    "p50": "its p50 latency is higher than the baseline's",
    "p99": "its p99 latency is higher than the baseline's",
    "first_byte_p50": "its p50 time to first byte is higher than the baseline's",
    "first_byte_p99": "its p99 time to first byte is higher than the baseline's",
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
    here = counts[stage] if stage < len(counts) else StageCounts()
    missing = tuple(_missing(plan, plan.stages[stage], here, seconds_in_stage, criteria))
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
    stage: RolloutStage,
    counts: StageCounts,
    seconds: float,
    criteria: Sequence[CriterionEvidence],
) -> list[str]:
    is_shadow = stage.kind is StageKind.SHADOW
    had = counts.compared if is_shadow else counts.candidate.requests
    found = []
    if had < plan.min_requests:
        kind = "compared requests" if is_shadow else "requests answered by the candidate"
        found.append(f"{plan.min_requests - had:,} more {kind}")
    if seconds < plan.min_seconds:
        found.append(f"{math.ceil(plan.min_seconds - seconds)} more seconds")
    found += [
        f"certainty on whether {_CLAIMS[each.name]} ({_e_values(each)})"
        for each in criteria
        if each.status is CriterionStatus.SUSPECT
    ]
    return found


def _observed(each: CriterionEvidence) -> str:
    if each.relative:
        estimate = each.interval.estimate
        shown = [] if estimate is None else [f"{estimate:.3g} times as often"]
        counted = f"{each.events:,} of {each.trials:,} events are the candidate's"
        return ", ".join([*shown, f"limit {each.limit:g}", counted, _e_values(each)])
    counted = f"{each.events:,} of {each.trials:,} requests"
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
