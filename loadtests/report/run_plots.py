"""Plots of one run: the distribution of latencies, and their course over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from modelport.loadtests import number_format
from modelport.loadtests.load import percentiles, summary
from modelport.loadtests.load.samples import LoadRun, Outcome
from modelport.loadtests.report import axes as scales
from modelport.loadtests.report import colours, svg
from modelport.loadtests.report.svg import Plot

HEIGHT = 280.0
#: Most requests drawn as individual dots.
MOST_DOTS = 1500
#: Most slices of time, and correct answers needed in the middle one for a meaningful p99.
MOST_SLICES, SLICE_ANSWERS = 80, 200
LATENCY, FIRST_BYTE = 1, 2
BAD = colours.role("bad")
Floats = npt.NDArray[np.float64]


def draw(run: LoadRun) -> list[Plot]:
    """Draw every plot that has answers; none if there were no requests."""
    if not len(run.samples):
        return []
    found = []
    if len(summary.ok(run.samples)):
        found += [_percentiles(run), _histogram(run)]
    return [*found, _over_time(run), _throughput(run)]


def _percentiles(run: LoadRun) -> Plot:
    series = {
        LATENCY: ("latency", summary.latencies(run.samples)),
        FIRST_BYTE: ("first byte", summary.first_bytes(run.samples)),
    }

    def fill(axes: Axes) -> None:
        last = 0.0
        every: list[float] = []
        for number, (name, seconds) in series.items():
            histogram = percentiles.histogram(seconds)
            top = histogram.get_max_value() / percentiles.US_IN_MS
            places, values = scales.along(percentiles.curve(histogram), len(seconds), top)
            colour = colours.series(number)
            gid = svg.mark(number, "curve")
            axes.plot(places, values, color=colour, linewidth=2, label=name, gid=gid)
            last, every = max(last, places[-1]), every + values
        scales.quantiles(axes, last)
        scales.milliseconds(axes, every)
        axes.legend(frameon=False, loc="upper left")

    text = (
        "Percentile against milliseconds, correct answers only. Latency counts from the intended "
        "time of sending, first byte from the actual one."
    )
    return svg.plot("percentiles", "Percentiles", text, HEIGHT, fill)


def _histogram(run: LoadRun) -> Plot:
    milliseconds = np.maximum(summary.latencies(run.samples) * 1e3, 1e-3)

    def fill(axes: Axes) -> None:
        low, high = milliseconds.min(), milliseconds.max()
        edges = np.geomspace(low / 1.02, high * 1.02, 61)
        counts, _ = np.histogram(milliseconds, edges)
        axes.stairs(
            counts, edges, fill=True, color=colours.series(LATENCY), gid=svg.mark(1, "bars")
        )
        axes.set_xscale("log")
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, counts.max() * 1.15)
        scales.logarithmic(axes.xaxis, number_format.stated)
        axes.yaxis.set_major_formatter(lambda value, _: number_format.stated(value))
        axes.set_xlabel("latency, ms (log scale)")
        axes.set_ylabel("correct answers")
        found = percentiles.percentiles(percentiles.histogram(milliseconds / 1e3))
        for name, value in (("p50", found.p50), ("p99", found.p99)):
            side = "right" if value > np.sqrt(edges[0] * edges[-1]) else "left"
            axes.axvline(value, color=svg.INK, linewidth=1, linestyle=(0, (4, 3)))
            axes.text(
                value,
                0.99,
                f" {name} {number_format.with_unit(value, 'ms')} ",
                transform=axes.get_xaxis_transform(),
                ha=side,
                va="top",
                fontsize=9,
            ).set_in_layout(False)

    text = "Number of correct answers by latency; the axis and the bars are logarithmic."
    return svg.plot("histogram", "Distribution of latency", text, HEIGHT, fill)


@dataclass(frozen=True)
class _Slices:
    """The run cut into equal slices of time."""

    #: Seconds [slices + 1].
    edges: Floats

    @property
    def middles(self) -> Floats:
        return (self.edges[1:] + self.edges[:-1]) / 2

    @property
    def width(self) -> float:
        return float(self.edges[1] - self.edges[0])

    def rates(self, seconds: Floats) -> Floats:
        """Events per second [slices]."""
        return np.histogram(seconds, self.edges)[0] / self.width

    def place(self, seconds: Floats) -> npt.NDArray[np.intp]:
        """The slice of each event [events]; outliers go to the first or last."""
        found = np.searchsorted(self.edges, seconds, side="right") - 1
        return np.clip(found, 0, len(self.edges) - 2)


def _slices(run: LoadRun) -> _Slices:
    begin = run.load.warmup_seconds
    end = max(begin + run.load.duration_seconds, begin + 1e-3)
    wanted = len(summary.ok(run.samples)) // SLICE_ANSWERS
    return _Slices(np.linspace(begin, end, int(np.clip(wanted, 8, MOST_SLICES)) + 1))


def _over_time(run: LoadRun) -> Plot:
    good = summary.ok(run.samples)
    bad = run.samples[run.samples["outcome"] != Outcome.OK]
    dots = len(run.samples) <= MOST_DOTS

    def fill(axes: Axes) -> None:
        values = _dots(axes, run) if dots else _bands(axes, run)
        values += ((bad["done"] - bad["intended"]) * 1e3).tolist()
        scales.milliseconds(axes, values)
        if len(bad):
            _crosses(axes, bad["intended"], (bad["done"] - bad["intended"]) * 1e3)
        axes.set_xlabel("seconds since the start")
        axes.set_xlim(_slices(run).edges[0], _slices(run).edges[-1])
        if len(good) or len(bad):
            axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))

    what = "one dot per request" if dots else "percentiles of each slice of time"
    text = f"Latency against the intended time of sending: {what}; a cross is a failed request."
    return svg.plot("over-time", "Latency over time", text, HEIGHT, fill)


def _dots(axes: Axes, run: LoadRun) -> list[float]:
    good = summary.ok(run.samples)
    values = (good["done"] - good["intended"]) * 1e3
    axes.plot(
        good["intended"],
        values,
        "o",
        markersize=3,
        alpha=0.6,
        markeredgewidth=0,
        color=colours.series(LATENCY),
        label="correct answer",
        gid=svg.mark(LATENCY, "dots"),
    )
    return [float(value) for value in values]


def _bands(axes: Axes, run: LoadRun) -> list[float]:
    """p50, p99 and the slowest of each slice."""
    good, slices = summary.ok(run.samples), _slices(run)
    values = (good["done"] - good["intended"]) * 1e3
    where = slices.place(good["intended"])
    order = np.argsort(where, kind="stable")
    parts = np.split(values[order], np.searchsorted(where[order], range(1, len(slices.middles))))
    kept = [(middle, part) for middle, part in zip(slices.middles, parts, strict=True) if len(part)]
    times = [middle for middle, _ in kept]
    lines = {
        "slowest": [float(part.max()) for _, part in kept],
        "p99": [float(np.quantile(part, 0.99, method="higher")) for _, part in kept],
        "p50": [float(np.quantile(part, 0.5, method="higher")) for _, part in kept],
    }
    styles: dict[str, dict[str, Any]] = {
        "slowest": {"linestyle": "", "marker": ".", "markersize": 4, "color": svg.QUIET},
        "p99": {"color": colours.series(2), "linewidth": 1.6},
        "p50": {"color": colours.series(LATENCY), "linewidth": 2},
    }
    for name, found in lines.items():
        gid = svg.mark(LATENCY, f"line-{name}")
        axes.plot(times, found, label=name, gid=gid, **styles[name])
    return [value for found in lines.values() for value in found]


def _crosses(axes: Axes, times: Floats, values: Floats) -> None:
    """Crosses for failures, at most ``MOST_DOTS``, evenly selected."""
    step = max(1, len(times) // MOST_DOTS)
    axes.plot(
        times[::step],
        np.maximum(values[::step], 1e-3),
        "x",
        markersize=4,
        color=BAD,
        label=f"failed ({len(times):,})",
        gid=svg.mark(LATENCY, "failures"),
    )


def _throughput(run: LoadRun) -> Plot:
    good, slices = summary.ok(run.samples), _slices(run)
    bad = run.samples[run.samples["outcome"] != Outcome.OK]

    def fill(axes: Axes) -> None:
        right, wrong = slices.rates(good["done"]), slices.rates(bad["done"])
        blue = colours.series(LATENCY)
        axes.stairs(right, slices.edges, fill=True, alpha=0.35, color=blue, gid=svg.mark(1, "area"))
        axes.stairs(right, slices.edges, color=blue, linewidth=1.5, label="correct answers")
        if run.load.rate is not None:
            wanted = slices.rates(run.samples["intended"])
            style: dict[str, Any] = {
                "color": svg.INK,
                "linewidth": 1.2,
                "linestyle": (0, (4, 3)),
            }
            axes.plot(
                slices.middles, wanted, label="intended", gid=svg.mark(1, "intended"), **style
            )
            right = np.maximum(right, wanted)
        if len(bad):
            axes.stairs(wrong, slices.edges, fill=True, color=BAD, label="failed")
        axes.set_ylim(0, max(float(right.max()), float(wrong.max()), 1e-9) * 1.15)
        axes.set_xlim(slices.edges[0], slices.edges[-1])
        axes.yaxis.set_major_formatter(lambda value, _: number_format.stated(value))
        axes.set_xlabel("seconds since the start")
        axes.set_ylabel("per second")
        axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))

    text = f"Outcomes per second, in slices of {number_format.with_unit(slices.width, 's')}." + (
        " The dashed line is the intended rate." if run.load.rate else ""
    )
    return svg.plot("throughput", "Throughput over time", text, HEIGHT, fill)
