"""The objects of a ``Location``, accessed through fsspec with time limits.

Errors are translated here. Their messages contain no keys, hosts or texts of the libraries, which
may be confidential. For the same reason the libraries' own logging is off.

    Unavailable      retry: no connection, a timeout, or a failure of the object store
    InvalidArgument  do not retry: no credentials, access refused, no such bucket
    NotFound         the object does not exist
    Unsupported      the extra with the library is not installed
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import datetime
import errno
import importlib
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelport.gateway.errors import (
    InvalidArgument,
    ModelportError,
    NotFound,
    Unavailable,
    Unsupported,
)
from modelport.gateway.extras import install_extra
from modelport.gateway.repository.storage.location import Location

CONNECT_SECONDS = 5.0
#: A transfer fails after this time without data.
READ_SECONDS = 20.0
#: A call without file contents, including retries; a listing has many pages.
CALL_SECONDS = 30.0
LIST_SECONDS = 60.0
#: Additional time for a file.
SLOWEST_BYTES_PER_SECOND = 1024 * 1024
TRIES = 2
#: Concurrent transfers of one repository.
TRANSFERS = 8

#: Scheme → module, class, extra of modelport, further modules whose logging is switched off.
_LIBRARIES = {
    "s3": ("s3fs", "S3FileSystem", "s3", ("botocore", "aiobotocore", "urllib3", "boto3")),
    "gs": ("gcsfs", "GCSFileSystem", "gcs", ("google", "urllib3", "requests")),
    "az": ("adlfs", "AzureBlobFileSystem", "azure", ("azure", "msal", "urllib3")),
}
#: Error names of stores and libraries for refused access or missing credentials.
_REFUSALS = frozenset(
    {
        *("AccessDenied", "AllAccessDisabled", "AuthenticationFailed", "AuthorizationFailure"),
        *("ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "401"),
        *("403", "Unauthorized", "Forbidden", "RequestTimeTooSkewed", "TokenRefreshRequired"),
        *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
        *("DefaultCredentialsError", "RefreshError", "CredentialUnavailableError"),
        *("ClientAuthenticationError", "PermissionError", "ProfileNotFound"),
        *("AuthorizationPermissionMismatch", "UnauthorizedSSOTokenError", "TokenRetrievalError"),
    }
)
_ABSENT = frozenset({"NoSuchKey", "BlobNotFound", "404", "FileNotFoundError"})
_NO_BUCKET = "there is no such bucket"
_TAKEN = frozenset(
    {"FileExistsError", "ResourceExistsError", "PreconditionFailed", "412"}
    | {"BlobAlreadyExists", "ConditionalRequestConflict"}
)


@dataclass(frozen=True, slots=True)
class Object:
    """``etag`` is any identifier that changes with the content."""

    size_bytes: int
    etag: str
    modified: datetime.datetime | None = None


class ObjectStore:
    """The objects of one location. Blocking; safe to call from several threads."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self._connecting = threading.Lock()
        self._connection: Any = None
        self.threads = concurrent.futures.ThreadPoolExecutor(TRANSFERS, "storage")

    def listing(self, below: str = "") -> dict[str, Object]:
        """Every object by its key, relative to the location or to the folder ``below``.

        Keys may end in ``/``, as placeholders for empty folders.

        Raises:
            ModelportError: see the module.
        """
        path = self._path(below)
        self._filesystem.invalidate_cache()
        try:
            found = self._call("find", path, seconds=LIST_SECONDS, detail=True)
        except NotFound:  # a folder without objects does not exist
            found = {}
        if not found and not below and not self._call("exists", self.location.bucket):
            raise InvalidArgument(_NO_BUCKET)
        return {
            key.removeprefix(f"{path}/"): _object(info)
            for key, info in found.items()
            if key.startswith(f"{path}/")
        }

    def read(self, key: str, most_bytes: int) -> bytes:
        """Read the first ``most_bytes`` of an object."""
        try:
            return bytes(self._call("cat_file", self._path(key), start=0, end=most_bytes))
        except _Empty:
            return b""

    def download(self, key: str, found: Object, path: Path) -> None:
        seconds = CALL_SECONDS + found.size_bytes / SLOWEST_BYTES_PER_SECOND
        path.parent.mkdir(parents=True, exist_ok=True)
        self._call("get_file", self._path(key), str(path), seconds=seconds)

    def upload(self, path: Path, key: str) -> None:
        seconds = CALL_SECONDS + path.stat().st_size / SLOWEST_BYTES_PER_SECOND
        self._call("put_file", str(path), self._path(key), seconds=seconds)

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless it exists, as one atomic operation of the store.

        Returns:
            Whether it has this content: a write whose response is lost is retried.

        Raises:
            Unsupported: the store does not support that.
        """
        try:
            self._call("pipe_file", self._path(key), content, mode="create")
        except _ObjectExists:
            return self.exists(key, content)
        return True

    def replace(self, key: str, content: bytes, known: bytes | None) -> bool:
        """Write an object whose content is still ``known``; None: that does not exist.

        S3 compares in the same operation. Other stores have no such operation in fsspec: there, a
        write within the moment between the comparison and this one is lost.

        Returns:
            Whether it has this content.
        """
        if known is None:
            return self.create(key, content)
        path = self._path(key)
        try:
            etag = _object(self._call("info", path)).etag
        except NotFound:
            return False
        if not self.exists(key, known):
            return False
        match: dict[str, Any] = {"IfMatch": etag} if self.location.scheme == "s3" else {}
        try:
            self._call("pipe_file", path, content, **match)
        except _ObjectExists:
            return self.exists(key, content)
        return True

    def write(self, key: str, content: bytes) -> None:
        """Write an object, or overwrite it."""
        self._call("pipe_file", self._path(key), content)

    def exists(self, key: str, content: bytes) -> bool:
        """Whether the object exists with this content."""
        try:
            return self.read(key, len(content) + 1) == content
        except NotFound:
            return False

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the existing objects among ``keys``."""
        for key in keys:
            with contextlib.suppress(NotFound):
                self._call("rm_file", self._path(key))

    def _path(self, key: str) -> str:
        return f"{self.location.path}/{key}" if key else self.location.path

    @property
    def _filesystem(self) -> Any:
        with self._connecting:
            if self._connection is None:
                self._connection = _connect(self.location)
            return self._connection

    def _call(
        self, operation: str, *args: Any, seconds: float = CALL_SECONDS, **options: Any
    ) -> Any:
        filesystem = self._filesystem

        async def call() -> Any:
            async with asyncio.timeout(seconds):
                return await getattr(filesystem, f"_{operation}")(*args, **options)

        try:
            return asyncio.run_coroutine_threadsafe(call(), filesystem.loop).result()
        except Exception as error:
            failure = _failure(error)
        raise failure


class _ObjectExists(ModelportError):
    """An object of that name exists."""


class _Empty(ModelportError):
    """The object is empty, so that no range of it can be read."""


def _connect(location: Location) -> Any:
    """Create fsspec's file system; nothing is sent yet.

    Raises:
        Unsupported: the library is not installed.
    """
    module, name, extra, chatty = _LIBRARIES[location.scheme]
    try:
        library = importlib.import_module(module)
    except ImportError:
        raise Unsupported(
            f"{location.scheme}:// needs a library that is not installed: {install_extra(extra)}"
        ) from None
    for each in (module, "fsspec", *chatty):  # they would log headers and parameters
        logging.getLogger(each).setLevel(logging.CRITICAL)
    options: dict[str, Any] = {"use_listings_cache": False}
    if location.scheme == "s3":
        options["endpoint_url"] = location.endpoint or None
        options["config_kwargs"] = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "retries": {"total_max_attempts": TRIES, "mode": "standard"},
            "max_pool_connections": 4 * TRANSFERS,
        }
    elif location.scheme == "az":
        options |= {"connection_timeout": int(CONNECT_SECONDS), "read_timeout": int(READ_SECONDS)}
        # Without a key or a connection string: the default credentials, not anonymous access.
        options["anon"] = False
    try:
        filesystem = getattr(library, name)(**options)
    except Exception as error:
        failure = _failure(error)
    else:
        filesystem.retries = TRIES
        return filesystem
    raise failure


def _object(info: Mapping[str, Any]) -> Object:
    names = ("generation", "ETag", "etag", "md5Hash", "last_modified", "created")
    etag = next((str(info[name]) for name in names if info.get(name)), "")
    times = ("LastModified", "last_modified", "updated", "created")
    modified = next((info[name] for name in times if info.get(name)), None)
    if isinstance(modified, str):
        modified = datetime.datetime.fromisoformat(modified)
    return Object(int(info.get("size") or 0), etag.strip('"'), modified)


def _failure(error: BaseException) -> ModelportError:
    """The public error for an exception of a library."""
    names = _names(error)
    known = next(iter(names), "error")
    if names.keys() & _TAKEN:
        return _ObjectExists("the object exists already")
    if names.keys() & {"InvalidRange", "416"}:
        return _Empty("the object is empty")
    if names.keys() & {"NotImplemented", "501"}:
        return Unsupported("the object store does not support conditional writes")
    if refusals := sorted(names.keys() & _REFUSALS):
        return InvalidArgument(
            f"the object store refuses access ({refusals[0]}); check the credentials in the "
            "environment and their permissions"
        )
    if names.keys() & {"NoSuchBucket", "ContainerNotFound"}:
        return InvalidArgument(_NO_BUCKET)
    if names.keys() & _ABSENT:
        return NotFound("the object no longer exists")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full()
    if "TimeoutError" in names:
        return Unavailable("the object store does not respond in time")
    return Unavailable(f"the object store cannot be reached ({known})")


def disk_full() -> Unavailable:
    return Unavailable("the disk of --repository-cache is full; free some space")


def _names(error: BaseException | None) -> dict[str, None]:
    """The class names and store codes of an error and its causes, in order."""
    names: dict[str, None] = {}
    for _ in range(8):
        if error is None:
            break
        response = getattr(error, "response", None)
        if isinstance(response, Mapping):
            names[str(response.get("Error", {}).get("Code", ""))] = None
        for attribute in ("error_code", "status_code", "code", "status"):
            code = getattr(error, attribute, None)
            if isinstance(code, str | int) and not isinstance(code, bool):
                names[str(getattr(code, "value", code))] = None
        for kind in type(error).__mro__:
            if kind not in (Exception, BaseException, object, OSError):
                names[kind.__name__] = None
        error = error.__cause__ or error.__context__
    names.pop("", None)
    return names
