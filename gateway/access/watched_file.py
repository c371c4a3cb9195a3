"""Files that are read again when their content changes: rules, keys, certificates.

A watch polls with ``stat``, which follows symbolic links, so it also sees Kubernetes replace the
link ``..data`` of a mounted volume. Files are read in a thread. If new content is invalid, the old
stays in use, with a line in the log and a count in ``FileWatcher.errors``.
"""

from __future__ import annotations

import asyncio
import hashlib
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog

from modelport.gateway.cli.errors import first_line

log = structlog.get_logger("modelport.access")

T = TypeVar("T")

POLL_SECONDS = 0.5
#: A file this young may change again without a new modification time.
_RACY_SECONDS = 2.0
_Stat = tuple[int, ...] | None


@dataclass(eq=False)
class FileWatch:
    """Files that are loaded together; ``FileWatcher.watch`` makes it."""

    name: str
    paths: Sequence[Path]
    load: Callable[[], Any]
    use: Callable[[Any], None]
    stats: list[_Stat] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def changed(self) -> bool:
        """Whether the content of a file has changed since the last call."""
        stats = [_stat(path) for path in self.paths]
        if stats == self.stats and not any(map(_is_young, stats)):
            return False
        self.stats = stats
        digests = [_digest(path) for path in self.paths]
        if digests == self.digests:
            return False
        self.digests = digests
        return True


class FileWatcher:
    """Polls files; one per process.

    Attributes:
        errors: Number of failed reloads by name of the watch, for metrics.
        reloaded: Called after each reload, to drop what was derived from files.
    """

    def __init__(self) -> None:
        self._watches: list[FileWatch] = []
        self._wake = asyncio.Event()
        #: One poll at a time: after it, what has changed before it is in use.
        self._polling = asyncio.Lock()
        self.errors: dict[str, int] = {}
        self.reloaded: list[Callable[[], None]] = []

    def watch(
        self, name: str, paths: Sequence[Path], load: Callable[[], T], use: Callable[[T], None]
    ) -> FileWatch:
        """Load ``paths`` and use them, now and again after each change.

        Args:
            name: Names the files in the log and in metrics: ``rules``, ``keys``, ``certificate``.
            paths: All files that ``load`` reads. Each change of any of them is a change.
            load: Reads and checks the files; it is called in a thread for reloads.
            use: Takes what ``load`` returned; after a change, on the event loop.

        Raises:
            Exception: As ``load`` and ``use``. Errors of reloads are logged instead.
        """
        watch = FileWatch(name, paths, load, use)
        watch.changed()
        use(load())
        self._watches.append(watch)
        self.errors.setdefault(name, 0)
        return watch

    def forget(self, watch: FileWatch) -> None:
        """Watch these files no longer."""
        self._watches.remove(watch)

    def wake(self) -> None:
        """Look for changes now, as after SIGHUP."""
        self._wake.set()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self.poll()

    async def poll(self) -> None:
        """Load the files that have changed."""
        async with self._polling:
            for watch in list(self._watches):
                if await asyncio.to_thread(watch.changed):
                    await self._reload(watch)

    async def _reload(self, watch: FileWatch) -> None:
        try:
            loaded = await asyncio.to_thread(watch.load)
            try:
                watch.use(loaded)
            finally:
                for drop in self.reloaded:
                    drop()
        except Exception as error:
            self.errors[watch.name] += 1
            reason = first_line(error)
            log.error(f"access {watch.name} not reloaded", reason=reason, kept="the old ones")
        else:
            log.info(f"access {watch.name} reloaded")


def _stat(path: Path) -> _Stat:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _is_young(found: _Stat) -> bool:
    return found is not None and abs(time.time_ns() - found[3]) < _RACY_SECONDS * 1e9


def _digest(path: Path) -> bytes:
    """SHA-256 of the file's content, and who may read it; empty if it cannot be read.

    A file that was refused because others could read it is read again after ``chmod``.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for its writer
            return b""
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b""
    return content + f"{found.st_mode} {found.st_uid} {found.st_gid}".encode()
