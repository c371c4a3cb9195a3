"""Service level objectives of one run: ``--objective p99=25ms``, and their checks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from modelport.loadtests.checks import Check, CheckStatus
from modelport.loadtests.load.percentiles import Percentiles
from modelport.loadtests.load.samples import LoadRun
from modelport.loadtests.load.summary import Summary
from modelport.loadtests.number_format import with_unit

#: Fields by name; the names apply to latency and, after ``ttfb-``, to the time to first byte.
QUANTILES = {
    "p50": "p50",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
    "p99.9": "p999",
    "max": "maximum",
}
FIRST_BYTE = "ttfb-"
THROUGHPUT, ERRORS = "throughput", "errors"
NAMES = (*QUANTILES, *(FIRST_BYTE + name for name in QUANTILES), THROUGHPUT, ERRORS)
MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
VALUE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(us|ms|s|%|rps|/s)?")
#: With fewer answers beyond a quantile, it depends on a handful of them.
FEWEST_BEYOND = 5
BEYOND = {"p50": 0.5, "p90": 0.1, "p95": 0.05, "p99": 0.01, "p99.9": 0.001}


@dataclass(frozen=True)
class Objective:
    """A limit: most milliseconds, least requests per second, or the largest share of errors."""

    name: str
    bound: float

    @property
    def unit(self) -> str:
        return {THROUGHPUT: "requests/s", ERRORS: "%"}.get(self.name, "ms")

    def text(self) -> str:
        """The limit in words."""
        if self.name == THROUGHPUT:
            return f"at least {with_unit(self.bound, self.unit)}"
        bound = self.bound * 100 if self.name == ERRORS else self.bound
        return f"at most {with_unit(bound, self.unit)}"


def parse(text: str) -> Objective:
    """Parse ``p99=25ms``, ``ttfb-p50=5ms``, ``throughput=200`` or ``errors=0.1%``.

    Raises:
        ValueError: it is none of these.
    """
    name, separator, value = (part.strip() for part in text.partition("="))
    found = VALUE.fullmatch(value)
    if not separator or name not in NAMES or found is None:
        raise ValueError(
            f"'{text}' is not an objective; write NAME=VALUE such as p99=25ms, with NAME one of "
            f"{', '.join(NAMES)}"
        )
    number, unit = float(found[1]), found[2] or ""
    if name == THROUGHPUT:
        if unit not in ("", "rps", "/s"):
            raise ValueError(f"'{text}': throughput is a number of correct answers per second")
        return Objective(name, number)
    if name == ERRORS:
        if unit not in ("", "%") or number > 100 or (not unit and number > 1):
            raise ValueError(f"'{text}': errors are a share: 0.1% or 0.001")
        return Objective(name, number / 100 if unit == "%" else number)
    if unit not in MILLISECONDS:
        raise ValueError(f"'{text}': add the unit: us, ms or s")
    return Objective(name, number * MILLISECONDS[unit])


def judge(run: LoadRun, summary: Summary, objectives: list[Objective]) -> list[Check]:
    """Check every objective. Errors are always checked; by default none are allowed."""
    if not any(one.name == ERRORS for one in objectives):
        objectives = [Objective(ERRORS, 0.0), *objectives]
    return [_judge(run, summary, one) for one in objectives]


def _judge(run: LoadRun, summary: Summary, objective: Objective) -> Check:
    seen = _seen(summary, objective.name)
    seconds = run.load.duration_seconds
    if objective.name == ERRORS:
        met = bool(summary.requests) and seen <= objective.bound
        why = "" if met else _worst(summary)
        shown = with_unit(seen * 100, "%") if summary.requests else "no requests"
        return Check(ERRORS, _status(met), shown, objective.text(), why, seconds)
    shown = with_unit(seen, objective.unit) if summary.ok else "no correct answer"
    if objective.name == THROUGHPUT:
        return Check(
            THROUGHPUT, _status(seen >= objective.bound), shown, objective.text(), "", seconds
        )
    name, detail = objective.name, ""
    beyond = summary.ok * BEYOND.get(name.removeprefix(FIRST_BYTE), 1.0)
    if 0 < beyond < FEWEST_BEYOND and name.removeprefix(FIRST_BYTE) in BEYOND:
        detail = f"{summary.ok:,} correct answers are too few for it; measure longer"
    met = bool(summary.ok) and seen <= objective.bound
    return Check(name, _status(met), shown, objective.text(), detail, seconds)


def _seen(summary: Summary, name: str) -> float:
    if name == ERRORS:
        return summary.error_share
    if name == THROUGHPUT:
        return summary.requests_per_second
    of: Percentiles = summary.first_byte if name.startswith(FIRST_BYTE) else summary.latency
    return float(getattr(of, QUANTILES[name.removeprefix(FIRST_BYTE)]))


def _status(met: bool) -> CheckStatus:
    return CheckStatus.PASS if met else CheckStatus.FAIL


def _worst(summary: Summary) -> str:
    if not summary.requests:
        return "no requests were sent after the warm-up"
    if not summary.errors:
        return f"{summary.bad:,} of {summary.requests:,}"
    message, count = max(summary.errors.items(), key=lambda item: item[1])
    return f"{summary.bad:,} of {summary.requests:,}; {count:,} times: {message}"
