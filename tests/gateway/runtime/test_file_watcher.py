"""Files that are watched: each change is seen, and an invalid one changes nothing."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from modelport.gateway.runtime import file_watcher, gateway_files
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.runtime.gateway_files import Contents, GatewayFiles, Rows


class Numbers:
    """The number that a file holds, as it was used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.used: list[int] = []
        self.watcher = FileWatcher()
        self.watch = self.watcher.watch("number", [path], self.load, self.used.append)

    def load(self, contents: Contents) -> int:
        return int(contents[0].read())


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


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rows], GatewayFiles]:
    """Let watches that are made from now on take files from a parent, and not from the disk."""

    def receive(rows: Rows) -> GatewayFiles:
        monkeypatch.setattr(file_watcher, "FILES", GatewayFiles())
        file_watcher.FILES.receive(json.loads(json.dumps(rows)))
        return file_watcher.FILES

    return receive


async def test_a_worker_uses_what_its_parent_has_accepted_whatever_is_on_disk(
    numbers: Numbers, in_worker: Callable[[Rows], GatewayFiles]
) -> None:
    numbers.path.write_text("2")
    await numbers.watcher.poll()
    numbers.path.write_text("broken")
    await numbers.watcher.poll()
    second = numbers.watcher.rows()
    numbers.path.write_text("3")
    await numbers.watcher.poll()
    third = numbers.watcher.rows()
    numbers.path.write_text("broken")
    files = in_worker(second)
    worker = Numbers(numbers.path)  # it starts when the file is broken, and has not seen the 2
    with capture_logs() as logs:
        for rows in (second, third):
            files.receive(rows)
            await worker.watcher.poll()
            await worker.watcher.poll()
    assert numbers.used == [1, 2, 3]
    assert worker.used == [2, 3]
    assert logs == []


async def test_what_was_accepted_is_published_once_a_poll_before_it_is_logged(
    numbers: Numbers,
) -> None:
    published: list[Rows] = []

    async def publish() -> None:
        published.append(numbers.watcher.rows())
        assert logs == []

    numbers.watcher.publish = publish
    with capture_logs() as logs:
        numbers.path.write_text("2")
        await numbers.watcher.poll()
    assert [log["event"] for log in logs] == ["access number reloaded"]
    with capture_logs() as logs:
        numbers.path.write_text("two")
        await numbers.watcher.poll()
    assert len(published) == 1


async def test_only_the_parent_checks_whether_content_may_come_into_use(
    tmp_path: Path, in_worker: Callable[[Rows], GatewayFiles]
) -> None:
    path, watcher, used = tmp_path / "number", FileWatcher(), list[bytes]()
    path.write_text("1")

    def check(contents: Contents) -> None:
        if contents[0].read() != b"1":
            raise ValueError("not now")

    def load(contents: Contents) -> bytes:
        return contents[0].read()

    watcher.watch("number", [path], load, used.append, check)
    path.write_text("2")
    await watcher.poll()
    assert watcher.errors == {"number": 1}
    in_worker(GatewayFiles().rows([(("number", (path,)), (gateway_files.read(path),))]))
    FileWatcher().watch("number", [path], load, used.append, check)
    assert used == [b"1", b"2"]


def test_files_that_are_read_once_are_the_same_in_workers(
    tmp_path: Path, in_worker: Callable[[Rows], GatewayFiles]
) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9")  # no Unicode
    path.write_bytes(b"\xff\x00")
    parent = GatewayFiles()
    assert parent.keep("routes", path).read() == b"\xff\x00"
    path.unlink()
    assert in_worker(parent.rows([])).keep("routes", path).read() == b"\xff\x00"
    with pytest.raises(FileNotFoundError):
        GatewayFiles().keep("routes", path).read()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # it has a writer, which writes nothing
    assert gateway_files.read(tmp_path / "pipe").content == b""
    os.write(writer, b"token")
    os.close(writer)


def test_content_at_a_path_is_on_no_disk_and_gone_afterwards() -> None:
    with gateway_files.at_path(b"secret") as path:
        assert Path(path).read_bytes() == Path(path).read_bytes() == b"secret"
        assert os.readlink(path).startswith("/memfd:")
    assert not os.path.exists(path)


def test_a_folder_in_place_of_a_file_takes_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        assert gateway_files.read(tmp_path).error == errno.EISDIR
    assert len(os.listdir("/proc/self/fd")) == before
