"""Latencies are counted by their rank among the baseline's earlier requests."""

from __future__ import annotations

import random

import pytest

from modelport.gateway.rollout.plan import AssignmentKind, RolloutLimits, RolloutPlan, StageKind
from modelport.gateway.rollout.statistics.counts import RANKS, Attribution, StageCounts
from modelport.gateway.rollout.statistics.latency_ranks import LEVELS
from modelport.gateway.rollout.traffic.assignment import position
from modelport.gateway.rollout.traffic.request_events import (
    BLOCK,
    WINDOW,
    AssignedRequest,
    RequestEvents,
)
from modelport.gateway.rollout.traffic.sides import StageTraffic
from tests.gateway.rollout import plans

LIMITS = RolloutLimits(p50_ms=200.0)
#: Ranks above the baseline's p50, and its p99.
P50, P99 = LEVELS.index(0.5) + 1, LEVELS.index(0.99) + 1
PLAN = plans.plan(limits=LIMITS, steps=(0.1, 0.5))
STICKY = plans.plan(limits=LIMITS, steps=(0.1, 0.5), assignment=AssignmentKind.HEADER)


def assigned(
    counts: StageCounts, *, is_candidate: bool, number: int = 0, key: bytes = b""
) -> AssignedRequest:
    stage = StageTraffic(number, StageKind.CANARY, PLAN.steps[number], counts)
    return AssignedRequest(stage, is_candidate, key)


def keys(low: float, high: float, count: int = 1) -> list[bytes]:
    """Keys whose position lies in a range."""
    found = (b"key %d" % number for number in range(10**6))
    inside = (key for key in found if low <= position(STICKY.id, key) < high)
    return [key for key, _ in zip(inside, range(count), strict=False)]


def warm(plan: RolloutPlan = PLAN) -> RequestEvents:
    """Events after one block of the baseline: 1, 2, ... ms, so that its p50 and p99 are known."""
    events = RequestEvents(plan, random.Random(0))
    request = assigned(StageCounts(), is_candidate=False)
    for number in range(1, BLOCK + 1):
        events.answered(request, number / 1e3)
    return events


def slow(events: RequestEvents, seconds: float, *, is_candidate: bool) -> set[str]:
    """The quantiles of the baseline's that such a request is slower than."""
    counts = StageCounts()
    events.answered(assigned(counts, is_candidate=is_candidate), seconds)
    for each in counts.ranks.values():
        assert each == Attribution(int(is_candidate), 1)
    found = max(counts.ranks, default=0)
    return {name for name, rank in (("p50", P50), ("p99", P99)) if found >= rank}


def test_nothing_is_slow_before_the_baseline_has_a_quantile() -> None:
    events = RequestEvents(PLAN)
    for _ in range(BLOCK):
        assert slow(events, 9.0, is_candidate=True) == set()
    for _ in range(BLOCK):
        assert slow(events, 0.001, is_candidate=False) == set()
    assert slow(events, 9.0, is_candidate=True) == {"p50", "p99"}


def test_the_candidates_threshold_has_the_allowed_regression() -> None:
    """The baseline's quantiles are 250 and 495 ms; the candidate may take 5 % more."""
    events = warm()
    assert slow(events, 0.2505, is_candidate=False) == {"p50"}
    assert slow(events, 0.2620, is_candidate=True) == set()
    assert slow(events, 0.2626, is_candidate=True) == {"p50"}
    assert slow(events, 0.4955, is_candidate=False) == {"p50", "p99"}
    assert slow(events, 0.5190, is_candidate=True) == {"p50"}
    assert slow(events, 0.5200, is_candidate=True) == {"p50", "p99"}


def test_the_strictest_limit_of_a_quantile_counts_and_one_that_is_off_does_not() -> None:
    """Time to the first byte is the latency. Without a limit, a level tells nothing."""
    first_byte = RolloutLimits(max_p50_regression=1.0, max_first_byte_p50_regression=0.2)
    events = warm(plans.plan(limits=first_byte))
    assert slow(events, 0.2990, is_candidate=True) == set()
    assert slow(events, 0.3010, is_candidate=True) == {"p50"}
    for off, every in (("max_p50_regression", range(LEVELS.index(0.9), RANKS)),
                       ("max_p99_regression", range(LEVELS.index(0.9) + 1))):  # fmt: skip
        events, counts = warm(plans.plan(limits=RolloutLimits(**{off: None}))), StageCounts()
        for number in range(1000):
            events.answered(assigned(counts, is_candidate=number % 2 == 0), number / 1e3)
        assert set(counts.ranks) == set(every)


@pytest.mark.parametrize(("least", "expected"), [(0.0, {"p50", "p99"}), (0.5, set())])
def test_differences_below_the_least_are_no_regression(least: float, expected: set[str]) -> None:
    """A baseline of 0.1 ms, and a candidate that is three times as slow as that."""
    events = RequestEvents(plans.plan(limits=RolloutLimits(min_regression_ms=least)))
    for _ in range(BLOCK):
        events.answered(assigned(StageCounts(), is_candidate=False), 1e-4)
    assert slow(events, 3e-4, is_candidate=True) == expected
    assert slow(events, 7e-4, is_candidate=True) == {"p50", "p99"}


def test_thresholds_follow_the_baseline_and_not_the_candidate() -> None:
    events = warm()
    for _ in range(WINDOW):
        events.answered(assigned(StageCounts(), is_candidate=True), 9.0)
    assert slow(events, 0.2626, is_candidate=True) == {"p50"}
    for _ in range(WINDOW):
        events.answered(assigned(StageCounts(), is_candidate=False), 5.0)
    assert slow(events, 5.2, is_candidate=True) == set()


def test_a_threshold_is_of_earlier_requests_only() -> None:
    """The last request of a block is compared with the threshold before its own block's."""
    events = warm()
    counts = StageCounts()
    for _ in range(BLOCK):
        events.answered(assigned(counts, is_candidate=False), 9.0)
    assert counts.ranks == {RANKS - 1: Attribution(0, BLOCK)}


def test_a_timeout_is_slow_and_an_error() -> None:
    counts = StageCounts()
    warm().timed_out(assigned(counts, is_candidate=True), 30.0)
    assert counts.candidate.requests == counts.candidate.errors == 1
    assert counts.errors == counts.ranks[RANKS - 1] == Attribution(1, 1)
    assert counts.candidate.over_limit == {"p50_ms": 1}


def test_while_the_baseline_fails_the_candidate_is_not_slow() -> None:
    events, counts = warm(), StageCounts()
    baseline, candidate = (assigned(counts, is_candidate=side) for side in (False, True))
    events.failed(baseline)
    events.answered(candidate, 9.0)
    assert counts.ranks == {}
    events.answered(baseline, 0.001)
    events.answered(candidate, 9.0)
    assert counts.ranks == {0: Attribution(0, 1), RANKS - 1: Attribution(1, 1)}
    events.failed(candidate)  # it is no slower for its failures
    assert counts.ranks[0] == Attribution(1, 2)
    assert counts.errors == Attribution(1, 2)
    assert (counts.baseline.errors, counts.candidate.errors) == (1, 1)


def test_a_request_that_its_client_abandons_has_taken_the_time_until_then() -> None:
    counts = StageCounts()
    warm().abandoned(assigned(counts, is_candidate=True), 0.4)
    assert counts == StageCounts(ranks={LEVELS.index(0.8): Attribution(1, 1)})


def test_a_sticky_key_counts_once_by_each_criterion_of_a_stage() -> None:
    events = warm(STICKY)
    for number in (0, 1):
        counts = StageCounts()
        events.answered(assigned(StageCounts(), is_candidate=False), 0.001)
        (key,) = keys(0.2, 0.3)
        request = assigned(counts, is_candidate=bool(number), number=number, key=key)
        for _ in range(5):
            events.answered(request, 9.0)
            events.failed(request)
            events.wrong(request, "recall")
        once = Attribution(number, 1)
        assert (counts.errors, counts.wrong["recall"]) == (once, once)
        assert counts.ranks == {RANKS - 1: once}
        side = counts.candidate if number else counts.baseline
        assert (side.requests, side.errors) == (10, 5)


def test_a_key_that_the_candidate_had_before_tells_nothing_new() -> None:
    """The side of a key that the baseline had is drawn once more: 10 % of the keys, then 50 %."""
    events, counts = warm(STICKY), StageCounts()
    for low, high in ((0.0, 0.1), (0.1, 0.5), (0.5, 1.0)):
        for key in keys(low, high, 20):
            events.failed(assigned(counts, is_candidate=high <= 0.5, number=1, key=key))
    assert (counts.candidate.errors, counts.baseline.errors) == (40, 20)
    assert counts.errors == Attribution(20, 40)
    assert STICKY.new_share(1) == pytest.approx(0.4 / 0.9)
    assert PLAN.new_share(1) == 0.5


def test_requests_without_a_key_count_as_keys_that_are_drawn_now() -> None:
    events, counts = warm(STICKY), StageCounts()
    for number in range(10_000):
        events.failed(assigned(counts, is_candidate=number % 2 == 0, number=1))
    assert counts.errors.total - counts.errors.candidate == 5000
    share = counts.errors.candidate / counts.errors.total
    assert share == pytest.approx(STICKY.new_share(1), rel=0.03)


def test_requests_that_end_after_their_stage_do_not_count_by_key() -> None:
    events, late = warm(STICKY), StageCounts()
    events.failed(assigned(StageCounts(), is_candidate=False, number=1, key=b"a"))
    events.failed(assigned(late, is_candidate=False, number=0, key=b"b"))
    assert (late.baseline.errors, late.errors) == (1, Attribution(0, 0))


def test_a_process_is_one_source_however_many_stages_it_counts() -> None:
    events, stages = warm(), [StageCounts(), StageCounts()]
    for counts in stages:
        events.answered(assigned(counts, is_candidate=False), 0.1)
    assert [each.sources for each in stages] == [0, 0]
    fresh = RequestEvents(PLAN)
    for counts in stages:
        fresh.answered(assigned(counts, is_candidate=False), 0.1)
    assert [each.sources for each in stages] == [1, 0]


def test_latencies_are_kept_by_eighths_of_an_octave() -> None:
    counts = StageCounts()
    for seconds in (0.0, 1e-6, 2e-6, 0.001024):
        RequestEvents(PLAN).answered(assigned(counts, is_candidate=True), seconds)
    assert counts.candidate.latency == {0: 2, 8: 1, 80: 1}


def test_criteria_that_are_switched_off_count_nothing() -> None:
    off = plans.plan(limits=RolloutLimits(max_p50_regression=None, max_p99_regression=None))
    counts = StageCounts()
    warm(off).answered(assigned(counts, is_candidate=True), 9.0)
    assert counts.ranks == {}
