"""Versions that a rollout holds: served whatever the policy says, in every control mode."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from modelport.gateway.errors import InvalidArgument, NotFound, Unavailable
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import VersionSettings
from modelport.gateway.models.next_action import (
    LoadVersion,
    UnloadVersion,
    VersionHold,
    VersionSnapshot,
    next_action,
)
from modelport.gateway.repository.version_choice import VersionChoice
from modelport.gateway.repository.version_policy import VersionPolicy
from modelport.gateway.settings import ModelControlMode
from tests.gateway.models.managers import World, refresh
from tests.gateway.models.test_model_control import label, specific
from tests.polling import until

HOLD = VersionHold((1, 2), 1)
MODES = list(ModelControlMode)
ONLY_1 = "version_policy { specific { versions: 1 } }"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def default(manager: ModelManager) -> int:
    return manager.get("m").number


async def held(world: World, mode: ModelControlMode, config: str = "") -> ModelManager:
    """Version 1 is served, then version 2 is published and held with it."""
    world.publish(1, config=config)
    manager = await world.serve(mode)
    world.publish(2, config=config)
    await manager.held.hold("m", HOLD)
    return manager


# -- the policy -----------------------------------------------------------------------------------


def test_held_versions_are_wanted_besides_the_newest_and_the_first_one_loads_first() -> None:
    available = {1: "a", 2: "b", 3: "c"}
    snapshot = VersionSnapshot(VersionPolicy(), available, held=(1, 2))
    served: dict[int, str] = {}
    loaded = []
    while action := next_action(snapshot._replace(serving=served)):
        assert isinstance(action, LoadVersion)
        loaded.append(action.version)
        served[action.version] = available[action.version]
    assert loaded == [1, 2, 3]
    assert next_action(snapshot._replace(serving=served, held=())) == UnloadVersion(1)


def test_a_held_version_whose_files_vanish_stays_served() -> None:
    snapshot = VersionSnapshot(VersionPolicy(), {2: "b"}, {1: "a", 2: "b"}, held=(1, 2))
    assert next_action(snapshot) is None
    assert next_action(snapshot._replace(held=())) == UnloadVersion(1)


# -- hold -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_held_candidate_is_served_and_the_default_stays(
    world: World, mode: ModelControlMode
) -> None:
    manager = await held(world, mode)
    assert (manager.versions("m"), default(manager)) == ([1, 2], 1)
    await refresh(manager)  # the policy, "the newest", changes nothing
    assert (manager.versions("m"), default(manager)) == ([1, 2], 1)
    assert world.events == [("load", 1), ("load", 2)]
    await manager.stop()


async def test_a_version_published_during_a_rollout_does_not_become_the_default(
    world: World,
) -> None:
    manager = await held(world, ModelControlMode.POLL)
    world.publish(3)
    await refresh(manager)
    await refresh(manager)  # settled
    assert (manager.versions("m"), default(manager)) == ([1, 2, 3], 1)
    await manager.stop()


async def test_a_candidate_that_does_not_load_changes_nothing(world: World) -> None:
    world.errors[2] = InvalidArgument("broken")
    with pytest.raises(InvalidArgument, match=r"^version 2 of model 'm' cannot be served: broken$"):
        await held(world, ModelControlMode.NONE)


async def test_a_hold_that_cannot_be_kept_is_released_without_a_trace(world: World) -> None:
    world.publish(2)
    manager = await world.serve(ModelControlMode.NONE)
    world.publish(1, 3)
    world.errors[3] = InvalidArgument("broken")
    with pytest.raises(InvalidArgument, match="broken"):
        await manager.held.hold("m", VersionHold((1, 3), 1))
    await manager.held.release("m")
    assert (manager.versions("m"), default(manager)) == ([2], 2)
    await manager.stop()


async def test_a_candidate_that_failed_before_is_loaded_again(world: World) -> None:
    world.publish(1)
    manager = await world.serve(ModelControlMode.NONE)
    world.publish(2)
    world.errors[2] = [Unavailable("full")]
    with pytest.raises(Unavailable, match="full"):
        await manager.held.hold("m", HOLD)
    assert (manager.versions("m"), default(manager)) == ([1], 1)
    await manager.held.hold("m", HOLD)
    assert manager.versions("m") == [1, 2]
    await manager.stop()


async def test_a_version_that_is_not_there_is_named(world: World) -> None:
    world.publish(1)
    manager = await world.serve(ModelControlMode.NONE)
    with pytest.raises(NotFound, match=r"model 'm' has no version 2; it has 1$"):
        await manager.held.hold("m", HOLD)
    with pytest.raises(NotFound, match="nobody"):
        await manager.held.hold("nobody", HOLD)
    await manager.stop()


@pytest.mark.parametrize("mode", MODES)
async def test_a_hold_that_was_known_before_the_start_keeps_the_default(
    world: World, mode: ModelControlMode
) -> None:
    """After a restart in the middle, version 2 never answers alone, not even while 1 loads."""
    world.publish(1, 2)
    manager = ModelManager(world.settings(mode), world.find, find_versions=world.find_versions)
    manager.held.expect("m", HOLD)
    await manager.start()
    assert (manager.versions("m"), default(manager)) == ([1, 2], 1)
    assert world.events == [("load", 1), ("load", 2)]
    await manager.stop()


async def test_the_candidate_answers_if_the_baseline_cannot(world: World) -> None:
    world.publish(1, 2)
    world.errors[1] = InvalidArgument("broken")
    manager = ModelManager(
        world.settings(ModelControlMode.NONE), world.find, find_versions=world.find_versions
    )
    manager.held.expect("m", HOLD)
    await manager.start()
    assert (manager.versions("m"), default(manager)) == ([2], 2)
    await manager.stop()


async def test_the_default_stays_while_its_successor_in_a_rollout_loads(world: World) -> None:
    """The newest version serves, and its predecessor becomes the baseline."""
    world.publish(1, 2)
    manager = await world.serve(ModelControlMode.NONE)
    world.gate.clear()
    task = asyncio.create_task(manager.held.hold("m", HOLD))
    await until(lambda: ("load", 1) in world.events)
    assert default(manager) == 2
    world.gate.set()
    await task
    assert default(manager) == 1
    await manager.stop()


async def test_each_rollout_releases_its_own_versions(world: World) -> None:
    """Two models may be replaced by one, and one model may have a rollout that fails to start."""
    world.publish(1, 2, 3)
    manager = await world.serve(ModelControlMode.NONE)
    hold = manager.held.hold
    await hold("m", VersionHold((1,)), "one")
    await hold("m", VersionHold((1, 2), 2), "two")
    await hold("m", VersionHold((3,), 3), "three")
    assert (manager.versions("m"), default(manager)) == ([1, 2, 3], 2)
    await manager.held.release("m", rollout="three")
    assert (manager.versions("m"), default(manager)) == ([1, 2, 3], 2)
    await manager.held.release("m", rollout="two")
    assert (manager.versions("m"), default(manager)) == ([1, 3], 3)
    await manager.held.release("m", rollout="one")
    assert (manager.versions("m"), default(manager)) == ([3], 3)
    await manager.stop()


# -- requests during a rollout --------------------------------------------------------------------


async def test_a_rollout_refuses_requests_that_would_take_its_versions_away(world: World) -> None:
    manager = await held(world, ModelControlMode.EXPLICIT)
    refusal = "model 'm' is part of a rollout that is running; end that first"
    with pytest.raises(Unavailable, match=refusal):
        await manager.unload("m")
    with pytest.raises(Unavailable, match=refusal):
        await manager.unload_version("m", 2)
    with pytest.raises(Unavailable, match=refusal):
        manager.set_default("m", 2)
    with pytest.raises(Unavailable, match=refusal):
        await manager.reload({})
    await manager.load("m")
    assert (manager.versions("m"), default(manager)) == ([1, 2], 1)
    await manager.stop()


async def test_versions_that_are_kept_after_a_rollback_may_be_unloaded(world: World) -> None:
    manager = await held(world, ModelControlMode.EXPLICIT)
    await manager.held.hold("m", HOLD._replace(kept=True))
    await manager.unload_version("m", 2)
    assert (manager.versions("m"), default(manager)) == ([1], 1)
    await manager.stop()


# -- promotion and rollback -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["", ONLY_1, "version_policy { all { } }"])
async def test_promotion_makes_the_candidate_the_default_without_a_reload(
    world: World, mode: ModelControlMode, policy: str
) -> None:
    manager = await held(world, mode, policy)
    VersionChoice.of_folder(world.root / "m").prefer(2, 1)
    await manager.held.release("m", 2, 1, "", True)
    assert default(manager) == 2
    assert manager.versions("m") == ([1, 2] if "all" in policy else [2])
    assert [event for event in world.events if event[0] == "load"] == [("load", 1), ("load", 2)]
    world.publish(3, config=policy)
    if policy == "":  # the model follows its policy again
        for _ in range(2):
            await refresh(manager)
        assert default(manager) == 3
    await manager.stop()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["", ONLY_1, "version_policy { latest { num_versions: 2 } }"])
async def test_rollback_makes_the_baseline_the_default_for_good(
    world: World, mode: ModelControlMode, policy: str
) -> None:
    manager = await held(world, mode, policy)
    VersionChoice.of_folder(world.root / "m").prefer(1, 2)
    await manager.held.release("m", 1, 2, "", True)
    for _ in range(2):
        await refresh(manager)
    assert (manager.versions("m"), default(manager)) == ([1], 1)
    again = await world.serve(mode)
    assert (again.versions("m"), default(again)) == ([1], 1)
    await manager.stop()
    await again.stop()


@pytest.mark.parametrize("mode", MODES)
async def test_promotion_moves_a_label_and_leaves_the_default_alone(
    world: World, mode: ModelControlMode
) -> None:
    config = "version_policy { all { } }" + label("stable", 1)
    world.publish(1, 2, config=config)
    manager = await world.serve(mode)
    await manager.held.hold("m", VersionHold((1, 2), 2))
    assert (default(manager), manager.labels("m")) == (2, {"stable": 1})
    VersionChoice.of_folder(world.root / "m").label("stable", 2)
    await manager.held.release("m", 2, 1, "stable", False)
    assert (default(manager), manager.labels("m")) == (2, {"stable": 2})
    assert manager.get("m").config.parameters["version_label.stable"].string_value == "2"
    assert world.events == [("load", 2), ("load", 1)]
    await manager.stop()


async def test_promotion_changes_what_earlier_requests_have_set(world: World) -> None:
    """A list of models with a policy and labels, as in TensorFlow Serving, and a pinned default."""
    world.publish(1)
    manager = await world.serve()
    await manager.reload({"m": VersionSettings(specific(1), {"stable": 1})})
    manager.set_default("m", 1)
    world.publish(2)
    await manager.held.hold("m", HOLD)
    await manager.held.release("m", 2, 1, "stable", True)
    assert (manager.versions("m"), default(manager)) == ([2], 2)
    assert manager.labels("m") == {"stable": 2}
    await manager.stop()


async def test_promotion_of_an_older_version_replaces_the_newer_one(world: World) -> None:
    world.publish(1, 2, 3, config="version_policy { all { } }")
    manager = await world.serve()
    await manager.held.hold("m", VersionHold((3, 2), 3))
    VersionChoice.of_folder(world.root / "m").prefer(2, 3)
    await manager.held.release("m", 2, 3, "", True)
    assert (manager.versions("m"), default(manager)) == ([1, 2], 2)
    await manager.stop()


# -- changes without a reload ---------------------------------------------------------------------


async def test_labels_and_policies_change_without_a_reload_and_everything_else_with_one(
    world: World,
) -> None:
    world.publish(1)
    manager = await world.serve()
    for choice in (label("a", 1), label("b", 1) + ONLY_1, ONLY_1.replace("1", "[ 1 ]")):
        world.configure(choice)
        await manager.load("m")
    assert world.events == [("load", 1)]
    assert list(manager.get("m").config.version_policy.specific.versions) == [1]
    braces = "version_policy { # {{\n specific { versions: 1 } }\n"  # hide nothing behind them
    for choice, loads in ((braces, 1), (braces + "metric_tags { key: 'a' value: 'b' }", 2)):
        world.configure(choice)
        await manager.load("m")
        assert world.events.count(("load", 1)) == loads
    await manager.stop()
