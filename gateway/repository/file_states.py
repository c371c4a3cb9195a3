"""The state of a version's files when its checks begin, for comparison once it is loaded.

Checks and runtimes open a file by its name, one after the other, so what was checked may not be
what was loaded. The kernel sets the time of a file's last change (ctime) on every write, link and
rename; a program that restores the other times cannot restore this one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.scan import ModelEntry, VersionEntry

#: The identity, size and times of a file; a link has those of its target.
FileState = tuple[int, int, int, int, int]


class VersionFiles:
    """The files of a version of the model ``entry``, as they are now.

    Raises:
        IntegrityError: a folder or a file cannot be read.
    """

    def __init__(self, entry: ModelEntry, version: VersionEntry) -> None:
        self._folder = version.path
        #: Neighbours of a single file, outside of a repository, are not part of its version.
        alone = version.path == entry.path
        self._prefix = "" if alone else f"{entry.repository_name}/{version.number}/"
        self._names = [name for name, *_ in version.fingerprint] if alone else None
        self._before = self._read()

    def check(self) -> None:
        """Compare the files with their earlier states.

        Raises:
            IntegrityError: naming the first file that was added, removed, replaced or written.
        """
        now = self._read()
        for name in sorted(self._before.keys() | now.keys()):
            if self._before.get(name) != now.get(name):
                raise IntegrityError(
                    f"'{self._prefix}{name}' changed while it was loading; publish into a new "
                    "version folder"
                )

    def _read(self) -> dict[str, FileState | None]:
        names = _below(self._folder, set()) if self._names is None else self._names
        return {name: self._state(name) for name in names}

    def _state(self, name: str) -> FileState | None:
        """The state of a file; None: there is none, or a dangling link."""
        try:
            found = (self._folder / name).stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise IntegrityError(f"'{name}' cannot be read: {error.strerror}") from error
        times = found.st_mtime_ns, found.st_ctime_ns
        return found.st_dev, found.st_ino, found.st_size, *times


def _below(folder: Path, seen: set[tuple[int, int]]) -> Iterator[str]:
    """Every file below ``folder``, also behind links to folders; a folder is entered once."""
    for name in untrusted_files.below(folder):
        yield name
        linked = folder / name
        if os.path.islink(linked) and linked.is_dir():
            found = linked.stat()
            if (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                yield from (f"{name}/{inner}" for inner in _below(linked, seen))
