"""Credentials shown to other servers: tokens and client certificates, from files that may change.

Kubernetes renews the token of a service account within the hour, and cert-manager certificates.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository.routes_file import RouteCredentials

log = structlog.get_logger("modelport.upstream")

T = TypeVar("T")

#: The interval of the checks whether a file has changed.
CHECK_SECONDS = 1.0
MAX_TOKEN_BYTES = 64 * 1024
_TOKEN = re.compile(rb"[!-~]+\Z")


def read_token(path: Path) -> str:
    """Read the token in a file.

    Raises:
        InvalidArgument: The file cannot be read, or holds no token; the message names it.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOKEN_BYTES).strip()
    except OSError as error:
        raise InvalidArgument(f"the token file {path} cannot be read: {error.strerror}") from error
    if not _TOKEN.match(content):
        raise InvalidArgument(f"the token file {path} must hold one token, and nothing else")
    return content.decode("ascii")


def client_context(
    ca_file: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
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
        context = ssl.create_default_context(cafile=ca_file or roots)
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(
            f"{ca_file or roots} cannot be used as authorities (PEM): {_said(error)}"
        ) from error
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key, password=lambda: "")
        except (ssl.SSLError, OSError) as error:
            raise InvalidArgument(
                f"the client certificate {certificate} and the key {key} cannot be used: "
                f"{_said(error)}"
            ) from error
    return context


def _said(error: OSError) -> str:
    reason = getattr(error, "reason", None)  # of an ssl.SSLError
    return str(reason or error.strerror or error).replace("_", " ").lower()


class _Reloaded(Generic[T]):
    """A value read from files, and read again when they have changed."""

    def __init__(self, paths: Sequence[Path | None], read: Callable[[], T]) -> None:
        self._paths = [path for path in paths if path is not None]
        self._read = read
        self._stats = self._look()
        self._value = read()
        self._next = time.monotonic() + CHECK_SECONDS

    def _look(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                stat = path.stat()
            except OSError:
                found.append(None)
            else:
                found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return found

    def value(self) -> T:
        """Return the current value; the old one if the files cannot be used."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + CHECK_SECONDS
            stats = self._look()
            if stats != self._stats:
                self._stats = stats
                try:
                    self._value = self._read()
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
        self._context: _Reloaded[ssl.SSLContext] | None = None
        self._token: _Reloaded[str] | None = None

        def make() -> ssl.SSLContext:
            context = client_context(files.ca_file, files.client_cert, files.client_key, roots)
            if protocol:
                context.set_alpn_protocols([protocol])
            return context

        if tls:
            self._context = _Reloaded(files[:3], make)
        if files.token_file is not None:
            path = files.token_file
            self._token = _Reloaded([path], lambda: f"Bearer {read_token(path)}")

    @property
    def context(self) -> ssl.SSLContext | None:
        """The context for a new connection; None for clear text."""
        return None if self._context is None else self._context.value()

    @property
    def authorization(self) -> str:
        """The value of the header ``authorization``; empty for none."""
        return "" if self._token is None else self._token.value()
