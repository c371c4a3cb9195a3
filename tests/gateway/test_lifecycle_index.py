"""What the index and the counters tell while versions come and go, on disks that fail."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from modelport.gateway.errors import Unavailable
from modelport.gateway.models.model import State
from modelport.gateway.repository import scan
from modelport.gateway.settings import ModelControlMode
from tests.gateway.lifecycles import World, until


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "repository")


async def test_a_version_that_is_drained_is_told_until_it_is_gone(world: World) -> None:
    world.publish(2)
    lifecycle = await world.serve()
    handle = lifecycle.acquire("m", 2)
    world.publish(3)
    for _ in range(2):
        await lifecycle.load("m")
        assert lifecycle.states("m") == [(2, State.UNLOADING, ""), (3, State.READY, "")]
    shutil.rmtree(world.root / "m" / "2")
    await lifecycle.load("m")
    assert lifecycle.states("m")[0] == (2, State.UNLOADING, "")
    handle.release()
    await until(lambda: lifecycle.states("m") == [(3, State.READY, "")])
    await lifecycle.stop()


async def test_versions_that_are_gone_leave_no_counters(world: World) -> None:
    world.publish(2)
    lifecycle = await world.serve()
    for number in range(3, 20):
        world.publish(number)
        shutil.rmtree(world.root / "m" / str(number - 1))
        await lifecycle.load("m")
    await lifecycle.load("m")
    assert [number for _, number, _ in lifecycle.statistics()] == [19]
    await lifecycle.stop()


async def test_a_repository_that_cannot_be_read_is_said_without_its_path(world: World) -> None:
    world.publish(2)
    lifecycle = await world.serve()
    away = world.root.rename(world.root.with_name("away"))
    with pytest.raises(Unavailable, match=r"^a model repository cannot be read: No such file"):
        await lifecycle.load("m")
    with pytest.raises(Unavailable):
        await world.serve()
    assert lifecycle.states("m") == [(2, State.READY, "")]
    away.rename(world.root)
    await lifecycle.load("m")
    await lifecycle.stop()


async def test_one_model_that_cannot_be_read_hides_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(2)
    world.publish(2, model="other")
    lifecycle = await world.serve()
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
    await lifecycle.refresh()
    assert lifecycle.versions("other") == [3]
    assert lifecycle.states("m") == [(2, State.READY, "Input/output error")]
    monkeypatch.undo()
    await lifecycle.refresh()
    assert lifecycle.states("m") == [(2, State.READY, "")]
    await lifecycle.stop()


@pytest.mark.parametrize("number", ["99999999999999999999", "-99999999999999999999"])
async def test_a_configuration_with_a_number_out_of_range_costs_its_model_alone(
    world: World, number: str
) -> None:
    world.publish(2, config=f"model_warmup {{ batch_size: {number} }}")
    world.publish(2, model="other")
    lifecycle = await world.serve()
    assert lifecycle.versions("other") == [2]
    assert lifecycle.broken() == ["m"]
    await lifecycle.stop()


async def test_a_poll_leaves_models_alone_that_have_not_changed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(2)
    world.publish(2, model="other")
    lifecycle = await world.serve(ModelControlMode.POLL, repository_poll_seconds=0.01)
    brought: list[str] = []
    reconcile = lifecycle._reconciler.reconcile_soon

    def watched(model, retrying=False):  # type: ignore[no-untyped-def]
        brought.append(model.entry.name)
        reconcile(model, retrying)

    monkeypatch.setattr(lifecycle._reconciler, "reconcile_soon", watched)
    polling = asyncio.create_task(lifecycle.poll())
    world.publish(3, model="other")
    await until(lambda: lifecycle.versions("other") == [3])
    assert set(brought) == {"other"}
    polling.cancel()
    await lifecycle.stop()


async def test_a_stop_ends_a_load_of_many_versions_after_the_one_it_is_at(world: World) -> None:
    world.publish(1, 2, 3, config="version_policy { all { } }")
    world.gated = 3
    world.gate.clear()
    lifecycle = await world.serve(load="")
    loading = asyncio.create_task(lifecycle.load("m"))
    await until(lambda: world.events)
    stopping = asyncio.create_task(lifecycle.stop())
    await asyncio.sleep(0)  # it has begun
    world.gate.set()
    async with asyncio.timeout(5):
        await stopping
        await asyncio.wait([loading])
        await until(lambda: len(world.events) > 1)
    assert world.events == [("load", 3), ("unload", 3)]
