"""The harm that each stage of a rollout is meant to find, and the requests that this takes.

A stage is meant to find harm that would hit more than ``HIT`` of all requests in the next one: the
larger the next share, the smaller the harm, down to ``LEAST_EXCESS``. A candidate that is slower in
general harms nobody while its share is small, so that is looked for before it gets half of the
requests.

A sticky assignment counts keys, and nobody knows how many will come: there, only the comparison of
answers and absolute limits are waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from modelport.gateway.rollout.plan import AssignmentKind, RolloutPlan, StageKind
from modelport.gateway.rollout.statistics import latency_ranks
from modelport.gateway.rollout.statistics.counts import CLASSES, StageCounts
from modelport.gateway.rollout.statistics.criteria import (
    RolloutCriterion,
    StageView,
    alphas_of,
    attributed,
    stages_of,
)
from modelport.gateway.rollout.statistics.power import HarmfulStage, missing_requests
from modelport.gateway.rollout.statistics.sequential_tests import FIRST_WEIGHT, Floats

#: Share of all requests that harm may hit in the next stage: by wrong answers and errors, and by
#: latencies above the baseline's p99.
HIT, SLOW_HIT = 0.0025, 0.01
#: Harm to the candidate's requests beyond the limit, at least and at most.
LEAST_EXCESS, LARGEST_EXCESS = 0.005, 0.25
#: A shadow stage harms nobody, and is there to find this share of wrong answers, and of errors.
SHADOW_EXCESS, SHADOW_ERRORS = 0.009, 0.02
#: Harm beyond a limit is at least this multiple of it.
LEAST_RATIO = 1.5
#: A p99 that is 50 % higher has at least this many times as many requests above the baseline's,
#: for tails that are as heavy as a Pareto distribution of shape 2.5.
SLOW_RATIO, LARGEST_SLOW_RATIO = 2.2, 50.0
#: Everything 5 % slower than allowed, in standard deviations of the latency's logarithm if that is
#: 0.6; and the share of the candidate before which it must have been found.
SHIFT, SHIFT_SHARE = 0.08, 0.5
#: Changed decisions of a retrained candidate beyond the limit.
CHANGES = 0.2
#: Stands for a limit of 0.
_LEAST_LIMIT = 1e-6

Harm = Callable[[StageView], HarmfulStage]


@dataclass(frozen=True)
class MissingRequests:
    """Requests that a stage lacks to have found a harm; compared ones, or the candidate's."""

    criterion: str
    compared: bool
    requests: int


def missing(
    plan: RolloutPlan, stage: int, counts: Sequence[StageCounts]
) -> Iterator[MissingRequests]:
    """The requests that the last of ``counts``, those of ``stage``, lacks for each criterion."""
    if not plan.power:
        return
    views = stages_of(plan, counts[: stage + 1])
    following = plan.stages[stage + 1].share if stage + 1 < len(plan.stages) else 1.0
    in_shadow = views[-1].plan.kind is StageKind.SHADOW
    largest = SHADOW_EXCESS if in_shadow else LARGEST_EXCESS
    excess = min(max(HIT / following, LEAST_EXCESS), largest)
    parts = FIRST_WEIGHT if len(plan.stages) > 1 else 1.0
    for criterion, alpha in alphas_of(plan):
        if criterion.relative and plan.assignment is not AssignmentKind.REQUEST:
            continue
        compared = criterion.name in _OF_PAIRS
        if compared and not (in_shadow or plan.pair):
            continue
        for harm in _harms(criterion, plan, views, excess, following):
            stages = [harm(view) for view in views]
            lacking = missing_requests(stages, criterion.test, parts * alpha, plan.power)
            if lacking:
                yield MissingRequests(criterion.name, compared or in_shadow, lacking)


_OF_PAIRS = ("disagreement", "invalid", "class_changes")


def _harms(
    criterion: RolloutCriterion,
    plan: RolloutPlan,
    views: Sequence[StageView],
    excess: float,
    following: float,
) -> Iterator[Harm]:
    limits, name = plan.limits, criterion.name
    harmful = beyond(criterion.limit, excess)
    if name == "disagreement":
        yield partial(_of_pairs, criterion.limit, (harmful, 1 - harmful))
    elif name == "invalid":
        # An invalid answer disagrees, too.
        if limits.max_disagreement is None or limits.max_disagreement > criterion.limit:
            yield partial(_of_pairs, criterion.limit, (harmful, 1 - harmful))
    elif name == "class_changes":
        harmful, rates = beyond(criterion.limit, CHANGES), np.zeros(2 * CLASSES)
        rates[0], rates[CLASSES] = harmful, 1 - harmful
        yield partial(_of_pairs, criterion.limit, rates.tolist())
    elif name in ("error_share", "p50_ms", "p99_ms"):
        yield partial(_of_candidate, criterion, (harmful, 1 - harmful))
    elif name == "errors":
        requests = sum(view.counts.baseline.requests for view in views)
        rate = sum(view.counts.baseline.errors for view in views) / max(1, requests)
        if views[-1].plan.kind is StageKind.SHADOW:
            excess = SHADOW_ERRORS
        yield partial(_of_errors, criterion, rate, beyond(criterion.limit * rate, excess))
    elif name == "latency":
        body, *_, tail = latency_ranks.allowed_regressions(limits)  # type: ignore[misc]
        if not math.isinf(tail):
            excess = SLOW_HIT / following
            ratio = min(max(SLOW_RATIO, 1 + 100 * excess), LARGEST_SLOW_RATIO)
            yield partial(_of_latency, criterion, latency_ranks.heavier(0.99, ratio))
        if not math.isinf(body) and following >= SHIFT_SHARE:
            yield partial(_of_latency, criterion, latency_ranks.shifted(SHIFT))


def beyond(limit: float, excess: float) -> float:
    """A harmful rate, where ``limit`` is allowed."""
    return min(max(limit + excess, LEAST_RATIO * limit), 0.999)


def _of_pairs(limit: float, rates: Sequence[float], view: StageView) -> HarmfulStage:
    return HarmfulStage(max(limit, _LEAST_LIMIT), view.counts.compared, rates)


def _of_candidate(
    criterion: RolloutCriterion, rates: Sequence[float], view: StageView
) -> HarmfulStage:
    (trials,) = criterion.trials(criterion, view)
    return HarmfulStage(max(criterion.limit, _LEAST_LIMIT), trials.trials, rates)


def _of_errors(
    criterion: RolloutCriterion, rate: float, harmful: float, view: StageView
) -> HarmfulStage:
    """By copy, or request of the candidate: its own errors, and the baseline's meanwhile."""
    (trials,), counts = criterion.trials(criterion, view), view.counts
    if view.plan.kind is StageKind.SHADOW:
        copies = counts.compared + counts.failed
        return HarmfulStage(trials.p0, copies, (harmful, rate / view.plan.share))
    share = view.new_share
    return HarmfulStage(trials.p0, counts.candidate.requests, (harmful, rate * (1 - share) / share))


def _of_latency(criterion: RolloutCriterion, ranks: Floats, view: StageView) -> HarmfulStage:
    """By request of the candidate: its own rank, and those of the baseline's meanwhile."""
    p0, share = attributed(criterion, view).p0, view.new_share
    ranked = share * sum(each.total for each in view.counts.ranks.values())
    baselines = latency_ranks.RANK_SHARES * (1 - share) / share
    return HarmfulStage(p0, ranked, (*ranks, *baselines))
