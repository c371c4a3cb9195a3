"""A whole gate: integrity of the candidate, preflight, rounds with interim analyses, the
decision."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from modelport.gateway.errors import UsageError
from modelport.gateway.slo import Slo
from modelport.loadtests.checks import CheckStatus, worst
from modelport.loadtests.gate import integrity, object_storage
from modelport.loadtests.gate.baseline_and_candidate import Published, Running, Side, Stored
from modelport.loadtests.gate.criteria import PairedRound
from modelport.loadtests.gate.decision import (
    BROKEN,
    GateDecision,
    Looks,
    Question,
    more_seconds,
    timed,
)
from modelport.loadtests.gate.object_storage import NotAsPublished
from modelport.loadtests.gate.paired_rounds import Cores, OutOfTime, PairedMeasurement, SideFailed
from modelport.loadtests.gate.preflight import Preflight
from modelport.loadtests.load.samples import LoadRun
from modelport.loadtests.load.target import LoadTestProtocol
from modelport.loadtests.system.hardware import hardware

#: Messages reported per side.
MOST_ERRORS = 3
#: Part of the longest duration by which the last round may exceed it.
OVERTIME = 0.1


@dataclass(frozen=True)
class GateRequest:
    """The complete input of a gate."""

    baseline: Side | Stored
    candidate: Side | Stored
    slo: Slo
    protocol: LoadTestProtocol
    #: Recorded requests; None: random ones within the model's ranges.
    data: Path | None = None
    seed: int = 0
    command: str = ""


@dataclass(frozen=True)
class GateSnapshot:
    """The state of a gate after a round, for display."""

    seconds: float
    rounds: tuple[PairedRound, ...]
    #: The questions at the last look; empty before the first.
    questions: tuple[Question, ...]


def judge(
    asked: GateRequest,
    *,
    say: Callable[[str], None] = lambda text: None,
    watch: Callable[[GateSnapshot], None] = lambda watching: None,
) -> GateDecision:
    """Measure as long as necessary, and decide.

    Args:
        say: called with the current activity.
        watch: called with the state after every round.

    Raises:
        UsageError: something cannot be compared, so there is no verdict.
    """
    start = time.monotonic()
    decision = GateDecision(
        CheckStatus.PASS,
        (),
        asked.baseline.given,
        asked.candidate.given,
        confidence=asked.slo.verdict.confidence,
        began_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=asked.command,
        seed=asked.seed,
        hardware=hardware(),
    )
    with tempfile.TemporaryDirectory(prefix="modelport-gate-") as folder:
        work = Path(folder)
        say("baseline and candidate: files and certificate")
        try:
            baseline, candidate = _fetched(asked, work, start)
        except NotAsPublished as error:
            decision = _with(decision, (integrity.failed(str(error)),), start)
        except SideFailed as error:
            decision = _broken(decision, error, start)
        else:
            decision = _measured(
                dataclasses.replace(asked, baseline=baseline, candidate=candidate),
                PairedMeasurement(
                    (baseline, candidate),
                    asked.protocol,
                    asked.slo,
                    asked.seed,
                    work,
                    Cores.of_this_machine(),
                    say,
                    start + asked.slo.duration.max_seconds * (1 + OVERTIME),
                ),
                decision,
                start,
                watch,
            )
    return dataclasses.replace(decision, seconds=time.monotonic() - start)


def _measured(
    asked: GateRequest,
    pair: PairedMeasurement,
    decision: GateDecision,
    start: float,
    watch: Callable[[GateSnapshot], None],
) -> GateDecision:
    """Check the candidate's folder first, then both sides' answers, then measure."""
    if isinstance(asked.candidate, Published):
        decision = _with(
            decision, integrity.questions(asked.candidate, asked.slo.certificate), start
        )
    if decision.status is CheckStatus.FAIL:
        return decision
    try:
        found = Preflight(pair, asked.data).run()
    except (SideFailed, OSError) as error:
        return _broken(decision, error, start)
    decision = _with(
        dataclasses.replace(
            decision, agreement=found.agreement, notes=(*_notes(asked), *found.notes)
        ),
        (*decision.questions, *found.questions),
        start,
    )
    if decision.status is CheckStatus.FAIL:
        return decision
    return _rounds(asked, decision, pair, start, watch)


def _rounds(
    asked: GateRequest,
    decision: GateDecision,
    pair: PairedMeasurement,
    start: float,
    watch: Callable[[GateSnapshot], None],
) -> GateDecision:
    looks = Looks(asked.slo)
    rounds: list[PairedRound] = []
    runs: tuple[list[LoadRun], list[LoadRun]] = ([], [])
    most = asked.slo.duration.max_seconds
    first_round = time.monotonic()
    lost: SideFailed | OSError | None = None
    if time.monotonic() + pair.round_seconds > start + most:
        return _broken(decision, _too_little_time(pair), start)
    while True:
        try:
            one, made = pair.round(len(rounds))
        except (SideFailed, OSError) as error:
            if rounds and isinstance(error, OutOfTime):  # the earlier rounds decide what they can
                looks.at(rounds, 1.0)
            else:
                lost = error
            break
        rounds.append(one)
        for all_of_it, new in zip(runs, made, strict=True):
            all_of_it.extend(new)
        seconds = time.monotonic() - start
        each = (time.monotonic() - first_round) / len(rounds)
        last = seconds + each > most
        done = looks.at(rounds, 1.0 if last else min(seconds / most, 0.999))
        watch(GateSnapshot(seconds, tuple(rounds), looks.questions))
        if done:
            break
    questions = (*decision.questions, *looks.questions)
    decision = _with(
        dataclasses.replace(
            decision,
            baseline_runs=tuple(runs[0]),
            candidate_runs=tuple(runs[1]),
            rounds=len(rounds),
            more_seconds=more_seconds(questions, time.monotonic() - start),
            notes=(*decision.notes, *_noticed(runs)),
        ),
        questions,
        start,
    )
    return decision if lost is None else _broken(decision, lost, start)


def _too_little_time(pair: PairedMeasurement) -> SideFailed:
    return SideFailed(
        f"a round takes {pair.round_seconds:.0f} s, and {max(0.0, pair.left):.0f} s are left of "
        f"--max-duration {pair.slo.duration.max_seconds:g}s; increase it",
        is_candidate=False,
    )


def _fetched(asked: GateRequest, work: Path, start: float) -> tuple[Side, Side]:
    """Both sides as local versions or running servers.

    Raises:
        NotAsPublished: the candidate's files were changed.
        SideFailed: there was no time to fetch them.
    """
    try:
        baseline = object_storage.fetched(asked.baseline, work / "baseline", _left(asked, start))
    except NotAsPublished as error:
        raise UsageError(f"the baseline is not what was published: {error}") from error
    return baseline, object_storage.fetched(
        asked.candidate, work / "candidate", _left(asked, start)
    )


def _left(asked: GateRequest, start: float) -> float:
    """Seconds until the gate must end, with a small minimum for mandatory steps."""
    return max(1.0, asked.slo.duration.max_seconds - (time.monotonic() - start))


def _with(decision: GateDecision, questions: tuple[Question, ...], start: float) -> GateDecision:
    status = worst(question.check for question in questions)
    told = timed(questions, time.monotonic() - start)
    return dataclasses.replace(decision, status=status, questions=told)


def _broken(decision: GateDecision, lost: SideFailed | OSError, start: float) -> GateDecision:
    """The decision after a failure: a candidate that cannot be measured fails.

    Without a baseline, or after a failure of this machine such as a full disk, nothing is decided.
    """
    by_candidate = isinstance(lost, SideFailed) and lost.is_candidate
    status = CheckStatus.FAIL if by_candidate else CheckStatus.INCONCLUSIVE
    detail = str(lost) if isinstance(lost, SideFailed) else f"this machine cannot continue: {lost}"
    name = lost.name if isinstance(lost, SideFailed) else BROKEN
    question = Question(name, "", status, detail=detail, longer=float("inf"))
    return dataclasses.replace(
        _with(decision, (*decision.questions, question), start), more_seconds=None
    )


def _notes(asked: GateRequest) -> tuple[str, ...]:
    notes = []
    if not asked.slo.said:
        notes.append("The SLO file sets no limits: every limit is the default.")
    if asked.slo.load.has_single_user:
        notes.append(
            "One user sent requests to both sides in turn: the throughput of each is about half of "
            "what it would be with a user of its own."
        )
    kinds = {isinstance(side, Running) for side in (asked.baseline, asked.candidate)}
    if kinds == {True, False}:
        notes.append(
            "One side was started here and the other runs elsewhere: a difference may come from "
            "the machines."
        )
    return tuple(notes)


def _noticed(runs: tuple[list[LoadRun], list[LoadRun]]) -> list[str]:
    """The most frequent errors, and any problem with the measurement itself."""
    notes = []
    for name, made in zip(("baseline", "candidate"), runs, strict=True):
        errors: Counter[str] = Counter()
        for run in made:
            errors.update(run.errors)
        notes += [
            f"The {name} failed {count} times: {message}"
            for message, count in errors.most_common(MOST_ERRORS)
        ]
    saturated = sum(run.saturated for made in runs for run in made)
    if saturated:
        notes.append(
            f"In {saturated} slices of load the load generator was at its limit and affects the "
            "figures; use fewer users, or a lower rate."
        )
    return notes


def check(asked: GateRequest) -> None:
    """Find errors in the request before anything starts.

    Raises:
        UsageError: these sides cannot answer a criterion, or a round is longer than the gate.
    """
    duration = asked.slo.duration
    shortest = 2 * duration.slices * duration.slice_seconds
    if shortest > duration.max_seconds:
        raise UsageError(
            f"one round is {shortest:g} s of load (2 x duration.slices x duration.slice_seconds), "
            f"but duration.max_seconds is {duration.max_seconds:g} s; increase it, or use shorter "
            "slices"
        )
    if asked.slo.wants_labels and asked.data is None:
        raise UsageError("max_drop needs rows with their labels; give them with --data FILE.npz")
    started = not any(isinstance(one, Running) for one in (asked.baseline, asked.candidate))
    for key in (
        "limits.first_response_seconds",
        "limits.cold_start_seconds",
        "regressions.max_first_response_regression",
        "regressions.max_cold_start_regression",
    ):
        section, _, name = key.partition(".")
        value = getattr(getattr(asked.slo, section), name)
        if key in asked.slo.said and value is not None and not started:
            raise UsageError(
                f"{key} is set, but a running server cannot be timed from its start; "
                "give published versions, or omit it"
            )
