"""A file of lines, one for each event, which a thread makes and appends.

Requests only append to a bounded queue. Events that find no place are counted, and a line says how
many are missing. Lines are appended, and nothing is ever deleted: a file that has reached its
largest size is renamed, with the time in its name. Several processes may append to one file.
"""

from __future__ import annotations

import errno
import json
import os
import select
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import structlog

from modelport.gateway.errors import Unavailable

log = structlog.get_logger("modelport.telemetry")

Event = TypeVar("Event")

#: Events that wait for the disk.
MAX_WAITING: Final = 10_000
STANDARD_OUTPUT: Final = "-"
#: Time for what still waits when the gateway stops, as nobody may read standard output any more.
CLOSE_SECONDS: Final = 2.0
#: The bytes that one system call appends to a file without those of another process between them.
#: A pipe divides what is longer than ``PIPE_BUF``.
MOST_BYTES: Final = 64 * 1024


class LogFile(Generic[Event]):
    """The log of one process; all processes of a gateway append to the same file.

    Args:
        line: Makes the line of an event, with its end; the thread calls it.
        option: The option of the command that names the file, without its dashes.
        target: A file, or ``-`` for standard output.
        max_bytes: Size at which the file is renamed; None for never.
        linger_seconds: How long a line may wait for others, to be written by the same system call.

    Raises:
        Unavailable: The file cannot be written.
    """

    def __init__(
        self,
        line: Callable[[Event], bytes],
        option: str,
        target: str,
        max_bytes: int | None = None,
        linger_seconds: float = 0.0,
    ) -> None:
        self._line = line
        self._name = option.replace("-", " ")
        self._path = None if target == STANDARD_OUTPUT else Path(target)
        self._max_bytes = max_bytes
        self._linger_seconds = linger_seconds
        #: Lines that were not written, because the queue was full or the disk failed.
        self.dropped = 0
        self._told = 0
        self._waiting: deque[Event] = deque()
        #: The lines that the thread has made and not written.
        self._made: deque[bytes] = deque()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._descriptor, self._most = -1, MOST_BYTES
        #: Whether the last line was written in part.
        self._is_torn = False
        self._renewal_failed = False
        try:
            self._open()
        except OSError as error:
            reason = str(error.strerror).lower()
            if error.errno == errno.ENXIO:
                reason = "no process reads this pipe"
            raise Unavailable(
                f"--{option} '{target}' cannot be written ({reason}); name a file in a folder "
                "that this user may write"
            ) from error
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def append(self, event: Event) -> None:
        """Queue an event, which no longer changes, without waiting."""
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append(event)
        if not self._wake.is_set():
            self._wake.set()

    def reopen(self) -> None:
        """Leave a file that another program has renamed at once, as after SIGUSR1.

        Each line looks for that anyway.
        """
        self._wake.set()

    def close(self) -> None:
        """Write what waits, and end the thread, unless its writing waits for another process."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)
        if self._path is not None and not self._thread.is_alive():
            os.close(self._descriptor)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            if self._linger_seconds:
                self._closing.wait(self._linger_seconds)
            self._wake.clear()
            self._write_all()
        self._write_all()

    def _write_all(self) -> None:
        if not self._waiting:
            self._renew()
        while lines := self._take():
            self._append(lines)
        missing = self.dropped - self._told
        told = dump({"time": stamp(datetime.now(UTC)), "dropped": missing})
        if missing and self._append([told]):
            self._told += missing

    def _take(self) -> list[bytes]:
        """Make the next lines, as many as one system call writes in one piece."""
        lines: list[bytes] = []
        size = 0
        while self._made or self._waiting:
            if not self._made:
                self._made.append(self._line(self._waiting.popleft()))
            size += len(self._made[0])
            if lines and size > self._most:
                break
            lines.append(self._made.popleft())
        return lines

    def _append(self, lines: list[bytes]) -> bool:
        """Write lines; whether all were written. Those behind a torn one wait again."""
        self._renew()
        begun = b"\n" if self._is_torn else b""
        content = begun + b"".join(lines)
        try:
            if self._path is not None and not os.fstat(self._descriptor).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the file was deleted")
            written = os.write(self._descriptor, content)
        except OSError as error:
            self._drop(error, len(lines))
            return False
        self._is_torn = not content[:written].endswith(b"\n")
        if written < len(content):
            whole = content.count(b"\n", len(begun), written)
            self._made.extendleft(reversed(lines[whole + self._is_torn :]))
        if self._is_torn:
            self._drop(OSError(errno.ENOSPC, "a line was written in part"), 1)
        return written == len(content)

    def _drop(self, error: OSError, count: int) -> None:
        if self.dropped == self._told:
            log.error(f"the {self._name} cannot be written", reason=error.strerror)
        self.dropped += count

    def _renew(self) -> None:
        """Open the file again if it was renamed, and rename it if it has become too large.

        If that fails, for example in a folder that this user may not write, the old file stays in
        use.
        """
        if self._path is None:
            return
        try:
            if self._is_moved(self._path):
                self._open()
        except OSError as error:
            if not self._renewal_failed:
                log.error(f"the {self._name} cannot be opened again", reason=error.strerror,
                          kept="the old file")  # fmt: skip
            self._renewal_failed = True
        else:
            self._renewal_failed = False

    def _is_moved(self, path: Path) -> bool:
        """Rename the file if it has become too large; return whether it has another name now."""
        found = os.fstat(self._descriptor)
        try:
            current = path.stat()
            if (current.st_dev, current.st_ino) != (found.st_dev, found.st_ino):
                return True
            if self._max_bytes is None or found.st_size < self._max_bytes:
                return False
            path.rename(path.with_name(f"{path.name}.{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"))
        except FileNotFoundError:  # or another process was first
            pass
        return True

    def _open(self) -> None:
        """Open the file; a pipe never makes the thread wait for its reader."""
        before = self._descriptor
        if self._path is None:
            self._descriptor = sys.stdout.fileno()
        else:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._descriptor = os.open(self._path, flags, 0o640)
        if before >= 0:
            os.close(before)
        is_file = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        self._most = min(MOST_BYTES if is_file else select.PIPE_BUF, self._max_bytes or MOST_BYTES)


def stamp(at: datetime) -> str:
    """Format a time of a line."""
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def dump(fields: dict[str, Any]) -> bytes:
    """Make a line of ASCII, as other characters may be commands of a terminal."""
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
