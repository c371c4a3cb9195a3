"""Simulated rollouts roll back as seldom as promised, and find harm.

``make rollout-statistics`` runs hundreds of each kind on the default plan; here are a few.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from modelport.gateway.rollout.plan import AssignmentKind
from modelport.gateway.rollout.statistics.decision import RolloutVerdict
from tests.gateway.rollout import plans
from tests.loadtests.gating.simulation import ROUGH, SHARED, Machine
from tests.rollout_statistics import __main__ as statistics
from tests.rollout_statistics import simulation
from tests.rollout_statistics.simulation import (
    AT_EVERY_LIMIT,
    IDENTICAL,
    SimulatedCandidate,
    SimulatedRollout,
    rollouts,
)
from tests.thorough import thorough

#: Hardly less likely than 5 % to be exceeded by a test that is right in 95 %.
ROLLOUTS, MOST_FALSE = 8, 1
#: A quarter of the requests, for as long as anyone looks.
QUARTER = plans.plan(steps=(0.25, 1.0), pair=0.1, min_seconds=1e6, max_seconds=1e7)
SHORT = SimulatedRollout(plan=QUARTER, requests=6000, look=200)
STICKY = replace(SHORT, plan=replace(QUARTER, assignment=AssignmentKind.HEADER), keys=300)


def rolled_back(scenario: SimulatedRollout, count: int = ROLLOUTS) -> int:
    return sum(one.rolled_back for one in rollouts(scenario, count))


@pytest.mark.parametrize("machine", [thorough(SHARED), ROUGH], ids=lambda machine: machine.name)
@pytest.mark.parametrize("candidate", [IDENTICAL, AT_EVERY_LIMIT], ids=lambda one: one.name)
def test_candidates_within_the_limits_are_seldom_rolled_back(
    machine: Machine, candidate: SimulatedCandidate
) -> None:
    scenario = replace(SHORT, candidate=candidate, machine=machine)
    assert rolled_back(scenario) <= MOST_FALSE


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (replace(SHORT, candidate=AT_EVERY_LIMIT),
         {"decide": simulation.repeated_fixed_sample_test}),
        thorough(replace(SHORT, machine=ROUGH), {"decide": simulation.rates_over_time}),
        thorough(STICKY, {"ignores_keys": True}),
    ],
    ids=["a fixed-sample test", "rates over time", "every request of a key"],
)  # fmt: skip
def test_a_test_that_is_not_valid_at_every_moment_is_caught(
    good: SimulatedRollout, bad: dict[str, object]
) -> None:
    """The known-bad variants, each where the tests of a rollout roll nothing back."""
    assert rolled_back(replace(good, **bad)) > MOST_FALSE  # type: ignore[arg-type]
    assert rolled_back(good) <= MOST_FALSE


def test_a_candidate_that_mends_the_baselines_failures_is_not_slower() -> None:
    scenario = replace(SHORT, candidate=SimulatedCandidate(error_ratio=0.0), errors=0.1)
    assert rolled_back(scenario) <= MOST_FALSE


@pytest.mark.parametrize(
    ("candidate", "criterion"),
    [
        (SimulatedCandidate(tail=2.0), "latency"),
        (SimulatedCandidate(everything=1.25), "latency"),
        (SimulatedCandidate(disagreement=0.05), "disagreement"),
        (SimulatedCandidate(error_ratio=10.0), "errors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_harm_is_found_and_named(candidate: SimulatedCandidate, criterion: str) -> None:
    found = rollouts(replace(SHORT, candidate=candidate, requests=12_000), 3)
    assert all(criterion in one.broken for one in found)


def test_wrong_answers_do_not_pass_the_shadow_stage() -> None:
    """1 % of them, ten times the limit; a count of 500 lets more than a tenth of them pass."""
    scenario = SimulatedRollout(SimulatedCandidate(disagreement=0.01), requests=13_000)
    found = rollouts(scenario, 10)
    assert sum(one.rolled_back and one.stage == 0 for one in found) >= 9
    by_count = replace(scenario, plan=statistics.BY_COUNT, requests=6000)
    assert sum(one.stage > 0 for one in rollouts(by_count, 15)) > 1


def test_wrong_answers_that_only_clients_get_are_found_after_the_shadow_stage() -> None:
    """Known bad: without pairs nobody looks."""
    one = SimulatedCandidate(canary_disagreement=0.05)
    plan = replace(QUARTER, shadow=0.1, min_seconds=1.0, min_requests=10)
    scenario = SimulatedRollout(one, plan=plan, requests=10_000)
    assert all(found.broken == ("disagreement",) for found in rollouts(scenario, 3))
    unpaired = replace(scenario, plan=replace(plan, pair=0.0))
    assert not any(found.rolled_back for found in rollouts(unpaired, 3))


def test_an_identical_candidate_is_promoted_by_the_default_plan() -> None:
    found = simulation.run(SimulatedRollout(look=1000), np.random.default_rng(0))
    assert found.verdict is RolloutVerdict.PROMOTE
    assert 48_000 < found.requests < 100_000


def test_the_page_has_a_row_of_each_kind() -> None:
    _, _, rest = statistics.PAGE.read_text(encoding="utf-8").partition(statistics.BEGIN)
    section, end, _ = rest.partition(statistics.END)
    assert end
    named = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    assert named[1:] == [row.name for row in statistics.rows()]
    assert "at commit " in section
    assert "NOT KEPT" not in section
