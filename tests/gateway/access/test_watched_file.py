"""Files that are watched: each change is seen, and an invalid one changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from modelport.gateway.access.watched_file import FileWatcher


class Numbers:
    """The number that a file holds, as it was used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.used: list[int] = []
        self.watcher = FileWatcher()
        self.watch = self.watcher.watch("number", [path], self.load, self.used.append)

    def load(self) -> int:
        return int(self.path.read_text())


@pytest.fixture
def numbers(tmp_path: Path) -> Numbers:
    path = tmp_path / "number"
    path.write_text("1")
    return Numbers(path)


async def test_a_file_is_loaded_at_once_and_again_after_each_change(numbers: Numbers) -> None:
    await numbers.watcher.poll()
    assert numbers.used == [1]
    for number in range(2, 10):  # of one size, within one tick of the file system's clock
        numbers.path.write_text(str(number))
        await numbers.watcher.poll()
    assert numbers.used == list(range(1, 10))


async def test_a_change_that_keeps_size_and_modification_time_is_seen(numbers: Numbers) -> None:
    before = numbers.path.stat()
    numbers.path.write_text("2")
    os.utime(numbers.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    await numbers.watcher.poll()
    assert numbers.used == [1, 2]


async def test_content_that_is_touched_but_not_changed_is_not_loaded(numbers: Numbers) -> None:
    numbers.path.write_text("1")
    os.utime(numbers.path)
    await numbers.watcher.poll()
    assert numbers.used == [1]


async def test_a_symbolic_link_that_kubernetes_replaces_is_followed(tmp_path: Path) -> None:
    for number in ("1", "2"):
        (tmp_path / f"v{number}").mkdir()
        (tmp_path / f"v{number}" / "number").write_text(number)
        os.utime(tmp_path / f"v{number}" / "number", (1, 1))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "number").symlink_to("..data/number")
    numbers = Numbers(tmp_path / "number")
    (tmp_path / "new").symlink_to("v2")
    (tmp_path / "new").rename(tmp_path / "..data")
    await numbers.watcher.poll()
    assert numbers.used == [1, 2]


async def test_invalid_content_is_logged_and_counted_and_changes_nothing(numbers: Numbers) -> None:
    with capture_logs() as logs:
        numbers.path.write_text("two")
        await numbers.watcher.poll()
        await numbers.watcher.poll()
        numbers.path.unlink()
        await numbers.watcher.poll()
    assert [log["event"] for log in logs] == ["access number not reloaded"] * 2
    assert "two" in logs[0]["reason"]
    assert numbers.watcher.errors == {"number": 2}
    numbers.path.write_text("3")
    await numbers.watcher.poll()
    assert numbers.used == [1, 3]


def test_invalid_content_at_the_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("one")
    with pytest.raises(ValueError, match="one"):
        Numbers(tmp_path / "number")


async def test_a_watch_that_is_forgotten_sees_nothing(numbers: Numbers) -> None:
    numbers.watcher.forget(numbers.watch)
    numbers.path.write_text("2")
    await numbers.watcher.poll()
    assert numbers.used == [1]
