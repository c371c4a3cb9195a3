"""Model control by request: labels, a default version, unloading a version, replacing the list."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from modelport.gateway.errors import InvalidArgument, NotFound, Unavailable
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import VersionSettings, VersionState
from modelport.gateway.repository.version_policy import VersionPolicy
from modelport.gateway.settings import AspiredVersionPolicy, ModelControlMode
from tests.gateway.models.managers import World, refresh, served
from tests.polling import until

ALL = VersionPolicy(latest=None)
ALL_TEXT = "version_policy { all { } }"
UNASSIGNABLE = (
    "Request to assign label to version 9 of model m, which is not currently available for "
    "inference"
)


def label(name: str, version: object) -> str:
    return f'\nparameters {{ key: "version_label.{name}" value {{ string_value: "{version}" }} }}\n'


def specific(*versions: int) -> VersionPolicy:
    return VersionPolicy(specific=frozenset(versions))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# -- names and states -----------------------------------------------------------------------------


async def test_every_model_has_a_name_and_states_whether_it_is_served_or_not(world: World) -> None:
    world.publish(1, 2)
    world.publish(1, model="other")
    manager = await world.serve(load="m")
    assert manager.names() == ["m", "other"]
    assert manager.states("m") == [(2, VersionState.READY, "")]
    assert manager.states("other") == []
    with pytest.raises(NotFound, match="'nobody' is not found"):
        manager.states("nobody")
    await manager.unload("m")
    assert manager.states("m") == [(2, VersionState.UNAVAILABLE, "unloaded")]
    await manager.stop()


# -- labels ---------------------------------------------------------------------------------------


async def test_a_label_of_the_configuration_names_a_version(world: World) -> None:
    world.publish(1, 2, config=ALL_TEXT + label("stable", 1) + label("canary", 2))
    manager = await world.serve()
    assert manager.labels("m") == {"stable": 1, "canary": 2}
    assert manager.version_of("m", "stable") == 1
    with pytest.raises(NotFound, match=r"^Unrecognized servable version label: nightly$"):
        manager.version_of("m", "nightly")
    with pytest.raises(NotFound):
        manager.labels("nobody")
    await manager.stop()


async def test_a_label_of_a_version_that_is_not_served_is_not_found(world: World) -> None:
    world.publish(1, 2, config=label("stable", 1) + label("canary", 2))
    manager = await world.serve()
    assert manager.versions("m") == [2]
    assert manager.labels("m") == {"canary": 2}
    with pytest.raises(NotFound):
        manager.version_of("m", "stable")
    await manager.stop()


@pytest.mark.parametrize("how", ["in the configuration", "in a reload"])
async def test_a_label_stays_where_it_was_until_its_new_version_serves(
    world: World, how: str
) -> None:
    """Version 1 takes the place of 2: its load is the one that waits."""
    world.publish(2, config=label("stable", 2))
    manager = await world.serve()
    world.publish(1)
    world.gate.clear()
    if how == "in a reload":
        moving = manager.reload({"m": VersionSettings(specific(1), {"stable": 1})})
    else:
        world.configure("version_policy { specific { versions: 1 } }" + label("stable", 1))
        moving = manager.load("m")
    task = asyncio.create_task(moving)
    await until(lambda: ("load", 1) in world.events)
    assert manager.version_of("m", "stable") == 2
    world.gate.set()
    await task
    assert manager.labels("m") == {"stable": 1}
    await manager.stop()


@pytest.mark.parametrize("policy", AspiredVersionPolicy)
async def test_a_label_stays_where_it_was_if_its_new_version_does_not_load(
    world: World, policy: AspiredVersionPolicy
) -> None:
    world.publish(2, config=label("stable", 2))
    manager = await world.serve(aspired_version_policy=policy)
    world.publish(3, config=label("stable", 3))
    world.errors[3] = InvalidArgument("broken")
    with pytest.raises(InvalidArgument):
        await manager.load("m")
    assert manager.labels("m") == {"stable": 2}
    world.configure("")  # the label is taken away
    with pytest.raises(InvalidArgument):
        await manager.load("m")
    assert manager.labels("m") == {}
    await manager.stop()


@pytest.mark.parametrize("version", ["", "one", "1.0", "-1", "0", "9" * 5000])
async def test_a_label_with_an_invalid_version_is_refused(world: World, version: str) -> None:
    world.publish(1, config=label("stable", version))
    manager = await world.serve()
    assert "version_label.stable" in manager.states("m")[0][2]
    assert manager.versions("m") == []
    await manager.stop()


# -- a whole new list -----------------------------------------------------------------------------


async def test_a_reload_serves_exactly_what_it_lists(world: World) -> None:
    world.publish(1, 2)
    world.publish(1, model="old")
    world.publish(1, model="new")
    manager = await world.serve(load="old")
    labels = {"stable": 1, "canary": 2}
    await manager.reload({"m": VersionSettings(ALL, labels), "new": VersionSettings()})
    assert [manager.versions(name) for name in ("m", "new", "old")] == [[1, 2], [1], []]
    assert manager.labels("m") == labels
    assert manager.ready
    await manager.reload({"m": VersionSettings(specific(1))})
    assert [manager.versions(name) for name in ("m", "new", "old")] == [[1], [], []]
    assert manager.labels("m") == {}
    await manager.reload({"m": VersionSettings()})  # the configuration's own policy again
    assert manager.versions("m") == [2]
    await manager.stop()


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (
            {"m": VersionSettings(specific(1)), "nobody": VersionSettings()},
            "failed to load 'nobody'",
        ),
        ({"m": VersionSettings(specific(1), {"stable": 9})}, UNASSIGNABLE),
        ({"m": VersionSettings(specific(1), {"stable": 2})}, "to version 2 of model m"),
        ({"m": VersionSettings(None, {"stable": 1})}, "to version 1 of model m"),
    ],
)
async def test_a_reload_that_is_refused_changes_nothing(
    world: World, wanted: dict[str, VersionSettings], error: str
) -> None:
    world.publish(1, 2)
    world.publish(1, model="other")
    manager = await world.serve()
    events = list(world.events)
    with pytest.raises((NotFound, InvalidArgument), match=error):
        await manager.reload(wanted)
    assert world.events == events
    assert manager.versions("m") == [2]
    assert manager.versions("other") == [1]
    assert manager.labels("m") == {}
    await manager.stop()


async def test_a_label_may_move_to_a_version_that_the_same_reload_loads(world: World) -> None:
    world.publish(1)
    manager = await world.serve()
    await manager.reload({"m": VersionSettings(ALL, {"stable": 1})})
    world.publish(2)
    await manager.reload({"m": VersionSettings(ALL, {"stable": 2})})
    assert manager.version_of("m", "stable") == 2
    await manager.stop()


async def test_a_reload_whose_model_does_not_load_says_so_and_leaves_the_rest(world: World) -> None:
    world.publish(1)
    world.publish(2, model="good")
    manager = await world.serve(load="")
    world.errors[1] = InvalidArgument("broken")
    with pytest.raises(InvalidArgument, match=r"load failed for model 'm': version 1 .* broken"):
        await manager.reload({"m": VersionSettings(), "good": VersionSettings()})
    assert manager.versions("good") == [2]
    await manager.stop()


# -- one version ----------------------------------------------------------------------------------


async def test_one_version_is_unloaded_until_the_model_is_loaded_again(world: World) -> None:
    world.publish(1, 2, config=ALL_TEXT)
    manager = await world.serve()
    await manager.unload_version("m", 2)
    assert manager.states("m") == [
        (1, VersionState.READY, ""),
        (2, VersionState.UNAVAILABLE, "unloaded"),
    ]
    assert manager.get("m").number == 1
    for number in (2, 3):
        with pytest.raises(NotFound):
            await manager.unload_version("m", number)
    await manager.unload_version("m", 1)
    assert manager.ready, "nothing is wanted any more"
    await manager.load("m")
    assert manager.versions("m") == [1, 2]
    await manager.stop()


async def test_the_default_is_what_requests_without_a_version_get_until_it_is_unloaded(
    world: World,
) -> None:
    world.publish(1, 2, 3, config=ALL_TEXT)
    manager = await world.serve()
    assert manager.get("m").number == 3
    manager.set_default("m", 1)
    assert manager.acquire("m").number == 1
    manager.get("m").release()
    with pytest.raises(NotFound):
        manager.set_default("m", 4)
    assert manager.get("m").number == 1
    await manager.load("m")
    assert manager.get("m").number == 1, "it was not unloaded"
    await manager.unload_version("m", 1)
    assert manager.get("m").number == 3
    await manager.load("m")
    assert manager.get("m").number == 3, "it was"
    await manager.stop()


@pytest.mark.parametrize("mode", [ModelControlMode.NONE, ModelControlMode.POLL])
async def test_all_of_it_needs_explicit_control(world: World, mode: ModelControlMode) -> None:
    world.publish(1, 2, config=ALL_TEXT)
    manager = await world.serve(mode)
    with pytest.raises(Unavailable, match="--model-control-mode=explicit"):
        await manager.reload({})
    with pytest.raises(Unavailable, match="--model-control-mode=explicit"):
        await manager.unload_version("m", 1)
    with pytest.raises(Unavailable, match="--model-control-mode=explicit"):
        manager.set_default("m", 1)
    assert manager.versions("m") == [1, 2]
    await manager.stop()


# -- a backend that is down -----------------------------------------------------------------------


async def test_while_a_backend_is_down_its_model_is_not_ready_and_the_index_says_why(
    world: World,
) -> None:
    world.publish(1)
    manager = await world.serve()
    backend = served(manager)
    assert manager.ready
    assert manager.require_ready("m") is manager.get("m")
    backend.problem = "the server of 'm' is being restarted"
    assert not manager.ready
    assert manager.broken() == ["m"]
    with pytest.raises(Unavailable, match="being restarted"):
        manager.require_ready("m")
    assert manager.states("m") == [(1, VersionState.UNAVAILABLE, backend.problem)]
    assert manager.index() == [
        {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": backend.problem}
    ]
    assert manager.index(ready_only=True) == []
    assert manager.get("m").number == 1, "metadata, and the backend's own error"
    backend.problem = ""
    assert manager.ready
    assert manager.require_ready("m")
    assert manager.states("m") == [(1, VersionState.READY, "")]
    await manager.stop()


async def test_without_strict_readiness_a_backend_that_is_down_is_no_matter(world: World) -> None:
    world.publish(1)
    manager = await world.serve(strict_readiness=False)
    served(manager).problem = "down"
    assert manager.ready
    await manager.stop()


# -- the parameters of a configuration ------------------------------------------------------------


async def test_an_unknown_aspired_version_policy_is_refused_and_the_known_ones_are_named(
    world: World,
) -> None:
    world.publish(
        1,
        config='parameters { key: "aspired_version_policy" value { string_value: "fastest" } }',
    )
    manager = await world.serve()
    (state,) = manager.states("m")
    assert "'availability_preserving' or 'resource_preserving', not 'fastest'" in state[2]
    world.configure("")
    await manager.load("m")
    await until(lambda: manager.ready)
    await manager.stop()


# -- configurations of load requests --------------------------------------------------------------


def override(size: int, *versions: int) -> str:
    tensor = '"data_type": "TYPE_FP32", "dims": [2]'
    return (
        f'{{"backend": "obedient", "max_batch_size": {size},'
        f' "input": [{{"name": "x", {tensor}}}], "output": [{{"name": "y", {tensor}}}],'
        f' "version_policy": {{"specific": {{"versions": {list(versions or [1])}}}}}}}'
    )


def batch(manager: ModelManager, number: int = 0) -> int:
    return int(manager.get("m", number).config.max_batch_size)


async def test_the_configuration_of_a_load_stays_at_loads_without_one(world: World) -> None:
    world.publish(1, 2)
    manager = await world.serve()
    assert batch(manager) == 4
    await manager.load("m", override(7))
    for _ in range(2):
        await manager.load("m")
        assert (batch(manager), manager.versions("m")) == (7, [1])
    await manager.load("m", override(8, 1, 2))
    await manager.load("m")
    assert (batch(manager), manager.versions("m")) == (8, [1, 2])
    await manager.stop()


@pytest.mark.parametrize("change", ["config", "version", "unload", "vanish"])
async def test_it_ends_with_an_unload_and_with_a_load_after_the_folder_has_changed(
    change: str, world: World
) -> None:
    world.publish(1)
    manager = await world.serve()
    await manager.load("m", override(7))
    if change == "config":
        world.configure("# changed")
    elif change == "version":
        world.publish(2)
    elif change == "unload":
        await manager.unload("m")
    else:
        world.root.joinpath("m").rename(world.root / ".m")
        await refresh(manager)
        world.root.joinpath(".m").rename(world.root / "m")
    await manager.load("m")
    assert batch(manager) == 4
    await manager.load("m")
    assert batch(manager) == 4
    await manager.stop()


async def test_one_with_which_nothing_loads_is_dropped_for_the_one_before(world: World) -> None:
    world.publish(1)
    manager = await world.serve()
    await manager.load("m", override(7))
    for bad in (override(-1), override(8).replace("obedient", "nobody")):
        world.errors[1] = InvalidArgument("no such backend")
        with pytest.raises(InvalidArgument, match="load failed for model 'm'"):
            await manager.load("m", bad)
        world.errors.clear()
        assert batch(manager) == 7
        await manager.load("m")
        assert batch(manager) == 7
        assert manager.states("m") == [(1, VersionState.READY, "")]
    await manager.unload("m")
    with pytest.raises(InvalidArgument, match="must be non-negative"):
        await manager.load("m", override(-1))
    await manager.load("m")
    assert batch(manager) == 4
    await manager.stop()


async def test_one_that_waits_for_a_dependency_or_loads_in_part_is_kept(world: World) -> None:
    world.publish(1, 2)
    manager = await world.serve()
    world.errors[2] = InvalidArgument("damaged")
    with pytest.raises(InvalidArgument, match=r"version 2 .*damaged"):
        await manager.load("m", override(7, 1, 2))
    assert batch(manager, 1) == 7
    world.errors[1] = Unavailable("not yet")
    with pytest.raises(Unavailable, match="not yet"):
        await manager.load("m", override(8))
    world.errors.clear()
    await manager.load("m")
    assert batch(manager) == 8
    await manager.stop()


async def test_the_order_of_the_files_and_another_process_make_no_difference(
    world: World,
) -> None:
    world.publish(1, 2)
    manager, other = await world.serve(), await world.serve()
    await manager.load("m", override(7, 1, 2))
    snapshot = json.loads(json.dumps(manager.snapshot()))
    await other.restore(snapshot)
    assert batch(other) == 7
    world.publish(3)  # only a load after this ends the override, in each of them
    for each in (manager, other):
        await each.load("m")
        assert (batch(each), each.versions("m")) == (4, [3])
        await each.stop()
