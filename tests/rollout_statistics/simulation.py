"""Simulated rollouts: the gateway's own counts and decisions, on traffic of the gate's machines.

A moment belongs to all requests in it: the machine's speed wanders and drifts, and in bursts of its
neighbours everything is slower, some requests wait, and errors are twenty times as frequent. Heavy
tails (Pareto, shape 2.5) belong to each request. Both sides are warm, so the gate's differences
between process starts are left out. Seeded throughout.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from modelport.gateway.rollout.plan import AssignmentKind, RolloutLimits, RolloutPlan, StageKind
from modelport.gateway.rollout.statistics.counts import RANKS, StageCounts
from modelport.gateway.rollout.statistics.criteria import alphas_of, stages_of
from modelport.gateway.rollout.statistics.decision import RolloutDecision, RolloutVerdict, decide
from modelport.gateway.rollout.statistics.evidence import CriterionStatus
from modelport.gateway.rollout.statistics.latency_ranks import LEVELS
from modelport.gateway.rollout.statistics.sequential_tests import (
    SMALL_CHANGES,
    TrialCounts,
    log_e_value,
)
from modelport.gateway.rollout.traffic.assignment import position
from modelport.gateway.rollout.traffic.request_events import AssignedRequest, RequestEvents
from modelport.gateway.rollout.traffic.sides import StageTraffic
from tests.gateway.rollout import plans
from tests.loadtests.gating import simulation as gating
from tests.loadtests.gating.simulation import SHARED, SIZES, Machine

Floats = npt.NDArray[np.float64]
Decide = Callable[[RolloutPlan, int, Sequence[StageCounts], float], RolloutDecision]

#: Different requests of the traffic.
REQUESTS = 512
#: Part of the slowest requests whose latency ``SimulatedCandidate.tail`` changes; the p99 is among
#: them.
TAIL = 0.03
#: Errors of the baseline, and in bursts as a multiple.
ERRORS, ERRORS_IN_BURSTS = 0.001, 20.0
#: Disagreements of two correct answers, and wrong decisions by later labels of the baseline.
DISAGREEMENTS, WRONG = 0.0005, 0.05
#: Requests whose label is known later.
LABELLED = 0.02
#: Seconds per unit of the machine's latencies; ``min_regression_ms`` is a small part of them.
SECONDS = 0.1
P99 = LEVELS.index(0.99) + 1


@dataclass(frozen=True)
class SimulatedCandidate:
    """The differences of the candidate from the baseline."""

    name: str = "identical"
    #: The slowest 3 % of the requests take that many times as long.
    tail: float = 1.0
    everything: float = 1.0
    error_ratio: float = 1.0
    disagreement: float = DISAGREEMENTS
    #: Disagreements of what it answers to clients, if they differ from those of copies.
    canary_disagreement: float | None = None
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
#: The plan of ``modelport rollout start --shadow 10%``, with every default.
DEFAULT = RolloutPlan(32 * "0", "m", plans.plan().baseline, plans.plan().candidate, shadow=0.1)


class Moment(NamedTuple):
    """One request as both sides would answer it."""

    key: int
    baseline: float
    candidate: float
    baseline_fails: bool
    candidate_fails: bool
    #: Draws in [0, 1): whether it is copied or the candidate's, whether the answers of a pair
    #: disagree, and whether it has a label that says that the answer is wrong.
    side: float
    disagrees: float
    wrong: float


@dataclass(frozen=True)
class SimulatedRollout:
    """A rollout, and its traffic."""

    candidate: SimulatedCandidate = IDENTICAL
    machine: Machine = SHARED
    plan: RolloutPlan = DEFAULT
    #: Requests after which nobody looks any more, per second, and between two decisions.
    requests: int = 200_000
    rate: float = 200.0
    look: int = 400
    #: Errors of the baseline.
    errors: float = ERRORS
    #: Keys of a sticky assignment; 0: each request is assigned at random.
    keys: int = 0
    decide: Decide = decide
    #: Whether every request of a sticky key is counted, as if it were drawn by itself.
    ignores_keys: bool = False

    def moments(self, generator: np.random.Generator) -> Iterator[Moment]:
        """The requests of one rollout."""
        one, machine = self.candidate, replace(self.machine, start=0.0, start_tail=0.0)
        sizes = np.exp(generator.normal(0, SIZES, REQUESTS))
        heavy = np.exp(generator.normal(0, SIZES, max(1, self.keys)))
        weights = 1 / np.arange(1, max(1, self.keys) + 1)
        drift, count = np.zeros(1), machine.slots
        for _ in range(-(-self.requests // count)):
            drift = gating.next_drift(drift[-1], machine, generator)
            speed, pressed = gating.moments(machine, drift, generator)
            latency = gating.latencies_of(machine, speed, pressed, sizes, generator)
            key = np.zeros(count, int)
            if self.keys:
                # Some keys send far more than others, and some send larger requests.
                key = generator.choice(self.keys, count, p=weights / weights.sum())
                latency *= heavy[key]
            slower = np.where(latency > np.quantile(latency, 1 - TAIL), one.tail, 1.0)
            errors = self.errors * np.where(pressed, ERRORS_IN_BURSTS, 1.0)
            columns: list[npt.NDArray[np.generic]] = [
                key,
                latency,
                latency * slower * one.everything,
                generator.random(count) < errors,
                generator.random(count) < errors * one.error_ratio,
                *generator.random((3, count)),
            ]
            yield from map(Moment, *(column.tolist() for column in columns))


class RolloutEnding(NamedTuple):
    """The verdict that ended a rollout, its stage, and its requests and pairs until then."""

    verdict: RolloutVerdict
    stage: int
    requests: int
    compared: int
    #: The criteria that were broken.
    broken: tuple[str, ...] = ()

    @property
    def rolled_back(self) -> bool:
        return self.verdict is RolloutVerdict.ROLLBACK


def run(scenario: SimulatedRollout, generator: np.random.Generator) -> RolloutEnding:
    """One rollout until its end, counted by ``RequestEvents`` as in the gateway."""
    plan = replace(scenario.plan, id=generator.bytes(16).hex())
    draws = random.Random(int(generator.integers(2**62)))
    sticky = plan.assignment is not AssignmentKind.REQUEST
    counted = replace(plan, assignment=AssignmentKind.REQUEST) if scenario.ignores_keys else plan
    events, counts = RequestEvents(counted, draws), [StageCounts() for _ in plan.stages]
    number = began = at = 0
    traffic = StageTraffic(0, *plan.stages[0], counts[0])
    for at, moment in enumerate(scenario.moments(generator), 1):
        key = b"%d" % moment.key if sticky else b""
        drawn = position(plan.id, key) if key and traffic.canary_share else moment.side
        is_drawn = drawn < traffic.share
        _answer(scenario.candidate, events, traffic, moment, is_drawn, key, plan.pair)
        if at % scenario.look:
            continue
        seconds = (at - began) / scenario.rate
        decision = scenario.decide(counted, number, counts[: number + 1], seconds)
        if decision.verdict is RolloutVerdict.ADVANCE:
            number, began = number + 1, at
            traffic = StageTraffic(number, *plan.stages[number], counts[number])
        elif decision.verdict is not RolloutVerdict.HOLD:
            broken = [e.name for e in decision.criteria if e.status is CriterionStatus.BROKEN]
            compared = sum(each.compared for each in counts)
            return RolloutEnding(decision.verdict, number, at, compared, tuple(broken))
    return RolloutEnding(RolloutVerdict.HOLD, number, at, sum(each.compared for each in counts))


def _answer(
    one: SimulatedCandidate,
    events: RequestEvents,
    stage: StageTraffic,
    moment: Moment,
    drawn: bool,
    key: bytes,
    pair: float,
) -> None:
    """Count one request, and the copy of it if there is one."""
    counts, in_shadow = stage.counts, stage.kind is StageKind.SHADOW
    is_candidate = drawn and not in_shadow
    request = AssignedRequest(stage, is_candidate, key)
    if moment.candidate_fails if is_candidate else moment.baseline_fails:
        events.failed(request)
    else:
        events.answered(request, (moment.candidate if is_candidate else moment.baseline) * SECONDS)
        if moment.wrong < LABELLED * WRONG * (one.wrong_ratio if is_candidate else 1.0):
            events.wrong(request, "accuracy")
    if not drawn or (is_candidate and moment.side >= pair):
        return
    if moment.candidate_fails:
        counts.failed += in_shadow and not moment.baseline_fails
    elif not moment.baseline_fails:
        rate = one.disagreement
        if is_candidate and one.canary_disagreement is not None:
            rate = one.canary_disagreement
        counts.compared += 1
        counts.disagreed += moment.disagrees < rate
        counts.invalid += moment.disagrees < one.invalid


def rollouts(scenario: SimulatedRollout, count: int, seed: int = 0) -> list[RolloutEnding]:
    """``count`` rollouts."""
    return [run(scenario, each) for each in np.random.default_rng(seed).spawn(count)]


# -- known-bad decisions -------------------------------------------------------------------------


def repeated_fixed_sample_test(
    plan: RolloutPlan, stage: int, counts: Sequence[StageCounts], seconds: float
) -> RolloutDecision:
    """A known-bad variant: the binomial test of each part of each criterion, at each look."""
    for criterion, alpha in alphas_of(plan):
        for view in stages_of(plan, counts):
            for p0, successes, trials in criterion.trials(criterion, view):
                if 0 < p0 < 1 and binom.sf(successes - 1, trials, p0) <= alpha:
                    return RolloutDecision(RolloutVerdict.ROLLBACK, criterion.name)
    return decide(plan, stage, counts, seconds)


def rates_over_time(
    plan: RolloutPlan, stage: int, counts: Sequence[StageCounts], seconds: float
) -> RolloutDecision:
    """A known-bad variant: of the candidate's requests 1 % may be slow, in whatever moment."""
    trials = []
    for each in counts:
        slow = [each.ranks[rank].candidate for rank in range(RANKS) if rank in each.ranks]
        above = sum(each.ranks[rank].candidate for rank in each.ranks if rank >= P99)
        trials.append(TrialCounts(0.01, above, sum(slow)))
    alpha = {criterion.name: alpha for criterion, alpha in alphas_of(plan)}["latency"]
    if log_e_value(trials, SMALL_CHANGES, stages=len(plan.stages)) >= -np.log(alpha):
        return RolloutDecision(RolloutVerdict.ROLLBACK, "latency")
    return decide(plan, stage, counts, seconds)
