"""Plots of a comparison; a candidate has the same number and colour in all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from modelport.loadtests import number_format
from modelport.loadtests.compare.result import Candidate, Comparison, Measured
from modelport.loadtests.report import axes as scales
from modelport.loadtests.report import colours, loads, svg, text_escaping
from modelport.loadtests.report.svg import Plot

#: Height in points of a bar with the name above it.
BAR_HEIGHT = 30.0
NAME_LENGTH = 42
Row = tuple[int, Candidate, Sequence[float]]
#: Rounds of each load, by candidate's number and kind of loop.
Points = dict[tuple[int, str], list[list[Measured]]]


def draw(comparison: Comparison, kinds: Collection[str] | None = None) -> list[Plot]:
    """Draw every plot that has figures, in the report's order, or only those of ``kinds``."""
    drawers: dict[str, Callable[[Comparison], list[Plot]]] = {
        "latency": latency,
        "throughput": throughput,
        "rate-under-slo": rate_under_slo,
        "cold-start": cold_start,
        "size-error": size_and_error,
        "memory": memory,
        "cpu": cpu,
        "cost": cost,
    }
    wanted = (drawers[kind] for kind in drawers if kinds is None or kind in kinds)
    return [drawn for drawer in wanted for drawn in drawer(comparison)]


def numbered(comparison: Comparison) -> list[tuple[int, Candidate]]:
    return list(enumerate(comparison.candidates, start=1))


def latency(comparison: Comparison) -> list[Plot]:
    """Percentile against latency, one plot for each load of most candidates."""
    shared = loads.shared(loads.by_load(comparison.candidates))
    found = []
    for place, (load, runs) in enumerate(shared.items(), start=1):
        curves = {number: [r for r in rounds if r.curve] for number, rounds in runs.items()}
        curves = {number: rounds for number, rounds in curves.items() if rounds}
        if not curves:
            continue
        drawn = svg.plot(
            f"latency-{place}",
            f"Latency: {load.title}",
            "Percentile against latency, from an HDR histogram of all correct answers. The bold "
            "line is the round with the median p99 (the slower one of two), the faint lines are "
            "the other rounds." + _asked_otherwise(loads.other_protocols(load, runs)),
            320,
            partial(_curves, curves=curves, slo_ms=comparison.slo_p99_ms),
        )
        found.append(drawn)
    return found


def _asked_otherwise(other_protocols: dict[int, str]) -> str:
    return "".join(
        f" {number} gets requests in {asked}." for number, asked in other_protocols.items()
    )


def _curves(axes: Axes, curves: dict[int, list[Measured]], slo_ms: float) -> None:
    ends = []
    for number, runs in curves.items():
        strong = loads.typical(runs)
        for run in sorted(runs, key=lambda run: run is strong):
            places, values = scales.along(run.curve, run.requests, run.latency.maximum)
            (line,) = axes.plot(
                places,
                values,
                color=colours.series(number),
                linewidth=2 if run is strong else 0.7,
                alpha=1 if run is strong else 0.4,
                gid=svg.mark(number, "curve"),
            )
            if run is strong:
                ends.append((number, places[-1], values[-1]))
            else:
                line.set_zorder(1.5)
    scales.quantiles(axes, max(place for _, place, _ in ends))
    every = [value for runs in curves.values() for run in runs for _, value in run.curve]
    every += [run.latency.maximum for runs in curves.values() for run in runs]
    scales.milliseconds(axes, every, bound=slo_ms)
    svg.badges(axes, ends)


def throughput(comparison: Comparison) -> list[Plot]:
    """Correct answers per second against p99, a point per load, for each protocol."""
    by_load = loads.by_load(comparison.candidates)
    found = []
    for place, protocol in enumerate(dict.fromkeys(load.protocol for load in by_load), start=1):
        points: Points = {}
        other_protocols: dict[int, str] = {}
        for load, runs in by_load.items():
            if load.protocol != protocol:
                continue
            other_protocols |= loads.other_protocols(load, runs)
            for number, rounds in runs.items():
                points.setdefault((number, load.loop), []).append(list(rounds))
        drawn = svg.plot(
            f"throughput-{place}",
            f"Throughput and tail: {protocol}",
            "Correct answers per second against p99 latency: further right and lower is better. A "
            "point is one load, medians of the rounds, with whiskers from the lowest to the "
            "highest; dots are closed loops, rings the constant arrival rates that the search "
            "tried." + _asked_otherwise(other_protocols),
            320,
            partial(_throughput, points=points, slo_ms=comparison.slo_p99_ms),
        )
        found.append(drawn)
    return found


def _throughput(axes: Axes, points: Points, slo_ms: float) -> None:
    ends: dict[int, tuple[float, float]] = {}
    every = []
    for (number, loop), groups in points.items():
        middles = []
        for runs in groups:
            rates = [run.requests_per_second for run in runs]
            tails = [run.latency.p99 for run in runs]
            middle = (statistics.median(rates), statistics.median(tails))
            if len(runs) > 1:
                _cross(axes, number, middle, rates, tails)
            middles.append(middle)
            every += tails
        middles.sort()
        axes.plot(
            *zip(*middles, strict=True),
            marker="o",
            linestyle="-" if loop == "closed" else "",
            color=colours.series(number),
            linewidth=1.2,
            markersize=6 if loop == "closed" else 3.6,
            markerfacecolor=colours.series(number) if loop == "closed" else svg.PAPER,
            markeredgewidth=1.0,
            zorder=3 if loop == "closed" else 2,
            gid=svg.mark(number, "points"),
        )
        if loop == "closed" or number not in ends:
            ends[number] = middles[-1]
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: number_format.stated(value))
    axes.set_xlabel("correct answers per second")
    scales.milliseconds(axes, every, bound=slo_ms, label="p99 latency")
    svg.badges(axes, [(number, *end) for number, end in ends.items()])


def _cross(
    axes: Axes,
    number: int,
    middle: tuple[float, float],
    across: Sequence[float],
    up: Sequence[float],
) -> None:
    """Whiskers from the lowest to the highest round, in both directions."""
    style: dict[str, Any] = {
        "color": colours.series(number),
        "linewidth": 0.9,
        "alpha": 0.6,
        "gid": svg.mark(number, "spread"),
    }
    axes.plot([min(across), max(across)], [middle[1]] * 2, **style)
    axes.plot([middle[0]] * 2, [min(up), max(up)], **style)


def size_and_error(comparison: Comparison) -> list[Plot]:
    """Size against numerical error of the artifacts."""
    known = [
        (number, float(candidate.artifact_bytes), candidate.max_abs_error)
        for number, candidate in numbered(comparison)
        if candidate.max_abs_error is not None
    ]
    if not known:
        return []
    without = len(comparison.candidates) - len(known)
    text = (
        "Size of the artifact against the largest absolute error in its certificate: further left "
        "and lower is better."
    )
    if without:
        text += f" {without} of {len(comparison.candidates)} have no certified error."
    return [svg.plot("size-error", "Size and error", text, 320, lambda axes: _sizes(axes, known))]


def _sizes(axes: Axes, known: list[tuple[int, float, float]]) -> None:
    errors = [error for _, _, error in known if error > 0]
    #: Zero has no logarithm: exact artifacts get a line of their own below the smallest.
    floor = 10 ** (math.floor(math.log10(min(errors))) - 1) if errors else 1e-9
    points = [(number, size, error if error > 0 else floor) for number, size, error in known]
    for number, size, error in points:
        axes.plot([size], [error], "o", color=colours.series(number), gid=svg.mark(number, "point"))
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = [size for _, size, _ in known]
    axes.set_xlim(min(sizes) / 1.6, max(sizes) * 1.6)
    top = max(errors, default=floor * 1e3)
    axes.set_ylim(floor / 3, top * 5)
    scales.binary(axes.xaxis)
    scales.logarithmic(
        axes.yaxis, number_format.stated, {floor: "exact"} if floor not in errors else {}
    )
    axes.set_xlabel("size of the artifact (log scale)")
    axes.set_ylabel("largest absolute error (log scale)")
    svg.badges(axes, points)


def cold_start(comparison: Comparison) -> list[Plot]:
    """Bars to READY, and to the first correct answer."""
    first = [c.cold_first_response_seconds for c in comparison.candidates]
    return _bars(
        comparison,
        "cold-start",
        "Cold start",
        "From process start to READY (full bar) and to the first correct answer (pale bar), as "
        "medians of the rounds; each dot is the first answer of a round.",
        "s",
        [
            value or c.cold_start_seconds
            for value, c in zip(first, comparison.candidates, strict=True)
        ],
        [c.cold_start_seconds for c in comparison.candidates],
    )


def rate_under_slo(comparison: Comparison) -> list[Plot]:
    bound = f"{number_format.stated(comparison.slo_p99_ms)} ms"
    return _bars(
        comparison,
        "rate-under-slo",
        f"Highest rate with p99 under {bound}",
        "Found by a search in every round: one dot per round, and a bar for their median. A round "
        "in which no rate stayed within the limit counts as 0.",
        "requests/s",
        [[rate or 0.0 for rate in c.rate_under_slo] for c in comparison.candidates],
        ascending=False,
    )


def memory(comparison: Comparison) -> list[Plot]:
    return _bars(
        comparison,
        "memory",
        "Memory",
        "Memory of all processes of the server at the end of each round: one dot per round, and a "
        "bar for their median.",
        "bytes",
        [c.memory_bytes for c in comparison.candidates],
    )


def cpu(comparison: Comparison) -> list[Plot]:
    return _bars(
        comparison,
        "cpu",
        "CPU per request",
        "CPU time of the server's processes per correct answer: one dot per round, and a bar for "
        "their median.",
        "s",
        [c.cpu_seconds_per_request for c in comparison.candidates],
    )


def cost(comparison: Comparison) -> list[Plot]:
    price = comparison.price_per_hour
    said = "" if price is None else f": {number_format.stated(price)} {comparison.currency} an hour"
    return _bars(
        comparison,
        "cost",
        "Cost per million inferences",
        f"At the highest rate within the limit, from the stated price{said}.",
        comparison.currency,
        [
            [] if (c.cost_per_million) is None else [c.cost_per_million]
            for c in comparison.candidates
        ],
    )


def _bars(
    comparison: Comparison,
    name: str,
    title: str,
    description: str,
    unit: str,
    values: Sequence[Sequence[float]],
    inner: Sequence[Sequence[float]] | None = None,
    ascending: bool = True,
) -> list[Plot]:
    """The median of each candidate, best on top; ``inner`` is a part of the bar."""
    rows = [
        (number, candidate, found)
        for (number, candidate), found in zip(numbered(comparison), values, strict=True)
        if found
    ]
    if not rows:
        return []
    rows.sort(key=lambda row: statistics.median(row[2]), reverse=not ascending)
    parts = dict(enumerate(inner, start=1)) if inner else {}
    drawer: Callable[[Axes], None] = lambda axes: _draw_bars(axes, rows, parts, unit)  # noqa: E731
    return [svg.plot(name, title, description, BAR_HEIGHT * len(rows) + 34, drawer)]


def _draw_bars(
    axes: Axes, rows: Sequence[Row], parts: dict[int, Sequence[float]], unit: str
) -> None:
    top = max(statistics.median(values) for _, _, values in rows)
    divisor, called = number_format.scale(top, unit)
    for place, (number, candidate, values) in enumerate(rows):
        colour, middle = colours.series(number), statistics.median(values) / divisor
        part = parts.get(number)
        style: dict[str, Any] = {"color": colour, "height": 0.34}
        if candidate.disqualified:
            style |= {"facecolor": "none", "edgecolor": colour, "linestyle": (0, (3, 2))}
        axes.barh(place, middle, alpha=0.35 if part else 1, gid=svg.mark(number, "bar"), **style)
        if part:
            inner = statistics.median(part) / divisor
            axes.barh(place, inner, gid=svg.mark(number, "part"), **style)
        if len(values) > 1:
            _rounds(axes, number, place, [value / divisor for value in values])
        _label(axes, place, number, candidate, number_format.spread([v / divisor for v in values]))
    axes.set_ylim(len(rows) - 0.5, -0.95)
    axes.set_xlim(left=0)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: number_format.stated(value))
    axes.set_xlabel(called)


def _rounds(axes: Axes, number: int, place: int, values: Sequence[float]) -> None:
    """A dot for every round, on a line from the lowest to the highest."""
    axes.plot([min(values), max(values)], [place] * 2, color=svg.INK, linewidth=0.8)
    axes.plot(
        values,
        [place] * len(values),
        "o",
        markersize=3.4,
        color=svg.PAPER,
        markeredgecolor=svg.INK,
        markeredgewidth=0.8,
        gid=svg.mark(number, "round"),
    )


def _label(axes: Axes, place: int, number: int, candidate: Candidate, told: str) -> None:
    """The number and name above the bar on the left, the figure on the right."""
    name = text_escaping.line(candidate.name, NAME_LENGTH)
    if candidate.disqualified:
        name = f"{text_escaping.line(candidate.name, NAME_LENGTH - 14)}, disqualified"
    at, above = axes.get_yaxis_transform(), place - 0.42
    svg.badge(axes, number, (0, above), (6, 0), at)
    for x, shift, side, text, colour in (
        (0, 15, "left", name, svg.INK),
        (1, 0, "right", told, svg.QUIET),
    ):
        label = axes.annotate(
            text,
            (x, above),
            xycoords=at,
            xytext=(shift, 0),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=9.5,
            color=colour,
            annotation_clip=False,
        )
        label.set_gid(svg.mark(number, "label"))
        label.set_in_layout(False)
