"""Criteria of the gate: a figure, its confidence interval, and a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from modelport.gateway.slo import Slo
from modelport.loadtests import confidence_intervals
from modelport.loadtests.confidence_intervals import Floats, Interval, Tails
from modelport.loadtests.load.samples import LoadRun, Outcome

#: Name of the criterion about wrong answers.
WRONG = "wrong answers"


@dataclass(frozen=True)
class SideMeasurements:
    """One side of one round."""

    #: Milliseconds [requests], sorted, from the intended sending; timeouts included.
    latencies_ms: Floats
    #: Milliseconds [answers], from sending.
    first_bytes_ms: Floats
    asked: int
    wrong: int
    #: Refused, failed or timed out.
    errors: int
    #: Process start to READY, and to the first correct answer; None for a running server.
    cold_start_seconds: float | None = None
    first_response_seconds: float | None = None


@dataclass(frozen=True)
class PairedRound:
    """Both sides, measured next to each other."""

    baseline: SideMeasurements
    candidate: SideMeasurements


def half_of(
    runs: Sequence[LoadRun],
    cold_start_seconds: float | None = None,
    first_response_seconds: float | None = None,
) -> SideMeasurements:
    """Combine the slices of one side in one round."""
    samples = np.concatenate([run.samples for run in runs])
    outcomes = samples["outcome"]
    answered = (outcomes == Outcome.OK) | (outcomes == Outcome.WRONG)
    # Dropping timeouts would remove the slowest requests from the tail.
    waited = answered | (outcomes == Outcome.TIMED_OUT)
    wrong = int((outcomes == Outcome.WRONG).sum())
    return SideMeasurements(
        latencies_ms=1e3 * (samples["done"] - samples["intended"])[waited],
        first_bytes_ms=1e3 * (samples["first_byte"] - samples["sent"])[answered],
        asked=len(samples),
        wrong=wrong,
        errors=int(len(samples) - answered.sum()),
        cold_start_seconds=cold_start_seconds,
        first_response_seconds=first_response_seconds,
    )


@dataclass(frozen=True)
class Criterion:
    """One figure of the candidate with its limit."""

    name: str
    unit: str
    allowed: float
    relative: bool
    #: A side's own figure, from its halves.
    figure: Callable[[Sequence[SideMeasurements]], float | None]
    #: The interval to compare with the limit.
    interval: Callable[[Sequence[PairedRound], Tails], Interval]
    #: A share needs no spread between rounds.
    is_share: bool = False


def criteria(rounds: Sequence[PairedRound], slo: Slo) -> list[Criterion]:
    """The criteria that the SLO sets and that these rounds can answer."""
    limits, regressions = slo.limits, slo.regressions
    found: list[Criterion] = []
    for label, field_name, q, limit, regression in (
        ("p50", "latencies_ms", 0.5, limits.p50_ms, regressions.max_p50_regression),
        ("p99", "latencies_ms", 0.99, limits.p99_ms, regressions.max_p99_regression),
        (
            "time to first byte, p50",
            "first_bytes_ms",
            0.5,
            limits.first_byte_p50_ms,
            regressions.max_first_byte_p50_regression,
        ),
        (
            "time to first byte, p99",
            "first_bytes_ms",
            0.99,
            limits.first_byte_p99_ms,
            regressions.max_first_byte_p99_regression,
        ),
    ):
        found += _of_requests(label, field_name, q, limit, regression)
    if _started(rounds):
        for label, field_name, limit, regression in (
            (
                "time to first response, cold",
                "first_response_seconds",
                limits.first_response_seconds,
                regressions.max_first_response_regression,
            ),
            (
                "cold start",
                "cold_start_seconds",
                limits.cold_start_seconds,
                regressions.max_cold_start_regression,
            ),
        ):
            found += _of_starts(label, field_name, limit, regression)
    for label, field_name, limit in (
        ("error share", "errors", limits.max_error_share),
        (WRONG, "wrong", limits.max_wrong_share),
    ):
        if limit is not None:
            found.append(_of_counts(label, field_name, limit))
    return found


def _started(rounds: Sequence[PairedRound]) -> bool:
    """Whether the gate started both sides; a running server's start time is unknown."""
    halves = [half for both in rounds for half in (both.baseline, both.candidate)]
    return all(half.first_response_seconds is not None for half in halves)


def _of_requests(
    label: str, name: str, q: float, limit: float | None, regression: float | None
) -> list[Criterion]:
    def values(halves: Sequence[SideMeasurements]) -> list[Floats]:
        return [getattr(half, name) for half in halves]

    def figure(halves: Sequence[SideMeasurements]) -> float | None:
        every = np.concatenate(values(halves))
        return float(np.quantile(every, q)) if every.size else None

    def absolute(rounds: Sequence[PairedRound], tails: Tails) -> Interval:
        return confidence_intervals.quantile(values([r.candidate for r in rounds]), q, tails)

    def relative(rounds: Sequence[PairedRound], tails: Tails) -> Interval:
        sides = (values([r.candidate for r in rounds]), values([r.baseline for r in rounds]))
        return confidence_intervals.quantile_ratio(*sides, q, tails)

    found = []
    if limit is not None:
        found.append(Criterion(label, "ms", limit, False, figure, absolute))
    if regression is not None:
        name_ = f"{label}, against the baseline"
        found.append(Criterion(name_, "ms", 1 + regression, True, figure, relative))
    return found


def _of_starts(
    label: str, name: str, limit: float | None, regression: float | None
) -> list[Criterion]:
    """A criterion with one value per round; the absolute interval is that of a ratio to 1
    second."""

    def values(halves: Sequence[SideMeasurements]) -> list[float]:
        return [getattr(half, name) for half in halves]

    def figure(halves: Sequence[SideMeasurements]) -> float | None:
        return float(np.exp(np.mean(np.log(values(halves))))) if halves else None

    def absolute(rounds: Sequence[PairedRound], tails: Tails) -> Interval:
        seconds = values([r.candidate for r in rounds])
        return confidence_intervals.ratio(seconds, [1.0] * len(seconds), tails)

    def relative(rounds: Sequence[PairedRound], tails: Tails) -> Interval:
        sides = (values([r.candidate for r in rounds]), values([r.baseline for r in rounds]))
        return confidence_intervals.ratio(*sides, tails)

    found = []
    if limit is not None:
        found.append(Criterion(label, "s", limit, False, figure, absolute))
    if regression is not None:
        name_ = f"{label}, against the baseline"
        found.append(Criterion(name_, "s", 1 + regression, True, figure, relative))
    return found


def _of_counts(label: str, name: str, limit: float) -> Criterion:
    def figure(halves: Sequence[SideMeasurements]) -> float | None:
        asked = sum(half.asked for half in halves)
        return sum(getattr(half, name) for half in halves) / asked if asked else None

    def interval(rounds: Sequence[PairedRound], tails: Tails) -> Interval:
        halves = [r.candidate for r in rounds]
        bad = [getattr(half, name) for half in halves]
        return confidence_intervals.share(bad, [half.asked for half in halves], tails)

    return Criterion(label, "share", limit, False, figure, interval, is_share=True)
