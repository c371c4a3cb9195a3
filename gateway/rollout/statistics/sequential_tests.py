"""Sequential tests of rates, valid at every moment: they may be looked at after every request.

The null hypothesis is that the mean of each trial, given all before it, is at most ``p0``. With r
the ratio of an alternative's odds to those of ``p0``, the e-value of S successes in t trials is

    E = weighted mean over a grid of r > 1 of  r^S / (1 + p0 (r - 1))^t

which is the likelihood ratio of the alternative, averaged. A factor's mean is at most 1 under the
null hypothesis, so the product is a supermartingale, and the probability that E ever reaches
1 / alpha is at most alpha (Ville 1939; Howard, Ramdas, McAuliffe, Sekhon, arXiv 1810.08240). It
needs no independence, and ``p0`` may change between trials: the product continues. r < 1 tests the
opposite hypothesis, "at least ``p0``".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: Alternatives: ratios of odds.
ODDS_RATIOS = np.geomspace(1.15, 30, 24)
#: Emphasis on small ratios, for rates that may rise many times over, and for those that hardly do.
LARGE_CHANGES, SMALL_CHANGES = 0.5, 1.5
#: Weight of the product over all stages, beside those that begin at a later stage.
FIRST_WEIGHT = 0.9
#: Stands for an infinite logarithm, which JSON does not have.
LARGEST_LOGARITHM = 1e6
#: Range of the logarithms of odds ratios in a confidence sequence, and the halvings to find one.
_LARGEST_LOG_ODDS, _HALVINGS = 40.0, 60


class TrialCounts(NamedTuple):
    """Successes among trials, each of a mean of at most ``p0`` under the null hypothesis."""

    p0: float
    successes: float
    trials: float


class ConfidenceSequence(NamedTuple):
    """An estimate, and bounds that hold at every moment at once."""

    estimate: float
    lower: float
    upper: float


def weights_of(emphasis: float) -> npt.NDArray[np.float64]:
    """The weights of ``ODDS_RATIOS``: each in proportion to its power of ``-emphasis``."""
    weights = ODDS_RATIOS**-emphasis
    return np.asarray(weights / weights.sum())


def log_e_value(
    counts: Sequence[TrialCounts],
    *,
    emphasis: float = LARGE_CHANGES,
    opposite: bool = False,
    stages: int = 1,
) -> float:
    """The logarithm of the e-value against "at most ``p0``"; ``opposite``: "at least ``p0``".

    It is ``LARGEST_LOGARITHM`` where a single trial refutes the hypothesis. With several ``stages``
    (one of ``counts`` each, from the first on) the e-value is a weighted mean of the product over
    all stages and of the products that begin at a later stage. Otherwise, good stages would hide
    harm that a candidate does only at a larger share.
    """
    return _log_e_value(tuple(counts), emphasis, opposite, stages)


@lru_cache(1024)  # most counts are those of the last decision
def _log_e_value(
    counts: tuple[TrialCounts, ...], emphasis: float, opposite: bool, stages: int
) -> float:
    ratios = 1 / ODDS_RATIOS if opposite else ODDS_RATIOS
    logarithms = np.zeros((max(1, len(counts)), len(ratios)))
    for row, (p0, successes, trials) in zip(logarithms, counts, strict=False):
        if 0 < p0 < 1:
            row += successes * np.log(ratios) - trials * np.log1p(p0 * (ratios - 1))
        elif (trials - successes if opposite else successes) > 0 and (p0 >= 1) is opposite:
            return LARGEST_LOGARITHM
    # Row k is the product that begins at stage k; one that has not begun is 1.
    begun = np.cumsum(logarithms[::-1], axis=0)[::-1][:stages]
    log_means = np.zeros(max(1, stages))
    largest = begun.max(axis=1)
    averages = np.exp(begun - largest[:, None]) @ weights_of(emphasis)
    log_means[: len(begun)] = largest + np.log(averages)
    weights = np.full(len(log_means), (1 - FIRST_WEIGHT) / max(1, stages - 1))
    weights[0] = FIRST_WEIGHT if stages > 1 else 1.0
    top = float(log_means.max())
    mean = top + math.log(float(weights @ np.exp(log_means - top)))
    return min(mean, LARGEST_LOGARITHM)


def confidence_sequence(counts: Sequence[TrialCounts], alpha: float) -> ConfidenceSequence | None:
    """The ratio of the trials' odds to those of ``p0``; None without trials.

    With probability 1 - ``alpha`` it covers the true ratio at all moments at once, if there is one
    ratio. Robbins' mixture of beta distributions (Robbins 1970), one for each of ``counts``.
    """
    used = [each for each in counts if 0 < each.p0 < 1 and each.trials > 0]
    if not used:
        return None
    successes = sum(each.successes for each in used)

    def log_likelihood(log_ratio: float) -> float:
        return sum(
            each.successes * (log_ratio + math.log(each.p0))
            + (each.trials - each.successes) * math.log1p(-each.p0)
            - each.trials * math.log1p(each.p0 * math.expm1(log_ratio))
            for each in used
        )

    def expected(log_ratio: float) -> float:
        """Expected successes."""
        return sum(
            each.trials / (1 + (1 - each.p0) / each.p0 * math.exp(-log_ratio)) for each in used
        )

    most = _LARGEST_LOG_ODDS
    least = sum(map(_log_mixture, used)) + math.log(alpha)
    estimate = _first(lambda value: expected(value) >= successes, -most, most)
    if successes == sum(each.trials for each in used):
        estimate = most
    lower = _first(lambda value: log_likelihood(value) > least, -most, estimate)
    upper = _first(lambda value: log_likelihood(value) < least, estimate, most)
    return ConfidenceSequence(*map(_ratio, (estimate, lower, upper)))


def _log_mixture(counts: TrialCounts) -> float:
    """The logarithm of the likelihood, averaged over Jeffreys' beta distribution."""
    successes, failures = counts.successes, counts.trials - counts.successes
    return _log_beta(successes + 0.5, failures + 0.5) - _log_beta(0.5, 0.5)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _first(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The least value in ``low..high`` for which ``holds``, which it does from there on."""
    if holds(low):
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _ratio(log_ratio: float) -> float:
    """The ratio; the ends of the range stand for 0 and infinity."""
    if abs(log_ratio) < _LARGEST_LOG_ODDS:
        return math.exp(log_ratio)
    return 0.0 if log_ratio < 0 else math.inf
