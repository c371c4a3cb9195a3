"""Simulated rollouts are decided as real ones are, and wrongly as seldom as promised.

``make rollout-statistics`` runs thousands; here are a few of each kind.
"""

from __future__ import annotations

import numpy as np
import pytest

from modelport.gateway.rollout.plan import AssignmentKind
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.rollout.statistics.criteria import criteria_of
from modelport.gateway.rollout.traffic.request_events import AssignedRequest, RequestEvents
from modelport.gateway.rollout.traffic.sides import StageTraffic
from tests.gateway.rollout import plans
from tests.loadtests.gating.simulation import ROUGH, SHARED, Machine
from tests.rollout_statistics import simulation
from tests.rollout_statistics.simulation import (
    AT_EVERY_LIMIT,
    IDENTICAL,
    BrokenCriterion,
    SimulatedCandidate,
    SimulatedRollout,
    SimulatedTraffic,
    Test,
    rollouts,
)

#: Hardly less likely than 5 % to be exceeded by a test that is right in 95 %.
ROLLOUTS, MOST_FALSE = 40, 4
SHORT = 5 * (12_000,)
STICKY = plans.plan(shadow=0.1, assignment=AssignmentKind.HEADER)


def counted(
    scenario: SimulatedRollout, traffic: SimulatedTraffic, requests: int
) -> list[StageCounts]:
    """The counts of the gateway after the first ``requests``."""
    events = RequestEvents(scenario.plan)
    counts = [StageCounts() for _ in scenario.requests]
    stages = [
        StageTraffic(number, stage.kind, stage.share, each)
        for number, (stage, each) in enumerate(zip(scenario.plan.stages, counts, strict=True))
    ]
    sticky = scenario.plan.assignment is not AssignmentKind.REQUEST
    for number in range(requests):
        stage = stages[traffic.stage[number]]
        key = b"%d" % traffic.key[number] if sticky else b""
        request = AssignedRequest(stage, bool(traffic.is_candidate[number]), key)
        if traffic.fails[number]:
            events.failed(request)
        else:
            events.answered(request, float(traffic.latency[number]))
        if traffic.is_compared[number] and not traffic.baseline_fails[number]:
            stage.counts.failed += bool(traffic.candidate_fails[number])
        if traffic.is_compared[number]:
            stage.counts.compared += 1
            stage.counts.disagreed += bool(traffic.disagrees[number])
            stage.counts.invalid += bool(traffic.is_invalid[number])
    return counts


@pytest.mark.parametrize(
    ("errors", "names"), [(0.0, ("disagreement", "p50", "p99")), (0.01, ("errors",))]
)
def test_the_simulated_e_values_are_those_of_the_gateway(
    errors: float, names: tuple[str, ...]
) -> None:
    candidate = SimulatedCandidate(everything=1.1, error_ratio=2.0, disagreement=0.01)
    scenario = SimulatedRollout(candidate, errors=0.01, requests=5 * (3000,), labelled=0.0)
    generator = np.random.default_rng(3)
    traffic = scenario.traffic(generator)
    simulated = dict(simulation.trials_of(scenario, traffic))
    for name in ("disagreement", "errors", "p50", "p99"):
        requests, values = simulation.log_e_values(simulated[name], len(scenario.requests))
        assert len(requests) > 5
        for at in (0, len(requests) // 2, len(requests) - 1):
            counts = counted(scenario, traffic, int(requests[at]) + 1)
            evidence = criteria_of(scenario.plan, counts[: int(traffic.stage[requests[at]]) + 1])
            (found,) = (each for each in evidence if each.name == name)
            assert found.log_e_value == pytest.approx(values[at], abs=1e-9)


def test_the_keys_of_simulated_rollouts_count_as_those_of_the_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = SimulatedRollout(
        SimulatedCandidate(error_ratio=2.0),
        plan=STICKY,
        errors=0.02,
        keys=300,
        requests=5 * (3000,),
    )
    generator = np.random.default_rng(0)
    traffic = scenario.traffic(generator)
    positions = {b"%d" % key: at for key, at in zip(traffic.key, traffic.position, strict=True)}
    monkeypatch.setattr(
        "modelport.gateway.rollout.traffic.request_events.position", lambda _, key: positions[key]
    )
    counts = counted(scenario, traffic, sum(scenario.requests))
    trials = dict(simulation.trials_of(scenario, traffic))["errors"]
    for stage in range(1, 5):
        here = trials.stage == stage
        assert counts[stage].errors.total == pytest.approx(int(here.sum()), abs=1)
        assert counts[stage].errors.candidate == pytest.approx(
            int(trials.success[here].sum()), abs=1
        )


@pytest.mark.parametrize("machine", [SHARED, ROUGH], ids=lambda machine: machine.name)
@pytest.mark.parametrize("candidate", [IDENTICAL, AT_EVERY_LIMIT], ids=lambda one: one.name)
def test_candidates_within_the_limits_are_rolled_back_in_at_most_5_of_100(
    machine: Machine, candidate: SimulatedCandidate
) -> None:
    scenario = SimulatedRollout(candidate, machine, requests=SHORT)
    assert sum(map(bool, rollouts(scenario, ROLLOUTS))) <= MOST_FALSE


@pytest.mark.parametrize(
    ("test", "scenario"),
    [
        (simulation.repeated_fixed_sample_test, SimulatedRollout(AT_EVERY_LIMIT, requests=SHORT)),
        (simulation.rates_over_time, SimulatedRollout(requests=SHORT)),
        (simulation.every_event_of_a_key, SimulatedRollout(plan=STICKY, keys=300, requests=SHORT)),
    ],
    ids=["a fixed-sample test", "rates over time", "every event of a key"],
)
def test_a_test_that_is_not_valid_at_every_moment_is_caught(
    test: Test, scenario: SimulatedRollout
) -> None:
    """The known-bad variants, each where the tests of a rollout roll nothing back."""
    assert sum(map(bool, rollouts(scenario, ROLLOUTS, test=test))) > MOST_FALSE
    assert sum(map(bool, rollouts(scenario, ROLLOUTS))) <= MOST_FALSE


def test_a_candidate_that_mends_the_baselines_failures_is_not_slower() -> None:
    scenario = SimulatedRollout(SimulatedCandidate(error_ratio=0.0), errors=0.1, requests=SHORT)
    assert sum(map(bool, rollouts(scenario, ROLLOUTS))) <= MOST_FALSE


def trials_until(found: list[dict[str, BrokenCriterion]], name: str) -> float:
    return float(np.median([one[name].trial if name in one else np.inf for one in found]))


def test_disagreeing_answers_are_found_soon() -> None:
    scenario = SimulatedRollout(
        SimulatedCandidate(disagreement=0.01), requests=(20_000, 1, 1, 1, 1)
    )
    assert trials_until(rollouts(scenario, 100), "disagreement") <= 400


def test_a_p99_that_is_15_percent_higher_is_found() -> None:
    slower = SimulatedCandidate(tail=1.15)
    plan = plans.plan(steps=(0.25, 1.0))
    found = rollouts(SimulatedRollout(slower, plan=plan, requests=(240_000, 1)), 10)
    assert sum("p99" in one for one in found) >= 9
