"""Sequential tests, valid at every moment: they may be looked at after every request.

A test multiplies a factor for each trial. No factor's mean, given all before it, exceeds 1 under
the null hypothesis, so the product E is a supermartingale, and the probability that it ever reaches
1 / alpha is at most alpha (Ville 1939; Howard, Ramdas, McAuliffe, Sekhon, arXiv 1810.08240). That
needs no independence, and the hypothesis may change between trials: the product continues. A
weighted mean over alternatives is such a product, too, and needs no guess of the harm.

- ``OddsRatios``: the mean of each trial is at most ``p0``. With r the ratio of an alternative's
  odds to those of ``p0``, a success multiplies by r / (1 + p0 (r - 1)), any other trial by
  1 / (1 + p0 (r - 1)). r < 1 tests the opposite, "at least ``p0``".
- ``BoundedMeans``: the mean of a bounded value is at most 0. A value z multiplies by 1 + b z, for
  bets b that are small enough to keep that positive (Waudby-Smith and Ramdas, arXiv 2010.09686).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Weight of the product over all stages, beside those that begin at a later stage.
FIRST_WEIGHT = 0.9
#: Stands for an infinite logarithm, which JSON does not have.
LARGEST_LOGARITHM = 1e6
#: Range of the logarithms of odds ratios in a confidence sequence, and the halvings to find one.
_LARGEST_LOG_ODDS, _HALVINGS = 40.0, 60
_BETS = (0.05, 0.15, 0.4, 0.8)


class TrialCounts(NamedTuple):
    """Successes among trials, each of a mean of at most ``p0`` under the null hypothesis."""

    p0: float
    successes: float
    trials: float


class OutcomeCounts(NamedTuple):
    """Counts of each outcome of the trials of one stage; of ``OddsRatios``: successes, failures."""

    p0: float
    counts: tuple[float, ...]


class ConfidenceSequence(NamedTuple):
    """An estimate, and bounds that hold at every moment at once."""

    estimate: float
    lower: float
    upper: float


class SequentialTest(Protocol, Hashable):
    """A test by its alternatives, and the factor of each outcome under each of them."""

    weights: Floats

    def log_factors(self, p0: float, opposite: bool = False) -> Floats:
        """Logarithms of the factors, [alternatives, outcomes]."""


class OddsRatios:
    """A test of trials of several kinds, each with an odds ratio in every alternative.

    Args:
        log_ratios: [alternatives, kinds]
    """

    def __init__(self, log_ratios: Floats, weights: Floats) -> None:
        self._log_ratios = log_ratios
        self.weights = weights / weights.sum()

    @lru_cache(512)  # noqa: B019 - tests are constants
    def log_factors(self, p0: float, opposite: bool = False) -> Floats:
        logarithms = -self._log_ratios if opposite else self._log_ratios
        failure = -np.log1p(p0 * np.expm1(logarithms))
        return np.hstack([logarithms + failure, failure])


class BoundedMeans:
    """A test of the means of several values; an outcome has one of each.

    Args:
        values: [means, outcomes], each at most 1.
    """

    def __init__(self, values: Floats) -> None:
        bets = np.array(_BETS) / max(1.0, -float(values.min()))  # so that no factor is 0
        factors = np.vstack([np.log1p(bet * values) for bet in bets])
        self._factors, self.weights = factors, np.full(len(factors), 1 / len(factors))

    def log_factors(self, p0: float, opposite: bool = False) -> Floats:
        return np.zeros_like(self._factors) if opposite else self._factors


def _rates(emphasis: float) -> OddsRatios:
    """Alternatives for one kind of trial; a ratio's weight is its power of ``-emphasis``."""
    ratios = np.geomspace(1.15, 30, 24)
    return OddsRatios(np.log(ratios)[:, None], ratios**-emphasis)


#: For rates that may rise many times over, and for those that hardly do.
LARGE_CHANGES, SMALL_CHANGES = _rates(0.5), _rates(1.5)


def outcomes_of(trials: TrialCounts) -> OutcomeCounts:
    """``trials`` of one kind."""
    return OutcomeCounts(trials.p0, (trials.successes, trials.trials - trials.successes))


def log_e_value(
    counts: Sequence[OutcomeCounts] | Sequence[TrialCounts],
    test: SequentialTest = LARGE_CHANGES,
    *,
    opposite: bool = False,
    stages: int = 1,
) -> float:
    """The logarithm of the e-value against the null hypothesis of ``test``, or its ``opposite``.

    It is ``LARGEST_LOGARITHM`` where a single trial refutes the hypothesis. With several ``stages``
    (one of ``counts`` each, from the first on) the e-value is a weighted mean of the product over
    all stages and of the products that begin at a later stage. Otherwise, good stages would hide
    harm that a candidate does only at a larger share.
    """
    outcomes = (outcomes_of(each) if isinstance(each, TrialCounts) else each for each in counts)
    return _log_e_value(tuple(outcomes), test, opposite, stages)


@lru_cache(1024)  # earlier stages have the counts of the last decision
def _log_products(
    test: SequentialTest, p0: float, outcomes: tuple[float, ...], opposite: bool
) -> Floats:
    return test.log_factors(p0, opposite) @ outcomes


@lru_cache(1024)
def _log_e_value(
    counts: tuple[OutcomeCounts, ...], test: SequentialTest, opposite: bool, stages: int
) -> float:
    logarithms = np.zeros((max(1, len(counts)), len(test.weights)))
    for row, (p0, outcomes) in zip(logarithms, counts, strict=False):
        if 0 < p0 < 1:
            row += _log_products(test, p0, outcomes, opposite)
        elif (p0 >= 1) is opposite and sum(np.split(np.array(outcomes), 2)[opposite]) > 0:
            return LARGEST_LOGARITHM
    # Row k is the product that begins at stage k; one that has not begun is 1.
    begun = np.cumsum(logarithms[::-1], axis=0)[::-1][:stages]
    log_means = np.zeros(max(1, stages))
    largest = begun.max(axis=1)
    averages = np.exp(begun - largest[:, None]) @ test.weights
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
