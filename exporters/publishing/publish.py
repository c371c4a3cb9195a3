"""Atomic publishing of a version: a reader of the repository sees all of it or nothing.

    <repository>/.modelport-<random>/model/config.pbtxt        staged, invisible by its leading dot
    <repository>/.modelport-<random>/model/<version>/...       fsynced
        └── one rename: model/ for a new model, model/<version>/ for a known one

The owner locks its staging folder for as long as it lives, so a folder that can be locked
belongs to a dead process and is removed by the next publisher.

Object storage has neither renames nor locks: see ``object_storage``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelport.exporters.proof import certificate
from modelport.exporters.publishing.contract import PublishedVersion, check_contract, next_version
from modelport.exporters.runtime.interruption import finally_call
from modelport.exporters.runtime.temporary_folder import temporary_folder
from modelport.gateway.errors import ModelportError
from modelport.gateway.repository import config, manifest, signing, untrusted_files
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.scan import VERSION_NAME
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.types import ModelSignature

_STAGED_VERSION = "1"

#: Errors of rename(2) if the target exists: a folder with content, or a file.
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})


@contextlib.contextmanager
def staging(repository: Path | Location, model: str = "model") -> Iterator[Path]:
    """Yield an empty folder for a new version, on the repository's file system if it has one.

    It lies in a folder named ``model``, which is alone in a folder of its own. That is removed
    afterwards, and so is a repository that was created for it and not used.
    """
    if isinstance(repository, Location):
        with temporary_folder() as folder:
            version = folder / model / _STAGED_VERSION
            version.mkdir(parents=True)
            yield version
        return
    created = _make_folders(repository)

    def remove_created() -> None:
        for path in created:
            with contextlib.suppress(OSError):  # not empty: someone published
                path.rmdir()

    with finally_call(remove_created), temporary_folder(repository) as folder:
        version = folder / model / _STAGED_VERSION
        version.mkdir(parents=True)
        yield version


def publish(
    staged: Path, repository: Path | Location, wanted: ModelConfig, version: int | None
) -> PublishedVersion:
    """Publish the version in ``staged`` under ``wanted.name``.

    Args:
        staged: the folder from ``staging``, with the artifact and its certificate.
        wanted: the configuration of a new model; a known model keeps its own.
        version: None takes the next free number.

    Raises:
        AlreadyExists: the version is published already.
        UsageError: the model exists with another signature, or without a configuration.
    """
    manifest.write(staged)
    model = staged.parent
    (model / config.FILENAME).write_text(config.to_text(wanted))
    if isinstance(repository, Location):
        from modelport.exporters.publishing import object_storage

        return object_storage.publish(staged, repository, wanted, version)
    _sync_tree(model)
    target = repository / wanted.name
    while True:
        number = free_version(repository, wanted, version)
        path = target / str(number)
        if _is_new(target):
            staged = staged.rename(model / str(number))
            _sync(model)
            moved = _move(model, target)
        else:
            moved = _move(staged, path)
        if moved:  # otherwise another publisher was faster: try again
            _sync(target)
            _sync(repository)
            return PublishedVersion(wanted.name, number, path)


def free_version(repository: Path | Location, wanted: ModelConfig, version: int | None) -> int:
    """The number under which ``wanted`` can be published now; errors as in ``publish``."""
    if isinstance(repository, Location):
        from modelport.exporters.publishing import object_storage

        return object_storage.free_version(repository, wanted, version)
    return next_version(_existing_versions(repository / wanted.name, wanted), wanted, version)


def deliver(staged: Path, folder: Path) -> None:
    """Move the files in ``staged`` to ``folder``, replacing files of the same names.

    The old certificate is removed first and the new one written last, so that a certificate never
    stands beside another artifact.
    """
    _sync_tree(staged)
    for name in (certificate.FILENAME, signing.SIGNATURE):
        (folder / name).unlink(missing_ok=True)
    for path in sorted(staged.iterdir(), key=lambda path: path.name == certificate.FILENAME):
        if path.is_dir() and (folder / path.name).is_dir():  # rename(2) replaces files only
            os.rename(folder / path.name, staged.parent / f"replaced-{path.name}")
        os.replace(path, folder / path.name)
    _sync(folder)


def check_writable(repository: Path | Location, name: str) -> None:
    """Raise ``OSError`` unless a version can be written into the folder of a known model."""
    if isinstance(repository, Path) and (repository / name).is_dir():
        with tempfile.TemporaryFile(dir=repository / name):
            pass


def _is_new(target: Path) -> bool:
    """Whether there is no model yet; an empty folder counts as new, as a rename replaces it."""
    if not os.path.lexists(target):
        return True
    return target.is_dir() and not target.is_symlink() and not any(target.iterdir())


def _existing_versions(target: Path, wanted: ModelConfig) -> set[int]:
    if _is_new(target):
        return set()
    try:
        content = untrusted_files.read(target / config.FILENAME, untrusted_files.MAX_CONFIG_BYTES)
        check_contract(content, wanted)
    except (FileNotFoundError, NotADirectoryError):
        check_contract(None, wanted)
    return {int(p.name) for p in target.iterdir() if VERSION_NAME.match(p.name)}


def certificate_of(repository: Path | Location, name: str, version: int) -> dict[str, Any]:
    """The certificate of a published version; empty if it cannot be read."""
    path = f"{name}/{version}/{certificate.FILENAME}"
    try:
        found = json.loads(_read(repository, path, untrusted_files.MAX_CERTIFICATE_BYTES))
    except (OSError, ValueError, RecursionError, ModelportError):
        return {}
    return found if isinstance(found, dict) else {}


def signature_of(repository: Path | Location, name: str) -> ModelSignature | None:
    """The signature of a published model; None if there is none, or it cannot be read."""
    try:
        path = f"{name}/{config.FILENAME}"
        text = _read(repository, path, untrusted_files.MAX_CONFIG_BYTES).decode()
        return config.signature(config.complete(config.parse(text), name))
    except (OSError, ValueError, ModelportError):
        return None


def _read(repository: Path | Location, path: str, most_bytes: int) -> bytes:
    if isinstance(repository, Location):
        from modelport.exporters.publishing import object_storage

        return object_storage.read(repository, path)
    return untrusted_files.read(repository / path, most_bytes)


def _move(source: Path, target: Path) -> bool:
    """Rename; return False if the target exists, as rename(2) replaces no folder with content."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


def _make_folders(path: Path) -> list[Path]:
    """Create ``path`` and its parents; return the created ones, innermost first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return missing


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
