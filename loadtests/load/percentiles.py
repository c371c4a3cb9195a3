"""Percentiles of latencies, from an HDR histogram; every report and limit takes them from here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hdrh.histogram import HdrHistogram

#: Range in microseconds: one, and an hour, which is longer than any time-out.
LOWEST, HIGHEST = 1, 3_600_000_000
SIGNIFICANT_FIGURES = 3
US_IN_MS = 1e3
#: Quantiles of a latency curve, increasingly close to 1, as in HDR plots.
CURVE_QUANTILES = (
    *(step / 20 for step in range(20)),
    *(1 - 10**-exponent * rest for exponent in (1, 2, 3, 4) for rest in (0.5, 0.25, 0.1)),
)


@dataclass(frozen=True)
class Percentiles:
    """Percentiles in milliseconds, from an HDR histogram of the answers of one run."""

    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    maximum: float


def _empty() -> HdrHistogram:
    from hdrh.histogram import HdrHistogram  # lazy: the extra `load` brings it

    return HdrHistogram(LOWEST, HIGHEST, SIGNIFICANT_FIGURES)


def histogram(seconds: npt.NDArray[np.float64]) -> HdrHistogram:
    """An HDR histogram in microseconds; ``HdrHistogram.add`` merges those of several runs."""
    made = _empty()
    micros = np.clip(np.rint(seconds * 1e6), LOWEST, HIGHEST).astype(np.int64)
    values, counts = np.unique(micros, return_counts=True)
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        made.record_value(value, count)
    return made


def merged(histograms: Iterable[HdrHistogram]) -> HdrHistogram:
    """One histogram of the answers of all runs."""
    whole = _empty()
    for one in histograms:
        whole.add(one)
    return whole


def percentiles(made: HdrHistogram) -> Percentiles:
    """Percentiles in milliseconds; all 0 if nothing was recorded."""
    if not made.get_total_count():
        return Percentiles(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p95, p99, p999 = (
        made.get_value_at_percentile(share) / US_IN_MS for share in (50.0, 90.0, 95.0, 99.0, 99.9)
    )
    return Percentiles(p50, p90, p95, p99, p999, made.get_max_value() / US_IN_MS)


def curve(made: HdrHistogram) -> tuple[tuple[float, float], ...]:
    """(quantile, milliseconds), as far as the number of answers supports it."""
    total = made.get_total_count()
    return tuple(
        (round(quantile, 6), made.get_value_at_percentile(quantile * 100) / US_IN_MS)
        for quantile in CURVE_QUANTILES
        if total * (1 - quantile) >= 1
    )
