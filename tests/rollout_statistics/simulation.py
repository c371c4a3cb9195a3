"""Simulated rollouts: traffic as the gate's simulated machines have it, and every decision on it.

A moment belongs to all requests in it: the machine's speed wanders and drifts, and in bursts of its
neighbours everything is slower, some requests wait, and errors are twenty times as frequent. Heavy
tails (Pareto, shape 2.5) belong to each request. Both sides are warm, so the gate's differences
between process starts are left out.

The tests are looked at after every request. An e-value grows with events of the candidate only, so
that no other moment needs to be computed. Seeded throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from modelport.gateway.rollout.plan import AssignmentKind, RolloutLimits, RolloutPlan, StageKind
from modelport.gateway.rollout.statistics.counts import Attribution, StageCounts
from modelport.gateway.rollout.statistics.criteria import criteria_of
from modelport.gateway.rollout.statistics.decision import RolloutVerdict, decide
from modelport.gateway.rollout.statistics.sequential_tests import (
    FIRST_WEIGHT,
    LARGE_CHANGES,
    ODDS_RATIOS,
    SMALL_CHANGES,
    weights_of,
)
from modelport.gateway.rollout.traffic.request_events import BLOCK, WINDOW
from tests.gateway.rollout import plans
from tests.loadtests.gating import simulation as gating
from tests.loadtests.gating.simulation import SHARED, SIZES, Machine

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

#: Different requests of the traffic.
REQUESTS = 512
#: Part of the slowest requests whose latency ``SimulatedCandidate.tail`` changes; the p99 is among
#: them.
TAIL = 0.03
#: Errors of the baseline, and in bursts as a multiple.
ERRORS, ERRORS_IN_BURSTS = 0.001, 20.0
#: Disagreements of two correct answers, and wrong decisions by later labels of the baseline.
DISAGREEMENTS, WRONG = 0.0005, 0.05


@dataclass(frozen=True)
class SimulatedCandidate:
    """The differences of the candidate from the baseline."""

    name: str = "identical"
    #: The slowest 3 % of the requests take that many times as long.
    tail: float = 1.0
    everything: float = 1.0
    error_ratio: float = 1.0
    disagreement: float = DISAGREEMENTS
    invalid: float = 0.0
    wrong_ratio: float = 1.0


LIMITS = RolloutLimits()
IDENTICAL = SimulatedCandidate()
#: Exactly at the limit of every criterion at once.
AT_EVERY_LIMIT = SimulatedCandidate(
    "at every limit",
    everything=1 + (LIMITS.max_p99_regression or 0),
    error_ratio=LIMITS.max_error_ratio or 1,
    disagreement=LIMITS.max_disagreement or 0,
    invalid=LIMITS.max_invalid or 0,
    wrong_ratio=LIMITS.max_quality_ratio or 1,
)


class BrokenCriterion(NamedTuple):
    """The moment at which a criterion was broken: the number of the request, and of the trial."""

    request: int
    trial: int


class Trials(NamedTuple):
    """The trials of one criterion, in order."""

    #: The number of the request, its stage, and whether it counts against the candidate.
    request: Counts
    stage: Counts
    success: Flags
    #: By stage.
    p0: Floats
    emphasis: float = LARGE_CHANGES


@dataclass(frozen=True)
class SimulatedTraffic:
    """Requests [n] as both sides would answer them, each with its side and stage."""

    key: Counts
    #: Where the key lies; the candidate has it if its share is larger.
    position: Floats
    stage: Counts
    is_candidate: Flags
    baseline: Floats
    candidate: Floats
    baseline_fails: Flags
    candidate_fails: Flags
    #: Copies in shadow that disagree, and those with invalid outputs; False without a copy.
    is_compared: Flags
    disagrees: Flags
    is_invalid: Flags
    #: Wrong decisions, where the label came.
    baseline_wrong: Flags
    candidate_wrong: Flags

    @cached_property
    def latency(self) -> Floats:
        """Seconds until the side that answered did so, far above ``min_regression_ms``."""
        return np.where(self.is_candidate, self.candidate, self.baseline)

    @cached_property
    def fails(self) -> Flags:
        return np.where(self.is_candidate, self.candidate_fails, self.baseline_fails)


@dataclass(frozen=True)
class SimulatedRollout:
    """A rollout and the requests in each of its stages."""

    candidate: SimulatedCandidate = IDENTICAL
    machine: Machine = SHARED
    plan: RolloutPlan = field(default_factory=lambda: plans.plan(id=32 * "0", shadow=0.1))
    requests: tuple[int, ...] = 5 * (60_000,)
    #: Requests whose label is known later.
    labelled: float = 0.02
    #: Errors of the baseline.
    errors: float = ERRORS
    #: Keys of a sticky assignment; 0: each request is assigned at random.
    keys: int = 0

    def traffic(self, generator: np.random.Generator) -> SimulatedTraffic:
        """One rollout's traffic."""
        one, count = self.candidate, sum(self.requests)
        stage = np.repeat(np.arange(len(self.requests)), self.requests)
        kinds = self.plan.stages
        share = np.array([each.share for each in kinds])[stage]
        is_shadow = np.array([each.kind is StageKind.SHADOW for each in kinds])[stage]
        latency, pressed = moments(self.machine, count, generator)
        position = generator.random(count)
        key = np.arange(count)
        if self.keys:
            # Some keys send far more than others, and some send larger requests.
            weights = 1 / np.arange(1, self.keys + 1)
            key = generator.choice(self.keys, count, p=weights / weights.sum())
            latency *= np.exp(generator.normal(0, SIZES, self.keys))[key]
            # Copies are drawn one by one.
            position = np.where(is_shadow, position, generator.random(self.keys)[key])
        drawn = position < share
        slower = np.where(_tails(latency), one.tail, 1.0) * one.everything
        errors = self.errors * np.where(pressed, ERRORS_IN_BURSTS, 1.0)
        labelled = generator.random(count) < self.labelled
        compared = drawn & is_shadow
        invalid = compared & (generator.random(count) < one.invalid)
        # An invalid output disagrees, too, and takes part of that rate.
        rest = max(0.0, one.disagreement - one.invalid) / (1 - one.invalid)
        return SimulatedTraffic(
            key,
            position,
            stage,
            drawn & ~is_shadow,
            latency,
            latency * slower,
            generator.random(count) < errors,
            generator.random(count) < errors * one.error_ratio,
            compared,
            invalid | (compared & (generator.random(count) < rest)),
            invalid,
            labelled & (generator.random(count) < WRONG),
            labelled & (generator.random(count) < WRONG * one.wrong_ratio),
        )


def moments(machine: Machine, count: int, generator: np.random.Generator) -> tuple[Floats, Flags]:
    """Latencies [count] in ms of one process on the machine, and whether a neighbour presses."""
    machine = replace(machine, start=0.0, start_tail=0.0)
    sizes = np.exp(generator.normal(0, SIZES, REQUESTS))
    drift = np.zeros(1)
    latencies, pressed = [], []
    for _ in range(math.ceil(count / machine.slots)):
        drift = gating.next_drift(drift[-1], machine, generator)
        speed, presses = gating.moments(machine, drift, generator)
        latencies.append(gating.latencies_of(machine, speed, presses, sizes, generator))
        pressed.append(presses)
    return np.concatenate(latencies)[:count], np.concatenate(pressed)[:count]


def _tails(latency: Floats) -> Flags:
    """Whether a request is among the slowest of its 4,000 neighbours."""
    parts = np.array_split(latency, max(1, len(latency) // 4000))
    return np.concatenate([part > np.quantile(part, 1 - TAIL) for part in parts])


def thresholds(traffic: SimulatedTraffic, quantile: float) -> Floats:
    """[n]: the baseline's quantile over its earlier requests; NaN before there is one."""
    answered = ~traffic.is_candidate & ~traffic.fails
    values = traffic.latency[answered]
    found = [math.nan]
    for end in range(BLOCK, len(values) + 1, BLOCK):
        window = values[max(0, end - WINDOW) : end]
        rank = math.ceil(quantile * len(window)) - 1
        found.append(float(np.partition(window, rank)[rank]))
    before = np.cumsum(answered) - answered
    return np.array(found)[before // BLOCK]


def trials_of(
    scenario: SimulatedRollout, traffic: SimulatedTraffic
) -> Iterator[tuple[str, Trials]]:
    """The trials of every criterion, as ``RequestEvents`` and the comparison count them."""
    before = np.array(scenario.plan.canary_shares_before)
    is_sticky = scenario.plan.assignment is not AssignmentKind.REQUEST
    for name, trials in _trials_of_requests(scenario, traffic):
        is_pair = name in ("disagreement", "invalid")
        yield name, trials if is_pair or not is_sticky else _first_of_keys(trials, traffic, before)


def _first_of_keys(trials: Trials, traffic: SimulatedTraffic, before: Floats) -> Trials:
    """The first event in each stage of each key that the baseline had before."""
    key = traffic.key[trials.request]
    stages = len(before)
    counts = np.zeros(len(key), bool)
    counts[np.unique(key * stages + trials.stage, return_index=True)[1]] = True
    counts &= traffic.position[trials.request] >= before[trials.stage]
    return trials._replace(
        request=trials.request[counts], stage=trials.stage[counts], success=trials.success[counts]
    )


def _trials_of_requests(
    scenario: SimulatedRollout, traffic: SimulatedTraffic
) -> Iterator[tuple[str, Trials]]:
    limits, stages = scenario.plan.limits, scenario.plan.stages
    # In shadow the new share is the stage's own: the part that is copied.
    share = np.array([scenario.plan.new_share(number) for number in range(len(stages))])
    shadow = np.array([each.kind is StageKind.SHADOW for each in stages])

    def trials(at: Flags, success: Flags, p0: Floats | float) -> Trials:
        where = np.flatnonzero(at)
        return Trials(where, traffic.stage[where], success[where], np.broadcast_to(p0, share.shape))

    def attributed(ratio: float, share: Floats = share) -> Floats:
        with np.errstate(divide="ignore"):
            return 1 / (1 + (1 - share) / (share * ratio))

    in_shadow = shadow[traffic.stage]
    yield "disagreement", trials(traffic.is_compared, traffic.disagrees, limits.max_disagreement)
    yield "invalid", trials(traffic.is_compared, traffic.is_invalid, limits.max_invalid)
    # In shadow all the baseline's errors count, and those of copies that it answered.
    alone = traffic.is_compared & traffic.candidate_fails & ~traffic.baseline_fails
    ratio = limits.max_error_ratio
    odds = share * ratio
    yield (
        "errors",
        trials(
            np.where(in_shadow, alone | traffic.baseline_fails, traffic.fails),
            np.where(in_shadow, alone, traffic.is_candidate),
            np.where(shadow, odds / (1 + odds), attributed(ratio)),
        ),
    )
    # The baseline's last request before each: the candidate is slow only if that was answered.
    at = np.where(traffic.is_candidate, -1, np.arange(len(in_shadow)))
    last = np.maximum.accumulate(at)
    counts = ~traffic.fails & ~((last >= 0) & traffic.baseline_fails[last] & traffic.is_candidate)
    for name, quantile, regression in (
        ("p50", 0.5, limits.max_p50_regression),
        ("p99", 0.99, limits.max_p99_regression),
    ):
        threshold = thresholds(traffic, quantile)
        allowed = np.maximum(
            threshold * (1 + regression), threshold + limits.min_regression_ms / 1e3
        )
        slow = traffic.latency > np.where(traffic.is_candidate, allowed, threshold)
        slow &= counts & ~in_shadow
        found = trials(slow, traffic.is_candidate, np.where(shadow, 1.0, share))
        yield name, found._replace(emphasis=SMALL_CHANGES)
    yield "accuracy", _wrong(traffic, attributed(limits.max_quality_ratio), in_shadow)


def _wrong(traffic: SimulatedTraffic, p0: Floats, in_shadow: Flags) -> Trials:
    wrong = np.where(traffic.is_candidate, traffic.candidate_wrong, traffic.baseline_wrong)
    where = np.flatnonzero(wrong & ~in_shadow)
    return Trials(where, traffic.stage[where], traffic.is_candidate[where], p0, SMALL_CHANGES)


def log_e_values(trials: Trials, stages: int) -> tuple[Counts, Floats]:
    """The requests that raise the e-value, and its logarithm after each of them.

    The same mean over products and stages as ``sequential_tests.log_e_value``.
    """
    says_something = (trials.p0 > 0) & (trials.p0 < 1)
    at = np.flatnonzero(trials.success & says_something[trials.stage])
    total = np.zeros((len(at), len(ODDS_RATIOS)))
    weights = np.full(stages, (1 - FIRST_WEIGHT) / max(1, stages - 1))
    weights[0] = FIRST_WEIGHT if stages > 1 else 1.0
    means = np.zeros((stages, len(at)))
    for stage in reversed(range(stages)):
        p0, here = trials.p0[stage], trials.stage == stage
        if says_something[stage] and here.any():
            count, successes = np.cumsum(here)[at], np.cumsum(here & trials.success)[at]
            total += successes[:, None] * np.log(ODDS_RATIOS)
            total -= count[:, None] * np.log1p(p0 * (ODDS_RATIOS - 1))
            largest = total.max(axis=1)
            average = np.exp(total - largest[:, None]) @ weights_of(trials.emphasis)
            means[stage] = largest + np.log(average)
        elif stage + 1 < stages:
            means[stage] = means[stage + 1]
    means += np.log(weights)[:, None]
    return trials.request[at], np.logaddexp.reduce(means, axis=0)


def moment_of(trials: Trials, stages: int, alpha: float) -> BrokenCriterion | None:
    """The first moment at which the criterion is broken."""
    requests, values = log_e_values(trials, stages)
    reached = np.flatnonzero(values >= -math.log(alpha))
    if not len(reached):
        return None
    request = int(requests[reached[0]])
    return BrokenCriterion(request, int(np.searchsorted(trials.request, request)) + 1)


def alphas_of(plan: RolloutPlan) -> dict[str, float]:
    """The parts of the error probability, by criterion."""
    return {each.name: each.alpha for each in criteria_of(plan, [])}


def first_broken(
    scenario: SimulatedRollout, generator: np.random.Generator
) -> dict[str, BrokenCriterion]:
    """The criteria that were broken at any moment, each with the first."""
    traffic, alphas = scenario.traffic(generator), alphas_of(scenario.plan)
    return {
        name: moment
        for name, trials in trials_of(scenario, traffic)
        if (moment := moment_of(trials, len(scenario.plan.stages), alphas[name]))
    }


def repeated_fixed_sample_test(
    scenario: SimulatedRollout, generator: np.random.Generator
) -> dict[str, BrokenCriterion]:
    """A known-bad variant: the binomial test of each criterion, after each of its trials."""
    traffic, alphas = scenario.traffic(generator), alphas_of(scenario.plan)
    found = {}
    for name, trials in trials_of(scenario, traffic):
        for stage, p0 in enumerate(trials.p0):
            here = trials.stage == stage
            at = np.flatnonzero(trials.success[here])
            p_values = binom.sf(np.arange(len(at)), at + 1, p0)
            if (p_values <= alphas[name]).any():
                found[name] = BrokenCriterion(int(trials.request[here][at[0]]), int(at[0]))
    return found


def rates_over_time(
    scenario: SimulatedRollout, generator: np.random.Generator
) -> dict[str, BrokenCriterion]:
    """A known-bad variant: of the candidate's requests 1 % may be slow, in whatever moment."""
    traffic = scenario.traffic(generator)
    limit = 1 + (scenario.plan.limits.max_p99_regression or 0)
    slow = traffic.latency > thresholds(traffic, 0.99) * limit
    where = np.flatnonzero(traffic.is_candidate)
    p0 = np.full(len(scenario.plan.stages), 0.01)
    trials = Trials(where, traffic.stage[where], slow[where], p0, SMALL_CHANGES)
    moment = moment_of(trials, len(p0), alphas_of(scenario.plan)["p99"])
    return {"p99": moment} if moment else {}


def every_event_of_a_key(
    scenario: SimulatedRollout, generator: np.random.Generator
) -> dict[str, BrokenCriterion]:
    """A known-bad variant: sticky assignment, with every event as if drawn by itself."""
    plan = replace(scenario.plan, assignment=AssignmentKind.REQUEST)
    scenario = replace(scenario, plan=plan)
    traffic, alphas = scenario.traffic(generator), alphas_of(scenario.plan)
    return {
        name: moment
        for name, trials in _trials_of_requests(scenario, traffic)
        if (moment := moment_of(trials, len(scenario.plan.stages), alphas[name]))
    }


Test = Callable[[SimulatedRollout, np.random.Generator], dict[str, BrokenCriterion]]


def rollouts(
    scenario: SimulatedRollout, count: int, seed: int = 0, test: Test = first_broken
) -> list[dict[str, BrokenCriterion]]:
    """The criteria that ``count`` rollouts broke; none broken is no rollback."""
    return [test(scenario, each) for each in np.random.default_rng(seed).spawn(count)]


class RolloutEnding(NamedTuple):
    """The verdict that ended a rollout, its stage, and its requests until then."""

    verdict: RolloutVerdict
    stage: int
    requests: int


def live(
    plan: RolloutPlan, error_ratio: float, rate: int, generator: np.random.Generator
) -> RolloutEnding:
    """A whole rollout at ``rate`` requests/s with errors only, decided once a second."""
    counts = [StageCounts() for _ in plan.stages]
    stage = seconds = requests = 0
    while True:
        here = counts[stage]
        of_candidate = int(generator.binomial(rate, plan.stages[stage].share))
        failed = int(generator.binomial(of_candidate, ERRORS * error_ratio))
        others = int(generator.binomial(rate - of_candidate, ERRORS))
        here.candidate.requests += of_candidate
        here.candidate.errors += failed
        here.errors += Attribution(failed, failed + others)
        requests, seconds = requests + rate, seconds + 1
        verdict = decide(plan, stage, counts[: stage + 1], seconds).verdict
        if verdict is RolloutVerdict.ADVANCE:
            stage, seconds = stage + 1, 0
        elif verdict is not RolloutVerdict.HOLD:
            return RolloutEnding(verdict, stage, requests)
