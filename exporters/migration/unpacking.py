"""Unpacking of an untrusted zip or ``.tar.gz``, within limits and into one folder.

Names must stay inside the folder. Only plain files and folders are written, none twice, and a
member's size counts before it is written.
"""

from __future__ import annotations

import errno
import gzip
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from modelport.gateway.errors import IntegrityError, plain_reason
from modelport.gateway.repository.artifact_checks import zip_guard
from modelport.gateway.repository.artifact_checks.torch_archive import DAMAGE

MAX_MEMBERS = 10_000
MAX_DEPTH = 16
#: Largest growth: weights compress little, so a larger one was made to fill a disk.
MAX_GROWTH, ALWAYS_ALLOWED_BYTES = 100, 64 << 20
#: Largest single read: ``tarfile`` reads extended headers whole, at any size they claim.
MAX_READ_BYTES = 4 << 20
COPY_BYTES = 1 << 20
GZIP = b"\x1f\x8b"

_DRIVE = re.compile(r"[A-Za-z]:")


@dataclass(frozen=True, slots=True)
class _Member:
    """A member of an archive; ``problem`` is a reason to refuse it besides its name and size."""

    name: str
    size: int
    folder: bool
    problem: str
    open: Callable[[], Any]


def unpack(path: Path, space: Path) -> None:
    """Write the members of the archive at ``path`` into the empty folder ``space``.

    Raises:
        IntegrityError: the archive is damaged or malicious; the message names the member.
    """
    most = max(ALWAYS_ALLOWED_BYTES, path.stat().st_size * MAX_GROWTH)
    total = 0
    try:
        tarred = not zip_guard.is_zip(path) and _starts(path, GZIP)
        members = _tarred(path, most) if tarred else _zipped(path)
        for count, member in enumerate(members):
            total += member.size
            if count >= MAX_MEMBERS:
                raise IntegrityError(f"'{path.name}' has more than {MAX_MEMBERS} members")
            if total > most:
                raise _too_large(path.name, most)
            if problem := _name_problem(member.name) or member.problem:
                raise IntegrityError(f"'{path.name}': {problem}")
            _write(path.name, space, member)
    except (*DAMAGE, tarfile.TarError, OSError) as error:
        # Damaged gzip raises an OSError without a number; a zip may claim to begin before itself.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        reason = plain_reason(error)
        raise IntegrityError(f"'{path.name}' is damaged ({reason}); copy it again") from error


def _starts(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _zipped(path: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(path) as file:
        zip_guard.check(path)
        for info in file.infolist():
            size, opened = info.file_size, partial(file.open, info)
            yield _Member(info.filename, size, info.is_dir(), "", opened)


def _tarred(path: Path, most: int) -> Iterator[_Member]:
    with gzip.open(path) as stream:
        bounded: Any = _Bounded(stream, path.name, most)
        with tarfile.open(fileobj=bounded, mode="r:") as tar:
            for info in tar:
                plain = (info.isreg() or info.isdir()) and not info.issparse()
                problem = "" if plain else f"'{info.name}' is not a plain file"
                opened = partial(tar.extractfile, info)
                yield _Member(info.name, info.size, info.isdir(), problem, opened)


def _name_problem(name: str) -> str:
    parts = name.removesuffix("/").split("/")
    safe = (
        len(parts) <= MAX_DEPTH
        and not any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
        and "\\" not in name
        and name.isprintable()
        and not _DRIVE.match(name)
    )
    return "" if safe else f"the member name {name[:200]!r} is not safe"


def _write(archive: str, space: Path, member: _Member) -> None:
    """Write one member; an existing file was a member of the same name."""
    target = space / PurePosixPath(member.name)
    try:
        if member.folder:
            target.mkdir(parents=True, exist_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as out, member.open() as source:
            shutil.copyfileobj(source, out, COPY_BYTES)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise IntegrityError(f"'{archive}' contains '{member.name}' twice") from error


def _too_large(archive: str, most: int) -> IntegrityError:
    return IntegrityError(
        f"'{archive}' would unpack to more than {most} bytes, {MAX_GROWTH} times its size"
    )


class _Bounded:
    """A file for ``tarfile``: at most ``most`` bytes, in reads that fit into memory."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, name: str, most: int) -> None:
        self._stream, self._name, self._most = stream, name, most
        self.tell = stream.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_READ_BYTES:
            raise IntegrityError(f"'{self._name}' has a header of {size} bytes")
        return self._stream.read(size)

    def seek(self, position: int) -> int:
        if position > self._most + COPY_BYTES:  # headers and padding add little
            raise _too_large(self._name, self._most)
        return self._stream.seek(position)
