"""A stage ends when the harm that it is meant to find would have been found."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from modelport.gateway.rollout.plan import AssignmentKind, RolloutLimits, RolloutPlan, RolloutSide
from modelport.gateway.rollout.statistics import harms
from modelport.gateway.rollout.statistics.counts import Attribution, SideCounts, StageCounts
from modelport.gateway.rollout.statistics.decision import RolloutVerdict, decide
from modelport.gateway.rollout.statistics.latency_ranks import (
    LATENCY,
    RANK_SHARES,
    heavier,
    shifted,
)
from modelport.gateway.rollout.statistics.power import HarmfulStage, missing_requests
from modelport.gateway.rollout.statistics.sequential_tests import (
    LARGE_CHANGES,
    OutcomeCounts,
    SequentialTest,
    log_e_value,
)

PLAN = RolloutPlan("0" * 32, "m", RolloutSide("m", 1), RolloutSide("m", 2), shadow=0.1)
ALPHA = 0.01


def found(stage: HarmfulStage, test: SequentialTest, requests: int, streams: int = 200) -> float:
    """The share of streams in which the harm is found after at most ``requests`` of them."""
    generator = np.random.default_rng(0)
    parts = np.linspace(0, requests, 11).astype(int)[1:]
    hits = 0
    for _ in range(streams):
        counts = np.zeros(len(stage.rates))
        for more in np.diff(parts, prepend=0):
            counts += generator.poisson(more * np.array(stage.rates))
            value = log_e_value([OutcomeCounts(stage.p0, tuple(counts))], test)
            if value >= math.log(1 / ALPHA):
                hits += 1
                break
    return hits / streams


QUARTER = RANK_SHARES * 3


@pytest.mark.parametrize(
    ("p0", "rates", "test"),
    [
        (0.001, (0.01, 0.99), LARGE_CHANGES),
        (0.001, (0.005, 0.995), LARGE_CHANGES),
        (0.01, (0.03, 0.97), LARGE_CHANGES),
        (1 / 3, (0.01, 0.003), LARGE_CHANGES),
        (0.25, (*heavier(0.99, 2.2), *QUARTER), LATENCY),
        (0.25, (*shifted(0.08), *QUARTER), LATENCY),
    ],
)
def test_the_harm_is_found_with_the_probability_that_was_asked_for_and_not_much_later(
    p0: float, rates: tuple[float, ...], test: SequentialTest
) -> None:
    stage = HarmfulStage(p0, 0, rates)
    requests = missing_requests([stage], test, ALPHA, 0.95)
    assert requests is not None
    assert found(stage, test, requests) >= 0.92
    # Known bad: half of them.
    assert found(stage, test, requests // 2) < 0.9
    assert missing_requests([stage._replace(requests=requests)], test, ALPHA, 0.95) == 0
    half = missing_requests([stage._replace(requests=requests / 2)], test, ALPHA, 0.95)
    assert half == pytest.approx(requests / 2, rel=0.04, abs=2)
    assert (missing_requests([stage], test, ALPHA, 0.5) or 0) < requests


def test_a_stage_in_which_nothing_can_be_found_needs_nothing() -> None:
    earlier = HarmfulStage(0.001, 10, (0.01, 0.99))
    for stages in (
        [HarmfulStage(1.0, 0, (0.5, 0.5))],
        [earlier, HarmfulStage(1.0, 0, (0.5, 0.5))],
        [HarmfulStage(0.1, 0, (0.05, 0.95))],
    ):
        assert missing_requests(stages, LARGE_CHANGES, ALPHA, 0.95) is None


def counts_of(stage: int, requests: int) -> StageCounts:
    """A stage without harm."""
    share, side = PLAN.stages[stage].share, SideCounts
    if not stage:
        return StageCounts(side(requests, requests // 1000), compared=round(requests * share))
    ranks = {
        rank: Attribution(round(requests * share * part), round(requests * part))
        for rank, part in enumerate(RANK_SHARES)
    }
    candidates = round(requests * share)
    return StageCounts(
        side(requests - candidates, (requests - candidates) // 1000), side(candidates),
        compared=round(min(share, PLAN.pair) * requests), ranks=ranks,
    )  # fmt: skip


def test_every_stage_of_the_default_plan_needs_what_finds_its_harm() -> None:
    """And together hardly more than the count of earlier versions, 67,500 requests."""
    counts: list[StageCounts] = []
    needed = []
    for stage in range(len(PLAN.stages)):
        requests = 500
        while any(harms.missing(PLAN, stage, [*counts, counts_of(stage, requests)])):
            requests += 500
        counts.append(counts_of(stage, requests))
        needed.append(requests)
    assert 10_000 < needed[0] < 14_000
    assert 2_000 < needed[1] < 20_000
    assert 2_000 < needed[2] < 20_000
    assert 12_000 < needed[3] < 30_000
    assert needed[4] == 500
    assert sum(needed) < 67_500


def test_the_end_of_a_stage_says_what_it_lacks() -> None:
    decision = decide(PLAN, 0, [counts_of(0, 5000)], 60)
    assert decision.verdict is RolloutVerdict.HOLD
    (text,) = decision.missing
    aim = "more compared requests to find harm with a probability of 95 % (disagreement, errors)"
    assert text.endswith(aim)
    pausing = decide(PLAN, 0, [counts_of(0, 5000)], PLAN.max_seconds)
    assert (pausing.verdict, pausing.missing) == (RolloutVerdict.PAUSE, decision.missing)
    # The floors are named first.
    assert decide(PLAN, 0, [counts_of(0, 500)], 60).missing == ("50 more compared requests",)
    without = replace(PLAN, power=0.0)
    assert decide(without, 0, [counts_of(0, 5000)], 60).verdict is RolloutVerdict.ADVANCE


def lacking(plan: RolloutPlan, stage: int, counts: list[StageCounts]) -> set[tuple[str, bool]]:
    return {(each.criterion, each.compared) for each in harms.missing(plan, stage, counts)}


def test_only_what_a_stage_can_find_is_waited_for() -> None:
    empty = [StageCounts(), StageCounts()]
    assert lacking(PLAN, 0, empty) == {("disagreement", True), ("errors", True)}
    quarter = replace(PLAN, shadow=0.0, steps=(0.25, 1.0))
    everything = {("disagreement", True), ("errors", False), ("latency", False)}
    assert lacking(quarter, 0, empty) == everything
    unpaired = replace(quarter, pair=0.0)
    assert lacking(unpaired, 0, empty) == everything - {("disagreement", True)}
    # Nobody knows how many keys will come.
    sticky = replace(quarter, assignment=AssignmentKind.HEADER)
    assert lacking(sticky, 0, empty) == {("disagreement", True)}
    # Alone, the candidate is compared by pairs only.
    assert lacking(quarter, 1, empty) == {("disagreement", True)}
    limits = replace(RolloutLimits(), max_disagreement=None, max_p50_regression=None)
    assert lacking(replace(quarter, limits=limits), 0, empty) == {
        ("invalid", True), ("errors", False), ("latency", False),
    }  # fmt: skip


@pytest.mark.parametrize("limit", [0.0, 0.001, 0.1, 0.9])
def test_every_limit_has_a_harm_beyond_it_that_can_be_found(limit: float) -> None:
    plan = replace(PLAN, limits=RolloutLimits(max_disagreement=limit))
    needed = {each.criterion: each.requests for each in harms.missing(plan, 0, [StageCounts()])}
    assert 3 < needed["disagreement"] < 10_000
