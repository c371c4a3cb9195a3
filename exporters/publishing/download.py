"""Download of published versions from object storage to a temporary folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from modelport.exporters.runtime.temporary_folder import temporary_folder
from modelport.gateway.errors import UsageError
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import manifest
from modelport.gateway.repository.config import WARMUP
from modelport.gateway.repository.scan import VERSION_NAME
from modelport.gateway.repository.storage.complete_versions import (
    StoredModel,
    files_of_version,
    group,
)
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.repository.storage.objects import ObjectStore


@contextlib.contextmanager
def local(path: Path | Location) -> Iterator[Path]:
    """Yield ``path``, or a temporary copy of the version that is there; raises as ``copied``."""
    if isinstance(path, Path):
        yield path
    else:
        with copied(path) as version:
            yield version


@contextlib.contextmanager
def copied(location: Location) -> Iterator[Path]:
    """Yield a temporary folder ``<model>/<version>`` of a version, or of a model's newest version.

    A model's newest version is one with a manifest, if it has any. The copy includes the files
    directly in the model's folder, and its warm-up samples.

    Raises:
        UsageError: ``location`` is neither a version nor a model.
        Unavailable, InvalidArgument, NotFound: the storage does not respond, or refuses.
    """
    above, _, last = location.prefix.rpartition("/")
    named = VERSION_NAME.match(last) is not None
    model = replace(location, prefix=above) if named else location
    name = model.prefix.rpartition("/")[2]
    objects = ObjectStore(model)
    found = group({f"{name}/{key}": each for key, each in objects.listing().items()}).get(name)
    of_model = [] if found is None else _with_manifest(found) or found.published
    number = int(last) if named else max(of_model, default=0)
    if found is None or number not in found.versions:
        raise UsageError(f"'{location}' is neither a published version nor a model that has one")
    with temporary_folder() as temporary:
        _download(objects, "", found, [number], temporary / name)
        yield temporary / name / str(number)


@contextlib.contextmanager
def whole(path: Path | Location) -> Iterator[Path]:
    """Yield ``path``, or a temporary copy of the version, the model or the repository there.

    Raises:
        UsageError: it is none of them.
        Unavailable, InvalidArgument, NotFound: the storage does not respond, or refuses.
    """
    if isinstance(path, Path):
        yield path
        return
    name = path.prefix.rpartition("/")[2]
    objects = ObjectStore(path)
    listing = objects.listing()
    if VERSION_NAME.match(name) and manifest.FILENAME in listing:
        with copied(path) as version:
            yield version
        return
    is_model = configuration.FILENAME in listing
    prefix = f"{name}/" if is_model else ""
    models = group({f"{prefix}{key}": each for key, each in listing.items()})
    found = {name: model for name, model in models.items() if _with_manifest(model)}
    if not found:
        raise UsageError(f"'{path}' is neither a version, a model nor a repository of them")
    with temporary_folder() as temporary:
        for each, model in found.items():
            below = "" if is_model else f"{each}/"
            _download(objects, below, model, _with_manifest(model), temporary / each)
        yield temporary / name if is_model else temporary


def _with_manifest(model: StoredModel) -> list[int]:
    return [number for number, files in model.versions.items() if manifest.FILENAME in files]


def _download(
    objects: ObjectStore, below: str, model: StoredModel, numbers: Iterable[int], folder: Path
) -> None:
    """Download versions of a model, and the files beside them, to ``folder``.

    Args:
        below: the prefix of the model's keys.
    """
    for number in numbers:
        if number in model.problems:
            raise UsageError(f"version {number} cannot be verified: {model.problems[number]}")
        for file, each in files_of_version(model.versions[number]).items():
            objects.download(f"{below}{number}/{file}", each, folder / str(number) / file)
    for file, each in model.beside.items():
        if file.count("/") <= file.startswith(f"{WARMUP}/"):
            objects.download(f"{below}{file}", each, folder / file)
