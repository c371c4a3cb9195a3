"""Names under which a model of the repository is registered: their beginning, end and restart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from modelport.gateway.errors import AlreadyExists, InvalidArgument, NotFound, Unavailable
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import VersionSettings
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.rollout import side_description
from modelport.gateway.settings import ModelControlMode
from tests.gateway.models.managers import CONFIG, World, served
from tests.polling import until

ALL = "version_policy { all {} }"
TENSORS = CONFIG.partition("max_batch_size")
ENSEMBLE = """
platform: "ensemble"
ensemble_scheduling {
  step { model_name: "m" model_version: -1
         input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } }
}
""" + "".join(TENSORS[1:])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def names(manager: ModelManager) -> list[str]:
    """The names that are known, and have statistics."""
    assert {name for name, _, _ in manager.statistics()} <= set(manager.names())
    return manager.names()


@pytest.mark.parametrize("mode", [ModelControlMode.POLL, ModelControlMode.NONE])
async def test_names_are_registered_in_explicit_mode_alone(
    world: World, mode: ModelControlMode
) -> None:
    world.publish(1)
    manager = await world.serve(mode)
    with pytest.raises(Unavailable, match="--model-control-mode=explicit"):
        await manager.load("n", source="m")
    assert names(manager) == ["m"]


@pytest.mark.parametrize("stated", ['name: "m"', 'name: "n"', ""])
async def test_the_configuration_has_the_new_name(world: World, stated: str) -> None:
    world.publish(1, config=stated)
    manager = await world.serve(load="")
    await manager.load("n", source="m")
    assert (served(manager, "n").config.name, manager.get("n").source) == ("n", "m")
    assert served(manager, "n").artifact.path == world.root / "m" / "1"


async def test_a_configuration_of_another_model_is_refused_under_any_name(world: World) -> None:
    world.publish(1, config='name: "other"')
    manager = await world.serve(load="")
    with pytest.raises(InvalidArgument, match="unexpected directory name"):
        await manager.load("n", source="m")
    assert names(manager) == ["m"]


async def test_a_load_of_a_name_follows_the_folder_of_its_source(world: World) -> None:
    world.publish(1)
    manager = await world.serve(load="")
    await manager.load("n", source="m")
    world.publish(2)
    await manager.load("n")
    assert (manager.versions("n"), manager.versions("m")) == ([2], [])
    world.publish(9, model="n")  # the name belongs to the registration until its end
    await manager.load("n")
    assert manager.versions("n") == [2]
    await manager.unload("n")
    await manager.load("n")
    assert manager.versions("n") == [9]


async def test_a_registration_that_fails_leaves_nothing(world: World) -> None:
    world.publish(1)
    manager = await world.serve(load="")
    for error in (InvalidArgument("no"), Unavailable("not yet"), MemoryError()):
        world.errors[1] = [error]
        with pytest.raises((InvalidArgument, Unavailable)):
            await manager.load("n", source="m")
        assert names(manager) == ["m"]
    with pytest.raises(NotFound):
        await manager.load("n", source="missing")
    assert names(manager) == ["m"]
    await manager.load("n", source="m")
    world.publish(2)
    world.errors[2] = InvalidArgument("no")
    with pytest.raises(InvalidArgument):
        await manager.load("n", source="m")
    assert manager.versions("n") == [1], "what was registered before stays"


async def test_a_source_that_is_gone_is_not_found_and_its_names_serve_on(world: World) -> None:
    world.publish(1)
    manager = await world.serve(load="")
    await manager.load("n", source="m")
    (world.root / "m").rename(world.root / ".m")
    for name, source in (("n", ""), ("n", "m"), ("o", "m")):
        with pytest.raises(NotFound, match="failed to poll"):
            await manager.load(name, source=source)
    assert manager.versions("n") == [1]
    await manager.unload("n")
    assert "n" not in names(manager)


async def test_a_model_of_another_server_has_its_name_from_its_route(world: World) -> None:
    world.remote = [1]
    manager = await world.serve(routes={"far": ModelRoute("obedient", ("127.0.0.1:1",))})
    with pytest.raises(InvalidArgument, match=r'\[models\.n\] with model = "far"'):
        await manager.load("n", source="far")
    assert names(manager) == ["far"]


async def test_a_rollout_is_of_the_model_and_not_of_its_names(world: World) -> None:
    """A promotion would look for ``config.pbtxt`` in a folder of that name."""
    world.publish(1)
    manager = await world.serve()
    await manager.load("n", source="m")
    assert side_description.version(manager, "m", 1).obstacle == ""
    assert "start a rollout of that model" in side_description.version(manager, "n", 1).obstacle


async def test_of_two_registrations_of_one_name_one_wins(world: World) -> None:
    world.publish(1)
    world.publish(1, model="other")
    manager = await world.serve(load="")
    results = await asyncio.gather(
        *(manager.load("n", source=source) for source in ("m", "other") * 4), return_exceptions=True
    )
    lost = [result for result in results if result is not None]
    assert len(lost) == 7
    assert all(isinstance(each, AlreadyExists) for each in lost)
    assert names(manager) == ["m", "n", "other"]
    assert len(world.events) == 1


async def test_a_name_is_registered_again_after_a_change(world: World) -> None:
    world.publish(1, 2, config=ALL)
    manager = await world.serve(load="")
    await manager.load("n", source="m")
    with pytest.raises(AlreadyExists, match=r"^Model version 2 is already registered for model n$"):
        await manager.load("n", source="m")
    await manager.unload_version("n", 1)
    await manager.load("n", source="m")
    assert manager.versions("n") == [1, 2]
    world.publish(3, config=ALL)
    await manager.load("n", source="m")
    assert manager.versions("n") == [1, 2, 3]


async def test_nothing_stays_loaded_if_a_name_ends_while_it_loads(world: World) -> None:
    """A load that waits for the models of its steps must not serve what nobody can unload."""
    world.publish(1)
    world.publish(2, model="e")
    (world.root / "e" / "config.pbtxt").write_text(ENSEMBLE)
    manager = await world.serve(load="")
    world.gate.clear()
    loading = asyncio.create_task(manager.load("n", source="e"))
    await until(lambda: world.events == [("load", 1)])
    await manager.unload("n")
    world.gate.set()
    with pytest.raises(InvalidArgument, match="load failed for model 'n'"):
        await loading
    assert names(manager) == ["e", "m"]
    assert world.events == [("load", 1)], "only the step is loaded"
    await manager.load("n", source="e")
    assert world.events[1:] == [("load", 2)]


async def test_a_reload_of_everything_ends_the_names_that_it_does_not_have(world: World) -> None:
    world.publish(1)
    manager = await world.serve()
    for name in ("kept", "left"):
        await manager.load(name, source="m")
    await manager.reload({"kept": VersionSettings()})
    assert (names(manager), manager.versions("kept"), manager.versions("m")) == (
        ["kept", "m"],
        [1],
        [],
    )


async def test_a_worker_that_restarts_serves_the_names_of_the_others(world: World) -> None:
    world.publish(1, 2, config=ALL)
    world.publish(1, model="other")
    manager = await world.serve(load="")
    await manager.load("n", json.dumps({"backend": "obedient", "max_batch_size": 2}), "m")
    await manager.load("o", source="m")
    manager.set_default("o", 1)
    await manager.load("changed", source="other")
    snapshot = json.loads(json.dumps(manager.snapshot()))
    restarted = await world.serve(load="")
    for name in ("changed", "ended"):
        await restarted.load(name, source="m")
    await restarted.restore(snapshot)
    assert names(restarted) == ["changed", "m", "n", "o", "other"]
    assert restarted.snapshot() == snapshot
    assert served(restarted, "n").config.max_batch_size == 2
    assert restarted.get("o").number == 1
    snapshot["n"]["source"] = "gone"
    await restarted.restore(snapshot)
    assert names(restarted) == ["changed", "m", "o", "other"]
