"""Texts and tables of one run."""

from __future__ import annotations

from modelport.loadtests import number_format
from modelport.loadtests.load.percentiles import Percentiles
from modelport.loadtests.load.samples import LoadRun
from modelport.loadtests.load.summary import Summary
from modelport.loadtests.report.comparison_tables import Table, TableRow


def percentiles(summary: Summary) -> Table:
    """Latency and time to first byte, in one unit."""
    _, unit = number_format.scale(summary.latency.p50, "ms")
    head = tuple(f"{name}, {unit}" for name in ("p50", "p90", "p95", "p99", "p99.9", "max"))
    rows = (
        TableRow("latency, from intended sending to the end of the answer", _cells(summary, True)),
        TableRow("time to first byte, from sending", _cells(summary, False)),
    )
    return Table("Correct answers: percentiles from an HDR histogram", head, rows, "")


def _cells(summary: Summary, latency: bool) -> tuple[str, ...]:
    divisor, _ = number_format.scale(summary.latency.p50, "ms")
    found: Percentiles = summary.latency if latency else summary.first_byte
    if not summary.ok:
        return (number_format.NOTHING,) * 6
    values = (found.p50, found.p90, found.p95, found.p99, found.p999, found.maximum)
    return tuple(number_format.figure(value / divisor) for value in values)


def counts(summary: Summary) -> list[tuple[str, int, float]]:
    """(outcome, count, share) of the outcomes that occurred, and of correct answers."""
    named = (
        ("correct", summary.ok),
        ("wrong", summary.wrong),
        ("refused", summary.refused),
        ("failed", summary.failed),
        ("timed out", summary.timed_out),
    )
    return [
        (name, count, count / summary.requests if summary.requests else 0.0)
        for name, count in named
        if count or name == "correct"
    ]


def load(run: LoadRun) -> str:
    """The load in a sentence."""
    rate = run.load.rate
    loop = (
        f"closed loop, {run.load.users} in flight"
        if rate is None
        else f"open loop, {number_format.stated(rate)} requests/s intended, "
        f"at most {run.load.users} in flight"
    )
    rows = "1 row" if run.load.batch_size == 1 else f"{run.load.batch_size} rows"
    return (
        f"{run.load.shape} shape, {loop}, {rows} a request, for "
        f"{number_format.duration(run.load.duration_seconds)} after "
        f"{number_format.duration(run.load.warmup_seconds)} of warm-up"
    )


def client(run: LoadRun) -> str:
    """CPU use of the load generator, with a warning if it was the limit; empty if unknown."""
    if run.client_cpu_seconds <= 0:
        return ""
    text = (
        f"{number_format.with_unit(run.client_cpu_seconds, 's')} of CPU, its busiest process "
        f"{run.client_cpu_share * 100:.0f} % of a core"
    )
    if run.saturated:
        text += ": at its limit, so the server may be faster than these figures"
    return text


def warnings(run: LoadRun) -> list[str]:
    """Warnings about the validity of the figures."""
    found = []
    if not run.complete:
        found.append("the run was stopped early; these are the results so far.")
    if run.saturated:
        found.append(
            "the load generator was at the limit of its core and may limit these figures. "
            "Use more processes or another machine."
        )
    return found
