"""No candidate within its limits raises the e-value of the whole distribution on average."""

from __future__ import annotations

import math

import numpy as np
import pytest

from modelport.gateway.rollout.plan import RolloutLimits
from modelport.gateway.rollout.statistics import retrained
from modelport.gateway.rollout.statistics.counts import CLASSES, RANKS, SCORE_BINS
from modelport.gateway.rollout.statistics.latency_ranks import (
    LATENCY,
    LEVELS,
    RANK_SHARES,
    allowed_regressions,
    heavier,
    shifted,
)
from modelport.gateway.rollout.statistics.sequential_tests import Floats, OddsRatios, SequentialTest

SHARES = (0.01, 0.25, 0.9)


def mean_factors(test: SequentialTest, share: float, baseline: Floats, candidate: Floats) -> Floats:
    """The mean factor of a request, by alternative."""
    outcomes = np.concatenate([share * candidate, (1 - share) * baseline])
    return np.asarray(np.exp(test.log_factors(share)) @ outcomes)


def test_the_same_distribution_is_a_martingale_at_any_moment() -> None:
    generator = np.random.default_rng(0)
    for share in SHARES:
        for ranks in (RANK_SHARES, *generator.dirichlet(np.ones(RANKS), 5)):
            assert mean_factors(LATENCY, share, ranks, ranks) == pytest.approx(1)


def test_a_faster_distribution_raises_no_alternative_whatever_the_moment_is_like() -> None:
    """Mass of the baseline's ranks moves to lower ones, at random."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        baseline, candidate = generator.dirichlet(np.ones(RANKS)), np.zeros(RANKS)
        for rank, mass in enumerate(baseline):
            candidate[: rank + 1] += mass * generator.dirichlet(np.full(rank + 1, 0.3))
        for share in SHARES:
            assert mean_factors(LATENCY, share, baseline, candidate).max() <= 1 + 1e-12


def test_an_alternative_that_does_not_grow_with_the_rank_is_caught() -> None:
    """The known-bad variant: with it, a faster candidate looks harmful."""
    falling = OddsRatios(np.linspace(1, -1, RANKS)[None, :], np.ones(1))
    faster = shifted(-0.5)
    assert mean_factors(falling, 0.25, RANK_SHARES, faster).max() > 1.02
    assert mean_factors(LATENCY, 0.25, RANK_SHARES, faster).max() < 1


@pytest.mark.parametrize(
    "slower", [shifted(0.08), heavier(0.99, 2.2), heavier(0.5, 1.2), heavier(0.999, 20.0)]
)
def test_every_change_of_the_shape_raises_some_alternative(slower: Floats) -> None:
    assert slower.sum() == pytest.approx(1)
    assert mean_factors(LATENCY, 0.25, RANK_SHARES, slower).max() > 1


@pytest.mark.parametrize("criterion", ["class_shares", "scores"])
def test_moves_within_the_limit_are_a_supermartingale(criterion: str) -> None:
    base = CLASSES if criterion == "class_shares" else SCORE_BINS
    moved, back = retrained.moves(criterion)
    generator = np.random.default_rng(0)
    for limit in (0.0, 0.05, 0.6):
        factors = np.exp(retrained.net_moves(criterion, limit).log_factors(0.5))
        assert np.isfinite(factors).all()
        for _ in range(20):
            pairs = generator.dirichlet(np.full(base**2, 0.05))
            net = (moved - back) @ pairs
            kept = np.resize(net <= limit, len(factors))
            assert (factors @ pairs)[kept].max() <= 1 + 1e-12
            assert (factors @ pairs)[~kept].max(initial=2) > 1


def test_the_stricter_limit_of_a_quantile_holds() -> None:
    limits = RolloutLimits(max_p99_regression=0.3, max_first_byte_p99_regression=0.1)
    found = allowed_regressions(limits)
    assert found is not None
    assert dict(zip(LEVELS, found, strict=True)) == {
        level: 0.1 if level >= 0.9 else 0.05 for level in LEVELS
    }
    off = RolloutLimits(max_p50_regression=None, max_p99_regression=None)
    assert allowed_regressions(off) is None
    tail = allowed_regressions(RolloutLimits(max_p50_regression=None))
    assert tail is not None
    assert [math.isinf(each) for each in tail] == [level < 0.9 for level in LEVELS]
