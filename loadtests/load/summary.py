"""Summary of a run: counts, rates, and percentiles from an HDR histogram."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from modelport.loadtests.load.samples import LoadProfile, LoadRun, Outcome, Samples

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


@dataclass(frozen=True)
class Summary:
    """The figures of one run; the same in every report."""

    requests: int
    #: Correct answers.
    ok: int
    wrong: int
    #: HTTP 429 and 503, RESOURCE_EXHAUSTED and UNAVAILABLE.
    refused: int
    failed: int
    timed_out: int
    #: Correct answers per second.
    requests_per_second: float
    #: From the intended sending to the end of the answer, of correct answers.
    latency: Percentiles
    #: From sending to the first byte of the answer.
    first_byte: Percentiles
    errors: Mapping[str, int]

    @property
    def bad(self) -> int:
        """The number of requests without a correct answer."""
        return self.requests - self.ok

    @property
    def error_share(self) -> float:
        return self.bad / self.requests if self.requests else 1.0


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


def ok(samples: Samples) -> Samples:
    good: Samples = samples[samples["outcome"] == Outcome.OK]
    return good


def latencies(samples: Samples) -> npt.NDArray[np.float64]:
    """Seconds [correct answers], from the intended sending to the answer's end."""
    good = ok(samples)
    return np.asarray(good["done"] - good["intended"], np.float64)


def first_bytes(samples: Samples) -> npt.NDArray[np.float64]:
    """Seconds [correct answers], from sending to the answer's first byte."""
    good = ok(samples)
    return np.asarray(good["first_byte"] - good["sent"], np.float64)


def throughput(samples: Samples, load: LoadProfile) -> float:
    """Correct answers per second, between the end of the warm-up and the end of the load.

    Requests in flight at the end count with the share of their time before it: slow models give few
    answers, and dropping or counting each whole would bias the figure.
    """
    good = ok(samples)
    end = load.warmup_seconds + load.duration_seconds
    if not len(good):
        return 0.0
    begin = load.warmup_seconds if load.rate is not None else float(good["sent"].min())
    took = np.maximum(good["done"] - good["sent"], 1e-9)
    inside = np.clip((np.minimum(good["done"], end) - good["sent"]) / took, 0.0, 1.0)
    return float(inside.sum()) / max(end - begin, 1e-9)


def summarise(run: LoadRun) -> Summary:
    return summary_of([run])


def summary_of(runs: Sequence[LoadRun]) -> Summary:
    """Summarise all runs together: histograms merged, rates averaged by duration."""
    counts = np.zeros(len(Outcome), np.int64)
    errors: dict[str, int] = {}
    for run in runs:
        counts += np.bincount(run.samples["outcome"], minlength=len(Outcome))
        for message, count in run.errors.items():
            errors[message] = errors.get(message, 0) + count
    seconds = sum(run.load.duration_seconds for run in runs)
    answered = sum(throughput(r.samples, r.load) * r.load.duration_seconds for r in runs)
    return Summary(
        requests=int(counts.sum()),
        ok=int(counts[Outcome.OK]),
        wrong=int(counts[Outcome.WRONG]),
        refused=int(counts[Outcome.REFUSED]),
        failed=int(counts[Outcome.FAILED]),
        timed_out=int(counts[Outcome.TIMED_OUT]),
        requests_per_second=answered / seconds if seconds else 0.0,
        latency=percentiles(merged(histogram(latencies(r.samples)) for r in runs)),
        first_byte=percentiles(merged(histogram(first_bytes(r.samples)) for r in runs)),
        errors=dict(sorted(errors.items(), key=lambda item: -item[1])),
    )
