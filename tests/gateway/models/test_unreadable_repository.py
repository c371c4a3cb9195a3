"""A repository that cannot be read for one look: what serves stays, to the bit."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from modelport.gateway.models import manager as managers
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import VersionState
from modelport.gateway.repository.scan import ModelEntry
from modelport.gateway.settings import ModelControlMode
from tests.gateway.models.managers import World

#: The system calls of a look, as Python names them.
CALLS = ((os, "stat"), (os, "lstat"), (os, "scandir"), (os, "listdir"), (io, "open"))
ERRORS = (errno.EACCES, errno.EMFILE)
CONFIG = (
    "version_policy { all { } } parameters { key: 'version_label.a' value { string_value: '1' } }"
)


class Faults:
    """Counts the calls that name something below ``root``; the one numbered ``fails`` does."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.count, self.fails, self.error = str(root), 0, -1, 0
        for module, name in CALLS:
            monkeypatch.setattr(module, name, self._wrapped(getattr(module, name)))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(path: Any, *args: Any, **keys: Any) -> Any:
            if isinstance(path, str | Path) and str(path).startswith(self.root):
                self.count += 1
                if self.count - 1 == self.fails:
                    raise OSError(self.error, os.strerror(self.error), str(path))
            return call(path, *args, **keys)

        return wrapper

    def arm(self, number: int, error: int) -> None:
        self.count, self.fails, self.error = 0, number, error


async def look(manager: ModelManager) -> None:
    """Poll once, and wait for the consequences."""
    await manager.follow()
    for model in manager._models.values():
        async with model.lock:
            pass
    while manager._reconciler._reconciling:
        await next(iter(manager._reconciler._reconciling))


def state(manager: ModelManager, world: World) -> tuple[Any, ...]:
    if "m" not in manager.names():
        return ("gone", tuple(world.events))
    model = manager._models["m"]
    assert model.config is not None
    return (
        manager.versions("m"), dict(model.labels), model.config.max_batch_size,
        model.entry.config_text, tuple(world.events),
    )  # fmt: skip


async def changes(world: World, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    """Every fault, one a look, after which something was not as before."""
    world.publish(1, 2, config=CONFIG)
    for number in (1, 2):
        (world.root / "m" / str(number) / "file").write_text("x")
    manager = await world.serve(ModelControlMode.POLL)
    await look(manager)
    before, found = state(manager, world), []
    assert before[:3] == ([1, 2], {"a": 1}, 4)
    with monkeypatch.context() as patches:
        faults = Faults(world.root, patches)
        faults.arm(-1, 0)
        await look(manager)
        calls = faults.count
        assert calls > 10
        for number in range(calls):
            for error in ERRORS:
                for when in ("at once", "at the next look", "at the one after it"):
                    faults.arm(number if when == "at once" else -1, error)
                    await look(manager)
                    if state(manager, world) != before:
                        found.append((number, error, when))
                        before = state(manager, world)
        faults.arm(-1, 0)
    await manager.stop()
    return found


@pytest.mark.thorough
async def test_no_call_that_fails_in_one_look_changes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await changes(World(tmp_path), monkeypatch) == []


@pytest.mark.thorough
async def test_the_check_sees_a_manager_that_takes_an_entry_with_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def naive(found: ModelEntry, before: Any, accepted: Any) -> ModelEntry | None:
        return found

    monkeypatch.setattr(managers.scan, "settled", naive)
    assert await changes(World(tmp_path), monkeypatch)


@pytest.mark.parametrize("content", [b"max_batch_size: 1 # \xc3", b"\xff", b"\x00" * 2**20 + b"x"])
async def test_a_configuration_that_is_half_written_or_cannot_be_is_not_derived_later(
    tmp_path: Path, content: bytes
) -> None:
    world = World(tmp_path)
    world.publish(1, 2, config=CONFIG)
    manager = await world.serve(ModelControlMode.POLL)
    before, text = state(manager, world), (tmp_path / "m" / "config.pbtxt").read_bytes()
    for _ in range(3):
        (tmp_path / "m" / "config.pbtxt").write_bytes(content)
        for _ in range(2):
            await look(manager)
            assert state(manager, world) == before
        (tmp_path / "m" / "config.pbtxt").write_bytes(text)
        for _ in range(3):
            await look(manager)
            assert state(manager, world) == before
    changed = text.replace(b"max_batch_size: 4", b"max_batch_size: 8")
    (tmp_path / "m" / "config.pbtxt").write_bytes(changed)
    await look(manager)
    assert state(manager, world) == before
    await look(manager)
    assert state(manager, world)[2] == 8, "what is readable twice is taken"
    await manager.stop()


async def test_a_model_that_cannot_be_read_when_it_appears_is_served_with_its_own_configuration(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    manager = await world.serve(ModelControlMode.POLL)
    world.publish(1, 2, config=CONFIG)
    text = (tmp_path / "m" / "config.pbtxt").read_bytes()
    (tmp_path / "m" / "config.pbtxt").write_bytes(b"\xc3")
    await look(manager)
    await look(manager)
    (tmp_path / "m" / "config.pbtxt").write_bytes(text)
    for _ in range(3):
        await look(manager)
        assert world.events in ([], [("load", 1), ("load", 2)], [("load", 2), ("load", 1)])
    assert state(manager, world)[:3] == ([1, 2], {"a": 1}, 4)
    await manager.stop()


async def test_the_index_tells_the_reason_of_what_serves_and_cannot_be_read(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publish(1)
    manager = await world.serve(ModelControlMode.POLL)
    text = (tmp_path / "m" / "config.pbtxt").read_bytes()
    (tmp_path / "m" / "config.pbtxt").write_bytes(b"\xc3")
    await look(manager)
    assert manager.states("m") == [(1, VersionState.READY, "'config.pbtxt' is not UTF-8")]
    assert manager.ready
    (tmp_path / "m" / "config.pbtxt").write_bytes(text)
    await look(manager)
    assert manager.states("m") == [(1, VersionState.READY, "")]
    await manager.stop()


async def test_a_file_that_could_not_be_read_when_a_version_loaded_is_tried_again(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.errors[1] = [PermissionError(errno.EACCES, "Permission denied")]
    world.publish(1)
    manager = await world.serve(ModelControlMode.NONE)
    assert any(failure.transient for failure in manager._models["m"].failures())
    await manager.stop()


async def test_a_repository_that_cannot_be_listed_is_logged_once_and_so_is_its_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = await World(tmp_path).serve(ModelControlMode.POLL)

    async def unlistable() -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    scan = manager._discovery.scan
    with capture_logs() as logs:
        monkeypatch.setattr(manager._discovery, "scan", unlistable)
        for _ in range(3):
            await manager.follow()
        monkeypatch.setattr(manager._discovery, "scan", scan)
        for _ in range(3):
            await manager.follow()
    assert [(line["log_level"], line["event"]) for line in logs] == [
        ("warning", "the model repository cannot be listed"),
        ("warning", "the model repository can be listed again"),
    ]
    await manager.stop()
