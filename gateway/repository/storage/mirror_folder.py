"""The folder of a mirror, which processes share.

    <model>/config.pbtxt, labels, warmup/
    <model>/<version>/<hash>/   appears by one rename
    .beside/<model>             the objects of the files beside the versions
    .staging/<model>/<random>   a download in progress
    .locks/<model>

The hash covers the objects' sizes and ETags: a folder of files never changes once it exists, even
if the version is overwritten in the object store, and no load sees files of two contents.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository.scan import VERSION_NAME
from modelport.gateway.repository.storage.objects import Object

_BESIDE, _STAGING, _LOCKS = ".beside", ".staging", ".locks"
#: Size and ETag of objects by their names.
DescribedObjects = dict[str, list[object]]


def described(files: Mapping[str, Object]) -> DescribedObjects:
    """Describe objects in JSON, so that another process can compare them."""
    return {name: [each.size_bytes, each.etag] for name, each in files.items()}


class MirrorFolder:
    """The folder of a mirror. Downloads and removals hold the lock of their model."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> None:
        """Create the folder.

        Raises:
            InvalidArgument: it cannot be created.
        """
        try:
            for name in (_BESIDE, _STAGING, _LOCKS):
                (self._path / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path.chmod(0o700)
        except OSError as error:
            raise InvalidArgument(
                f"the repository cache '{self._path}' cannot be created ({error.strerror}); set "
                "--repository-cache to a folder of your own"
            ) from None

    def version(self, model: str, number: int, files: Mapping[str, Object]) -> Path:
        """The folder for exactly these objects."""
        named = json.dumps(described(files), sort_keys=True).encode()
        return self._path / model / str(number) / hashlib.sha256(named).hexdigest()[:16]

    @contextlib.contextmanager
    def locked(self, model: str, wait: bool = True) -> Iterator[None]:
        """Hold the model's lock; raises ``BlockingIOError`` if it is taken, unless ``wait``."""
        descriptor = os.open(self._path / _LOCKS / model, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def staging(self, model: str) -> Iterator[Path]:
        """An empty folder with a new name, because transfers of a failed download may still
        write."""
        below = self._path / _STAGING / model
        shutil.rmtree(below, ignore_errors=True)
        below.mkdir(parents=True, exist_ok=True)
        try:
            yield Path(tempfile.mkdtemp(dir=below))
        finally:
            shutil.rmtree(below, ignore_errors=True)

    def put(self, content: Path, staged: Path) -> None:
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

    def discard(self, model: str, content: Path) -> None:
        """Remove a folder atomically, so that no process finds half of it."""
        with self.staging(model) as staged, contextlib.suppress(FileNotFoundError):
            os.rename(content, staged / content.name)

    def companions(self, model: str) -> DescribedObjects:
        """The objects of the downloaded files beside the versions; empty: unknown."""
        try:
            known = json.loads((self._path / _BESIDE / model).read_bytes())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def remember_companions(self, model: str, current: DescribedObjects) -> None:
        """Record the objects of the files beside the versions."""
        with self.staging(model) as staged:
            written = staged / _BESIDE
            written.write_text(json.dumps(current))
            os.replace(written, self._path / _BESIDE / model)

    def forget_companions(self, model: str) -> None:
        """Forget the record, before the files change."""
        (self._path / _BESIDE / model).unlink(missing_ok=True)

    def prune(self, there: Mapping[str, set[int]], began: float) -> None:
        """Remove files that the object store no longer has.

        Except files newer than the look ``began``, which another process may know already.
        """
        for folder in self._path.iterdir():
            model, numbers = folder.name, there.get(folder.name)
            if model.startswith("."):  # not a model
                continue
            known = [each for each in folder.iterdir() if VERSION_NAME.match(each.name)]
            gone = [each for each in known if numbers is None or int(each.name) not in numbers]
            old = [each for each in gone if each.stat().st_mtime < began]
            if not old and (numbers is not None or known):
                continue
            with contextlib.suppress(BlockingIOError), self.locked(model, wait=False):
                for version in old:
                    self.discard(model, version)
                if numbers is None and len(old) == len(known):
                    self.forget_companions(model)
                    for left in (folder, self._path / _STAGING / model):
                        shutil.rmtree(left, ignore_errors=True)
