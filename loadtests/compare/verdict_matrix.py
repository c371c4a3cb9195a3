"""The verdict matrix: the winner of each concern, its lead, and whether the lead exceeds the noise.

A pure function of the candidates. If the lead is within the noise, nobody wins. Every figure has
one value for each interleaved round; the ratio of the first to the second is taken within rounds,
and exceeds the noise if the interval of ``confidence_intervals.ratio`` excludes 1. Constant values
(sizes on disk, facts) exceed it whenever they differ. Disqualified candidates are not ranked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from modelport.loadtests import confidence_intervals, number_format
from modelport.loadtests.compare import deployment_facts
from modelport.loadtests.compare.result import Candidate, ConcernVerdict

#: Confidence of the intervals.
CONFIDENCE = 0.95
#: Factor between two candidates from which a note names the worse.
FAR = 2.0


@dataclass(frozen=True)
class MatrixRow:
    """One candidate at one concern: a value for each round, or a single constant one."""

    name: str
    values: tuple[float, ...]
    #: Orders candidates with equal values, the smaller first.
    tie: float = 0.0

    @property
    def middle(self) -> float:
        return median(self.values)


@dataclass(frozen=True)
class Concern:
    """The rules for one line of the matrix.

    Attributes:
        rows: the rows of the candidates that can be judged, and a remark about the others.
        noisy: its values come from runs, so a single round proves nothing.
    """

    title: str
    measure: str
    unit: str
    rows: Callable[[Sequence[Candidate]], tuple[list[MatrixRow], str]]
    higher_is_better: bool = False
    noisy: bool = True
    #: Whether two constant values differ significantly, if that can be decided.
    differs: Callable[[Candidate, Candidate], bool] | None = field(default=None)


def matrix(candidates: Sequence[Candidate], slo_p99_ms: float) -> tuple[ConcernVerdict, ...]:
    """The eight verdicts, in a fixed order."""
    qualified = [candidate for candidate in candidates if candidate.disqualified is None]
    out = [c.name for c in candidates if c.disqualified is not None]
    users = max(
        (run.users for c in candidates for run in c.runs if run.loop == "closed"), default=1
    )
    return tuple(_verdict(one, qualified, out) for one in concerns(users, slo_p99_ms, qualified))


def concerns(
    users: int, slo_p99_ms: float, qualified: Sequence[Candidate] = ()
) -> tuple[Concern, ...]:
    return (
        Concern(
            "Tail latency",
            f"p99 latency at {users} in flight, ms",
            "ms",
            lambda found: _measured(found, lambda c: tail_latencies(c, users)),
        ),
        Concern(
            "Throughput",
            f"highest rate with p99 within {slo_p99_ms:g} ms, requests/s",
            "requests/s",
            _throughput,
            higher_is_better=True,
        ),
        Concern(
            "Cold start",
            "process start to the first correct answer, s",
            "s",
            lambda found: _measured(found, lambda c: c.cold_first_response_seconds),
        ),
        Concern(
            "Memory",
            "proportional set size of all its processes under load, bytes",
            "bytes",
            lambda found: _measured(found, lambda c: tuple(map(float, c.memory_bytes))),
        ),
        Concern(
            "Artifact size",
            "files of the version, bytes",
            "bytes",
            lambda found: _measured(found, lambda c: (float(c.artifact_bytes),)),
            noisy=False,
        ),
        _accuracy_concern(qualified),
        Concern(
            "Edge deployment",
            "artifact and native runtime, without Python or a server, bytes",
            "bytes",
            _edge,
            noisy=False,
        ),
        Concern(
            "Operational maturity",
            f"how many of {len(deployment_facts.MATURITY) + 1} facts hold",
            "",
            _maturity,
            higher_is_better=True,
            noisy=False,
        ),
    )


def _accuracy_concern(qualified: Sequence[Candidate]) -> Concern:
    """The metric if it was measured on labelled rows, otherwise parity with the checkpoint."""
    measured = {c.metric_name for c in qualified if c.metric_interval is not None}
    if len(measured) == 1 and all(c.metric_interval is not None for c in qualified):
        (metric,) = measured
        percent = metric != "AUC"
        return Concern(
            "Accuracy",
            f"{metric} on labelled rows{', %' if percent else ''}",
            "%" if percent else "",
            lambda found: _metric(found, 100.0 if percent else 1.0),
            higher_is_better=True,
            noisy=False,
            differs=_metric_differs,
        )
    return Concern(
        "Accuracy",
        "decisions equal to the checkpoint's, %",
        "%",
        _accuracy,
        higher_is_better=True,
        noisy=False,
        differs=_agreement_differs,
    )


def tail_latencies(candidate: Candidate, users: int) -> tuple[float, ...]:
    """p99 of each round's closed loop with ``users``, in the first protocol, milliseconds."""
    loops = [
        run
        for run in candidate.runs
        if run.loop == "closed" and run.users == users and run.requests
    ]
    return tuple(run.latency.p99 for run in loops if run.protocol == loops[0].protocol)


def _measured(
    candidates: Sequence[Candidate], values: Callable[[Candidate], tuple[float, ...]]
) -> tuple[list[MatrixRow], str]:
    rows = [MatrixRow(c.name, found) for c in candidates if (found := values(c))]
    without = [c.name for c in candidates if not values(c)]
    return rows, f"not measured: {', '.join(without)}" if without else ""


def _throughput(candidates: Sequence[Candidate]) -> tuple[list[MatrixRow], str]:
    """The highest rates; a round in which no rate stayed within the limit counts as 0."""
    rows = [
        MatrixRow(c.name, tuple(rate or 0.0 for rate in c.rate_under_slo))
        for c in candidates
        if c.rate_under_slo
    ]
    never = [row.name for row in rows if not row.middle]
    return rows, f"at no rate within the limit: {', '.join(never)}" if never else ""


def _accuracy(candidates: Sequence[Candidate]) -> tuple[list[MatrixRow], str]:
    """Rank by agreeing decisions, and equal ones by their largest error."""
    rows = [
        MatrixRow(
            c.name, (100 * c.agreement,), math.inf if c.max_abs_error is None else c.max_abs_error
        )
        for c in candidates
        if c.agreement is not None
    ]
    told = "; ".join(
        dict.fromkeys(
            f"{c.format} {c.precision}: {c.metric_name} {c.metric:.4f}"
            for c in candidates
            if c.metric is not None
        )
    )
    return rows, told and f"held out: {told}"


def _metric(candidates: Sequence[Candidate], scale: float) -> tuple[list[MatrixRow], str]:
    return [MatrixRow(c.name, (scale * c.metric,)) for c in candidates if c.metric is not None], ""


def _metric_differs(one: Candidate, other: Candidate) -> bool:
    """Whether the intervals of the metric on the same rows are disjoint."""
    first, second = one.metric_interval, other.metric_interval
    if first is None or second is None:
        return False
    return first[1] < second[0] or second[1] < first[0]


def _agreement_differs(one: Candidate, other: Candidate) -> bool:
    """Whether the intervals of lost decisions are disjoint (Clopper and Pearson)."""
    intervals = []
    for candidate in (one, other):
        if candidate.agreement is None or not candidate.decisions:
            return False
        lost = round((1 - candidate.agreement) * candidate.decisions)
        intervals.append(confidence_intervals.share([lost], [candidate.decisions], CONFIDENCE))
    first, second = intervals
    return first.upper < second.lower or second.upper < first.lower


def _edge(candidates: Sequence[Candidate]) -> tuple[list[MatrixRow], str]:
    rows, reasons = [], {}
    for c in candidates:
        why = deployment_facts.why_not_on_the_edge(c.format, c.backend)
        library = deployment_facts.runtime_bytes(c.backend)
        if why is not None:
            reasons[c.name] = why
        elif library is None:
            reasons[c.name] = "its native runtime is not installed"
        else:
            rows.append(MatrixRow(c.name, (float(library + c.artifact_bytes),)))
    return rows, "; ".join(f"{name}: {why}" for name, why in reasons.items())


def _maturity(candidates: Sequence[Candidate]) -> tuple[list[MatrixRow], str]:
    rows, missing = [], {}
    for c in candidates:
        held, lacking = deployment_facts.maturity(c.format, c.backend)
        rows.append(MatrixRow(c.name, (float(held),)))
        missing[c.name] = lacking
    told = "; ".join(
        f"{name} lacks: {', '.join(lacks)}" for name, lacks in missing.items() if lacks
    )
    return rows, told


def _verdict(
    concern: Concern, qualified: Sequence[Candidate], out: Sequence[str]
) -> ConcernVerdict:
    rows, note = concern.rows(qualified)
    sign = -1 if concern.higher_is_better else 1
    rows = sorted(rows, key=lambda row: (sign * row.middle, row.tie, row.name))
    notes = [note, f"disqualified: {', '.join(out)}" if out else ""]
    ranking = tuple((r.name, r.middle, number_format.spread(r.values, concern.unit)) for r in rows)
    usable = bool(rows) and (not concern.higher_is_better or rows[0].middle > 0)
    if not usable or len(rows) == 1:
        winner = rows[0].name if usable else None
        margin, beyond = None, False
    else:
        margin, beyond, why = _margin(concern, rows[0], rows[1], qualified)
        winner = rows[0].name if beyond or margin is None else None
        level = [row.name for row in rows[1:] if row.middle == rows[0].middle]
        notes += [why, f"level with {', '.join(level)}" if level else ""]
        notes.append(_far_behind(concern, rows))
    return ConcernVerdict(
        concern=concern.title,
        measure=concern.measure,
        winner=winner,
        ranking=ranking,
        margin=margin,
        beyond_noise=beyond,
        note="; ".join(part for part in notes if part),
    )


def _margin(
    concern: Concern, first: MatrixRow, second: MatrixRow, candidates: Sequence[Candidate]
) -> tuple[float | None, bool, str]:
    """The ratio of the first to the second, whether it exceeds the noise, and a remark."""
    better, worse = (first, second) if concern.higher_is_better else (second, first)
    if worse.middle <= 0:
        return None, False, f"'{second.name}' has a figure of 0"
    if not concern.noisy:
        ratio = better.middle / worse.middle
        if concern.differs is None:
            return ratio, ratio > 1, ""
        named = {candidate.name: candidate for candidate in candidates}
        return ratio, concern.differs(named[first.name], named[second.name]), ""
    # Only rounds in which both were measured: a candidate that died has fewer.
    pairs = [(b, w) for b, w in zip(better.values, worse.values, strict=False) if b > 0 and w > 0]
    try:
        interval = confidence_intervals.ratio(
            [b for b, _ in pairs], [w for _, w in pairs], CONFIDENCE
        )
    except confidence_intervals.TooFewSamples:
        return better.middle / worse.middle, False, "one round: the noise is unknown"
    told = f"ratio {interval.estimate:.2f}, {interval.lower:.2f} to {interval.upper:.2f}"
    # Medians determine the first; if the rounds contradict them, there is no margin.
    return max(interval.estimate, 1.0), interval.lower > 1, told


def _far_behind(concern: Concern, rows: Sequence[MatrixRow]) -> str:
    """Name a candidate that is last by a factor too large for noise."""
    last, next_to_last = rows[-1].middle, rows[-2].middle
    low, high = sorted((last, next_to_last))
    if len(rows) < 3 or not concern.noisy or low <= 0 or high < FAR * low:
        return ""
    return f"far behind: {rows[-1].name}, by a factor of {high / low:.1f}"
