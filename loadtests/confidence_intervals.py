"""Confidence intervals of latencies, ratios and error shares, and the data they need.

Requests of one round share the machine's disturbances, so a thousand of them are not a
thousand observations. The *rounds* are independent, so every interval comes from their spread:

- **Ratios** are paired: candidate and baseline of one round ran next to each other, and a slow
  minute slows both. The ratio is taken within a round, on the logarithmic scale, and averaged over
  rounds without the highest and the lowest eighth (Tukey and McLaughlin 1963; Yuen 1974): a
  neighbour's burst that hits one half of one round says nothing about the candidate. Kalibera and
  Jones, "Rigorous Benchmarking in Reasonable Time" (ISMM 2013), argue for the ratio with its
  interval, and for repetition at the highest level that varies: a new process.
- **Absolute quantiles** are of all requests, pooled; whole rounds are drawn with replacement, which
  Davison and Hinkley, "Bootstrap Methods and their Application" (1997), section 3.8, prefer to
  drawing within them as well. Within a round, contiguous blocks are drawn (Künsch 1989; Lahiri,
  "Resampling Methods for Dependent Data", 2003). The wider of the two counts, so that rounds that
  agree by chance promise nothing.
- The bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993) gives the standard
  error; with few rounds its percentiles are too narrow, so the interval is Student's t with the
  bootstrap's standard error times sqrt(n / (n - 1)) (Hesterberg, "What Teachers Should Know About
  the Bootstrap", 2015), on the logarithmic scale, where latencies are less skewed.
- **Shares** are Clopper and Pearson's (1934), on a number of requests that is smaller where errors
  come in bursts (the design effect of Rao and Scott, 1992).

Repeated looks at growing data also need ``modelport.loadtests.gate.alpha_spending``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, stdtrit

Floats = npt.NDArray[np.float64]

DRAWS = 1000
#: Requests needed beyond a quantile: 1,000 requests for a p99.
TAIL_REQUESTS = 10
#: Requests needed beyond a quantile in a round, or in a group of rounds, for a ratio.
GROUP_TAIL_REQUESTS = 5
#: With fewer rounds there is no spread.
LEAST_ROUNDS = 2
#: The trimmed mean of ratios drops one in this many rounds at either end.
TRIM = 8
#: Number of contiguous blocks of all rounds, at least two per round, for the block bootstrap.
BLOCKS = 40
#: e to this power is a finite float, and larger than any measurement.
LARGEST_LOGARITHM = 300.0
#: Grid points for the distribution around a quantile.
GRID = 400


class TooFewSamples(ValueError):
    """There is no interval yet: with ``had`` requests (of each side) or rounds, ``more`` are
    missing."""

    def __init__(self, message: str, had: int, more: int) -> None:
        super().__init__(message)
        self.had = had
        self.more = more

    @property
    def longer(self) -> float:
        """The factor of the data that would be enough."""
        return (self.had + self.more) / self.had if self.had else math.inf


@dataclass(frozen=True)
class Interval:
    """A confidence interval: the estimate, and a bound on either side."""

    estimate: float
    lower: float
    upper: float
    #: 1 - (error below + error above).
    confidence: float
    #: Number of independent observations: rounds, or groups of them.
    units: int

    def excludes(self, value: float) -> bool:
        return not self.lower <= value <= self.upper


@dataclass(frozen=True)
class Tails:
    """Error probabilities: of a truth below ``lower``, and above ``upper``."""

    below: float
    above: float

    @classmethod
    def of(cls, confidence: float) -> Tails:
        """Equal tails for a confidence."""
        if not 0 < confidence < 1:
            raise ValueError(f"a confidence of {confidence} is not between 0 and 1")
        return cls((1 - confidence) / 2, (1 - confidence) / 2)


def required_samples(q: float) -> int:
    """Requests needed for an interval of the quantile ``q``.

    Enough for ``TAIL_REQUESTS`` beyond it, and for the largest request to lie beyond it except with
    probability 0.025 (1 - q^n, distribution-free).
    """
    rarer = min(q, 1 - q)
    return math.ceil(max(TAIL_REQUESTS / rarer, math.log(0.025) / math.log(1 - rarer)) - 1e-9)


def ratio(
    candidate: Sequence[float],
    baseline: Sequence[float],
    confidence: float | Tails = 0.95,
    *,
    seed: int = 0,
) -> Interval:
    """The ratio ``candidate / baseline``, each [rounds] of positive figures, paired by round.

    Raises:
        TooFewSamples: fewer than two rounds.
        ValueError: different numbers of rounds, or a figure that is not above 0.
    """
    tails = confidence if isinstance(confidence, Tails) else Tails.of(confidence)
    above, below = (np.asarray(side, dtype=np.float64) for side in (candidate, baseline))
    if above.shape != below.shape or above.ndim != 1:
        raise ValueError(f"{above.size} rounds of the candidate, {below.size} of the baseline")
    _enough_rounds(above.size)
    both = np.concatenate([above, below])
    if not (np.isfinite(both).all() and (both > 0).all()):
        raise ValueError("a ratio needs figures above 0")
    logs = np.log(above / below)
    drawn = _trimmed(logs[_choices(logs.size, seed)])
    return _student(float(_trimmed(logs)), float(drawn.std()), logs.size, tails)


def quantile_ratio(
    candidate: Sequence[Floats],
    baseline: Sequence[Floats],
    q: float,
    confidence: float | Tails = 0.95,
    *,
    seed: int = 0,
) -> Interval:
    """The ratio of two quantiles, from the latencies [requests] of each round of each side.

    Rounds with few requests are grouped with their neighbours.

    Raises:
        TooFewSamples: fewer than two groups of rounds, or too few requests for this quantile.
    """
    _enough_rounds(len(candidate))
    least = min(sum(map(len, candidate)), sum(map(len, baseline)))
    _enough_requests(least, q)
    groups = _groups(candidate, baseline, math.ceil(GROUP_TAIL_REQUESTS / min(q, 1 - q)))
    if len(groups) < LEAST_ROUNDS:
        raise TooFewSamples(
            f"too few requests in {len(candidate)} rounds for two quantiles of {q:g}",
            least,
            least,
        )
    above, below = (
        [_quantile(np.concatenate(side[group]), q) for group in groups]
        for side in (candidate, baseline)
    )
    return ratio(above, below, confidence, seed=seed)


def quantile(
    rounds: Sequence[Floats],
    q: float,
    confidence: float | Tails = 0.95,
    *,
    seed: int = 0,
) -> Interval:
    """A quantile of all requests, from the latencies [requests] of each round, in order.

    Raises:
        TooFewSamples: there are fewer requests than ``required_samples``.
    """
    tails = confidence if isinstance(confidence, Tails) else Tails.of(confidence)
    rounds = [np.asarray(latencies, dtype=np.float64) for latencies in rounds if len(latencies)]
    _enough_requests(sum(map(len, rounds)), q)
    each = max(2, BLOCKS // len(rounds))
    blocks = [block for latencies in rounds for block in np.array_split(latencies, each)]
    blocks = [block for block in blocks if block.size]
    # Grid values around the quantile, dense near it; the largest value is the last.
    values = np.concatenate(rounds)
    odds = math.log(q / (1 - q)) + np.linspace(-4, 4, GRID)
    around = np.quantile(values, 1 / (1 + np.exp(-odds)))
    grid = np.unique(np.append(around, values.max()))
    spreads, units = [], len(rounds)
    for parts in (rounds, blocks) if len(rounds) >= LEAST_ROUNDS else (blocks,):
        drawn = np.log(_drawn_quantiles(parts, grid, q, seed))
        spreads.append(float(drawn.std()))
    if len(rounds) < LEAST_ROUNDS:
        units = len(blocks)
    estimate = math.log(max(float(np.quantile(np.concatenate(rounds), q)), 1e-12))
    return _student(estimate, max(spreads), units, tails)


def share(bad: Sequence[int], total: Sequence[int], confidence: float | Tails = 0.95) -> Interval:
    """The share of bad answers, from the counts [rounds] of bad and of all.

    Raises:
        TooFewSamples: there were no requests.
        ValueError: a bad count exceeds its total.
    """
    tails = confidence if isinstance(confidence, Tails) else Tails.of(confidence)
    bads, totals = np.asarray(bad, dtype=np.float64), np.asarray(total, dtype=np.float64)
    if bads.shape != totals.shape or (bads > totals).any() or (bads < 0).any():
        raise ValueError("a share needs 0 ≤ bad ≤ total in every round")
    n, k = float(totals.sum()), float(bads.sum())
    if n == 0:
        raise TooFewSamples("there were no requests", 0, 1)
    # Bursts: the variance of independent errors between rounds, against the observed one.
    effect = 1.0
    if 0 < k < n and totals.size >= LEAST_ROUNDS:
        p = k / n
        between = float(((bads - p * totals) ** 2).sum()) * totals.size / (totals.size - 1)
        effect = max(1.0, between / (n * p * (1 - p)))
    m, j = n / effect, k / effect
    lower = float(betaincinv(j, m - j + 1, tails.below)) if k else 0.0
    upper = float(betaincinv(j + 1, m - j, 1 - tails.above)) if k < n else 1.0
    return Interval(k / n, lower, upper, 1 - tails.below - tails.above, totals.size)


def rounds_needed(interval: Interval, value: float) -> float:
    """The expected factor of rounds until the interval excludes ``value``.

    The width shrinks with the square root of the rounds; on the logarithmic scale if all values are
    positive. ``inf`` if the estimate equals the value.
    """
    if interval.excludes(value):
        return 1.0
    logarithmic = min(interval.lower, interval.estimate, value) > 0
    low, middle, high, bound = (
        math.log(x) if logarithmic else x
        for x in (interval.lower, interval.estimate, interval.upper, value)
    )
    width = middle - low if middle > bound else high - middle
    distance = abs(middle - bound)
    return math.inf if distance < 1e-6 * width else max(1.0, (width / distance) ** 2)


def _student(log_estimate: float, spread: float, units: int, tails: Tails) -> Interval:
    """Student's t interval; ``spread`` is the bootstrap's standard error of the logarithm."""
    degrees = max(units - 2 * (units // TRIM) - 1, 1)
    scale = spread * math.sqrt(units / (units - 1))
    lower, upper = (
        math.exp(_clipped(log_estimate - sign * scale * float(stdtrit(degrees, 1 - error))))
        for sign, error in ((1, tails.below), (-1, tails.above))
    )
    confidence = 1 - tails.below - tails.above
    return Interval(math.exp(log_estimate), lower, upper, confidence, units)


def _clipped(logarithm: float) -> float:
    """Clip a logarithm; two rounds can give bounds beyond the range of floats."""
    return min(max(logarithm, -LARGEST_LOGARITHM), LARGEST_LOGARITHM)


def _trimmed(values: Floats) -> Floats:
    """[..., rounds] → [...]: the trimmed mean."""
    size = values.shape[-1]
    cut = size // TRIM
    kept: Floats = np.sort(values, axis=-1)[..., cut : size - cut]
    mean: Floats = kept.mean(axis=-1)
    return mean


def _choices(size: int, seed: int) -> npt.NDArray[np.int64]:
    """[draws, size]: random indexes below ``size``."""
    return np.random.default_rng(seed).integers(0, size, (DRAWS, size))


def _quantile(values: Floats, q: float) -> float:
    """A faster ``np.quantile`` for the thousands of values of one round."""
    at = q * (values.size - 1)
    below = int(at)
    above = min(below + 1, values.size - 1)
    parted = np.partition(values, (below, above))
    return float(parted[below] + (at - below) * (parted[above] - parted[below]))


def _drawn_quantiles(parts: Sequence[Floats], grid: Floats, q: float, seed: int) -> Floats:
    """[draws]: quantiles of bootstrap samples of the parts.

    Every part's cumulative counts on the grid are weighted by its number of draws: one matrix
    product instead of sorting all requests for each draw.
    """
    counts = np.stack([np.searchsorted(np.sort(part), grid, side="right") for part in parts])
    sizes = np.array([part.size for part in parts], dtype=np.float64)
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(len(parts), np.full(len(parts), 1 / len(parts)), DRAWS)
    shares = (weights @ counts.astype(np.float64)) / (weights @ sizes)[:, None]
    at = np.minimum((shares < q).sum(axis=1), grid.size - 1)
    before = np.maximum(at - 1, 0)
    rows = np.arange(DRAWS)
    low, high = shares[rows, before], shares[rows, at]
    step = np.where(high > low, (q - low) / np.where(high > low, high - low, 1), 1.0)
    found: Floats = grid[before] + np.clip(step, 0, 1) * (grid[at] - grid[before])
    return np.maximum(found, 1e-12)


def _groups(candidate: Sequence[Floats], baseline: Sequence[Floats], least: int) -> list[slice]:
    """Group neighbouring rounds until each side has ``least`` requests in a group."""
    if len(candidate) != len(baseline):
        raise ValueError(f"{len(candidate)} rounds of the candidate, {len(baseline)} of the other")
    found: list[slice] = []
    begin = above = below = 0
    for end, (one, other) in enumerate(zip(candidate, baseline, strict=True), 1):
        above, below = above + len(one), below + len(other)
        if min(above, below) >= least:
            found.append(slice(begin, end))
            begin, above, below = end, 0, 0
    if found and begin < len(candidate):  # the rest joins the last group
        found[-1] = slice(found[-1].start, len(candidate))
    return found


def _enough_rounds(rounds: int) -> None:
    if rounds < LEAST_ROUNDS:
        raise TooFewSamples(
            f"{rounds} of {LEAST_ROUNDS} rounds that an interval needs",
            rounds,
            LEAST_ROUNDS - rounds,
        )


def _enough_requests(requests: int, q: float) -> None:
    needed = required_samples(q)
    if requests < needed:
        raise TooFewSamples(
            f"{requests} requests; p{100 * q:g} needs {needed}, {needed - requests} more",
            requests,
            needed - requests,
        )
