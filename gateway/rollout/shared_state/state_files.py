"""Small files below ``.rollouts`` of a repository, in a folder or in object storage.

Both create a file only if it does not exist, as one atomic operation: that is what gateways which
share a repository agree by. No scan of the repository takes ``.rollouts`` for a model.

A network file system must show other machines' files in less than the lease: mount NFS with
``lookupcache=none,actimeo=1``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from modelport.gateway.errors import InvalidArgument, ModelportError, NotFound, Unavailable
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.repository.storage.objects import ObjectStore

T = TypeVar("T")

FOLDER = ".rollouts"
MAX_FILES = 100_000
#: Temporary files of this age were left behind by a process that died.
LEFT_BEHIND_SECONDS = 3600.0
_TEMPORARY = ".tmp"
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC
#: Errors of a folder that is misplaced or protected; others may pass.
_LASTING = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class FolderFiles:
    """Files in a repository that is a folder. Blocking; no symbolic link is followed below it."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository

    def listing(self, below: str) -> dict[str, str]:
        try:
            with self._folder(below) as folder:
                return dict(_files(folder, ""))
        except NotFound:
            return {}

    def read(self, key: str, most: int) -> bytes:
        with self._place(key) as (folder, name):
            # Opening a pipe without O_NONBLOCK would wait for its writer.
            flags = os.O_RDONLY | os.O_NONBLOCK | _OPEN
            with open(name, "rb", opener=lambda n, _: os.open(n, flags, dir_fd=folder)) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise InvalidArgument("it is not a regular file")
                return file.read(most)

    def create(self, key: str, content: bytes) -> bool:
        with self._place(key, make=True) as (folder, name):
            with _temporary(folder, content) as written:
                try:
                    os.link(written, name, src_dir_fd=folder, dst_dir_fd=folder)
                except FileExistsError:
                    created = False
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    raise InvalidArgument(
                        "the repository's file system has no hard links, by which rollouts keep "
                        "their state; use another, or object storage"
                    ) from error
                else:
                    created = True
            os.fsync(folder)
        # A server may repeat a request whose response was lost.
        return created or self._has(key, content)

    def _has(self, key: str, content: bytes) -> bool:
        try:
            return self.read(key, len(content) + 1) == content
        except NotFound:  # another gateway has written newer revisions, and deleted this one
            return False

    def replace(self, key: str, content: bytes) -> None:
        with self._place(key, make=True) as (folder, name), _temporary(folder, content) as written:
            os.replace(written, name, src_dir_fd=folder, dst_dir_fd=folder)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with contextlib.suppress(NotFound), self._place(key) as (folder, name):
                os.unlink(name, dir_fd=folder)
                _sweep(folder)

    @contextlib.contextmanager
    def _place(self, key: str, make: bool = False) -> Iterator[tuple[int, str]]:
        """A descriptor of the folder of ``key``, and the file's name."""
        below, _, name = key.rpartition("/")
        with self._folder(below, make) as folder:
            yield folder, name

    @contextlib.contextmanager
    def _folder(self, below: str, make: bool = False) -> Iterator[int]:
        """Open a folder; translate the errors of operations in it."""
        flags = os.O_RDONLY | os.O_DIRECTORY
        with _translated():
            try:
                folder = os.open(self._repository, flags | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise Unavailable("the repository's folder is gone") from error
            try:
                for name in (FOLDER, *below.split("/")):
                    if make:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(name, dir_fd=folder)
                    inner = os.open(name, flags | _OPEN, dir_fd=folder)
                    os.close(folder)
                    folder = inner
                yield folder
            finally:
                os.close(folder)


class ObjectFiles:
    """Files in a repository in object storage. Blocking."""

    def __init__(self, location: Location) -> None:
        self._objects = ObjectStore(location)

    def listing(self, below: str) -> dict[str, str]:
        found = self._objects.listing(f"{FOLDER}/{below}")
        return {key: f"{each.size_bytes} {each.etag}" for key, each in found.items()}

    def read(self, key: str, most: int) -> bytes:
        return self._objects.read(f"{FOLDER}/{key}", most)

    def create(self, key: str, content: bytes) -> bool:
        return self._objects.create(f"{FOLDER}/{key}", content)

    def replace(self, key: str, content: bytes) -> None:
        self._objects.write(f"{FOLDER}/{key}", content)

    def delete(self, keys: Iterable[str]) -> None:
        self._objects.delete(f"{FOLDER}/{key}" for key in keys)


class RolloutFiles:
    """Files by keys such as ``state/fraud/0000000001.json``.

    One thread reads and writes them, because no write may overtake another. Every method raises:
        Unavailable: the storage does not respond; what was asked may be done, now or later.
        InvalidArgument: it refuses.

    Args:
        seconds: the longest wait for an operation, which may still be done afterwards.
    """

    def __init__(self, repository: Path | Location, seconds: float) -> None:
        self._files: FolderFiles | ObjectFiles = (
            FolderFiles(repository) if isinstance(repository, Path) else ObjectFiles(repository)
        )
        self.is_quick = isinstance(repository, Path)
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1, "rollouts")

    async def listing(self, below: str) -> Mapping[str, str]:
        """The files below a folder, by keys relative to it; the value changes with the content."""
        return await self._call(lambda: self._files.listing(below))

    async def read(self, key: str, most: int) -> bytes:
        """The content; of a file larger than ``most`` bytes, at least ``most`` of them.

        Raises:
            NotFound: there is no such file.
        """
        return await self._call(lambda: self._files.read(key, most))

    async def create(self, key: str, content: bytes) -> bool:
        """Create the file unless it exists; whether it has this content now."""
        return await self._call(lambda: self._files.create(key, content))

    async def replace(self, key: str, content: bytes) -> None:
        """Write the file atomically: every reader sees the old or the new content."""
        await self._call(lambda: self._files.replace(key, content))

    async def delete(self, keys: Iterable[str]) -> None:
        """Delete the existing files among ``keys``."""
        await self._call(lambda: self._files.delete(keys))

    async def _call(self, operation: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.get_running_loop().run_in_executor(self._thread, operation)
        except TimeoutError:
            raise Unavailable("the repository does not respond in time") from None


def _files(folder: int, prefix: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """The regular files in a folder and in its folders."""
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_FILES:
                raise InvalidArgument(f"'{FOLDER}' holds more than {MAX_FILES} files")
            with contextlib.suppress(FileNotFoundError):  # it is deleted at the moment
                if entry.is_file(follow_symlinks=False):
                    seen = entry.stat(follow_symlinks=False)
                    tag = f"{seen.st_ino} {seen.st_mtime_ns} {seen.st_size}"
                    yield f"{prefix}{entry.name}", tag
                elif entry.is_dir(follow_symlinks=False) and not depth:
                    flags = os.O_RDONLY | os.O_DIRECTORY | _OPEN
                    inner = os.open(entry.name, flags, dir_fd=folder)
                    try:
                        yield from _files(inner, f"{prefix}{entry.name}/", depth + 1)
                    finally:
                        os.close(inner)


@contextlib.contextmanager
def _temporary(folder: int, content: bytes) -> Iterator[str]:
    """Write a file that is gone at the end, unless it has been renamed."""
    name = f".{uuid.uuid4().hex}{_TEMPORARY}"
    # URLs of webhooks may have secrets.
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _sweep(folder: int) -> None:
    """Delete temporary files that were left behind."""
    before = time.time() - LEFT_BEHIND_SECONDS
    for key, tag in list(_files(folder, "", 1)):
        if key.endswith(_TEMPORARY) and int(tag.split()[1]) < before * 1e9:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(key, dir_fd=folder)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound("there is no such file") from error
    except OSError as error:
        kind: type[ModelportError] = InvalidArgument if error.errno in _LASTING else Unavailable
        raise kind(
            f"the folder '{FOLDER}' of the repository cannot be used: {error.strerror}"
        ) from error
