"""One serving process in the rollouts of its gateway."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from modelport.gateway.errors import Unavailable
from modelport.gateway.rollout.plan import RolloutPlan, StageKind
from modelport.gateway.rollout.process_group import ProcessGroup, ThisProcess
from modelport.gateway.rollout.shared_state import transitions
from modelport.gateway.rollout.shared_state.state import RolloutRouting
from modelport.gateway.rollout.shared_state.transitions import Change
from modelport.gateway.rollout.traffic.participant import RolloutParticipant
from tests.gateway.models.managers import refresh
from tests.gateway.rollout.sides import PLAN, Sides, sides, times

RUNNING, REFUSED = (replace(PLAN, id=digit * 32) for digit in "12")
NOW = Change(1e9)


async def processes(folder: Path) -> tuple[Sides, ProcessGroup]:
    found = await sides(folder, times(3))
    return found, ProcessGroup(ThisProcess(RolloutParticipant(found.manager, found.rollouts)), [])


def to_the_candidate(plan: RolloutPlan) -> RolloutRouting:
    return RolloutRouting(plan, 0, StageKind.CANARY, 1.0, 1)


async def test_a_start_that_fails_leaves_the_rollout_of_another_gateway_alone(
    tmp_path: Path,
) -> None:
    """The other one was faster, while this gateway loaded the versions of its own plan."""
    found, group = await processes(tmp_path)
    await group.hold(REFUSED)
    await group.apply(to_the_candidate(RUNNING))
    await group.release(REFUSED)
    assert (await found.ask()).model_version == 2
    assert found.manager.held.of("m").versions == (1, 2)
    await group.release(RUNNING)  # its client has left
    assert (await found.ask()).model_version == 2
    assert found.manager.held.of("m").versions == (1, 2)


async def test_no_rollout_starts_while_the_gateway_loads_its_models(tmp_path: Path) -> None:
    """The candidate was not held yet, and reported as an unknown version."""
    found, group = await processes(tmp_path)
    found.manager.started = False
    with pytest.raises(Unavailable, match="is still loading its models"):
        await group.hold(RUNNING)
    assert found.manager.held.names() == []


async def test_a_routing_that_is_older_than_the_last_is_ignored(tmp_path: Path) -> None:
    found, group = await processes(tmp_path)
    await group.apply(to_the_candidate(RUNNING))
    await group.apply(to_the_candidate(RUNNING)._replace(share=0.0, revision=5))
    await group.apply(to_the_candidate(RUNNING)._replace(revision=4))
    assert (await found.ask()).model_version == 1


async def test_kept_requests_are_those_of_the_latest_rollout_that_has_begun(tmp_path: Path) -> None:
    found, group = await processes(tmp_path)
    await group.apply(to_the_candidate(RUNNING))
    found.rollouts.splits["m"].examples.append({"stage": 0})
    began = transitions.started(RUNNING, None, "", NOW)
    await group.remove(transitions.rolled_back(began, "", NOW))
    await group.hold(REFUSED)
    await group.release(REFUSED)
    assert await group.examples("m") == [{"stage": 0}]
    await group.apply(to_the_candidate(replace(PLAN, id="3" * 32)))
    assert await group.examples("m") == []


@pytest.mark.parametrize("polls", [True, False])
async def test_a_side_whose_files_vanish_is_named_and_answers(tmp_path: Path, polls: bool) -> None:
    found, group = await processes(tmp_path)
    await group.apply(to_the_candidate(RUNNING))
    for side in (RUNNING.candidate, RUNNING.baseline):
        assert await group.side_problem(side) == ""
        shutil.rmtree(tmp_path / "m" / str(side.version))
        if polls:
            await refresh(found.manager)
        told = f"model 'm' no longer has version {side.version}"
        assert await group.side_problem(side) == told
    assert (await found.ask()).model_version == 2
