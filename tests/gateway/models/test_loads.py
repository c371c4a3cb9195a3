"""Loading and unloading of versions: retries, memory for others, remote servers, partial writes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from modelport.gateway.errors import InvalidArgument, ModelportError, NotFound, Unavailable
from modelport.gateway.models import load_threads, reconciler
from modelport.gateway.models import manager as managers
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import VersionSettings, VersionState
from modelport.gateway.repository import manifest
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.repository.scan import ModelEntry
from modelport.gateway.repository.version_policy import VersionPolicy
from modelport.gateway.settings import AspiredVersionPolicy, ModelControlMode, usable_cores
from tests.gateway.models.managers import World, refresh, served
from tests.polling import until

ROOM = {"aspired_version_policy": AspiredVersionPolicy.RESOURCE_PRESERVING}
ROUTE = ModelRoute("obedient", ("127.0.0.1:1",))
MODES = list(ModelControlMode)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(reconciler, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(reconciler, "LAST_RETRY_SECONDS", 0.02)
    return World(tmp_path)


def quiet(manager: ModelManager) -> bool:
    """Nothing is planned and nothing is going on."""
    models = manager._models.values()
    return all(model.timer is None and not model.lock.locked() for model in models)


# -- the start ------------------------------------------------------------------------------------


async def test_a_gateway_that_starts_calls_no_model_unknown(world: World) -> None:
    """Clients retry UNAVAILABLE; NOT_FOUND they would report as a model that is gone."""
    world.publish(1)
    world.gate.clear()
    manager = ModelManager(world.settings(), world.find, find_versions=world.find_versions)
    with pytest.raises(Unavailable, match="the server is starting"):
        manager.get("m")
    with pytest.raises(Unavailable, match="the server is starting"):
        manager.labels("other")
    starting = asyncio.create_task(manager.start())
    await until(lambda: manager.names() == ["m"])
    with pytest.raises(Unavailable, match="no available versions"):
        manager.get("m")
    with pytest.raises(NotFound, match="unknown model: 'other'"):
        manager.get("other")
    world.gate.set()
    await starting
    assert manager.get("m").number == 1
    await manager.stop()


# -- tried again ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_what_is_not_there_yet_is_tried_until_it_is(
    world: World, mode: ModelControlMode
) -> None:
    world.publish(1)
    world.publish(2, model="other")
    world.errors[1] = Unavailable("the server is not up")
    manager = await world.serve(mode)
    assert manager.versions("other") == [2], "nothing else waits for it"
    assert manager.states("m") == [(1, VersionState.UNAVAILABLE, "the server is not up")]
    assert not manager.ready
    await until(lambda: world.events.count(("load", 1)) > 5)
    world.errors[1] = []
    await until(lambda: manager.versions("m") == [1])
    assert manager.ready
    assert quiet(manager)
    await manager.stop()


async def test_other_failures_are_final_unless_retries_are_asked_for(world: World) -> None:
    world.publish(1)
    world.errors[1] = [InvalidArgument("broken")]
    manager = await world.serve()
    assert manager.states("m") == [(1, VersionState.UNAVAILABLE, "broken")]
    assert quiet(manager)
    await manager.load("m")
    assert manager.versions("m") == [1]
    await manager.stop()


@pytest.mark.parametrize(("failures", "loads"), [(3, True), (4, False)])
async def test_a_load_on_request_waits_for_its_retries_and_reports_the_outcome(
    world: World, failures: int, loads: bool
) -> None:
    world.publish(1)
    manager = await world.serve(load="", model_load_retry_count=3, load_retry_interval_seconds=0.01)
    world.errors[1] = [InvalidArgument(f"broken {n}") for n in range(failures)]
    if loads:
        await manager.load("m")
        assert manager.versions("m") == [1]
    else:
        with pytest.raises(InvalidArgument, match="broken 3"):
            await manager.load("m")
    assert world.events == [("load", 1)] * 4
    assert quiet(manager)
    await manager.stop()


async def test_a_load_from_an_unavailable_server_fails_and_is_tried_again(
    world: World,
) -> None:
    world.publish(1)
    manager = await world.serve(load="")
    world.errors[1] = Unavailable("the server is not up")
    with pytest.raises(Unavailable, match="the server is not up"):
        await manager.load("m")
    world.errors[1] = []
    await until(lambda: manager.versions("m") == [1])
    await manager.stop()


@pytest.mark.parametrize("way", ["unload", "reload", "stop"])
async def test_nothing_is_tried_again_once_it_is_not_wanted_any_more(
    world: World, way: str
) -> None:
    world.publish(1)
    world.errors[1] = Unavailable("the server is not up")
    manager = await world.serve()
    await until(lambda: len(world.events) > 2)
    if way == "unload":
        await manager.unload("m")
        assert manager.states("m") == [(1, VersionState.UNAVAILABLE, "unloaded")]
        assert manager.ready
    elif way == "reload":
        await manager.reload({})
    else:
        await manager.stop()
    tried = len(world.events)
    await asyncio.sleep(0.1)  # five times what lies between two tries
    assert len(world.events) == tried
    assert quiet(manager)
    await manager.stop()


async def test_new_content_is_tried_at_once_and_the_old_one_no_more(world: World) -> None:
    world.publish(1)
    manager = await world.serve(
        ModelControlMode.POLL, model_load_retry_count=99, load_retry_interval_seconds=60
    )
    world.errors[1] = InvalidArgument("broken")
    (world.root / "m" / "1" / "file").write_text("broken")
    for _ in range(2):
        await refresh(manager)
    assert "reload failed" in manager.states("m")[0][2]
    assert not quiet(manager)
    world.errors[1] = []
    (world.root / "m" / "1" / "file").write_text("repaired")
    for _ in range(2):
        await refresh(manager)
    assert manager.states("m") == [(1, VersionState.READY, "")]
    assert quiet(manager)
    await manager.stop()


async def test_the_older_version_stands_in_while_the_newest_is_tried_again(world: World) -> None:
    world.publish(1, 2)
    world.errors[2] = Unavailable("not yet")
    manager = await world.serve()
    assert manager.versions("m") == [1]
    world.errors[2] = []
    await until(lambda: manager.versions("m") == [2])
    await until(lambda: ("unload", 1) in world.events)
    await manager.stop()


async def test_a_model_that_takes_long_to_load_holds_up_no_other_on_a_poll(world: World) -> None:
    manager = await world.serve(ModelControlMode.POLL, repository_poll_seconds=0.01)
    poll = asyncio.create_task(manager.poll())
    world.gate.clear()
    world.publish(1)
    await until(lambda: world.events == [("load", 1)])
    world.publish(2, model="quick")
    await until(lambda: manager.versions("quick") == [2])
    world.publish(3, model="quick", config="# changed")
    await until(lambda: manager.versions("quick") == [3])
    assert manager.states("m") == [(1, VersionState.LOADING, "")]
    world.gate.set()
    await until(lambda: manager.versions("m") == [1])
    poll.cancel()
    await manager.stop()


async def test_a_load_that_is_under_way_at_the_end_holds_up_nothing_and_is_unloaded(
    world: World,
) -> None:
    manager = await world.serve(ModelControlMode.POLL, repository_poll_seconds=0.01)
    poll = asyncio.create_task(manager.poll())
    world.gate.clear()
    world.publish(1)
    await until(lambda: world.events)
    poll.cancel()
    await asyncio.wait_for(manager.stop(), 60)
    assert world.events == [("load", 1)]
    world.gate.set()
    await until(lambda: world.events == [("load", 1), ("unload", 1)])


async def test_a_load_on_request_that_is_under_way_at_the_end_holds_up_nothing(
    world: World,
) -> None:
    world.publish(1)
    world.gate.clear()
    manager = await world.serve(load="")
    loading = asyncio.create_task(manager.load("m"))
    await until(lambda: world.events)
    await asyncio.wait_for(manager.stop(), 60)
    with pytest.raises(ModelportError, match="shutting down"):
        await loading
    world.gate.set()
    await until(lambda: world.events == [("load", 1), ("unload", 1)])


async def test_a_load_that_never_ends_fails_when_its_time_is_up(world: World) -> None:
    world.publish(1)
    world.gate.clear()
    manager = await world.serve(load="", model_load_timeout_seconds=0.05)
    with pytest.raises(ModelportError, match=r"not finish within 0\.05 s.*model-load-timeout-secs"):
        await manager.load("m")
    ((number, state, reason),) = manager.states("m")
    assert (number, state) == (1, VersionState.UNAVAILABLE)
    assert "did not finish" in reason
    await manager.stop()
    world.gate.set()
    await until(lambda: world.events == [("load", 1), ("unload", 1)])


async def test_loads_that_never_end_take_no_core_from_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_threads, "CORE_SECONDS", 0.01)
    world.gate.clear()
    stuck = [f"stuck{number}" for number in range(2 * usable_cores())]
    for model in stuck:
        world.publish(1, model=model)
    world.publish(2, model="quick")
    manager = await world.serve(load="")
    loading = [asyncio.create_task(manager.load(model)) for model in stuck]
    await until(lambda: world.events.count(("load", 1)) == len(stuck))
    await manager.load("quick")
    assert manager.versions("quick") == [2]
    world.gate.set()
    await asyncio.gather(*loading)
    await manager.stop()


# -- making room ----------------------------------------------------------------------------------


async def test_by_default_the_new_version_is_there_before_the_old_one_goes(world: World) -> None:
    world.publish(1)
    manager = await world.serve()
    world.publish(2)
    await manager.load("m")
    await until(lambda: len(world.events) == 3)
    assert world.events == [("load", 1), ("load", 2), ("unload", 1)]
    await manager.stop()


@pytest.mark.parametrize("asked_by", ["flag", "parameter"])
async def test_on_request_the_old_version_is_drained_and_freed_before_the_new_one_loads(
    world: World, asked_by: str
) -> None:
    parameter = (
        'parameters { key: "aspired_version_policy" value { string_value: "resource_preserving" } }'
    )
    world.publish(1, config=parameter if asked_by == "parameter" else "")
    manager = await world.serve(**(ROOM if asked_by == "flag" else {}))
    handle = manager.acquire("m")
    (world.root / "m" / "2").mkdir()
    load = asyncio.create_task(manager.load("m"))
    await until(lambda: manager.states("m")[0][1] is VersionState.UNLOADING)
    await asyncio.sleep(0.02)
    assert world.events == [("load", 1)], "a request is still in flight"
    handle.release()
    await load
    assert world.events == [("load", 1), ("unload", 1), ("load", 2)]
    assert manager.versions("m") == [2]
    await manager.stop()


async def test_what_made_room_comes_back_where_the_new_one_does_not_load(world: World) -> None:
    world.publish(1, 2)
    manager = await world.serve(load="", **ROOM)
    await manager.reload({"m": VersionSettings(VersionPolicy(specific=frozenset({1})))})
    world.errors[2] = Unavailable("not yet")
    with pytest.raises(Unavailable, match="not yet"):
        await manager.reload({"m": VersionSettings(VersionPolicy(specific=frozenset({2})))})
    loads = [("load", 1), ("unload", 1), ("load", 2), ("load", 1)]
    assert world.events == loads
    assert manager.versions("m") == [1]
    assert manager.ready
    await asyncio.sleep(0.1)  # five times what lies between two tries
    assert world.events == loads, "what stands in is not taken away for another try"
    world.errors[2] = []
    await manager.reload({"m": VersionSettings(VersionPolicy(specific=frozenset({2})))})
    assert manager.versions("m") == [2]
    await manager.stop()


# -- elsewhere ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_model_that_only_a_route_names_is_served_once_its_server_is_up(
    world: World, mode: ModelControlMode
) -> None:
    world.remote = Unavailable("connection refused")
    manager = await world.serve(mode, {"far": ROUTE})
    assert manager.index() == [
        {"name": "far", "version": "", "state": "UNAVAILABLE", "reason": "connection refused"}
    ]
    assert not manager.ready
    with pytest.raises(Unavailable):
        manager.get("far")
    world.remote = [1, 4]
    await until(lambda: manager.versions("far") == [1, 4])
    assert manager.ready
    assert served(manager, "far").config.backend == "obedient"
    assert served(manager, "far").artifact.path == Path()
    await until(lambda: quiet(manager))
    await manager.stop()


async def test_a_server_that_cannot_be_asked_any_more_takes_nothing_out_of_service(
    world: World,
) -> None:
    world.remote = [1]
    manager = await world.serve(ModelControlMode.POLL, {"far": ROUTE})
    for answer in (Unavailable("gone"), NotFound("no such model"), []):
        world.remote = answer
        await refresh(manager)
        assert manager.states("far") == [(1, VersionState.READY, "")]
        assert manager.ready
    world.remote = [1, 2]
    await refresh(manager)
    assert manager.versions("far") == [1, 2]
    world.remote = [2]
    await refresh(manager)
    assert manager.versions("far") == [2]
    await manager.stop()


@pytest.mark.parametrize("mode", MODES)
async def test_a_server_that_is_loading_models_is_asked_again_until_it_has_loaded_them(
    world: World, mode: ModelControlMode
) -> None:
    """Its first version may be READY long before the others."""
    world.remote, world.remote_loading = [2], True
    manager = await world.serve(mode, {"far": ROUTE})
    assert manager.versions("far") == [2]
    assert manager.ready
    asked = world.asked
    await until(lambda: world.asked > asked + 2)
    world.remote = Unavailable("it is started again")
    asked = world.asked
    await until(lambda: world.asked > asked + 2)
    assert manager.versions("far") == [2]
    world.remote, world.remote_loading = [1, 2], False
    await until(lambda: manager.versions("far") == [1, 2])
    await until(lambda: quiet(manager))
    await manager.stop()


async def test_versions_that_no_request_can_name_are_not_served(world: World) -> None:
    world.remote = [-1, 0, 2**63]
    manager = await world.serve(routes={"far": ROUTE})
    assert "has no READY version of it" in manager.index()[0]["reason"]
    world.remote = [0, 1]
    await until(lambda: manager.versions("far") == [1])
    await manager.stop()


async def test_a_remote_server_is_asked_again_at_each_load_on_request(world: World) -> None:
    world.remote = [1]
    manager = await world.serve(routes={"far": ROUTE}, load="")
    assert manager.index() == [{"name": "far"}]
    assert world.asked == 0, "nobody wanted it yet"
    await manager.load("far")
    await manager.load("far")
    assert world.events.count(("load", 1)) == 2
    await manager.unload("far")
    assert manager.states("far") == [(1, VersionState.UNAVAILABLE, "unloaded")]
    await manager.stop()


async def test_the_configuration_of_a_route_is_the_models(world: World, tmp_path: Path) -> None:
    config = tmp_path / "elsewhere.pbtxt"
    config.write_text(
        'name: "its"\nmax_batch_size: 7\nversion_policy { latest { num_versions: 1 } }'
    )
    world.remote = [1, 2]
    routes = {
        "far": ModelRoute("obedient", ("h:1",), config=config),
        "lost": ModelRoute("obedient", ("h:1",), config=tmp_path / "nothing"),
    }
    manager = await world.serve(routes=routes)
    assert manager.versions("far") == [2]
    assert served(manager, "far").config.max_batch_size == 7
    reasons = {row["name"]: row.get("reason", "") for row in manager.index()}
    assert "cannot be read" in reasons["lost"]
    assert str(tmp_path) not in reasons["lost"]
    await manager.stop()


async def test_a_route_decides_who_runs_a_model_of_the_repository(world: World) -> None:
    world.publish(1)
    world.publish(1, model="near")
    routes = {"m": ModelRoute("triton", ("h:1",))}
    manager = await world.serve(routes=routes)
    assert sorted(world.found) == ["obedient", "triton"]
    assert served(manager, "m").config.backend == "obedient", "the configuration's own"
    assert served(manager, "m").artifact.route == routes["m"]
    assert world.asked == 0, "its versions are those of the repository"
    await manager.stop()


# -- half written ---------------------------------------------------------------------------------


async def poll_a_slow_writer(world: World) -> tuple[list[list[int]], ModelManager]:
    """The versions that serve after each poll, while version 2 is written between polls."""
    world.publish(1)
    manager = await world.serve(ModelControlMode.POLL)
    folder = world.root / "m" / "2"
    folder.mkdir()
    seen = []
    for part in ("a", "b", "c", "", ""):
        with (folder / "file").open("a") as file:
            file.write(part)
        await refresh(manager)
        seen.append(manager.versions("m"))
    return seen, manager


async def test_a_version_that_is_being_written_is_loaded_once_it_is_the_same_twice(
    world: World,
) -> None:
    seen, manager = await poll_a_slow_writer(world)
    assert seen == [[1], [1], [1], [2], [2]]
    await manager.stop()


async def test_the_check_sees_a_manager_that_loads_at_first_sight(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(found: ModelEntry, _: object, __: object) -> ModelEntry:
        return found

    monkeypatch.setattr(managers.scan, "settled", at_once)
    seen, manager = await poll_a_slow_writer(world)
    assert seen != [[1], [1], [1], [2], [2]]
    await manager.stop()


async def test_a_version_rewritten_in_place_serves_on_until_it_is_the_same_twice(
    world: World,
) -> None:
    world.publish(1)
    manager = await world.serve(ModelControlMode.POLL)
    before = served(manager)
    for part in range(3):
        (world.root / "m" / "1" / f"file{part}").write_text("x")
        await refresh(manager)
        assert served(manager) is before
    await refresh(manager)
    assert served(manager) is not before
    await manager.stop()


async def test_a_configuration_that_is_being_written_is_taken_once_it_is_the_same_twice(
    world: World,
) -> None:
    world.publish(1, 2)
    manager = await world.serve(ModelControlMode.POLL)
    for text in ("# half", "# half of", "version_policy { all { } }"):
        world.configure(text)
        await refresh(manager)
        assert manager.versions("m") == [2]
        assert world.events == [("load", 2)]
    await refresh(manager)
    assert manager.versions("m") == [1, 2]
    await manager.stop()


async def test_a_version_with_a_manifest_is_loaded_at_first_sight(world: World) -> None:
    world.publish(1)
    manager = await world.serve(ModelControlMode.POLL)
    staged = world.root / ".staged"
    staged.mkdir()
    (staged / "file").write_text("whole")
    manifest.write(staged)
    staged.rename(world.root / "m" / "2")
    await refresh(manager)
    assert manager.versions("m") == [2]
    await manager.stop()


async def test_a_model_that_appears_is_served_after_its_second_look(world: World) -> None:
    world.publish(1)
    manager = await world.serve(ModelControlMode.POLL)
    world.publish(1, model="late")
    await refresh(manager)
    assert manager.names() == ["m"]
    await refresh(manager)
    assert manager.versions("late") == [1]
    await manager.stop()


async def test_a_model_is_unloaded_after_the_load_of_the_ensemble_that_needs_it(
    world: World,
) -> None:
    world.publish(1, model="step")
    maps = 'input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }'
    world.publish(2, model="whole")
    config = world.root / "whole/config.pbtxt"
    config.write_text(
        config.read_text().replace('backend: "obedient"', 'platform: "ensemble"')
        + f'ensemble_scheduling {{ step {{ model_name: "step" model_version: -1 {maps} }} }}'
    )
    world.gate.clear()
    manager = await world.serve(load="")
    loading = asyncio.create_task(manager.load("whole"))
    await until(lambda: world.events == [("load", 1)])
    unloading = asyncio.create_task(manager.unload("step"))
    await asyncio.sleep(0)
    world.gate.set()
    await asyncio.gather(loading, unloading)
    assert world.events == [("load", 1), ("load", 2), ("unload", 2), ("unload", 1)]
    await manager.stop()
