"""What requests may ask of the lifecycle: labels, a default, one version away, a whole new list."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from modelport.gateway.errors import InvalidArgument, NotFound, Unavailable
from modelport.gateway.models.model import State, Wanted
from modelport.gateway.models.version_policy import VersionPolicy
from modelport.gateway.settings import AspiredVersionPolicy, ModelControlMode
from tests.gateway.lifecycles import World, served, until

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
    lifecycle = await world.serve(load="m")
    assert lifecycle.names() == ["m", "other"]
    assert lifecycle.states("m") == [(2, State.READY, "")]
    assert lifecycle.states("other") == []
    with pytest.raises(NotFound, match="'nobody' is not found"):
        lifecycle.states("nobody")
    await lifecycle.unload("m")
    assert lifecycle.states("m") == [(2, State.UNAVAILABLE, "unloaded")]
    await lifecycle.stop()


# -- labels ---------------------------------------------------------------------------------------


async def test_a_label_of_the_configuration_names_a_version(world: World) -> None:
    world.publish(1, 2, config=ALL_TEXT + label("stable", 1) + label("canary", 2))
    lifecycle = await world.serve()
    assert lifecycle.labels("m") == {"stable": 1, "canary": 2}
    assert lifecycle.version_of("m", "stable") == 1
    with pytest.raises(NotFound, match=r"^Unrecognized servable version label: nightly$"):
        lifecycle.version_of("m", "nightly")
    with pytest.raises(NotFound):
        lifecycle.labels("nobody")
    await lifecycle.stop()


async def test_a_label_of_a_version_that_is_not_served_is_none(world: World) -> None:
    world.publish(1, 2, config=label("stable", 1) + label("canary", 2))
    lifecycle = await world.serve()
    assert lifecycle.versions("m") == [2]
    assert lifecycle.labels("m") == {"canary": 2}
    with pytest.raises(NotFound):
        lifecycle.version_of("m", "stable")
    await lifecycle.stop()


@pytest.mark.parametrize("how", ["in the configuration", "in a reload"])
async def test_a_label_stays_where_it_was_until_its_new_version_serves(
    world: World, how: str
) -> None:
    """Version 1 takes the place of 2: its load is the one that waits."""
    world.publish(2, config=label("stable", 2))
    lifecycle = await world.serve()
    world.publish(1)
    world.gate.clear()
    if how == "in a reload":
        moving = lifecycle.reload({"m": Wanted(specific(1), {"stable": 1})})
    else:
        world.configure("version_policy { specific { versions: 1 } }" + label("stable", 1))
        moving = lifecycle.load("m")
    task = asyncio.create_task(moving)
    await until(lambda: ("load", 1) in world.events)
    assert lifecycle.version_of("m", "stable") == 2
    world.gate.set()
    await task
    assert lifecycle.labels("m") == {"stable": 1}
    await lifecycle.stop()


@pytest.mark.parametrize("policy", AspiredVersionPolicy)
async def test_a_label_stays_where_it_was_if_its_new_version_does_not_load(
    world: World, policy: AspiredVersionPolicy
) -> None:
    world.publish(2, config=label("stable", 2))
    lifecycle = await world.serve(aspired_version_policy=policy)
    world.publish(3, config=label("stable", 3))
    world.errors[3] = InvalidArgument("broken")
    with pytest.raises(InvalidArgument):
        await lifecycle.load("m")
    assert lifecycle.labels("m") == {"stable": 2}
    world.configure("")  # the label is taken away
    with pytest.raises(InvalidArgument):
        await lifecycle.load("m")
    assert lifecycle.labels("m") == {}
    await lifecycle.stop()


@pytest.mark.parametrize("version", ["", "one", "1.0", "-1", "0", "9" * 5000])
async def test_a_label_of_what_is_no_version_is_refused(world: World, version: str) -> None:
    world.publish(1, config=label("stable", version))
    lifecycle = await world.serve()
    assert "version_label.stable" in lifecycle.states("m")[0][2]
    assert lifecycle.versions("m") == []
    await lifecycle.stop()


# -- a whole new list -----------------------------------------------------------------------------


async def test_a_reload_serves_exactly_what_it_lists(world: World) -> None:
    world.publish(1, 2)
    world.publish(1, model="old")
    world.publish(1, model="new")
    lifecycle = await world.serve(load="old")
    labels = {"stable": 1, "canary": 2}
    await lifecycle.reload({"m": Wanted(ALL, labels), "new": Wanted()})
    assert [lifecycle.versions(name) for name in ("m", "new", "old")] == [[1, 2], [1], []]
    assert lifecycle.labels("m") == labels
    assert lifecycle.ready
    await lifecycle.reload({"m": Wanted(specific(1))})
    assert [lifecycle.versions(name) for name in ("m", "new", "old")] == [[1], [], []]
    assert lifecycle.labels("m") == {}
    await lifecycle.reload({"m": Wanted()})  # the configuration's own policy again
    assert lifecycle.versions("m") == [2]
    await lifecycle.stop()


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"m": Wanted(specific(1)), "nobody": Wanted()}, "failed to load 'nobody'"),
        ({"m": Wanted(specific(1), {"stable": 9})}, UNASSIGNABLE),
        ({"m": Wanted(specific(1), {"stable": 2})}, "to version 2 of model m"),
        ({"m": Wanted(None, {"stable": 1})}, "to version 1 of model m"),
    ],
)
async def test_a_reload_that_is_refused_changes_nothing(
    world: World, wanted: dict[str, Wanted], error: str
) -> None:
    world.publish(1, 2)
    world.publish(1, model="other")
    lifecycle = await world.serve()
    events = list(world.events)
    with pytest.raises((NotFound, InvalidArgument), match=error):
        await lifecycle.reload(wanted)
    assert world.events == events
    assert lifecycle.versions("m") == [2]
    assert lifecycle.versions("other") == [1]
    assert lifecycle.labels("m") == {}
    await lifecycle.stop()


async def test_a_label_may_move_to_a_version_that_the_same_reload_loads(world: World) -> None:
    world.publish(1)
    lifecycle = await world.serve()
    await lifecycle.reload({"m": Wanted(ALL, {"stable": 1})})
    world.publish(2)
    await lifecycle.reload({"m": Wanted(ALL, {"stable": 2})})
    assert lifecycle.version_of("m", "stable") == 2
    await lifecycle.stop()


async def test_a_reload_whose_model_does_not_load_says_so_and_leaves_the_rest(world: World) -> None:
    world.publish(1)
    world.publish(2, model="good")
    lifecycle = await world.serve(load="")
    world.errors[1] = InvalidArgument("broken")
    with pytest.raises(InvalidArgument, match=r"load failed for model 'm': version 1 .* broken"):
        await lifecycle.reload({"m": Wanted(), "good": Wanted()})
    assert lifecycle.versions("good") == [2]
    await lifecycle.stop()


# -- one version ----------------------------------------------------------------------------------


async def test_one_version_is_unloaded_until_the_model_is_loaded_again(world: World) -> None:
    world.publish(1, 2, config=ALL_TEXT)
    lifecycle = await world.serve()
    await lifecycle.unload_version("m", 2)
    assert lifecycle.states("m") == [(1, State.READY, ""), (2, State.UNAVAILABLE, "unloaded")]
    assert lifecycle.get("m").number == 1
    with pytest.raises(Unavailable):
        await lifecycle.unload_version("m", 2)
    with pytest.raises(NotFound):
        await lifecycle.unload_version("m", 3)
    await lifecycle.unload_version("m", 1)
    assert lifecycle.ready, "nothing is wanted any more"
    await lifecycle.load("m")
    assert lifecycle.versions("m") == [1, 2]
    await lifecycle.stop()


async def test_the_default_is_what_requests_without_a_version_get_until_it_is_unloaded(
    world: World,
) -> None:
    world.publish(1, 2, 3, config=ALL_TEXT)
    lifecycle = await world.serve()
    assert lifecycle.get("m").number == 3
    lifecycle.set_default("m", 1)
    assert lifecycle.acquire("m").number == 1
    lifecycle.get("m").release()
    with pytest.raises(NotFound):
        lifecycle.set_default("m", 4)
    assert lifecycle.get("m").number == 1
    await lifecycle.load("m")
    assert lifecycle.get("m").number == 1, "it was not unloaded"
    await lifecycle.unload_version("m", 1)
    assert lifecycle.get("m").number == 3
    await lifecycle.load("m")
    assert lifecycle.get("m").number == 3, "it was"
    await lifecycle.stop()


@pytest.mark.parametrize("mode", [ModelControlMode.NONE, ModelControlMode.POLL])
async def test_all_of_it_needs_explicit_control(world: World, mode: ModelControlMode) -> None:
    world.publish(1, 2, config=ALL_TEXT)
    lifecycle = await world.serve(mode)
    with pytest.raises(Unavailable, match="--model-control-mode=explicit"):
        await lifecycle.reload({})
    with pytest.raises(Unavailable, match="--model-control-mode=explicit"):
        await lifecycle.unload_version("m", 1)
    with pytest.raises(Unavailable, match="--model-control-mode=explicit"):
        lifecycle.set_default("m", 1)
    assert lifecycle.versions("m") == [1, 2]
    await lifecycle.stop()


# -- a backend that is down -----------------------------------------------------------------------


async def test_while_a_backend_is_down_its_model_is_not_ready_and_the_index_says_why(
    world: World,
) -> None:
    world.publish(1)
    lifecycle = await world.serve()
    backend = served(lifecycle)
    assert lifecycle.ready
    assert lifecycle.require_ready("m") is lifecycle.get("m")
    backend.problem = "the server of 'm' is being restarted"
    assert not lifecycle.ready
    assert lifecycle.broken() == ["m"]
    with pytest.raises(Unavailable, match="being restarted"):
        lifecycle.require_ready("m")
    assert lifecycle.states("m") == [(1, State.UNAVAILABLE, backend.problem)]
    assert lifecycle.index() == [
        {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": backend.problem}
    ]
    assert lifecycle.index(ready_only=True) == []
    assert lifecycle.get("m").number == 1, "metadata, and the backend's own error"
    backend.problem = ""
    assert lifecycle.ready
    assert lifecycle.require_ready("m")
    assert lifecycle.states("m") == [(1, State.READY, "")]
    await lifecycle.stop()


async def test_without_strict_readiness_a_backend_that_is_down_is_no_matter(world: World) -> None:
    world.publish(1)
    lifecycle = await world.serve(strict_readiness=False)
    served(lifecycle).problem = "down"
    assert lifecycle.ready
    await lifecycle.stop()


# -- the parameters of a configuration ------------------------------------------------------------


async def test_an_unknown_aspired_version_policy_is_refused_and_the_known_ones_are_named(
    world: World,
) -> None:
    world.publish(
        1,
        config='parameters { key: "aspired_version_policy" value { string_value: "fastest" } }',
    )
    lifecycle = await world.serve()
    (state,) = lifecycle.states("m")
    assert "'availability_preserving' or 'resource_preserving', not 'fastest'" in state[2]
    world.configure("")
    await lifecycle.load("m")
    await until(lambda: lifecycle.ready)
    await lifecycle.stop()
