"""The objects below a ``Location``, by fsspec: listed, read, written, each within a deadline.

Errors cross here, once, and say neither keys nor hosts nor what a library said: that text may hold
what nobody should read. For the same reason the libraries' own logging stays off.

    Unavailable      try again: no connection, no answer in time, the storage's own trouble
    InvalidArgument  trying again is of no use: no credentials, access refused, no such bucket
    NotFound         the object is gone
    Unsupported      the extra that brings the library is not installed
"""

from __future__ import annotations

import asyncio
import concurrent.futures
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
from modelport.gateway.repository.storage.location import Location

CONNECT_SECONDS = 5.0
#: Without a byte for so long, a transfer is given up.
READ_SECONDS = 20.0
#: A call that moves no file, all its retries included; a listing has many pages.
CALL_SECONDS = 30.0
LIST_SECONDS = 60.0
#: A file has so much time more.
SLOWEST_BYTES_PER_SECOND = 1024 * 1024
TRIES = 2
#: Transfers at once, of one repository.
TRANSFERS = 8

#: scheme → module, class, extra of modelport, further modules whose logging is kept off.
_LIBRARIES = {
    "s3": ("s3fs", "S3FileSystem", "s3", ("botocore", "aiobotocore", "urllib3", "boto3")),
    "gs": ("gcsfs", "GCSFileSystem", "gcs", ("google", "urllib3", "requests")),
    "az": ("adlfs", "AzureBlobFileSystem", "azure", ("azure", "msal", "urllib3")),
}
#: What the stores and their libraries call an access that is refused, or credentials that lack.
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
_NO_BUCKET = "the storage has no such bucket"
_TAKEN = frozenset(
    {"FileExistsError", "ResourceExistsError", "PreconditionFailed", "412"}
    | {"BlobAlreadyExists", "ConditionalRequestConflict"}
)


@dataclass(frozen=True, slots=True)
class Object:
    """``etag`` is whatever of the store's words changes with the content."""

    size_bytes: int
    etag: str
    modified: datetime.datetime | None = None


class ObjectStore:
    """Of one location. Blocking, and safe to call from several threads."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self._connecting = threading.Lock()
        self._connection: Any = None
        self.threads = concurrent.futures.ThreadPoolExecutor(TRANSFERS, "storage")

    def listing(self, below: str = "") -> dict[str, Object]:
        """Every object by its key relative to the location, or to the folder ``below`` in it.

        Keys may end in ``/``: that is how folders without objects are written.

        Raises:
            ModelportError: see the module.
        """
        path = self._path(below)
        self._filesystem.invalidate_cache()
        try:
            found = self._call("find", path, seconds=LIST_SECONDS, detail=True)
        except NotFound:  # a folder without objects is none
            found = {}
        if not found and not below and not self._call("exists", self.location.bucket):
            raise InvalidArgument(_NO_BUCKET)
        return {
            key.removeprefix(f"{path}/"): _object(told)
            for key, told in found.items()
            if key.startswith(f"{path}/")
        }

    def read(self, key: str, most_bytes: int) -> bytes:
        """The first ``most_bytes`` of an object."""
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
        """Write an object unless there is one, in one step of the store's.

        Returns:
            Whether it is there with this content: a write whose answer is lost is tried again.

        Raises:
            Unsupported: the store cannot do that.
        """
        try:
            self._call("pipe_file", self._path(key), content, mode="create")
        except _Taken:
            return self.exists(key, content)
        return True

    def exists(self, key: str, content: bytes) -> bool:
        """Whether the object is there with this content."""
        try:
            return self.read(key, len(content) + 1) == content
        except NotFound:
            return False

    def delete(self, keys: Iterable[str]) -> None:
        """Those that are there."""
        for key in keys:
            try:
                self._call("rm_file", self._path(key))
            except NotFound:
                continue

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
            told = _told(error)
        raise told


class _Taken(ModelportError):
    """There is an object of that name."""


class _Empty(ModelportError):
    """There is nothing in it: no part of it can be asked for."""


def _connect(location: Location) -> Any:
    """fsspec's file system; nothing is sent yet.

    Raises:
        Unsupported: its library is not installed.
    """
    module, name, extra, chatty = _LIBRARIES[location.scheme]
    try:
        library = importlib.import_module(module)
    except ImportError:
        raise Unsupported(
            f"{location.scheme}:// needs a library that is not installed: "
            f"pip install 'modelport[{extra}]'"
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
        # Without a key or a connection string: the chain of defaults, not anonymous access.
        options["anon"] = False
    try:
        filesystem = getattr(library, name)(**options)
    except Exception as error:
        told = _told(error)
    else:
        filesystem.retries = TRIES
        return filesystem
    raise told


def _object(told: Mapping[str, Any]) -> Object:
    names = ("generation", "ETag", "etag", "md5Hash", "last_modified", "created")
    etag = next((str(told[name]) for name in names if told.get(name)), "")
    times = ("LastModified", "last_modified", "updated", "created")
    modified = next((told[name] for name in times if told.get(name)), None)
    if isinstance(modified, str):
        modified = datetime.datetime.fromisoformat(modified)
    return Object(int(told.get("size") or 0), etag.strip('"'), modified)


def _told(error: BaseException) -> ModelportError:
    """The public error for what a library raised."""
    names = _names(error)
    known = next(iter(names), "error")
    if names.keys() & _TAKEN:
        return _Taken("the object is there already")
    if names.keys() & {"InvalidRange", "416"}:
        return _Empty("the object is empty")
    if names.keys() & {"NotImplemented", "501"}:
        return Unsupported("the storage cannot do this; it needs conditional writes")
    refusal = next(iter(sorted(names.keys() & _REFUSALS)), None)
    if refusal is not None:
        return InvalidArgument(
            f"the storage refuses access ({refusal}); check the credentials of the environment, "
            "and what they allow"
        )
    if names.keys() & {"NoSuchBucket", "ContainerNotFound"}:
        return InvalidArgument(_NO_BUCKET)
    if names.keys() & _ABSENT:
        return NotFound("the object is not there any more")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_room()
    if "TimeoutError" in names:
        return Unavailable("the storage does not answer in time")
    return Unavailable(f"the storage cannot be reached ({known})")


def no_room() -> Unavailable:
    return Unavailable("no room is left on the disk of --repository-cache; free some there")


def _names(error: BaseException | None) -> dict[str, None]:
    """What an error and its causes are called: classes, and the codes of the store, in order."""
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
