"""Tests of the transitions of a rollout's state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelport.gateway.errors import AlreadyExists, InvalidArgument
from modelport.gateway.rollout.plan import StageKind
from modelport.gateway.rollout.shared_state import transitions
from modelport.gateway.rollout.shared_state.state import (
    MAX_EVENTS,
    MAX_REASON,
    RolloutPhase,
    RolloutRouting,
    RolloutState,
    routing_of,
)
from modelport.gateway.rollout.shared_state.transitions import Change, RolloutCommand
from tests.gateway.rollout.plans import plan

ME, OTHER = "a" * 32, "b" * 32
NOW = Change(2e9, "a reason", "ana")


def started(**fields: object) -> RolloutState:
    wanted = plan(shadow=0.1, steps=(0.5, 1.0))
    return replace(transitions.started(wanted, None, ME, Change(1e9)), **fields)  # type: ignore[arg-type]


def ended(phase: RolloutPhase, unsettled_reason: str = "") -> RolloutState:
    return started(phase=phase, settled=True, unsettled_reason=unsettled_reason, stage=2)


def routed(state: RolloutState, stopped: bool = False, doubtful: bool = False) -> float | None:
    found = routing_of(state, stopped=stopped, doubtful=doubtful, until=5.0)
    return None if found is None else found.share


def test_a_rollout_goes_through_its_stages_and_is_promoted() -> None:
    state, seen = started(seconds=100.0), []
    while not state.phase.ended:
        seen.append((state.plan.stages[state.stage].kind, routed(state)))
        state = transitions.advanced(state, OTHER, NOW)
        assert state.leader == OTHER
        assert state.phase.ended or state.seconds == 0
    assert seen == [(StageKind.SHADOW, 0.1), (StageKind.CANARY, 0.5), (StageKind.CANARY, 1.0)]
    assert state.phase is RolloutPhase.PROMOTED
    assert state.revision == 4
    assert [(each.time, each.stage) for each in state.events] == [
        (1e9, 0), (2e9, 1), (2e9, 2), (2e9, 2),
    ]  # fmt: skip
    assert state.stages[-1] == {"kind": "canary", "share": 1.0, "began": 2e9, "ended": 2e9}


@pytest.mark.parametrize(
    ("phase", "allowed"),
    [
        (RolloutPhase.RUNNING, {"pause", "promote", "rollback"}),
        (RolloutPhase.PAUSED, {"resume", "promote", "rollback"}),
        (RolloutPhase.PROMOTED, set()),
        (RolloutPhase.ROLLED_BACK, set()),
    ],
)
def test_each_phase_has_its_commands(phase: RolloutPhase, allowed: set[str]) -> None:
    before = started(phase=phase)
    for command in RolloutCommand:
        if command in allowed:
            after = transitions.commanded(before, command, ME, NOW)
            assert transitions.done(command, NOW, before, after)
        else:
            with pytest.raises(InvalidArgument, match=f"is {phase}"):
                transitions.commanded(before, command, ME, NOW)


@pytest.mark.parametrize(
    ("label", "remedy"), [("", "--steps 100%`"), ("stable", "--steps 100% --label stable`")]
)
def test_a_command_after_the_end_names_the_remedy(label: str, remedy: str) -> None:
    promoted = replace(ended(RolloutPhase.PROMOTED), plan=plan(label=label))
    with pytest.raises(InvalidArgument) as raised:
        transitions.commanded(promoted, RolloutCommand.ROLLBACK, ME, NOW)
    start = "`modelport rollout start fraud --candidate 2"
    assert f"is promoted; it has ended; to go back, {start} {remedy}" in str(raised.value)
    with pytest.raises(InvalidArgument, match="it has ended; start another with"):
        transitions.commanded(ended(RolloutPhase.ROLLED_BACK), RolloutCommand.RESUME, ME, NOW)


def test_a_pause_keeps_the_share_and_the_time() -> None:
    state = transitions.commanded(started(seconds=7.0), RolloutCommand.PAUSE, ME, NOW)
    assert routed(state) == 0.1
    assert transitions.commanded(state, RolloutCommand.RESUME, ME, NOW).seconds == 7.0


def test_a_new_rollout_follows_a_settled_one() -> None:
    for phase in (RolloutPhase.PROMOTED, RolloutPhase.ROLLED_BACK):
        before = ended(phase)
        after = transitions.started(plan(), before, OTHER, NOW)
        assert (after.revision, after.phase) == (before.revision + 1, RolloutPhase.RUNNING)
    for running in (started(), started(phase=RolloutPhase.PAUSED)):
        with pytest.raises(AlreadyExists, match="already"):
            transitions.started(plan(), running, OTHER, NOW)
    with pytest.raises(AlreadyExists, match="is promoted, which its configuration does not say"):
        transitions.started(plan(), started(phase=RolloutPhase.PROMOTED), OTHER, NOW)
    with pytest.raises(AlreadyExists, match="read-only"):
        transitions.started(plan(), ended(RolloutPhase.PROMOTED, "read-only"), OTHER, NOW)


def test_only_a_promotion_that_the_configuration_lacks_can_be_undone() -> None:
    undoable = ended(RolloutPhase.PROMOTED, "read-only")
    after = transitions.commanded(undoable, RolloutCommand.ROLLBACK, ME, NOW)
    assert (after.phase, after.settled) == (RolloutPhase.ROLLED_BACK, False)


def test_the_routing_follows_from_the_state() -> None:
    assert routed(started()) == 0.1
    assert routed(started(), stopped=True) == 0
    assert routed(started(), doubtful=True) == 0
    assert routed(started(phase=RolloutPhase.ROLLED_BACK)) == 0
    assert routed(ended(RolloutPhase.ROLLED_BACK)) is None
    assert routed(ended(RolloutPhase.PROMOTED)) is None
    for promoted in (
        started(phase=RolloutPhase.PROMOTED),
        ended(RolloutPhase.PROMOTED, "read-only"),
    ):
        assert routed(promoted, doubtful=True) == 1
        assert routed(promoted, stopped=True) == 0


def test_a_routing_for_good_is_another_than_one_that_ends() -> None:
    state = started()
    one = RolloutRouting(state.plan, 2, StageKind.CANARY, 1.0, 1, 5.0)
    assert one.same(one._replace(until=6.0, revision=2))
    assert not one.same(one._replace(until=float("inf")))
    assert not one.same(one._replace(share=0.5))
    assert not one.same(None)
    assert one.to_json()["until"] == 5.0
    assert one._replace(until=float("inf")).to_json()["until"] is None


def test_events_and_reasons_are_bounded() -> None:
    state = started()
    for number in range(MAX_EVENTS):
        command = RolloutCommand.RESUME if number % 2 else RolloutCommand.PAUSE
        state = transitions.commanded(state, command, ME, Change(2e9, "x\ny" * MAX_REASON))
    assert len(state.events) == MAX_EVENTS
    assert state.events[0].kind == "started"
    assert len(state.events[-1].reason) == MAX_REASON
    assert state.events[-1].reason.isprintable()
