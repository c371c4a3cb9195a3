"""The e-values are supermartingales, computed exactly; the oracles are exact sums and scipy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import betaln, xlogy
from scipy.stats import binom

from modelport.gateway.rollout.statistics.sequential_tests import (
    LARGE_CHANGES,
    LARGEST_LOGARITHM,
    TrialCounts,
    confidence_sequence,
    log_e_value,
)

ODDS_RATIOS = np.geomspace(1.15, 30, 24)
P0S = (0.001, 0.05, 0.3, 0.7)
ALPHA = 0.05


def e_value(p0: float, successes: int, trials: int, *, opposite: bool = False) -> float:
    return math.exp(log_e_value([TrialCounts(p0, successes, trials)], opposite=opposite))


def crossing_probability(rejects: Callable[[int, int], bool], p: float, trials: int) -> float:
    """The probability that ``rejects(successes, t)`` is ever true, by dynamic programming."""
    alive = {0: 1.0}
    crossed = 0.0
    for t in range(1, trials + 1):
        following: dict[int, float] = {}
        for successes, probability in alive.items():
            for new, part in ((successes + 1, p), (successes, 1 - p)):
                following[new] = following.get(new, 0.0) + probability * part
        crossed += sum(following.pop(one) for one in list(following) if rejects(one, t))
        alive = following
    return crossed


def test_the_e_value_is_the_weighted_mean_of_likelihood_ratios() -> None:
    for p0 in P0S:
        q = p0 * ODDS_RATIOS / (1 - p0 + p0 * ODDS_RATIOS)
        ratios = binom.pmf(7, 50, q) / binom.pmf(7, 50, p0)
        assert e_value(p0, 7, 50) == pytest.approx(float(ratios @ LARGE_CHANGES.weights), rel=1e-9)


@pytest.mark.parametrize("opposite", [False, True])
def test_no_trial_raises_the_expected_e_value_under_the_hypothesis(opposite: bool) -> None:
    for p0 in P0S:
        for trials in (0, 1, 5, 40):
            for successes in {0, 1, trials // 2, trials} & set(range(trials + 1)):
                now = e_value(p0, successes, trials, opposite=opposite)
                up = e_value(p0, successes + 1, trials + 1, opposite=opposite)
                down = e_value(p0, successes, trials + 1, opposite=opposite)
                assert p0 * up + (1 - p0) * down == pytest.approx(now, rel=1e-9)
                within = p0 + 0.5 * (1 - p0) if opposite else 0.5 * p0
                assert within * up + (1 - within) * down < now


def test_the_product_goes_on_when_the_hypothesis_changes_between_stages() -> None:
    first = TrialCounts(0.01, 3, 200)
    for p0 in P0S:
        now = math.exp(log_e_value([first, TrialCounts(p0, 4, 20)]))
        up = math.exp(log_e_value([first, TrialCounts(p0, 5, 21)]))
        down = math.exp(log_e_value([first, TrialCounts(p0, 4, 21)]))
        assert p0 * up + (1 - p0) * down == pytest.approx(now, rel=1e-9)


def test_a_mean_over_products_that_begin_at_each_stage_is_a_supermartingale_too() -> None:
    first, second = TrialCounts(0.01, 3, 200), TrialCounts(0.05, 1, 30)
    for before in ([], [first], [first, second]):
        for p0 in P0S:
            now, up, down = (
                math.exp(log_e_value([*before, TrialCounts(p0, *counted)], stages=4))
                for counted in ((4, 20), (5, 21), (4, 21))
            )
            assert p0 * up + (1 - p0) * down == pytest.approx(now, rel=1e-9)
    # A stage that begins changes nothing.
    begun = log_e_value([first, second, TrialCounts(0.3, 0, 0)], stages=4)
    assert begun == pytest.approx(log_e_value([first, second], stages=4))
    assert log_e_value([], stages=4) == pytest.approx(0)


def test_good_stages_do_not_hide_harm_at_a_later_one() -> None:
    good, bad = TrialCounts(0.001, 0, 100_000), TrialCounts(0.001, 12, 1000)
    assert log_e_value([good, bad]) < 0
    assert log_e_value([good, bad], stages=4) > math.log(60)


@pytest.mark.parametrize("p0", [0.05, 0.3])
def test_a_look_at_every_trial_raises_at_most_alpha_of_false_alarms(p0: float) -> None:
    def rejects(successes: int, t: int) -> bool:
        return e_value(p0, successes, t) >= 1 / ALPHA

    assert 0.001 < crossing_probability(rejects, p0, 250) <= ALPHA
    assert crossing_probability(rejects, 3 * p0, 250) > 0.9


def test_a_fixed_sample_test_that_looks_at_every_trial_is_caught() -> None:
    """The known-bad variant: a binomial test, repeated."""
    table = binom.sf(np.arange(-1, 250)[:, None], np.arange(251)[None, :], 0.05)

    def rejects(successes: int, t: int) -> bool:
        return bool(table[successes, t] <= ALPHA)

    assert crossing_probability(rejects, 0.05, 250) > 3 * ALPHA


def test_a_hypothesis_without_room_is_refuted_by_one_trial_or_never() -> None:
    assert log_e_value([TrialCounts(0.0, 1, 100)]) == LARGEST_LOGARITHM
    assert log_e_value([TrialCounts(0.0, 0, 100)]) == pytest.approx(0)
    assert log_e_value([TrialCounts(1.0, 100, 100)]) == pytest.approx(0)
    assert log_e_value([TrialCounts(1.0, 99, 100)], opposite=True) == LARGEST_LOGARITHM
    assert log_e_value([TrialCounts(0.0, 0, 100)], opposite=True) == pytest.approx(0)
    assert log_e_value([]) == pytest.approx(0)


def test_counts_of_years_of_traffic_overflow_nothing() -> None:
    for successes in (0, 10**6, 10**12):
        for opposite in (False, True):
            found = log_e_value([TrialCounts(1e-6, successes, 10**12)], opposite=opposite)
            assert math.isfinite(found)
            assert found <= LARGEST_LOGARITHM


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (1, 100), (30, 1000), (9, 9)])
def test_the_confidence_sequence_is_the_beta_mixtures(successes: int, trials: int) -> None:
    found = confidence_sequence([TrialCounts(0.5, successes, trials)], ALPHA)
    assert found is not None
    shares = [value / (1 + value) if math.isfinite(value) else 1.0 for value in found]
    assert shares[0] == pytest.approx(successes / trials)
    level = betaln(successes + 0.5, trials - successes + 0.5) - betaln(0.5, 0.5) + math.log(ALPHA)

    def excess(p: float) -> float:
        return float(xlogy(successes, p) + xlogy(trials - successes, 1 - p) - level)

    estimate = successes / trials
    assert shares[1] == pytest.approx(brentq(excess, 1e-12, estimate) if successes else 0)
    assert shares[2] == pytest.approx(brentq(excess, estimate, 1) if successes < trials else 1)


def test_the_confidence_sequence_of_stages_narrows_around_their_common_ratio() -> None:
    """Expected counts of a ratio of 2, at shares of 1 %, 10 % and 50 %."""

    def counts(scale: int) -> list[TrialCounts]:
        return [
            TrialCounts(p0, scale * 2 * p0 / (1 + p0), scale) for p0 in (0.01, 0.1, 0.5, 1.0, 0.0)
        ]

    few, many = confidence_sequence(counts(100), ALPHA), confidence_sequence(counts(10_000), ALPHA)
    assert few is not None
    assert many is not None
    assert few.estimate == pytest.approx(2)
    assert few.lower < many.lower < 2 < many.upper < few.upper
    assert confidence_sequence([TrialCounts(0.3, 0, 0)], ALPHA) is None


def test_the_confidence_sequence_covers_the_truth_at_every_moment() -> None:
    generator = np.random.default_rng(0)
    missed = 0
    for _ in range(60):
        successes = np.cumsum(generator.random(300) < 0.2)
        bounds = [
            confidence_sequence([TrialCounts(0.2, int(successes[t - 1]), t)], ALPHA)
            for t in range(1, 301, 10)
        ]
        missed += any(one is not None and not one.lower <= 1 <= one.upper for one in bounds)
    assert missed <= 3
