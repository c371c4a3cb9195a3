"""A local copy of the served versions of a repository in object storage.

A look lists the store, finds complete versions (``complete_versions``) and downloads only
configurations and manifests. A version is downloaded when it loads, by one of the processes that
share the ``MirrorFolder``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import structlog

from modelport.gateway.backend_registry import PIPELINE
from modelport.gateway.errors import (
    IntegrityError,
    InvalidArgument,
    ModelportError,
    NotFound,
    Unavailable,
)
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import manifest, untrusted_files
from modelport.gateway.repository.config import WARMUP
from modelport.gateway.repository.scan import (
    ModelEntry,
    VersionEntry,
    no_model,
)
from modelport.gateway.repository.storage.complete_versions import (
    CompleteVersions,
    StoredModel,
    files_of_version,
    group,
)
from modelport.gateway.repository.storage.location import Location, server_of
from modelport.gateway.repository.storage.mirror_folder import MirrorFolder, described
from modelport.gateway.repository.storage.objects import Object, ObjectStore, disk_full

log = structlog.get_logger("modelport.storage")

#: A download that does not match its manifest is repeated once, as it may have been damaged.
DOWNLOADS = 2
#: Free disk space that a download must leave.
SPARE_BYTES = 16 * 1024 * 1024


def default_cache(option: str = "--repository-cache") -> Path:
    """``$XDG_CACHE_HOME/modelport``, usually ``~/.cache/modelport``.

    Raises:
        InvalidArgument: there is none, so ``option`` is needed.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelport"
    except RuntimeError:  # a user without a home, as in a container
        raise InvalidArgument(f"the user has no home folder for a cache; give {option}") from None


class Mirror:
    """The mirror of one location. Any thread may ``look``, and ``fetch`` versions it found."""

    def __init__(self, location: Location, cache: Path) -> None:
        named = hashlib.sha256(f"{location} {server_of(location)}".encode()).hexdigest()[:16]
        self.location = location
        self.folder = cache / f"{location.scheme}-{location.bucket}-{named}"
        self._cached = MirrorFolder(self.folder)
        self._objects = ObjectStore(location)
        self._complete = CompleteVersions(self._objects)
        #: By key: the object of a config.pbtxt or pipeline.toml, and its text.
        self._texts: dict[str, tuple[Object, str]] = {}
        self._found: dict[str, ModelEntry] = {}
        self._opened = False
        #: A look continues after its caller stops waiting.
        self._looking = threading.Lock()

    @property
    def unsettled(self) -> bool:
        """Whether the last look left out versions without a manifest, which another may include."""
        return self._complete.unsettled

    def look(self) -> dict[str, ModelEntry]:
        """Every model by name, with its complete versions.

        Raises:
            ModelportError: the store cannot be listed, or the cache cannot be written.
        """
        with self._looking:
            return self._look()

    def _look(self) -> dict[str, ModelEntry]:
        if not self._opened:
            self._cached.open()
            self._opened = True
        began = time.time()
        listing = self._objects.listing()
        models = group(listing)
        self._texts = {key: r for key, r in self._texts.items() if key.partition("/")[0] in models}
        complete = self._complete.among(models, self._holds)
        # Concurrently, as there may be a thousand configurations to read; an error ends it.
        wholes = [complete[name] for name in models]
        entries = list(self._objects.threads.map(self._entry, models, models.values(), wholes))
        with contextlib.suppress(OSError):  # extra files do no harm
            self._cached.prune({name: set(model.versions) for name, model in models.items()}, began)
        self._found = {entry.name: entry for entry in entries if entry is not None}
        return self._beside(listing) | self._found

    def _beside(self, listing: Iterable[str]) -> dict[str, ModelEntry]:
        """Objects and folders of the repository that are not hidden, and no models."""
        tops = {name: bool(slash) for name, slash, _ in (key.partition("/") for key in listing)}
        entries = (no_model(*top) for top in tops.items() if not top[0].startswith("."))
        return {entry.name: entry for entry in entries if entry is not None}

    def _entry(self, name: str, model: StoredModel, whole: StoredModel) -> ModelEntry | None:
        """The model's entry; None: no version is complete yet."""
        path, before = self.folder / name, self._found.get(name)
        known = before.versions if before is not None else {}
        kept = {number: entry for number, entry in known.items() if number in model.versions}
        if model.versions and not whole.versions and not kept:
            return None
        versions = dict(kept)
        for number, files in whole.versions.items():
            fingerprint = tuple(sorted((key, *_fingerprint(each)) for key, each in files.items()))
            if number in kept and kept[number].fingerprint != fingerprint:
                log.warning("model version was overwritten in storage", model=name, version=number)
            content = self._cached.version(name, number, files)
            problem = whole.problems.get(number, "")
            fetch = partial(self._fetch, name, number, files, model.beside)
            pipeline = ""
            with contextlib.suppress(ValueError):  # loading the version reports it
                key = f"{name}/{number}/{PIPELINE.default_filename}"
                pipeline = self._text(key, files.get(PIPELINE.default_filename)) or ""
            versions[number] = VersionEntry(
                number, content, fingerprint, problem, fetch, pipeline=pipeline
            )
        try:
            key = f"{name}/{configuration.FILENAME}"
            text = self._text(key, model.beside.get(configuration.FILENAME))
        except (NotFound, Unavailable):
            raise
        except (ModelportError, ValueError) as error:
            return ModelEntry(name, path, problem=str(error))
        return ModelEntry(name, path, text, versions, ignored=tuple(sorted(model.ignored)))

    def _text(self, key: str, found: Object | None) -> str | None:
        if found is None:
            return None
        most = untrusted_files.MAX_CONFIG_BYTES
        if found.size_bytes > most:
            raise ValueError(f"'{key.rpartition('/')[2]}' is larger than {most} bytes")
        known = self._texts.get(key)
        if known is None or known[0] != found:  # new or changed
            content = self._objects.read(key, most)
            self._texts[key] = known = (found, content.decode("utf-8"))
        return known[1]

    # -- a version --------------------------------------------------------------------------------

    def _holds(self, model: str, number: int, files: Mapping[str, Object]) -> bool:
        """Whether a version of exactly these objects has been downloaded."""
        return self._cached.version(model, number, files).is_dir()

    def _fetch(
        self, model: str, number: int, files: Mapping[str, Object], beside: Mapping[str, Object]
    ) -> None:
        """Download the version's folder unless it is here already; blocking.

        Raises:
            IntegrityError: it does not match its manifest.
            Unavailable: it cannot be downloaded now.
        """
        content = self._cached.version(model, number, files)
        try:
            was_here = self._ensure_downloaded(model, number, files, beside)
            # Processes that share the folder hash it concurrently, not one by one.
            if was_here and not _undamaged(content):
                with self._cached.locked(model):
                    if not _undamaged(content):  # not repaired by another process
                        self._cached.discard(model, content)
                self._ensure_downloaded(model, number, files, beside)
        except (InvalidArgument, NotFound) as error:
            raise Unavailable(str(error)) from None  # access may be granted later
        except OSError as error:
            raise _refused(error) from None

    def _ensure_downloaded(
        self, model: str, number: int, files: Mapping[str, Object], beside: Mapping[str, Object]
    ) -> bool:
        """Download the version under the model's lock; whether it was here already."""
        with self._cached.locked(model):
            self._fetch_beside(model, beside)
            if self._is_complete(self._cached.version(model, number, files), files):
                return True
            for left in reversed(range(DOWNLOADS)):
                try:
                    self._download(model, number, files)
                    break
                except IntegrityError:
                    if not left:
                        raise
        return False

    def _is_complete(self, content: Path, files: Mapping[str, Object]) -> bool:
        try:
            return content.is_dir() and all(
                (content / name).stat().st_size == each.size_bytes for name, each in files.items()
            )
        except OSError:
            return False

    def _download(self, model: str, number: int, files: Mapping[str, Object]) -> None:
        with self._cached.staging(model) as staged:
            needed = sum(each.size_bytes for each in files.values())
            if shutil.disk_usage(staged).free < needed + SPARE_BYTES:
                raise disk_full()
            below = f"{model}/{number}"
            self._get(below, files, staged)
            now = files_of_version(self._objects.listing(below))
            if now != files:
                raise Unavailable(f"version {number} was changed while it was downloaded")
            manifest.verify(staged)
            self._cached.put(self._cached.version(model, number, files), staged)

    def _get(self, below: str, files: Mapping[str, Object], folder: Path) -> None:
        keys, paths = [f"{below}/{name}" for name in files], [folder / name for name in files]
        # An error cancels the transfers that have not begun.
        list(self._objects.threads.map(self._objects.download, keys, files.values(), paths))
        for name, each in files.items():
            if (folder / name).stat().st_size != each.size_bytes:
                raise Unavailable(f"'{name}' was changed while it was downloaded")

    def _fetch_beside(self, model: str, found: Mapping[str, Object]) -> None:
        """Download the current configuration, labels and warm-up samples."""
        folder = self.folder / model
        folder.mkdir(parents=True, exist_ok=True)
        wanted = {
            name: each
            for name, each in found.items()
            if "/" not in name or name.startswith(f"{WARMUP}/")
        }
        known, current = self._cached.companions(model), described(wanted)
        if known == current:
            return
        changed = {n: each for n, each in wanted.items() if known.get(n) != current[n]}
        with self._cached.staging(model) as staged:
            self._get(model, changed, staged)
            self._cached.forget_companions(model)
            for name in changed:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(staged / name, folder / name)
        for name in known.keys() - wanted.keys():
            (folder / name).unlink(missing_ok=True)
        self._cached.remember_companions(model, current)


def _undamaged(version: Path) -> bool:
    try:
        manifest.verify(version)
    except IntegrityError:
        return False
    return True


def _fingerprint(found: Object) -> tuple[int, int, int]:
    """A fingerprint like a scan's: the size, and the ETag in place of time and inode."""
    etag = hashlib.sha256(found.etag.encode()).digest()
    return found.size_bytes, int.from_bytes(etag[:7]), 0


def _refused(error: OSError) -> ModelportError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full()
    reason = error.strerror or "unknown"
    return Unavailable(f"the folder of --repository-cache cannot be written: {reason}")
