"""The ``config.pbtxt`` of a model in a repository: in a folder, or in object storage.

It is replaced as a whole, and only if it is still what was read: of two processes that change it at
the same time, one has to read it again.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Protocol

from modelport.gateway.errors import InvalidArgument, NotFound, Unavailable
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.storage.location import Location

_MOST_BYTES = untrusted_files.MAX_CONFIG_BYTES


class ConfigFile(Protocol):
    """Methods block."""

    def read(self) -> str | None:
        """Read the file; None if there is none.

        Raises:
            ModelportError, OSError: it cannot be read.
        """

    def replace(self, text: str, known: str | None) -> None:
        """Write the file in place of the text ``known`` that was read.

        Raises:
            Unavailable: it has another text by now, or the object store does not respond.
            ModelportError, OSError: it cannot be written.
        """


def config_file(repository: Path | Location, model: str) -> ConfigFile:
    """Return the configuration of ``model`` in ``repository``."""
    if isinstance(repository, Path):
        return _FolderFile(repository / model)
    return _StoredFile(repository, model)


class _FolderFile:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / configuration.FILENAME

    def read(self) -> str | None:
        try:
            return _decoded(untrusted_files.read(self._file, _MOST_BYTES))
        except FileNotFoundError:
            return None

    def replace(self, text: str, known: str | None) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if self.read() != known:
                raise _changed(self._folder.name)
            _write(self._file, text)
        finally:
            os.close(descriptor)


class _StoredFile:
    def __init__(self, location: Location, model: str) -> None:
        from modelport.gateway.repository.storage.objects import ObjectStore  # slow imports

        self._store = ObjectStore(location)
        self._key, self._model = f"{model}/{configuration.FILENAME}", model

    def read(self) -> str | None:
        try:
            return _decoded(self._store.read(self._key, _MOST_BYTES + 1))
        except NotFound:
            return None

    def replace(self, text: str, known: str | None) -> None:
        before = None if known is None else known.encode()
        if not self._store.replace(self._key, text.encode(), before):
            raise _changed(self._model)


def _decoded(content: bytes) -> str:
    if len(content) > _MOST_BYTES:
        raise InvalidArgument(f"'{configuration.FILENAME}' is larger than {_MOST_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"'{configuration.FILENAME}' is not UTF-8") from error


def _changed(model: str) -> Unavailable:
    return Unavailable(
        f"another process has changed the {configuration.FILENAME} of '{model}'; try again"
    )


def _write(file: Path, text: str) -> None:
    """Replace ``file`` atomically; its permissions stay."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, file.stat().st_mode if file.exists() else 0o644)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
