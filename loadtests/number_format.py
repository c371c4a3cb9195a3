"""Numbers as text: three significant digits, a unit, and the spread over the rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: Forms of a unit, ascending: the smallest value, the divisor, the name.
_SCALES: dict[str, tuple[tuple[float, float, str], ...]] = {
    "ms": ((0.0, 1e-3, "µs"), (0.1, 1.0, "ms"), (1e4, 1e3, "s")),
    "s": ((0.0, 1e-6, "µs"), (1e-3, 1e-3, "ms"), (1.0, 1.0, "s"), (600.0, 60.0, "min")),
    "bytes": (
        (0.0, 1.0, "B"),
        (1024.0, 1024.0, "KiB"),
        (1024.0**2, 1024.0**2, "MiB"),
        (1024.0**3, 1024.0**3, "GiB"),
    ),
}
#: Characters in tables.
DASH, TIMES, INFINITY = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}", "\N{INFINITY}"
NOTHING = DASH


def figure(value: float) -> str:
    """Three significant digits, with thousands separated: 1,234, 12.3, 0.0123, 1.2e-07."""
    if not math.isfinite(value):
        return INFINITY if value > 0 else NOTHING
    rounded = float(f"{value:.3g}")
    size = abs(rounded)
    if size == 0:
        return "0"
    if size >= 100:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.2g}"
    return f"{rounded:.{2 - math.floor(math.log10(size))}f}"


def stated(value: float) -> str:
    """A number as it was given, without added zeros: 10, 0.5, 1,500."""
    return f"{float(f'{value:.6g}'):,g}" if abs(value) < 1e6 else f"{value:,.0f}"


def scale(value: float, unit: str) -> tuple[float, str]:
    """The divisor and the name of the unit in which ``value`` is most readable."""
    divisor, name = 1.0, unit
    for least, step, called in _SCALES.get(unit, ()):
        if abs(value) >= least:
            divisor, name = step, called
    if value == 0 and unit in ("ms", "s"):
        return 1.0, unit
    return divisor, name


def with_unit(value: float | None, unit: str) -> str:
    """``value``, given in ``unit``, in its most readable unit; a dash for None."""
    if value is None:
        return NOTHING
    divisor, name = scale(value, unit)
    return _joined(_number(value / divisor, name), name)


def spread(values: Sequence[float], unit: str = "") -> str:
    """The median over the rounds with its unit, and (lowest-highest) if there are several."""
    if not values:
        return NOTHING
    middle = statistics.median(values)
    divisor, name = scale(middle, unit)
    text = _joined(_number(middle / divisor, name), name)
    if len(values) > 1:
        low, high = (_number(end(values) / divisor, name) for end in (min, max))
        text += f" ({low}{DASH}{high})"
    return text


def times(ratio: float) -> str:
    """A factor with its sign: 1.42 x."""
    return f"{ratio:.2f} {TIMES}" if ratio < 10 else f"{figure(ratio)} {TIMES}"


def change(ratio: float) -> str:
    """A ratio as a change: 1.153 is "+15.3 %"."""
    percent = (ratio - 1) * 100
    return f"{percent:+.1f} %" if abs(percent) < 100 else f"{percent:+,.0f} %"


def duration(seconds: float) -> str:
    """20 s, 0.5 s; from a minute on whole minutes and seconds: 7 min 32 s."""
    if seconds < 60:
        return f"{stated(float(f'{seconds:.3g}'))} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{amount} {unit}" for amount, unit in parts if amount)


def unit_of(measure: str) -> str:
    """The unit after the last comma of a measure: "p99 latency, ms" is in ms."""
    _, comma, unit = measure.rpartition(",")
    return unit.strip() if comma else ""


def _number(value: float, unit: str) -> str:
    """``figure``, with whole counts, and with more digits just below 100 %."""
    if unit == "" and value == round(value):
        return f"{value:,.0f}"
    if unit == "%" and 99 < value < 100:
        return f"{value:.{1 - math.floor(math.log10(100 - value))}f}"
    return figure(value)


def _joined(number: str, unit: str) -> str:
    if unit == "ratio":
        return f"{number} {TIMES}"
    return f"{number} {unit}" if unit else number
