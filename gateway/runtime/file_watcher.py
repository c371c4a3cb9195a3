"""Files that are read again when their content changes: rules, keys, certificates, credentials.

A watch polls with ``stat``, which follows symbolic links, so it also sees Kubernetes replace the
link ``..data`` of a mounted volume. If new content is invalid, the old stays in use, with a line in
the log and a count in ``FileWatcher.errors``. It is tried again now and then: another file that it
names may be the wrong one.

With workers, the parent watches. It reads, checks and accepts; workers take what it has accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import structlog

from modelport.gateway.errors import first_line
from modelport.gateway.runtime.gateway_files import FILES, Contents, Rows

log = structlog.get_logger("modelport.access")

T = TypeVar("T")

POLL_SECONDS = 0.5
#: Time between two attempts to use the same files.
RETRY_SECONDS = 5.0
Check = Callable[[Contents], None]


class FileWatch:
    """Files that are loaded together; ``FileWatcher.watch`` and ``follow`` make it."""

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        load: Callable[[Contents], T],
        use: Callable[[T], None],
        check: Check | None = None,
    ) -> None:
        self.name = name
        self.key = name, tuple(paths)
        self._load: Callable[[Contents], Any] = load
        self.use: Callable[[Any], None] = use
        self._check = check
        self._state: object = None
        self._seen: Contents | None = None
        #: The files that could not be used, and the reason.
        self._failure: tuple[Contents, str] | None = None
        #: The monotonic time from which they are tried again.
        self._retry_at = math.inf
        #: The content in use.
        self.accepted: Contents | None = None

    def changed(self) -> Contents | None:
        """Return the files if they differ from those that the last call saw, or are due again."""
        is_due = time.monotonic() >= self._retry_at
        state = FILES.state(self.key)
        if state is not None and state == self._state and not is_due:
            return None
        contents = FILES.read(self.key)
        self._state = state
        if contents == self._seen and not is_due:
            return None
        self._seen = contents
        return contents

    def failed(self, contents: Contents, reason: str) -> bool:
        """Note that files cannot be used; return whether that is new."""
        before, self._failure = self._failure, (contents, reason)
        self._retry_at = time.monotonic() + RETRY_SECONDS
        return before != self._failure

    def succeeded(self, contents: Contents) -> None:
        """Note that files are in use."""
        self.accepted, self._failure, self._retry_at = contents, None, math.inf

    def retry(self) -> None:
        """Try files that could not be used again at the next poll."""
        if self._failure is not None:
            self._retry_at = -math.inf

    def load(self, contents: Contents) -> Any:
        """Check and load; raise as the functions that do."""
        if self._check is not None and FILES.is_disk:
            self._check(contents)
        return self._load(contents)

    def poll(self) -> bool:
        """Load and use the files if they have changed; return whether they have.

        Raises:
            Exception: They are invalid, and not in use.
        """
        contents = self.changed()
        if contents is None:
            return False
        self.use(self.load(contents))
        self.succeeded(contents)
        return True


class FileWatcher:
    """Polls files; one per process.

    Attributes:
        errors: Number of failed reloads by name of the watch, for metrics.
        reloaded: Called after each reload, to drop what was derived from files.
        publish: Awaited after the reloads of a poll, to pass what was accepted to workers.
    """

    def __init__(self) -> None:
        self._watches: list[FileWatch] = []
        self._wake = asyncio.Event()
        #: One poll at a time: after it, what has changed before it is in use.
        self._polling = asyncio.Lock()
        self.errors: dict[str, int] = {}
        self.reloaded: list[Callable[[], None]] = []
        self.publish: Callable[[], Awaitable[None]] | None = None

    def watch(
        self,
        name: str,
        paths: Sequence[Path],
        load: Callable[[Contents], T],
        use: Callable[[T], None],
        check: Check | None = None,
    ) -> FileWatch:
        """Load files and use them, now and again after each change.

        Args:
            name: Names the files in the log and in metrics: ``rules``, ``keys``, ``certificate``.
            load: Makes of the contents what ``use`` takes; in a thread for reloads. It depends on
                nothing else that changes, so all processes come to the same.
            use: Takes what ``load`` returned; after a change, on the event loop.
            check: Refuses contents that should not come into use now, such as an expired
                certificate. Workers do not ask it about contents in use.

        Raises:
            Exception: As ``load``, ``use`` and ``check``. Errors of reloads are logged instead.
        """
        watch = FileWatch(name, paths, load, use, check)
        watch.poll()
        self.add(watch)
        return watch

    def add(self, watch: FileWatch) -> None:
        """Poll a watch from now on."""
        self._watches.append(watch)
        self.errors.setdefault(watch.name, 0)

    def forget(self, watch: FileWatch) -> None:
        """Watch these files no longer."""
        with contextlib.suppress(ValueError):  # it is forgotten already
            self._watches.remove(watch)

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to poll."""
        return bool(self._watches)

    def rows(self) -> Rows:
        """The files in use, for workers."""
        watches = ((watch.key, watch.accepted) for watch in list(self._watches))
        return FILES.rows((key, files) for key, files in watches if files is not None)

    def wake(self) -> None:
        """Look for changes now, and try again what has failed, as after SIGHUP."""
        for watch in self._watches:
            watch.retry()
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
            reloaded = [watch.name for watch in list(self._watches) if await self._reload(watch)]
            if reloaded and self.publish is not None:
                await self.publish()
            for name in reloaded if FILES.is_disk else ():
                log.info(f"access {name} reloaded")

    async def _reload(self, watch: FileWatch) -> bool:
        """Load and use the files if they have changed; return whether that was done."""
        contents = await asyncio.to_thread(watch.changed)
        if contents is None:
            return False
        try:
            loaded = await asyncio.to_thread(watch.load, contents)
            try:
                watch.use(loaded)
            finally:
                for drop in self.reloaded:
                    drop()
        except Exception as error:
            reason = first_line(error)
            if watch.failed(contents, reason):
                self.errors[watch.name] += 1
                log.error(f"access {watch.name} not reloaded", reason=reason, kept="the old ones")
            return False
        watch.succeeded(contents)
        return True
