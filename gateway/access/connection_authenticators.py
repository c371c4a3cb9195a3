"""Callers identified by their connection: client certificates, UNIX users, trusted proxies."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from modelport.gateway.access import credential_headers
from modelport.gateway.access.authentication import Authenticator
from modelport.gateway.access.located_toml import TomlTable
from modelport.gateway.access.principal import CERTIFICATE, ConnectionIdentity, Principal
from modelport.gateway.errors import Unauthenticated
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.toml_tables import InvalidValue, one_of, read_by

MAX_USER_BYTES: Final = 256
MAX_NETWORKS: Final = 1000
_HEADER_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class CertificateIdentitySettings:
    """The table ``[certificates]``."""

    names: str = field(default="san", metadata=read_by(one_of(["san"])))


class CertificateAuthenticator(Authenticator):
    """Recognises the certificate of a client, which TLS has verified, by its alternative names.

    The first name is the principal's. Rules may also name the others.
    """

    of_connection = True

    def __init__(self, table: TomlTable, watcher: FileWatcher) -> None:
        table.read(CertificateIdentitySettings)

    def authenticate(
        self, headers: Mapping[bytes, bytes], connection: ConnectionIdentity
    ) -> Principal | None:
        names = connection.certificate_names
        if names is None:
            raise Unauthenticated("the names in the client certificate cannot be read")
        return _certified(names) if names else None


@functools.lru_cache(maxsize=4096)
def _certified(names: tuple[str, ...]) -> Principal:
    first, *others = [f"{CERTIFICATE}{name}" for name in names]
    return Principal(first, method="certificate", aliases=tuple(others))


class UnixUserAuthenticator(Authenticator):
    """Recognises the user of the process at the other end of a UNIX domain socket."""

    of_connection = True

    def authenticate(
        self, headers: Mapping[bytes, bytes], connection: ConnectionIdentity
    ) -> Principal | None:
        user = connection.user
        return Principal(f"unix:{user}", method="unix") if user else None


def _networks(value: Any) -> tuple[Network, ...]:
    wanted = 'a list of networks, such as ["10.0.0.0/8", "fd00::/8"]'
    if not isinstance(value, list) or not 0 < len(value) <= MAX_NETWORKS:
        raise InvalidValue(wanted)
    try:
        if not all(isinstance(each, str) for each in value):
            raise ValueError
        return tuple(ipaddress.ip_network(each) for each in value)
    except ValueError as error:
        detail = f" ({error})" if str(error) else ""
        raise InvalidValue(f"{wanted}{detail}") from None


def _header(value: Any) -> str:
    name = value.lower() if isinstance(value, str) else ""
    if (
        not name
        or not _HEADER_CHARACTERS.issuperset(name)
        or name.encode() in credential_headers.HEADERS
    ):
        raise InvalidValue("the name of a header that carries no other credential")
    return str(name)


@dataclass(frozen=True)
class TrustedProxySettings:
    """The table ``[trusted_proxy]``."""

    addresses: tuple[Network, ...] = field(metadata=read_by(_networks))
    header: str = field(default="x-forwarded-user", metadata=read_by(_header))


class TrustedProxyAuthenticator(Authenticator):
    """Recognises the user that a proxy has authenticated and names in a header.

    From any other address the header is a forgery, and the request is refused.
    """

    def __init__(self, table: TomlTable, watcher: FileWatcher) -> None:
        settings = table.read(TrustedProxySettings)
        self._name = settings.header
        self._header = settings.header.encode()
        self._networks = settings.addresses
        self._is_trusted = functools.lru_cache(maxsize=1024)(self._is_in_networks)

    def authenticate(
        self, headers: Mapping[bytes, bytes], connection: ConnectionIdentity
    ) -> Principal | None:
        value = headers.get(self._header)
        if value is None:
            return None
        if not self._is_trusted(connection.address):
            raise Unauthenticated(f"'{self._name}' is accepted from trusted proxies only")
        if credential_headers.presented(headers) is not None:
            raise Unauthenticated(credential_headers.MORE_THAN_ONE)
        return Principal(f"proxy:{self._user(value)}", method="proxy")

    def _is_in_networks(self, address: str) -> bool:
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:  # a UNIX domain socket
            return False
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        return any(found in network for network in self._networks)

    def _user(self, value: bytes) -> str:
        """The user in the header's value. A comma separates the users of a repeated header."""
        try:
            user = value.strip(credential_headers.WHITESPACE).decode()
        except UnicodeDecodeError:
            user = ""
        if not user or len(value) > MAX_USER_BYTES or not user.isprintable() or "," in user:
            raise Unauthenticated(f"'{self._name}' does not hold a valid user name")
        return user
