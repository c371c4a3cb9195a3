"""Intervals hold what they promise, on data whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtri

from modelport.loadtests import confidence_intervals
from modelport.loadtests.confidence_intervals import Interval, Tails, TooFewSamples
from modelport.loadtests.gate import alpha_spending
from tests.loadtests.gating.simulation import SHARED, Loading, simulated

#: With a true error of 5 %, more than this happens once in a thousand times.
TRIALS, MOST_MISSES = 80, 12


def pairs(
    seed: int, rounds: int, loading: Loading = Loading.SLICES
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Latencies of two identical builds on a shared machine."""
    stream = simulated(SHARED, loading, np.random.default_rng(seed))
    found = [next(stream) for _ in range(rounds)]
    baseline = [one.baseline.latencies_ms for one in found]
    return [one.candidate.latencies_ms for one in found], baseline


@pytest.mark.parametrize("loading", Loading)
@pytest.mark.parametrize(("q", "rounds"), [(0.5, 4), (0.99, 8)])
def test_a_95_percent_interval_of_a_ratio_misses_the_truth_in_at_most_5_percent(
    q: float, rounds: int, loading: Loading
) -> None:
    misses = sum(
        confidence_intervals.quantile_ratio(*pairs(seed, rounds, loading), q).excludes(1.0)
        for seed in range(TRIALS)
    )
    assert misses <= MOST_MISSES


def test_an_interval_of_a_quantile_misses_the_truth_in_at_most_5_percent() -> None:
    misses = 0
    truth = math.exp(0.5 * 2.3263478740408408)  # p99 of a lognormal with sigma 0.5
    for generator in np.random.default_rng(7).spawn(TRIALS):
        speed = generator.normal(0, 0.05, (12, 1))
        rounds = list(np.exp(speed + generator.normal(0, 0.5, (12, 400))))
        misses += confidence_intervals.quantile(rounds, 0.99).excludes(truth)
    assert misses <= MOST_MISSES


def test_a_real_difference_is_seen_through_the_drift_of_the_machine() -> None:
    candidate, baseline = pairs(1, 24)
    for one, other in zip(candidate, baseline, strict=True):
        speed = np.random.default_rng(len(one)).uniform(0.5, 2)
        one *= 1.15 * speed
        other *= speed
    found = confidence_intervals.quantile_ratio(candidate, baseline, 0.5)
    assert found.lower > 1.0
    assert found.estimate == pytest.approx(1.15, abs=0.05)


def test_the_ratio_of_rounds_is_their_paired_mean_with_students_interval() -> None:
    baseline = [10.0, 12.0, 9.0, 11.0]
    found = confidence_intervals.ratio([value * 2 for value in baseline], baseline)
    assert (found.estimate, found.lower, found.upper) == pytest.approx((2.0, 2.0, 2.0))
    logs = np.array([0.1, -0.1, 0.3, 0.0])
    found = confidence_intervals.ratio(np.exp(logs).tolist(), [1.0] * 4)
    half = 3.1824463 * logs.std(ddof=1) / 2  # t of 0.975 with 3 degrees of freedom, root of 4
    assert math.log(found.upper) == pytest.approx(logs.mean() + half, rel=0.06)
    assert math.log(found.lower) == pytest.approx(logs.mean() - half, abs=0.02)


def test_one_burst_of_a_neighbour_decides_nothing() -> None:
    candidate = [1.0 + 0.01 * (number % 3) for number in range(16)]
    baseline = list(candidate)
    candidate[5] *= 20
    found = confidence_intervals.ratio(candidate, baseline)
    assert found.estimate == pytest.approx(1.0, abs=0.02)
    assert not found.excludes(1.0)


def test_requests_of_one_round_are_not_independent_observations() -> None:
    generator = np.random.default_rng(3)
    alike = list(np.exp(generator.normal(0, 0.3, (10, 1)) + generator.normal(0, 0.1, (10, 500))))
    mixed = list(generator.permutation(np.concatenate(alike)).reshape(10, 500))
    widths = [
        math.log(found.upper / found.lower)
        for found in (confidence_intervals.quantile(rounds, 0.5) for rounds in (alike, mixed))
    ]
    assert widths[0] > 4 * widths[1]


def test_slow_spells_within_a_single_round_widen_its_interval() -> None:
    generator = np.random.default_rng(4)
    spells = np.repeat(generator.normal(0, 0.5, 20), 100)
    alike = np.exp(spells + generator.normal(0, 0.1, 2000))
    widths = [
        math.log(found.upper / found.lower)
        for found in (
            confidence_intervals.quantile([one], 0.5)
            for one in (alike, generator.permutation(alike))
        )
    ]
    assert widths[0] > 2 * widths[1]


def test_a_p99_needs_a_thousand_requests_and_says_how_many_more() -> None:
    assert confidence_intervals.required_samples(0.99) == 1000
    assert confidence_intervals.required_samples(0.5) == 20
    few = [np.ones(300), np.ones(300)]
    with pytest.raises(TooFewSamples, match="600 requests; p99 needs 1000, 400 more") as raised:
        confidence_intervals.quantile(few, 0.99)
    assert raised.value.more == 400
    with pytest.raises(TooFewSamples, match="400 more"):
        confidence_intervals.quantile_ratio(few, few, 0.99)


def test_rounds_with_few_requests_are_taken_together() -> None:
    generator = np.random.default_rng(5)
    baseline = [np.exp(generator.normal(0, 0.3, 100)) for _ in range(30)]
    candidate = [np.exp(generator.normal(0, 0.3, 100)) for _ in range(30)]
    assert confidence_intervals.quantile_ratio(candidate, baseline, 0.99).units == 6
    assert confidence_intervals.quantile_ratio(candidate, baseline, 0.5).units == 30


@pytest.mark.parametrize(
    ("candidate", "baseline", "said"),
    [
        ([1.0], [1.0], "1 of 2 rounds"),
        ([1.0, 2.0], [1.0], "2 rounds of the candidate, 1 of the baseline"),
        ([1.0, 0.0], [1.0, 1.0], "above 0"),
        ([1.0, math.nan], [1.0, 1.0], "above 0"),
        ([1.0, math.inf], [1.0, 1.0], "above 0"),
        ([], [], "0 of 2 rounds"),
    ],
)
def test_a_ratio_of_nothing_is_refused(
    candidate: list[float], baseline: list[float], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        confidence_intervals.ratio(candidate, baseline)


@pytest.mark.parametrize(
    ("bad", "total", "lower", "upper"),
    # Clopper and Pearson's exact intervals, as tables have them.
    [
        (0, 10, 0.0, 0.3085),
        (5, 20, 0.0866, 0.4910),
        (10, 10, 0.6915, 1.0),
        (1, 1000, 2.5e-5, 0.00556),
    ],
)
def test_the_interval_of_a_share_is_the_exact_one(
    bad: int, total: int, lower: float, upper: float
) -> None:
    found = confidence_intervals.share([bad], [total])
    assert (found.lower, found.upper) == pytest.approx((lower, upper), abs=1e-4)


def test_errors_in_bursts_are_fewer_observations_than_errors_apart() -> None:
    spread = confidence_intervals.share([2] * 10, [1000] * 10)
    burst = confidence_intervals.share([20] + [0] * 9, [1000] * 10)
    assert spread.estimate == burst.estimate
    assert burst.upper > 2 * spread.upper


@pytest.mark.parametrize(("bad", "total"), [([2], [1]), ([-1], [1]), ([1, 1], [3])])
def test_a_share_of_more_than_all_is_refused(bad: list[int], total: list[int]) -> None:
    with pytest.raises(ValueError, match="0 ≤ bad ≤ total"):
        confidence_intervals.share(bad, total)


def test_the_looks_together_spend_the_error_and_no_more() -> None:
    spent = [alpha_spending.spend(0.05, fraction) for fraction in (0, 0.05, 0.2, 0.5, 1.0, 1.5)]
    assert spent == sorted(spent)
    assert spent[0] == 0
    assert spent[-2:] == pytest.approx([0.05, 0.05])
    looks = (0.05, 0.2, 0.4, 0.6, 0.8, 1.0)
    walks = np.random.default_rng(0).standard_normal((100_000, 20)).cumsum(axis=1)
    crossed = np.zeros(len(walks), bool)
    for number, look in enumerate(looks, 1):
        step = round(20 * look)
        bound = -ndtri(alpha_spending.level(0.05, looks[:number])) * math.sqrt(step)
        crossed |= walks[:, step - 1] > bound
    assert crossed.mean() == pytest.approx(0.05, abs=0.003)


def test_a_single_look_has_all_of_the_error_and_the_last_of_many_most_of_it() -> None:
    assert alpha_spending.level(0.05, (1.0,)) == pytest.approx(0.05)
    assert 0.03 < alpha_spending.level(0.05, (0.2, 0.6, 1.0)) < 0.05
    for wrong in ((), (0.0,), (0.5, 0.5), (0.6, 0.4), (0.5, 1.1)):
        with pytest.raises(ValueError, match="look"):
            alpha_spending.level(0.05, wrong)


def test_half_the_width_takes_four_times_as_long() -> None:
    wide = Interval(1.02, 1.02 / 1.06, 1.02 * 1.06, 0.95, 10)
    needed = confidence_intervals.rounds_needed(wide, 1.05)
    assert needed == pytest.approx((math.log(1.06) / math.log(1.05 / 1.02)) ** 2)
    assert confidence_intervals.rounds_needed(wide, 2.0) == 1.0
    assert confidence_intervals.rounds_needed(wide, 1.02) == math.inf


def test_the_quantiles_of_a_ratio_are_the_usual_ones() -> None:
    generator = np.random.default_rng(6)
    for q, count in ((0.5, 501), (0.99, 1500), (0.999, 10_000)):
        sides = [[np.exp(generator.normal(0, 1, count))] * 2 for _ in range(2)]
        found = confidence_intervals.quantile_ratio(*sides, q)
        ratio = np.quantile(sides[0][0], q) / np.quantile(sides[1][0], q)
        assert found.estimate == pytest.approx(ratio, rel=1e-12)


def test_the_same_seed_gives_the_same_interval() -> None:
    candidate, baseline = pairs(2, 6)
    one = confidence_intervals.quantile_ratio(candidate, baseline, 0.99, seed=3)
    assert one == confidence_intervals.quantile_ratio(candidate, baseline, 0.99, seed=3)
    assert one != confidence_intervals.quantile_ratio(candidate, baseline, 0.99, seed=4)


def test_two_rounds_at_the_smallest_error_promise_nothing() -> None:
    found = confidence_intervals.ratio([1.0, 3.0], [1.0, 1.0], Tails(1e-9, 1e-9))
    assert 0 < found.lower < 1e-100
    assert 1e100 < found.upper < math.inf
    assert confidence_intervals.rounds_needed(found, 1.05) > 1e5


def test_the_tails_of_an_interval_may_differ() -> None:
    candidate, baseline = pairs(2, 8)
    even = confidence_intervals.quantile_ratio(candidate, baseline, 0.5, 0.9)
    uneven = confidence_intervals.quantile_ratio(candidate, baseline, 0.5, Tails(0.01, 0.05))
    assert uneven.upper == pytest.approx(even.upper)
    assert uneven.lower < even.lower
    with pytest.raises(ValueError, match="not between 0 and 1"):
        Tails.of(1.0)
