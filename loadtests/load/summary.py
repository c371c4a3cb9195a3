"""Summary of a run: counts, rates, and percentiles of its latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from modelport.loadtests.load.percentiles import Percentiles, histogram, merged, percentiles
from modelport.loadtests.load.samples import LoadProfile, LoadRun, Outcome, Samples


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
