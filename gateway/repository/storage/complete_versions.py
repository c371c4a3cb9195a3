"""Complete versions of the models in object storage.

A version with a manifest, which publishers write last, is complete when every listed file is there
with its size. (The content is verified after the download.)

A version without one, as other tools copy a Triton repository, has no mark of its last file. It
counts as complete when two looks at least ``SETTLE_SECONDS`` apart find the same objects. An upload
that pauses for longer between two files may be taken too early; it is corrected when it continues.
``serve --require-manifest`` avoids that. A version that ``modelport export`` has begun, or that has
a certificate but no manifest yet, never counts as complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from modelport.gateway.errors import IntegrityError, InvalidArgument, ModelportError, NotFound
from modelport.gateway.repository import manifest, signing
from modelport.gateway.repository.scan import (
    LIKE_A_VERSION,
    MAX_VERSION,
    VERSION_NAME,
    is_model_name,
    refusal,
)
from modelport.gateway.repository.storage.location import Location, is_segment
from modelport.gateway.repository.storage.objects import Object, ObjectStore

log = structlog.get_logger("modelport.storage")

#: In a version's folder while ``modelport export`` uploads it; ignored once it has a manifest.
CLAIM = ".modelport-claim"
SETTLE_SECONDS = 2.0

Files = Mapping[str, Object]
#: The sizes of the files in a manifest, or the store's error: removed, or access refused.
ListedSizes = Mapping[str, int] | NotFound | InvalidArgument


@dataclass(slots=True)
class StoredModel:
    """A model's objects. ``beside`` are those outside of versions; keys are relative."""

    beside: dict[str, Object] = field(default_factory=dict)
    versions: dict[int, Files] = field(default_factory=dict)
    #: The reasons why versions cannot be served.
    problems: dict[int, str] = field(default_factory=dict)
    #: Folders that may be meant as versions.
    ignored: set[str] = field(default_factory=set)

    @property
    def published(self) -> list[int]:
        """The versions that no publisher is still uploading, ascending."""
        return sorted(
            number
            for number, files in self.versions.items()
            if manifest.FILENAME in files or CLAIM not in files
        )


def group(listing: Files) -> dict[str, StoredModel]:
    """Group a repository's listing by model. Claims are still among the versions' files."""
    models: dict[str, StoredModel] = {}
    found: dict[tuple[str, int], dict[str, Object]] = {}
    for key, each in listing.items():
        name, slash, rest = key.partition("/")
        if not is_model_name(name) or not slash:
            continue
        model = models.setdefault(name, StoredModel())
        folder, below, file = rest.partition("/")
        if below and VERSION_NAME.match(folder) and int(folder) <= MAX_VERSION:
            found.setdefault((name, int(folder)), {})[file] = each
        elif below and LIKE_A_VERSION.match(folder):
            model.ignored.add(folder)
        elif all(map(is_segment, rest.split("/"))) and not VERSION_NAME.match(rest):
            model.beside[rest] = each
    for (name, number), files in found.items():
        models[name].versions[number] = files
        problem = _problem(files_of_version(files))
        if problem:
            models[name].problems[number] = problem
    return models


def find(repository: Location, model: str) -> StoredModel | None:
    """One model of a repository; None if there is no object of it; raises as ``ObjectStore``."""
    listing = ObjectStore(repository).listing(model)
    return group({f"{model}/{name}": each for name, each in listing.items()}).get(model)


def files_of_version(files: Files) -> dict[str, Object]:
    """The files of a version, without its claim and folder placeholders."""
    return {
        name: each
        for name, each in files.items()
        if name and not name.endswith("/") and name != CLAIM
    }


def _problem(files: Files) -> str:
    for name in files:
        segments = name.split("/")
        if not all(map(is_segment, segments)):
            return "an object's key is not a valid file name"
        if any("/".join(segments[:end]) in files for end in range(1, len(segments))):
            return f"'{segments[0]}' is both an object and a folder of objects"
        if problem := refusal(name):
            return problem
    return ""


class CompleteVersions:
    """Finds complete versions; remembers earlier listings."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        #: By model and version: the manifest's object, and its content.
        self._manifests: dict[tuple[str, int], tuple[Object, ListedSizes]] = {}
        #: For versions without a manifest: their files, and since when they are unchanged.
        self._seen: dict[tuple[str, int], tuple[Files, float]] = {}
        #: Reasons already logged why versions are incomplete.
        self._said: dict[tuple[str, int], str] = {}
        self.unsettled = False

    def among(
        self, models: Mapping[str, StoredModel], holds: Callable[[str, int, Files], bool]
    ) -> dict[str, StoredModel]:
        """``models`` with only their complete versions.

        Args:
            holds: whether a version with exactly these files has been downloaded.

        Raises:
            ModelportError: no manifest can be read now, or access to all versions is refused.
        """
        self.unsettled = False
        versions = {
            (name, number): files
            for name, model in models.items()
            for number, files in model.versions.items()
        }
        todo = {v: files for v, files in versions.items() if not holds(*v, files_of_version(files))}
        refused = self._read_manifests(todo)
        why = {version: self._why_not(version, files) for version, files in todo.items()}
        for version, reason in why.items():
            if reason and self._said.get(version) != reason:
                log.info(
                    "model version is not complete yet", model=version[0], version=version[1],
                    reason=reason,
                )  # fmt: skip
        self._said = {version: reason for version, reason in why.items() if reason}
        self._seen = {version: seen for version, seen in self._seen.items() if version in todo}
        whole = versions.keys() - self._said.keys()
        if refused is not None and not whole and not self.unsettled:
            raise refused
        return {
            name: StoredModel(
                model.beside,
                {n: files_of_version(f) for n, f in model.versions.items() if (name, n) in whole},
                model.problems,
            )
            for name, model in models.items()
        }

    def _why_not(self, version: tuple[str, int], files: Files) -> str:
        """The reason why the version is not complete; empty: it is."""
        kept = files_of_version(files)
        if manifest.FILENAME in files:
            listed = self._manifests[version][1]
            if isinstance(listed, NotFound):
                return f"{manifest.FILENAME} has been removed since it was listed"
            if isinstance(listed, InvalidArgument):
                return f"{manifest.FILENAME} cannot be read: {listed}"
            for name, size in listed.items():
                if name not in kept:
                    return f"'{name}' is listed in {manifest.FILENAME} but missing"
                if kept[name].size_bytes != size:
                    return f"'{name}' does not have the size in {manifest.FILENAME}"
            return ""
        if CLAIM in files or signing.CERTIFICATE in files:
            return f"{manifest.FILENAME}, which is uploaded last, is missing"
        now = time.monotonic()
        before, since = self._seen.get(version, (None, now))
        if before != kept:
            self._seen[version] = kept, now
        elif now - since >= SETTLE_SECONDS:
            return ""
        self.unsettled = True
        return f"there is no {manifest.FILENAME}, and files may still be uploading"

    def _read_manifests(self, versions: Mapping[tuple[str, int], Files]) -> InvalidArgument | None:
        """Read new manifests and retry failed ones; the store's error if it refuses access."""
        found = {
            version: files[manifest.FILENAME]
            for version, files in versions.items()
            if manifest.FILENAME in files
        }
        known = self._manifests
        self._manifests = {
            version: known[version]
            for version, each in found.items()
            if version in known and known[version][0] == each
            if not isinstance(known[version][1], ModelportError)
        }
        reading = [version for version in found if version not in self._manifests]
        # An error ends it: an unavailable store is not asked for every manifest.
        contents = self._objects.threads.map(self._read_manifest, reading)
        for version, content in zip(reading, contents, strict=True):
            self._manifests[version] = found[version], content
        errors = (content for _, content in self._manifests.values())
        return next((each for each in errors if isinstance(each, InvalidArgument)), None)

    def _read_manifest(self, version: tuple[str, int]) -> ListedSizes:
        key = f"{version[0]}/{version[1]}/{manifest.FILENAME}"
        try:
            listed = manifest.parse(self._objects.read(key, manifest.MAX_MANIFEST_BYTES))
            return {name: size for name, (_, size) in listed.items()}
        except IntegrityError:
            return {}  # complete; reported when it loads
        except (NotFound, InvalidArgument) as error:
            return error.with_traceback(None)  # it is kept
