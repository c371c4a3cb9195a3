"""Requests after which a harm would have been found, with a given probability.

Under a harm the outcomes are about normal around their means. The e-value is taken where the
alternative that finds the harm soonest is as low as it is with the remaining probability; all
alternatives together are higher.
"""

from __future__ import annotations

import math
import operator
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
    known = [
        (requests, test.log_factors(p0), np.asarray(rates))
        for p0, requests, rates in stages
        if 0 < p0 < 1
    ]
    means = [factors @ rates for _, factors, rates in known]
    variances = [factors**2 @ rates for _, factors, rates in known]
    grows = 0 < stages[-1].p0 < 1 and bool((means[-1] > 0).any())

    def found(further: float) -> bool:
        numbers = [requests for requests, _, _ in known]
        if grows:
            numbers[-1] += further
        gained = np.log(test.weights) + sum(map(operator.mul, numbers, means))
        deviations = np.sqrt(sum(map(operator.mul, numbers, variances), 1e-9))
        best = int((gained - level * deviations).argmax())
        covariance = sum(
            number * (factors @ (factors[best] * rates))
            for number, (_, factors, rates) in zip(numbers, known, strict=True)
        )
        low = gained - level * covariance / deviations[best]
        largest = float(low.max())
        return largest + math.log(float(np.exp(low - largest).sum())) >= needed

    if known and found(0):
        return 0
    if not grows:
        return None
    return math.ceil(STEP ** bisect_left(range(MOST), True, key=lambda power: found(STEP**power)))


#: Numbers of requests that are looked at: powers of this, up to this one.
STEP, MOST = 1.02, 1500
