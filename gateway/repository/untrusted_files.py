"""Files of other people: regular ones alone, of a bounded size, in folders of a bounded depth."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from modelport.gateway.errors import IntegrityError, InvalidArgument

#: The file of the model's folder with this path in it; raises ``OSError`` or ``ValueError``.
Companion = Callable[[str], Path]

MAX_DEPTH = 64
MAX_FILES = 100_000
#: Sizes of a ``config.pbtxt`` and of a certificate.
MAX_CONFIG_BYTES, MAX_CERTIFICATE_BYTES = 1 << 20, 16 << 20


def open_file(path: Path) -> io.BufferedReader:
    """A regular file for reading; opening a pipe in its place would block forever.

    Raises:
        OSError: it cannot be read, or is a pipe, a device or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read(path: Path, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes.

    Raises:
        OSError: it cannot be read.
        IntegrityError: it is larger, or grows.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise IntegrityError(f"'{path.name}' is larger than {most} bytes")
        content = file.read(size + 1)  # ``read(most)`` would allocate that much
    if len(content) > size:
        raise IntegrityError(f"'{path.name}' grows while it is read")
    return content


def read_companion(
    companion: Companion, folder: str, filename: str, subject: str, most: int, remedy: str
) -> bytes:
    """The content of a file that a configuration names, of at most ``most`` bytes.

    Args:
        folder: that of the model's folder in which such files lie.
        subject: what the file is for, in the message.

    Raises:
        InvalidArgument: it cannot be read.
        IntegrityError: it is larger, or grows.
    """
    try:
        return read(companion(f"{folder}/{filename}"), most)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a file of the model's folder"
        raise InvalidArgument(
            f"'{folder}/{filename[:256]}' of {subject} cannot be read: {reason}; add the file, or "
            f"set {remedy}"
        ) from error


def read_text(path: Path, most: int) -> str:
    """The text of a regular file of at most ``most`` bytes of UTF-8.

    Raises:
        OSError: it cannot be read, or is larger.
        UnicodeDecodeError: it is not UTF-8.
    """
    try:
        return read(path, most).decode()
    except IntegrityError as error:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path)) from error


def below(folder: Path) -> Iterator[str]:
    """Every file below ``folder`` as a POSIX path relative to it, in order.

    A folder that is a link counts as a file: nothing behind it is looked at.

    Raises:
        IntegrityError: a folder cannot be listed, is too deep, or holds too many files.
    """
    waiting, found = [("", 0)], 0
    while waiting:
        inside, depth = waiting.pop()
        try:
            with os.scandir(folder / inside) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            if not inside and isinstance(error, FileNotFoundError | NotADirectoryError):
                return
            raise IntegrityError(f"'{inside}' cannot be listed: {error.strerror}") from error
        folders = []
        for entry in entries:
            name = f"{inside}/{entry.name}".lstrip("/")
            if entry.is_dir(follow_symlinks=False):
                folders.append((name, depth + 1))
                continue
            found += 1
            yield name
        waiting += reversed(folders)
        if depth > MAX_DEPTH:
            raise IntegrityError(f"its folders are nested more than {MAX_DEPTH} levels deep")
        if found + len(waiting) > MAX_FILES:
            raise IntegrityError(f"it holds more than {MAX_FILES} files")
