"""The evidence about the criteria of a rollout: e-values, estimates and verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from modelport.gateway.rollout.plan import AssignmentKind, RolloutPlan
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.rollout.statistics.criteria import (
    RolloutCriterion,
    StageView,
    alphas_of,
    outcomes_tested,
    stages_of,
)
from modelport.gateway.rollout.statistics.sequential_tests import (
    OutcomeCounts,
    TrialCounts,
    confidence_sequence,
    log_e_value,
)

#: An e-value of 10 is strong evidence: no later stage begins before it is refuted.
SUSPICIOUS_E_VALUE = 10.0
#: Parts of a criterion whose limits can be proven to be kept.
_PROVABLE = ("", "p50", "p99")


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

    #: The trials of each stage, by which the limit is tested; of the part with most evidence.
    tested: Sequence[TrialCounts]
    #: The part that they are of, such as "p99", and the number of parts.
    part: str = ""
    parts: int = 1

    @cached_property
    def interval(self) -> CriterionInterval:
        """The estimate and its bounds, which hold at every moment at once."""
        # As a multiple of the limit if relative, otherwise the odds of the share.
        base = self.tested if self.relative else [each._replace(p0=0.5) for each in self.tested]
        found = confidence_sequence(base, self.alpha / self.parts)
        if found is None:
            return CriterionInterval(None, None, None)
        values = (each * self.limit if self.relative else _share_of(each) for each in found)
        return CriterionInterval(*map(_finite, values))

    def to_json(self) -> dict[str, Any]:
        """The evidence as JSON values."""
        figures = {each.name: getattr(self, each.name) for each in fields(CriterionFigures)}
        return figures | self.interval._asdict()


def criteria_of(plan: RolloutPlan, counts: Sequence[StageCounts]) -> tuple[CriterionEvidence, ...]:
    """The evidence about each criterion of the plan, from the counts of the stages so far."""
    stages = stages_of(plan, counts)
    # Sticky assignment: every process may have counted the same keys. A geometric mean of e-values
    # is at most their arithmetic mean, which is an e-value.
    sticky = plan.assignment is not AssignmentKind.REQUEST
    sources = max(1, sum(stage.counts.sources for stage in stages)) if sticky else 1
    return tuple(
        _evidence(
            criterion,
            stages,
            alpha=alpha,
            sources=sources if criterion.relative else 1,
            proof=1 - plan.limits.confidence,
            most=len(plan.stages),
        )
        for criterion, alpha in alphas_of(plan)
    )


def _evidence(
    criterion: RolloutCriterion,
    stages: Sequence[StageView],
    *,
    alpha: float,
    sources: int,
    proof: float,
    most: int,
) -> CriterionEvidence:
    parts = list(zip(*(criterion.trials(criterion, stage) for stage in stages), strict=True))
    at = _worst(parts)
    shown = _shared(parts[at], sources) if parts else ()
    counted = [outcomes_tested(criterion, stage) for stage in stages]
    if sources > 1:
        counted = [OutcomeCounts(p0, tuple(one / sources for one in e)) for p0, e in counted]
    harm = log_e_value(counted, criterion.test, stages=most)
    kept = _kept(criterion, parts, sources)
    return CriterionEvidence(
        criterion.name,
        criterion.relative,
        criterion.limit,
        _status(harm, kept, alpha, proof),
        events=round(sources * sum(each.successes for each in shown)),
        trials=round(sources * sum(each.trials for each in shown)),
        tested=shown,
        part=criterion.parts[at],
        parts=len(criterion.parts),
        alpha=alpha,
        log_e_value=harm,
        log_e_value_kept=kept,
    )


def _shared(counted: Sequence[TrialCounts], sources: int) -> Sequence[TrialCounts]:
    """``counted``, divided among the processes that may have counted the same keys."""
    if sources == 1:
        return counted
    return tuple(TrialCounts(p0, one / sources, every / sources) for p0, one, every in counted)


def _worst(parts: Sequence[Sequence[TrialCounts]]) -> int:
    """The part that most speaks against the candidate, by standard deviations."""
    if len(parts) < 2:
        return 0
    p0, successes, trials = np.moveaxis(np.array(parts, np.float64), 2, 0)
    variance = (trials * p0 * (1 - p0)).sum(axis=1)
    above = (successes - trials * p0).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        deviations = np.where(variance > 0, above / np.sqrt(variance), -np.inf)
    return len(parts) - 1 - int(np.argmax(deviations[::-1]))


def _kept(
    criterion: RolloutCriterion, parts: Sequence[Sequence[TrialCounts]], sources: int
) -> float:
    """The evidence that the limit is kept in each part for which that can be proven."""
    found = [
        log_e_value(_shared(counted, sources), criterion.part_test, opposite=True)
        for part, counted in zip(criterion.parts, parts, strict=False)
        if part in _PROVABLE
    ]
    return min(found, default=0.0)


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
