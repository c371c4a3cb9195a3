"""Plots of a rollout: its share over time, its criteria, and the latencies and scores of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from modelport.loadtests import number_format
from modelport.loadtests.report import colours, svg, text_escaping
from modelport.loadtests.report.svg import Plot

BASELINE, CANDIDATE = 1, 2
TONES = {"kept": "good", "broken": "bad"}
#: The axis of a criterion ends at this multiple of the limit, or behind the interval.
LEAST_OF_LIMIT = 4.0
SIDES = ((BASELINE, "baseline"), (CANDIDATE, "candidate"))
SCORE_BINS = 20

Document = Mapping[str, Any]


def draw(state: Document) -> list[Plot]:
    """Draw every plot that has figures."""
    found = []
    if state["stages"]:
        text = (
            "The share of the requests that the candidate answers, or that is copied to it in "
            "the shadow stage (the dashed line)."
        )
        found.append(svg.plot("share", "Share over time", text, 170, _shares(state)))
    for number, row in enumerate(state["evidence"]):
        if row["estimate"] is not None:
            found.append(_criterion(number, row))
    counts = state["counts"]
    for name, title, place, label, text in (
        (
            "latency", "Latency of both sides", _milliseconds, "latency, ms (log scale)",
            "The share of each side's requests that were answered within a time.",
        ),
        (
            "scores", "Scores of both sides", _score, "score",
            "The share of each side's scores up to a value.",
        ),
    ):  # fmt: skip
        figures = {number: _sum(counts, side, name, place) for number, side in SIDES}
        if all(figures.values()):
            found.append(svg.plot(name, title, text, 220, _distribution(figures, label)))
    return found


def _shares(state: Document) -> Callable[[Axes], None]:
    stages, events = state["stages"], state["events"]
    began = stages[0]["began"]
    last = max(stages[-1]["began"] + max(state["seconds"], 1.0), events[-1]["time"])

    def fill(axes: Axes) -> None:
        for kind, style in (("canary", "-"), ("shadow", "--")):
            times, shares = [0.0], [0.0]
            for stage in (each for each in stages if each["kind"] == kind):
                end = (stage.get("ended", last) - began) / 60
                times += [(stage["began"] - began) / 60] * 2 + [end]
                shares += [shares[-1], 100 * stage["share"], 100 * stage["share"]]
            if len(times) > 1:
                if kind == "shadow" or state["phase"] == "rolled back":
                    times.append(times[-1])
                    shares.append(0.0)
                gid = svg.mark(CANDIDATE, "curve")
                colour = colours.series(CANDIDATE)
                axes.plot(times, shares, style, color=colour, linewidth=2, gid=gid)
        axes.set_ylim(0, 105)
        axes.set_xlim(0, max((last - began) / 60, 1 / 60))
        axes.set_ylabel("share, %")
        axes.set_xlabel("minutes")

    return fill


def _criterion(number: int, row: Document) -> Plot:
    limit, estimate, scale = row["limit"], row["estimate"], 1.0 if row["relative"] else 100.0
    unit = "times the baseline's rate" if row["relative"] else "% of the requests"
    upper = row["upper"]
    end = max(LEAST_OF_LIMIT * limit, 1.2 * estimate, 1.05 * (upper or 0.0)) or 1.0
    high = end if upper is None else upper
    low = row["lower"] or 0.0

    def fill(axes: Axes) -> None:
        tone = colours.role(TONES.get(row["status"], "open"))
        gid = svg.mark(CANDIDATE, "interval")
        span = [scale * low, scale * high]
        axes.plot(span, [0, 0], color=tone, linewidth=3, solid_capstyle="butt", gid=gid)
        if upper is None:  # the interval has no end
            axes.plot([scale * high], [0], ">", markersize=7, color=tone, gid=gid)
        axes.plot([scale * estimate], [0], "o", markersize=7, color=tone, gid=gid)
        axes.axvline(scale * limit, color=svg.INK, linewidth=2)
        axes.set_xlim(0, scale * end * 1.02)
        axes.set_ylim(-1, 1)
        axes.set_yticks([])
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_formatter(lambda value, _: number_format.stated(value))
        axes.set_xlabel(unit)

    bounds = f"{_stated(row['lower'], scale)} to {_stated(upper, scale)}"
    text = (
        f"Estimate {_stated(estimate, scale)} {unit}; confidence sequence {bounds}; the limit "
        f"(the vertical line) is {_stated(limit, scale)}."
    )
    title = f"{text_escaping.line(row['name'], 60)}: {text_escaping.line(row['status'], 20)}"
    return svg.plot(f"criterion-{number}", title, text, 70, fill)


def _stated(value: float | None, scale: float) -> str:
    return "any" if value is None else number_format.figure(scale * value)


def _milliseconds(key: int) -> float:
    """The latency of a bucket: eighths of a doubling of a microsecond."""
    return float(2 ** (min(key, 400) / 8) / 1000)


def _score(key: int) -> float:
    return (key + 1) / SCORE_BINS


def _sum(
    counts: Sequence[Document], side: str, name: str, place: Callable[[int], float]
) -> dict[float, int]:
    """Counts of all stages, by value."""
    found: dict[float, int] = {}
    for stage in counts:
        for key, count in stage[side][name].items():
            value = place(int(key))
            found[value] = found.get(value, 0) + count
    return dict(sorted(found.items()))


def _distribution(figures: Mapping[int, Mapping[float, int]], label: str) -> Callable[[Axes], None]:
    def fill(axes: Axes) -> None:
        for number, side in SIDES:
            counts = figures[number]
            total, below, heights = sum(counts.values()) or 1, 0, []
            for count in counts.values():
                below += count
                heights.append(100 * below / total)
            values, gid = list(counts), svg.mark(number, "curve")
            colour = colours.series(number)
            axes.step(
                [values[0], *values], [0.0, *heights], where="post", color=colour, linewidth=2,
                label=side, gid=gid,
            )  # fmt: skip
        if "log" in label:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: number_format.stated(value))
            axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.set_ylim(0, 105)
        axes.set_ylabel("answers, %")
        axes.set_xlabel(label)
        axes.legend(frameon=False, loc="lower right")

    return fill
