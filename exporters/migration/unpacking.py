"""Unpacking a zip or a ``.tar.gz`` that anyone may have made: bounded, and inside one folder.

Nothing is believed: names stay inside, only plain files and folders are taken, none twice, and a
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

from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import zip_guard
from modelport.gateway.repository.torch_archive import DAMAGE

MAX_MEMBERS = 10_000
MAX_DEPTH = 16
#: Weights shrink little. What grows beyond this was made to fill a disk.
MAX_GROWTH, ALWAYS_ALLOWED_BYTES = 100, 64 << 20
#: ``tarfile`` reads extended headers whole, of whatever size they claim to be.
MAX_READ_BYTES = 4 << 20
COPY_BYTES = 1 << 20
GZIP = b"\x1f\x8b"

_DRIVE = re.compile(r"[A-Za-z]:")


@dataclass(frozen=True, slots=True)
class _Member:
    """``problem``: why it is refused, where its name and its size are not the reason."""

    name: str
    size: int
    folder: bool
    problem: str
    open: Callable[[], Any]


def unpack(path: Path, space: Path) -> None:
    """Write what the archive at ``path`` holds into the empty folder ``space``.

    Raises:
        IntegrityError: it is damaged, or made to harm: the message names the member.
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
        # Gzip's damage is an OSError without a number; a zip may say that it begins before itself.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
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
    """What is there already was a member of the same name."""
    target = space / PurePosixPath(member.name)
    try:
        if member.folder:
            target.mkdir(parents=True, exist_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as out, member.open() as source:
            shutil.copyfileobj(source, out, COPY_BYTES)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise IntegrityError(f"'{archive}' holds '{member.name}' twice") from error


def _too_large(archive: str, most: int) -> IntegrityError:
    return IntegrityError(
        f"'{archive}' would unpack to more than {most} bytes, {MAX_GROWTH} times its size"
    )


class _Bounded:
    """What ``tarfile`` needs of a file: at most ``most`` bytes of it, in reads that fit memory."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, name: str, most: int) -> None:
        self._stream, self._name, self._most = stream, name, most
        self.tell = stream.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_READ_BYTES:
            raise IntegrityError(f"'{self._name}' has a header of {size} bytes")
        return self._stream.read(size)

    def seek(self, position: int) -> int:
        if position > self._most + COPY_BYTES:  # headers and padding count little
            raise _too_large(self._name, self._most)
        return self._stream.seek(position)
