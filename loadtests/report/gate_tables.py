"""Texts and tables of a release decision."""

from __future__ import annotations

from modelport.loadtests import number_format
from modelport.loadtests.checks import CheckStatus
from modelport.loadtests.gate.agreement import AnswerAgreement
from modelport.loadtests.gate.decision import GateDecision, Question, longer_text
from modelport.loadtests.load.summary import summary_of
from modelport.loadtests.report import text_escaping
from modelport.loadtests.report.comparison_tables import Table, TableRow


def sentence(decision: GateDecision) -> str:
    """The grounds of the decision in one sentence."""
    if decision.status is CheckStatus.PASS:
        return "The candidate keeps every limit."
    if decision.status is CheckStatus.INCONCLUSIVE:
        return longer_text(decision)
    failed = [q.name for q in decision.questions if q.status is CheckStatus.FAIL]
    return f"The candidate fails: {', '.join(text_escaping.line(name, 80) for name in failed)}."


def figure(question: Question, value: float | None) -> str:
    """One side's own figure; shares are fractions."""
    if question.unit == "share":
        return number_format.with_unit(None if value is None else value * 100, "%")
    return number_format.with_unit(value, question.unit)


def summaries(decision: GateDecision) -> Table | None:
    """Both sides over all rounds, histograms merged; None without runs."""
    sides = (("baseline", decision.baseline_runs), ("candidate", decision.candidate_runs))
    known = [(n, name, summary_of(runs)) for n, (name, runs) in enumerate(sides, start=1) if runs]
    if not known:
        return None
    divisor, unit = number_format.scale(known[0][2].latency.p50, "ms")
    rows = []
    for number, name, summary in known:
        latency = summary.latency
        times = (latency.p50, latency.p90, latency.p95, latency.p99, latency.p999, latency.maximum)
        cells = (
            f"{summary.requests:,}",
            f"{summary.bad:,}",
            number_format.figure(summary.requests_per_second),
            *(number_format.figure(value / divisor) for value in times),
        )
        rows.append(TableRow(name, cells, number))
    percentiles = tuple(f"{p}, {unit}" for p in ("p50", "p90", "p95", "p99", "p99.9", "max"))
    head = ("requests", "not answered correctly", "correct answers/s", *percentiles)
    caption = "All rounds, their HDR histograms merged"
    return Table(caption, head, tuple(rows), "side")


def agreement(found: AnswerAgreement) -> str:
    """The differences between the candidate's and the baseline's answers, in one sentence."""
    parts = [f"values differ by {found.relative_error:.2%} of their norm"]
    if found.decisions:
        same = 1 - found.changed / found.decisions
        parts.insert(0, f"{same:.2%} of {found.decisions:,} decisions agree")
    if found.metric and found.baseline is not None and found.candidate is not None:
        parts.append(f"{found.metric} {found.baseline:.4f} → {found.candidate:.4f}")
    return f"Candidate compared with the baseline: {'; '.join(parts)}."


def labels(found: AnswerAgreement) -> Table | None:
    """Agreement for each label or, without labels, for each decision of the baseline."""
    if not found.by_label:
        return None
    known = bool(found.metric)
    head: tuple[str, ...] = ("rows", "decided differently")
    if known:
        head += ("baseline right", "candidate right")
    rows = []
    for one in found.by_label:
        cells: tuple[str, ...] = (f"{one.rows:,}", _part(one.changed, one.rows))
        if known:
            cells += tuple(
                _part(n or 0, one.rows) for n in (one.baseline_right, one.candidate_right)
            )
        rows.append(TableRow(one.label, cells))
    first = "label" if known else "baseline's decision"
    return Table("Decisions, for information only", head, tuple(rows), first)


def _part(count: int, rows: int) -> str:
    return f"{count:,} ({count / rows:.1%})"
