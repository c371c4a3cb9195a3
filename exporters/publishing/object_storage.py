"""Atomic publishing of a version to object storage: a reader sees all of it or nothing.

    <repository>/<model>/<version>/.modelport-claim     first, unless it exists: one publisher wins
    <repository>/<model>/<version>/model.onnx, ...      the files
    <repository>/<model>/labels.txt, config.pbtxt       of a new model, unless they exist
    <repository>/<model>/<version>/manifest.json        last, unless it exists
    <repository>/<model>/<version>/.modelport-claim     deleted

Gateways ignore a version with a claim and no manifest. One that a dead publisher left behind
keeps its number, is never served, and is removed by a later publisher of the model.
"""

from __future__ import annotations

import contextlib
import datetime
import uuid
from collections.abc import Mapping
from pathlib import Path

from modelport.exporters.publishing.contract import PublishedVersion, check_contract, next_version
from modelport.gateway.errors import (
    AlreadyExists,
    InvalidArgument,
    ModelportError,
    NotFound,
    UsageError,
)
from modelport.gateway.repository import config, manifest, untrusted_files
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.storage.complete_versions import CLAIM, StoredModel, group
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.repository.storage.objects import Object, ObjectStore

#: An incomplete version that has not been written to for this long was left behind.
LEFT_BEHIND_SECONDS = 24 * 3600.0


def free_version(location: Location, wanted: ModelConfig, version: int | None) -> int:
    """The object storage part of ``publish.free_version``."""
    objects = ObjectStore(location)
    return _free_version(objects, _look(objects, wanted.name), wanted, version)


def read(location: Location, key: str) -> bytes:
    """Read a small file of a model.

    Raises:
        NotFound: there is none.
    """
    return ObjectStore(location).read(key, untrusted_files.MAX_CONFIG_BYTES)


def publish(
    staged: Path, location: Location, wanted: ModelConfig, version: int | None
) -> PublishedVersion:
    """Publish the version in ``staged``, whose manifest and model are written.

    Raises:
        UsageError: the storage refuses.
        Unavailable: the storage does not respond.
    """
    objects = ObjectStore(location)
    model = _look(objects, wanted.name)
    model = _sweep(objects, wanted.name, model)
    while True:
        number = _free_version(objects, model, wanted, version)
        below = f"{wanted.name}/{number}"
        claim = uuid.uuid4().hex.encode()
        if _claimed(objects, below, claim):
            break
        model = _look(objects, wanted.name)  # another publisher was faster
        if number not in model.versions:
            raise UsageError(f"version {number} of '{wanted.name}' cannot be claimed; try again")
    written = [f"{below}/{CLAIM}"]
    content = (staged / manifest.FILENAME).read_bytes()
    try:
        for name in sorted(manifest.files_of(staged)):
            _check_claim(objects, below, claim)
            written.append(f"{below}/{name}")
            objects.upload(staged / name, written[-1])
        _write_beside(objects, staged.parent, staged.name, wanted)
        _check_claim(objects, below, claim)
        if not objects.create(f"{below}/{manifest.FILENAME}", content):
            raise AlreadyExists(f"version {number} of '{wanted.name}' is published already")
    except BaseException:
        # The claim is deleted last: if this fails, the rest is still claimed. Without a claim, the
        # number belongs to another publisher by now.
        with contextlib.suppress(ModelportError):
            published = objects.exists(f"{below}/{manifest.FILENAME}", content)
            if not published and objects.exists(f"{below}/{CLAIM}", claim):
                objects.delete(reversed(written))
        raise
    with contextlib.suppress(ModelportError):  # after the manifest the claim has no meaning
        objects.delete([f"{below}/{CLAIM}"])
    return PublishedVersion(wanted.name, number, location / wanted.name / str(number))


def _claimed(objects: ObjectStore, below: str, claim: bytes) -> bool:
    """Claim the version; return whether that succeeded.

    It fails if another publisher has finished the version meanwhile, and if another tool writes to
    it.
    """
    if not objects.create(f"{below}/{CLAIM}", claim):
        return False
    alone = False
    try:
        alone = objects.listing(below).keys() == {CLAIM}
    finally:
        if not alone:
            objects.delete([f"{below}/{CLAIM}"])
    return alone


def _check_claim(objects: ObjectStore, below: str, claim: bytes) -> None:
    """Raise ``UsageError`` if another publisher removed this claim because it was too old."""
    if not objects.exists(f"{below}/{CLAIM}", claim):
        raise UsageError(
            f"'{below}' took longer than {LEFT_BEHIND_SECONDS:.0f} seconds and was removed by "
            "another publisher; publish it again"
        )


def _look(objects: ObjectStore, name: str) -> StoredModel:
    """List the model's files, complete or not."""
    try:
        listing = objects.listing(name)
    except InvalidArgument as error:
        raise UsageError(f"--repository {objects.location}: {error}") from error
    return group({f"{name}/{key}": each for key, each in listing.items()}).get(name, StoredModel())


def _free_version(
    objects: ObjectStore, model: StoredModel, wanted: ModelConfig, version: int | None
) -> int:
    if config.FILENAME in model.beside:
        check_contract(_config(objects, wanted.name), wanted)
    elif any(manifest.FILENAME in files or CLAIM not in files for files in model.versions.values()):
        check_contract(None, wanted)
    files = model.versions.get(version or 0, {})
    if CLAIM in files and manifest.FILENAME not in files:
        raise AlreadyExists(
            f"version {version} of '{wanted.name}' is being published by another process, or is "
            "left over from one that ended; use --model-version auto or another number"
        )
    return next_version(model.versions.keys(), wanted, version)


def _config(objects: ObjectStore, name: str) -> bytes:
    return objects.read(f"{name}/{config.FILENAME}", untrusted_files.MAX_CONFIG_BYTES)


def _write_beside(objects: ObjectStore, model: Path, version: str, wanted: ModelConfig) -> None:
    """Write the files beside the versions of a new model; a known model keeps its own."""
    try:
        check_contract(_config(objects, wanted.name), wanted)
        return
    except NotFound:
        pass
    names = [name for name in manifest.files_of(model) if not name.startswith(f"{version}/")]
    # the configuration last: once it exists, so do the others
    names.sort(key=lambda name: name == config.FILENAME)
    for name in names:
        written = objects.create(f"{wanted.name}/{name}", (model / name).read_bytes())
        if not written and name == config.FILENAME:  # another publisher wrote it
            check_contract(_config(objects, wanted.name), wanted)


def _sweep(objects: ObjectStore, name: str, model: StoredModel) -> StoredModel:
    """Remove the versions that publishers left behind, and list the model again."""
    now = datetime.datetime.now(datetime.UTC)
    left = {
        number: files
        for number, files in model.versions.items()
        if manifest.FILENAME not in files
        and CLAIM in files
        and _age_seconds(files, now) > LEFT_BEHIND_SECONDS
    }
    if not left:
        return model
    for number, files in left.items():
        others = [key for key in files if key != CLAIM]
        objects.delete(f"{name}/{number}/{key}" for key in (*others, CLAIM))
    return _look(objects, name)


def _age_seconds(files: Mapping[str, Object], now: datetime.datetime) -> float:
    """Seconds since the last write to any of the files; 0 if the storage does not say."""
    ages = [(now - each.modified).total_seconds() for each in files.values() if each.modified]
    return min(ages) if len(ages) == len(files) else 0.0
