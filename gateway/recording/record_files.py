"""The files of recorded traffic: a folder for each model, in a folder or in object storage.

A file that is being written ends in ``.jsonl.part``, and is renamed when it is complete. Lines are
appended whole. An object appears at once, when enough lines have come.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import quote

import structlog

from modelport.gateway.errors import ModelportError, Unavailable
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.repository.storage.objects import ObjectStore

log = structlog.get_logger("modelport.recording")

SUFFIX, PART = ".jsonl", ".jsonl.part"
#: The folder of requests that name no model that is served.
NO_MODEL = "_"
#: Names that ``new_name`` makes; other files are not ours to delete.
_OWN = re.compile(r"\d{8}T\d{6}\.\d{6}Z-\d+\.jsonl(\.part)?")
#: Longer names of models are cut, with a hash in place of their end.
MOST_NAME_BYTES = 160


class Written(NamedTuple):
    """The numbers of lines that have reached the files, and of those that are lost."""

    written: int = 0
    lost: int = 0

    def __add__(self, other: tuple[int, ...]) -> Written:  # type: ignore[override]
        return Written(self.written + other[0], self.lost + other[1])


class RecordSink(Protocol):
    """The place where records are written, by one thread."""

    def write(self, model: str, lines: list[bytes]) -> Written: ...

    def tick(self, closing: bool = False) -> Written:
        """Complete the files that are old enough, or all."""


class RecordFile(NamedTuple):
    """A file of records.

    Attributes:
        key: Its path in the folder of records.
        modified_at: Seconds since the epoch.
    """

    key: str
    size: int
    modified_at: float

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]


def folder_of(model: str) -> str:
    """The name of a model's folder; none leads out of the folder of records."""
    name = quote(model, safe="") or NO_MODEL
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > MOST_NAME_BYTES:
        name = f"{name[:MOST_NAME_BYTES]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return name


def new_name() -> str:
    """The name of a file that begins now, unique for each process."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{os.getpid()}"


class _OpenFile:
    """A file that is being written."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.begun = path, 0, time.monotonic()


class FolderSink:
    """Appends records to files in a folder.

    Args:
        rotate_bytes, rotate_seconds: Size and age at which a file is complete.
        most_bytes: Of all files; the oldest complete ones are deleted.

    Raises:
        Unavailable: The folder cannot be written.
    """

    def __init__(
        self, folder: Path, rotate_bytes: int, rotate_seconds: float, most_bytes: int
    ) -> None:
        self._folder, self._rotate_bytes, self._most_bytes = folder, rotate_bytes, most_bytes
        self._rotate_seconds = rotate_seconds
        self._open: dict[str, _OpenFile] = {}
        self._has_failed = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / f".{new_name()}"
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            probe.unlink()
        except OSError as error:
            reason = str(error.strerror).lower()
            raise Unavailable(
                f"--record '{folder}' cannot be written ({reason}); name a folder that this user "
                "may write"
            ) from error

    def write(self, model: str, lines: list[bytes]) -> Written:
        """Append lines, all or none."""
        try:
            file = self._open.get(model)
            if file is not None and file.size >= self._rotate_bytes:
                self._complete(model)
                self._prune()
                file = None
            if file is None:
                below = self._folder / folder_of(model)
                below.mkdir(mode=0o700, exist_ok=True)
                file = self._open[model] = _OpenFile(below / f"{new_name()}{PART}")
            _append(file, b"".join(lines))
        except OSError as error:
            if isinstance(error, FileNotFoundError):  # somebody has deleted the folder
                self._open.pop(model, None)
            self._fail(error)
            return Written(0, len(lines))
        self._has_failed = False
        return Written(len(lines))

    def tick(self, closing: bool = False) -> Written:
        before = time.monotonic() - self._rotate_seconds
        due = [m for m, file in self._open.items() if closing or file.begun <= before]
        try:
            for model in due:
                self._complete(model)
            if due:
                self._prune()
        except OSError as error:
            self._fail(error)
        return Written()

    def _complete(self, model: str) -> None:
        path = self._open.pop(model).path
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(path.name.removesuffix(PART) + SUFFIX))

    def _prune(self) -> None:
        try:
            prune(self._folder, self._most_bytes, None, 2 * self._rotate_seconds)
        except OSError as error:  # no line is lost for it
            log.error("old records cannot be deleted", reason=error.strerror, file=error.filename)

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            log.error("records cannot be written", reason=error.strerror)
        self._has_failed = True


def _append(file: _OpenFile, content: bytes) -> None:
    """Append to a file; a part of it that was written is taken back.

    Raises:
        OSError: Nothing was written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(file.path, flags, 0o600)
    try:
        before = os.fstat(descriptor).st_size
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, before)
            raise
        file.size = before + len(content)
    finally:
        os.close(descriptor)


class ObjectSink:
    """Writes records as objects, which are held in memory until they are large or old enough."""

    def __init__(self, location: Location, rotate_bytes: int, rotate_seconds: float) -> None:
        self._store = ObjectStore(location)
        self._rotate_bytes, self._rotate_seconds = rotate_bytes, rotate_seconds
        self._held: dict[str, list[bytes]] = {}
        self._size, self._begun, self._name = 0, 0.0, ""
        self._has_failed = False

    def write(self, model: str, lines: list[bytes]) -> Written:
        if not self._held:
            # Readers take the time in the name as that of the first record.
            self._begun, self._name = time.monotonic(), new_name()
        self._held.setdefault(model, []).extend(lines)
        self._size += sum(map(len, lines))
        return self._flush() if self._size >= self._rotate_bytes else Written()

    def tick(self, closing: bool = False) -> Written:
        is_old = time.monotonic() - self._begun >= self._rotate_seconds
        return self._flush() if self._held and (is_old or closing) else Written()

    def _flush(self) -> Written:
        made, held = Written(), self._held
        self._held, self._size = {}, 0
        for model, lines in held.items():
            try:
                self._store.write(f"{folder_of(model)}/{self._name}{SUFFIX}", b"".join(lines))
            except ModelportError as error:
                if not self._has_failed:
                    log.error("records cannot be written", reason=str(error))
                self._has_failed = True
                made += Written(0, len(lines))
            else:
                self._has_failed = False
                made += Written(len(lines))
        return made


def files_in(where: Path | Location) -> list[RecordFile]:
    """The files of records in a folder, a model's folder or object storage, the oldest first.

    Raises:
        ModelportError: They cannot be listed.
    """
    if isinstance(where, Location):
        found = [
            RecordFile(key, each.size_bytes, each.modified.timestamp() if each.modified else 0.0)
            for key, each in ObjectStore(where).listing().items()
            if key.endswith(SUFFIX)
        ]
    else:
        found = list(_local_files(where))
    return sorted(found, key=lambda each: (each.name, each.key))


def _local_files(folder: Path) -> Iterator[RecordFile]:
    for below in (folder, *sorted(p for p in _entries(folder) if _is_folder(p))):
        for path in _entries(below):
            if path.name.endswith((SUFFIX, PART)) and path.is_file() and not path.is_symlink():
                with contextlib.suppress(FileNotFoundError):
                    found = path.stat()
                    key = path.relative_to(folder).as_posix()
                    yield RecordFile(key, found.st_size, found.st_mtime)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _is_folder(path: Path) -> bool:
    """Whether a folder may be one of a model; a disk's ``lost+found`` is none."""
    is_other = path.name.startswith(".") or path.name == "lost+found"
    return not is_other and path.is_dir() and not path.is_symlink()


def prune(
    where: Path | Location, most_bytes: int | None, before: float | None, part_seconds: float
) -> list[RecordFile]:
    """Delete the oldest files until they are small enough and young enough; return them.

    Files with names that no gateway gives are neither counted nor deleted.

    Args:
        before: Files last changed earlier than this time are deleted; None: none for its age.
        part_seconds: A file that is being written is only deleted if nothing has changed it for
            so long: its process has ended.

    Raises:
        ModelportError, OSError: A file cannot be deleted.
    """
    files = [each for each in files_in(where) if _OWN.fullmatch(each.name)]
    now, gone = time.time(), []
    size = sum(each.size for each in files)
    store = ObjectStore(where) if isinstance(where, Location) else None
    for each in files:
        is_large = most_bytes is not None and size > most_bytes
        is_old = before is not None and each.modified_at < before
        is_open = each.name.endswith(PART) and now - each.modified_at < part_seconds
        if is_open or not (is_large or is_old):
            continue
        if store is not None:
            store.delete([each.key])
        elif isinstance(where, Path):
            (where / each.key).unlink(missing_ok=True)
        size -= each.size
        gone.append(each)
    return gone
