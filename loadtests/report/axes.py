"""Axes for latency plots: percentiles as in HdrHistogram's plots, and logarithms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis

from modelport.loadtests import number_format
from modelport.loadtests.report import svg

#: Ratio of the largest to the smallest value from which the axis is logarithmic.
LOG_FROM = 12.0
_QUANTILES = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)


def place(quantile: float, requests: int) -> float:
    """The position of a quantile: every further nine takes the same width.

    The maximum is at the position of one request in ``requests``.
    """
    return -math.log10(max(1 - quantile, 1 / max(requests, 10)))


def along(
    curve: Sequence[tuple[float, float]], requests: int, maximum: float
) -> tuple[list[float], list[float]]:
    """Positions and milliseconds of a curve of (quantile, milliseconds), up to the maximum."""
    points = [(place(quantile, requests), value) for quantile, value in curve]
    points.append((place(1.0, requests), maximum))
    return [x for x, _ in points], [y for _, y in points]


def quantiles(axes: Axes, last: float) -> None:
    """Set up the horizontal axis of percentiles, up to the position ``last``."""
    shown = [q for q in _QUANTILES if place(q, 10**9) <= last + 0.01]
    axes.set_xlim(0, last * 1.04)
    axes.set_xticks(
        [place(q, 10**9) for q in shown], [f"{float(f'{q * 100:.6g}'):g} %" for q in shown]
    )
    axes.set_xlabel("percentile of requests")


def milliseconds(
    axes: Axes, values: Sequence[float], bound: float | None = None, label: str = "latency"
) -> None:
    """Set up the vertical axis; ``bound`` is drawn with its name unless it dwarfs the rest."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    shown = bound is not None and low / 5 <= bound <= high * 5
    if shown and bound is not None:
        low, high = min(low, bound), max(high, bound)
    if high / low >= LOG_FROM:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.25, high * 1.5)
        logarithmic(axes.yaxis, number_format.stated)
        axes.set_ylabel(f"{label}, ms (log scale)")
    else:
        axes.set_ylim(0, high * 1.12)
        axes.yaxis.set_major_formatter(lambda value, _: number_format.stated(value))
        axes.set_ylabel(f"{label}, ms")
    if shown and bound is not None:
        axes.axhline(bound, color=svg.QUIET, linestyle=(0, (4, 3)), linewidth=1)
        axes.text(
            0.01,
            bound,
            f"limit on p99: {number_format.stated(bound)} ms",
            transform=axes.get_yaxis_transform(),
            va="bottom",
            fontsize=9,
            color=svg.QUIET,
            bbox={"facecolor": svg.PAPER, "edgecolor": "none", "pad": 1, "alpha": 0.7},
        )


def logarithmic(
    axis: Axis, told: Callable[[float], str], named: Mapping[float, str] | None = None
) -> None:
    """Set ticks for a logarithmic axis of any range, and the named ones."""
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    steps = (1, 2, 5) if decades < 2.2 else (1, 3) if decades < 3.5 else (1,)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, round(decades / 7))
    ticks = {
        float(f"{step}e{decade}"): ""
        for decade in range(first, last + 1, stride)
        for step in steps
        if low <= step * 10.0**decade <= high
    }
    _fixed(axis, {tick: told(tick) for tick in ticks} | dict(named or {}))


def binary(axis: Axis) -> None:
    """Set ticks at powers of two for a logarithmic axis of bytes."""
    low, high = axis.get_view_interval()
    stride = max(1, math.ceil(math.log2(high / low) / 6))
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    ticks = [2.0**power for power in powers if power % stride == 0]
    _fixed(axis, {tick: _bytes(tick) for tick in ticks})


def _bytes(value: float) -> str:
    divisor, unit = number_format.scale(value, "bytes")
    return f"{number_format.stated(value / divisor)} {unit}"


def _fixed(axis: Axis, ticks: Mapping[float, str]) -> None:
    axis.set_major_locator(ticker.FixedLocator(list(ticks)))
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FixedFormatter(list(ticks.values())))
