"""A local copy of the served versions of a repository in object storage.

    <cache>/s3-bucket-<hash of the URL>/<model>/config.pbtxt, labels, warmup/
    <cache>/s3-bucket-<hash of the URL>/<model>/<version>/<hash>/   appears by one rename
    <cache>/s3-bucket-<hash of the URL>/.beside/<model>             the objects of those files
    <cache>/s3-bucket-<hash of the URL>/.staging/<model>/<random>   a download in progress

The hash covers the objects' sizes and ETags: a folder of files never changes once it exists, even
if the version is overwritten in the object store, and no load sees files of two contents.

A look lists the store, finds complete versions (``complete_versions``) and downloads only
configurations and manifests. A version is downloaded when it loads, by one of the processes that
share the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import structlog

from modelport.gateway.errors import (
    IntegrityError,
    InvalidArgument,
    ModelportError,
    NotFound,
    Unavailable,
)
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import manifest
from modelport.gateway.repository.config import WARMUP
from modelport.gateway.repository.scan import (
    MAX_CONFIG_BYTES,
    VERSION_NAME,
    ModelEntry,
    VersionEntry,
)
from modelport.gateway.repository.storage.complete_versions import (
    CompleteVersions,
    StoredModel,
    group,
    in_whole,
)
from modelport.gateway.repository.storage.location import Location, server_of
from modelport.gateway.repository.storage.objects import Object, ObjectStore, no_room

log = structlog.get_logger("modelport.storage")

_BESIDE, _STAGING, _LOCKS = ".beside", ".staging", ".locks"
#: A download that does not match its manifest is repeated once, as it may have been damaged.
DOWNLOADS = 2
#: Free disk space that a download must leave.
SPARE_BYTES = 16 * 1024 * 1024


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/modelport``, usually ``~/.cache/modelport``."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelport"
    except RuntimeError:  # a user without a home, as in a container
        raise InvalidArgument(
            "the user has no home folder for a repository cache; set --repository-cache"
        ) from None


class Mirror:
    """The mirror of one location. Any thread may ``look``, and ``fetch`` versions it found."""

    def __init__(self, location: Location, cache: Path) -> None:
        named = hashlib.sha256(f"{location} {server_of(location)}".encode()).hexdigest()[:16]
        self.location = location
        self.folder = cache / f"{location.scheme}-{location.bucket}-{named}"
        self._objects = ObjectStore(location)
        self._complete = CompleteVersions(self._objects)
        #: config.pbtxt by model: the object it was read from, and its text.
        self._configs: dict[str, tuple[Object, str]] = {}
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
            self._open()
        began = time.time()
        models = group(self._objects.listing())
        self._configs = {name: read for name, read in self._configs.items() if name in models}
        complete = self._complete.among(models, self._holds)
        self._read_configs(models)
        found = {}
        for name, model in models.items():
            entry = self._entry(name, model, complete[name])
            if entry is not None:
                found[name] = entry
        with contextlib.suppress(OSError):  # extra files do no harm
            self._prune({name: set(model.versions) for name, model in models.items()}, began)
        self._found = found
        return found

    def _entry(self, name: str, model: StoredModel, whole: StoredModel) -> ModelEntry | None:
        """The model's entry; None: no version is complete yet."""
        path, before = self.folder / name, self._found.get(name)
        known = before.versions if before is not None else {}
        kept = {number: entry for number, entry in known.items() if number in model.versions}
        if model.versions and not whole.versions and not kept:
            return None
        versions = dict(kept)
        for number, files in whole.versions.items():
            print_of = tuple(sorted((key, *_fingerprint(each)) for key, each in files.items()))
            if number in kept and kept[number].fingerprint != print_of:
                log.warning("model version was overwritten in storage", model=name, version=number)
            content, problem = self._content(name, number, files), whole.problems.get(number, "")
            fetch = partial(self._fetch, name, number, files, model.beside)
            versions[number] = VersionEntry(number, content, print_of, problem, fetch)
        try:
            text = self._config(name, model.beside.get(configuration.FILENAME))
        except (NotFound, Unavailable):
            raise
        except (ModelportError, ValueError) as error:
            return ModelEntry(name, path, problem=str(error))
        return ModelEntry(name, path, text, versions)

    def _read_configs(self, models: Mapping[str, StoredModel]) -> None:
        """Read new and changed configurations concurrently, as there may be a thousand."""
        read = {
            name: self._objects.threads.submit(self._config, name, found)
            for name, model in models.items()
            if (found := model.beside.get(configuration.FILENAME)) is not None
            and self._configs.get(name, (None,))[0] != found
        }
        try:
            for each in read.values():
                if isinstance(error := each.exception(), (NotFound, Unavailable)):
                    raise error  # other errors are reported in the model's entry
        finally:
            for each in read.values():
                each.cancel()

    def _config(self, name: str, found: Object | None) -> str | None:
        if found is None:
            return None
        if found.size_bytes > MAX_CONFIG_BYTES:
            raise ValueError(f"'{configuration.FILENAME}' is larger than {MAX_CONFIG_BYTES} bytes")
        known = self._configs.get(name)
        if known is None or known[0] != found:
            content = self._objects.read(f"{name}/{configuration.FILENAME}", MAX_CONFIG_BYTES)
            self._configs[name] = known = (found, content.decode("utf-8"))
        return known[1]

    # -- a version --------------------------------------------------------------------------------

    def _content(self, model: str, number: int, files: Mapping[str, Object]) -> Path:
        """The folder for exactly these objects."""
        named = json.dumps(_described(files), sort_keys=True).encode()
        return self.folder / model / str(number) / hashlib.sha256(named).hexdigest()[:16]

    def _holds(self, model: str, number: int, files: Mapping[str, Object]) -> bool:
        """Whether a version of exactly these objects has been downloaded."""
        return self._content(model, number, files).is_dir()

    def _fetch(
        self, model: str, number: int, files: Mapping[str, Object], beside: Mapping[str, Object]
    ) -> None:
        """Download the version's folder unless it is here already; blocking.

        Raises:
            IntegrityError: it does not match its manifest.
            Unavailable: it cannot be downloaded now.
        """
        content = self._content(model, number, files)
        try:
            was_here = self._bring(model, number, files, beside)
            # Processes that share the folder hash it concurrently, not one by one.
            if was_here and not _undamaged(content):
                with self._locked(model):
                    if not _undamaged(content):  # not repaired by another process
                        self._discard(model, content)
                self._bring(model, number, files, beside)
        except (InvalidArgument, NotFound) as error:
            raise Unavailable(str(error)) from None  # access may be granted later
        except OSError as error:
            raise _refused(error) from None

    def _bring(
        self, model: str, number: int, files: Mapping[str, Object], beside: Mapping[str, Object]
    ) -> bool:
        """Download the version under the model's lock; whether it was here already."""
        with self._locked(model):
            self._fetch_beside(model, beside)
            if self._whole_here(self._content(model, number, files), files):
                return True
            for left in reversed(range(DOWNLOADS)):
                try:
                    self._download(model, number, files)
                    break
                except IntegrityError:
                    if not left:
                        raise
        return False

    def _whole_here(self, content: Path, files: Mapping[str, Object]) -> bool:
        try:
            return content.is_dir() and all(
                (content / name).stat().st_size == each.size_bytes
                for name, each in files.items()
                if name
            )
        except OSError:
            return False

    def _download(self, model: str, number: int, files: Mapping[str, Object]) -> None:
        with self._staging(model) as staged:
            needed = sum(each.size_bytes for each in files.values())
            if shutil.disk_usage(staged).free < needed + SPARE_BYTES:
                raise no_room()
            below = f"{model}/{number}"
            self._get(below, files, staged)
            now = in_whole(self._objects.listing(below))
            if now != files:
                raise Unavailable(f"version {number} was changed while it was downloaded")
            manifest.verify(staged)
            self._take(model, self._content(model, number, files), staged)

    @contextlib.contextmanager
    def _staging(self, model: str) -> Iterator[Path]:
        """An empty folder with a new name, because transfers of a failed download may still
        write."""
        below = self.folder / _STAGING / model
        shutil.rmtree(below, ignore_errors=True)
        below.mkdir(parents=True, exist_ok=True)
        try:
            yield Path(tempfile.mkdtemp(dir=below))
        finally:
            shutil.rmtree(below, ignore_errors=True)

    def _get(self, below: str, files: Mapping[str, Object], folder: Path) -> None:
        named = [name for name in files if name]
        download, pool = self._objects.download, self._objects.threads
        transfers = [
            pool.submit(download, f"{below}/{name}", files[name], folder / name) for name in named
        ]
        try:
            for transfer in transfers:
                transfer.result()
        finally:
            for transfer in transfers:
                transfer.cancel()
        for name in named:
            if (folder / name).stat().st_size != files[name].size_bytes:
                raise Unavailable(f"'{name}' was changed while it was downloaded")

    def _take(self, model: str, content: Path, staged: Path) -> None:
        """Move a download to its place, and remove outdated folders.

        Keep the newest of those, because another process may be loading it.
        """
        content.parent.mkdir(exist_ok=True)
        others = [each for each in content.parent.iterdir() if each != content]
        for other in sorted(others, key=lambda each: each.stat().st_mtime)[:-1]:
            shutil.rmtree(other, ignore_errors=True)
        if content.exists():  # damaged
            os.rename(content, staged.with_name("damaged"))
        os.rename(staged, content)

    def _discard(self, model: str, content: Path) -> None:
        """Remove a folder atomically, so that no process finds half of it."""
        with self._staging(model) as staged, contextlib.suppress(FileNotFoundError):
            os.rename(content, staged / content.name)

    def _fetch_beside(self, model: str, found: Mapping[str, Object]) -> None:
        """Download the current configuration, labels and warm-up samples."""
        folder = self.folder / model
        folder.mkdir(parents=True, exist_ok=True)
        wanted = {
            name: each
            for name, each in found.items()
            if "/" not in name or name.startswith(f"{WARMUP}/")
        }
        known = self._state(model)
        described = _described(wanted)
        if known == described:
            return
        changed = {n: each for n, each in wanted.items() if known.get(n) != described[n]}
        with self._staging(model) as staged:
            self._get(model, changed, staged)
            self._forget(model)
            for name in changed:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(staged / name, folder / name)
        for name in known.keys() - wanted.keys():
            (folder / name).unlink(missing_ok=True)
        self._remember(model, described)

    # -- the folder -------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            for name in (_BESIDE, _STAGING, _LOCKS):
                (self.folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)
        except OSError as error:
            raise InvalidArgument(
                f"the repository cache '{self.folder}' cannot be created ({error.strerror}); set "
                "--repository-cache to a folder of your own"
            ) from None
        self._opened = True

    @contextlib.contextmanager
    def _locked(self, model: str, wait: bool = True) -> Iterator[None]:
        """Hold the model's lock; raises ``BlockingIOError`` if it is taken, unless ``wait``."""
        descriptor = os.open(self.folder / _LOCKS / model, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(descriptor)

    def _state(self, model: str) -> dict[str, list[object]]:
        try:
            known = json.loads((self.folder / _BESIDE / model).read_bytes())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _remember(self, model: str, described: Mapping[str, list[object]]) -> None:
        path = self.folder / _BESIDE / model
        written = path.with_name(f".{model}")
        written.write_text(json.dumps(described))
        os.replace(written, path)

    def _forget(self, model: str) -> None:
        (self.folder / _BESIDE / model).unlink(missing_ok=True)

    def _prune(self, there: Mapping[str, set[int]], began: float) -> None:
        """Remove files that the object store does not have any more.

        Except files newer than the look ``began``, which another process may know already.
        """
        for folder in self.folder.iterdir():
            model, numbers = folder.name, there.get(folder.name)
            if model.startswith("."):  # not a model
                continue
            known = [each for each in folder.iterdir() if VERSION_NAME.match(each.name)]
            gone = [each for each in known if numbers is None or int(each.name) not in numbers]
            old = [each for each in gone if each.stat().st_mtime < began]
            if not old and (numbers is not None or known):
                continue
            with contextlib.suppress(BlockingIOError), self._locked(model, wait=False):
                for version in old:
                    self._discard(model, version)
                if numbers is None and len(old) == len(known):
                    self._forget(model)
                    for left in (folder, self.folder / _STAGING / model):
                        shutil.rmtree(left, ignore_errors=True)


def _undamaged(version: Path) -> bool:
    try:
        manifest.verify(version)
    except IntegrityError:
        return False
    return True


def _described(files: Mapping[str, Object]) -> dict[str, list[object]]:
    return {name: [each.size_bytes, each.etag] for name, each in files.items()}


def _fingerprint(found: Object) -> tuple[int, int, int]:
    """A fingerprint like a scan's: the size, and the ETag in place of time and inode."""
    etag = hashlib.sha256(found.etag.encode()).digest()
    return found.size_bytes, int.from_bytes(etag[:7]), 0


def _refused(error: OSError) -> ModelportError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_room()
    reason = error.strerror or "unknown"
    return Unavailable(f"the folder of --repository-cache cannot be written: {reason}")
