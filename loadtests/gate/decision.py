"""The decision of the gate: a pure function of the measurements.

Every criterion compares one confidence interval with one limit. It **fails** if the whole interval
lies beyond the limit, **passes** if all of it lies within, and is **inconclusive** otherwise. The
candidate fails with one failed criterion, and passes if all pass. With a confidence of 0.95:

- A candidate that keeps every limit fails in at most 5 % of gates. The error is divided among the
  criteria (Bonferroni), because each is an occasion to fail by chance; shares of errors get little
  of it, because they lie far within or far beyond their limit.
- A candidate that breaks a limit passes in at most 5 %. Nothing is divided here, because it must
  pass all criteria (an intersection-union test, Berger 1982).

Both errors are also spent over the interim analyses (``loadtests.gate.alpha_spending``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from modelport.gateway.slo import Slo
from modelport.loadtests import confidence_intervals
from modelport.loadtests.checks import Check, CheckStatus, worst
from modelport.loadtests.confidence_intervals import Interval, Tails, TooFewSamples
from modelport.loadtests.gate.agreement import AnswerAgreement
from modelport.loadtests.gate.alpha_spending import level
from modelport.loadtests.gate.criteria import Criterion, PairedRound, SideMeasurements
from modelport.loadtests.gate.criteria import criteria as criteria_of
from modelport.loadtests.load.samples import LoadRun
from modelport.loadtests.number_format import change as as_change
from modelport.loadtests.number_format import duration, with_unit

#: Times of the looks, as fractions of the longest duration. The first two catch gross failures.
LOOKS = (0.05, 0.2, 0.4, 0.6, 0.8, 1.0)
#: Part of the error of failing that all shares get together.
SHARES_PART = 0.1
#: Requests that must all be right if the limit is zero.
FLAWLESS_REQUESTS = 1000
#: Name of the question whether measuring was possible at all.
BROKEN = "measurement"
#: Factor of the duration from which "longer" is no useful advice.
HOPELESS = 100.0


@dataclass(frozen=True)
class Question:
    """One criterion with its answer.

    If ``relative``, then ``change``, ``low``, ``high`` and ``allowed`` are candidate / baseline;
    otherwise they are the candidate's own, in ``unit``.
    """

    name: str
    unit: str
    status: CheckStatus
    baseline: float | None = None
    candidate: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    allowed: float | None = None
    detail: str = ""
    relative: bool = False
    #: Factor of the rounds so far that would decide it; 1 if it is decided.
    longer: float = 1.0
    #: Its part of the gate's time.
    seconds: float = 0.0

    @property
    def check(self) -> Check:
        """The same as a check for people."""
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
class GateDecision:
    """The gate's decision, and its grounds."""

    status: CheckStatus
    questions: tuple[Question, ...]
    baseline: str
    candidate: str
    baseline_runs: tuple[LoadRun, ...] = ()
    candidate_runs: tuple[LoadRun, ...] = ()
    rounds: int = 0
    confidence: float = 0.95
    seconds: float = 0.0
    #: Further seconds that an inconclusive gate would need; None if no duration decides it.
    more_seconds: float | None = None
    #: ISO 8601, UTC.
    began_at: str = ""
    command: str = ""
    seed: int = 0
    hardware: Mapping[str, str] = field(default_factory=dict)
    #: Differences of the answers, for a retrained candidate or with known labels.
    agreement: AnswerAgreement | None = None
    notes: tuple[str, ...] = ()

    @property
    def checks(self) -> tuple[Check, ...]:
        return tuple(question.check for question in self.questions)


def timed(questions: Sequence[Question], seconds: float) -> tuple[Question, ...]:
    """Give new questions their part of the time since the previous ones."""
    new = sum(not one.seconds for one in questions)
    rest = max(0.0, seconds - sum(one.seconds for one in questions))
    return tuple(one if one.seconds else replace(one, seconds=rest / new) for one in questions)


def decide(
    rounds: Sequence[PairedRound], slo: Slo, looks: tuple[float, ...] = (1.0,)
) -> tuple[Question, ...]:
    """Every criterion's verdict at the last of ``looks``, fractions of the longest duration."""
    criteria = criteria_of(rounds, slo)
    error = 1 - slo.verdict.confidence
    above = level(error, looks)
    return tuple(
        _answer(criterion, rounds, slo, Tails(level(part * error, looks), above))
        for criterion, part in zip(criteria, _parts(criteria), strict=True)
    )


def _parts(criteria: Sequence[Criterion]) -> list[float]:
    """The part of the error of failing that each criterion gets."""
    shares = sum(one.is_share for one in criteria)
    others = len(criteria) - shares
    of_shares = (SHARES_PART if others else 1.0) if shares else 0.0
    return [of_shares / shares if one.is_share else (1 - of_shares) / others for one in criteria]


def more_seconds(questions: Sequence[Question], seconds: float) -> float | None:
    """Expected seconds beyond ``seconds`` until all open questions are decided."""
    longest = max((question.longer for question in questions), default=1.0)
    return None if longest > HOPELESS else seconds * (longest - 1)


def _answer(
    criterion: Criterion, rounds: Sequence[PairedRound], slo: Slo, tails: Tails
) -> Question:
    baseline, candidate = [r.baseline for r in rounds], [r.candidate for r in rounds]
    undecided = Question(
        criterion.name,
        criterion.unit,
        CheckStatus.INCONCLUSIVE,
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
    if status is not CheckStatus.INCONCLUSIVE and missing > 0 and not criterion.is_share:
        status, longer = CheckStatus.INCONCLUSIVE, slo.duration.min_rounds / len(rounds)
        detail = f"undecided: {missing} more rounds are required"
    elif status is CheckStatus.INCONCLUSIVE:
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
    interval: Interval, criterion: Criterion, candidate: Sequence[SideMeasurements]
) -> tuple[CheckStatus, float]:
    """Compare an interval with its limit; return the verdict, and the data it would need."""
    allowed = criterion.allowed
    if interval.lower > allowed:
        return CheckStatus.FAIL, 1.0
    if interval.upper <= allowed:
        return CheckStatus.PASS, 1.0
    if criterion.is_share and interval.estimate == 0:
        # Without a single failure the bound falls as one over the number, not over its root.
        if allowed > 0:
            return CheckStatus.INCONCLUSIVE, interval.upper / allowed
        asked = sum(half.asked for half in candidate)
        longer = FLAWLESS_REQUESTS / asked
        return (CheckStatus.PASS, 1.0) if longer <= 1 else (CheckStatus.INCONCLUSIVE, longer)
    return CheckStatus.INCONCLUSIVE, confidence_intervals.rounds_needed(interval, allowed)


def _why(longer: float) -> str:
    if longer > HOPELESS:
        return "undecided: the estimate equals the limit, so no duration decides it"
    return f"undecided: about {longer:.1f} times the duration would decide it"


def longer_text(decision: GateDecision) -> str:
    """Advice after an inconclusive gate, in one sentence."""
    broken = [one.detail for one in decision.questions if one.name == BROKEN]
    if broken:
        return f"The gate is inconclusive: {broken[0]}."
    if decision.more_seconds is None:
        return (
            "An estimate equals its limit, so no duration decides it: change the limit, or "
            "compare on a quieter machine."
        )
    whole = decision.seconds + decision.more_seconds
    return (
        f"It needs about {duration(decision.more_seconds)} more: "
        f"--max-duration {math.ceil(whole * 1.2 / 60)}m, or a quieter machine."
    )


class Looks:
    """The interim analyses of one gate: it looks at its growing data, and may stop.

    Their times, as fractions of the longest duration, are fixed before measuring; ``decide``
    accounts for the chance to stop at each of them.
    """

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        #: The looks taken so far, as fractions of the longest duration.
        self._taken: tuple[float, ...] = ()
        self.questions: tuple[Question, ...] = ()
        self.status = CheckStatus.INCONCLUSIVE

    def at(self, rounds: Sequence[PairedRound], fraction: float) -> bool:
        """Look if a look is due; return whether the gate may stop.

        Args:
            fraction: the elapsed fraction of the longest duration; 1: no further round fits.
        """
        last = self._taken[-1] if self._taken else 0.0
        due = [look for look in LOOKS if last < look <= fraction + 1e-9]
        if not due:
            return False
        self._taken += (max(due),)
        self.questions = decide(rounds, self._slo, self._taken)
        self.status = worst(question.check for question in self.questions)
        return self.status is not CheckStatus.INCONCLUSIVE or self._taken[-1] >= 1.0
