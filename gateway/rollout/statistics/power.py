"""Requests after which a harm would have been found, with a given probability.

Under a harm the outcomes are about normal around their means. The e-value is taken where the
alternative that finds the harm soonest is as low as it is with the remaining probability; all
alternatives together are higher.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from modelport.gateway.rollout.statistics.sequential_tests import SequentialTest


class HarmfulStage(NamedTuple):
    """A stage under a harm: the requests so far, and the rate of each outcome in a request."""

    p0: float
    requests: float
    rates: Sequence[float]


def missing_requests(
    stages: Sequence[HarmfulStage], test: SequentialTest, alpha: float, power: float
) -> int | None:
    """Further requests of the last stage; None if no number of them is enough.

    Args:
        power: probability that the e-value has reached ``1 / alpha`` by then.
    """
    level, needed = NormalDist().inv_cdf(power), math.log(1 / alpha)
    log_weights = np.log(test.weights)
    mean = growth = np.zeros(len(log_weights))
    covariance = spread = np.zeros(2 * mean.shape)
    for p0, requests, rates in stages:
        growth, spread = np.zeros_like(growth), np.zeros_like(spread)
        if 0 < p0 < 1:
            factors = test.log_factors(p0)
            growth, spread = factors @ rates, (factors * rates) @ factors.T
            mean, covariance = mean + requests * growth, covariance + requests * spread

    def found(further: int) -> bool:
        gained, covered = mean + further * growth, covariance + further * spread
        deviations = np.sqrt(covered.diagonal())
        best = int((gained - level * deviations + log_weights).argmax())
        low = log_weights + gained - level * covered[best] / max(deviations[best], 1e-9)
        largest = float(low.max())
        return largest + math.log(float(np.exp(low - largest).sum())) >= needed

    if found(0):
        return 0
    if not (growth > 0).any():
        return None
    return 1 + bisect_left(range(1, MOST), True, key=found)


#: Numbers of requests that are looked at.
MOST = 1 << 40
