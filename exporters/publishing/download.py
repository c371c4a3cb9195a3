"""Download of a published version from object storage to a temporary folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from modelport.exporters.publishing.temporary_folder import temporary_folder
from modelport.gateway.cli.errors import UsageError
from modelport.gateway.repository import manifest
from modelport.gateway.repository.config import WARMUP
from modelport.gateway.repository.scan import VERSION_NAME
from modelport.gateway.repository.storage.complete_versions import files_of_version, group
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.repository.storage.objects import ObjectStore


@contextlib.contextmanager
def copied(location: Location) -> Iterator[Path]:
    """Yield a temporary folder ``<model>/<version>`` of a version, or of a model's newest version.

    It includes the files directly in the model's folder, and its warm-up samples.

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
    versions = found.versions if found is not None else {}
    published = [number for number, files in versions.items() if manifest.FILENAME in files]
    number = int(last) if named else max(published, default=0)
    if found is None or number not in versions:
        raise UsageError(f"'{location}' is neither a published version nor a model that has one")
    if number in found.problems:
        raise UsageError(f"'{location}' cannot be verified: {found.problems[number]}")
    with temporary_folder() as temporary:
        version = temporary / name / str(number)
        for file, each in files_of_version(versions[number]).items():
            objects.download(f"{number}/{file}", each, version / file)
        for file, each in found.beside.items():
            if file.count("/") <= file.startswith(f"{WARMUP}/"):
                objects.download(file, each, version.parent / file)
        yield version
