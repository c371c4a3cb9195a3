"""Credentials shown to other servers: tokens and client certificates, from files that may change.

Kubernetes renews the token of a service account within the hour, and cert-manager certificates.
"""

from __future__ import annotations

import contextlib
import functools
import re
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository.routes_file import ModelRoute, RouteCredentials
from modelport.gateway.runtime import gateway_files
from modelport.gateway.runtime.file_watcher import FileWatch, FileWatcher
from modelport.gateway.runtime.gateway_files import Contents, FileContent, at_path

log = structlog.get_logger("modelport.upstream")

T = TypeVar("T")

#: Name of the watches, in the log.
WATCH = "route credentials"
#: The interval of the checks whether a file has changed.
CHECK_SECONDS = 1.0
MAX_TOKEN_BYTES = 64 * 1024
_TOKEN = re.compile(rb"[!-~]+\Z")


def read_token(path: Path) -> str:
    """Read the token in a file.

    Raises:
        InvalidArgument: The file cannot be read, or holds no token; the message names it.
    """
    return _token(gateway_files.read(path, wait=True))


def _token(file: FileContent) -> str:
    try:
        content = file.read()
    except OSError as error:
        raise InvalidArgument(
            f"the token file {file.path} cannot be read: {error.strerror}"
        ) from error
    return checked_token(content, f"the token file {file.path}")


def checked_token(content: bytes, origin: str) -> str:
    """Return the token in ``content``, without white space around it.

    Raises:
        InvalidArgument: There is none, or something else; the message names ``origin``.
    """
    token = content.strip()
    if len(token) > MAX_TOKEN_BYTES:
        raise InvalidArgument(f"{origin} holds more than {MAX_TOKEN_BYTES} bytes; give one token")
    if not _TOKEN.match(token):
        raise InvalidArgument(f"{origin} must hold one token, and nothing else")
    return token.decode("ascii")


def client_context(
    ca_file: FileContent | None = None,
    certificate: FileContent | None = None,
    key: FileContent | None = None,
    roots: str | None = None,
) -> ssl.SSLContext:
    """Make the context of a client.

    Args:
        ca_file: Authorities to trust instead of ``roots`` or the system's.
        certificate: The client certificate and its chain.
        key: The certificate's private key.

    Raises:
        InvalidArgument: A file cannot be used; the message names it.
    """
    try:
        with nullcontext(roots) if ca_file is None else at_path(ca_file.read()) as authorities:
            context = ssl.create_default_context(cafile=authorities)
    except (ssl.SSLError, OSError) as error:
        named = roots if ca_file is None else ca_file.path
        raise InvalidArgument(
            f"{named} cannot be used as authorities (PEM): {_said(error)}"
        ) from error
    if certificate is not None and key is not None:
        try:
            with at_path(certificate.read()) as chain, at_path(key.read()) as private:
                context.load_cert_chain(chain, private, password=lambda: "")
        except (ssl.SSLError, OSError) as error:
            raise InvalidArgument(
                f"the client certificate {certificate.path} and the key {key.path} cannot be used: "
                f"{_said(error)}"
            ) from error
    return context


def _said(error: OSError) -> str:
    reason = getattr(error, "reason", None)  # of an ssl.SSLError
    return str(reason or error.strerror or error).replace("_", " ").lower()


class _Followed(Generic[T]):
    """A value made of files, and made again when they have changed."""

    def __init__(self, paths: Sequence[Path], load: Callable[[Contents], T]) -> None:
        self._watch = FileWatch(WATCH, paths, load, self._use)
        self._watch.poll()
        self._next = time.monotonic() + CHECK_SECONDS

    def _use(self, value: T) -> None:
        self._value = value

    def value(self) -> T:
        """Return the current value; the old one if the files cannot be used."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + CHECK_SECONDS
            try:
                self._watch.poll()
            except InvalidArgument as error:
                log.warning("credentials of a route not reloaded", reason=str(error))
        return self._value


class RouteAuthentication:
    """The credentials of a route as they are now.

    Raises:
        InvalidArgument: A file cannot be used; the message names it.
    """

    def __init__(
        self, files: RouteCredentials, tls: bool, roots: str | None = None, protocol: str = ""
    ) -> None:
        self._tls: _Followed[ssl.SSLContext] | None = None
        self._token: _Followed[str] | None = None

        if tls:
            self._tls = _Followed(
                _tls_paths(files), lambda contents: _route_tls(files, contents, roots, protocol)
            )
        if files.token_file is not None:
            self._token = _Followed([files.token_file], _authorization)

    @property
    def context(self) -> ssl.SSLContext | None:
        """The context for a new connection; None for clear text."""
        return None if self._tls is None else self._tls.value()

    @property
    def authorization(self) -> str:
        """The value of the header ``authorization``; empty for none."""
        return "" if self._token is None else self._token.value()


def follow(routes: Iterable[ModelRoute], watcher: FileWatcher) -> None:
    """Watch the files of routes for the workers, whose ``RouteAuthentication`` uses them.

    Files that cannot be used are no error here: models of the route are not available meanwhile.
    """
    for files in {route.credentials for route in routes}:
        watches = []
        if paths := _tls_paths(files):
            load = functools.partial(_route_tls, files)
            watches.append(FileWatch(WATCH, paths, load, lambda _: None))
        if files.token_file is not None:
            watches.append(FileWatch(WATCH, [files.token_file], _authorization, lambda _: None))
        for watch in watches:
            with contextlib.suppress(InvalidArgument):
                watch.poll()
            watcher.add(watch)


def _route_tls(
    files: RouteCredentials, contents: Contents, roots: str | None = None, protocol: str = ""
) -> ssl.SSLContext:
    found = iter(contents)
    ca, certificate, key = (None if path is None else next(found) for path in files[:3])
    context = client_context(ca, certificate, key, roots)
    if protocol:
        context.set_alpn_protocols([protocol])
    return context


def _authorization(contents: Contents) -> str:
    return f"Bearer {_token(contents[0])}"


def _tls_paths(files: RouteCredentials) -> list[Path]:
    return [path for path in files[:3] if path is not None]
