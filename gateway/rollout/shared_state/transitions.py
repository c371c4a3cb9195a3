"""The transitions of a rollout's state, as pure functions.

Each returns the next revision. A rollback is applied to the traffic before it is recorded, so that
no state says "rolled back" while a request may still reach the candidate. Everything else is
recorded before it is applied, so that no gateway is ahead of the state that the others see.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

from modelport.gateway.errors import AlreadyExists, InvalidArgument
from modelport.gateway.rollout.plan import RolloutPlan
from modelport.gateway.rollout.shared_state.state import (
    MAX_EVENTS,
    MAX_REASON,
    RecordedCriterion,
    RolloutEvent,
    RolloutEventKind,
    RolloutPhase,
    RolloutState,
)
from modelport.gateway.rollout.statistics.counts import StageCounts


class RolloutCommand(StrEnum):
    """The commands of a person."""

    PAUSE = "pause"
    RESUME = "resume"
    #: Go on with the next stage; after the last one, the candidate takes the baseline's place.
    PROMOTE = "promote"
    ROLLBACK = "rollback"


class Change(NamedTuple):
    """The time, reason and author of a transition; without an author it is automatic."""

    time: float
    reason: str = ""
    by: str = ""


def started(
    plan: RolloutPlan, before: RolloutState | None, leader: str, change: Change, seal: str = ""
) -> RolloutState:
    """The first revision of a rollout after ``before``, the last one of the model's previous.

    ``seal`` is that of a plan with webhooks.

    Raises:
        AlreadyExists: the previous one has not ended.
    """
    revision = 1
    if before is not None:
        if before.undoable:
            side = before.plan.candidate
            raise AlreadyExists(
                f"'{plan.model}' is served by version {side.version} of '{side.model}', which its "
                f"last rollout promoted, but its configuration is not: {before.unsettled_reason}; "
                "change the configuration and roll back first"
            )
        if before.phase.ended and not before.settled:
            raise AlreadyExists(
                f"the last rollout of '{plan.model}' is {before.phase}, which its configuration "
                "does not say yet; try again in a few seconds"
            )
        if before.needs_leader:
            raise AlreadyExists(
                f"a rollout of '{plan.model}' is {before.phase} already ({described(before)}); "
                "see `modelport rollout status`"
            )
        revision = before.revision + 1
    event = _event(RolloutEventKind.STARTED, 0, change)
    return RolloutState(revision, plan, leader, seal=seal, events=(event,))


def described(state: RolloutState) -> str:
    """The candidate and the stage of a rollout, for a person."""
    side, stages = state.plan.candidate, state.plan.stages
    stage = stages[state.stage]
    model = "" if side.model == state.plan.model else f" of '{side.model}'"
    return f"version {side.version}{model}, stage {state.stage + 1} of {len(stages)}: {stage}"


def led(state: RolloutState, leader: str, hold_reason: str | None = None) -> RolloutState:
    """``state`` with a ``leader``, which by that shows that it lives; empty: it has none.

    Args:
        hold_reason: None: as before.
    """
    reason = state.hold_reason if hold_reason is None else short(hold_reason)
    return replace(state, revision=state.revision + 1, leader=leader, hold_reason=reason)


def advanced(state: RolloutState, leader: str, change: Change) -> RolloutState:
    """The next stage, or the promotion of the candidate after the last."""
    if state.stage + 1 == len(state.plan.stages):
        return _next(state, leader, RolloutEventKind.PROMOTED, change)
    following = replace(state, stage=state.stage + 1, seconds=0.0, phase=RolloutPhase.RUNNING)
    return _next(following, leader, RolloutEventKind.ADVANCED, change)


def paused(state: RolloutState, leader: str, change: Change) -> RolloutState:
    """The stage continues, but without a decision to advance."""
    return _next(state, leader, RolloutEventKind.PAUSED, change)


def rolled_back(state: RolloutState, leader: str, change: Change) -> RolloutState:
    """The rollback: the candidate gets no further requests."""
    undone = replace(state, settled=False, unsettled_reason="")
    return _next(undone, leader, RolloutEventKind.ROLLED_BACK, change)


def settled(state: RolloutState, leader: str, unsettled_reason: str) -> RolloutState:
    """Nothing is left to do, but for an ``unsettled_reason``."""
    return replace(
        state,
        revision=state.revision + 1,
        leader=leader,
        settled=True,
        unsettled_reason=short(unsettled_reason),
    )


def commanded(
    state: RolloutState, command: RolloutCommand, leader: str, change: Change
) -> RolloutState:
    """``state`` after a person's ``command``.

    Raises:
        InvalidArgument: the command has no place in this phase.
    """
    phase = state.phase
    if phase.ended and not (command is RolloutCommand.ROLLBACK and state.undoable):
        raise InvalidArgument(f"the rollout of '{state.plan.model}' is {phase}; {_remedy(state)}")
    if command is RolloutCommand.ROLLBACK:
        return rolled_back(state, leader, change)
    if command is RolloutCommand.PROMOTE:
        return advanced(state, leader, change)
    wanted = RolloutPhase.RUNNING if command is RolloutCommand.PAUSE else RolloutPhase.PAUSED
    if phase is not wanted:
        raise InvalidArgument(f"the rollout of '{state.plan.model}' is {phase}, not {wanted}")
    if command is RolloutCommand.PAUSE:
        return paused(state, leader, change)
    if state.seconds >= state.plan.max_seconds:  # paused as undecided: its time begins again
        state = replace(state, seconds=0.0)
    return _next(state, leader, RolloutEventKind.RESUMED, change)


def _remedy(state: RolloutState) -> str:
    """The command that does what an ended rollout no longer can."""
    plan = state.plan
    if state.phase is RolloutPhase.ROLLED_BACK:
        return "it has ended; start another with `modelport rollout start`"
    label = f" --label {plan.label}" if plan.label else ""
    return (
        f"it has ended; to go back, `modelport rollout start {plan.model} --candidate "
        f"{plan.baseline.version} --steps 100%{label}`"
    )


def done(
    command: RolloutCommand, change: Change, before: RolloutState, state: RolloutState
) -> bool:
    """Whether a command that came in ``before`` needs nothing more in ``state``.

    ``change`` may be in it, and only the answer to its write was lost. Or the next stage has begun
    in the meantime, by itself or by another ``promote``: then none is skipped.
    """
    if any((each.time, each.reason, each.by) == change for each in state.events):
        return True
    stages = [(each.stage, each.phase is RolloutPhase.PROMOTED) for each in (before, state)]
    same = state.plan.id == before.plan.id and state.phase is not RolloutPhase.ROLLED_BACK
    return command is RolloutCommand.PROMOTE and same and stages[1] > stages[0]


def with_evidence(
    state: RolloutState, criteria: Iterable[dict[str, Any]], counts: Sequence[StageCounts]
) -> RolloutState:
    """``state`` of a rollout that has ended, with the evidence at its end."""
    evidence = tuple(RecordedCriterion(**each) for each in criteria)
    return replace(state, evidence=evidence, counts=tuple(each.to_json() for each in counts))


_PHASES = {
    RolloutEventKind.PAUSED: RolloutPhase.PAUSED,
    RolloutEventKind.RESUMED: RolloutPhase.RUNNING,
    RolloutEventKind.PROMOTED: RolloutPhase.PROMOTED,
    RolloutEventKind.ROLLED_BACK: RolloutPhase.ROLLED_BACK,
}


def _next(state: RolloutState, leader: str, kind: RolloutEventKind, change: Change) -> RolloutState:
    events = (*state.events, _event(kind, state.stage, change))
    if len(events) > MAX_EVENTS:  # the first, and the latest ones
        events = (events[0], *events[-MAX_EVENTS + 1 :])
    return replace(
        state,
        revision=state.revision + 1,
        leader=leader,
        phase=_PHASES.get(kind, state.phase),
        hold_reason="",
        events=events,
    )


def _event(kind: RolloutEventKind, stage: int, change: Change) -> RolloutEvent:
    return RolloutEvent(change.time, kind, stage, short(change.reason), short(change.by))


def short(text: str) -> str:
    """``text`` as one printable line of at most ``MAX_REASON`` characters."""
    line = "".join(each if each.isprintable() else " " for each in text)
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 3] + "..."
