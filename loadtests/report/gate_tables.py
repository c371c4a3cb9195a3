"""What stands beside the plots of a release decision."""

from __future__ import annotations

from loadtests.gate.decision import Decision, Question, longer_text
from loadtests.report import figures, names
from loadtests.report.checks import Status
from loadtests.report.tables import Row, Table
from loadtests.summary import summary_of


def sentence(decision: Decision) -> str:
    """Why the gate says what it says."""
    if decision.status is Status.PASS:
        return "The candidate keeps every limit."
    if decision.status is Status.INCONCLUSIVE:
        return longer_text(decision)
    failed = [q.name for q in decision.questions if q.status is Status.FAIL]
    return f"The candidate breaks: {', '.join(names.line(name, 80) for name in failed)}."


def figure(question: Question, value: float | None) -> str:
    """One side's own figure; shares are fractions."""
    if question.unit == "share":
        return figures.with_unit(None if value is None else value * 100, "%")
    return figures.with_unit(value, question.unit)


def summaries(decision: Decision) -> Table | None:
    """Both sides over all rounds, their histograms merged; None without runs."""
    sides = (("baseline", decision.baseline_runs), ("candidate", decision.candidate_runs))
    known = [(n, name, summary_of(runs)) for n, (name, runs) in enumerate(sides, start=1) if runs]
    if not known:
        return None
    divisor, unit = figures.scale(known[0][2].latency.p50, "ms")
    rows = []
    for number, name, summary in known:
        latency = summary.latency
        times = (latency.p50, latency.p90, latency.p95, latency.p99, latency.p999, latency.maximum)
        cells = (
            f"{summary.requests:,}",
            f"{summary.bad:,}",
            figures.figure(summary.requests_per_second),
            *(figures.figure(value / divisor) for value in times),
        )
        rows.append(Row(name, cells, number))
    percentiles = tuple(f"{p}, {unit}" for p in ("p50", "p90", "p95", "p99", "p99.9", "max"))
    head = ("requests", "not answered rightly", "right answers/s", *percentiles)
    caption = "All rounds, their HDR histograms merged"
    return Table(caption, head, tuple(rows), "side")
