"""Publishing a version so that a reader of the repository sees all of it or nothing.

    <repository>/.modelport-<random>/model/config.pbtxt        staged, invisible by its leading dot
    <repository>/.modelport-<random>/model/<version>/...       fsynced
        └── one rename: model/ for a new model, model/<version>/ for a known one

The owner holds a lock on its staging folder for as long as it lives, so a folder that can be locked
belongs to a dead process and is swept away by the next publisher.

Object storage has neither renames nor locks: see ``publish_storage``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelport.exporters import certificate, differences
from modelport.gateway.cli.errors import UsageError
from modelport.gateway.errors import AlreadyExists, InvalidArgument, ModelportError
from modelport.gateway.repository import config, manifest, signing
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.scan import MAX_VERSION, VERSION_NAME
from modelport.gateway.repository.storage.location import Location

STAGING_PREFIX = ".modelport-"
_STAGED_MODEL = "model"
_STAGED_VERSION = "1"

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

#: What rename(2) says when the target is there: a folder with something in it, or a file.
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})


@dataclass(frozen=True, slots=True)
class Published:
    """Where a version is now."""

    name: str
    version: int
    path: Path | Location


def check_name(name: str) -> None:
    """Raises ``UsageError`` unless ``name`` may be a model's."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"--name '{name}' is not a model name; use up to 128 letters, digits, '.', '_' and "
            "'-', starting with a letter or digit"
        )


def parse_version(text: str) -> int | None:
    """``--model-version``: a positive number, or None for ``auto``.

    Raises:
        UsageError: it is neither.
    """
    if text == "auto":
        return None
    if VERSION_NAME.match(text) and int(text) <= MAX_VERSION:
        return int(text)
    raise UsageError(
        f"--model-version '{text}' is not a version; use 'auto' or a positive number without zeros "
        "in front"
    )


@contextlib.contextmanager
def staging(repository: Path | Location) -> Iterator[Path]:
    """An empty folder to write a version into, on the repository's filesystem if it has one.

    It is gone afterwards, and so is a repository that did not exist and was not published to.
    """
    if isinstance(repository, Location):
        with tempfile.TemporaryDirectory(prefix=STAGING_PREFIX) as temporary:
            version = Path(temporary) / _STAGED_MODEL / _STAGED_VERSION
            version.mkdir(parents=True)
            yield version
        return
    created = _make_folders(repository)
    _sweep(repository)
    try:
        with _locked_folder(repository) as folder:
            version = folder / _STAGED_MODEL / _STAGED_VERSION
            version.mkdir(parents=True)
            yield version
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # not empty: someone published
                path.rmdir()


def publish(
    staged: Path, repository: Path | Location, wanted: ModelConfig, version: int | None
) -> Published:
    """Make what lies in ``staged`` visible as a version of ``wanted.name``.

    Args:
        staged: the folder that ``staging`` gave, artifact and certificate in it.
        wanted: the configuration a new model gets. A known model keeps the one it has.
        version: None takes the next free number.

    Raises:
        AlreadyExists: the version is published already.
        UsageError: the model is there with another signature, or without a configuration.
    """
    manifest.write(staged)
    model = staged.parent
    (model / config.FILENAME).write_text(config.to_text(wanted))
    if isinstance(repository, Location):
        from modelport.exporters import publish_storage

        return publish_storage.publish(staged, repository, wanted, version)
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
        if moved:  # else another publisher was faster: look again
            _sync(target)
            _sync(repository)
            return Published(wanted.name, number, path)


def free_version(repository: Path | Location, wanted: ModelConfig, version: int | None) -> int:
    """The number that ``wanted`` may be published under now; errors as ``publish``."""
    if isinstance(repository, Location):
        from modelport.exporters import publish_storage

        return publish_storage.free_version(repository, wanted, version)
    return next_version(_existing_versions(repository / wanted.name, wanted), wanted, version)


def next_version(existing: Collection[int], wanted: ModelConfig, version: int | None) -> int:
    """``version``, or the number after ``existing``; errors as ``publish``."""
    number = version or max(existing, default=0) + 1
    if number in existing:
        raise AlreadyExists(
            f"version {number} of '{wanted.name}' is published and never overwritten; "
            "use --model-version auto or another number"
        )
    if number > MAX_VERSION:
        raise UsageError(f"'{wanted.name}' has no version number left; use another --name")
    return number


def deliver(staged: Path, folder: Path) -> None:
    """Move what lies in ``staged`` into ``folder``, replacing files of the same names.

    The certificate goes first and comes last, so that it never vouches for another's artifact.
    """
    _sync_tree(staged)
    for name in (certificate.FILENAME, signing.SIGNATURE):
        (folder / name).unlink(missing_ok=True)
    for path in sorted(staged.iterdir(), key=lambda path: path.name == certificate.FILENAME):
        if path.is_dir() and (folder / path.name).is_dir():  # rename(2) replaces files alone
            os.rename(folder / path.name, staged.parent / f"replaced-{path.name}")
        os.replace(path, folder / path.name)
    _sync(folder)


def _is_new(target: Path) -> bool:
    """An empty folder counts as new: a rename replaces it in one step."""
    if not os.path.lexists(target):
        return True
    return target.is_dir() and not target.is_symlink() and not any(target.iterdir())


def _existing_versions(target: Path, wanted: ModelConfig) -> set[int]:
    if _is_new(target):
        return set()
    try:
        check_contract((target / config.FILENAME).read_bytes(), wanted)
    except (FileNotFoundError, NotADirectoryError):
        check_contract(None, wanted)
    return {int(p.name) for p in target.iterdir() if VERSION_NAME.match(p.name)}


def check_contract(content: bytes | None, wanted: ModelConfig) -> None:
    """Raises ``UsageError`` unless a model whose configuration this is may get a version of
    ``wanted``. None: it has no configuration."""
    if content is None:
        raise UsageError(
            f"'{wanted.name}' is in the repository without a {config.FILENAME}; add one, or use "
            "another --name"
        )
    try:
        there = config.complete(config.parse(content.decode()), wanted.name)
        here = config.complete(wanted, wanted.name)
        found = differences.between(differences.contract(there), differences.contract(here))
    except (InvalidArgument, UnicodeDecodeError) as error:
        raise UsageError(
            f"the {config.FILENAME} of '{wanted.name}' does not parse: {error}; correct it, or use "
            "another --name"
        ) from error
    declared = differences.image_parameters(here)
    known = differences.image_parameters(there)
    pictures = differences.between({key: known.get(key) for key in declared}, declared)
    if found or pictures:
        raise UsageError(
            f"the {config.FILENAME} of '{wanted.name}' declares something else: "
            f"{', '.join(filter(None, (found, pictures)))}; use another --name, or the same "
            "--max-batch-size, --model-kwargs and --image flags"
        )


def certificate_of(repository: Path | Location, name: str, version: int) -> dict[str, Any]:
    """The certificate of a published version; empty where there is none that can be read."""
    path = f"{name}/{version}/{certificate.FILENAME}"
    try:
        if isinstance(repository, Location):
            from modelport.exporters import publish_storage

            content = publish_storage.read(repository, path)
        else:
            content = (repository / path).read_bytes()
        found = json.loads(content)
    except (OSError, ValueError, RecursionError, ModelportError):
        return {}
    return found if isinstance(found, dict) else {}


def _move(source: Path, target: Path) -> bool:
    """Rename, or False if something is there: rename(2) replaces no folder with content."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


def _make_folders(path: Path) -> list[Path]:
    """Create ``path`` and its parents; those that were created, innermost first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return missing


@contextlib.contextmanager
def _locked_folder(repository: Path) -> Iterator[Path]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=repository))
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # a sweeper was faster than our lock
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not folder.exists():  # the same, a moment later
                continue
            yield folder
            return
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _sweep(repository: Path) -> None:
    """Remove the staging folders of publishers that died."""
    for folder in repository.glob(f"{STAGING_PREFIX}*"):
        with contextlib.suppress(OSError):  # locked by the living, or gone meanwhile
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


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
