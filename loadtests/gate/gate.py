"""A whole gate: what folders prove, a rehearsal, rounds with looks between them, the decision."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from modelport.gateway.cli.errors import UsageError
from modelport.loadtests.gate import integrity, stored
from modelport.loadtests.gate.criteria import Round
from modelport.loadtests.gate.decision import BROKEN, Decision, Question, more_seconds, timed
from modelport.loadtests.gate.interim_analysis import Looks
from modelport.loadtests.gate.paired_rounds import Cores, Duel, Lost, OutOfTime
from modelport.loadtests.gate.rehearsal import Rehearsal
from modelport.loadtests.gate.sides import Published, Running, Side, Stored
from modelport.loadtests.gate.slo import Slo
from modelport.loadtests.gate.stored import NotAsPublished
from modelport.loadtests.hardware import hardware
from modelport.loadtests.report.checks import Status, worst
from modelport.loadtests.samples import Run
from modelport.loadtests.target import Protocol

#: Messages told of either side.
MOST_ERRORS = 3
#: No round begins that is not expected to be over by the longest duration; so much later all ends.
OVERTIME = 0.1


@dataclass(frozen=True)
class Asked:
    """The whole question."""

    baseline: Side | Stored
    candidate: Side | Stored
    slo: Slo
    protocol: Protocol
    #: Recorded requests; None: drawn from the model's ranges.
    data: Path | None = None
    seed: int = 0
    command: str = ""


@dataclass(frozen=True)
class Watching:
    """What a spectator sees after every round."""

    seconds: float
    rounds: tuple[Round, ...]
    #: Of the last look; empty before the first.
    questions: tuple[Question, ...]


def judge(
    asked: Asked,
    *,
    say: Callable[[str], None] = lambda text: None,
    watch: Callable[[Watching], None] = lambda watching: None,
) -> Decision:
    """Measure as long as it takes, and decide.

    Args:
        say: told what is being done.
        watch: told what has been found so far.

    Raises:
        UsageError: something cannot be compared, so that there is no verdict.
    """
    start = time.monotonic()
    decision = Decision(
        Status.PASS,
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
        except Lost as error:
            decision = _broken(decision, error, start)
        else:
            decision = _measured(
                dataclasses.replace(asked, baseline=baseline, candidate=candidate),
                Duel(
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
    asked: Asked,
    duel: Duel,
    decision: Decision,
    start: float,
    watch: Callable[[Watching], None],
) -> Decision:
    """First what the candidate's folder proves, then what both answer."""
    if isinstance(asked.candidate, Published):
        decision = _with(
            decision, integrity.questions(asked.candidate, asked.slo.certificate), start
        )
    if decision.status is Status.FAIL:
        return decision
    try:
        found = Rehearsal(duel, asked.data).run()
    except (Lost, OSError) as error:
        return _broken(decision, error, start)
    decision = _with(
        dataclasses.replace(
            decision, agreement=found.agreement, notes=(*_notes(asked), *found.notes)
        ),
        (*decision.questions, *found.questions),
        start,
    )
    if decision.status is Status.FAIL:
        return decision
    return _rounds(asked, decision, duel, start, watch)


def _rounds(
    asked: Asked,
    decision: Decision,
    duel: Duel,
    start: float,
    watch: Callable[[Watching], None],
) -> Decision:
    looks = Looks(asked.slo)
    rounds: list[Round] = []
    runs: tuple[list[Run], list[Run]] = ([], [])
    most = asked.slo.duration.max_seconds
    first_round = time.monotonic()
    lost: Lost | OSError | None = None
    if time.monotonic() + duel.round_seconds > start + most:
        return _broken(decision, _no_room(duel), start)
    while True:
        try:
            one, made = duel.round(len(rounds))
        except (Lost, OSError) as error:
            if rounds and isinstance(error, OutOfTime):  # those before decide what they can
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
        watch(Watching(seconds, tuple(rounds), looks.questions))
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


def _no_room(duel: Duel) -> Lost:
    return Lost(
        f"a round takes {duel.round_seconds:.0f} s, and {max(0.0, duel.left):.0f} s are left of "
        f"--max-duration {duel.slo.duration.max_seconds:g}s; give it longer",
        is_candidate=False,
    )


def _fetched(asked: Asked, work: Path, start: float) -> tuple[Side, Side]:
    """Both sides, here.

    Raises:
        NotAsPublished: the candidate's files.
        Lost: there was no time for it.
    """
    try:
        baseline = stored.fetched(asked.baseline, work / "baseline", _left(asked, start))
    except NotAsPublished as error:
        raise UsageError(f"the baseline is not what was published: {error}") from error
    return baseline, stored.fetched(asked.candidate, work / "candidate", _left(asked, start))


def _left(asked: Asked, start: float) -> float:
    """Seconds until the gate must be over, a little at least for what has to be tried."""
    return max(1.0, asked.slo.duration.max_seconds - (time.monotonic() - start))


def _with(decision: Decision, questions: tuple[Question, ...], start: float) -> Decision:
    status = worst(question.check for question in questions)
    told = timed(questions, time.monotonic() - start)
    return dataclasses.replace(decision, status=status, questions=told)


def _broken(decision: Decision, lost: Lost | OSError, start: float) -> Decision:
    """A candidate that cannot be measured fails; without a baseline nothing is known.

    Nor where this machine itself gives up: a full disk is nobody's latency.
    """
    by_candidate = isinstance(lost, Lost) and lost.is_candidate
    status = Status.FAIL if by_candidate else Status.INCONCLUSIVE
    detail = str(lost) if isinstance(lost, Lost) else f"this machine cannot go on: {lost}"
    name = lost.name if isinstance(lost, Lost) else BROKEN
    question = Question(name, "", status, detail=detail, longer=float("inf"))
    return dataclasses.replace(
        _with(decision, (*decision.questions, question), start), more_seconds=None
    )


def _notes(asked: Asked) -> tuple[str, ...]:
    notes = []
    if not asked.slo.said:
        notes.append("The SLO file sets nothing: every limit is the default.")
    if asked.slo.load.is_lone:
        notes.append(
            "One user asked both sides in turn: each side's answers a second are about half of "
            "what it gives to a user of its own."
        )
    kinds = {isinstance(side, Running) for side in (asked.baseline, asked.candidate)}
    if kinds == {True, False}:
        notes.append(
            "One side was started here and the other runs elsewhere: a difference may be the "
            "machines'."
        )
    return tuple(notes)


def _noticed(runs: tuple[list[Run], list[Run]]) -> list[str]:
    """What went wrong most often, and what spoils the measurement itself."""
    notes = []
    for name, made in zip(("baseline", "candidate"), runs, strict=True):
        errors: Counter[str] = Counter()
        for run in made:
            errors.update(run.errors)
        notes += [
            f"The {name} said {count} times: {message}"
            for message, count in errors.most_common(MOST_ERRORS)
        ]
    saturated = sum(run.saturated for made in runs for run in made)
    if saturated:
        notes.append(
            f"In {saturated} slices of load the generator was busy all the time: what it measured "
            "is partly its own; fewer users, or a lower rate, measure the servers."
        )
    return notes


def check(asked: Asked) -> None:
    """What can be known to be wrong before anything starts.

    Raises:
        UsageError: a criterion that these sides cannot answer; a round longer than the gate.
    """
    duration = asked.slo.duration
    shortest = 2 * duration.slices * duration.slice_seconds
    if shortest > duration.max_seconds:
        raise UsageError(
            f"one round is {shortest:g} s of load (2 x duration.slices x duration.slice_seconds), "
            f"and the longest duration {duration.max_seconds:g} s; give longer, or shorter slices"
        )
    if asked.slo.wants_labels and asked.data is None:
        raise UsageError("max_drop is set; give rows with their labels: --data FILE.npz")
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
                f"{key} is set, and a server that runs already cannot be timed from its start; "
                "give published versions, or leave it out"
            )
