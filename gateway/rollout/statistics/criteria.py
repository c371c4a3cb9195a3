"""Criteria of a rollout: a limit of the plan, the trials that test it, and the evidence.

Two kinds of trials are counted over all stages, and one e-value continues through them:

- **Shares**: each of the candidate's answers breaks the limit or does not, and ``p0`` is the share
  that the limit allows. Pairs of answers are compared this way, and absolute limits tested.
- **Attributions**: each event that hits either side is the candidate's or is not. If the candidate
  gets a share s of the requests and may have r times the baseline's rate of events, ``p0`` is
  ``s r / (s r + 1 - s)``. A bad minute hits both sides alike, and cancels. At a share of 1 no event
  tells anything.

The error probability of the plan is divided among the criteria (Bonferroni) by ``_WEIGHTS``. It is
not divided among the stages, because the e-value continues from stage to stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from modelport.gateway.rollout.plan import (
    AssignmentKind,
    RolloutLimits,
    RolloutPlan,
    RolloutStage,
    StageKind,
)
from modelport.gateway.rollout.statistics.counts import Attribution, StageCounts
from modelport.gateway.rollout.statistics.sequential_tests import (
    LARGE_CHANGES,
    SMALL_CHANGES,
    TrialCounts,
    confidence_sequence,
    log_e_value,
)

#: An e-value of 10 is strong evidence: no later stage begins before it is refuted.
SUSPICIOUS_E_VALUE = 10.0
#: Parts of the error probability; 1 if not named. What needs most data gets most: the tail of the
#: latencies, with an event in a hundred requests, and rare disagreements.
_WEIGHTS = {"disagreement": 8, "errors": 2, "p99": 12, "first_byte_p99": 12}
#: Quantiles that are compared with the baseline's.
_QUANTILES = ("p50", "p99", "first_byte_p50", "first_byte_p99")


#: A stage that says nothing about a criterion.
_NOTHING = TrialCounts(1.0, 0, 0)


class CriterionStatus(StrEnum):
    """The verdict about one criterion."""

    #: The limit is kept: the opposite hypothesis is refuted.
    KEPT = "kept"
    #: Neither is refuted.
    OPEN = "open"
    #: There is strong evidence against the candidate, short of a proof.
    SUSPECT = "suspect"
    #: The limit is broken.
    BROKEN = "broken"


class CriterionInterval(NamedTuple):
    """An estimate with its bounds: None without a trial, and where no finite bound is known."""

    estimate: float | None
    lower: float | None
    upper: float | None


@dataclass(frozen=True)
class CriterionFigures:
    """The figures of one criterion, without its estimate.

    A ``relative`` criterion estimates the candidate's rate of events as a multiple of the
    baseline's; any other a share of requests.
    """

    name: str
    relative: bool
    limit: float
    status: CriterionStatus
    #: Events that count against the candidate, among ``trials``.
    events: int
    trials: int
    #: Part of the error probability: the limit is broken at an e-value of ``1 / alpha``.
    alpha: float
    log_e_value: float
    #: The same of the evidence that the limit is kept.
    log_e_value_kept: float


@dataclass(frozen=True)
class CriterionEvidence(CriterionFigures):
    """One criterion with everything that was observed about it.

    The estimate is computed when it is read: decisions are made several times a second, between
    the requests of clients, and do not need it.
    """

    #: The trials of each stage, by which the limit is tested.
    tested: Sequence[TrialCounts]

    @cached_property
    def interval(self) -> CriterionInterval:
        """The estimate and its bounds, which hold at every moment at once."""
        # As a multiple of the limit if relative, otherwise the odds of the share.
        base = self.tested if self.relative else [each._replace(p0=0.5) for each in self.tested]
        found = confidence_sequence(base, self.alpha)
        if found is None:
            return CriterionInterval(None, None, None)
        values = (each * self.limit if self.relative else _share_of(each) for each in found)
        return CriterionInterval(*map(_finite, values))

    def to_json(self) -> dict[str, Any]:
        """The evidence as JSON values."""
        figures = {each.name: getattr(self, each.name) for each in fields(CriterionFigures)}
        return figures | self.interval._asdict()


class _Stage(NamedTuple):
    plan: RolloutStage
    counts: StageCounts
    #: The probability that an event of either side is the candidate's, if both have them alike.
    new_share: float


class _Criterion(NamedTuple):
    name: str
    relative: bool
    limit: float
    trials: Callable[[_Criterion, _Stage], TrialCounts]
    emphasis: float = LARGE_CHANGES


def criteria_of(plan: RolloutPlan, counts: Sequence[StageCounts]) -> tuple[CriterionEvidence, ...]:
    """The evidence about each criterion of the plan, from the counts of the stages so far."""
    stages = [
        _Stage(stage, here, plan.new_share(number))
        for number, (stage, here) in enumerate(zip(plan.stages, counts, strict=False))
    ]
    criteria = list(_criteria(plan.limits))
    weights = [_WEIGHTS.get(each.name, 1) for each in criteria]
    error = 1 - plan.limits.confidence
    # Sticky assignment: every process may have counted the same keys. A geometric mean of e-values
    # is at most their arithmetic mean, which is an e-value.
    sticky = plan.assignment is not AssignmentKind.REQUEST
    sources = max(1, sum(stage.counts.sources for stage in stages)) if sticky else 1
    return tuple(
        _evidence(
            criterion,
            [criterion.trials(criterion, stage) for stage in stages],
            alpha=error * weight / sum(weights),
            parts=sources if criterion.relative else 1,
            proof=error,
            stages=len(plan.stages),
        )
        for criterion, weight in zip(criteria, weights, strict=True)
    )


def _criteria(limits: RolloutLimits) -> Iterator[_Criterion]:
    """The criteria that are switched on."""
    for name, relative, limit, trials in (
        ("disagreement", False, limits.max_disagreement, _disagreements),
        ("invalid", False, limits.max_invalid, _invalid),
        ("errors", True, limits.max_error_ratio, _errors),
        ("error_share", False, limits.max_error_share, _error_share),
    ):
        if limit is not None:
            yield _Criterion(name, relative, limit, trials)
    for name in _QUANTILES:
        if getattr(limits, f"max_{name}_regression") is not None:
            yield _Criterion(name, True, 1.0, _slow, SMALL_CHANGES)
    for name, beyond in (("p50_ms", 0.5), ("p99_ms", 0.01)):
        if getattr(limits, name) is not None:
            yield _Criterion(name, False, beyond, _over_limit)
    if (limit := limits.max_quality_ratio) is not None:
        for name in ("accuracy", "precision", "recall"):
            yield _Criterion(name, True, limit, _wrong, SMALL_CHANGES)


def _disagreements(criterion: _Criterion, stage: _Stage) -> TrialCounts:
    return TrialCounts(criterion.limit, stage.counts.disagreed, stage.counts.compared)


def _invalid(criterion: _Criterion, stage: _Stage) -> TrialCounts:
    return TrialCounts(criterion.limit, stage.counts.invalid, stage.counts.compared)


def _errors(criterion: _Criterion, stage: _Stage) -> TrialCounts:
    if stage.plan.kind is StageKind.CANARY:
        return _attributed(criterion, stage, stage.counts.errors)
    # Any of the baseline's requests may fail, but only a share of them is copied, so that the
    # odds of a failure of the candidate are share * ratio to 1.
    odds = stage.plan.share * criterion.limit
    failed = stage.counts.failed
    return TrialCounts(odds / (1 + odds), failed, failed + stage.counts.baseline.errors)


def _error_share(criterion: _Criterion, stage: _Stage) -> TrialCounts:
    if stage.plan.kind is StageKind.CANARY:
        candidate = stage.counts.candidate
        return TrialCounts(criterion.limit, candidate.errors, candidate.requests)
    failed = stage.counts.failed
    return TrialCounts(criterion.limit, failed, failed + stage.counts.compared)


def _slow(criterion: _Criterion, stage: _Stage) -> TrialCounts:
    return _attributed(criterion, stage, stage.counts.slow.get(criterion.name))


def _over_limit(criterion: _Criterion, stage: _Stage) -> TrialCounts:
    candidate = stage.counts.candidate
    over = candidate.over_limit.get(criterion.name, 0)
    return TrialCounts(criterion.limit, over, candidate.requests)


def _wrong(criterion: _Criterion, stage: _Stage) -> TrialCounts:
    return _attributed(criterion, stage, stage.counts.wrong.get(criterion.name))


def _attributed(criterion: _Criterion, stage: _Stage, found: Attribution | None) -> TrialCounts:
    share, events = stage.new_share, found or Attribution()
    # In a shadow stage, only the baseline's answers count and get labels.
    if stage.plan.kind is not StageKind.CANARY or share >= 1:
        return _NOTHING
    odds = share * criterion.limit / (1 - share)
    return TrialCounts(odds / (1 + odds), events.candidate, events.total)


def _evidence(
    criterion: _Criterion,
    trials: Sequence[TrialCounts],
    *,
    alpha: float,
    parts: int,
    proof: float,
    stages: int,
) -> CriterionEvidence:
    tested = trials
    if parts > 1:
        tested = [TrialCounts(p0, events / parts, total / parts) for p0, events, total in trials]
    harm = log_e_value(tested, emphasis=criterion.emphasis, stages=stages)
    kept = log_e_value(tested, emphasis=criterion.emphasis, opposite=True)
    return CriterionEvidence(
        criterion.name,
        criterion.relative,
        criterion.limit,
        _status(harm, kept, alpha, proof),
        events=int(sum(each.successes for each in trials)),
        trials=int(sum(each.trials for each in trials)),
        tested=tested,
        alpha=alpha,
        log_e_value=harm,
        log_e_value_kept=kept,
    )


def _status(harm: float, kept: float, alpha: float, proof: float) -> CriterionStatus:
    if harm >= -math.log(alpha):
        return CriterionStatus.BROKEN
    if harm >= math.log(SUSPICIOUS_E_VALUE):
        return CriterionStatus.SUSPECT
    # All criteria must be kept to pass, so that nothing is divided here (Berger 1982).
    return CriterionStatus.KEPT if kept >= -math.log(proof) else CriterionStatus.OPEN


def _share_of(odds: float) -> float:
    return odds / (1 + odds) if math.isfinite(odds) else 1.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
