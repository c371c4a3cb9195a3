"""From what was measured to a verdict: a pure function.

Every criterion is one interval held against one limit. It **fails** where the whole interval lies
beyond the limit, **passes** where all of it lies within, and is **inconclusive** else. The
candidate fails with one failed criterion, and passes with all passed. With a confidence of 0.95:

- a candidate that keeps every limit fails in at most 5 % of gates: the error is divided among the
  criteria (Bonferroni), because each is an occasion to fail by chance; shares of errors need
  little of it, because they are far from their limit or far beyond;
- one that breaks a limit passes in at most 5 %: nothing to divide here, because it must pass all of
  them (an intersection-union test, Berger 1982).

Both errors are spent over the looks at the growing data too (``loadtests.gate.alpha_spending``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from modelport.loadtests import statistics
from modelport.loadtests.gate.agreement import Agreement
from modelport.loadtests.gate.alpha_spending import level
from modelport.loadtests.gate.criteria import Criterion, Half, Round
from modelport.loadtests.gate.criteria import criteria as criteria_of
from modelport.loadtests.gate.slo import Slo
from modelport.loadtests.report.checks import Check, Status
from modelport.loadtests.report.figures import change as as_change
from modelport.loadtests.report.figures import duration, with_unit
from modelport.loadtests.samples import Run
from modelport.loadtests.statistics import Interval, Tails, TooFewSamples

#: Parts of the longest duration after which the gate looks. The first two are for the gross.
LOOKS = (0.05, 0.2, 0.4, 0.6, 0.8, 1.0)
#: What all shares together get of the error of failing.
SHARES_PART = 0.1
#: Where not one is allowed, so many must have been right.
FLAWLESS_REQUESTS = 1000
#: The question whether anything could be measured at all.
BROKEN = "measurement"
#: Beyond that many times the duration, "longer" is no advice.
HOPELESS = 100.0


@dataclass(frozen=True)
class Question:
    """One criterion with its answer.

    ``relative``: ``change``, ``low``, ``high`` and ``allowed`` are candidate / baseline; else they
    are the candidate's own, in ``unit``.
    """

    name: str
    unit: str
    status: Status
    baseline: float | None = None
    candidate: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    allowed: float | None = None
    detail: str = ""
    relative: bool = False
    #: How many times the rounds so far would decide it; 1 where it is decided.
    longer: float = 1.0
    #: Its part of the time that the gate took.
    seconds: float = 0.0

    @property
    def check(self) -> Check:
        """The same for people."""
        return Check(
            self.name, self.status, self._observed(), self._bound(), self.detail, self.seconds
        )

    def _observed(self) -> str:
        if self.change is None:
            return "" if self.candidate is None else with_unit(self.candidate, self.unit)
        text = self._shown(self.change)
        if self.low is not None and self.high is not None:
            text += f" ({self._shown(self.low)} to {self._shown(self.high)})"
        return text

    def _bound(self) -> str:
        return "" if self.allowed is None else f"at most {self._shown(self.allowed)}"

    def _shown(self, value: float) -> str:
        if self.relative:
            return as_change(value)
        return with_unit(100 * value, "%") if self.unit == "share" else with_unit(value, self.unit)


@dataclass(frozen=True)
class Decision:
    """What the gate says, and what it rests on."""

    status: Status
    questions: tuple[Question, ...]
    baseline: str
    candidate: str
    baseline_runs: tuple[Run, ...] = ()
    candidate_runs: tuple[Run, ...] = ()
    rounds: int = 0
    confidence: float = 0.95
    seconds: float = 0.0
    #: Of an inconclusive gate: how much longer it would take; None where no length decides it.
    more_seconds: float | None = None
    #: ISO 8601, UTC.
    began_at: str = ""
    command: str = ""
    seed: int = 0
    hardware: Mapping[str, str] = field(default_factory=dict)
    #: How the answers differ, of a candidate that was trained again, or where labels are known.
    agreement: Agreement | None = None
    notes: tuple[str, ...] = ()

    @property
    def checks(self) -> tuple[Check, ...]:
        return tuple(question.check for question in self.questions)


def timed(questions: Sequence[Question], seconds: float) -> tuple[Question, ...]:
    """``questions``, those that are new with their parts of what has passed since the others."""
    new = sum(not one.seconds for one in questions)
    rest = max(0.0, seconds - sum(one.seconds for one in questions))
    return tuple(one if one.seconds else replace(one, seconds=rest / new) for one in questions)


def decide(
    rounds: Sequence[Round], slo: Slo, looks: tuple[float, ...] = (1.0,)
) -> tuple[Question, ...]:
    """Every criterion's verdict at the last of ``looks``, parts of the longest duration so far."""
    criteria = criteria_of(rounds, slo)
    error = 1 - slo.verdict.confidence
    above = level(error, looks)
    return tuple(
        _answer(criterion, rounds, slo, Tails(level(part * error, looks), above))
        for criterion, part in zip(criteria, _parts(criteria), strict=True)
    )


def _parts(criteria: Sequence[Criterion]) -> list[float]:
    """Of the error of failing, what each criterion gets."""
    shares = sum(one.is_share for one in criteria)
    others = len(criteria) - shares
    of_shares = (SHARES_PART if others else 1.0) if shares else 0.0
    return [of_shares / shares if one.is_share else (1 - of_shares) / others for one in criteria]


def more_seconds(questions: Sequence[Question], seconds: float) -> float | None:
    """How much longer than ``seconds`` until all open questions are decided, in expectation."""
    longest = max((question.longer for question in questions), default=1.0)
    return None if longest > HOPELESS else seconds * (longest - 1)


def _answer(criterion: Criterion, rounds: Sequence[Round], slo: Slo, tails: Tails) -> Question:
    baseline, candidate = [r.baseline for r in rounds], [r.candidate for r in rounds]
    undecided = Question(
        criterion.name,
        criterion.unit,
        Status.INCONCLUSIVE,
        baseline=criterion.figure(baseline),
        candidate=criterion.figure(candidate),
        allowed=criterion.allowed,
        relative=criterion.relative,
    )
    try:
        interval = criterion.interval(rounds, tails)
    except TooFewSamples as error:
        return replace(undecided, detail=f"undecided: {error}", longer=error.longer)
    status, longer = _held(interval, criterion, candidate)
    detail = ""
    missing = slo.duration.min_rounds - len(rounds)
    if status is not Status.INCONCLUSIVE and missing > 0 and not criterion.is_share:
        status, longer = Status.INCONCLUSIVE, slo.duration.min_rounds / len(rounds)
        detail = f"undecided: {missing} more rounds first"
    elif status is Status.INCONCLUSIVE:
        detail = _why(longer)
    return replace(
        undecided,
        status=status,
        change=interval.estimate,
        low=interval.lower,
        high=interval.upper,
        detail=detail,
        longer=longer,
    )


def _held(
    interval: Interval, criterion: Criterion, candidate: Sequence[Half]
) -> tuple[Status, float]:
    """Against the limit: the verdict, and how many times the data would bring one."""
    allowed = criterion.allowed
    if interval.lower > allowed:
        return Status.FAIL, 1.0
    if interval.upper <= allowed:
        return Status.PASS, 1.0
    if criterion.is_share and interval.estimate == 0:
        # Without a single one the bound falls as one over the number, not over its root.
        if allowed > 0:
            return Status.INCONCLUSIVE, interval.upper / allowed
        asked = sum(half.asked for half in candidate)
        longer = FLAWLESS_REQUESTS / asked
        return (Status.PASS, 1.0) if longer <= 1 else (Status.INCONCLUSIVE, longer)
    return Status.INCONCLUSIVE, statistics.rounds_needed(interval, allowed)


def _why(longer: float) -> str:
    if longer > HOPELESS:
        return "undecided: the estimate lies on the limit, no length decides it"
    return f"undecided: about {longer:.1f} times as long decides it"


def longer_text(decision: Decision) -> str:
    """What to do about an inconclusive gate, in one sentence."""
    broken = [one.detail for one in decision.questions if one.name == BROKEN]
    if broken:
        return f"Nothing is decided: {broken[0]}."
    if decision.more_seconds is None:
        return (
            "An estimate lies on its limit, so that no length decides it: move the limit, or "
            "compare on a quieter machine."
        )
    whole = decision.seconds + decision.more_seconds
    return (
        f"It would need about {duration(decision.more_seconds)} more: "
        f"--max-duration {math.ceil(whole * 1.2 / 60)}m, or a quieter machine."
    )
