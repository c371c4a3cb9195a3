"""Significance levels of interim analyses that keep the overall error probability.

Repeated looks with a stop at the first favourable one exceed the intended error. Here the error is
spent gradually: Lan and DeMets, "Discrete sequential boundaries for clinical trials" (Biometrika
1983), with the spending function alpha * t^3 of Kim and DeMets (1987), which keeps most for the
end, as O'Brien and Fleming do. The level of a look follows from the joint distribution of the
looks, those of a Brownian motion (Armitage, McPherson and Rowe 1969), by numerical integration.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
from scipy.special import ndtr, ndtri

#: Exponent of the spending function.
POWER = 3
GRID = 601
#: Standard deviations below which paths are negligible.
LOWEST = -9.0


def spend(error: float, fraction: float) -> float:
    """The part of ``error`` spent by ``fraction`` (0..1) of the longest duration."""
    return error * float(min(max(fraction, 0.0), 1.0) ** POWER)


@functools.lru_cache(maxsize=1024)
def level(error: float, looks: tuple[float, ...]) -> float:
    """The one-sided level of the last of ``looks``, ascending fractions of the longest duration.

    Tests at each look's level have an overall error probability of at most ``error``.

    Raises:
        ValueError: the looks do not ascend within (0, 1].
    """
    if not looks or not all(a < b for a, b in itertools.pairwise((0.0, *looks))):
        raise ValueError(f"looks at {looks} do not ascend")
    if looks[-1] > 1:
        raise ValueError(f"a look at {looks[-1]} is after the end")
    look = looks[0]
    bound = float(-ndtri(spend(error, look)) * math.sqrt(look))
    nodes = np.linspace(LOWEST * math.sqrt(looks[0]), bound, GRID)
    density = np.exp(-(nodes**2) / (2 * looks[0])) / math.sqrt(2 * math.pi * looks[0])
    for before, now in itertools.pairwise(looks):
        step = math.sqrt(now - before)
        weights = density * _trapezoid(nodes)
        wanted = spend(error, now) - spend(error, before)
        bound = _bound(nodes, weights, step, wanted)
        ahead = np.linspace(LOWEST * math.sqrt(now), bound, GRID)
        kernel = np.exp(-((ahead[:, None] - nodes[None, :]) ** 2) / (2 * step**2))
        density = kernel @ weights / (step * math.sqrt(2 * math.pi))
        nodes = ahead
    return float(ndtr(-bound / math.sqrt(looks[-1])))


def _bound(nodes: np.ndarray, weights: np.ndarray, step: float, wanted: float) -> float:
    """The bound that ``wanted`` of the continuing paths have crossed, by bisection."""
    low, high = -10.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        crossed = float(weights @ ndtr((nodes - middle) / step))
        low, high = (middle, high) if crossed > wanted else (low, middle)
    return (low + high) / 2


def _trapezoid(nodes: np.ndarray) -> np.ndarray:
    widths = np.full(len(nodes), nodes[1] - nodes[0])
    widths[[0, -1]] /= 2
    return widths
