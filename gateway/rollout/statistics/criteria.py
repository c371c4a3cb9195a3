"""Criteria of a rollout: a limit of the plan, the trials that test it, and the evidence.

Three kinds of trials are counted over all stages, and one e-value continues through them:

- **Shares**: each of the candidate's answers breaks the limit or does not, and ``p0`` is the share
  that the limit allows. Pairs of answers are compared this way, and absolute limits tested.
- **Attributions**: each event that hits either side is the candidate's or is not. If the candidate
  gets a share s of the requests and may have r times the baseline's rate of events, ``p0`` is
  ``s r / (s r + 1 - s)``. A bad minute hits both sides alike, and cancels. At a share of 1 no event
  tells anything. Latencies are attributed by their rank (``latency_ranks``).
- **Moves** of a retrained candidate: pairs of answers whose decision or score moves one way, less
  those that move back, as a share of all pairs (``retrained``).

The error probability of the plan is divided among the criteria (Bonferroni) by ``_WEIGHTS``. It is
not divided among the stages, because the e-value continues from stage to stage. Within a criterion,
the e-values of its alternatives are averaged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from modelport.gateway.rollout.plan import (
    ComparisonKind,
    RolloutPlan,
    RolloutStage,
    StageKind,
)
from modelport.gateway.rollout.statistics import latency_ranks, retrained
from modelport.gateway.rollout.statistics.counts import (
    CLASSES,
    RANKS,
    SCORE_BINS,
    Attribution,
    StageCounts,
)
from modelport.gateway.rollout.statistics.latency_ranks import LATENCY, LEVELS
from modelport.gateway.rollout.statistics.sequential_tests import (
    LARGE_CHANGES,
    SMALL_CHANGES,
    OutcomeCounts,
    SequentialTest,
    TrialCounts,
    outcomes_of,
)

#: Parts of the error probability; 1 if not named. What needs most data gets most: small changes of
#: the latencies, and rare disagreements.
_WEIGHTS = {"disagreement": 8, "errors": 4, "latency": 8}
#: A stage that says nothing about a criterion.
_NOTHING = TrialCounts(1.0, 0, 0)
_NONE = Attribution()


class StageView(NamedTuple):
    """One stage of the plan, and its counts."""

    plan: RolloutStage
    counts: StageCounts
    #: The probability that an event of either side is the candidate's, if both have them alike.
    new_share: float


class RolloutCriterion(NamedTuple):
    """A limit, and the trials that test it."""

    name: str
    relative: bool
    limit: float
    #: The trials of a stage, of each part of the criterion.
    trials: Callable[[RolloutCriterion, StageView], Sequence[TrialCounts]]
    test: SequentialTest = LARGE_CHANGES
    #: The outcomes that are tested; None: the trials of the only part.
    outcomes: Callable[[RolloutCriterion, StageView], OutcomeCounts] | None = None
    #: Names of the parts.
    parts: Sequence[str] = ("",)

    @property
    def part_test(self) -> SequentialTest:
        """The test of one part alone."""
        return self.test if self.outcomes is None else SMALL_CHANGES


def stages_of(plan: RolloutPlan, counts: Sequence[StageCounts]) -> list[StageView]:
    """The stages that have counts."""
    return [
        StageView(stage, here, plan.new_share(number))
        for number, (stage, here) in enumerate(zip(plan.stages, counts, strict=False))
    ]


def alphas_of(plan: RolloutPlan) -> Iterator[tuple[RolloutCriterion, float]]:
    """The criteria that are switched on, each with its part of the error probability."""
    criteria = list(_criteria(plan))
    weights = [_WEIGHTS.get(each.name, 1) for each in criteria]
    for criterion, weight in zip(criteria, weights, strict=True):
        yield criterion, (1 - plan.limits.confidence) * weight / sum(weights)


def _criteria(plan: RolloutPlan) -> Iterator[RolloutCriterion]:
    """The criteria that are switched on."""
    limits = plan.limits
    for name, relative, limit, trials in (
        ("disagreement", False, limits.max_disagreement, _disagreements),
        ("invalid", False, limits.max_invalid, _invalid),
        ("errors", True, limits.max_error_ratio, _errors),
        ("error_share", False, limits.max_error_share, _error_share),
    ):
        if limit is not None:
            yield RolloutCriterion(name, relative, limit, trials)
    if plan.comparison is ComparisonKind.DECISIONS:
        yield from _comparisons_of_decisions(plan)
    if latency_ranks.allowed_regressions(limits) is not None:
        names = [f"p{100 * level:g}" for level in LEVELS]
        yield RolloutCriterion("latency", True, 1.0, _slow, LATENCY, _ranks, names)
    for name, beyond in (("p50_ms", 0.5), ("p99_ms", 0.01)):
        if getattr(limits, name) is not None:
            yield RolloutCriterion(name, False, beyond, _over_limit)
    if (limit := limits.max_quality_ratio) is not None:
        for name in ("accuracy", "precision", "recall"):
            yield RolloutCriterion(name, True, limit, _wrong, SMALL_CHANGES)


def _comparisons_of_decisions(plan: RolloutPlan) -> Iterator[RolloutCriterion]:
    classes = [f"class {number}" for number in range(CLASSES)]
    if (limit := plan.limits.max_class_changes) is not None:
        yield RolloutCriterion(
            "class_changes", False, limit, _class_changes, retrained.CLASS_CHANGES,
            _class_outcomes, classes,
        )  # fmt: skip
    for name, limit, parts in (
        ("class_shares", plan.limits.max_class_shift, [*classes, *classes]),
        ("scores", plan.limits.max_score_shift, ["up", "down"]),
    ):
        if limit is not None:
            test = retrained.net_moves(name, limit)
            names = np.repeat(parts, len(retrained.moves(name)[0]) // len(parts)).tolist()
            yield RolloutCriterion(name, False, limit, _moves, test, _pairs, names)


def _disagreements(criterion: RolloutCriterion, stage: StageView) -> Sequence[TrialCounts]:
    return (TrialCounts(criterion.limit, stage.counts.disagreed, stage.counts.compared),)


def _invalid(criterion: RolloutCriterion, stage: StageView) -> Sequence[TrialCounts]:
    return (TrialCounts(criterion.limit, stage.counts.invalid, stage.counts.compared),)


def _errors(criterion: RolloutCriterion, stage: StageView) -> Sequence[TrialCounts]:
    if stage.plan.kind is StageKind.CANARY:
        return (attributed(criterion, stage, stage.counts.errors),)
    # Any of the baseline's requests may fail, but only a share of them is copied, so that the
    # odds of a failure of the candidate are share * ratio to 1.
    odds = stage.plan.share * criterion.limit
    failed = stage.counts.failed
    return (TrialCounts(odds / (1 + odds), failed, failed + stage.counts.baseline.errors),)


def _error_share(criterion: RolloutCriterion, stage: StageView) -> Sequence[TrialCounts]:
    if stage.plan.kind is StageKind.CANARY:
        candidate = stage.counts.candidate
        return (TrialCounts(criterion.limit, candidate.errors, candidate.requests),)
    failed = stage.counts.failed
    return (TrialCounts(criterion.limit, failed, failed + stage.counts.compared),)


def _slow(criterion: RolloutCriterion, stage: StageView) -> Sequence[TrialCounts]:
    """The requests slower than each level."""
    p0, candidates, totals = _ranked(criterion, stage)
    slow = zip(accumulate(candidates[:0:-1]), accumulate(totals[:0:-1]), strict=True)
    return [TrialCounts(p0, *each) for each in slow][::-1]


def _ranks(criterion: RolloutCriterion, stage: StageView) -> OutcomeCounts:
    p0, candidates, totals = _ranked(criterion, stage)
    return OutcomeCounts(p0, (*candidates, *map(operator.sub, totals, candidates)))


def _ranked(criterion: RolloutCriterion, stage: StageView) -> tuple[float, list[int], list[int]]:
    """The hypothesis, and the requests of each rank: the candidate's, and all."""
    p0 = attributed(criterion, stage).p0
    found = [stage.counts.ranks.get(rank, _NONE) for rank in range(RANKS)] if p0 < 1 else []
    found += [_NONE] * (RANKS - len(found))
    return p0, [each.candidate for each in found], [each.total for each in found]


def _over_limit(criterion: RolloutCriterion, stage: StageView) -> Sequence[TrialCounts]:
    candidate = stage.counts.candidate
    over = candidate.over_limit.get(criterion.name, 0)
    return (TrialCounts(criterion.limit, over, candidate.requests),)


def _wrong(criterion: RolloutCriterion, stage: StageView) -> Sequence[TrialCounts]:
    return (attributed(criterion, stage, stage.counts.wrong.get(criterion.name, _NONE)),)


def _class_changes(criterion: RolloutCriterion, stage: StageView) -> Sequence[TrialCounts]:
    pairs = np.reshape(_pairs(criterion, stage).counts, (CLASSES, CLASSES))
    every = pairs.sum(axis=1)
    changed = every - pairs.diagonal()
    return [
        TrialCounts(criterion.limit, float(one), float(all_))
        for one, all_ in zip(changed, every, strict=True)
    ]


def _class_outcomes(criterion: RolloutCriterion, stage: StageView) -> OutcomeCounts:
    found = _class_changes(criterion, stage)
    changed = [each.successes for each in found]
    return OutcomeCounts(criterion.limit, (*changed, *(e.trials - e.successes for e in found)))


def _pairs(criterion: RolloutCriterion, stage: StageView) -> OutcomeCounts:
    counts = stage.counts
    if criterion.name == "scores":
        return OutcomeCounts(0.5, retrained.dense(counts.score_pairs, SCORE_BINS))
    return OutcomeCounts(0.5, retrained.dense(counts.class_pairs, CLASSES))


def _moves(criterion: RolloutCriterion, stage: StageView) -> Sequence[TrialCounts]:
    return _moved(criterion.name, criterion.limit, _pairs(criterion, stage).counts)


@lru_cache
def _moved(name: str, limit: float, pairs: tuple[float, ...]) -> Sequence[TrialCounts]:
    moved = retrained.moves(name)[0] @ np.array(pairs)
    return [TrialCounts(limit, each, sum(pairs)) for each in moved.tolist()]


def attributed(
    criterion: RolloutCriterion, stage: StageView, events: Attribution = _NONE
) -> TrialCounts:
    """Events of either side; the candidate may have ``criterion.limit`` times as many."""
    # In a shadow stage, only the baseline's answers count and get labels.
    if stage.plan.kind is StageKind.SHADOW or stage.new_share >= 1:
        return _NOTHING
    odds = stage.new_share * criterion.limit / (1 - stage.new_share)
    return TrialCounts(odds / (1 + odds), events.candidate, events.total)


def outcomes_tested(criterion: RolloutCriterion, stage: StageView) -> OutcomeCounts:
    """The outcomes that the test of ``criterion`` counts in ``stage``."""
    if criterion.outcomes is not None:
        return criterion.outcomes(criterion, stage)
    return outcomes_of(criterion.trials(criterion, stage)[0])
