"""The audit log: one line of JSON for each refusal and each control operation.

A thread writes; requests only append to a bounded queue. Events that find no place are counted, and
a line says how many are missing. Lines are appended, and nothing is ever deleted: a file that has
reached its largest size is renamed, with the time in its name.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections import deque
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import structlog

from modelport.gateway.errors import Unavailable

log = structlog.get_logger("modelport.access")

#: Events that wait for the disk.
MAX_WAITING: Final = 10_000
#: Longer names are cut.
MAX_TEXT: Final = 256
STANDARD_OUTPUT: Final = "-"
#: Time for what still waits when the gateway stops, as nobody may read standard output any more.
CLOSE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """A refusal or a control operation.

    Attributes:
        principal: Name of the caller.
        credential: Fingerprint of its credential, never the credential.
        source: Address of the client.
        operation: Operation of the rules; ``action`` is what was asked for: ``load``, ``rollback``.
        outcome: ``allowed``, ``refused`` or ``failed``.
        reason: Message of the refusal or of the failure.
    """

    principal: str
    credential: str
    source: str
    operation: str
    action: str
    model: str
    version: str
    outcome: str
    reason: str = ""
    request_id: str = ""


class AuditLog:
    """The audit log of one process; all processes of a gateway append to the same file.

    Args:
        target: A file, or ``-`` for standard output.
        max_bytes: Size at which the file is renamed; None for never.

    Raises:
        Unavailable: The file cannot be written.
    """

    def __init__(self, target: str, max_bytes: int | None = None) -> None:
        self._path = None if target == STANDARD_OUTPUT else Path(target)
        self._max_bytes = max_bytes
        #: Events that were not written, because the queue was full or the disk failed.
        self.dropped = 0
        self._told = 0
        self._waiting: deque[tuple[datetime, AuditEvent]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._descriptor = -1
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
                f"--audit-log '{target}' cannot be written ({reason}); name a file in a folder "
                "that this user may write"
            ) from error
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def write(self, event: AuditEvent) -> None:
        """Queue ``event``, without waiting."""
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append((datetime.now(UTC), event))
        self._wake.set()

    def reopen(self) -> None:
        """Leave a file that another program has renamed at once, as after SIGUSR1.

        Each line looks for that anyway.
        """
        self._wake.set()

    def close(self) -> None:
        """Write what waits, and end the thread, unless its writing waits for another process."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)
        if self._path is not None and not self._thread.is_alive():
            os.close(self._descriptor)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait()
            self._wake.clear()
            self._write_all()
        self._write_all()

    def _write_all(self) -> None:
        if not self._waiting:
            self._renew()
        while self._waiting:
            self._append(_line(*self._waiting.popleft()))
        missing = self.dropped - self._told
        if missing and self._append(_dump({"time": _stamp(datetime.now(UTC)), "dropped": missing})):
            self._told += missing

    def _append(self, line: bytes) -> bool:
        """Write a line; whether it was written."""
        self._renew()
        begun = b"\n" if self._is_torn else b""
        try:
            if self._path is not None and not os.fstat(self._descriptor).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the file was deleted")
            written = os.write(self._descriptor, begun + line) - len(begun)
        except OSError as error:
            self._drop(error)
            return False
        self._is_torn = written < len(line)
        if self._is_torn:
            self._drop(OSError(errno.ENOSPC, "a line was written in part"))
        return not self._is_torn

    def _drop(self, error: OSError) -> None:
        if self.dropped == self._told:
            log.error("the audit log cannot be written", reason=error.strerror)
        self.dropped += 1

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
                log.error("the audit log cannot be opened again", reason=error.strerror,
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


def _stamp(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _line(at: datetime, event: AuditEvent) -> bytes:
    fields = {
        name: value[:MAX_TEXT].encode("utf-8", "replace").decode()
        for name, value in asdict(event).items()
        if value
    }
    return _dump({"time": _stamp(at), **fields})


def _dump(fields: dict[str, Any]) -> bytes:
    """Make a line of ASCII, as other characters may be commands of a terminal."""
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
