"""Slow requests are counted by thresholds that the baseline's earlier requests set."""

from __future__ import annotations

import random

import pytest

from modelport.gateway.rollout.counts import Attribution, StageCounts
from modelport.gateway.rollout.plan import RolloutLimits
from modelport.gateway.rollout.request_events import BLOCK, WINDOW, RequestEvents

LIMITS = RolloutLimits(p50_ms=200.0, max_first_byte_p99_regression=0.2)


def warm(limits: RolloutLimits = LIMITS) -> RequestEvents:
    """Events after one block of the baseline: 1, 2, ... ms, so that its p50 and p99 are known."""
    events = RequestEvents(limits, random.Random(0))
    for number in range(1, BLOCK + 1):
        events.answered(
            StageCounts(), is_candidate=False, seconds=number / 1e3, first_byte_seconds=number / 2e3
        )
    return events


def slow(events: RequestEvents, seconds: float, *, is_candidate: bool) -> set[str]:
    counts = StageCounts()
    events.answered(
        counts, is_candidate=is_candidate, seconds=seconds, first_byte_seconds=seconds / 2
    )
    for each in counts.slow.values():
        assert each == Attribution(int(is_candidate), 1)
    return set(counts.slow)


def test_nothing_is_slow_before_the_baseline_has_a_quantile() -> None:
    events = RequestEvents(LIMITS)
    for _ in range(BLOCK):
        assert slow(events, 9.0, is_candidate=True) == set()
    for _ in range(BLOCK):
        assert slow(events, 0.001, is_candidate=False) == set()
    assert slow(events, 9.0, is_candidate=True) == {"p50", "p99", "first_byte_p99"}


def test_the_candidates_threshold_has_the_allowed_regression() -> None:
    """The baseline's quantiles are 250 and 495 ms; the candidate may take 5 % more."""
    events = warm()
    assert slow(events, 0.2505, is_candidate=False) == {"p50"}
    assert slow(events, 0.2620, is_candidate=True) == set()
    assert slow(events, 0.2626, is_candidate=True) == {"p50"}
    assert slow(events, 0.4955, is_candidate=False) == {"p50", "p99", "first_byte_p99"}
    assert slow(events, 0.5190, is_candidate=True) == {"p50"}
    assert slow(events, 0.5200, is_candidate=True) == {"p50", "p99"}
    # The first byte's limit is 20 %.
    assert slow(events, 0.6000, is_candidate=True) == {"p50", "p99", "first_byte_p99"}


def test_thresholds_follow_the_baseline_and_not_the_candidate() -> None:
    events = warm()
    for _ in range(WINDOW):
        events.answered(StageCounts(), is_candidate=True, seconds=9.0)
    assert slow(events, 0.2626, is_candidate=True) == {"p50"}
    for _ in range(WINDOW):
        events.answered(StageCounts(), is_candidate=False, seconds=5.0)
    assert slow(events, 5.2, is_candidate=True) == {"first_byte_p99"}


def test_a_threshold_is_of_earlier_requests_only() -> None:
    """The last request of a block is compared with the threshold before its own block's."""
    events = warm()
    counts = StageCounts()
    for _ in range(BLOCK):
        events.answered(counts, is_candidate=False, seconds=9.0)
    assert counts.slow["p99"] == Attribution(0, BLOCK)


def test_a_timeout_is_slow_and_an_error() -> None:
    counts = StageCounts()
    warm().timed_out(counts, is_candidate=True, seconds=30.0)
    assert counts.candidate.requests == counts.candidate.errors == 1
    assert counts.errors == counts.slow["p99"] == Attribution(1, 1)
    assert counts.candidate.over_limit == {"p50_ms": 1}


def test_failures_of_the_baseline_are_slow_as_often_as_its_other_requests() -> None:
    events, counts = warm(), StageCounts()
    for _ in range(10_000):
        events.failed(counts, is_candidate=False)
    assert counts.slow["p50"].total == pytest.approx(5000, rel=0.05)
    assert counts.slow["p99"].total == pytest.approx(100, rel=0.3)
    for _ in range(1000):
        events.failed(counts, is_candidate=True)
    assert {each.candidate for each in counts.slow.values()} == {0}
    assert counts.errors == Attribution(1000, 11_000)
    assert (counts.baseline.errors, counts.candidate.errors) == (10_000, 1000)


def test_a_sticky_key_counts_once_by_each_criterion() -> None:
    events, counts = warm(), StageCounts()
    for _ in range(5):
        events.answered(counts, is_candidate=True, seconds=9.0, key="ada")
        events.failed(counts, is_candidate=True, key="ada")
        events.wrong(counts, "recall", is_candidate=True, key="ada")
    assert counts.candidate.requests == 10
    assert counts.candidate.errors == 5
    once = Attribution(1, 1)
    assert (counts.errors, counts.slow["p50"], counts.wrong["recall"]) == (once, once, once)
    for number in range(100):
        events.failed(counts, is_candidate=False, key=f"key {number}")
    assert counts.errors.total == pytest.approx(101, abs=1)


def test_a_process_is_one_source_however_many_stages_it_counts() -> None:
    events, stages = warm(), [StageCounts(), StageCounts()]
    for counts in stages:
        events.answered(counts, is_candidate=False, seconds=0.1)
    assert [each.sources for each in stages] == [0, 0]
    fresh = RequestEvents(LIMITS)
    for counts in stages:
        fresh.answered(counts, is_candidate=False, seconds=0.1)
    assert [each.sources for each in stages] == [1, 0]


def test_latencies_are_kept_by_eighths_of_an_octave() -> None:
    counts = StageCounts()
    for seconds in (0.0, 1e-6, 2e-6, 0.001024):
        RequestEvents(LIMITS).answered(counts, is_candidate=True, seconds=seconds)
    assert counts.candidate.latency == {0: 2, 8: 1, 80: 1}


def test_criteria_that_are_switched_off_count_nothing() -> None:
    off = RolloutLimits(max_p50_regression=None, max_p99_regression=None)
    assert slow(warm(off), 9.0, is_candidate=True) == set()
