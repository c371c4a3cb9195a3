"""The files that a gateway is configured by, as all of its processes see them.

One process reads them: the only one, or the parent of the workers. Workers use the content that
their parent has accepted last, whatever is on disk when they start.
"""

from __future__ import annotations

import base64
import errno
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

#: Larger files cannot be read.
MAX_FILE_BYTES = 16 * 1024 * 1024
#: A file this young may change again without a new modification time.
_RACY_SECONDS = 2.0


class FileContent(NamedTuple):
    """A file as it was at one time.

    Attributes:
        mode: ``st_mode``; 0 if the file cannot be read.
        error: The reason why it cannot be read (``errno``), or 0.
    """

    path: Path
    content: bytes
    mode: int = 0
    error: int = 0

    def read(self) -> bytes:
        """Return the content.

        Raises:
            OSError: The file could not be read.
        """
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return self.content


Contents = tuple[FileContent, ...]
#: What the files are read for, and their paths.
FilesKey = tuple[str, tuple[Path, ...]]
#: Accepted files as JSON, for ``GatewayFiles.receive``.
Rows = list[Any]


def read(path: Path, wait: bool = False) -> FileContent:
    """Read a file; if it is a pipe, only with ``wait`` for its writer."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | (0 if wait else os.O_NONBLOCK)
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_FILE_BYTES + 1) or b""
    except OSError as error:
        return FileContent(path, b"", 0, error.errno or errno.EIO)
    if len(content) > MAX_FILE_BYTES:
        return FileContent(path, b"", 0, errno.EFBIG)
    return FileContent(path, content, mode)


class GatewayFiles:
    """The source of files for one process: the disk, or what its parent has accepted."""

    def __init__(self) -> None:
        self._received: dict[FilesKey, Contents] | None = None
        #: Files that are read once, at the start.
        self._kept: dict[FilesKey, Contents] = {}

    @property
    def is_disk(self) -> bool:
        """Whether this process accepts content, and its parent does not do that."""
        return self._received is None

    def receive(self, rows: Rows) -> None:
        """Use these contents from now on, and not the disk."""
        received = ((name, tuple(map(_from_row, files))) for name, files in rows)
        self._received = {(name, tuple(f.path for f in files)): files for name, files in received}

    def read(self, key: FilesKey) -> Contents:
        """Return the files as they are now."""
        return self._accepted(key) or tuple(map(read, key[1]))

    def state(self, key: FilesKey) -> object:
        """Return a value that is equal for two reads only if the files are; None: unknown."""
        accepted = self._accepted(key)
        if accepted is not None:
            return accepted
        stats = tuple(_stat(path) for path in key[1])
        return None if any(map(_is_young, stats)) else stats

    def keep(self, name: str, path: Path) -> FileContent:
        """Read a file that is not watched; workers get the same content however late they start."""
        key: FilesKey = name, (path,)
        accepted = self._accepted(key)
        if accepted is not None:
            return accepted[0]
        file = read(path, wait=True)
        self._kept[key] = (file,)
        return file

    def pass_on(self, name: str, content: bytes | None) -> None:
        """Pass a downloaded document to workers that start later; None withdraws it."""
        key: FilesKey = name, (Path(),)
        if content is None:
            self._kept.pop(key, None)
        else:
            self._kept[key] = (FileContent(Path(), content),)

    def passed_on(self, name: str) -> bytes | None:
        """Return the document that the parent has passed on, or None."""
        accepted = self._accepted((name, (Path(),)))
        return None if accepted is None else accepted[0].content

    def _accepted(self, key: FilesKey) -> Contents | None:
        """Return what the parent has accepted; None in the parent, and for files it does not watch.

        A thread may ask while ``receive`` replaces everything.
        """
        received = self._received
        return None if received is None else received.get(key)

    def rows(self, watched: Iterable[tuple[FilesKey, Contents]]) -> Rows:
        """Make the rows for ``receive`` of a worker: what was kept, and what is watched."""
        return [
            [name, list(map(_row, files))] for (name, _), files in (*self._kept.items(), *watched)
        ]


#: The files of this process.
FILES = GatewayFiles()


@contextmanager
def at_path(content: bytes) -> Iterator[str]:
    """Make a path for libraries that read files alone; the content does not get on a disk."""
    descriptor = os.memfd_create("modelport")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"


def _row(file: FileContent) -> list[Any]:
    path = os.fsencode(file.path).decode("latin-1")  # JSON has no other bytes
    return [path, base64.b64encode(file.content).decode(), file.mode, file.error]


def _from_row(row: list[Any]) -> FileContent:
    path, content, mode, error = row
    path = Path(os.fsdecode(path.encode("latin-1")))
    return FileContent(path, base64.b64decode(content), mode, error)


def _stat(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev


def _is_young(found: tuple[int, ...]) -> bool:
    return bool(found) and abs(time.time_ns() - found[0]) < _RACY_SECONDS * 1e9
