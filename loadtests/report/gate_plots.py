"""Plots of a release decision: intervals against limits, and latencies of both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from modelport.loadtests import number_format
from modelport.loadtests.checks import CheckStatus
from modelport.loadtests.gate.decision import GateDecision, Question
from modelport.loadtests.load import percentiles, summary
from modelport.loadtests.load.samples import LoadRun
from modelport.loadtests.report import axes as scales
from modelport.loadtests.report import colours, svg, text_escaping
from modelport.loadtests.report.svg import Plot

BASELINE, CANDIDATE = 1, 2
TONES = {CheckStatus.PASS: "good", CheckStatus.FAIL: "bad", CheckStatus.INCONCLUSIVE: "open"}
ROW_HEIGHT, NAME_LENGTH = 34.0, 36


@dataclass(frozen=True)
class _Interval:
    """One question on an axis of its kind; ``told`` is its estimate in words."""

    name: str
    status: CheckStatus
    estimate: float
    low: float
    high: float
    allowed: float | None
    told: str


def draw(decision: GateDecision) -> list[Plot]:
    """Draw every plot that has figures."""
    changes = [_relative(q) for q in decision.questions if q.relative and _known(q)]
    limits = [
        _of_limit(q) for q in decision.questions if not q.relative and _known(q) and q.allowed
    ]
    confidence = f"{number_format.stated(decision.confidence * 100)} %"
    found = []
    if changes:
        text = (
            "The candidate's figure against the baseline's: the dot is the estimate, the line its "
            f"interval with an overall confidence of {confidence}, the tick the limit. "
            "Right of 0 is worse."
        )
        drawer = _drawer(changes, "change against the baseline, %")
        found.append(svg.plot("changes", "Changes", text, _height(changes), drawer))
    if limits:
        text = "The candidate's figures as a share of their limits, with intervals."
        drawer = _drawer(limits, "% of the limit")
        found.append(svg.plot("limits", "Limits", text, _height(limits), drawer))
    if any(_answered(runs) for runs in (decision.baseline_runs, decision.candidate_runs)):
        text = (
            "Percentile against latency. A bold line is the merged histogram of all rounds, the "
            "faint lines are single rounds. 1 is the baseline, 2 the candidate."
        )
        drawer = _latencies(decision)
        found.append(svg.plot("latency", "Latency of both sides", text, 320, drawer))
    return found


def _known(question: Question) -> bool:
    return None not in (question.change, question.low, question.high)


def _relative(question: Question) -> _Interval:
    """The change in percent."""
    change, low, high = (float(v or 0) for v in (question.change, question.low, question.high))
    allowed = None if question.allowed is None else (question.allowed - 1) * 100
    return _Interval(
        question.name,
        question.status,
        (change - 1) * 100,
        (low - 1) * 100,
        (high - 1) * 100,
        allowed,
        question.check.observed,
    )


def _of_limit(question: Question) -> _Interval:
    """The figure in percent of the limit."""
    part = 100 / float(question.allowed or 1)
    change, low, high = (float(v or 0) for v in (question.change, question.low, question.high))
    return _Interval(
        question.name,
        question.status,
        change * part,
        low * part,
        high * part,
        100.0,
        question.check.observed,
    )


def _height(rows: Sequence[_Interval]) -> float:
    return ROW_HEIGHT * len(rows) + 40


def _drawer(rows: Sequence[_Interval], label: str) -> Callable[[Axes], None]:
    def fill(axes: Axes) -> None:
        for place, row in enumerate(rows):
            _row(axes, place, row)
        axes.axvline(0, color=svg.QUIET, linewidth=1)
        axes.set_ylim(len(rows) - 0.6, -0.95)
        axes.set_yticks([])
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.06)
        axes.xaxis.set_major_formatter(lambda value, _: number_format.stated(value))
        axes.set_xlabel(label)

    return fill


def _row(axes: Axes, place: int, row: _Interval) -> None:
    tone, gid = colours.role(TONES[row.status]), svg.mark(CANDIDATE, "interval")
    line: dict[str, Any] = {"color": tone, "solid_capstyle": "butt", "gid": gid}
    axes.plot([row.low, row.high], [place, place], linewidth=3, **line)
    axes.plot([row.estimate], [place], "o", markersize=7, color=tone, gid=gid)
    if row.allowed is not None:
        span = [place - 0.24, place + 0.24]
        axes.plot([row.allowed] * 2, span, color=svg.INK, linewidth=2)
    for x, side, text, colour in (
        (0, "left", f"{text_escaping.line(row.name, NAME_LENGTH)}: {row.status}", svg.INK),
        (1, "right", row.told, svg.QUIET),
    ):
        told = axes.text(
            x,
            place - 0.45,
            text,
            transform=axes.get_yaxis_transform(),
            ha=side,
            va="center",
            fontsize=9.5,
            color=colour,
        )
        told.set_in_layout(False)


def _answered(runs: Sequence[LoadRun]) -> list[LoadRun]:
    return [run for run in runs if len(summary.ok(run.samples))]


def _latencies(decision: GateDecision) -> Callable[[Axes], None]:
    def fill(axes: Axes) -> None:
        last, ends = 0.0, []
        every: list[float] = []
        sides = ((BASELINE, decision.baseline_runs), (CANDIDATE, decision.candidate_runs))
        for number, runs in sides:
            histograms = [
                percentiles.histogram(summary.latencies(r.samples)) for r in _answered(runs)
            ]
            if not histograms:
                continue
            whole = percentiles.merged(histograms)
            for made, width, alpha in [
                *((one, 0.7, 0.4) for one in histograms if len(histograms) > 1),
                (whole, 2.0, 1.0),
            ]:
                top = made.get_max_value() / percentiles.US_IN_MS
                total = made.get_total_count()
                places, values = scales.along(percentiles.curve(made), total, top)
                axes.plot(
                    places,
                    values,
                    color=colours.series(number),
                    linewidth=width,
                    alpha=alpha,
                    gid=svg.mark(number, "curve"),
                )
                last, every = max(last, places[-1]), every + values
            ends.append((number, places[-1], values[-1]))
        scales.quantiles(axes, last)
        scales.milliseconds(axes, every)
        svg.badges(axes, ends)

    return fill
