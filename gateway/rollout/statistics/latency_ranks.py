"""Ranks of latencies among the baseline's earlier ones, and the test of their whole distribution.

The rank of a request is the number of ``LEVELS`` whose threshold it exceeds. The thresholds of the
baseline's requests are quantiles of its own earlier ones; those of the candidate's are longer by
the allowed regression. If the candidate keeps the limits, the baseline's ranks dominate: a rank of
at least k is no more likely on the candidate's side, for any k. Then the mean of a factor whose
odds ratio grows with the rank is at most 1 (``OddsRatios``), whatever the moment is like, so that
one e-value tests every quantile at once.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from modelport.gateway.rollout.plan import RolloutLimits
from modelport.gateway.rollout.statistics.counts import RANKS
from modelport.gateway.rollout.statistics.sequential_tests import Floats, OddsRatios

#: Quantiles of the baseline's latencies.
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
assert len(LEVELS) + 1 == RANKS
#: The limit of the p99 holds from this quantile on, that of the p50 below.
TAIL = 0.9
#: Alternatives in which everything is slower, by standard deviations of the latency's logarithm.
_SHIFTS = (0.05, 0.1, 0.2, 0.5, 1.0)
#: Alternatives in which a part of the requests is slower: the quantiles from which on, and the
#: ratio of their rate.
_TAILS, _RATIOS = (0.9, 0.95, 0.99, 0.995), (1.25, 1.6, 2.2, 3.5, 8.0)
#: Weight of ``_SHIFTS`` together.
_SHIFTED = 0.4

_EDGES = np.array([0.0, *LEVELS, 1.0])
#: Probabilities of the baseline's ranks.
RANK_SHARES: Floats = np.diff(_EDGES)


def shifted(shift: float) -> Floats:
    """Probabilities of the ranks if everything is slower by ``shift`` standard deviations."""
    scores = np.array([-math.inf, *map(NormalDist().inv_cdf, LEVELS), math.inf])
    below = [NormalDist(shift).cdf(score) for score in scores]
    return np.diff(np.array(below))


def heavier(level: float, ratio: float) -> Floats:
    """Probabilities of the ranks if those above ``level`` are ``ratio`` times as frequent."""
    above = _EDGES[:-1] >= level
    share = float(RANK_SHARES[above].sum())
    rest = (1 - ratio * share) / (1 - share)
    return np.asarray(RANK_SHARES * np.where(above, ratio, rest))


def _test() -> OddsRatios:
    shifts = [shifted(each) for each in _SHIFTS]
    tails = [heavier(level, ratio) for level in _TAILS for ratio in _RATIOS]
    weights = [_SHIFTED / len(shifts)] * len(shifts)
    weights += [(1 - _SHIFTED) / len(tails)] * len(tails)
    return OddsRatios(np.log(np.array(shifts + tails) / RANK_SHARES), np.array(weights))


LATENCY = _test()


def allowed_regressions(limits: RolloutLimits) -> Floats | None:
    """The allowed regression at each of ``LEVELS``; infinite where no limit is set, or None."""
    body = _least(limits.max_p50_regression, limits.max_first_byte_p50_regression)
    tail = _least(limits.max_p99_regression, limits.max_first_byte_p99_regression)
    if math.isinf(body) and math.isinf(tail):
        return None
    return np.where(np.array(LEVELS) < TAIL, body, tail)


def _least(*regressions: float | None) -> float:
    """The strictest; a rollout's time to the first byte is the latency."""
    return min((each for each in regressions if each is not None), default=math.inf)
