"""The repository index and the counters while versions load and unload, and on failing disks."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from modelport.gateway.errors import NotFound, Unavailable
from modelport.gateway.models.model import VersionState
from modelport.gateway.repository import scan
from modelport.gateway.settings import ModelControlMode
from tests.gateway.models.managers import World, refresh
from tests.polling import until


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "repository")


async def test_a_draining_version_is_listed_until_it_is_unloaded(world: World) -> None:
    world.publish(2)
    manager = await world.serve()
    handle = manager.acquire("m", 2)
    world.publish(3)
    for _ in range(2):
        await manager.load("m")
        assert manager.states("m") == [(2, VersionState.UNLOADING, ""), (3, VersionState.READY, "")]
    shutil.rmtree(world.root / "m" / "2")
    await manager.load("m")
    assert manager.states("m")[0] == (2, VersionState.UNLOADING, "")
    handle.release()
    await until(lambda: manager.states("m") == [(3, VersionState.READY, "")])
    await manager.stop()


async def test_versions_that_are_gone_leave_no_counters(world: World) -> None:
    world.publish(2)
    manager = await world.serve()
    for number in range(3, 20):
        world.publish(number)
        shutil.rmtree(world.root / "m" / str(number - 1))
        await manager.load("m")
    await manager.load("m")
    assert [number for _, number, _ in manager.statistics()] == [19]
    await manager.stop()


async def test_an_error_tells_what_was_served_from_what_never_was(world: World) -> None:
    world.publish(1, 2, config="version_policy { all {} }")
    manager = await world.serve()
    shutil.rmtree(world.root / "m" / "1")
    await refresh(manager)
    with pytest.raises(NotFound, match="'m' version 1 is not at ready state"):
        manager.get("m", 1)
    with pytest.raises(NotFound, match="'m' version 7 is not found"):
        manager.get("m", 7)
    shutil.rmtree(world.root / "m")
    await refresh(manager)
    with pytest.raises(NotFound, match="'m' has no available versions"):
        manager.get("m")
    with pytest.raises(NotFound, match="'nobody' is not found"):
        manager.get("nobody")
    assert manager.index() == []
    await manager.stop()


async def test_a_repository_that_cannot_be_read_is_said_without_its_path(world: World) -> None:
    world.publish(2)
    manager = await world.serve()
    away = world.root.rename(world.root.with_name("away"))
    with pytest.raises(Unavailable, match=r"^a model repository cannot be read: No such file"):
        await manager.load("m")
    with pytest.raises(Unavailable):
        await world.serve()
    assert manager.states("m") == [(2, VersionState.READY, "")]
    away.rename(world.root)
    await manager.load("m")
    await manager.stop()


async def test_one_model_that_cannot_be_read_hides_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(2)
    world.publish(2, model="other")
    manager = await world.serve()
    broken = world.root.resolve() / "m"
    is_dir, iterdir = Path.is_dir, Path.iterdir

    def failing(which):  # type: ignore[no-untyped-def]
        def call(path: Path) -> object:
            if path == broken:
                raise OSError(5, "Input/output error")
            return which(path)

        return call

    monkeypatch.setattr(Path, "is_dir", failing(is_dir))
    monkeypatch.setattr(Path, "iterdir", failing(iterdir))
    assert scan.scan([world.root])["m"].problem == "Input/output error"
    world.publish(3, model="other")
    await refresh(manager)
    assert manager.versions("other") == [3]
    assert manager.states("m") == [(2, VersionState.READY, "Input/output error")]
    monkeypatch.undo()
    await refresh(manager)
    assert manager.states("m") == [(2, VersionState.READY, "")]
    await manager.stop()


@pytest.mark.parametrize("number", ["99999999999999999999", "-99999999999999999999"])
async def test_a_configuration_with_a_number_out_of_range_costs_its_model_alone(
    world: World, number: str
) -> None:
    world.publish(2, config=f"model_warmup {{ batch_size: {number} }}")
    world.publish(2, model="other")
    manager = await world.serve()
    assert manager.versions("other") == [2]
    assert manager.broken() == ["m"]
    await manager.stop()


async def test_a_poll_leaves_models_alone_that_have_not_changed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(2)
    world.publish(2, model="other")
    manager = await world.serve(ModelControlMode.POLL, repository_poll_seconds=0.01)
    brought: list[str] = []
    reconcile = manager._reconciler.reconcile_soon

    def watched(model, retrying=False):  # type: ignore[no-untyped-def]
        brought.append(model.entry.name)
        reconcile(model, retrying)

    monkeypatch.setattr(manager._reconciler, "reconcile_soon", watched)
    polling = asyncio.create_task(manager.poll())
    world.publish(3, model="other")
    await until(lambda: manager.versions("other") == [3])
    assert set(brought) == {"other"}
    polling.cancel()
    await manager.stop()


async def test_a_stop_ends_a_load_of_many_versions_after_the_one_it_is_at(world: World) -> None:
    world.publish(1, 2, 3, config="version_policy { all { } }")
    world.gated = 3
    world.gate.clear()
    manager = await world.serve(load="")
    loading = asyncio.create_task(manager.load("m"))
    await until(lambda: world.events)
    stopping = asyncio.create_task(manager.stop())
    await asyncio.sleep(0)  # it has begun
    world.gate.set()
    async with asyncio.timeout(60):
        await stopping
        await asyncio.wait([loading])
        await until(lambda: len(world.events) > 1)
    assert world.events == [("load", 3), ("unload", 3)]


async def test_what_is_ignored_in_a_repository_has_a_row_and_is_logged_once(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    world.publish(1)
    (world.root / "m" / "v2").mkdir()
    (world.root / "bad\nname" / "1").mkdir(parents=True)
    for name in ("net.onnx", "README.md", ".hidden"):
        (world.root / name).touch()
    manager = await world.serve(ModelControlMode.POLL)
    for _ in range(2):
        await refresh(manager)
    rows = {row["name"]: (row["state"], row["reason"]) for row in manager.index()}
    assert rows.keys() == {"m", "net.onnx", r"bad\nname"}
    assert rows["m"] == ("READY", "")
    assert rows["net.onnx"][0] == "UNAVAILABLE"
    assert "NAME/1/model.onnx" in rows["net.onnx"][1]
    assert manager.index(ready_only=True) == [row for row in manager.index() if row["name"] == "m"]
    assert manager.names() == ["m"]
    assert manager.ready, "a model may still be copied"
    assert list(manager.model_states()) == [("m", "READY")]
    said = capfd.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "ignored" in line]
    for name in ("net.onnx", "README.md", "m/v2", r"bad\nname"):
        assert sum(name in line for line in lines) == 1, name
    await manager.stop()
